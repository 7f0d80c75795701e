"""Muon (https://kellerjordan.github.io/posts/muon/): the momentum of a matrix, orthogonalized."""

import math
from typing import Any

import torch
from torch import Tensor
from torch.optim import AdamW

from serried.parallel.held import local
from serried.parallel.matrices import Matrices

_STEPS = 5
_A, _B, _C = 3.4445, -4.7750, 2.0315
"""Coefficients of Keller Jordan, also torch's: singular values come between 0.7 and 1.2 in five steps."""
_LEAST_NORM = 1e-7


def orthogonalized(matrices: Tensor) -> Tensor:
    """Return ``matrices`` [N, rows, columns] with all singular values near 1, by Newton-Schulz iterations."""
    x = matrices.mT if matrices.shape[-2] > matrices.shape[-1] else matrices
    x = x / torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True).clamp(min=_LEAST_NORM)
    for _ in range(_STEPS):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=_B, alpha=_C), x, beta=_A)
    return x.mT if matrices.shape[-2] > matrices.shape[-1] else x


class Muon(torch.optim.Optimizer):
    """Muon for matrices, AdamW for all other parameters.

    As a fused optimizer of torch does, ``step`` reads ``grad_scale`` and ``found_inf`` on the device.
    """

    _step_supports_amp_scaling = True
    grad_scale: Tensor | None = None
    found_inf: Tensor | None = None

    def __init__(
        self, groups: list[dict[str, Any]], matrices: Matrices, *, lr: float, momentum: float, adjust_lr: str,
        betas: tuple[float, float], eps: float,
    ) -> None:  # fmt: skip
        """Groups with ``is_adamw`` have no matrices, all others have nothing else."""
        super().__init__(groups, {"lr": lr, "momentum": momentum, "adjust_lr": adjust_lr})
        self._matrices = matrices
        others = [group for group in self.param_groups if group["is_adamw"]]
        self._adamw = AdamW(others, lr=lr, betas=betas, eps=eps, fused=True) if others else None
        if self._adamw is not None:
            self._adamw.state = self.state

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update all parameters; their gradients are overwritten."""
        assert closure is None
        if self._adamw is not None:
            self._adamw.grad_scale, self._adamw.found_inf = self.grad_scale, self.found_inf  # type: ignore[attr-defined]
            self._adamw.step()
        of = [(each, group) for group in self.param_groups if not group["is_adamw"] for each in group["params"]]
        updates = {parameter: self._momentum(parameter, group["momentum"]) for parameter, group in of}
        self._matrices.replace(updates, orthogonalized)
        for parameter, group in of:
            if parameter.grad is not None:
                weights, lr = local(parameter), group["lr"]
                updated = weights.mul(1 - lr * group["weight_decay"])
                updated.add_(
                    updates[parameter], alpha=-lr * _factor(*self._matrices.shape(parameter), group["adjust_lr"])
                )
                self._set(weights, updated)

    def _momentum(self, parameter: Tensor, momentum: float) -> Tensor:
        """Return what is to be orthogonalized, this rank's part, in place of the gradient."""
        state = self.state[parameter]
        if parameter.grad is None:  # unused: other ranks count on a part all the same
            return torch.zeros_like(local(parameter))
        if not state:
            state["momentum_buffer"] = torch.zeros_like(parameter)
        gradient, mean = local(parameter.grad), local(state["momentum_buffer"])
        if self.grad_scale is not None:
            gradient.div_(self.grad_scale)
        following = mean.lerp(gradient, 1 - momentum)
        gradient.lerp_(following, momentum)  # Nesterov's look ahead
        self._set(mean, following)
        return gradient

    def _set(self, tensor: Tensor, value: Tensor) -> None:
        """Set ``tensor``, unless the step is rejected."""
        tensor.copy_(value if self.found_inf is None else torch.where(self.found_inf.bool(), tensor, value))


def _factor(rows: int, columns: int, adjust_lr: str) -> float:
    if adjust_lr == "original":
        return math.sqrt(max(1, rows / columns))
    return 0.2 * math.sqrt(max(rows, columns))
