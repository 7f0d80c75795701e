"""Schedules: the learning rate as a pure function of the step, after a linear warm-up."""

import math

from pydantic import Field

from serried.configs.schema.fields import Number
from serried.configs.schema.registry import register_schedule
from serried.configs.schema.sections import ScheduleSection


class ConstantSection(ScheduleSection):
    """Warm-up, then constant."""


class DecaySection(ScheduleSection):
    """Warm-up, then a decay over the rest of the run."""

    min_lr_ratio: Number = Field(default=0.1, ge=0, le=1)
    """Learning rate at the last step, as a fraction of ``optim.lr``."""


class WSDSection(DecaySection):
    """Warm-up, then constant, then a linear decay (https://arxiv.org/abs/2404.06395)."""

    decay_fraction: Number = Field(default=0.1, gt=0, le=1)
    """Fraction of all steps spent decaying."""


@register_schedule("constant", section=ConstantSection)
def constant(step: int, steps: int, peak: float, section: ConstantSection) -> float:
    """Return the constant learning rate ``peak``."""
    del step, steps, section
    return peak


@register_schedule("cosine", section=DecaySection)
def cosine(step: int, steps: int, peak: float, section: DecaySection) -> float:
    """Return the learning rate of a cosine decay."""
    progress = (step - section.warmup_steps) / (steps - section.warmup_steps)
    return _between(peak, section.min_lr_ratio, 0.5 * (1 + math.cos(math.pi * progress)))


@register_schedule("linear", section=DecaySection)
def linear(step: int, steps: int, peak: float, section: DecaySection) -> float:
    """Return the learning rate of a linear decay."""
    return _between(peak, section.min_lr_ratio, 1 - (step - section.warmup_steps) / (steps - section.warmup_steps))


@register_schedule("wsd", section=WSDSection)
def wsd(step: int, steps: int, peak: float, section: WSDSection) -> float:
    """Return a learning rate that is constant, and decays linearly over the last ``decay_fraction`` of the steps."""
    first = max(section.warmup_steps, steps - round(section.decay_fraction * steps))
    if step <= first:
        return peak
    return _between(peak, section.min_lr_ratio, 1 - (step - first) / (steps - first))


def _between(peak: float, min_lr_ratio: float, left: float) -> float:
    return peak * (min_lr_ratio + (1 - min_lr_ratio) * left)
