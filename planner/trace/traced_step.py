"""Trace of a training step: the run's own model, sharded and trained as in the run, on tensors without data.

torch's fake tensors have only shapes and dtypes, and the process group communicates nothing. The trace therefore covers
any module, any layout of any size, and the installed version of torch.
"""

import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial, reduce
from math import lcm, prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode  # torch.fx and torch.distributed use it too
from torch.testing._internal.distributed.fake_pg import FakeStore  # registers the backend "fake"

from serried.configs.errors import UserError
from serried.configs.schema.sections import RunConfig
from serried.parallel.axes.context import Gather, context_points
from serried.parallel.axes.expert import Exchange, mixtures
from serried.parallel.distributed_model import DistributedModel
from serried.parallel.layout.local_shards import empty
from serried.parallel.layout.mesh import ZERO_BUBBLE_SCHEDULES, Layout
from serried.parallel.layout.process_groups import Groups
from serried.parallel.layout.shard_specs import chunk
from serried.parallel.plan import ParallelPlan
from serried.parallel.step_phases import BACKWARD, FORWARD, OPTIMIZER, Phases
from serried.planner.activations.estimate import planned_mix
from serried.planner.memory_formula import RECEIVE_BUFFERS, keeps_buckets
from serried.planner.plan_terms import IN_HOST_MEMORY, Memory, Work
from serried.planner.trace.cuda_allocator import Phase, extended, unused_bytes
from serried.planner.trace.trace_recorder import GRADIENTS, PARAMETERS, Collective, StepTrace
from serried.planner.traffic import Flow
from serried.trainer.memory.activation_budget import reason_of
from serried.trainer.memory.gpu_norms import is_for_gpus, norms_of_a_gpu
from serried.trainer.model import Model, build_model, model_to_train, sharded
from serried.trainer.optim.optimizer import model_optimizer
from serried.trainer.optim.weight_average import WeightAverage
from serried.trainer.precision import LOW_DTYPES
from serried.trainer.task import RunTask, map_tensors, needs_data_for_example
from serried.trainer.training_state import train_step

_CPU = torch.device("cpu")
_FEWEST_PERIODS = 4
"""Fewest repetitions of a pattern of blocks that are worth an extrapolation."""
_EXCHANGES_IN_PHASE = {FORWARD: "forward", BACKWARD: "backward"}


class CannotTrace(Exception):
    """Raised if a step cannot be traced on tensors without data. The message is the reason, as a clause."""


@dataclass(frozen=True)
class Traced:
    """Traced step of the first rank at a pipeline rank, or the difference that additional blocks make."""

    rank: int
    memory: Mapping[str, float]
    """Bytes at the peak, by kind."""
    phase: str
    by_phase: Mapping[str, float]
    """Peak of each phase in bytes."""
    flows: Mapping[tuple[str, str, str, int], tuple[float, float]]
    """(Bytes sent, calls) of the collectives, by (axis, kind, phase, ranks)."""
    work: Mapping[str, Work]
    """Work by phase: in the optimizer phase for a full step, in the other phases for one micro-batch."""
    requests: list[Phase] | None
    """Allocator requests; None if unknown."""
    border: Tensor | None = None
    """Tensor sent from stage to stage of a pipeline, without data."""

    @property
    def peak(self) -> float:
        """Peak memory on the device in bytes."""
        return sum(size for kind, size in self.memory.items() if not kind.endswith(IN_HOST_MEMORY))

    def plus(self, other: "Traced", times: float) -> "Traced":
        """Return the sum of this step and ``times`` times ``other``."""

        def sums(mine: Mapping[Any, float], theirs: Mapping[Any, float]) -> dict[Any, float]:
            return {key: mine.get(key, 0) + times * theirs.get(key, 0) for key in {**mine, **theirs}}

        flows = {}
        for key in {**self.flows, **other.flows}:
            (mine, calls), (theirs, more) = self.flows.get(key, (0, 0)), other.flows.get(key, (0, 0))
            flows[key] = mine + times * theirs, calls + times * more
        work = {
            phase: self.work.get(phase, Work()).plus(other.work.get(phase, Work()), times)
            for phase in {**self.work, **other.work}
        }
        memory, by_phase = sums(self.memory, other.memory), sums(self.by_phase, other.by_phase)
        return replace(self, memory=memory, by_phase=by_phase, flows=flows, work=work, requests=None)


def trace_step(
    config: RunConfig, task: RunTask, layout: Layout, accumulation: int, *, is_open: bool = False
) -> list[Traced]:
    """Trace a step on the first rank of the first, second and last pipeline rank. Others are like the second.

    Equal blocks add equal amounts of memory and work, so only a few are traced. A trace with more blocks checks the
    extrapolation; if it fails, all blocks are traced. ``is_open``: whether the data of ``task`` is open.

    Raises:
        CannotTrace: the module or its communication needs data.
    """
    if layout.context > 1 and layout.context_method == "ring" and config.launch.device != "cpu":
        raise CannotTrace("ring attention uses different kernels on GPUs")
    if config.trainer.activation_checkpoint == "offload" and config.launch.device != "cpu":
        raise CannotTrace("copies in host memory would be counted as GPU memory")
    if needs_data_for_example(task) and not is_open:
        task.open_data(task.prepare(lambda _: None))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return _Tracer(config, task, layout, accumulation).stages()
    except UserError:
        raise
    except Exception as error:  # a user's module may raise anything on tensors without data
        raise CannotTrace(reason_of(error)) from error


def memory_of(stages: Sequence[Traced]) -> Memory:
    """Return the memory of the rank that needs the most."""
    worst = max(stages, key=lambda stage: stage.peak)
    parts = dict(sorted(worst.memory.items(), key=lambda part: -part[1]))
    by_phase = {phase: int(size) for phase, size in worst.by_phase.items()}
    return Memory(parts, worst.phase, by_phase, worst.rank)


def reserved_memory_of(stages: Sequence[Traced], *, is_expandable: bool) -> Memory:
    """Return the memory of the rank that needs the most, with the unused bytes that torch's allocator reserves."""
    worst = max(stages, key=lambda stage: stage.peak)
    requests = worst.requests
    unused = None if requests is None else unused_bytes(requests, is_expandable=is_expandable)
    return replace(memory_of(stages), unused=unused)


def flows_of(stages: Sequence[Traced]) -> tuple[Flow, ...]:
    """Return the communication in a step of the rank that sends the most."""
    most = max(stages, key=lambda stage: sum(sent for sent, _ in stage.flows.values()))
    return tuple(
        Flow(axis, kind, when, round(sent), round(calls), ranks)
        for (axis, kind, when, ranks), (sent, calls) in sorted(most.flows.items())
        if sent
    )


def products_of(stages: Sequence[Traced]) -> list[tuple[int, int, int]]:
    """Return the shapes of all matrix products, sorted by FLOPs, largest first."""
    work = reduce(Work.plus, (of_phase for stage in stages for of_phase in stage.work.values()))
    return sorted(work.products, key=lambda shape: -prod(shape) * work.products[shape])


class _Tracer:
    def __init__(self, config: RunConfig, task: RunTask, layout: Layout, accumulation: int) -> None:
        self._config = config
        self._task = task
        self._layout = layout
        self._accumulation = accumulation
        model = build_model(config, task)
        self._names = model.blocks
        self._leading, self._period = _pattern(model.module, self._names)
        self._batch = task.example_batch(config.trainer.micro_batch)

    def stages(self) -> list[Traced]:
        layout, border, found = self._layout, None, []
        for pipeline in sorted({0, min(1, layout.pipeline - 1), layout.pipeline - 1}):
            stage = self._stage(pipeline, border)
            border = border if stage.border is None else stage.border
            found.append(stage)
        return found

    def _stage(self, pipeline: int, border: Tensor | None) -> Traced:
        layout, total = self._layout, len(self._names)
        rank = pipeline * layout.world // layout.pipeline
        mine = layout.stages_of(pipeline)
        here = sum(len(layout.block_range(stage, total)) for stage in mine)
        has_pattern = self._period > 1
        every = lcm(self._config.trainer.activation_checkpoint_every, self._period)
        per_stage = -(-here // len(mine))
        first = self._leading + (1 if has_pattern else 2) * every + (per_stage - self._leading) % every
        points = [first, first + every, first + 2 * every]
        is_mixed = self._config.trainer.activation_memory_budget < 1  # the mix depends on the number of blocks
        is_long = points[-1] >= per_stage or (has_pattern and sum(points) > per_stage)
        if is_long or is_mixed or (layout.pipeline > 1 and (self._leading or has_pattern)):
            return self._trace(rank, None, border)
        low, high, proof = (self._trace(rank, point * layout.stages, border) for point in points)
        step = high.plus(low, -1)
        if abs(high.plus(step, 1).peak - proof.peak) > 0:
            return self._trace(rank, None, border)
        times = (per_stage - first) // every
        requests = extended(low.requests or [], high.requests or [], proof.requests or [], times)
        return replace(low.plus(step, times), requests=requests)

    def _trace(self, rank: int, blocks: int | None, border: Tensor | None) -> Traced:
        layout = self._layout
        if blocks is not None and layout.layers_of_stages:
            layout = replace(layout, layers_of_stages=())
        # Zero-bubble schedules accumulate weight gradients in the round after the one that computes them.
        rounds = 3 if layout.schedule in ZERO_BUBBLE_SCHEDULES else 2
        most = 2 if layout.pipeline == 1 else rounds * layout.pipeline
        micro_batches = min(self._accumulation, most)
        trace, axes, requests, found = _trace_rank(
            self._config, self._task, layout, [self._batch] * micro_batches, rank, blocks, border
        )
        peak = trace.peak()
        # A stage has one receive buffer per message of a step, but only some micro-batches were traced: replace their
        # buffers by those of the whole step.
        if found is not None:
            stages = layout.stages_of(rank * layout.pipeline // layout.world)
            borders = sum((stage > 0) + (stage < layout.stages - 1) for stage in stages)
            peak.parts["other"] = peak.parts.get("other", 0) - micro_batches * borders * found.nbytes
            peak.parts[RECEIVE_BUFFERS] = self._accumulation * borders * found.nbytes
        work = {
            phase: tally.work() if phase == OPTIMIZER else Work().plus(tally.work(), 1 / micro_batches)
            for phase, tally in trace.work.items()
        }
        flows = self._flows(trace, axes, micro_batches)
        return Traced(rank, peak.parts, peak.phase, peak.by_phase, flows, work, requests, found)

    def _flows(
        self, trace: StepTrace, axes: Mapping[str, str], micro_batches: int
    ) -> dict[tuple[str, str, str, int], tuple[float, float]]:
        """Return the communication in a step of all micro-batches, extrapolated from the traced ones.

        Micro-batches between the first and the last have the communication that these two share.
        """
        left = self._accumulation - micro_batches
        counts: dict[tuple[str, str, Collective], Counter[int]] = defaultdict(Counter)
        for (forward, phase, exchange), count in trace.exchanges.items():
            counts[axes.get(exchange.group, "world"), phase, exchange][forward] += count
        flows: dict[tuple[str, str, str, int], tuple[float, float]] = {}
        for (axis, phase, exchange), by_forward in counts.items():
            calls: float = sum(by_forward.values())
            if left and self._layout.pipeline == 1:
                calls += left * min(by_forward[1], by_forward[micro_batches])
            elif left and (axis in ("tensor", "context", "expert", "pipeline")) and phase != OPTIMIZER:
                calls *= self._accumulation / micro_batches
            key = axis, exchange.kind, _EXCHANGES_IN_PHASE.get(phase, "end"), exchange.ranks
            before, more = flows.get(key, (0, 0))
            flows[key] = before + calls * exchange.bytes, more + calls
        return flows


def _pattern(model: nn.Module, names: Sequence[str]) -> tuple[int, int]:
    """Return the number of blocks before the final ones that repeat, and the number of blocks after which they repeat:
    1 if they are equal."""

    def form(name: str) -> list[Any]:
        block = model.get_submodule(name)
        return [(key, each.shape, each.requires_grad) for key, each in block.named_parameters()]

    forms = [form(name) for name in names]
    for period in range(1, len(forms) // _FEWEST_PERIODS + 1):
        unlike = [number for number in range(len(forms) - period) if forms[number] != forms[number + period]]
        leading = unlike[-1] + 1 if unlike else 0
        if leading + _FEWEST_PERIODS * period <= len(forms):
            return leading, period
    return len(forms), 1


def _trace_rank(
    config: RunConfig, task: RunTask, layout: Layout, batches: Sequence[Any], rank: int, blocks: int | None,
    border: Tensor | None,
) -> tuple[StepTrace, Mapping[str, str], list[Phase], Tensor | None]:  # fmt: skip
    """Trace two steps of ``rank``, with only the first ``blocks`` blocks of the model unless None.

    Returns:
        The trace of the second step, the axis of each process group, the allocator requests of both steps, and the
        tensor sent from stage to stage.
    """
    has_buckets = keeps_buckets(config, layout)
    if layout.is_replicated:  # DDP's reducer needs data. Apart from the all-reduce, one process does the same.
        layout = Layout("single")
    model = model_to_train(config, task)
    mix = planned_mix(config, task, layout, model.plan, model.module)
    if blocks is not None:
        model = _shortened(model, blocks)
    with _world(layout, rank):
        groups = _GroupsAlone(layout, border)
        groups.make(ties_ends=bool(model.plan.tied))  # outside the fake mode: torch reads the ranks of a mesh
        mode, trace = FakeTensorMode(allow_non_fake_inputs=True), StepTrace(is_pipeline=layout.pipeline > 1)
        with mode, trace, norms_of_a_gpu() if is_for_gpus(config) else nullcontext():
            empty(model.module)
            batches = [map_tensors(partial(torch.empty_like, device=_CPU), batch) for batch in batches]
            phases = Phases()
            place = IN_HOST_MEMORY if config.parallel.offload else ""
            state_place = IN_HOST_MEMORY if config.offloads_state else ""

            def enter(phase: str) -> None:
                trace.enter(phase)
                gradients = [held.tensor.grad for held in parallel.parameters if held.tensor.grad is not None]
                trace.label(GRADIENTS + place, gradients if place else ())

            phases.listener = enter
            parallel = sharded(config, model, layout, _CPU, phases=phases, groups=groups, mix=mix)
            _without_data(parallel, model.plan, groups, is_for_gpu=config.launch.device != "cpu")
            repeated = model.blocks
            del model  # pipeline stages are copies of it
            low_dtype = LOW_DTYPES[config.precision.name]
            optimizer = model_optimizer(parallel, config.optim, repeated, low_dtype, config.trainer.seed)
            decay = config.trainer.ema_decay
            average = WeightAverage(decay, parallel.parameters, _CPU) if decay else None
            weight = task.weight_per_sample()
            step = train_step(config, task, weight, parallel, optimizer, average)
            step(batches, 1e-3, lambda: 0.0)  # FSDP2 and optimizers allocate in their first step
            trace.label(PARAMETERS + place, [held.tensor for held in parallel.parameters])
            for held in parallel.parameters:
                for value in optimizer.state.get(held.tensor, {}).values():
                    if isinstance(value, Tensor):
                        trace.label("optimizer state" + (state_place if value.ndim > 0 else ""), [value])
            if has_buckets:
                for held in parallel.parameters:
                    held.tensor.grad = torch.zeros_like(held.tensor) if held.tensor.requires_grad else None
                    trace.label(GRADIENTS, [] if held.tensor.grad is None else [held.tensor.grad])
            map_tensors(lambda tensor: trace.label("batches", [tensor]), list(batches))
            trace.label("average of weights" + place, average.of.values() if average is not None else ())
            trace.begin()
            step(batches, 1e-3, lambda: 0.0)
            requests = trace.requests()
        runner: Any = parallel.runner
        found = runner.borders if layout.pipeline > 1 else {}
        return trace, groups.names(), requests, next(iter(found.values()), None)


class _GroupsAlone(Groups):
    """Process groups of a single rank, which receives its own messages."""

    def __init__(self, layout: Layout, border: Tensor | None) -> None:
        """``border``: tensor sent from stage to stage of a pipeline, without data; None if not known yet."""
        super().__init__(layout, "cpu")
        self._border = border

    def gather(self, value: Any) -> list[Any]:
        return [value]

    def send_form(self, tensor: Tensor, to: int) -> None:
        del to
        self._border = tensor

    def receive_form(self, source: int) -> Tensor:
        del source
        assert self._border is not None, "an earlier stage was traced"
        return self._border


class _EvenExchange(Exchange):
    """Sends the same number of rows to each rank, because the router's choice depends on data."""

    def sizes(self, rows: int, counts: Tensor, table: Tensor) -> tuple[list[int], list[int]]:
        del counts, table
        even = [size for _, size in (chunk(rows, self._ranks, rank) for rank in range(self._ranks))]
        return even, even


class _GatherOnGPU(Gather):
    """Attention without the mask of queries x keys that only a CPU needs."""

    def mask(self, make: Callable[[tuple[Tensor, Tensor] | None], Any], length: int, device: torch.device) -> Any:
        whole = make(None)  # as for an unsharded sequence
        return super().mask(make, length, device) if isinstance(whole, Tensor) else whole


def _without_data(parallel: DistributedModel, plan: ParallelPlan, groups: Groups, *, is_for_gpu: bool) -> None:
    """Replace the model's extension points with versions that need no data."""
    for module in parallel.modules:
        for mixture in mixtures(module, plan).values():
            if groups.expert is not None:
                mixture.dispatch = _EvenExchange(groups.expert)
        for point in context_points(module, plan):
            if is_for_gpu and groups.context is not None:
                parts = point.context.hidden_parts
                point.context = _GatherOnGPU(point.context, groups.context)
                point.context.hidden_parts = parts


@contextmanager
def _world(layout: Layout, rank: int) -> Iterator[None]:
    if layout.world == 1:
        yield
        return
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=layout.world)
    try:
        yield
    finally:
        dist.destroy_process_group()


def _shortened(model: Model, blocks: int) -> Model:
    """Return ``model`` without the blocks after the first ``blocks``."""
    removed = model.blocks[blocks:]
    for name in removed:
        owner, _, last = name.rpartition(".")
        delattr(model.module.get_submodule(owner), last)
    return replace(model, plan=_without(model.plan, removed), blocks=model.blocks[:blocks])


def _without(plan: ParallelPlan, removed: Sequence[str]) -> ParallelPlan:
    def is_left(name: str) -> bool:
        return not any(name == block or name.startswith(f"{block}.") for block in removed)

    units = [tuple(filter(is_left, unit)) for unit in plan.units]
    return replace(
        plan,
        units=tuple(filter(None, units)),
        blocks=tuple(filter(is_left, plan.blocks)),
        mixtures=tuple(filter(is_left, plan.mixtures)),
    )
