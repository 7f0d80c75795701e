"""Config section of AdamW with 8-bit or 4-bit optimizer state."""

from typing import Any

from serried.configs.schema.registry import register_optimizer
from serried.trainer.optim.algorithms.adamw_config import AdamSection


class QuantizedAdamSection(AdamSection):
    """AdamW with 8-bit or 4-bit optimizer state."""


@register_optimizer("adamw8bit", section=QuantizedAdamSection)
def adamw8bit(groups: list[dict[str, Any]], section: QuantizedAdamSection) -> Any:
    """Build AdamW with 8-bit optimizer state."""
    return _build(groups, section, 8)


@register_optimizer("adamw4bit", section=QuantizedAdamSection)
def adamw4bit(groups: list[dict[str, Any]], section: QuantizedAdamSection) -> Any:
    """Build AdamW with 4-bit optimizer state."""
    return _build(groups, section, 4)


def _build(groups: list[dict[str, Any]], section: QuantizedAdamSection, bits: int) -> Any:
    from serried.trainer.optim.algorithms.quantized_adamw import QuantizedAdamW

    return QuantizedAdamW(groups, bits=bits, lr=section.lr, betas=section.betas, eps=section.eps)
