"""Losses in the records of a run: who continues it, and what its readers show."""

import json
import multiprocessing
import os
import signal
from pathlib import Path

import pytest

from serried.launch.show_status import describe_run, run_values
from serried.launch.sweep.sweep_table import read_outcome
from serried.planner.compare import figures_of
from serried.records.generations import claim, newest_generation, read_generation
from serried.records.metrics import METRICS, last_of_each_kind
from serried.records.report.run_records import read_records
from serried.records.run_folder import RunFolder
from serried.records.status import Members, read_status, record_kill
from serried.records.trackers.rows import Rows
from serried.runtime.console import Console
from serried.trainer.metrics.recovery_log import Lost, log_join, log_loss, log_recovery

HALVES, GENERATIONS = 4, 25


def _claim_all(folder: Path, half: int, start: object) -> None:
    """Claim each generation at the same time as the other halves, and write what was won."""
    won = []
    for number in range(1, GENERATIONS + 1):
        start.wait()  # type: ignore[attr-defined]
        if claim(folder, number, {"ranks": [half] * 1000}):
            won.append(number)
    (folder / f"half-{half}").write_text(json.dumps(won))


def test_each_generation_is_claimed_by_one_of_several_halves(tmp_path: Path) -> None:
    forks = multiprocessing.get_context("fork")
    start = forks.Barrier(HALVES)
    processes = [forks.Process(target=_claim_all, args=(tmp_path, half, start)) for half in range(HALVES)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    won = {half: json.loads((tmp_path / f"half-{half}").read_text()) for half in range(HALVES)}
    assert sorted(number for numbers in won.values() for number in numbers) == list(range(1, GENERATIONS + 1))
    for half, numbers in won.items():
        for number in numbers:
            assert read_generation(tmp_path, number) == {"generation": number, "ranks": [half] * 1000}
    assert newest_generation(tmp_path) == GENERATIONS
    assert len(list((tmp_path / "recovery").iterdir())) == GENERATIONS


def test_claim_that_a_kill_interrupts_is_not_a_generation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if not (child := os.fork()):
        monkeypatch.setattr(os, "link", lambda *_: os.kill(os.getpid(), signal.SIGKILL))
        claim(tmp_path, 1, {})
    os.waitpid(child, 0)
    assert len(list((tmp_path / "recovery").iterdir())) == 1
    assert (newest_generation(tmp_path), read_generation(tmp_path, 1)) == (0, None)
    assert claim(tmp_path, 1, {})


def test_status_has_the_replicas_that_are_left_also_after_a_kill(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.begin("", {}, step=0)
    first = read_status(tmp_path)
    folder.members = Members(2, 2, 4)
    folder.status("running", step=7)
    running = read_status(tmp_path)
    record_kill(tmp_path, "rank 1 was killed", since=0.0)
    killed = read_status(tmp_path)
    folder.close()
    found = [(status.state, status.step, status.members) for status in (first, running, killed) if status is not None]
    assert found == [("running", 0, None), ("running", 7, Members(2, 2, 4)), ("failed", 7, Members(2, 2, 4))]


def _run_with_a_loss(folder: RunFolder) -> None:
    """Write the records of 4 steps. Step 2 is in two lines, and the last line is of a rank that was frozen."""
    console = Console(True, 0)
    folder.begin("trainer:\n  steps: 4\n", {}, step=0)
    folder.record("start", world_size=4, device="cpu", hosts=["a", "a", "b", "b"], resumed_from=None)
    rates = {"step_seconds": 0.5, "tokens_per_second": 100.0}
    folder.record("step", step=1, loss=3.0, **rates)
    folder.record("step", step=2, loss=2.0, **rates)
    log_loss(
        console, folder, Lost(2, ("b", "b"), (2, 3), "connection refused"), Members(1, 1, 2), (32, 43)
    )  # fmt: skip
    log_recovery(console, folder, 2, 1, 1.84, redone=True)
    folder.members = Members(1, 1, 2)
    folder.record("step", step=2, loss=2.5, **rates)
    log_join(console, folder, 3, "c", "a", 2**30, 3.4, Members(2, 2, 2))
    folder.record("step", step=3, loss=1.5, **rates)
    folder.record("step", step=4, loss=1.0, **rates)
    folder.record("step", step=2, loss=2.0, **rates)
    folder.status("running", step=4)


def test_loss_and_recovery_are_a_line_each(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = RunFolder(tmp_path)
    _run_with_a_loss(folder)
    assert capsys.readouterr().out.splitlines() == [
        "lost       b (ranks 2-3) in step 2: connection refused; 1 of 2 replicas continues, with up to 43 "
        "micro-batches instead of 32",
        "continues  with step 2 after 1.8 s, generation 1: the same samples, the same curve",
        "joined     c at step 3: 1.0GiB from a in 3.4 s; 2 of 2 replicas",
    ]
    found = [json.loads(line) for line in (tmp_path / METRICS).read_text().splitlines()]
    events = {event.pop("event"): event for event in found if event.pop("time")}
    assert events["lost"] == {
        "step": 2, "nodes": ["b"], "ranks": [2, 3], "reason": "connection refused", "replicas": 1, "total_replicas": 2,
    }  # fmt: skip
    assert events["recovered"] == {"step": 2, "generation": 1, "seconds": 1.84, "redone": True, "rolled_forward": 0}
    assert "step    4/4, 1 of 2 replicas, loss 1.0000" in describe_run(tmp_path)
    values = run_values(tmp_path)
    assert [values[name] for name in ("replicas", "total_replicas", "generation")] == [1, 2, 1]
    folder.close()


def test_ranks_in_the_line_of_a_loss_are_ranges(capsys: pytest.CaptureFixture[str]) -> None:
    log_loss(
        Console(True, 0), None, Lost(8, ("a", "b", "b", "b"), (0, 4, 5, 6), "no sign of life"), Members(2, 2, 4), (1, 1)
    )  # fmt: skip
    assert (
        capsys.readouterr().out
        == "lost       a, b (ranks 0, 4-6) in step 8: no sign of life; 2 of 4 replicas continue\n"
    )


def test_step_with_two_lines_is_read_once(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    _run_with_a_loss(folder)
    folder.close()
    records = read_records(tmp_path)
    curve = records.curves["loss", "training"]
    assert (curve.steps, curve.values[2:]) == ([1, 2, 3, 4], [1.5, 1.0])
    marks = [(mark.kind, mark.step, mark.text) for mark in records.marks]
    assert marks == [
        ("lost", 2, "lost b in step 2: connection refused; 1 of 2 replicas"),
        ("joined", 3, "c joined at step 3; 2 of 2 replicas"),
    ]
    assert last_of_each_kind(tmp_path / METRICS)["step"]["step"] == 4
    assert read_outcome(tmp_path, {}).loss == 1.0
    figures = figures_of(tmp_path)
    assert figures is not None
    assert figures.steps == [2, 3, 4]
    rows = Rows(tmp_path)
    fed = [json.loads(line) for line in (tmp_path / METRICS).read_text().splitlines()]
    sent = [row for event in fed for row in rows.feed(event)] + list(rows.rest())
    assert [(row.step, row.values["train/loss"]) for row in sent] == [(1, 3.0), (2, 2.5), (3, 1.5), (4, 1.0)]
    assert (rows.summary["losses"], rows.summary["joins"]) == (1, 1)


def test_losses_stay_in_the_records_when_later_steps_are_moved(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    _run_with_a_loss(folder)
    folder.go_back(1)
    folder.close()
    kept = [json.loads(line) for line in (tmp_path / METRICS).read_text().splitlines()]
    assert [event["event"] for event in kept] == ["start", "step", "lost", "recovered", "joined"]
