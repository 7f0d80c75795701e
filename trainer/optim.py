"""Parameter groups, the optimizer, and the learning rate as a pure function of the step."""

import math
from collections.abc import Iterable

import torch
from torch import Tensor

from serried.configs.schema import OptimSection, ScheduleSection

_STATE_BYTES = 3 * 4  # a weight and its two moments, fp32


def state_bytes(parameters: int) -> int:
    """Bytes of so many parameters with their optimizer state: what a checkpoint takes, over all ranks."""
    return _STATE_BYTES * parameters


def build_optimizer(parameters: Iterable[Tensor], section: OptimSection) -> torch.optim.AdamW:
    """Fused AdamW (https://arxiv.org/abs/1711.05101), weight decay on matrices and not on vectors (norms)."""
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    optimizer = torch.optim.AdamW(
        [
            {"name": "matrices", "params": [p for p in trained if p.ndim >= 2], "weight_decay": section.weight_decay},
            {"name": "norms", "params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0},
        ],
        lr=section.lr,
        betas=section.betas,
        eps=section.eps,
        fused=True,
    )
    for parameter in trained:
        # What AdamW's first step would make: made now, it can be filled from a checkpoint, and memory is known early.
        optimizer.state[parameter] = {
            "step": torch.zeros((), device=parameter.device),
            "exp_avg": torch.zeros_like(parameter, memory_format=torch.preserve_format),
            "exp_avg_sq": torch.zeros_like(parameter, memory_format=torch.preserve_format),
        }
    return optimizer


def learning_rate(step: int, steps: int, peak: float, schedule: ScheduleSection) -> float:
    """Learning rate of optimizer step ``step`` (1 is the first, ``steps`` the last).

    Warm-up is linear and reaches ``peak`` at step ``warmup_steps``; the decay ends at ``min_lr_ratio * peak`` at the
    last step. ``wsd``: https://arxiv.org/abs/2404.06395.
    """
    if step <= schedule.warmup_steps:
        return peak * step / schedule.warmup_steps
    if schedule.name == "constant":
        return peak
    first = schedule.warmup_steps
    if schedule.name == "wsd":
        first = max(first, steps - round(schedule.decay_fraction * steps))
    if step <= first:
        return peak
    progress = (step - first) / (steps - first)
    left = 0.5 * (1 + math.cos(math.pi * progress)) if schedule.name == "cosine" else 1 - progress
    return peak * (schedule.min_lr_ratio + (1 - schedule.min_lr_ratio) * left)
