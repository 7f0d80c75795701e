"""Groups within the world: those of mesh axes are as impatient as the world's own."""

import os
import time
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore

from benchmarks.many_ranks import RankGroups, gloo_calls, groups_of, recorded_groups
from benchmarks.parity import CUTS, EXPERT_CUTS, MIXTURE, Cut
from serried.configs.compose import compose
from serried.configs.schema.launch_plan_track import LaunchSection
from serried.configs.schema.sections import ParallelSection
from serried.parallel.layout.mesh import Layout, resolve_layout
from serried.parallel.layout.process_groups import Groups
from serried.parallel.parallelize import parallelize
from serried.parallel.plan import ParallelPlan
from serried.runtime.rendezvous import GLOO_LAZY, limit_connections
from serried.runtime.session import open_session
from serried.trainer.trainer import Trainer
from testing.forked_runs import torchruns_variables, typed
from testing.rank_pool import Cluster
from testing.runs import losses, overrides, train_small
from tests.support.slurm import wait_for


def wait_on_each_axis_for_a_silent_peer(folder: str) -> float:
    """On a mesh of 2x2 rank 3 falls silent: rank 1 waits for it along ``replicate``, rank 2 along ``fsdp``."""
    with open_session(LaunchSection(start_timeout_seconds=100, step_timeout_seconds=2)) as session:
        mesh = Groups(Layout("hsdp", replicate=2, shard=2), "cpu").fsdp
        for axis in ("replicate", "fsdp"):
            assert mesh.get_group(axis) is not dist.group.WORLD
            dist.all_reduce(torch.ones(1), group=mesh.get_group(axis))
        session.first_step_done()
        axis = {1: "replicate", 2: "fsdp"}.get(session.rank)
        if axis is None:
            for other in ("replicate", "fsdp"):
                wait_for((Path(folder) / other).exists, "the others to lose their patience")
            return 0.0
        started = time.monotonic()
        with pytest.raises(RuntimeError, match="Timed out"):
            dist.all_reduce(torch.ones(1), group=mesh.get_group(axis))
        (Path(folder) / axis).touch()
        return time.monotonic() - started


@pytest.mark.slow
def test_timeout_is_shortened_in_the_groups_of_mesh_axes_too(cluster: Cluster, tmp_path: Path) -> None:
    """Guards the private list of groups in Session.first_step_done: what it misses would wait for 100 seconds."""
    answers = cluster.run(4, "tests.unit.test_groups:wait_on_each_axis_for_a_silent_peer", folder=str(tmp_path))
    assert [answer.value < 60 for answer in answers] == [True] * 4


class NormalizedAtFirst(nn.Module):
    """Two blocks, of which only the first has buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)), nn.Linear(4, 4)])


@pytest.mark.parametrize("rank", range(4))
def test_stage_without_buffers_has_the_group_that_shares_them(rank: int) -> None:
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=4)
    try:
        parallel = parallelize(
            NormalizedAtFirst(), ParallelPlan(blocks=("blocks.0", "blocks.1")), None, seed=1,
            layout=Layout("fsdp", pipeline=2, shard=2, stages=2), section=ParallelSection(strategy="fsdp"),
            low_dtype=None, device=torch.device("cpu"),
        )  # fmt: skip
        assert len(parallel.buffers.held()) == (3 if rank < 2 else 0)
        assert "stage" in parallel.groups.names().values()
    finally:
        dist.destroy_process_group()


def groups_made(layout: Layout) -> tuple[list[list[int]], Groups]:
    """Return the ranks of each group that this rank makes, in order."""
    made: list[list[int]] = []
    new_group = dist.new_group

    def recorded(ranks: list[int], **options: object) -> object:
        made.append(ranks)
        return new_group(ranks, **options)

    with patch.object(dist, "new_group", recorded):
        groups = Groups(layout, "cpu")
        groups.make(ties_ends=True)
    return made, groups


SHARDED = [
    pytest.param(cut, MIXTURE if cut in EXPERT_CUTS else (), id=cut.name)
    for cut in dict.fromkeys((*CUTS, *EXPERT_CUTS))
    if cut.processes > 1 and "compiled" not in cut.name
]


@pytest.mark.parametrize(("cut", "model"), SHARDED)
def test_groups_are_made_in_one_order_on_all_ranks_and_none_afterwards(cut: Cut, model: tuple[str, ...]) -> None:
    """A rank in another order, or without one of the calls, would make NCCL wait forever."""
    layout = resolve_layout(compose(["model.layers=4", *model, *cut.overrides]).parallel, cut.processes)
    orders = []
    for rank in range(cut.processes):
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=cut.processes)
        try:
            made, groups = groups_made(layout)
            orders.append(made)
            with pytest.raises(AssertionError, match="made in a step"):
                groups._group([[0, 1]])
        finally:
            dist.destroy_process_group()
    assert orders == [orders[0]] * cut.processes


def groups_of_run(argv: list[str]) -> tuple[list[list[int]], list[list[int]]]:
    """Train on this rank. Returns the ranks of each group made before the first step, and afterwards."""
    before, steps = 0, Trainer.steps

    def from_here(trainer: Trainer) -> Iterator[int]:
        nonlocal before
        before = len(made)
        return steps(trainer)

    with recorded_groups() as made, patch.object(Trainer, "steps", from_here):
        train_small(argv)
    ranks = [ranks for ranks, _ in made]
    return ranks[:before], ranks[before:]


@pytest.mark.parametrize(
    "argv",
    [
        ["parallel=hsdp", "parallel.replicate=2", "parallel.shard=2"],
        pytest.param(["parallel=fsdp", "parallel.pipeline=2", "parallel.tensor=2"], marks=pytest.mark.slow),
        pytest.param(["parallel=fsdp", "parallel.expert=2", *MIXTURE], marks=pytest.mark.slow),
    ],
    ids=["hsdp", "pipeline", "experts"],
)
def test_run_makes_the_counted_groups_before_its_first_step_and_none_later(
    argv: list[str], cluster: Cluster, text: Path, tmp_path: Path
) -> None:
    few = ("trainer.steps=2", "trainer.micro_batch=9", "trainer.eval_every=1", "trainer.eval_batches=1")
    argv = overrides(text, tmp_path / "run", *few, "checkpoint.every=1", *argv)
    answers = cluster.run(4, "tests.unit.test_groups:groups_of_run", argv=argv)
    layout = resolve_layout(compose(argv).parallel, 4)
    for rank, (before, after) in enumerate(answer.value for answer in answers):
        assert after == []
        counted = groups_of(layout, rank, ties_ends=False)
        assert len(before) == counted.made
        mine = sorted(len(ranks) for ranks in before if rank in ranks)
        assert mine == sorted([*counted.device[1:], *counted.host[1:]])


def test_llama_405b_has_the_expected_number_of_groups() -> None:
    config = compose(["recipe=llama405b", "data.tokenizer=bytes", "model.vocab_size=256"])
    counted = groups_of(resolve_layout(config.parallel, 512), 0, ties_ends=False)
    # of shard, tensor, pipeline and stage: 128, 64, 32 and 16; and of checkpoints: of all, and of 16 blocks
    assert counted == RankGroups(128 + 64 + 32 + 16 + 1 + 16, [512, 4, 8, 16, 32], [512, 512, 32])


def test_gloo_reads_an_address_of_each_rank_unless_it_connects_when_needed() -> None:
    """Why runs of many ranks set the variable. torch reads it once, so a process of its own does."""
    assert gloo_calls(4)[0] == 1 + 2 * 4
    code = "from benchmarks.many_ranks import gloo_calls; print(gloo_calls(4))"
    done = typed("-c", code, env=os.environ | {GLOO_LAZY: "1"})
    assert done.stdout == "(1, 0)\n", done.stderr


def test_gloo_connects_when_needed_only_among_many_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(GLOO_LAZY, raising=False)
    limit_connections(512)
    assert GLOO_LAZY not in os.environ
    limit_connections(513)
    assert os.environ.pop(GLOO_LAZY) == "1"
    monkeypatch.setenv(GLOO_LAZY, "0")
    limit_connections(4096)
    assert os.environ[GLOO_LAZY] == "0"


@pytest.mark.slow
def test_run_whose_ranks_connect_when_needed_has_the_same_losses(cluster: Cluster, text: Path, tmp_path: Path) -> None:
    """Gloo reads the variable once per process, so new processes train."""
    more = ["parallel=hsdp", "parallel.replicate=2", "parallel.shard=2", "trainer.steps=4", "checkpoint.every=2"]
    cluster.run(4, "testing.runs:train_small", argv=overrides(text, tmp_path / "eager", *more))
    lazy = Cluster(4, variables=lambda *rank: torchruns_variables(*rank) | {GLOO_LAZY: "1"})
    try:
        lazy.run(4, "testing.runs:train_small", argv=overrides(text, tmp_path / "lazy", *more))
    finally:
        lazy.stop()
    assert losses(tmp_path / "lazy") == losses(tmp_path / "eager")


def test_single_process_has_no_groups_on_a_gpu() -> None:
    groups = Groups(Layout("single"), "cuda")
    groups.make(ties_ends=True)
    assert [groups.tensor, groups.context, groups.pipeline, groups.expert, groups.stage, groups.ends] == [None] * 6
