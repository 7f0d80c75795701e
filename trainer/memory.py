"""Memory that a rank needs, computed from sizes: nothing is allocated."""

from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import nn

from serried.configs.schema import RunConfig
from serried.parallel.apply import gathered_type
from serried.parallel.axes import shard_specs
from serried.parallel.mesh import Layout
from serried.parallel.plan import ParallelPlan
from serried.parallel.shard_specs import ShardSpec
from serried.parallel.units import units_of
from serried.trainer.optimizer_state import state_bytes
from serried.trainer.precision import LOW_DTYPES
from serried.trainer.task import Task

_FP32_BYTES = 4
_FSDP_AXES = {"shard", "context", "expert_shard"}


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
    """Return the memory of a run of ``config``, on the pipeline rank that needs most. ``model`` may be on meta."""
    specs = shard_specs(model, plan, layout)
    activations = _activations(config, task, layout, accumulation)
    memories = [_of_stage(config, layout, accumulation, model, plan, specs, rank) for rank in range(layout.pipeline)]
    return max(memories, key=lambda memory: memory.total)._replace(activations=activations)


def _of_stage(
    config: RunConfig,
    layout: Layout,
    accumulation: int,
    model: nn.Module,
    plan: ParallelPlan,
    specs: Mapping[str, ShardSpec],
    pipeline: int,
) -> Memory:
    """All but the activations, on the ranks at coordinate ``pipeline``."""
    place = layout.coordinates(pipeline * layout.world // layout.pipeline)  # the first of them: no other holds more
    held = {name: spec.box(layout, place).numel for name, spec in specs.items() if pipeline in spec.holders}
    gathered = {name: _unsharded(specs[name]).box(layout, place).numel for name in held}
    trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad and name in held]
    share, share_trained = sum(held.values()), sum(held[name] for name in trained)
    holds_whole_gradients = layout.is_sharded and accumulation > 1 and not config.parallel.sync_every_micro_batch
    return Memory(
        parameters=share * _FP32_BYTES,
        gradients=share_trained * _FP32_BYTES,
        gradients_while_accumulating=sum(gathered[name] for name in trained) * _FP32_BYTES
        if holds_whole_gradients
        else 0,
        optimizer_state=share_trained * state_bytes(config.optim),
        gathered=_gathered(config, model, plan, gathered) if layout.is_sharded else 0,
        activations=0,
    )


def _unsharded(spec: ShardSpec) -> ShardSpec:
    """What FSDP2 gathers."""
    return replace(spec, slices=tuple(each for each in spec.slices if not _FSDP_AXES & {*each.axes}))


def _gathered(config: RunConfig, model: nn.Module, plan: ParallelPlan, sizes: Mapping[str, int]) -> int:
    """Bytes of gathered parameters a rank holds at once: those in no unit, and two units, one used before the other.
    ``sizes``: of the parameters that it gathers."""
    gathered = gathered_type(plan, LOW_DTYPES[config.precision.name])
    width = gathered.itemsize if gathered else _FP32_BYTES
    whole = sum(sizes.values())
    if not config.parallel.frees_after_forward:
        return whole * width
    units = []
    for unit in plan.units or units_of(model):
        names = [f"{name}.{each}" for name in unit for each, _ in model.get_submodule(name).named_parameters()]
        units.append(sum(sizes.get(name, 0) for name in names))
    used = [size for size in units if size]
    return (whole - sum(used) + max(first + second for first, second in pairwise([0, *used, 0]))) * width


def _activations(config: RunConfig, task: Task, layout: Layout, accumulation: int) -> int:
    """Bytes by estimate; 0: unknown. What grows with the tokens is divided over tensor, context and pipeline ranks, of
    which a pipeline rank holds several micro-batches; what does not, over tensor ranks."""
    low_dtype = LOW_DTYPES[config.precision.name]
    # Under autocast copies of the weights are kept too, but by fp16's products.
    autocast = low_dtype == torch.bfloat16 and not layout.is_sharded

    def of(samples: int) -> int:
        return task.activation_bytes(samples, low_dtype or torch.float32, autocast=autocast) or 0

    count = config.trainer.micro_batch
    of_tokens = min(of(2 * count) - of(count), of(count))
    at_once = accumulation if layout.schedule in ("gpipe", "looped_bfs") else min(accumulation, 2 * layout.stages)
    at_once = at_once if layout.schedule != "1f1b" else min(accumulation, layout.pipeline)
    in_flight = of_tokens * at_once // layout.pipeline if layout.pipeline > 1 else of_tokens
    return (of(count) - of_tokens + in_flight // layout.context) // layout.tensor
