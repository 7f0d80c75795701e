"""Config section of Adafactor (https://arxiv.org/abs/1804.04235), with factored running squares for each matrix."""

from typing import Any

from pydantic import Field

from serried.configs.schema.fields import Number
from serried.configs.schema.registry import register_optimizer
from serried.configs.schema.sections import OptimSection


class AdafactorSection(OptimSection):
    """Adafactor. ``lr`` is relative to the root mean square of each parameter."""

    weight_decay: Number = Field(default=0.0, ge=0)
    """Weight decay, multiplied by the learning rate. Applied to matrices only, not to vectors such as norms and
    biases."""
    beta2_decay: Number = Field(default=-0.8, le=0)
    """Exponent of the step count in the decay rate of the running square, 1 - step ** beta2_decay."""
    clip_threshold: Number = Field(default=1.0, ge=1)
    """Maximum root mean square of an update. Larger updates are scaled down to it."""


@register_optimizer("adafactor", section=AdafactorSection)
def build(groups: list[dict[str, Any]], section: AdafactorSection, sums: Any) -> Any:
    """Build Adafactor."""
    from serried.trainer.optim.algorithms.adafactor import Adafactor

    return Adafactor(
        groups, sums, lr=section.lr, beta2_decay=section.beta2_decay, clip_threshold=section.clip_threshold
    )
