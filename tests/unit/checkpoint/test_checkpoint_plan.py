"""Who sends what to whom: on any layout every tensor of a checkpoint is put together from the boxes that ranks hold."""

import math
from collections.abc import Iterator
from itertools import pairwise

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from serried.parallel.checkpoint_mapping import Fragment, unchanged
from serried.parallel.layout.local_shards import HeldTensor
from serried.parallel.layout.mesh import AXES, Layout
from serried.parallel.layout.shard_specs import Box, ShardSpec, Slice
from serried.records.safetensors_files import TensorSpec
from serried.trainer.checkpoint.file_assignment import Part, Plan, deal_files, make_plan, targets_of, windows_of
from serried.trainer.checkpoint.tensor_exchange import put_into_place

LAYOUTS = st.builds(Layout, st.just("hsdp"), **dict.fromkeys(AXES, st.sampled_from([1, 1, 2, 3])))
BUCKET = 256


@st.composite
def specs_on(draw: st.DrawFn, layout: Layout, number: int) -> tuple[ShardSpec, str]:
    """A tensor divided along any dims, held by any stage or by the first and the last, and how it is exported."""
    shape = tuple(draw(st.lists(st.integers(1, 11), max_size=3)))
    dims = st.integers(0, max(0, len(shape) - 1))
    slices = []
    if shape and draw(st.booleans()):
        slices.append(Slice(draw(dims), ("tensor",)))
    if shape and draw(st.booleans()):
        slices.append(Slice(draw(dims), ("shard", "context")))
    first = draw(st.integers(0, layout.pipeline - 1))
    stages = tuple(sorted({first, layout.pipeline - 1})) if draw(st.booleans()) else (first,)
    how = draw(st.sampled_from(["whole", "entries", "joined"])) if shape else "whole"
    return ShardSpec(f"p{number}", shape, tuple(slices), stages), how


@st.composite
def states(draw: st.DrawFn) -> tuple[Layout, list[tuple[ShardSpec, tuple[Fragment, ...], Tensor]]]:
    """A layout, and for each parameter its spec, its fragments and its value."""
    layout, found = draw(LAYOUTS), []
    for number in range(draw(st.integers(1, 4))):
        spec, how = draw(specs_on(layout, number))
        named, shape = [spec], spec.shape
        fragments = {spec.name: unchanged(f"hf.{number}", shape)}
        if how == "entries":
            each = (Fragment.entry(f"hf.{number}.{index}", shape, index) for index in range(shape[0]))
            fragments[spec.name] = tuple(each)
        elif how == "joined":  # two parameters, which may be divided differently, beside each other in one tensor
            other, dim = draw(specs_on(layout, number)), draw(st.integers(0, len(shape) - 1))
            slices = tuple(Slice(min(each.dim, len(shape) - 1), each.axes) for each in other[0].slices)
            named.append(ShardSpec(f"{spec.name}.b", shape, slices, spec.holders))
            whole = (*shape[:dim], 2 * shape[dim], *shape[dim + 1 :])
            fragments = {
                each.name: (Fragment.within(f"hf.{number}", whole, dim, index * shape[dim], shape),)
                for index, each in enumerate(named)
            }
        dtype = draw(st.sampled_from([torch.float32, torch.bfloat16, torch.int64, torch.bool]))
        for each in named:
            value = torch.randint(2, shape).to(dtype) if dtype == torch.bool else torch.randn(shape).mul(9).to(dtype)
            found.append((each, fragments[each.name], value))
    return layout, found


def held_by(layout: Layout, rank: int, state: list[tuple[ShardSpec, tuple[Fragment, ...], Tensor]]) -> list[Part]:
    place = layout.coordinates(rank)
    parts = []
    for spec, fragments, value in state:
        if place.pipeline in spec.holders:
            box = spec.box(layout, place)
            parts.append(Part(spec.name, HeldTensor(spec.name, value[box.indices()].clone(), spec, box), fragments))
    return [*parts, *parts[:1]]  # as a rank holds a tied parameter twice under a schedule shaped like a V


def plans_of(layout: Layout, held: list[list[Part]]) -> list[Plan]:
    targets = [targets_of(parts, layout.coordinates(rank).pipeline) for rank, parts in enumerate(held)]
    ranks = layout.world // layout.pipeline
    stages: list[list[TensorSpec]] = [[target.spec for target in each.values()] for each in targets[::ranks]]
    files = deal_files(stages, "model", ranks)
    return [make_plan(files, targets[rank], layout, rank, BUCKET) for rank in range(layout.world)]


def written(layout: Layout, rank: int, plans: list[Plan], held: list[list[Part]]) -> Iterator[tuple[str, Tensor]]:
    """Name of a tensor and bytes of each window that ``rank`` writes, in order, as all ranks' plans have them sent."""
    first = rank // layout.block * layout.block
    named = [{part.name: part.local for part in parts} for parts in held]
    for number, windows in enumerate(plans[rank].writes):
        expected: list[list[tuple[object, ...]]] = [[] for _ in range(layout.block)]
        assert sum(window.nbytes for window in windows) <= BUCKET or len(windows) == 1
        for window in windows:
            contents = []
            for piece in window.pieces:
                expected[piece.source].append((piece.part, piece.box, piece.dtype))
                contents.append(named[first + piece.source][piece.part][piece.box.indices()])
            if not window.is_in_order:
                contents = [put_into_place(torch.empty(window.sizes, dtype=window.spec.dtype), window, contents)]
            yield window.spec.name, torch.cat([each.flatten() for each in contents] or [torch.empty(0)])
        for source, pieces in enumerate(expected):
            sent = plans[first + source].sends[number][rank - first]
            assert [(piece.part, piece.box, piece.dtype) for piece in sent] == pieces


@settings(max_examples=150, deadline=None)
@given(states())
def test_every_tensor_is_written_once_in_full_on_any_layout(
    case: tuple[Layout, list[tuple[ShardSpec, tuple[Fragment, ...], Tensor]]],
) -> None:
    layout, state = case
    held = [held_by(layout, rank, state) for rank in range(layout.world)]
    plans = plans_of(layout, held)
    found: dict[str, list[Tensor]] = {}
    for rank in range(layout.world):
        order = [name for name, _ in written(layout, rank, plans, held)]
        for name, content in written(layout, rank, plans, held):
            found.setdefault(name, []).append(content)
        planned = [spec.name for file in plans[rank].files if file.owner == rank for spec in file.specs]
        assert list(dict.fromkeys(order)) == planned, "each file is written from front to back"
    whole: dict[str, Tensor] = {}
    for _, fragments, value in state:
        for fragment in fragments:
            into = whole.setdefault(fragment.name, torch.empty(fragment.shape, dtype=value.dtype))
            into[fragment.theirs.indices()] = value[fragment.ours.indices()].view(fragment.theirs.sizes)
    assert found.keys() == whole.keys()
    for name, tensor in whole.items():
        assert torch.cat(found[name]).equal(tensor.flatten()), name
    assert len({file.name for file in plans[0].files}) == len(plans[0].files)


@given(st.lists(st.integers(1, 9), max_size=4), st.integers(1, 40))
def test_windows_are_intervals_of_memory_that_cover_a_tensor_in_order(shape: list[int], limit: int) -> None:
    flat = torch.arange(math.prod(shape)).view(shape)
    windows = [flat[window.indices()].flatten() for window in windows_of(shape, limit)]
    assert torch.cat(windows).equal(flat.flatten())
    assert all(len(window) <= limit for window in windows)
    assert all(int(last[-1]) + 1 == int(first[0]) for last, first in pairwise(windows))


def test_full_rows_are_sent_in_order_without_a_copy() -> None:
    layout = Layout("fsdp", shard=4)
    spec = ShardSpec("weight", (64, 5), (Slice(0, ("shard",)),))
    state = [(spec, unchanged("weight", (64, 5)), torch.randn(64, 5))]
    held = [held_by(layout, rank, state) for rank in range(4)]
    assert all(window.is_in_order for plan in plans_of(layout, held) for each in plan.writes for window in each)


def test_fragment_maps_a_box_of_a_stacked_or_fused_tensor() -> None:
    entry = Fragment.entry("expert", (8, 6, 4), 5)
    assert entry.there(Box((5, 2, 0), (1, 3, 4))) == Box((2, 0), (3, 4))
    keys = Fragment.within("c_attn", (4, 12), 1, 4, (4, 4))
    assert keys.there(Box((1, 2), (2, 2))) == Box((1, 6), (2, 2))
    assert not keys.is_whole
    assert Fragment.whole("norm", (4,)).is_whole
