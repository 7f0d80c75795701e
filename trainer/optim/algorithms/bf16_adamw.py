"""AdamW (https://arxiv.org/abs/1711.05101) for bf16 weights, with fp32 updates and stochastic rounding."""

from typing import Any

import torch
from torch import Tensor

from serried.parallel.layout.local_shards import local
from serried.parallel.optim.stochastic_rounding import Rounding
from serried.trainer.optim.algorithms.base import Transactional


class Bf16AdamW(Transactional):
    """AdamW for bf16 weights, without fp32 master weights. The running averages are fp32."""

    def __init__(
        self, groups: list[dict[str, Any]], rounding: Rounding, *, lr: float, betas: tuple[float, float], eps: float
    ) -> None:
        super().__init__(groups, {"lr": lr})
        self._rounding, self._betas, self._eps = rounding, betas, eps

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update all parameters, in pieces that limit the working memory."""
        assert closure is None
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, parameter.grad, group)

    def _update(self, parameter: Tensor, gradients: Tensor, group: dict[str, Any]) -> None:
        state = self.state[parameter]
        if not state:
            state["step"] = torch.zeros((), device=parameter.device)
            state["exp_avg"], state["exp_avg_sq"] = (torch.zeros_like(parameter, dtype=torch.float32) for _ in "12")
        self.set(state["step"], state["step"] + 1)
        step, (beta1, beta2) = state["step"], self._betas
        tensors = [local(tensor) for tensor in (parameter, gradients, state["exp_avg"], state["exp_avg_sq"])]
        for place in self._rounding.pieces(parameter):
            weights, gradient, mean, square = (tensor[place] for tensor in tensors)
            gradient = gradient.bfloat16().float()  # FSDP2's gradients are bf16: round on every layout
            if self.grad_scale is not None:
                gradient /= self.grad_scale
            new_mean = mean.lerp(gradient, 1 - beta1)
            new_square = square.lerp(gradient.square_(), 1 - beta2)
            denominator = (new_square / (1 - beta2**step)).sqrt_().add_(self._eps)
            change = (new_mean / (1 - beta1**step)).div_(denominator)
            updated = weights.float().mul(1 - group["lr"] * group["weight_decay"]).sub_(change, alpha=group["lr"])
            self.set(mean, new_mean)
            self.set(square, new_square)
            self.set(weights, self._rounding.round(updated, parameter, place, step))
