"""RMSprop (https://www.cs.toronto.edu/~tijmen/csc321/slides/lecture_slides_lec6.pdf)."""

from typing import Any

from pydantic import Field

from serried.configs.schema.fields import Number
from serried.configs.schema.registry import register_optimizer
from serried.configs.schema.sections import OptimSection


class RMSpropSection(OptimSection):
    """RMSprop. Weight decay is added to the gradient."""

    weight_decay: Number = Field(default=0.0, ge=0)
    """Weight decay of matrices, times the learning rate; vectors such as norms and biases have none."""
    alpha: Number = Field(default=0.99, ge=0, lt=1)
    """Decay of the running square of the gradient."""
    eps: Number = Field(default=1e-8, gt=0)
    """Added to the root of the running square."""
    momentum: Number = Field(default=0.0, ge=0, lt=1)
    """Share of the last update in the next one."""


@register_optimizer("rmsprop", section=RMSpropSection)
def build(groups: list[dict[str, Any]], section: RMSpropSection) -> Any:
    """Build torch's RMSprop."""
    from torch.optim import RMSprop

    return RMSprop(groups, lr=section.lr, alpha=section.alpha, eps=section.eps, momentum=section.momentum)
