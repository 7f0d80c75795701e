"""Groups within the world: those of mesh axes are as impatient as the world's own."""

import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from harness.cluster import Cluster
from serried.configs.schema import LaunchSection
from serried.parallel.groups import Groups
from serried.parallel.mesh import Layout
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
