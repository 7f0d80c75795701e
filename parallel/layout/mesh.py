"""Resolution and checks of the mesh degrees. Errors state the equation and a value that works."""

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from serried.configs.divisors import nearest_divisors
from serried.configs.errors import UserError
from serried.configs.schema.sections import ParallelSection, TrainerSection

AXES = ("pipeline", "replicate", "shard", "context", "tensor")
"""Mesh axes, outermost first: ranks are numbered row-major over them."""
MODEL_AXES = ("pipeline", "context", "tensor")
"""Axes along which ranks share the work on one sample."""

ONE_STAGE_SCHEDULES = ("gpipe", "1f1b")
"""Pipeline schedules with one stage per rank."""
ALL_FORWARDS_FIRST = ("gpipe", "looped_bfs")
"""Pipeline schedules that run the forwards of all micro-batches before any backward."""
V_SCHEDULES = ("zbv", "dualpipev")
"""Pipeline schedules with two stages per rank: one of the first half, and its mirror image in the second half."""
ZERO_BUBBLE_SCHEDULES = ("interleaved_zero_bubble", *V_SCHEDULES)
"""Pipeline schedules that delay weight gradients after input gradients (zero-bubble)."""


@dataclass(frozen=True)
class Coordinates:
    """Position of a rank on each mesh axis."""

    pipeline: int
    replicate: int
    shard: int
    context: int
    tensor: int
    expert_shard: int
    expert: int
    """Coordinate among the expert ranks. ``expert`` and ``expert_shard`` number the ranks of a block a second time."""
    data_rank: int
    """Index among the data ranks. Ranks with the same index see the same samples."""
    owns_loss: bool
    """Whether the rank's loss is counted: it has the last stage, and its tensor coordinate is 0."""


@dataclass(frozen=True)
class Layout:
    """Resolved degree of every mesh axis. The product of the degrees is the number of processes."""

    strategy: str
    pipeline: int = 1
    replicate: int = 1
    shard: int = 1
    context: int = 1
    tensor: int = 1
    expert: int = 1
    """Degree of expert parallelism. It adds no processes: experts are sharded over ranks that other axes provide."""
    sequence: bool = True
    """Whether sequence parallelism is on: tensor ranks shard the activations between matrices along the sequence."""
    context_method: str = "gather"
    uneven: bool = False
    """Whether replicas may train different numbers of micro-batches of a global batch."""
    schedule: str = "1f1b"
    stages: int = 1
    """Number of pipeline stages, over all ranks."""
    layers_of_stages: tuple[int, ...] = ()
    """Number of blocks of each stage. If empty, blocks are distributed evenly."""

    @property
    def is_replicated(self) -> bool:
        """Whether every rank holds the full model, under DDP."""
        return self.strategy == "ddp" and not self.is_sharded

    @property
    def world(self) -> int:
        """Number of processes."""
        return self.size(AXES)

    @property
    def data_ranks(self) -> int:
        """Number of ranks that see different samples."""
        return self.replicate * self.shard

    @property
    def block(self) -> int:
        """Number of ranks that together hold one pipeline stage of one replica. Their ranks are contiguous."""
        return self.shard * self.context * self.tensor

    @property
    def expert_shard(self) -> int:
        """Number of ranks of a block that shard the same experts."""
        return self.block // self.expert

    @property
    def is_sharded(self) -> bool:
        """Whether FSDP2 is used, even over one rank: on all layouts except a single process and DDP."""
        return self.strategy in ("fsdp", "hsdp") or self.size(MODEL_AXES) > 1

    def size(self, axes: Iterable[str]) -> int:
        """Return the product of the degrees of ``axes``."""
        return math.prod(getattr(self, axis) for axis in axes)

    def index(self, place: Coordinates, axes: Iterable[str]) -> int:
        """Return the row-major index of ``place`` over ``axes``."""
        index = 0
        for axis in axes:
            index = index * getattr(self, axis) + getattr(place, axis)
        return index

    def coordinates(self, rank: int) -> Coordinates:
        """Return the coordinates of ``rank``."""
        place, rest = {}, rank
        for axis in reversed(AXES):
            rest, place[axis] = divmod(rest, getattr(self, axis))
        assert rest == 0, f"rank {rank} of a layout of {self.world}"
        expert_shard, expert = divmod(rank % self.block, self.expert)
        return Coordinates(
            **place,
            expert_shard=expert_shard,
            expert=expert,
            data_rank=place["replicate"] * self.shard + place["shard"],
            owns_loss=self.stages - 1 in self.stages_of(place["pipeline"]) and place["tensor"] == 0,
        )

    def peers(self, axes: Collection[str]) -> list[list[int]]:
        """Return the groups of ranks that differ only on ``axes``, each sorted by the index on these axes."""
        groups: dict[tuple[int, ...], list[int]] = {}
        for rank in range(self.world):
            place = self.coordinates(rank)
            others = tuple(getattr(place, axis) for axis in AXES if axis not in axes)
            groups.setdefault(others, []).append(rank)
        return list(groups.values())

    def stages_of(self, pipeline: int) -> tuple[int, ...]:
        """Return the stages of the ranks with coordinate ``pipeline``, in model order."""
        if self.schedule in V_SCHEDULES and self.pipeline > 1:
            return pipeline, self.stages - 1 - pipeline
        return tuple(range(pipeline, self.stages, self.pipeline))

    def pipeline_of(self, stage: int) -> int:
        """Return the pipeline coordinate of the ranks that hold ``stage``."""
        return next(rank for rank in range(self.pipeline) if stage in self.stages_of(rank))

    def block_range(self, stage: int, blocks: int) -> range:
        """Return the indices of the model's ``blocks`` that are in ``stage``."""
        counts = self.layers_of_stages or [
            blocks // self.stages + (number < blocks % self.stages) for number in range(self.stages)
        ]
        first = sum(counts[:stage])
        return range(first, first + counts[stage])

    def describe(self, blocks: int = 0, micro_batches: int = 0) -> str:
        """Return a line for the plan: ``fsdp, shard 8, tensor 8, pipeline 8 (1f1b, 10 layers a stage, bubble 18%)``.

        ``blocks`` is the number of blocks of the model, ``micro_batches`` the number per step. 0 means unknown.
        """
        axes = ("replicate", "shard", "context", "tensor", "expert", "pipeline")
        degrees = [f"{axis} {getattr(self, axis)}" for axis in axes if getattr(self, axis) > 1]
        text = ", ".join([self.strategy, *degrees])
        if self.pipeline == 1 or not blocks:
            return text
        counts = [len(self.block_range(stage, blocks)) for stage in range(self.stages)]
        layers = " + ".join(map(str, counts)) + " layers" if len(set(counts)) > 1 else f"{counts[0]} layers a stage"
        bubble = ""
        if micro_batches and self.schedule not in ZERO_BUBBLE_SCHEDULES:  # of equal stages
            work = micro_batches * self.stages // self.pipeline
            bubble = f", bubble {(self.pipeline - 1) / (work + self.pipeline - 1):.0%}"
        return f"{text} ({self.schedule}, {layers}{bubble})"


def resolve_layout(section: ParallelSection, world_size: int) -> Layout:
    """Replace the degree -1, and check that the product of the degrees is ``world_size``.

    Raises:
        UserError: The degrees contradict the strategy, or their product is not ``world_size``.
    """
    strategy = section.strategy
    degrees = {axis: getattr(section, axis) for axis in AXES}
    for axis, degree in degrees.items():
        if degree == 0:
            raise UserError(f"parallel.{axis}=0 is not a degree; use 1 or more, or -1 for the remaining ranks")
    free = [axis for axis, degree in degrees.items() if degree == -1]
    if len(free) > 1:
        both = " and ".join(f"parallel.{axis}" for axis in free)
        raise UserError(f"{both} are {'both' if len(free) == 2 else 'all'} -1; only one degree can be -1")
    if strategy == "single" and world_size > 1:
        other = "parallel=fsdp" if any(degrees[axis] != 1 for axis in MODEL_AXES) else "parallel=ddp or parallel=fsdp"
        raise UserError(f"parallel=single runs one process, but {world_size} were started; use {other}")
    if strategy in ("single", "ddp") and degrees["shard"] != 1:
        raise UserError(
            f"parallel.shard={section.shard} has no effect with parallel={strategy}; use parallel=fsdp or hsdp"
        )
    if section.uneven and strategy in ("single", "fsdp"):
        raise UserError(
            f"parallel.uneven=true has no effect with parallel={strategy}, as the ranks of a replica have equal "
            "shares; use parallel=ddp, or parallel=hsdp parallel.replicate=2"
        )
    if strategy in ("single", "fsdp") and degrees["replicate"] != 1:
        raise UserError(
            f"parallel.replicate={section.replicate} has no effect with parallel=fsdp; use parallel=hsdp"
            if strategy == "fsdp"
            else (f"parallel.replicate={section.replicate} has no effect with parallel=single; use parallel=ddp")
        )
    fixed = math.prod(degree for degree in degrees.values() if degree != -1)
    if free and world_size % fixed == 0:
        degrees[free[0]] = world_size // fixed
    elif free:
        raise UserError(
            f"{_factors(degrees)} does not divide {_processes(world_size)}, so parallel.{free[0]}=-1 has no value; "
            f"use {_nearest(degrees, world_size)}a multiple of {fixed} processes (in a dry run: "
            f"launch.processes={fixed})"
        )
    elif fixed != world_size:
        rest = "replicate" if strategy == "ddp" else "shard"
        fits = world_size % (fixed // degrees[rest]) == 0
        raise UserError(
            f"the mesh needs {_processes(fixed)} ({_equation(degrees)}) but "
            f"{_processes(world_size)} {'was' if world_size == 1 else 'were'} started; use --nproc_per_node={fixed} "
            f"(in a dry run: launch.processes={fixed})"
            + (f", or parallel.{rest}=-1 for the remaining ranks" if fits and strategy != "single" else "")
        )
    if world_size == 1:
        return Layout("single")
    return Layout(
        strategy,
        **degrees,
        expert=section.expert,
        sequence=section.sequence,
        context_method=section.context_method,
        uneven=section.uneven,
        **_stages(section, degrees["pipeline"]),
    )


def _stages(section: ParallelSection, pipeline: int) -> dict[str, Any]:
    """Return the fields of ``Layout`` that only a pipeline sets."""
    if pipeline == 1:
        return {}
    schedule = section.pipeline_schedule
    usual = 1 if schedule in ONE_STAGE_SCHEDULES else 2
    per_rank = section.stages_per_rank or usual
    fixed = usual == 1 or schedule in V_SCHEDULES
    if fixed and per_rank != usual:
        raise UserError(
            f"parallel.stages_per_rank={per_rank} does not match parallel.pipeline_schedule={schedule} ({usual} per "
            f"rank); use parallel.stages_per_rank={usual}, or parallel.pipeline_schedule=interleaved"
        )
    if per_rank < 2 and not fixed:
        raise UserError(
            f"parallel.pipeline_schedule={schedule} needs at least two stages per rank, not "
            "parallel.stages_per_rank=1; use parallel.stages_per_rank=2, or parallel.pipeline_schedule=1f1b"
        )
    stages, layers = pipeline * per_rank, section.layers_of_stages or ()
    if layers and len(layers) != stages:
        raise UserError(
            f"parallel.layers_of_stages has {len(layers)} numbers for {stages} stages = pipeline {pipeline} x "
            f"{per_rank} per rank; use one number per stage, or remove it"
        )
    return {"schedule": schedule, "stages": stages, "layers_of_stages": tuple(layers)}


def _equation(degrees: Mapping[str, int]) -> str:
    """Return the degrees as text, such as ``replicate 2 x shard 3``. Other axes are shown if their degree is not 1."""
    shown = ("replicate", "shard", *(axis for axis in ("context", "tensor", "pipeline") if degrees[axis] != 1))
    return " x ".join(f"{axis} {degrees[axis]}" for axis in shown)


def _factors(degrees: Mapping[str, int]) -> str:
    return " x ".join(f"parallel.{axis}={degree}" for axis, degree in degrees.items() if degree > 1)


def _nearest(degrees: Mapping[str, int], world_size: int) -> str:
    """Suggest the nearest fitting value for the axis of the largest degree; empty if no value fits."""
    axis = max(degrees, key=lambda name: degrees[name])
    others = math.prod(degree for name, degree in degrees.items() if degree > 0 and name != axis)
    if world_size % others:
        return ""
    return f"parallel.{axis}={nearest_divisors(world_size // others, degrees[axis])[0]}, or "


def gradient_accumulation(trainer: TrainerSection, layout: Layout) -> int:
    """Return the number of micro-batches per optimizer step on each rank: global_batch / (micro_batch x data ranks).

    With ``parallel.uneven``, this is the number on the ranks that have the most.

    Raises:
        UserError: This is not an integer. The message names the nearest values that fit.
    """
    ranks, whose = layout.data_ranks, "data ranks"
    if trainer.global_batch % (trainer.micro_batch * ranks) == 0:
        return trainer.global_batch // (trainer.micro_batch * ranks)
    units, rest = divmod(trainer.global_batch, trainer.micro_batch * layout.shard)
    can_differ = rest == 0 and units > layout.replicate
    if layout.uneven and can_differ:
        return -(-units // layout.replicate)
    if layout.uneven and rest:
        ranks, whose = layout.shard, "ranks of a replica"
    per_pass = trainer.micro_batch * ranks
    lower, upper = trainer.global_batch // per_pass * per_pass, -(-trainer.global_batch // per_pass) * per_pass
    fixes = [f"trainer.global_batch={value}" for value in (lower, upper) if value]
    if trainer.global_batch % ranks == 0:
        fixes.append(f"trainer.micro_batch={nearest_divisors(trainer.global_batch // ranks, trainer.micro_batch)[0]}")
    fitting = nearest_divisors(trainer.global_batch // trainer.micro_batch, ranks)
    if fitting and trainer.global_batch % trainer.micro_batch == 0:
        fixes.append(f"a number of {whose} that divides it: {', '.join(str(ranks) for ranks in sorted(fitting[:5]))}")
    if can_differ:
        fixes.append("parallel.uneven=true for unequal shares")
    raise UserError(
        f"trainer.global_batch={trainer.global_batch} is not a multiple of {per_pass} = trainer.micro_batch "
        f"{trainer.micro_batch} x {ranks} {whose}; use {' or '.join(fixes)}"
    )


def fewest_micro_batches(trainer: TrainerSection, layout: Layout) -> int:
    """Return the number of micro-batches per optimizer step on the ranks that have the fewest.

    Others have at most one more, and only with ``parallel.uneven``. ``trainer`` fits ``layout``, as
    ``gradient_accumulation`` checks.
    """
    return trainer.global_batch // (trainer.micro_batch * layout.data_ranks)


def _processes(count: int) -> str:
    return f"{count} process" + ("" if count == 1 else "es")
