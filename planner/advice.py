"""Overrides that save memory or let a run fit, found by planning the run with them."""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from itertools import product
from math import prod
from typing import Any, NamedTuple

from serried.configs.divisors import divisors
from serried.configs.errors import UserError
from serried.configs.schema.sections import RunConfig
from serried.parallel.layout.checks import checked_layout, with_values
from serried.parallel.layout.local_shards import unshardable
from serried.parallel.layout.mesh import resolve_layout
from serried.parallel.step_phases import BACKWARD, FORWARD
from serried.planner.memory_formula import FormulaMemory, Sizes, planned_memory
from serried.trainer.model import model_to_train
from serried.trainer.monitor.heartbeat import EVALUATE
from serried.trainer.optim.optimizer import can_offload
from serried.trainer.precision import frozen_type
from serried.trainer.task import RunTask

KEEPS_LESS = {"none": ("selective", "full"), "selective": ("full",)}
"""Modes of activation checkpointing that keep less, by mode."""
_WORTH_A_LINE_SHARE = 0.005
_DEGREES = (1, 2, 4, 8)
_CONTEXT_DEGREES = (*_DEGREES, 16, 32)
_PER_NODE = 8
"""Number of devices per node. Tensor and context ranks communicate a lot, so together they stay within a node."""


class Advice(NamedTuple):
    """An override that saves memory."""

    override: str
    saved: int
    """Saved bytes."""
    note: str
    """Cost of the override, as a clause."""


class Planned:
    """Planned memory of a run, as configured or with other values."""

    def __init__(self, config: RunConfig, task: RunTask, world_size: int, device: str | None = None) -> None:
        self.config, self.world_size = config, world_size
        self.device = device or config.launch.device
        self._task = task
        built = model_to_train(config, task, device)
        self.model, self.plan = built.module, built.plan
        layout, accumulation = checked_layout(config, world_size)
        self._sizes = Sizes(config, layout, self.model, self.plan)
        self.memory = planned_memory(config, task, accumulation, self._sizes)

    def least(self, ranks: int) -> float:
        """Return a lower bound on the bytes per rank of parameters and optimizer state on any layout of ``ranks``
        ranks, which are at least as many as planned."""
        config, of = self.config, self._sizes.of
        if config.parallel.offload:
            return 0.0
        frozen, total = frozen_type(config, self.plan), 0.0
        for name, spec in self._sizes.specs.items():
            size, elements = of[name], prod(spec.shape)
            total += elements * self._sizes.width(name, frozen)
            if size.is_trained and not config.optim.offload:
                total += elements * size.state_bytes / max(1, size.held)
        return total / ranks

    def of(self, config: RunConfig, world_size: int) -> FormulaMemory:
        """Return the memory of ``config``. Raises UserError if its settings cannot be combined."""
        layout, accumulation = checked_layout(config, world_size)
        return planned_memory(config, self._task, accumulation, Sizes(config, layout, self.model, self.plan))

    def saved_by(self, values: Mapping[str, object], ranks: int = 1) -> int:
        """Return the number of bytes that the overrides ``values`` save, with ``ranks`` times as many ranks; 0 if they
        are invalid."""
        try:
            return self.memory.total - self.of(with_values(self.config, values), ranks * self.world_size).total
        except UserError:
            return 0

    def advice(self, key: str, value: object, note: str) -> Advice:
        """Return the override of one value, with the bytes that it saves."""
        shown = f"{value:g}" if isinstance(value, float) else str(value).lower()
        return Advice(f"{key}={shown}", self.saved_by({key: value}), note)


def advice(planned: Planned, stage: str, usable: float, more: Iterable[Advice] = ()) -> list[Advice]:
    """Return overrides that save memory in ``stage``.

    Overrides that keep the numerics come first, each kind sorted by saved bytes. Offloading parameters to host memory
    is slow, so it comes after them, unless no other override is enough. ``usable``: bytes that the run may use.
    ``more``: further overrides that keep the numerics.
    """
    threshold = _WORTH_A_LINE_SHARE * planned.memory.total
    same, other = (
        sorted((found for found in kind if found.saved > threshold), key=lambda found: -found.saved)
        for kind in ([*_that_keep_the_numbers(planned, stage, usable), *more], _that_change_them(planned, stage))
    )
    if planned.device == "cpu" or unshardable(planned.model):
        return [*same, *other]
    last = planned.advice("parallel.offload", True, ", moved to host memory; much slower")
    if last.saved <= threshold:
        return [*same, *other]
    fits = [planned.memory.total - found.saved <= usable for found in (last, *same)]
    return [last, *same, *other] if fits[0] and not any(fits[1:]) else [*same, last, *other]


def _that_keep_the_numbers(planned: Planned, stage: str, usable: float) -> Iterator[Advice]:
    config = planned.config
    plan = planned.plan
    world = planned.world_size
    layout = resolve_layout(config.parallel, world)
    budget, mode = config.trainer.activation_memory_budget, config.trainer.activation_checkpoint

    def fits(advice: Advice) -> bool:
        return planned.memory.total - advice.saved <= usable

    if stage in (FORWARD, BACKWARD) and budget < 1:
        yield planned.advice("trainer.activation_memory_budget", budget / 2, ", but recomputes blocks")
    elif stage in (FORWARD, BACKWARD) and mode in KEEPS_LESS:
        selective, full = (
            planned.advice("trainer.activation_checkpoint", less, ", but recomputes blocks")
            for less in ("selective", "full")
        )
        yield selective if fits(selective) and selective.saved else full
    if stage in (FORWARD, BACKWARD, EVALUATE):
        fewer = divisors(config.trainer.micro_batch)[-2::-1]
        found = [planned.advice("trainer.micro_batch", samples, " of activations") for samples in fewer]
        if found:
            yield next(filter(fits, found), found[-1])
    if planned.device != "cpu" and can_offload(config.optim) and not config.parallel.offload:
        yield planned.advice("optim.offload", True, ", moved to host memory; slower updates")
    if layout.shard * layout.context > 1:
        yield planned.advice("parallel.reshard_after_forward", True, ", but is slower")
    if layout.shard > 1 and layout.pipeline == 1:
        yield planned.advice("parallel.sync_every_micro_batch", True, ", but communicates more")
    fully = {"parallel.strategy": "fsdp", "parallel.replicate": 1, "parallel.shard": -1}
    if layout.replicate > 1:
        yield Advice("parallel=fsdp", planned.saved_by(fully), "")
    if layout.world > 1 and layout.strategy != "ddp":
        rest = "" if config.parallel.shard == -1 else " parallel.shard=-1"
        declared = {"tensor": plan.roles, "context": plan.context, "pipeline": plan.blocks}
        degrees = {axis: 2 * getattr(layout, axis) for axis, names in declared.items() if names}
        found = [
            Advice(
                f"parallel.{axis}={degree}{rest}",
                planned.saved_by({"parallel.shard": -1, f"parallel.{axis}": degree}),
                "",
            )
            for axis, degree in degrees.items()
            if layout.shard % 2 == 0  # on the same number of ranks
        ]
        if found:
            yield max(found, key=lambda each: each.saved)
    if layout.strategy != "ddp":
        name = "more ranks" if layout.shard > 1 else "more ranks and parallel=fsdp"
        yield Advice(f"{name}, such as {2 * world}", planned.saved_by(fully, ranks=2), " per rank")


def _that_change_them(planned: Planned, stage: str) -> Iterator[Advice]:
    config = planned.config
    if config.optim.name == "adamw":
        saved = planned.saved_by({"optim.name": "adamw8bit"})
        yield Advice("optim=adamw8bit", saved, " of optimizer state, in a new run; different rounding")
    if stage in (FORWARD, BACKWARD, EVALUATE) and config.precision.name == "fp32":
        yield Advice("precision=bf16", planned.saved_by({"precision.name": "bf16"}), "; different rounding")


def fitting(planned: Planned, limit: int) -> str:
    """Return, as a clause, overrides with which a rank needs at most ``limit`` bytes.

    If no layout fits on the planned number of processes, the overrides use more processes.
    """
    config, processes = planned.config, planned.world_size
    for more in (1, 2, 4, 8, 16):
        if planned.least(processes * more) > limit:
            continue
        without: dict[tuple[Any, ...], int] = {}
        """Lower bound on the bytes of each layout tried: without activations and gradients."""
        for overrides in _candidates(config):
            layout = tuple(overrides.get(f"parallel.{axis}") for axis in ("pipeline", "context", "tensor"))
            if without.get(layout, 0) > limit:
                continue
            with suppress(UserError):
                memory = planned.of(with_values(config, overrides), processes * more)
                if memory.total <= limit:
                    words = [f"{key}={str(value).lower()}" for key, value in overrides.items()]
                    return f"these fit: {' '.join([*_more(config, more), *words])}"
                without[layout] = memory.parameters + memory.optimizer_state + memory.gathered
    return f"no layout of up to {processes * 16} processes fits; use shorter samples or a smaller model"


def _candidates(config: RunConfig) -> Iterator[dict[str, Any]]:
    """Yield overrides that save memory, the fewest and least costly first."""
    parallel, trainer = config.parallel, config.trainer
    syncs = [False] if parallel.sync_every_micro_batch else [False, True]
    micro_batches = [0] if trainer.micro_batch == 1 else [0, 1]
    less = KEEPS_LESS.get(trainer.activation_checkpoint, ()) if trainer.activation_memory_budget == 1 else ()
    checkpoints = ["", *less]
    degrees = [
        (tensor, context, pipeline, ring)
        for pipeline, context, tensor in product(_DEGREES, _CONTEXT_DEGREES, _DEGREES)
        for ring in ([False, True] if context > 1 and parallel.context_method == "gather" else [False])
        if tensor == 1 or tensor * context <= _PER_NODE
    ]
    found = []
    for micro_batch, sync, checkpoint, degree in product(micro_batches, syncs, checkpoints, degrees):
        tensor, context, pipeline, ring = degree
        overrides: dict[str, Any] = {"trainer.activation_checkpoint": checkpoint} if checkpoint else {}
        overrides |= {"trainer.micro_batch": micro_batch} if micro_batch else {}
        overrides |= {"parallel.sync_every_micro_batch": True} if sync else {}
        overrides |= {"parallel.context_method": "ring"} if ring else {}
        axes = {"tensor": tensor, "context": context, "pipeline": pipeline}
        overrides |= {f"parallel.{axis}": degree for axis, degree in axes.items() if degree != getattr(parallel, axis)}
        found.append((len(overrides), pipeline, tensor * context, overrides))
    return (overrides for *_, overrides in sorted(found, key=lambda each: each[:3]))


def _more(config: RunConfig, factor: int) -> list[str]:
    if factor == 1:
        return []
    nodes, processes = config.launch.nodes, config.launch.processes or 1
    return [f"launch.nodes={nodes * factor}"] if nodes else [f"launch.processes={processes * factor}"]
