"""Which rank holds which part of every parameter: the only source of it. Pure arithmetic, no torch."""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import NamedTuple

from serried.parallel.mesh import Coordinates, Layout


class Slice(NamedTuple):
    """One dim of a parameter, divided over the ranks of one or more mesh axes by torch.chunk's rule."""

    dim: int
    axes: tuple[str, ...]
    """Outermost first; their product is the number of chunks."""


class Box(NamedTuple):
    """The part of a tensor that one rank holds: an interval on every dim."""

    starts: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Number of elements; 1 for a tensor without dims."""
        return math.prod(self.sizes)

    def columns(self) -> tuple[slice, ...]:
        """Index of the box within its rows: all dims but the first."""
        return tuple(slice(start, start + size) for start, size in zip(self.starts[1:], self.sizes[1:], strict=True))


@dataclass(frozen=True)
class ShardSpec:
    """How one parameter (or another tensor of its shape) is divided over the ranks of a layout."""

    name: str
    shape: tuple[int, ...]
    """Of the whole tensor."""
    slices: tuple[Slice, ...] = ()
    """Applied in order, each to what the one before it left. None: every rank holds the whole tensor."""
    stages: tuple[int, ...] = (0,)
    """Pipeline coordinates that hold it."""

    @property
    def sliced_axes(self) -> tuple[str, ...]:
        """Mesh axes along which ranks hold different parts."""
        return tuple(axis for each in self.slices for axis in each.axes)

    def box(self, layout: Layout, place: Coordinates) -> Box:
        """The part that the rank at ``place`` holds, which must be on one of ``stages``."""
        starts, sizes = [0] * len(self.shape), list(self.shape)
        for dim, axes in self.slices:
            start, size = chunk(sizes[dim], layout.size(axes), layout.index(place, axes))
            starts[dim] += start
            sizes[dim] = size
        return Box(tuple(starts), tuple(sizes))

    def copies(self, layout: Layout) -> int:
        """Number of ranks that hold each element."""
        return layout.world // layout.pipeline // layout.size(self.sliced_axes) * len(self.stages)

    def sources(self, layout: Layout) -> list[tuple[Box, int]]:
        """Every distinct box that is not empty, by where it starts, each with the first rank of a block that holds
        it."""
        return _sources(replace(self, name=""), layout)


@cache  # many tensors have the same shape
def _sources(spec: ShardSpec, layout: Layout) -> list[tuple[Box, int]]:
    holders: dict[Box, int] = {}
    for rank in range(layout.block):
        holders.setdefault(spec.box(layout, layout.coordinates(rank)), rank)
    return sorted((box, rank) for box, rank in holders.items() if box.numel)


def chunk(size: int, chunks: int, index: int) -> tuple[int, int]:
    """Start and size of chunk ``index``: ceil(size / chunks) each, the last ones shorter or empty, as torch.chunk."""
    width = -(-size // chunks)
    start = min(index * width, size)
    return start, min(width, size - start)


def shard_specs(
    shapes: Mapping[str, Sequence[int]], layout: Layout, whole: Collection[str] = ()
) -> dict[str, ShardSpec]:
    """The shard spec of every parameter, by name. Those in ``whole``, and those without dims, are not divided."""
    rows = (Slice(0, ("shard", "context")),) if layout.is_sharded else ()
    return {
        name: ShardSpec(name, tuple(shape), () if name in whole or not len(shape) else rows)
        for name, shape in shapes.items()
    }
