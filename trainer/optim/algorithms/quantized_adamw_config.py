"""AdamW whose optimizer state is held in 8 or 4 bits."""

from typing import Any

from serried.configs.schema.registry import register_optimizer
from serried.trainer.optim.algorithms.adamw_config import AdamSection


class QuantizedAdamSection(AdamSection):
    """AdamW with optimizer state of few bits."""


@register_optimizer("adamw8bit", section=QuantizedAdamSection)
def adamw8bit(groups: list[dict[str, Any]], section: QuantizedAdamSection) -> Any:
    """Build AdamW with 8 bits."""
    return _build(groups, section, 8)


@register_optimizer("adamw4bit", section=QuantizedAdamSection)
def adamw4bit(groups: list[dict[str, Any]], section: QuantizedAdamSection) -> Any:
    """Build AdamW with 4 bits."""
    return _build(groups, section, 4)


def _build(groups: list[dict[str, Any]], section: QuantizedAdamSection, bits: int) -> Any:
    from serried.trainer.optim.algorithms.quantized_adamw import QuantizedAdamW

    return QuantizedAdamW(groups, bits=bits, lr=section.lr, betas=section.betas, eps=section.eps)
