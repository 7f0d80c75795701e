"""Groups within the world: those of mesh axes are as impatient as the world's own."""

import time

import pytest
import torch
import torch.distributed as dist

from serried.configs.schema import LaunchSection
from serried.parallel.groups import Groups
from serried.parallel.mesh import Layout
from serried.runtime.session import open_session
from tests.cluster import Cluster

SILENT_SECONDS = 12.0


def wait_on_each_axis_for_a_silent_peer() -> float:
    """On a mesh of 2x2 rank 3 falls silent: rank 1 waits for it along ``replicate``, rank 2 along ``fsdp``."""
    with open_session(LaunchSection(start_timeout_seconds=100, step_timeout_seconds=2)) as session:
        mesh = Groups(Layout("hsdp", replicate=2, shard=2), "cpu").fsdp
        for axis in ("replicate", "fsdp"):
            assert mesh.get_group(axis) is not dist.group.WORLD
            dist.all_reduce(torch.ones(1), group=mesh.get_group(axis))
        session.first_step_done()
        axis = {1: "replicate", 2: "fsdp"}.get(session.rank)
        if axis is None:
            time.sleep(SILENT_SECONDS)
            return 0.0
        started = time.monotonic()
        with pytest.raises(RuntimeError, match="Timed out"):
            dist.all_reduce(torch.ones(1), group=mesh.get_group(axis))
        return time.monotonic() - started


@pytest.mark.slow
def test_patience_is_short_in_the_groups_of_mesh_axes_too(cluster: Cluster) -> None:
    """Guards the private list of groups in Session.first_step_done: what it misses would wait for 100 seconds."""
    waited = [answer.value for answer in cluster.run(4, "tests.test_groups:wait_on_each_axis_for_a_silent_peer")]
    assert 1 < waited[1] < SILENT_SECONDS, "replicate"
    assert 1 < waited[2] < SILENT_SECONDS, "fsdp"
