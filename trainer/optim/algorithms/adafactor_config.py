"""Adafactor (https://arxiv.org/abs/1804.04235): a row and a column of running squares for each matrix."""

from typing import Any

from pydantic import Field

from serried.configs.schema.fields import Number
from serried.configs.schema.registry import register_optimizer
from serried.configs.schema.sections import OptimSection


class AdafactorSection(OptimSection):
    """Adafactor. ``lr`` is relative to the size of the parameters."""

    weight_decay: Number = Field(default=0.0, ge=0)
    """Weight decay of matrices, times the learning rate; vectors such as norms and biases have none."""
    beta2_decay: Number = Field(default=-0.8, le=0)
    """The running square decays by 1 - step to this power."""
    clip_threshold: Number = Field(default=1.0, ge=1)
    """Updates with a larger root mean square are scaled down to it."""


@register_optimizer("adafactor", section=AdafactorSection)
def build(groups: list[dict[str, Any]], section: AdafactorSection, sums: Any) -> Any:
    """Build Adafactor."""
    from serried.trainer.optim.algorithms.adafactor import Adafactor

    return Adafactor(
        groups, sums, lr=section.lr, beta2_decay=section.beta2_decay, clip_threshold=section.clip_threshold
    )
