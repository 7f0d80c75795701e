"""Config section of the Lion optimizer."""

from typing import Any

from serried.configs.schema.fields import Number
from serried.configs.schema.registry import register_optimizer
from serried.configs.schema.sections import OptimSection


class LionSection(OptimSection):
    """Lion. Use a third to a tenth of AdamW's learning rate, with three to ten times AdamW's weight decay."""

    betas: tuple[Number, Number] = (0.9, 0.99)
    """Weight of the running mean in the update, and decay of the running mean."""


@register_optimizer("lion", section=LionSection)
def build(groups: list[dict[str, Any]], section: LionSection) -> Any:
    """Build Lion."""
    from serried.trainer.optim.algorithms.lion import Lion

    return Lion(groups, {"lr": section.lr, "betas": section.betas})
