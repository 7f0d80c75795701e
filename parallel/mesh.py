"""The degrees of the mesh axes, resolved and checked. Errors state the equation and a value that works."""

import math
from collections.abc import Iterable
from dataclasses import dataclass

from serried.configs.divisors import nearest_divisors
from serried.configs.errors import UserError
from serried.configs.schema import ParallelSection, TrainerSection

AXES = ("pipeline", "replicate", "shard", "context", "tensor")
"""Mesh axes, outermost first: ranks are numbered row-major over them."""


@dataclass(frozen=True)
class Coordinates:
    """The position of one rank on each mesh axis."""

    pipeline: int
    replicate: int
    shard: int
    context: int
    tensor: int
    data_rank: int
    """Ranks that differ in it see different samples; all others see the same."""


@dataclass(frozen=True)
class Layout:
    """The degree of every mesh axis, all resolved: their product is the number of processes."""

    strategy: str
    pipeline: int = 1
    replicate: int = 1
    shard: int = 1
    context: int = 1
    tensor: int = 1
    expert: int = 1
    """Not a factor of the number of processes: experts divide the ranks of a block in another way."""

    @property
    def world(self) -> int:
        """Number of processes."""
        return self.size(AXES)

    @property
    def data_ranks(self) -> int:
        """Ranks that see different samples."""
        return self.replicate * self.shard

    @property
    def block(self) -> int:
        """Ranks that together hold one stage of one copy of the model. Their numbers are contiguous."""
        return self.shard * self.context * self.tensor

    @property
    def is_sharded(self) -> bool:
        """Whether FSDP2 divides the parameters, over however many ranks."""
        return self.strategy in ("fsdp", "hsdp")

    def size(self, axes: Iterable[str]) -> int:
        """Product of the degrees of ``axes``."""
        return math.prod(getattr(self, axis) for axis in axes)

    def index(self, place: Coordinates, axes: Iterable[str]) -> int:
        """Number of ``place`` within the product of ``axes``, row-major."""
        index = 0
        for axis in axes:
            index = index * getattr(self, axis) + getattr(place, axis)
        return index

    def coordinates(self, rank: int) -> Coordinates:
        """Where ``rank`` is."""
        place, rest = {}, rank
        for axis in reversed(AXES):
            rest, place[axis] = divmod(rest, getattr(self, axis))
        assert rest == 0, f"rank {rank} of a layout of {self.world}"
        return Coordinates(**place, data_rank=place["replicate"] * self.shard + place["shard"])

    def describe(self) -> str:
        """For the plan: ``fsdp, shard 8``."""
        degrees = [f"{axis} {getattr(self, axis)}" for axis in AXES if getattr(self, axis) > 1]
        return ", ".join([self.strategy, *degrees])


def resolve_layout(section: ParallelSection, world_size: int) -> Layout:
    """Fill in -1 and check that the degrees multiply to ``world_size``.

    Raises:
        UserError: the strategy and the degrees contradict each other, or their product is not ``world_size``.
    """
    strategy, replicate, shard = section.strategy, section.replicate, section.shard
    if strategy == "single" and world_size > 1:
        raise UserError(
            f"parallel=single is one process but {world_size} were started; use parallel=ddp or parallel=fsdp"
        )
    if 0 in (replicate, shard):
        raise UserError(
            f"parallel.replicate={replicate} parallel.shard={shard}: degrees are 1 or more, or -1 for the rest"
        )
    if replicate == shard == -1:
        raise UserError("parallel.replicate and parallel.shard are both -1; only one can be whatever is left")
    if strategy in ("single", "ddp") and shard != 1:
        raise UserError(
            f"parallel.shard={shard} with parallel={strategy}: it does not shard; use parallel=fsdp or hsdp"
        )
    if strategy in ("single", "fsdp") and replicate != 1:
        raise UserError(
            f"parallel.replicate={replicate} with parallel={strategy}: it does not replicate; use parallel=hsdp"
            if strategy == "fsdp"
            else f"parallel.replicate={replicate} with parallel=single: it is one process; use parallel=ddp"
        )
    if section.sync_every_micro_batch and strategy == "ddp":
        raise UserError(
            "parallel.sync_every_micro_batch=true with parallel=ddp: replicas hold whole gradients either way, so it "
            "only costs communication; use parallel.sync_every_micro_batch=false, or parallel=fsdp"
        )
    known = {"replicate": replicate, "shard": shard}
    free = next((axis for axis, degree in known.items() if degree == -1), None)
    if free:
        fixed_axis, fixed = next((axis, degree) for axis, degree in known.items() if axis != free)
        if world_size % fixed:
            raise UserError(
                f"parallel.{fixed_axis}={fixed} does not divide {_processes(world_size)}, so parallel.{free}=-1 has no "
                f"value; use parallel.{fixed_axis}={nearest_divisors(world_size, fixed)[0]}, or a multiple of {fixed} "
                "processes"
            )
        known[free] = world_size // fixed
    elif replicate * shard != world_size:
        needed = replicate * shard
        raise UserError(
            f"the mesh needs {needed} processes (replicate {replicate} x shard {shard}) but "
            f"{_processes(world_size)} {'was' if world_size == 1 else 'were'} started; use --nproc_per_node={needed} "
            f"(in a dry run: launch.processes={needed}), or "
            f"parallel.{'replicate' if strategy == 'ddp' else 'shard'}=-1 for whatever is left"
        )
    if world_size == 1:
        return Layout("single")
    return Layout(strategy, **known)


def gradient_accumulation(trainer: TrainerSection, layout: Layout) -> int:
    """Micro-batches per optimizer step on each rank: global_batch / (micro_batch x data ranks).

    Raises:
        UserError: it is not a whole number; names the nearest values that are.
    """
    per_pass = trainer.micro_batch * layout.data_ranks
    if trainer.global_batch % per_pass == 0:
        return trainer.global_batch // per_pass
    lower, upper = trainer.global_batch // per_pass * per_pass, -(-trainer.global_batch // per_pass) * per_pass
    fixes = [f"trainer.global_batch={value}" for value in (lower, upper) if value]
    if trainer.global_batch % layout.data_ranks == 0:
        per_rank = trainer.global_batch // layout.data_ranks
        fixes.append(f"trainer.micro_batch={nearest_divisors(per_rank, trainer.micro_batch)[0]}")
    fitting = nearest_divisors(trainer.global_batch // trainer.micro_batch, layout.data_ranks)
    if fitting and trainer.global_batch % trainer.micro_batch == 0:
        fixes.append(f"as many data ranks as divide it: {', '.join(str(ranks) for ranks in sorted(fitting[:5]))}")
    raise UserError(
        f"trainer.global_batch={trainer.global_batch} is not a multiple of {per_pass} = trainer.micro_batch "
        f"{trainer.micro_batch} x {layout.data_ranks} data ranks; use {' or '.join(fixes)}"
    )


def _processes(count: int) -> str:
    return f"{count} process" + ("" if count == 1 else "es")
