"""What torch's CUDA caching allocator reserves, by its rules; no GPU takes part."""

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serried.planner.trace.cuda_allocator import Phase, Request, _Stream, anonymous, extended, unused_bytes

MIB = 2**20


@settings(deadline=None)
@given(
    st.booleans(), st.lists(st.tuples(st.integers(MIB + 1, 64 * MIB), st.one_of(st.none(), st.integers(0, 50)))),
)  # fmt: skip
def test_live_ranges_do_not_overlap_and_are_reserved(
    is_expandable: bool, requests: list[tuple[int, int | None]]
) -> None:
    stream = _Stream(is_expandable=is_expandable)
    live: list[tuple[int, int]] = []
    for size, freed in requests:
        if freed is not None and live:
            stream.give_back(*live.pop(freed % len(live)))
        live.append(stream.take(-(-size // 512) * 512))
        assert size <= live[-1][1]
        assert all(start + taken <= after for (start, taken), (after, _) in pairwise(sorted(live)))
        assert sum(taken for _, taken in live) + sum(left for left, _ in stream._free) == stream.reserved


@pytest.mark.parametrize(
    ("requests", "plain", "expandable"),
    [
        ([(3 * MIB, 0)], 17 * MIB, 17 * MIB),
        ([(3 * MIB, 0), (9 * MIB, 0)], 8 * MIB, 8 * MIB),
        ([(3 * MIB, 0), (9 * MIB, 1)], 28 * MIB, 28 * MIB),  # of two streams
        ([(29 * MIB, 0)], MIB, 11 * MIB),
        ([(MIB, 0)], 0, 0),  # small
        # What is freed between two others is too small for the fourth. One segment grows; segments of their own stay.
        ([(40 * MIB, 0), (40 * MIB, 0), (40 * MIB, 0, 0, 0), (60 * MIB, 0)], 40 * MIB, 40 * MIB),
        ([(40 * MIB, 0), (40 * MIB, 0), (40 * MIB, 0, 0, 1), (60 * MIB, 0)], 40 * MIB, 0),
        # The rest of a free segment is split off, if it is more than 1 MiB.
        ([(60 * MIB, 0), (60 * MIB, 0, 0, -1), (40 * MIB, 0), (20 * MIB, 0)], 0, 0),
    ],
)
def test_unused_part_of_reserved_memory(requests: Phase, plain: int, expandable: int) -> None:
    sizes = [each for each in requests if each[0] > MIB]
    assert unused_bytes([sizes], is_expandable=False) == plain
    assert unused_bytes([sizes], is_expandable=True) == expandable


def model(blocks: int) -> list[Phase]:
    """Requests of a forward that keeps a tensor for each block, and of a backward that frees them, last first."""
    set_up: list[Request] = [("a", 3 * MIB, 0), ("a", 0, 0), ("weights", 64 * MIB, 0), ("tiny", 8, 0)]
    forward: list[Request] = []
    backward: list[Request] = []
    for block in range(blocks):
        forward += [("hidden", 9 * MIB, 0), (block, 2 * MIB + 1, 0), ("hidden", 0, 0)]
        backward += [("gradient", 9 * MIB, 0), (blocks - 1 - block, 0, 0), ("gradient", 0, 0)]
    return anonymous([set_up, forward, backward])


def test_requests_of_many_blocks_follow_from_those_of_a_few() -> None:
    assert model(3)[0] == [(64 * MIB, 0)]
    assert extended(model(2), model(3), model(4), 30) == model(32)


def test_blocks_with_different_requests_are_not_extrapolated() -> None:
    other = model(4)
    other[1][3] = (MIB + 512, 0)
    assert extended(model(2), model(3), other, 30) is None
    assert extended(model(2), model(3), model(4)[:2], 30) is None
