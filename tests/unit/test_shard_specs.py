"""Shard specs: every element is held by exactly as many ranks as they say, and local shapes are those torch makes."""

import math

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed.tensor.debug import CommDebugMode
from torch.testing._internal.distributed.fake_pg import FakeStore

from serried.configs.compose import compose
from serried.parallel.axes.model_axes import shard_specs
from serried.parallel.layout.mesh import AXES, Layout, resolve_layout
from serried.parallel.layout.shard_specs import ShardSpec, Slice, chunk
from serried.parallel.parallelize import parallelize
from serried.parallel.plan import ParallelPlan
from serried.recipes.models.families.llama import Transformer

DEGREES = st.sampled_from([1, 1, 2, 3])
LAYOUTS = st.builds(Layout, st.just("hsdp"), **dict.fromkeys(AXES, DEGREES))


@st.composite
def divided(draw: st.DrawFn) -> tuple[Layout, ShardSpec]:
    """Any layout, and a tensor divided over its tensor, shard and context axes, held by one stage or two."""
    layout = draw(LAYOUTS)
    shape = tuple(draw(st.lists(st.integers(1, 11), min_size=1, max_size=3)))
    dims = st.integers(0, len(shape) - 1)
    slices = [Slice(draw(dims), ("tensor",))] if draw(st.booleans()) else []
    slices.append(Slice(draw(dims), ("shard", "context")))
    stages = tuple(sorted({0, layout.pipeline - 1})) if draw(st.booleans()) else (0,)
    return layout, ShardSpec("weight", shape, tuple(slices), stages)


@settings(max_examples=150, deadline=None)
@given(divided())
def test_every_element_is_held_by_as_many_ranks_as_the_spec_says(case: tuple[Layout, ShardSpec]) -> None:
    layout, spec = case
    holders, squares = np.zeros(spec.shape, int), 0.0
    for rank in range(layout.world):
        place = layout.coordinates(rank)
        if place.pipeline in spec.holders:
            box = spec.box(layout, place)
            rows = slice(box.starts[0], box.starts[0] + box.sizes[0])
            holders[(rows, *box.columns())] += 1
            squares += box.numel / spec.copies(layout)
    assert (holders == spec.copies(layout)).all()
    assert math.isclose(squares, math.prod(spec.shape)), "a norm counts each element once"


@given(st.integers(1, 40), st.integers(1, 12))
def test_chunks_equal_those_of_torch(size: int, chunks: int) -> None:
    theirs = [len(part) for part in torch.arange(size).chunk(chunks)]
    ours = [chunk(size, chunks, index) for index in range(chunks)]
    assert [width for _, width in ours] == theirs + [0] * (chunks - len(theirs))
    assert [start for start, width in ours if width] == [sum(theirs[:index]) for index in range(len(theirs))]


@given(LAYOUTS)
def test_ranks_are_numbered_row_major_and_blocks_are_contiguous(layout: Layout) -> None:
    places = [layout.coordinates(rank) for rank in range(layout.world)]
    assert [layout.index(place, AXES) for place in places] == list(range(layout.world))
    blocks = [layout.index(place, ("pipeline", "replicate")) for place in places]
    assert blocks == sorted(blocks)
    assert len(blocks) == layout.block * len(set(blocks))
    assert {place.data_rank for place in places} == set(range(layout.data_ranks))


@given(st.integers(1, 9), st.integers(1, 30))
def test_sources_of_a_block_are_its_rows_in_order(shard: int, rows: int) -> None:
    layout = Layout("hsdp", replicate=2, shard=shard)
    model = nn.Linear(3, rows, bias=False, device="meta")
    spec = shard_specs(model, ParallelPlan(), layout)["weight"]
    sources = spec.sources(layout)
    assert [rank for _, rank in sources] == list(range(len(sources)))
    assert sum(box.sizes[0] for box, _ in sources) == rows
    assert all(box.sizes[1:] == (3,) for box, _ in sources)


def test_tensors_that_cannot_be_sharded_are_replicated_on_every_rank() -> None:
    layout = Layout("fsdp", shard=4)
    model = nn.Module()
    model.scale, model.weight = nn.Parameter(torch.zeros(())), nn.Parameter(torch.zeros(1))
    model.codes = nn.Parameter(torch.zeros(8, 2, dtype=torch.int64), requires_grad=False)
    specs = shard_specs(model, ParallelPlan(), layout)
    assert [specs[name].copies(layout) for name in ("scale", "codes", "weight")] == [4, 4, 1]
    assert [specs["weight"].box(layout, layout.coordinates(rank)).numel for rank in range(4)] == [1, 0, 0, 0]


@pytest.mark.parametrize("rank", [3, 500])
def test_on_512_ranks_local_shapes_are_those_of_the_specs(rank: int) -> None:
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=512)
    try:
        with torch.device("meta"):
            model = nn.Sequential(nn.Embedding(32000, 24), *(nn.Linear(24, 24) for _ in range(3)), nn.LayerNorm(24))
        config = compose(["parallel=hsdp", "parallel.replicate=8", "parallel.shard=64"])
        layout = Layout("hsdp", replicate=8, shard=64)
        parallel = parallelize(
            model, ParallelPlan((("0",), ("1",))), None, seed=1, layout=layout, section=config.parallel,
            low_dtype=None, device=torch.device("cpu"),
        )  # fmt: skip
        shapes = {held.name: tuple(held.local.shape) for held in parallel.parameters}
        assert shapes["0.weight"] == (500, 24)
        assert shapes["1.weight"] == ((1, 24) if rank % 64 < 24 else (0, 24))
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize(("rank", "stage"), [(3, 0), (500, 7)])
def test_on_512_ranks_a_stage_exchanges_what_its_layout_says(rank: int, stage: int) -> None:
    """Pipeline 8 x shard 8 x tensor 8. Shapes are asserted as the model is divided; collectives are counted here."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=512)
    try:
        config = compose([
            "parallel=fsdp", "parallel.pipeline=8", "parallel.tensor=8", "parallel.shard=8", "model.dim=128",
            "model.layers=16", "model.heads=16", "model.kv_heads=8", "model.hidden_dim=256", "model.vocab_size=3200",
            "model.tie_embeddings=false",
        ])  # fmt: skip
        layout = resolve_layout(config.parallel, 512)
        with torch.device("meta"):
            model = Transformer(config.model, 3200)
        parallel = parallelize(
            model, model.parallel_plan(), lambda _: 0.02, seed=1, layout=layout, section=config.parallel,
            low_dtype=None, device=torch.device("cpu"),
        )  # fmt: skip
        assert layout.stages_of(parallel.place.pipeline) == (stage,)
        tokens, targets = torch.zeros(1, 64, dtype=torch.int64), torch.zeros(1, 64, dtype=torch.int64)
        stream = tokens if stage == 0 else torch.randn(1, 8, 128, requires_grad=True)
        with CommDebugMode() as counted:
            root = parallel.runner._stages[stage].root  # not through the schedule, which talks to its neighbours
            root(nn.Module.__call__, stream, targets=targets).sum().backward()
    finally:
        dist.destroy_process_group()
    found = {str(name): count for name, count in counted.get_comm_counts().items()}
    # FSDP: a gather and a reduction for each of 2 blocks and one end. Tensor, in each block: 2 regions gather the
    # stream and 2 rows add it up, and the reverse in the backward. Of the ends, the look-up adds up once; the head
    # gathers and adds up the stream, and gathers the sums of its chunk.
    ends = {0: (1, 1), 7: (2, 1)}[stage]
    functional = {name.rpartition(".")[2]: count for name, count in found.items() if "functional" in name}
    assert functional == {"all_gather_into_tensor": 8 + ends[0], "reduce_scatter_tensor": 8 + ends[1]}
    assert {name: count for name, count in found.items() if name.startswith("c10d.")} == {
        "c10d._allgather_base_": 3, "c10d._reduce_scatter_base_": 3,
    }  # fmt: skip
