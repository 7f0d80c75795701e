"""Shard specs: each rank's shard of every parameter. Pure arithmetic, computed only in this file."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import NamedTuple

from serried.configs.errors import UserError
from serried.parallel.layout.mesh import Coordinates, Layout
from serried.parallel.plan import ParallelPlan


class Slice(NamedTuple):
    """One dim of a parameter, sharded over one or more mesh axes like ``torch.chunk``."""

    dim: int
    axes: tuple[str, ...]
    """Mesh axes, outermost first. The product of their degrees is the number of chunks."""


class Box(NamedTuple):
    """A shard of a tensor, as an interval on every dim."""

    starts: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Number of elements; 1 for a tensor without dims."""
        return math.prod(self.sizes)

    def columns(self) -> tuple[slice, ...]:
        """Return the index of the box on all dims except the first."""
        return self.indices()[1:]

    def indices(self) -> tuple[slice, ...]:
        """Return the index of the box in its tensor."""
        return tuple(slice(start, start + size) for start, size in zip(self.starts, self.sizes, strict=True))

    def overlap(self, other: "Box") -> "Box":
        """Return the intersection of both boxes; its ``numel`` is 0 if they do not overlap."""
        starts = tuple(max(ours, theirs) for ours, theirs in zip(self.starts, other.starts, strict=True))
        ends = map(min, self._ends(), other._ends())
        return Box(starts, tuple(max(0, end - start) for start, end in zip(starts, ends, strict=True)))

    def seen_from(self, other: "Box") -> "Box":
        """Return this box with starts relative to ``other``."""
        starts = tuple(ours - theirs for ours, theirs in zip(self.starts, other.starts, strict=True))
        return Box(starts, self.sizes)

    def _ends(self) -> tuple[int, ...]:
        return tuple(start + size for start, size in zip(self.starts, self.sizes, strict=True))


@dataclass(frozen=True)
class ShardSpec:
    """Sharding of a parameter, or of another tensor with its shape, over the ranks of a layout."""

    name: str
    shape: tuple[int, ...]
    """Shape of the full tensor."""
    slices: tuple[Slice, ...] = ()
    """Slices, applied in order, each to the result of the previous one. If empty, every rank holds the full tensor."""
    holders: tuple[int, ...] = (0,)
    """Pipeline coordinate of each stage that holds the parameter."""
    sums_over: tuple[str, ...] = ()
    """Mesh axes over which the gradients must be summed."""

    @property
    def sliced_axes(self) -> tuple[str, ...]:
        """Mesh axes along which ranks hold different shards."""
        return tuple(axis for cut in self.slices for axis in cut.axes)

    def box(self, layout: Layout, place: Coordinates) -> Box:
        """Return the shard of the rank at ``place``, whose pipeline coordinate must be in ``holders``."""
        starts, sizes = [0] * len(self.shape), list(self.shape)
        for dim, axes in self.slices:
            start, size = chunk(sizes[dim], layout.size(axes), layout.index(place, axes))
            starts[dim] += start
            sizes[dim] = size
        return Box(tuple(starts), tuple(sizes))

    def copies(self, layout: Layout) -> int:
        """Return the number of ranks that hold each element."""
        return layout.world // layout.pipeline // layout.size(self.sliced_axes) * len(self.holders)

    def sources(self, layout: Layout) -> list[tuple[Box, int]]:
        """Return the distinct non-empty boxes, sorted by start, each with the first rank of a block that holds it."""
        return _sources(replace(self, name=""), layout)


@cache  # many tensors have the same shape
def _sources(spec: ShardSpec, layout: Layout) -> list[tuple[Box, int]]:
    holders: dict[Box, int] = {}
    for rank in range(layout.block):
        holders.setdefault(spec.box(layout, layout.coordinates(rank)), rank)
    return sorted((box, rank) for box, rank in holders.items() if box.numel)


def chunk(size: int, chunks: int, index: int) -> tuple[int, int]:
    """Return the start and size of chunk ``index``.

    Like ``torch.chunk``, chunks have ceil(size / chunks) elements; the last ones may be shorter or empty.
    """
    width = -(-size // chunks)
    start = min(index * width, size)
    return start, min(width, size - start)


def sharding(slices: Sequence[Slice], shape: Sequence[int], layout: Layout) -> Slice:
    """Return the slice of FSDP2, applied after ``slices`` to a tensor of ``shape``.

    FSDP2 shards dim 0, except for some experts.
    """
    if any("expert" in cut.axes for cut in slices):
        return Slice(expert_sharding_dim(shape[0], layout), ("expert_shard",))
    return Slice(0, ("shard", "context"))


def expert_sharding_dim(experts: int, layout: Layout) -> int:
    """Return the dim along which FSDP2 shards stacked experts.

    It is 1 if the number of experts per rank is not a multiple of the ranks that shard them, since along dim 0 some
    ranks would hold nothing. FSDP2 needs even shards along dim 1.
    """
    return 1 if experts // layout.expert % layout.expert_shard else 0


def stages_of(names: Sequence[str], plan: ParallelPlan, layout: Layout) -> dict[str, tuple[int, ...]]:
    """Return the pipeline stages that hold each of ``names``, the parameters or modules of a model in order.

    Names before the first of ``plan.blocks`` are in the first stage, names after it that are not blocks in the last
    stage. Names in ``plan.tied`` are in both.

    Raises:
        UserError: ``layout.layers_of_stages`` does not sum to the number of blocks.
    """
    if layout.stages == 1:
        return dict.fromkeys(names, (0,))
    if layout.layers_of_stages and sum(layout.layers_of_stages) != len(plan.blocks):
        raise UserError(
            f"parallel.layers_of_stages={list(layout.layers_of_stages)} sums to {sum(layout.layers_of_stages)}, but "
            f"the parallel plan of the model declares {len(plan.blocks)} blocks; correct the numbers, or remove them"
        )
    last = layout.stages - 1
    stage_of_block = {
        plan.blocks[number]: stage
        for stage in range(layout.stages)
        for number in layout.block_range(stage, len(plan.blocks))
    }
    found: dict[str, tuple[int, ...]] = {}
    before_blocks = True
    for name in names:
        parts = name.split(".")
        prefixes = (".".join(parts[:count]) for count in range(1, len(parts) + 1))
        stage = next((stage_of_block[prefix] for prefix in prefixes if prefix in stage_of_block), None)
        before_blocks = before_blocks and stage is None
        if stage is None:
            stage = 0 if before_blocks else last
        found[name] = (0, last) if name in plan.tied else (stage,)
    return found
