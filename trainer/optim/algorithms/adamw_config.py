"""AdamW (https://arxiv.org/abs/1711.05101), also for weights in bf16, and Adam (https://arxiv.org/abs/1412.6980)."""

from typing import Any

from pydantic import Field

from serried.configs.schema.fields import Number
from serried.configs.schema.registry import register_optimizer
from serried.configs.schema.sections import OptimSection


class AdamSection(OptimSection):
    """Adam and AdamW."""

    betas: tuple[Number, Number] = (0.9, 0.95)
    """Decay rates of the running averages of the gradient and its square."""
    eps: Number = Field(default=1e-8, gt=0)
    """Term added to the denominator for numerical stability."""


@register_optimizer("adamw", section=AdamSection)
def adamw(groups: list[dict[str, Any]], section: AdamSection) -> Any:
    """Build AdamW: weight decay is decoupled from the gradient."""
    from torch.optim import AdamW

    return AdamW(groups, lr=section.lr, betas=section.betas, eps=section.eps, fused=True)


@register_optimizer("adam", section=AdamSection)
def adam(groups: list[dict[str, Any]], section: AdamSection) -> Any:
    """Build Adam: weight decay is added to the gradient."""
    from torch.optim import Adam

    return Adam(groups, lr=section.lr, betas=section.betas, eps=section.eps, fused=True)


@register_optimizer("adamw_bf16", section=AdamSection)
def adamw_bf16(groups: list[dict[str, Any]], section: AdamSection, rounding: Any) -> Any:
    """Build AdamW for weights in bf16."""
    from serried.trainer.optim.algorithms.bf16_adamw import Bf16AdamW

    return Bf16AdamW(groups, rounding, lr=section.lr, betas=section.betas, eps=section.eps)
