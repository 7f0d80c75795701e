"""Muon optimizer (https://kellerjordan.github.io/posts/muon/): updates matrices by their orthogonalized momentum."""

import math
from typing import Any

import torch
from torch import Tensor

from serried.parallel.layout.local_shards import local
from serried.parallel.optim.matrix_exchange import Matrices
from serried.trainer.optim.algorithms.base import BesideAdamW

_STEPS = 5
_A, _B, _C = 3.4445, -4.7750, 2.0315
"""Newton-Schulz coefficients of Keller Jordan, also used by torch. Five steps bring singular values between 0.7 and
1.2."""
_LEAST_NORM = 1e-7


def orthogonalized(matrices: Tensor) -> Tensor:
    """Return ``matrices`` [N, rows, columns] with all singular values near 1, by Newton-Schulz iterations."""
    x = matrices.mT if matrices.shape[-2] > matrices.shape[-1] else matrices
    x = x / torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True).clamp(min=_LEAST_NORM)
    for _ in range(_STEPS):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=_B, alpha=_C), x, beta=_A)
    return x.mT if matrices.shape[-2] > matrices.shape[-1] else x


class Muon(BesideAdamW):
    """Muon for matrices, AdamW for all other parameters."""

    def __init__(
        self, groups: list[dict[str, Any]], matrices: Matrices, *, lr: float, momentum: float, adjust_lr: str,
        betas: tuple[float, float], eps: float,
    ) -> None:  # fmt: skip
        defaults = {"lr": lr, "momentum": momentum, "adjust_lr": adjust_lr}
        super().__init__(groups, matrices.__contains__, defaults, betas, eps)
        self._matrices = matrices

    def update(self, own: list[tuple[Tensor, dict[str, Any]]]) -> None:
        """Update the matrices. Their gradients are overwritten."""
        updates = {parameter: self._momentum(parameter, group["momentum"]) for parameter, group in own}
        self._matrices.replace(updates, orthogonalized)
        for parameter, group in own:
            if parameter.grad is not None:
                weights, lr = local(parameter), group["lr"]
                updated = weights.mul(1 - lr * group["weight_decay"])
                factor = _factor(*self._matrices.shape(parameter), group["adjust_lr"])
                self.set(weights, updated.add_(updates[parameter], alpha=-lr * factor))

    def _momentum(self, parameter: Tensor, momentum: float) -> Tensor:
        """Update the momentum, and return this rank's shard of the matrix to orthogonalize."""
        state = self.state[parameter]
        if parameter.grad is None:  # unused, but the other ranks still need a shard
            return torch.zeros_like(local(parameter))
        if not state:
            state["momentum_buffer"] = torch.zeros_like(parameter)
        gradient, mean = local(parameter.grad), local(state["momentum_buffer"])
        if self.grad_scale is not None:
            gradient.div_(self.grad_scale)
        following = mean.lerp(gradient, 1 - momentum)
        gradient.lerp_(following, momentum)  # Nesterov momentum
        self.set(mean, following)
        return gradient


def _factor(outputs: int, inputs: int, adjust_lr: str) -> float:
    if adjust_lr == "original":
        return math.sqrt(max(1, outputs / inputs))
    return 0.2 * math.sqrt(max(outputs, inputs))
