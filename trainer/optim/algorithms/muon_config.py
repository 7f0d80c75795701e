"""Muon (https://kellerjordan.github.io/posts/muon/): orthogonalized momentum for matrices, AdamW for the rest."""

from typing import Any, Literal

from pydantic import Field

from serried.configs.schema.fields import Number
from serried.configs.schema.registry import register_optimizer
from serried.configs.schema.sections import OptimSection


class MuonSection(OptimSection):
    """Muon for the matrices of the blocks, AdamW for embeddings, head, norms and biases."""

    momentum: Number = Field(default=0.95, ge=0, lt=1)
    """Momentum factor: the weight of earlier gradients in the next update."""
    adjust_lr: Literal["match_rms_adamw", "original"] = "match_rms_adamw"
    """Scaling of the learning rate of a matrix. ``match_rms_adamw``: 0.2 sqrt(larger dim), for learning rates tuned
    for AdamW (arXiv 2502.16982). ``original``: sqrt(max(1, outputs / inputs))."""
    betas: tuple[Number, Number] = (0.9, 0.95)
    """Decay rates of AdamW's running averages."""
    eps: Number = Field(default=1e-8, gt=0)
    """Term added to AdamW's denominator for numerical stability."""


@register_optimizer("muon", section=MuonSection)
def build(groups: list[dict[str, Any]], section: MuonSection, matrices: Any) -> Any:
    """Build Muon."""
    from serried.trainer.optim.algorithms.muon import Muon

    return Muon(
        groups, matrices, lr=section.lr, momentum=section.momentum, adjust_lr=section.adjust_lr, betas=section.betas,
        eps=section.eps,
    )  # fmt: skip
