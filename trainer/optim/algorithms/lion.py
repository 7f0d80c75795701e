"""Lion optimizer (https://arxiv.org/abs/2302.06675): updates by the sign of a running mean of the gradient."""

from typing import Any

import torch
from torch import Tensor


class Lion(torch.optim.Optimizer):
    """Lion optimizer. Its state is a running mean of the gradient."""

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update all parameters."""
        assert closure is None
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, **group)

    def _update(self, parameter: Tensor, lr: float, weight_decay: float, betas: tuple[float, float], **_: Any) -> None:
        state, gradient = self.state[parameter], parameter.grad
        assert gradient is not None
        if not state:
            state["exp_avg"] = torch.zeros_like(parameter)
        mean = state["exp_avg"]
        parameter.mul_(1 - lr * weight_decay)
        parameter.add_(mean.lerp(gradient, 1 - betas[0]).sign_(), alpha=-lr)
        mean.lerp_(gradient, 1 - betas[1])
