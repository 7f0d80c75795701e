"""Bytes that a rank sends in a step, by axis. Pure arithmetic: torch is not imported."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from serried.parallel.layout.mesh import Layout

_FP32_BYTES = 4


@dataclass(frozen=True)
class Flow:
    """Collectives of one kind along one axis in an optimizer step, on one rank."""

    axis: str
    """``fsdp`` (shard x context), ``replicate``, ``context``, ``tensor``, ``expert``, ``expert fsdp``, ``pipeline``,
    ``ends`` or ``stage`` of a pipeline, or ``world`` for sums over all ranks."""
    kind: str
    """``all_gather``, ``reduce_scatter``, ``all_reduce``, ``all_to_all``, ``broadcast`` or ``send``."""
    when: str
    """Phase of the step: ``forward``, ``backward`` or ``end``."""
    bytes: int
    """Bytes that this rank sends in a ring: (n - 1)/n of the full tensor to gather or scatter, twice that to sum."""
    calls: int
    ranks: int
    """Size of the group."""


@dataclass(frozen=True)
class Unit:
    """Parameters that FSDP2 gathers together, after sharding on the other axes."""

    shapes: Sequence[tuple[int, ...]]
    trained: Sequence[tuple[int, ...]]
    """Shapes of the parameters with gradients."""
    in_float8: Sequence[tuple[int, ...]] = ()
    """Shapes of the parameters that are gathered in float8."""


@dataclass(frozen=True)
class Exchanges:
    """Settings that determine the communication of FSDP2."""

    accumulation: int
    frees_after_forward: bool
    reduces_each: bool
    """Whether gradients are reduced after each micro-batch."""
    width: int
    """Bytes per gathered element, unless it is gathered in float8."""


def fsdp_flows(layout: Layout, units: Sequence[Unit], rest: Unit, how: Exchanges) -> Iterator[Flow]:
    """Yield the communication of FSDP2 and DDP. ``rest``: parameters in no unit.

    ZeRO-3 gathers each unit in every forward and again in every backward. The last unit, where the backward starts, and
    ``rest`` are gathered only in the forward. ZeRO-2 gathers all units once per step.

    If gradients are reduced only at the end of a step, FSDP2 gathers the last unit once more: the first unit prefetches
    it as the next one, unless there is a ``rest``. Frozen units before the first trained unit are not needed in the
    backward. Only the last of them is prefetched, and it is reused in the next forward unless gradients were reduced.
    """
    ranks, copies = layout.shard * layout.context, layout.replicate
    held = [unit for unit in (*units, rest) if unit.shapes]
    trained = [unit.trained for unit in held if unit.trained]
    if layout.is_replicated:
        whole = _FP32_BYTES * sum(math.prod(shape) for shapes in trained for shape in shapes)
        yield Flow("replicate", "all_reduce", "backward", 2 * whole * (copies - 1) // copies, 1, copies)
        return
    if layout.is_sharded and ranks > 1:
        frozen = next((number for number, unit in enumerate(units) if unit.trained), 0)
        first = [_gathered(unit, ranks, how.width) for unit in held]
        later = first if how.reduces_each else first[: max(0, frozen - 1)] + first[frozen:]
        left = how.accumulation - 1 if how.frees_after_forward else 0
        forward, backward = first + left * later, []
        if how.frees_after_forward:
            again = units[max(0, frozen - 1) : -1]
            backward = how.accumulation * [_gathered(unit, ranks, how.width) for unit in again]
        is_once_more = (
            units and how.accumulation > 1 and not (how.reduces_each or frozen or rest.shapes or layout.pipeline > 1)
        )
        more = [_gathered(units[-1], ranks, how.width)] if is_once_more else []
        for when, shards in (("forward", forward), ("backward", backward + more)):
            if shards:
                yield Flow("fsdp", "all_gather", when, (ranks - 1) * sum(shards), len(shards), ranks)
        if scales := sum(len(unit.in_float8) for unit in held):
            yield Flow("fsdp", "all_reduce", "end", 2 * _FP32_BYTES * scales * (ranks - 1) // ranks, 1, ranks)
    times = how.accumulation if how.reduces_each else 1
    reduced = [_shard(shapes, ranks) for shapes in trained]
    if layout.is_sharded and ranks > 1:
        sent = times * _FP32_BYTES * (ranks - 1) * sum(reduced)
        yield Flow("fsdp", "reduce_scatter", "backward", sent, times * len(reduced), ranks)
    if layout.is_sharded and copies > 1:
        sent = times * sum(2 * _FP32_BYTES * shard * (copies - 1) // copies for shard in reduced)
        yield Flow("replicate", "all_reduce", "backward", sent, times * len(reduced), copies)


def _gathered(unit: Unit, ranks: int, width: int) -> int:
    """Return the bytes of a rank's shard in the dtype in which it is gathered."""
    return width * _shard(unit.shapes, ranks) - (width - 1) * _shard(unit.in_float8, ranks)


def _shard(shapes: Sequence[tuple[int, ...]], ranks: int) -> int:
    """Return the elements of a rank's shard, padded to equal sizes."""
    return sum(-(-shape[0] // ranks) * math.prod(shape[1:]) for shape in shapes)
