"""Stochastic gradient descent, with momentum."""

from typing import Any

from pydantic import Field, model_validator

from serried.configs.schema.fields import Number
from serried.configs.schema.registry import register_optimizer
from serried.configs.schema.sections import OptimSection


class SGDSection(OptimSection):
    """SGD. Weight decay is added to the gradient."""

    weight_decay: Number = Field(default=0.0, ge=0)
    """Weight decay, multiplied by the learning rate. Applied to matrices only, not to vectors such as norms and
    biases."""
    momentum: Number = Field(default=0.9, ge=0, lt=1)
    """Momentum factor. With 0 there is no momentum and no optimizer state."""
    dampening: Number = Field(default=0.0, ge=0, lt=1)
    """Dampening of the momentum."""
    nesterov: bool = False
    """Use Nesterov momentum."""

    @model_validator(mode="after")
    def _nesterov_fits(self) -> "SGDSection":
        if self.nesterov and (self.dampening or not self.momentum):
            raise ValueError(
                "optim.nesterov=true needs optim.momentum above 0 and optim.dampening=0, but got "
                f"optim.momentum={self.momentum:g} and optim.dampening={self.dampening:g}; use "
                f"optim.momentum={self.momentum or 0.9:g} optim.dampening=0"
            )
        return self


@register_optimizer("sgd", section=SGDSection)
def build(groups: list[dict[str, Any]], section: SGDSection) -> Any:
    """Build torch's SGD."""
    # Not fused: after a rejected first step, torch's fused kernel would have an uninitialized momentum.
    from torch.optim import SGD

    return SGD(groups, lr=section.lr, momentum=section.momentum, dampening=section.dampening, nesterov=section.nesterov)
