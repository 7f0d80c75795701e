"""Fragmentation of torch's CUDA caching allocator, computed by simulating its rules.

The rules follow c10/cuda/CUDACachingAllocator.cpp: each stream has its own memory. A request takes the smallest
free range that is large enough. The range is split if enough is left, and adjacent free ranges of a segment merge. Free
memory stays reserved. Requests of up to 1 MiB use separate segments, a few MiB in total, and are left out. With
``expandable_segments:True``, which runs set, a stream has one segment that grows.
"""

import os
from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Hashable, Iterable, Sequence
from difflib import SequenceMatcher

from serried.runtime.process import ALLOCATOR_SETTINGS, EXPANDABLE_SEGMENTS

_MIB = 2**20
_MULTIPLE = 512
_SMALL = _MIB
_SEGMENT = 20 * _MIB
"""Size of a segment that several requests share."""
_SHARED_UP_TO = 10 * _MIB
"""Requests of at least this size get their own segment."""
_SEGMENT_MULTIPLE = 2 * _MIB
"""Multiple to which the size of a segment with a single request is rounded up."""
_LEAST_LEFT = _MIB + 1
"""Smallest remainder of a range that is split off, in bytes. In an expandable segment, it is ``_MULTIPLE`` instead."""

Request = tuple[Hashable, int, int]
"""(Block, bytes, stream); 0 bytes free the block."""
Phase = list[tuple[int, ...]]
"""Size and stream of each request. A freed block also has the phase of its request, and its index among the remaining
blocks of equal size, stream and phase. The index is negative if these blocks are freed in reverse order."""


def has_expandable_segments() -> bool:
    """Return whether runs use expandable segments, the default unless the user configures the allocator otherwise."""
    settings = [setting for setting in map(os.environ.get, ALLOCATOR_SETTINGS) if setting]
    return not settings or any(EXPANDABLE_SEGMENTS in setting for setting in settings)


def anonymous(phases: Iterable[Iterable[Request]]) -> list[Phase]:
    """Return ``phases`` without block identities, so that equal blocks of a model have equal requests.

    The first phase is the set-up. Only memory that outlives it is kept, because the set-up differs on a GPU.
    """
    first, *others = map(list, phases)
    lasting: dict[Hashable, Request] = {}
    for request in first:
        lasting.pop(request[0], None)
        if request[1]:
            lasting[request[0]] = request
    live: dict[tuple[int, ...], list[Hashable]] = defaultdict(list)
    keys: dict[Hashable, tuple[int, ...]] = {}
    found: list[Phase] = []
    for number, phase in enumerate([[*lasting.values()], *others]):
        found.append([])
        ends: dict[tuple[int, ...], bool] = {}
        """Whether blocks are counted from the last. The first freed block decides; within one phase they always are."""
        for block, size, stream in phase:
            if size > _SMALL:
                size = -(-size // _MULTIPLE) * _MULTIPLE
                keys[block] = size, stream, number
                live[keys[block]].append(block)
                found[-1].append((size, stream))
            elif not size and block in keys:
                alike = live[key := keys.pop(block)]
                place = alike.index(block)
                is_from_last = key[2] == number or ends.setdefault(key, place >= len(alike) // 2)
                found[-1].append((*key, place - len(alike) * is_from_last))
                del alike[place]
    return found


def extended(few: list[Phase], more: list[Phase], proof: list[Phase], times: int) -> list[Phase] | None:
    """Extrapolate the requests of a model by its number of blocks; return None if ``proof`` contradicts the result.

    Args:
        few: requests of a model with few blocks.
        more: requests with n more blocks than ``few``.
        proof: requests with 2n more blocks than ``few``.
        times: number of times that n blocks are added to ``few``.
    """
    if not len(few) == len(more) == len(proof):
        return None
    found: list[Phase] = []
    for first, second, third in zip(few, more, proof, strict=True):
        matcher = SequenceMatcher(None, first, second, autojunk=False)
        changes = [change for change in matcher.get_opcodes() if change[0] != "equal"]
        if any(kind != "insert" for kind, *_ in changes) or _repeated(first, second, changes, 2) != third:
            return None
        found.append(_repeated(first, second, changes, times))
    return found


def _repeated(first: Phase, second: Phase, changes: Iterable[tuple[str, int, int, int, int]], times: int) -> Phase:
    found, place = [], 0
    for _, begin, _, start, end in changes:
        found += first[place:begin] + second[start:end] * times
        place = begin
    return found + first[place:]


def unused_bytes(phases: Sequence[Phase], *, is_expandable: bool) -> int:
    """Return the total bytes that the allocator reserves, minus the peak in use."""
    streams: dict[int, _Stream] = defaultdict(lambda: _Stream(is_expandable=is_expandable))
    live: dict[tuple[int, ...], list[tuple[int, int]]] = defaultdict(list)
    now = peak = 0
    for number, phase in enumerate(phases):
        for size, stream, *freed in phase:
            if freed:
                born, place = freed
                streams[stream].give_back(*live[size, stream, born].pop(place))
                now -= size
            else:
                live[size, stream, number].append(streams[stream].take(size))
                now += size
                peak = max(peak, now)
    return sum(stream.reserved for stream in streams.values()) - peak


class _Stream:
    """Memory of one stream, as ranges of addresses."""

    def __init__(self, *, is_expandable: bool) -> None:
        self.reserved = 0
        self._is_expandable, self._end = is_expandable, 0
        self._free: list[tuple[int, int]] = []
        """(Size, start) of the free ranges, ascending."""
        self._sizes: dict[int, int] = {}
        """Sizes of the free ranges by start."""
        self._starts: dict[int, int] = {}
        """Starts of the free ranges by end."""

    def take(self, size: int) -> tuple[int, int]:
        """Allocate a range of at least ``size`` bytes. Return its start and size."""
        place = bisect_left(self._free, (size, 0))
        if self._is_expandable and place + 1 < len(self._free) and sum(self._free[place]) == self._end:
            place += 1  # the last range can grow, so it counts as the largest
        if place < len(self._free):
            there, start = self._free[place]
            self._remove(start)
        else:
            start, there = self._reserve(size)
        left = there - size
        if left < (_MULTIPLE if self._is_expandable else _LEAST_LEFT):
            return start, there
        self._add(start + size, left)
        return start, size

    def give_back(self, start: int, size: int) -> None:
        if start in self._starts:
            before = self._starts[start]
            size += self._remove(before)
            start = before
        if start + size in self._sizes:
            size += self._remove(start + size)
        self._add(start, size)

    def _reserve(self, size: int) -> tuple[int, int]:
        if self._is_expandable:
            start, before = self._starts.get(self._end, self._end), self._end
            if start < before:
                self._remove(start)
            self._end = -(-(start + size) // _SEGMENT) * _SEGMENT
            self.reserved += self._end - before
            return start, self._end - start
        there = _SEGMENT if size < _SHARED_UP_TO else -(-size // _SEGMENT_MULTIPLE) * _SEGMENT_MULTIPLE
        start = self._end + _MULTIPLE  # not adjacent to the previous segment
        self._end = start + there
        self.reserved += there
        return start, there

    def _add(self, start: int, size: int) -> None:
        insort(self._free, (size, start))
        self._sizes[start] = size
        self._starts[start + size] = start

    def _remove(self, start: int) -> int:
        size = self._sizes.pop(start)
        del self._starts[start + size]
        del self._free[bisect_left(self._free, (size, start))]
        return size
