"""A profile of some steps: what it writes, that it changes no number, and that nothing it meets ends a run."""

import gzip
import inspect
import json
import os
import resource
import signal
from collections import Counter
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from serried.planner.compare import exchanged
from serried.trainer.metrics.profiler import StepProfiler, record_history, write_snapshot
from serried.trainer.trainer import Trainer
from testing.forked_runs import typed
from testing.rank_pool import Cluster
from testing.runs import different_tensors, metrics, run_here, tiny_overrides

LAYOUTS = {"single": 1, "fsdp": 2}


def trace(path: Path) -> dict[str, Any]:
    with gzip.open(path, "rt", encoding="utf-8") as file:
        read: dict[str, Any] = json.load(file)
    return read


def annotations(path: Path) -> Counter[str]:
    return Counter(event["name"] for event in trace(path)["traceEvents"] if event.get("cat") == "user_annotation")


def files(run_dir: Path) -> list[str]:
    return sorted(path.name for path in (run_dir / "profile").iterdir())


@pytest.mark.parametrize("strategy", ["fsdp", pytest.param("single", marks=pytest.mark.slow)])
def test_a_profile_changes_no_bit_and_shows_the_steps_of_every_rank(
    strategy: str, cluster: Cluster, text: Path, tmp_path: Path
) -> None:
    ranks, printed = LAYOUTS[strategy], []
    for name, more in (("without", []), ("with", ["profile.steps=[3,4]", "profile.memory=true"])):
        argv = tiny_overrides(text, tmp_path / name, f"parallel={strategy}", "trainer.micro_batch=1", *more)
        answers = cluster.run(ranks, "testing.runs:train_reported", argv=argv)
        assert {answer.value for answer in answers} == {0}, answers[0].printed
        printed = [answer.printed for answer in answers]

    plain, profiled = metrics(tmp_path / "without"), metrics(tmp_path / "with")
    assert [(line["loss"], line["grad_norm"]) for line in plain] == [
        (line["loss"], line["grad_norm"]) for line in profiled
    ]
    assert not different_tensors(tmp_path / "without", tmp_path / "with")

    names = [f"steps-3-4-rank-{rank}{ending}" for rank in range(ranks) for ending in (".json.gz", ".txt")]
    assert files(tmp_path / "with") == sorted(names)
    micro_batches = 2 * 4 // ranks
    for rank in range(ranks):
        path = tmp_path / f"with/profile/steps-3-4-rank-{rank}.json.gz"
        found = annotations(path)
        assert {name for name in found if name.startswith("ProfilerStep")} == {"ProfilerStep#3", "ProfilerStep#4"}
        assert found["forward"] == found["backward"] == micro_batches
        assert found["data"] == found["optimizer"] == found["log"] == 2
        assert found["save"] == 1, "step 4 is saved"
        assert any(event["name"] == "[memory]" for event in trace(path)["traceEvents"])
        assert "aten::mm" in path.with_name(f"steps-3-4-rank-{rank}.txt").read_text()
    seen = exchanged(tmp_path / "with")
    assert seen is not None
    assert seen.steps == (3, 4)
    assert (seen.seconds > 0) == (ranks > 1)
    assert 0 <= seen.exposed <= seen.seconds
    lines = printed[0].splitlines()
    first = next(number for number, line in enumerate(lines) if line.startswith("profile "))
    last = next(number for number, line in enumerate(lines) if "steps-3-4-rank-0.json.gz" in line)
    assert last - first < 12
    operators = [line.split()[0] for line in lines[first + 2 : last]]  # whichever took longest; waiting may have
    whole_table = (tmp_path / "with/profile/steps-3-4-rank-0.txt").read_text()
    assert operators
    assert all(operator[:40] in whole_table for operator in operators)  # there, long names are cut
    assert all(name in lines[first] for name in ("steps 3 to 4", "forward", "backward", "optimizer"))
    assert "profile/" not in "".join(printed[1:])


def test_the_first_step_can_be_profiled(text: Path, tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "KINETO_LOG_LEVEL"}
    argv = tiny_overrides(text, tmp_path / "run", "profile.steps=[1,1]", "trainer.steps=2")
    ended = typed("train.py", *argv, env=environment)
    assert ended.returncode == 0, ended.stderr
    assert "status.json, profile/; the model, opens in" in ended.stdout
    assert "USDT" not in ended.stdout + ended.stderr, "torch's profiler writes to the console by default"
    found = annotations(tmp_path / "run/profile/steps-1-1-rank-0.json.gz")
    assert [name for name in found if name.startswith("ProfilerStep")] == ["ProfilerStep#1"]
    assert found["forward"] == 2


def test_stop_in_the_middle_keeps_the_partial_profile_and_the_next_start_reports_it(text: Path, tmp_path: Path) -> None:
    def stop(trainer: Trainer, step: int) -> None:
        del trainer
        if step == 3:
            os.kill(os.getpid(), signal.SIGTERM)

    argv = tiny_overrides(text, tmp_path / "run", "profile.steps=[2,5]")
    assert run_here(argv, stop).code == 75
    stopped_at = metrics(tmp_path / "run")[-1]["step"]
    name = f"steps-2-{stopped_at}-rank-0"
    assert stopped_at < 5
    assert files(tmp_path / "run") == [f"{name}.json.gz", f"{name}.txt"]
    assert annotations(tmp_path / f"run/profile/{name}.json.gz")["optimizer"] == stopped_at - 1

    argv = tiny_overrides(text, tmp_path / "run", "profile.steps=[2,3]")
    ended = run_here(argv)
    assert ended.code == 0
    assert f"WARNING    no profile of profile.steps=[2,3]: the run resumes with step {stopped_at + 1}" in ended.printed


@pytest.mark.slow
def test_a_rollback_in_the_middle_ends_the_profile(cluster: Cluster, text: Path, tmp_path: Path) -> None:
    argv = tiny_overrides(
        text, tmp_path / "run", "profile.steps=[3,8]", "trainer.steps=8", "health.non_finite=rollback"
    )
    fault = {"rank": 0, "forwards": [7, 9, 11], "value": float("nan")}  # of steps 4, 5 and 6
    (answer,) = cluster.run(1, "testing.runs:train_reported", argv=argv, fault=fault)
    assert answer.value == 0, answer.printed
    assert len(metrics(tmp_path / "run", "rollback")) == 1
    assert metrics(tmp_path / "run")[-1]["step"] == 8
    assert files(tmp_path / "run") == ["steps-3-6-rank-0.json.gz", "steps-3-6-rank-0.txt"]
    assert annotations(tmp_path / "run/profile/steps-3-6-rank-0.json.gz")["optimizer"] == 4


def test_unwritable_folder_costs_only_the_profile(text: Path, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run/profile").write_text("in the way")
    ended = run_here(tiny_overrides(text, tmp_path / "run", "profile.steps=[2,3]"))
    assert ended.code == 0
    assert "WARNING    no profile of profile.steps=[2,3]: File exists. Training continues" in ended.printed
    assert metrics(tmp_path / "run")[-1]["step"] == 6


def test_full_disk_costs_only_the_profile(text: Path, tmp_path: Path) -> None:
    """Full, for the profile: no file may be longer than 10,000 bytes while it is written."""
    write = StepProfiler._write

    def write_to_full_disk(self: StepProfiler, ended: Any) -> None:
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, hard))
        try:
            write(self, ended)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))

    with patch.object(StepProfiler, "_write", write_to_full_disk):
        ended = run_here(tiny_overrides(text, tmp_path / "run", "profile.steps=[2,3]"))
    assert ended.code == 0
    assert "WARNING    no profile of profile.steps=[2,3]: torch cannot write the trace" in ended.printed
    assert files(tmp_path / "run") == []


def test_memory_profile_on_a_cpu_warns_about_missing_history(text: Path, tmp_path: Path) -> None:
    ended = run_here(tiny_overrides(text, tmp_path / "run", "profile.memory=true", "trainer.steps=1"))
    assert ended.code == 0
    assert "WARNING    profile.memory=true alone records nothing on CPUs" in ended.printed
    assert "'profile.steps=[FIRST,LAST]'" in ended.printed


@pytest.mark.skipif(not torch.cuda.is_available(), reason="a CPU has no allocator to take a snapshot of")
def test_gpu_run_records_the_stacks_of_its_allocations(text: Path, tmp_path: Path) -> None:
    assert run_here(tiny_overrides(text, tmp_path / "run", "profile.memory=true", "profile.steps=[2,3]")).code == 0
    (path,) = (tmp_path / "run/profile").glob("memory-*.json.gz")
    assert any(entry["frames"] for device in trace(path)["device_traces"] for entry in device)


def test_torch_still_has_the_private_names_that_a_snapshot_takes() -> None:
    recorded = inspect.signature(torch.cuda.memory._record_memory_history).parameters
    assert {"stacks", "max_entries"} <= recorded.keys()
    assert "device" in inspect.signature(torch.cuda.memory._snapshot).parameters


@pytest.mark.skipif(not torch.cuda.is_available(), reason="a CPU has no allocator to take a snapshot of")
def test_memory_snapshot_lists_allocations_with_their_stacks(tmp_path: Path) -> None:
    record_history()
    kept = torch.zeros(12345, 100, device="cuda")
    write_snapshot(tmp_path / "snapshot.json.gz", kept.device)
    snapshot = trace(tmp_path / "snapshot.json.gz")
    blocks = [block for segment in snapshot["segments"] for block in segment["blocks"]]
    assert any(block.get("requested_size") == kept.nbytes for block in blocks)
    assert any("test_profile.py" in frame["filename"] for block in blocks for frame in block.get("frames", ()))
