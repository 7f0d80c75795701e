"""Whatever becomes of the disk or of a process: what was committed stays, training goes on, and one line says why."""

import contextlib
import errno
import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from serried.parallel.plan import LossTerms
from serried.parallel.sum_table import SumTable
from serried.trainer.checkpoint import save, writer
from serried.trainer.checkpoint.manifest import check_file, read_manifest
from serried.trainer.checkpoint.retention import committed
from testing.rank_pool import ROOT, Cluster
from testing.runs import (
    Ended,
    different_tensors,
    losses,
    metrics,
    run_here,
    status,
    steps_saved,
    tiny_overrides,
    train_reported,
    tree,
)  # fmt: skip


def train(text: Path, run_dir: Path, *more: str, code: int = 0, **keywords: Any) -> Ended:
    ended = run_here(tiny_overrides(text, run_dir, *more), **keywords)
    assert ended.code == code, ended.printed
    assert code == 70 or "Traceback" not in ended.printed
    return ended


def lines(printed: str, beginning: str) -> list[str]:
    return [line for line in printed.splitlines() if line.startswith(beginning)]


def verify(checkpoint: Path) -> None:
    records = read_manifest(checkpoint)
    assert {path.name for path in checkpoint.iterdir()} == {*records, "MANIFEST.json"}
    for name, record in records.items():
        check_file(checkpoint, name, record)


@pytest.fixture(scope="module")
def stopped(text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was stopped after 4 of its 6 steps, with the checkpoints of 2 and 4. Nobody may change it."""
    run_dir = tmp_path_factory.mktemp("stopped") / "run"
    train(text, run_dir, "trainer.stop_at=4", code=75)
    return run_dir


# damage ---------------------------------------------------------------------------------------------------------------

FILES = (
    "model.safetensors", "optimizer.safetensors", "config.json", "tokenizer.json",
    "tokenizer_config.json", "state.json", "MANIFEST.json",
)  # fmt: skip


def flip(path: Path, seed: int) -> None:
    content = bytearray(path.read_bytes())
    bit = random.Random(seed).randrange(8 * len(content))
    content[bit // 8] ^= 1 << bit % 8
    path.write_bytes(content)


def damage(path: Path, how: str, seed: int) -> None:
    if how == "flipped":
        flip(path, seed)
    elif how == "truncated":
        os.truncate(path, random.Random(seed).randrange(path.stat().st_size))
    else:
        path.unlink()


class _NotRead(Exception):
    pass


def test_damage_tests_cover_all_files_of_a_checkpoint(stopped: Path) -> None:
    assert {path.name for path in (stopped / "checkpoints/step-00000004").iterdir()} == set(FILES)


@pytest.mark.parametrize(
    ("name", "how"),
    [*((name, "flipped") for name in FILES), ("model.safetensors", "truncated"), ("state.json", "missing")],
)
def test_a_damaged_file_is_found_before_a_tensor_is_used(
    name: str, how: str, text: Path, stopped: Path, tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    shutil.copytree(stopped, run_dir)
    newest = run_dir / "checkpoints/step-00000004"
    damage(newest / name, how, seed=len(name + how))
    left = tree(newest)
    opened: list[Path] = []

    def stop(checkpoint: Path, *_: Any) -> None:
        opened.append(checkpoint)
        raise _NotRead

    with patch("serried.trainer.training_state.load_state", stop):
        printed = train(text, run_dir, code=70).printed
    assert opened == [run_dir / "checkpoints/step-00000002"]
    told = lines(printed, "damaged: ")
    assert len(told) == 1
    assert str(newest / name) in told[0]
    assert f"resuming from the newest complete checkpoint, {opened[0]}" in told[0]
    assert steps_saved(run_dir) == [2]
    assert tree(run_dir / "earlier-1/checkpoints/step-00000004") == left


def test_after_damage_the_step_is_saved_again(text: Path, stopped: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    shutil.copytree(stopped, run_dir)
    flip(run_dir / "checkpoints/step-00000004/model.safetensors", seed=1)
    train(text, run_dir)
    assert steps_saved(run_dir) == [4, 6]
    for path in (run_dir / "checkpoints").iterdir():
        verify(path)
    assert [line["step"] for line in metrics(run_dir)] == [1, 2, 3, 4, 5, 6]
    assert (run_dir / "checkpoints/step-00000004/model.safetensors").read_bytes() == (
        stopped / "checkpoints/step-00000004/model.safetensors"
    ).read_bytes()


@pytest.mark.parametrize("resume", ["auto", "must", "path"])
def test_run_without_a_complete_checkpoint_overwrites_nothing(
    resume: str, text: Path, stopped: Path, tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    shutil.copytree(stopped, run_dir)
    for path in (run_dir / "checkpoints").iterdir():
        damage(path / "state.json", "truncated", seed=3)
    before = tree(run_dir)
    printed = train(text, run_dir, f"checkpoint.resume={run_dir if resume == 'path' else resume}", code=78).printed
    told = lines(printed, "error: ")
    assert len(told) == 1
    assert "no checkpoint is complete" in told[0]
    assert "step-00000002/state.json" in told[0]
    assert "step-00000004/state.json" in told[0]
    assert "checkpoint.resume=never" in told[0]
    assert tree(run_dir) == before


# a disk that fails ----------------------------------------------------------------------------------------------------


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A real disk of 80 MiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=80m", "serried-test", str(folder)]
    if shutil.which("mount") is None or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("no disk may be mounted here")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def fill(disk: Path, left: int) -> Path:
    """Write a file that leaves ``left`` bytes."""
    path = disk / "filler"
    path.unlink(missing_ok=True)
    page = os.sysconf("SC_PAGE_SIZE")
    with path.open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, (shutil.disk_usage(disk).free - left) // page * page)
    return path


def test_too_little_space_is_detected_before_a_save(text: Path, small_disk: Path) -> None:
    """Steps 4 and 5 cannot be saved, 6 can."""
    run_dir = small_disk / "run"

    def act(_: Any, step: int) -> None:
        if step == 3:
            fill(small_disk, 2**20)
        if step == 5:
            (small_disk / "filler").unlink()

    printed = train(text, run_dir, "checkpoint.every=1", "checkpoint.mode=sync", after_step=act).printed
    warnings = lines(printed, "WARNING")
    assert len(warnings) == 2
    for step, warning in zip((4, 5), warnings, strict=True):
        assert f"no checkpoint of step {step}: a checkpoint needs 133.0KiB, plus 64.0MiB kept free, but" in warning
        assert "Training continues; the newest checkpoint is from step 3" in warning
    assert steps_saved(run_dir) == [3, 6]
    assert len(list((run_dir / "checkpoints").iterdir())) == 2
    fill(small_disk, 2**20)
    line = lines(train(text, small_disk / "other", code=78).printed, "error: ")
    assert len(line) == 1
    assert "1.0MiB free" in line[0]
    assert "run.dir=FOLDER" in line[0]


@pytest.mark.parametrize("left", [60_000, 0])
def test_disk_that_fills_up_during_a_save_costs_only_that_checkpoint(left: int, text: Path, small_disk: Path) -> None:
    """With nothing left at all, the records cannot be written either, and none of them is lost."""
    run_dir = small_disk / "run"

    def act(_: Any, step: int) -> None:
        if step == 3:
            fill(small_disk, left)
        if step == 5:
            (small_disk / "filler").unlink()

    def blind(*_: Any) -> None:
        """Others may fill the disk after it was looked at."""

    with patch("serried.trainer.checkpoint.checkpoints.lack_of_space", blind):
        printed = train(text, run_dir, "checkpoint.every=1", "checkpoint.mode=sync", after_step=act).printed
    warnings = lines(printed, "WARNING    no checkpoint")
    assert len(warnings) == 2
    for step, warning in zip((4, 5), warnings, strict=True):
        assert f"no checkpoint of step {step}: cannot write " in warning
        assert os.strerror(errno.ENOSPC) in warning
        assert "Training continues; the newest checkpoint is from step 3" in warning
    # One line for as long as it lasts; metrics.jsonl may have room left in its last page.
    assert len(lines(printed, f"WARNING    cannot write {run_dir / 'status.json'}: ")) == (left == 0)
    assert len(lines(printed, f"WARNING    cannot write {run_dir / 'metrics.jsonl'}: ")) <= (left == 0)
    assert steps_saved(run_dir) == [3, 6]
    assert len(list((run_dir / "checkpoints").iterdir())) == 2
    for path in (run_dir / "checkpoints").iterdir():
        verify(path)
    assert [line["step"] for line in metrics(run_dir)] == [1, 2, 3, 4, 5, 6]
    assert status(run_dir)["state"] == "finished"


@pytest.mark.parametrize("left", [60_000, 0])
def test_full_disk_at_the_last_save_fails_the_run(left: int, text: Path, small_disk: Path) -> None:
    run_dir = small_disk / "run"

    def act(_: Any, step: int) -> None:
        if step == 5:
            wait_for(run_dir, 4)
            fill(small_disk, left)

    printed = train(text, run_dir, code=70, after_step=act).printed
    assert "Traceback" not in printed
    told = lines(printed, "failed: ")
    assert len(told) == 1
    assert "step 6 is done, but its checkpoint cannot be saved: " in told[0]
    assert "the newest checkpoint is from step 4" in told[0]
    assert "same command again" in told[0]
    (small_disk / "filler").unlink()
    train(text, run_dir)
    assert steps_saved(run_dir) == [4, 6]
    assert [line["step"] for line in metrics(run_dir)] == [1, 2, 3, 4, 5, 6]


def wait_for(run_dir: Path, step: int) -> None:
    """Until that checkpoint is there, which is written beside training."""
    while steps_saved(run_dir)[-1:] != [step]:
        time.sleep(0.01)


@contextmanager
def no_file_above(nbytes: int) -> Iterator[None]:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_file_size_limit_costs_only_the_checkpoint(mode: str, text: Path, tmp_path: Path) -> None:
    """Without a disk of one's own: the model's file is written, the optimizer's is not."""
    run_dir = tmp_path / "run"

    def act(trainer: Any, step: int) -> None:
        if step == 3:
            wait_for(run_dir, 2)
            stack.enter_context(no_file_above(64_000))
        if step == 5:
            if (under_way := trainer.saver.checkpointer._running) is not None:
                under_way.exception()  # waits
            stack.close()

    with contextlib.ExitStack() as stack:
        printed = train(text, run_dir, f"checkpoint.mode={mode}", after_step=act).printed
    warnings = lines(printed, "WARNING")
    assert len(warnings) == 1
    partial = run_dir / "checkpoints/.step-00000004.partial/optimizer.safetensors"
    assert f"no checkpoint of step 4: cannot write {partial}: {os.strerror(errno.EFBIG)}" in warnings[0]
    assert "the newest checkpoint is from step 2" in warnings[0]
    assert steps_saved(run_dir) == [2, 6]
    assert len(list((run_dir / "checkpoints").iterdir())) == 2


def test_file_in_place_of_the_checkpoint_folder_costs_only_the_checkpoint(text: Path, tmp_path: Path) -> None:
    checkpoints, aside = tmp_path / "run/checkpoints", tmp_path / "run/aside"

    def act(_: Any, step: int) -> None:
        if step == 3:
            checkpoints.rename(aside)
            checkpoints.write_text("in the way")
        if step == 5:
            checkpoints.unlink()
            aside.rename(checkpoints)

    printed = train(text, tmp_path / "run", "checkpoint.mode=sync", after_step=act).printed
    warnings = lines(printed, "WARNING")
    assert len(warnings) == 1
    assert f"no checkpoint of step 4: cannot write {checkpoints}" in warnings[0]
    assert steps_saved(tmp_path / "run") == [2, 6]


def test_a_folder_that_was_removed_is_made_again(text: Path, tmp_path: Path) -> None:
    def act(_: Any, step: int) -> None:
        if step == 3:
            shutil.rmtree(tmp_path / "run/checkpoints")

    assert "WARNING" not in train(text, tmp_path / "run", "checkpoint.mode=sync", after_step=act).printed
    assert steps_saved(tmp_path / "run") == [4, 6]


def test_read_only_disk_costs_only_the_checkpoint(text: Path, small_disk: Path) -> None:
    """The checkpoints' folder alone: not even root writes there."""
    checkpoints = small_disk / "run/checkpoints"

    def act(_: Any, step: int) -> None:
        if step == 3:
            subprocess.run(["mount", "--bind", checkpoints, checkpoints], check=True)
            subprocess.run(["mount", "-o", "remount,bind,ro", checkpoints], check=True)
        if step == 5:
            subprocess.run(["umount", checkpoints], check=True)

    printed = train(text, small_disk / "run", "checkpoint.mode=sync", after_step=act).printed
    warnings = lines(printed, "WARNING")
    assert len(warnings) == 1
    assert "no checkpoint of step 4" in warnings[0]
    assert os.strerror(errno.EROFS) in warnings[0]
    assert "the newest checkpoint is from step 2" in warnings[0]
    assert steps_saved(small_disk / "run") == [2, 6]


def test_stray_folder_with_the_name_of_a_checkpoint_is_kept(text: Path, tmp_path: Path) -> None:
    """A folder called as a checkpoint that is none, such as one that lost its manifest."""
    stray = tmp_path / "run/checkpoints/step-00000004"

    def act(_: Any, step: int) -> None:
        if step == 3:
            stray.mkdir()
            (stray / "model.safetensors").write_text("half of it")

    printed = train(text, tmp_path / "run", "checkpoint.mode=sync", after_step=act).printed
    assert "no checkpoint of step 4" in printed
    assert steps_saved(tmp_path / "run") == [2, 6]
    assert (stray / "model.safetensors").read_text() == "half of it"


# run on ranks of the cluster ------------------------------------------------------------------------------------------


def slow_disk(argv: list[str], seconds: float) -> int:
    """Train where each write takes ``seconds``."""
    write = os.writev

    def slowly(descriptor: int, contents: Any) -> int:
        time.sleep(seconds)
        return write(descriptor, contents)

    with patch("serried.trainer.checkpoint.writer.os.writev", slowly):
        return train_reported(argv)


def poisoned(argv: list[str], rank: int, at_step: int) -> int:
    """Train; on ``rank`` one number of a weight is infinite while ``at_step`` is saved, and only then."""
    begin = save.Checkpointer.begin

    def spoilt(self: save.Checkpointer, step: int, state: dict[str, Any]) -> None:
        if step != at_step or self._session.rank != rank:
            return begin(self, step, state)
        [weight] = [part.local for _, part in self._copies.tensors() if part.fragments[0].name == "model.norm.weight"]
        with torch.no_grad():
            value = weight[-1].item()
            weight[-1] = float("inf")
            begin(self, step, state)
            weight[-1] = value
        return None

    with patch.object(save.Checkpointer, "begin", spoilt):
        return train_reported(argv)


def killed_while_writing(argv: list[str], rank: int, at_step: int) -> int:
    """Train; ``rank`` dies inside of its own file of ``at_step``."""
    append = writer.FolderFiles.append

    def die(self: writer.FolderFiles, name: str, contents: list[memoryview], size: int) -> None:
        append(self, name, contents, size)
        if f"{at_step:08d}" in str(self._folder) and os.environ.get("RANK") == str(rank) and contents:
            os.kill(os.getpid(), signal.SIGKILL)

    with patch.object(writer.FolderFiles, "append", die):
        return train_reported(argv)


@pytest.mark.slow
def test_a_slow_disk_delays_saves_and_nothing_else(cluster: Cluster, text: Path, tmp_path: Path) -> None:
    argv = tiny_overrides(text, tmp_path / "run", "parallel=fsdp", "launch.step_timeout_seconds=2", "trainer.steps=4")
    # At least two writes of each rank.
    answers = cluster.run(2, "tests.runs.test_checkpoint_faults:slow_disk", argv=argv, seconds=1.5)
    assert [answer.value for answer in answers] == [0, 0], "".join(answer.printed for answer in answers)
    assert "WARNING" not in answers[0].printed
    assert steps_saved(tmp_path / "run") == [2, 4]
    saves = metrics(tmp_path / "run", "checkpoint")
    assert all(line["seconds"] > 2.1 for line in saves), "longer than anybody waits for a step"
    events = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").open()]
    order = [(event["event"], event["step"]) for event in events if "step" in event]
    assert order.index(("checkpoint", 2)) > order.index(("step", 4)), "trained on until the next save, which waited"
    assert saves[0]["stall_seconds"] > 1
    for path in (tmp_path / "run/checkpoints").iterdir():
        verify(path)


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_number_that_is_not_finite_is_not_saved(mode: str, cluster: Cluster, text: Path, tmp_path: Path) -> None:
    argv = tiny_overrides(text, tmp_path / "run", "parallel=fsdp", f"checkpoint.mode={mode}")
    answers = cluster.run(2, "tests.runs.test_checkpoint_faults:poisoned", argv=argv, rank=1, at_step=4)
    assert [answer.value for answer in answers] == [0, 0], "".join(answer.printed for answer in answers)
    warnings = lines(answers[0].printed, "WARNING")
    assert len(warnings) == 1
    assert "no checkpoint of step 4: model.norm.weight is not finite" in warnings[0]
    assert "the newest checkpoint is from step 2" in warnings[0]
    assert steps_saved(tmp_path / "run") == [2, 6]
    argv = tiny_overrides(text, tmp_path / "other", "parallel=fsdp", f"checkpoint.mode={mode}", "trainer.steps=4")
    answers = cluster.run(2, "tests.runs.test_checkpoint_faults:poisoned", argv=argv, rank=1, at_step=4)
    assert [answer.value for answer in answers] == [70, 70]
    printed = "".join(answer.printed for answer in answers)
    told = lines(printed, "failed: ")
    assert len(told) == 1
    assert "model.norm.weight is not finite" in told[0]
    assert "Traceback" not in printed
    assert steps_saved(tmp_path / "other") == [2]


def test_rank_killed_while_writing_leaves_the_earlier_checkpoint_complete(
    cluster: Cluster, text: Path, tmp_path: Path
) -> None:
    run_dir, how = tmp_path / "run", ("parallel=fsdp", "trainer.deterministic=true")
    with pytest.raises(AssertionError, match="rank 1: the process ended with -9"):
        cluster.run(
            2, "tests.runs.test_checkpoint_faults:killed_while_writing",
            argv=tiny_overrides(text, run_dir, *how), rank=1, at_step=4,
        )  # fmt: skip
    assert steps_saved(run_dir) == [2]
    verify(run_dir / "checkpoints/step-00000002")
    assert (run_dir / "checkpoints/.step-00000004.partial").exists(), "killed later than meant"
    for folder in ("run", "straight"):
        cluster.run(2, "testing.runs:train_small", argv=tiny_overrides(text, tmp_path / folder, *how))
    assert sorted(path.name for path in (run_dir / "checkpoints").iterdir()) == ["step-00000004", "step-00000006"]
    assert [line["step"] for line in metrics(run_dir)] == [1, 2, 3, 4, 5, 6]
    assert not different_tensors(run_dir, tmp_path / "straight")


def test_a_validation_loss_that_is_not_finite_costs_no_checkpoint(text: Path, tmp_path: Path) -> None:
    def spoilt(*_: Any) -> SumTable:
        return LossTerms(torch.tensor(float("nan")), torch.tensor(64)).table()

    with patch("serried.parallel.distributed_model.DistributedModel.evaluate", spoilt):
        printed = train(text, tmp_path / "run", "trainer.eval_every=2").printed
    assert "WARNING" not in printed
    assert steps_saved(tmp_path / "run") == [4, 6]
    assert losses(tmp_path / "run", "eval") == [None] * 3
    state = json.loads((tmp_path / "run/checkpoints/step-00000006/state.json").read_text())
    assert state["validation_loss"] is None


# killed ---------------------------------------------------------------------------------------------------------------


@contextmanager
def _observed(look: Callable[[], None]) -> Iterator[None]:
    """``look`` before each change that a save makes on the disk."""

    def observed(change: Callable[..., Any]) -> Callable[..., Any]:
        def after_a_look(*arguments: Any, **keywords: Any) -> Any:
            if threading.current_thread().name.startswith("checkpoint"):
                look()
            return change(*arguments, **keywords)

        return after_a_look

    with contextlib.ExitStack() as stack:
        for owner, name in (
            (os, "fsync"), (os, "open"), (os, "writev"), (os, "unlink"), (os, "rmdir"), (Path, "rename"),
            (Path, "mkdir"), (Path, "open"), (Path, "write_text"),
        ):  # fmt: skip
            stack.enter_context(patch.object(owner, name, observed(getattr(owner, name))))
        yield


def test_save_in_a_folder_makes_the_system_calls_of_version_0_2(text: Path, tmp_path: Path) -> None:
    """Counts of version 0.2, from strace. Files: model, optimizer, config, state, two tokenizer files, manifest."""
    made: Counter[str] = Counter()

    def counted(name: str, change: Callable[..., Any]) -> Callable[..., Any]:
        def count(*arguments: Any, **keywords: Any) -> Any:
            if threading.current_thread().name.startswith("checkpoint"):
                made[name] += 1
            return change(*arguments, **keywords)

        return count

    with contextlib.ExitStack() as stack:
        for owner, name in ((os, "fsync"), (os, "writev"), (Path, "rename"), (Path, "mkdir"), (os, "posix_fadvise")):
            stack.enter_context(patch.object(owner, name, counted(name, getattr(owner, name))))
        train(text, tmp_path / "run", "checkpoint.every=2", "checkpoint.keep=1")
    # Three saves: each file, the folder before and after its rename. Two deletions: a rename and its folder.
    assert made == {"fsync": 3 * (7 + 2) + 2, "writev": 3 * 2, "rename": 3 + 2, "mkdir": 3}


def test_run_killed_at_any_point_of_a_save_resumes(text: Path, tmp_path: Path) -> None:
    """What the disk held at each point is what a kill would have left there."""
    run_dir, how = tmp_path / "run", ["trainer.steps=3", "checkpoint.every=1", "checkpoint.keep=1"]
    train(text, run_dir, *how, "trainer.stop_at=2", code=75)
    left: list[Path] = []

    def look() -> None:
        left.append(tmp_path / f"left-{len(left)}")
        subprocess.run(["cp", "-a", run_dir, left[-1]], check=True)

    with _observed(look):
        train(text, run_dir, *how)
    look()
    old, new = "step-00000002", "step-00000003"
    stages: dict[tuple[str, ...], Path] = {}
    for folder in left:
        checkpoints = folder / "checkpoints"
        for path in committed(checkpoints):
            verify(path)
        stages[tuple(sorted(path.name for path in checkpoints.iterdir()))] = folder
    assert len(left) > 40
    assert list(stages) == [
        (old,), (f".{new}.partial", old), (old, new), (f".{old}.deleting", new), (new,),
    ], "the old one stays until the new one is there"  # fmt: skip
    for number, folder in enumerate(stages.values()):
        train(text, folder, *how)
        names = sorted(path.name for path in (folder / "checkpoints").iterdir())
        # Where the new one was whole already, nothing was left to do, not even to tidy up.
        assert names == [new] if number < 2 else names[-1] == new
        assert [line["step"] for line in metrics(folder)] == [1, 2, 3]
        model = f"checkpoints/{new}/model.safetensors"
        assert (folder / model).read_bytes() == (run_dir / model).read_bytes()


@pytest.mark.slow
def test_a_signal_during_a_save_lets_it_end_and_saves_again(text: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    argv = tiny_overrides(text, run_dir, "trainer.steps=100000", "checkpoint.every=30", "trainer.log_every=0")
    script = f"from tests.runs.test_checkpoint_faults import slow_disk; raise SystemExit(slow_disk({argv}, 1.0))"
    process = subprocess.Popen(
        [sys.executable, "-c", script], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    try:
        deadline = time.monotonic() + 60
        partial = run_dir / "checkpoints/.step-00000030.partial"
        while not (partial / "model.safetensors").exists():
            assert time.monotonic() < deadline
            assert process.poll() is None, process.communicate()
            time.sleep(0.005)
        process.send_signal(signal.SIGTERM)
        printed, _ = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 75
    assert "Traceback" not in printed
    now = status(run_dir)
    assert (now["state"], now["reason"]) == ("stopped", "SIGTERM")
    last = now["step"]
    assert steps_saved(run_dir) == [30, last]
    for step in (30, last):
        verify(run_dir / f"checkpoints/step-{step:08d}")
    assert not partial.exists()
    train(text, run_dir, "trainer.steps=100000", "trainer.log_every=0", f"trainer.stop_at={last + 1}", code=75)
    assert [line["resumed_from"] for line in metrics(run_dir, "start")] == [None, last]
