"""The run folder's records, where the disk does not help."""

import json
import os
import resource
import signal
from pathlib import Path
from unittest.mock import patch

import pytest

from serried.records.run_folder import RunFolder
from serried.trainer.trainer import Trainer
from tests.runs import metrics, run_here, tiny_overrides


def test_lines_that_a_full_disk_refuses_are_written_later(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = RunFolder(tmp_path)
    folder.begin("", {}, step=0)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    folder.record("step", step=1)
    assert not capsys.readouterr().out
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, ((tmp_path / "metrics.jsonl").stat().st_size + 20, hard))
        folder.record("step", step=2)  # twenty bytes of it fit
        assert "File too large" in capsys.readouterr().out
        folder.record("step", step=3)
        assert not capsys.readouterr().out, "told once"
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    folder.record("step", step=4)
    folder.close()
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3, 4]


def test_lines_of_lost_steps_and_torn_ones_are_moved(tmp_path: Path) -> None:
    kept = ['{"event": "start"}', '{"event": "step", "step": 7}', '{"event": "stop", "step": 9}']
    lost = ['{"event": "step", "step": 8}', '{"event": "eval", "step": 9}', '{"event": "step", "st']
    (tmp_path / "metrics.jsonl").write_text("\n".join([kept[0], kept[1], *lost[:2], kept[2], lost[2]]))
    folder = RunFolder(tmp_path)
    folder.begin("", {}, step=7)
    folder.close()
    assert (tmp_path / "metrics.jsonl").read_text().splitlines() == kept
    assert (tmp_path / "lost.jsonl").read_text().splitlines() == lost


def test_nothing_is_moved_where_nothing_was_lost(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"event": "step", "step": 7}')  # killed before the line's end
    folder = RunFolder(tmp_path)
    folder.begin("", {}, step=7)
    folder.record("step", step=8)
    folder.close()
    assert [json.loads(line)["step"] for line in (tmp_path / "metrics.jsonl").read_text().splitlines()] == [7, 8]
    assert not (tmp_path / "lost.jsonl").exists()


def test_a_signal_while_a_failure_is_recorded_changes_nothing(text: Path, tmp_path: Path) -> None:
    fail = RunFolder.fail

    def signalled(self: RunFolder, step: int, reason: str, exit_code: int) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        fail(self, step, reason, exit_code)

    def crash(_: Trainer, step: int) -> None:
        if step == 3:
            raise ZeroDivisionError("here")

    with patch.object(RunFolder, "fail", signalled):
        ended = run_here(tiny_overrides(text, tmp_path / "run"), crash)
    assert ended.code == 70
    status = json.loads((tmp_path / "run" / "status.json").read_text())
    assert (status["state"], status["step"], status["reason"]) == ("failed", 3, "ZeroDivisionError: here")
    assert "the newest checkpoint is that of step 2: the same command goes on from there" in ended.printed
    assert [line["step"] for line in metrics(tmp_path / "run", "checkpoint")] == [2]
