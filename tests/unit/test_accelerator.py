"""Accelerators other than CUDA, by a stand-in that is registered as packages register theirs.

torch lets Python register a device, its module and a communication backend, but no kernels, streams or memory.
"""

import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils import backend_registration

from serried.configs.errors import UserError
from serried.configs.schema.launch_plan_track import LaunchSection
from serried.parallel.layout.mesh import Layout
from serried.parallel.layout.process_groups import Groups
from serried.parallel.random_seed import seed_random_numbers
from serried.runtime import process
from serried.runtime.accelerator import accelerator_type, device_identity, device_name, device_names
from serried.runtime.process import choose_device, processes_per_node, refuse_shared_gpu
from serried.runtime.session import open_session
from testing.rank_pool import Cluster


class StandIn:
    """Module of a device, as ``torch.npu`` is. Each process sees one device."""

    def __init__(self, uuid: str) -> None:
        self.uuid, self.seeds = uuid, list[int]()

    def is_initialized(self) -> bool:
        return True

    def is_available(self) -> bool:
        return True

    def device_count(self) -> int:
        return 1

    def get_device_name(self, device: torch.device) -> str:
        return f"Stand-in {device.index}"

    def get_device_properties(self, device: torch.device) -> SimpleNamespace:
        return SimpleNamespace(uuid=f"{self.uuid}-{device.index}")

    def manual_seed(self, seed: int) -> None:
        self.seeds.append(seed)


def set_accelerator(found: torch.device | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let torch find ``found``."""
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda **_: found)


def join_on_stand_in(uuids: list[str]) -> dict[str, Any]:
    """Join on a device that is called npu and exchanges nothing, on this rank. Returns what was found."""
    stand_in = StandIn(uuids[int(os.environ["RANK"])])
    # Public names of torch register a device's module, but no hooks: without these there is no accelerator.
    backend_registration._setup_privateuseone_for_python_backend("npu", backend_module=stand_in)
    dist.Backend.register_backend("stand_in", dist.ProcessGroupGloo, devices=["npu"])
    try:
        with open_session(LaunchSection()) as session:
            seed_random_numbers(7)
            groups = Groups(Layout("fsdp", tensor=2), "npu")
            return {
                "device": str(session.device), "place": session.place(), "seeds": stand_in.seeds,
                "gathered": session.gather(session.rank), "names": device_names(),
                "group": dist.get_backend_config(groups.tensor),
            }  # fmt: skip
    except UserError as error:
        return {"refused": str(error)}


@pytest.fixture
def new_ranks() -> Iterator[Cluster]:
    """Two new ranks, because a process can register a device only once."""
    ranks = Cluster(2)
    yield ranks
    ranks.stop()


def test_ranks_join_on_a_registered_accelerator_if_each_sees_its_own(new_ranks: Cluster) -> None:
    answers = new_ranks.run(2, "tests.unit.test_accelerator:join_on_stand_in", uuids=["a", "b"])
    assert [answer.value for answer in answers] == [
        {
            "device": "npu:0", "place": "2 processes on Stand-in 0 (stand_in)", "seeds": [7], "gathered": [0, 1],
            "names": ["Stand-in 0"], "group": "npu:stand_in",
        }
    ] * 2  # fmt: skip


def test_ranks_that_share_their_only_gpu_are_refused(new_ranks: Cluster) -> None:
    answers = new_ranks.run(2, "tests.unit.test_accelerator:join_on_stand_in", uuids=["a", "a"])
    for answer in answers:
        assert answer.value["refused"].startswith("ranks 0 and 1 on ")
        assert answer.value["refused"].endswith(
            "share the only GPU that they can see; use --nproc_per_node=1, or launch.device=cpu"
        )


def test_equal_names_of_gpus_are_refused_only_on_one_host() -> None:
    refuse_shared_gpu(["n0 GPU-a", "n0 GPU-b", "n1 GPU-a", "n1 GPU-b"])
    refuse_shared_gpu([None, None, "n1 GPU-a"])
    with pytest.raises(UserError, match="ranks 1 and 3 on n1 share the only GPU"):
        refuse_shared_gpu([None, "n1 GPU-a", "n1 GPU-b", "n1 GPU-a"])


@pytest.mark.parametrize(
    ("count", "local_world", "expected"),
    [
        (8, 8, "cuda:3"),
        (1, 8, "cuda:0"),
        (0, 8, "cpu"),
        (4, 8, "8 processes were started on this machine, but only 4 GPUs are visible; use"),
    ],
)
def test_device_follows_from_the_gpus_that_a_process_sees(
    count: int, local_world: int, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_accelerator(torch.device("cuda") if count else None, monkeypatch)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: count)
    if expected[0].isdigit():
        with pytest.raises(UserError, match=expected):
            choose_device(LaunchSection(), 3, local_world)
    else:
        assert str(choose_device(LaunchSection(), 3, local_world)) == expected


def test_device_that_torch_does_not_find_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match=r"launch\.device=xpu but torch finds no GPU .*; use launch\.device=cpu"):
        choose_device(LaunchSection(device="xpu"), 0, 1)
    set_accelerator(torch.device("xpu"), monkeypatch)
    with pytest.raises(UserError, match=r"launch\.device=cuda but torch finds xpu .*; use launch\.device=xpu"):
        choose_device(LaunchSection(device="cuda"), 0, 1)


def test_mps_is_not_used_because_it_lacks_fp64(monkeypatch: pytest.MonkeyPatch) -> None:
    found = torch.device("mps")
    set_accelerator(found, monkeypatch)
    assert accelerator_type() is None
    assert device_name(found) == "mps"
    assert device_identity(found) is None


def test_gpus_of_amd_are_counted_for_launch_local(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    for node, identity in enumerate((0, 51234, 4660)):  # a CPU, and two GPUs
        (tmp_path / f"{node}").mkdir()
        (tmp_path / f"{node}/gpu_id").write_text(f"{identity}\n")
    monkeypatch.setattr(process, "_NVIDIA_GPUS", tmp_path / "none")
    monkeypatch.setattr(process, "_AMD_NODES", tmp_path)
    assert processes_per_node(LaunchSection(name="local")) == 2
    monkeypatch.setenv("HIP_VISIBLE_DEVICES", "1")
    assert processes_per_node(LaunchSection(name="local")) == 1
