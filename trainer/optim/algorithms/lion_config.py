"""Lion (https://arxiv.org/abs/2302.06675): the sign of a running mean of the gradient."""

from typing import Any

from serried.configs.schema.registry import register_optimizer
from serried.configs.schema.sections import Number, OptimSection


class LionSection(OptimSection):
    """Lion. A third to a tenth of AdamW's learning rate suits it, with three to ten times its weight decay."""

    betas: tuple[Number, Number] = (0.9, 0.99)
    """Weight of the running mean in the update, and decay of the running mean."""


@register_optimizer("lion", section=LionSection)
def build(groups: list[dict[str, Any]], section: LionSection) -> Any:
    """Build Lion."""
    import torch

    class Lion(torch.optim.Optimizer):  # made here: composing a config reads the section above without torch
        @torch.no_grad()
        def step(self, closure: None = None) -> None:  # type: ignore[override]
            assert closure is None
            for group in self.param_groups:
                for parameter in group["params"]:
                    if parameter.grad is not None:
                        self._update(parameter, **group)

        def _update(
            self, parameter: torch.Tensor, lr: float, weight_decay: float, betas: tuple[float, float], **_: Any
        ) -> None:
            state, gradient = self.state[parameter], parameter.grad
            assert gradient is not None
            if not state:
                state["exp_avg"] = torch.zeros_like(parameter)
            mean = state["exp_avg"]
            parameter.mul_(1 - lr * weight_decay)
            parameter.add_(mean.lerp(gradient, 1 - betas[0]).sign_(), alpha=-lr)
            mean.lerp_(gradient, 1 - betas[1])

    return Lion(groups, {"lr": section.lr, "betas": section.betas})
