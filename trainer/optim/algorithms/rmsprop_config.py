"""RMSprop (https://www.cs.toronto.edu/~tijmen/csc321/slides/lecture_slides_lec6.pdf)."""

from typing import Any

from pydantic import Field

from serried.configs.schema.fields import Number
from serried.configs.schema.registry import register_optimizer
from serried.configs.schema.sections import OptimSection


class RMSpropSection(OptimSection):
    """RMSprop. Weight decay is added to the gradient."""

    weight_decay: Number = Field(default=0.0, ge=0)
    """Weight decay, multiplied by the learning rate. Applied to matrices only, not to vectors such as norms and
    biases."""
    alpha: Number = Field(default=0.99, ge=0, lt=1)
    """Decay rate of the running average of the squared gradient."""
    eps: Number = Field(default=1e-8, gt=0)
    """Term added to the denominator for numerical stability."""
    momentum: Number = Field(default=0.0, ge=0, lt=1)
    """Momentum factor."""


@register_optimizer("rmsprop", section=RMSpropSection)
def build(groups: list[dict[str, Any]], section: RMSpropSection) -> Any:
    """Build torch's RMSprop."""
    from torch.optim import RMSprop

    return RMSprop(groups, lr=section.lr, alpha=section.alpha, eps=section.eps, momentum=section.momentum)
