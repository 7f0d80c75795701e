"""Groups within the world: those of mesh axes are as impatient as the world's own."""

import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore

from harness.cluster import Cluster
from serried.configs.schema import LaunchSection, ParallelSection
from serried.parallel.apply import parallelize
from serried.parallel.groups import Groups
from serried.parallel.mesh import Layout
from serried.parallel.plan import ParallelPlan
from serried.runtime.session import open_session
from tests.slurm import wait_for


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
                wait_for((Path(folder) / other).exists, "the others to lose their patience", 90)
            return 0.0
        started = time.monotonic()
        with pytest.raises(RuntimeError, match="Timed out"):
            dist.all_reduce(torch.ones(1), group=mesh.get_group(axis))
        (Path(folder) / axis).touch()
        return time.monotonic() - started


@pytest.mark.slow
def test_patience_is_short_in_the_groups_of_mesh_axes_too(cluster: Cluster, tmp_path: Path) -> None:
    """Guards the private list of groups in Session.first_step_done: what it misses would wait for 100 seconds."""
    answers = cluster.run(4, "tests.test_groups:wait_on_each_axis_for_a_silent_peer", folder=str(tmp_path))
    assert [answer.value < 60 for answer in answers] == [True] * 4


class NormalizedAtFirst(nn.Module):
    """Two blocks, of which only the first has buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)), nn.Linear(4, 4)])


@pytest.mark.parametrize("rank", range(4))
def test_ranks_of_a_stage_without_buffers_make_the_group_that_shares_them(rank: int) -> None:
    """NCCL splits the world's communicator for a group, which waits for all ranks of the world."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=4)
    try:
        parallel = parallelize(
            NormalizedAtFirst(), ParallelPlan(blocks=("blocks.0", "blocks.1")), None, seed=1,
            layout=Layout("fsdp", pipeline=2, shard=2, stages=2), section=ParallelSection(strategy="fsdp"),
            low_dtype=None, device=torch.device("cpu"),
        )  # fmt: skip
        assert len(parallel.buffers) == (3 if rank < 2 else 0)
        parallel._share_buffers()
        assert "stage" in parallel.groups.names().values()
    finally:
        dist.destroy_process_group()
