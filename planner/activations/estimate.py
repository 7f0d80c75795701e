"""Activation memory, estimated by the formula of the model's family."""

from collections.abc import Callable, Iterable, Mapping
from functools import partial

import torch
from torch import nn

from serried.configs.hugging_face.model_folder import teacher_section
from serried.configs.schema.models import ModelSection
from serried.configs.schema.sections import RunConfig
from serried.parallel.activation_checkpoint import Mix
from serried.parallel.layout.mesh import Layout
from serried.parallel.plan import ParallelPlan
from serried.planner.activations.families import formula_of
from serried.planner.activations.terms import Share
from serried.trainer.memory.activation_budget import MODES, chosen_mix
from serried.trainer.memory.gpu_norms import is_for_gpus
from serried.trainer.precision import LOW_DTYPES, frozen_type, trained_type
from serried.trainer.task import RunTask

Estimate = Callable[[Share], int]
"""Function that returns the bytes of a rank's activations for its share of the work."""


def activation_estimate(
    config: RunConfig, layout: Layout, plan: ParallelPlan, model: nn.Module, *, is_rough: bool = False
) -> Estimate | None:
    """Return the estimate for a micro-batch of ``config``; None if the model's family has no formula.

    Args:
        model: the unsharded model.
        is_rough: leave out the copies of weights under autocast.
    """
    section, data = getattr(config, "model", None), getattr(config, "data", None)
    rows = _vocabulary_rows(model, plan)
    formula = formula_of(section) if isinstance(section, ModelSection) else None
    if data is None or formula is None or rows is None:
        return None
    low_dtype = LOW_DTYPES[config.precision.name]
    is_whole = not trained_type(config) and (frozen_type(config, plan) is None or config.task.has_teacher)
    # Matrix products in fp16 keep no copies of weights.
    autocast = not is_rough and low_dtype == torch.bfloat16 and not layout.is_sharded and is_whole
    samples, dtype = config.trainer.micro_batch, low_dtype or torch.float32
    sequences = samples * (2 if data.format == "preference" else 1)
    own = partial(formula, section, rows, sequences, data.sequence_length, dtype, autocast)
    if not config.task.has_teacher:
        return own
    teacher = teacher_section(str(getattr(config.task, "teacher", None)))
    its = formula_of(teacher)
    if its is None:
        return None
    return partial(
        _with_teacher,
        own,
        partial(its, teacher, teacher.vocab_size, samples, data.sequence_length, dtype, False),
        max(1, teacher.layers),
    )


def _with_teacher(own: Estimate, its: Estimate, layers: int, share: Share) -> int:
    """Return the activation bytes of a student and its teacher. Only one of the teacher's ``layers`` is held at a
    time."""
    once = share._replace(moment="", blocks=1 / layers, checkpoint="none", rest="none")
    return own(share) + its(once)


def _vocabulary_rows(model: nn.Module, plan: ParallelPlan) -> int | None:
    """Return the number of rows of the embedding; None if the plan names no embedding."""
    for name, module in model.named_modules():
        if plan.role(name) == "vocabulary" and isinstance(module.weight, torch.Tensor):
            return len(module.weight)
    return None


def share_of_blocks(config: RunConfig, layout: Layout) -> Share:
    """Return each rank's share of the work on a block."""
    adapter = config.adapter
    return Share(
        context=layout.context,
        keys=layout.context if layout.context_method == "ring" else 1,
        tensor=layout.tensor,
        sequence=layout.tensor if layout.sequence else 1,
        trains_weights=adapter.method == "none",
        adapters=max(adapter.rank, *adapter.rank_pattern.values(), 0) if adapter.method != "none" else 0,
        fuses_norms=is_for_gpus(config),
    )


def planned_mix(
    config: RunConfig, task: RunTask, layout: Layout, plan: ParallelPlan, model: nn.Module, *, measures: bool = True
) -> Mix | None:
    """Return the activation checkpointing modes that stay within ``trainer.activation_memory_budget``.

    Return None if there is no budget, or if there is no formula and ``measures`` is false.

    Raises:
        UserError: see ``chosen_mix``.
    """
    if config.trainer.activation_memory_budget == 1:
        return None
    kept = _kept_by_blocks(config, layout, plan, model)
    return None if kept is None and not measures else chosen_mix(config, task, layout, plan, model, kept)


def _kept_by_blocks(
    config: RunConfig, layout: Layout, plan: ParallelPlan, model: nn.Module
) -> Mapping[str, float] | None:  # fmt: skip
    """Return the bytes that all blocks keep, by mode: the difference to a model with twice as many blocks."""
    estimate = activation_estimate(config, layout, plan, model)
    if estimate is None:
        return None
    share, kept = share_of_blocks(config, layout)._replace(moment="start"), {}
    for mode in MODES:
        once, twice = (estimate(share._replace(checkpoint=mode, blocks=times)) for times in (1, 2))
        kept[mode] = twice - once
    return kept


def number_of_firsts(mix: Mix, layout: Layout, blocks: int, stages: Iterable[int]) -> int:
    """Return the number of blocks in ``stages`` that use the first mode of ``mix``. ``blocks``: number of blocks of the
    full model."""
    return sum(mix.firsts(len(layout.block_range(stage, blocks))) for stage in stages)
