"""Memory that a rank needs, computed from sizes: nothing is allocated."""

from itertools import pairwise
from typing import NamedTuple

import torch
from torch import nn

from serried.configs.schema import RunConfig
from serried.parallel.apply import gathered_type
from serried.parallel.axes import shard_specs
from serried.parallel.mesh import Layout
from serried.parallel.plan import ParallelPlan
from serried.parallel.units import units_of
from serried.trainer.optimizer_state import state_bytes
from serried.trainer.precision import LOW_DTYPES
from serried.trainer.task import Task

_FP32_BYTES = 4


class Memory(NamedTuple):
    """Bytes on the rank that holds the most."""

    parameters: int
    gradients: int
    gradients_while_accumulating: int
    """Whole gradients of a sharded model, beside its shards of them."""
    optimizer_state: int
    gathered: int
    """Whole parameters of a sharded model, while they are used."""
    activations: int
    """What forward and backward of a micro-batch need on top, by estimate; 0: unknown."""

    @property
    def total(self) -> int:
        """All of it."""
        return sum(self)


def planned_memory(
    config: RunConfig, task: Task, layout: Layout, accumulation: int, model: nn.Module, plan: ParallelPlan
) -> Memory:
    """Return the memory of a run of ``config``. ``model`` may be on meta."""
    first = layout.coordinates(0)  # no rank holds more
    shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
    specs = shard_specs(model, plan, layout)
    held = {name: spec.box(layout, first).numel for name, spec in specs.items()}
    trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    share, share_trained = sum(held.values()), sum(held[name] for name in trained)
    whole = sum(shapes[name].numel() for name in trained)
    is_sharded = layout.shard > 1
    holds_whole_gradients = is_sharded and accumulation > 1 and not config.parallel.sync_every_micro_batch
    low_dtype = LOW_DTYPES[config.precision.name]
    return Memory(
        parameters=share * _FP32_BYTES,
        gradients=share_trained * _FP32_BYTES,
        gradients_while_accumulating=whole * _FP32_BYTES if holds_whole_gradients else 0,
        optimizer_state=share_trained * state_bytes(config.optim),
        gathered=_gathered(config, model, plan) if is_sharded else 0,
        activations=task.activation_bytes(
            config.trainer.micro_batch,
            low_dtype or torch.float32,
            autocast=low_dtype == torch.bfloat16 and not is_sharded,  # fp16's products keep no copies of weights
        )
        or 0,
    )


def _gathered(config: RunConfig, model: nn.Module, plan: ParallelPlan) -> int:
    """Bytes of whole parameters a sharded rank holds at once: those in no unit, and two units, one used before the
    other."""
    gathered = gathered_type(plan, LOW_DTYPES[config.precision.name])
    width = gathered.itemsize if gathered else _FP32_BYTES
    names = plan.units or units_of(model)
    units = [sum(p.numel() for name in unit for p in model.get_submodule(name).parameters()) for unit in names]
    whole = sum(parameter.numel() for parameter in model.parameters())
    if not config.parallel.frees_after_forward:
        return whole * width
    return (whole - sum(units) + max(first + second for first, second in pairwise([0, *units]))) * width
