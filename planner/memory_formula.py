"""Formulas for the memory of a rank and the communication of FSDP2. Nothing is allocated."""

import itertools
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from math import ceil, prod
from typing import NamedTuple

import torch
from torch import nn

from serried.configs.schema.registry import takes
from serried.configs.schema.sections import RunConfig
from serried.parallel.activation_checkpoint import Mix
from serried.parallel.axes.model_axes import shard_specs
from serried.parallel.fsdp_units import units_of
from serried.parallel.layout.mesh import ALL_FORWARDS_FIRST, ZERO_BUBBLE_SCHEDULES, Layout
from serried.parallel.nf4 import is_packed
from serried.parallel.optim.matrix_exchange import matrix_names, sent_elements
from serried.parallel.parallelize import gathered_type
from serried.parallel.plan import ParallelPlan
from serried.planner.activations.estimate import (
    activation_estimate,
    number_of_firsts,
    planned_mix,
    share_of_blocks,
)
from serried.planner.activations.terms import Share
from serried.planner.memory_peaks import How, Moment, Part, Parts, moments
from serried.planner.plan_terms import IN_HOST_MEMORY, Memory
from serried.planner.traffic import Exchanges, Flow, Unit, fsdp_flows
from serried.trainer.optim.optimizer_state import state_bytes_by_name
from serried.trainer.precision import LOW_DTYPES, frozen_type, gathered_in_float8, trained_type
from serried.trainer.task import RunTask

RECEIVE_BUFFERS = "receive buffers"
"""Name of the pipeline receive buffers among the parts of a rank's memory."""
WHY_RECEIVE_BUFFERS = (
    "torch allocates one per micro-batch and stage; to need fewer, use a lower trainer.global_batch, more data ranks, "
    "or parallel.stages_per_rank=1"
)
_FP32_BYTES = 4
_WAITS_FOR_THE_NEXT_BACKWARD = ("interleaved_zero_bubble", "zbv")
"""Schedules in which FSDP2 upcasts and accumulates weight gradients only in the stage's next backward."""


class FormulaMemory(NamedTuple):
    """Memory in bytes of the rank that needs the most."""

    parameters: int
    gradients: int
    gradients_while_accumulating: int
    """Unsharded gradients of a sharded model, in addition to ``gradients``."""
    optimizer_state: int
    gathered: int
    """Unsharded parameters of a sharded model while they are used."""
    activations: int
    """Estimated peak of the activations in forward and backward; 0: unknown."""
    received: int
    """Part of the activations: pipeline receive buffers. torch allocates one for each micro-batch of a step."""
    apart: Mapping[str, int]
    """Bytes in host memory by part."""
    peak: Moment
    """Moment of peak memory."""

    @property
    def on_host(self) -> int:
        """Bytes in host memory."""
        return sum(self.apart.values())

    @property
    def total(self) -> int:
        """Bytes at the peak."""
        return self.parameters + self.optimizer_state + int(self.peak.bytes)

    @property
    def is_of_parts(self) -> bool:
        """Whether the peak is the sum of all parts."""
        gradients = self.gradients + self.gradients_while_accumulating
        return gradients + self.gathered + self.activations == int(self.peak.bytes)


def planned_memory(config: RunConfig, task: RunTask, accumulation: int, sizes: "Sizes") -> FormulaMemory:
    """Return the memory of the rank that needs the most in a run of ``config``."""
    stages = range(sizes.layout.pipeline)
    each = (_of_stages(config, task, accumulation, sizes, pipeline) for pipeline in stages)
    return max(each, key=lambda memory: memory.total)


def formula_memory(found: FormulaMemory) -> Memory:
    """Return the parts of ``found`` at its peak."""
    peak, received = found.peak, min(found.received, found.peak.activations)
    parts = {
        "parameters": found.parameters,
        "optimizer state": found.optimizer_state,
        **found.apart,
        "gradients": peak.gradients,
        "gathered": peak.gathered,
        "activations": peak.activations - received,
        "gradients on their way": peak.passing,
        RECEIVE_BUFFERS: received,
    }
    return Memory({kind: part for kind, part in parts.items() if part}, peak.phase, {})


def planned_flows(config: RunConfig, accumulation: int, sizes: "Sizes") -> tuple[Flow, ...]:
    """Return the communication of FSDP2, DDP and the optimizer in a step, for the pipeline rank that sends the most."""
    layout = sizes.layout
    how = Exchanges(
        accumulation,
        config.parallel.frees_after_forward and not sizes.plan.is_one_unit,
        config.parallel.sync_every_micro_batch,
        sizes.gathered_width,
    )
    stages = [
        (*fsdp_flows(layout, *sizes.units(pipeline), how), *_optimizer_flows(config, sizes, pipeline))
        for pipeline in range(layout.pipeline)
    ]
    return max(stages, key=lambda flows: sum(flow.bytes for flow in flows))


def _optimizer_flows(config: RunConfig, sizes: "Sizes", pipeline: int) -> Iterator[Flow]:
    layout, ranks = sizes.layout, sizes.layout.world // sizes.layout.pipeline
    group = "stage" if layout.pipeline > 1 else "world"
    here = {name: spec for name, spec in sizes.specs.items() if sizes.of[name].is_trained and pipeline in spec.holders}
    if ranks > 1 and takes(config.optim, "matrices"):
        shapes = {name: spec.shape for name, spec in sizes.specs.items()}
        names = matrix_names(shapes, sizes.plan.blocks_in(sizes.model))
        elements, calls = sent_elements([spec for name, spec in here.items() if name in names], layout, pipeline)
        width = _FP32_BYTES if LOW_DTYPES[config.precision.name] is None else torch.bfloat16.itemsize
        yield Flow(group, "all_to_all", "end", width * elements, calls, ranks)
    if takes(config.optim, "sums"):
        # Sums of rows and columns, and two sums per parameter. Parameters shared by two stages are summed separately.
        for is_shared in (False, True):
            divided = [
                spec.shape for spec in here.values()
                if layout.size(spec.sliced_axes) > 1 and (len(spec.holders) > 1) == is_shared
            ]  # fmt: skip
            matrices = [shape for shape in divided if len(shape) > 1]
            sums = [sum(prod(shape[:-2]) * (shape[-2] + shape[-1]) for shape in matrices), 2 * len(divided)]
            sent = sum(2 * _FP32_BYTES * count * (ranks - 1) // ranks for count in sums)
            if sent:
                yield Flow(group, "all_reduce", "end", sent, sum(count > 0 for count in sums), ranks)


class ParameterSize(NamedTuple):
    """Sizes of one parameter on a rank that holds it."""

    held: int
    """Number of elements that the rank holds."""
    shape: tuple[int, ...]
    """Shape that FSDP2 shards, after sharding on the other axes."""
    state_bytes: float
    """Bytes of optimizer state, if the parameter is trained."""
    average_bytes: int
    """Bytes of the weight average, if the parameter is trained."""
    is_trained: bool
    is_packed: bool
    """Whether it is stored in 4 bits."""
    is_float8: bool
    """Whether FSDP2 gathers it in float8."""

    @property
    def gathered(self) -> int:
        """Number of elements that FSDP2 gathers."""
        return prod(self.shape)


class Sizes:
    """Sizes of the parameters of a model on a layout, from their shard specs. The model may be on the meta device.

    Raises ``UserError`` if the plan does not fit the layout.
    """

    def __init__(self, config: RunConfig, layout: Layout, model: nn.Module, plan: ParallelPlan) -> None:
        self.plan, self.layout, self.model = plan, layout, model
        self._units = () if plan.is_one_unit else plan.units or units_of(model)
        self.specs = shard_specs(model, plan, layout)
        low = gathered_type(plan, LOW_DTYPES[config.precision.name]) if layout.is_sharded else None
        self.trained_width = (trained_type(config) or torch.float32).itemsize
        self.gathered_width = low.itemsize if low else self.trained_width
        """Bytes per gathered element, unless FSDP2 gathers it in float8."""
        average_width = _FP32_BYTES if config.trainer.ema_decay else 0
        in_float8 = gathered_in_float8(config, model, plan, layout)
        states = state_bytes_by_name(
            config.optim, {name: spec.shape for name, spec in self.specs.items()}, plan.blocks_in(model)
        )
        first = layout.coordinates(0)  # no other rank holds more
        parameters = dict(model.named_parameters())
        self.of: dict[str, ParameterSize] = {}
        for name, spec in self.specs.items():
            held = spec.box(layout, first).numel
            kept = tuple(part for part in spec.slices if not {"shard", "expert_shard"} & {*part.axes})
            self.of[name] = ParameterSize(
                held,
                replace(spec, slices=kept).box(layout, first).sizes,
                state_bytes=held * states[name].per_element + states[name].whole,
                average_bytes=held * average_width,
                is_trained=parameters[name].requires_grad,
                is_packed=is_packed(parameters[name]),
                is_float8=name in in_float8,
            )

    def width(self, name: str, frozen: torch.dtype | None) -> int:
        """Return the bytes per element of a parameter. ``frozen``: dtype of frozen weights."""
        size = self.of[name]
        if size.is_packed:
            return torch.bfloat16.itemsize
        return self.trained_width if size.is_trained else (frozen or torch.float32).itemsize

    def units(self, pipeline: int) -> tuple[list[Unit], Unit]:
        """Return the FSDP2 units of pipeline rank ``pipeline``, and its parameters that are in no unit."""
        found, rest = self._by_unit(pipeline)
        units = (self._unit([name for name in names if self.specs[name].shape]) for names in found)
        return [unit for unit in units if unit.shapes], self._unit([name for name in rest if self.specs[name].shape])

    def _unit(self, names: Collection[str]) -> Unit:
        sizes = [self.of[name] for name in names]
        return Unit(
            [size.shape for size in sizes],
            [size.shape for size in sizes if size.is_trained],
            [size.shape for size in sizes if size.is_float8],
        )

    def parts(self, pipeline: int) -> Parts:
        """Return the groups of parameters that are gathered together on pipeline rank ``pipeline``."""
        (found, rest), blocks = self._by_unit(pipeline), {*self.plan.blocks_in(self.model)}
        before: list[Part] = []
        middle: list[Part] = []
        after: list[Part] = []
        for unit, names in zip(self._units, found, strict=True):
            kind = middle if not blocks.isdisjoint(unit) else after if middle or not blocks else before
            kind += [self._part(names, pipeline)] if names else []
        return Parts(before, middle, after, self._part(rest, pipeline))

    def _by_unit(self, pipeline: int) -> tuple[list[list[str]], list[str]]:
        """Return the names of the parameters in each unit of pipeline rank ``pipeline``, and the names in no unit."""
        number_of = {module: number for number, unit in enumerate(self._units) for module in unit}
        found: list[list[str]] = [[] for _ in self._units]
        rest: list[str] = []
        for name, spec in self.specs.items():
            if pipeline in spec.holders:
                above = itertools.accumulate(name.split(".")[:-1], "{}.{}".format)
                number = min((number_of[module] for module in above if module in number_of), default=None)
                (rest if number is None else found[number]).append(name)
        return found, rest

    def _part(self, names: Sequence[str], pipeline: int) -> Part:
        copies = {name: self.specs[name].holders.count(pipeline) for name in names}
        sizes = [(self.of[name], copies[name]) for name in names]
        trained = [(size, count) for size, count in sizes if size.is_trained]
        return Part(
            sum(count * size.gathered * (1 if size.is_float8 else self.gathered_width) for size, count in sizes),
            sum(count * size.gathered for size, count in trained),
            sum(count * size.held for size, count in trained),
            max((size.gathered for size, _ in trained), default=0),
        )


def _of_stages(config: RunConfig, task: RunTask, accumulation: int, sizes: Sizes, pipeline: int) -> FormulaMemory:
    """Return the memory of a rank at pipeline rank ``pipeline``."""
    layout = sizes.layout
    copies = {name: count for name, spec in sizes.specs.items() if (count := spec.holders.count(pipeline))}
    trained, frozen = [name for name in copies if sizes.of[name].is_trained], frozen_type(config, sizes.plan)
    how, parts = _how(config, sizes, accumulation, pipeline), sizes.parts(pipeline)
    mix = planned_mix(config, task, layout, sizes.plan, sizes.model, measures=False)
    blocks = max(1, len(sizes.plan.blocks_in(sizes.model)))
    share = share_of(config, layout, accumulation, blocks, pipeline, mix)
    estimate = activation_estimate(config, layout, sizes.plan, sizes.model) or (lambda _: 0)
    held = sum(len(layout.block_range(stage, blocks)) for stage in layout.stages_of(pipeline))
    # Whether all micro-batches are in flight before the first backward.
    waits = layout.pipeline > 1 and layout.schedule in ALL_FORWARDS_FIRST
    # Autocast keeps bf16 copies of the adapters.
    is_copied = frozen is not None and not layout.is_sharded and not trained_type(config)
    of_adapters = is_copied * torch.bfloat16.itemsize * sum(sizes.of[name].held for name in trained)

    @cache
    def activations(moment: str, left: int, has_earlier: bool) -> float:
        # For every micro-batch in flight except one, the backward of all blocks is still to come.
        gone = held * (waits and has_earlier) + held - left
        ends = max(0, share.ends - (waits and has_earlier))
        now = share._replace(moment=moment, blocks=max(0.0, share.blocks - gone / blocks), ends=ends)
        return of_adapters + estimate(now)

    states = {name: copies[name] * sizes.of[name].state_bytes for name in trained}
    fetched = config.optim.offload * max(states.values(), default=0)
    found = list(moments(parts, held, how, activations, fetched))
    all_of_it = (*parts.before, *parts.blocks, *parts.after, parts.rest)
    without = estimate(share._replace(moment="forward", borders=0))
    lasting = {
        "parameters": sum(sizes.of[name].held * count * sizes.width(name, frozen) for name, count in copies.items()),
        "gradients": how.held_width * sum(part.held for part in all_of_it),
        "optimizer state": int(sum(states.values())),
        "average of weights": sum(copies[name] * sizes.of[name].average_bytes for name in trained),
    }
    offloaded = lasting if how.offloads else ("optimizer state",) * config.optim.offload
    apart = {kind + IN_HOST_MEMORY: lasting.pop(kind) for kind in tuple(offloaded)}
    return FormulaMemory(
        parameters=lasting.get("parameters", 0),
        gradients=lasting.get("gradients", 0),
        gradients_while_accumulating=how.holds_whole * _FP32_BYTES * sum(part.trained for part in all_of_it),
        optimizer_state=lasting.get("optimizer state", 0) + lasting.get("average of weights", 0),
        gathered=int(max(moment.gathered for moment in found)),
        activations=int(max(moment.activations for moment in found)),
        received=int(activations("forward", held, False) - of_adapters - without),
        apart={kind: value for kind, value in apart.items() if value},
        peak=max(found, key=lambda moment: moment.bytes),
    )


def keeps_buckets(config: RunConfig, layout: Layout) -> bool:
    """Return whether gradients stay allocated between steps, like DDP's buckets."""
    return layout.is_replicated and not trained_type(config)


def _how(config: RunConfig, sizes: Sizes, accumulation: int, pipeline: int) -> How:
    layout, width = sizes.layout, sizes.gathered_width
    ranks = layout.shard * layout.context if layout.is_sharded else 1
    offloads = layout.is_sharded and config.parallel.offload
    stages = layout.stages_of(pipeline)
    # A single shard that already has the gathered dtype is used without a copy.
    gathers = layout.is_sharded and (ranks > 1 or width < sizes.trained_width or offloads)
    sums_in_fp32 = config.parallel.sync_every_micro_batch or not layout.is_sharded
    return How(
        accumulation,
        keeps_buckets(config, layout),
        layout.is_sharded,
        layout.pipeline > 1,
        ranks,
        width,
        _FP32_BYTES if sums_in_fp32 else sizes.trained_width,
        gathers,
        config.parallel.frees_after_forward and not sizes.plan.is_one_unit,
        config.parallel.sync_every_micro_batch,
        ((0 in stages) + 1) * (layout.stages - 1 in stages) if sizes.plan.tied else 0,
        gathers and width < _FP32_BYTES and layout.pipeline > 1 and layout.schedule in _WAITS_FOR_THE_NEXT_BACKWARD,
        offloads,
    )


def share_of(
    config: RunConfig, layout: Layout, accumulation: int, blocks: int, pipeline: int, mix: Mix | None = None
) -> Share:  # fmt: skip
    """Return the share of the work on a micro-batch for a rank at pipeline rank ``pipeline``.

    ``blocks``: number of blocks of the full model.
    """
    trainer, stages, blocks = config.trainer, layout.stages_of(pipeline), max(1, blocks)
    held = sum(len(layout.block_range(stage, blocks)) for stage in stages)
    in_flight = _in_flight(layout, accumulation, pipeline)
    received = accumulation * sum((stage > 0) + (stage < layout.stages - 1) for stage in stages)
    share = share_of_blocks(config, layout)._replace(
        blocks=held / blocks * in_flight,
        waits=held / blocks * _waiting(layout, accumulation, pipeline),
        ends=_ends_in_flight(layout, accumulation) * (layout.stages - 1 in stages),
        # Plus the sent tensors. With several stages on a rank, one more stage keeps the last tensor it sent.
        borders=received + ceil(in_flight) * sum(stage < layout.stages - 1 for stage in stages) + (len(stages) > 1),
        checkpoint=trainer.activation_checkpoint,
        every=trainer.activation_checkpoint_every,
    )
    if mix is None:
        return share
    firsts = number_of_firsts(mix, layout, blocks, stages) / held
    rest = mix.rest if firsts < 1 else "none"
    return share._replace(checkpoint=mix.first, every=1, firsts=firsts, rest=rest)


def _ends_in_flight(layout: Layout, accumulation: int) -> int:
    if layout.pipeline > 1 and layout.schedule == "interleaved_zero_bubble":
        return min(accumulation, layout.pipeline)  # weight gradients wait for a round's input gradients
    return accumulation if layout.pipeline > 1 and layout.schedule in ALL_FORWARDS_FIRST else 1


def _in_flight(layout: Layout, accumulation: int, pipeline: int) -> float:
    """Return the number of micro-batches in flight, between forward and end of backward, on a pipeline rank."""
    if layout.pipeline == 1:
        return 1.0
    if layout.schedule in ALL_FORWARDS_FIRST:
        return accumulation
    after, per_rank = layout.pipeline - pipeline, layout.stages // layout.pipeline
    if layout.schedule == "1f1b":
        return min(accumulation, after)
    if layout.schedule in ZERO_BUBBLE_SCHEDULES:
        return min(accumulation, layout.pipeline + (layout.schedule == "dualpipev") / 2)
    return min(accumulation, ((per_rank - 1) * layout.pipeline + 2 * after - 1) / per_rank)  # the schedule's warm-up


def _waiting(layout: Layout, accumulation: int, pipeline: int) -> float:
    """Return the number of micro-batches whose weight gradients are deferred."""
    if layout.pipeline == 1 or layout.schedule not in ZERO_BUBBLE_SCHEDULES:
        return 0.0
    passes = {"interleaved_zero_bubble": pipeline + 1, "zbv": max(1, 2 * pipeline), "dualpipev": 1}[layout.schedule]
    return min(accumulation, passes / (layout.stages // layout.pipeline))
