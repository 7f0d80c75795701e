"""The run folder: its records on a failing disk, files of strangers in it, and who owns it."""

import errno
import fcntl
import json
import os
import re
import resource
import shutil
import signal
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest

from serried.cli import main as serried
from serried.configs.errors import UserError
from serried.configs.plain_data import NotPlainData, flatten, parse_json, parse_yaml, read_json
from serried.launch.sweep.train_sweep import _claimed
from serried.records.files import machine, write_atomically
from serried.records.lock import LOCK, is_locked, lock_folder
from serried.records.metrics import METRICS, named_metrics, parse_event, read_events
from serried.records.report.page import write_report
from serried.records.run_folder import RunFolder
from serried.records.status import Status, read_status, record_end, record_kill, write_status
from serried.runtime.process import host_name
from serried.trainer.trainer import Trainer
from testing.runs import metrics, run_here, status, tiny_overrides


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


def test_no_record_is_moved_if_no_step_was_lost(tmp_path: Path) -> None:
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
    now = status(tmp_path / "run")
    assert (now["state"], now["step"], now["reason"]) == ("failed", 3, "ZeroDivisionError: here")
    assert "the newest checkpoint is from step 2; run the same command to resume from it" in ended.printed
    assert [line["step"] for line in metrics(tmp_path / "run", "checkpoint")] == [2]


# files of strangers ---------------------------------------------------------------------------------------------------

ALIAS_BOMB = "a: &a [x, x]\n" + "".join(f"{b}: &{b} [*{a}, *{a}]\n" for a, b in zip("abcdefg", "bcdefgh", strict=True))


@pytest.mark.parametrize(
    "text",
    [
        b"[" * 100_000, b'{"a":' * 100 + b"1" + b"}" * 100, b'{"a": "\xff"}', b'{"a": 1', b"9" * 5000, b"",
        "[" * 65 + "]" * 65,
    ],
)  # fmt: skip
def test_odd_json_is_refused_in_one_line(text: bytes | str) -> None:
    with pytest.raises(NotPlainData) as refused:
        parse_json(text)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    "text",
    [
        ALIAS_BOMB, "[" * 100_000, "a: !!python/object/apply:os.system [true]", "a: 2001-99-99", "? [a]\n: b", "\x00",
        "a: &a [*a]", b"\xff\xfe", "- " * 1000 + "x", "a: !!int x", "a: [",
    ],
)  # fmt: skip
def test_odd_yaml_is_refused_in_one_line(text: bytes | str) -> None:
    with pytest.raises(NotPlainData) as refused:
        parse_yaml(text)
    assert "\n" not in str(refused.value)


def test_yaml_reads_what_a_run_writes() -> None:
    assert parse_yaml("trainer: {steps: 300, seed: null}\ndata: [1, 2]") == {
        "trainer": {"steps": 300, "seed": None},
        "data": [1, 2],
    }


def test_a_file_is_read_only_if_it_is_regular_and_small(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "large").write_bytes(b" " * 100 + b"{}")
    for path in (tmp_path / "pipe", Path("/dev/zero"), tmp_path / "large"):
        with pytest.raises(NotPlainData, match=r"not a regular file|larger than 10 bytes"):
            read_json(path, most_bytes=10)
    assert list(read_events(tmp_path / "pipe")) == []
    with pytest.raises(OSError, match="directory"):
        read_json(tmp_path)


def test_flatten_names_leaves_by_dotted_name() -> None:
    assert flatten({"a": {"b": 1, "c": {"d": None}}, "e": [1], "f": {}}) == {"a.b": 1, "a.c.d": None, "e": [1]}


@pytest.mark.parametrize(
    "line",
    [
        b"", b"[]", b"3", b'{"step": 1}', b'{"event": 3}', b'{"event": "step", "step": "1"}',
        b'{"event": "step", "step": -1}', b'{"event": "step", "step": 1, "time": "now"}', b'{"event": "step", "st',
        b'{"event": "\xff"}', b'{"event": "step", "step": true}', b"\0" * 40,
        b'{"event": "a", "x": ' + b"[" * 70 + b"]" * 70 + b"}",
    ],
)  # fmt: skip
def test_malformed_line_is_not_an_event(line: bytes) -> None:
    assert parse_event(line) is None


def test_events_around_a_broken_line_are_read(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(
        b'{"event": "start"}\n{"event": "step", "step": 1, "x": "\xff"}\n{"event": "step", "step": 2}\n{"ev'
    )
    assert [event.get("step") for event in read_events(path)] == [None, 2]


HOSTILE = {
    "config.yaml": [ALIAS_BOMB, "[" * 5000, "trainer: 3", "trainer: {steps: [1]}", "\x00", "{1: {2: 3}}"],
    "status.json": ["[" * 5000, "[]", '{"state": 3, "step": 1}', '{"state": "running", "step": 1e999}',
                    '{"state": "failed", "step": 1, "reason": {"a": 1}, "exit_code": "x"}'],
    "metrics.jsonl": ['{"event": "step", "step": 1, "loss": "x", "eta_seconds": [], "time": 3}',
                      '{"event": "start", "mesh": 3, "hosts": {}, "world_size": "x"}', "\udcff"],
    "environment.json": ["[" * 5000, '{"gpus": [[[]]], "torch": {"a": {}}}', "\udcff"],
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_report_and_status_survive_odd_files(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good = {
        "config.yaml": "trainer: {steps: 3}\n",
        "status.json": '{"state": "running", "step": 1, "reason": null, "exit_code": null}',
        "metrics.jsonl": '{"event": "start", "time": 1.0}\n{"event": "step", "step": 1, "loss": 2.0, "time": 2.0}\n',
        "environment.json": "{}",
    }
    for content in HOSTILE[name]:
        for file, text in {**good, name: content}.items():
            (tmp_path / file).write_bytes(text.encode("utf-8", "surrogateescape"))
        write_report([tmp_path], tmp_path / "report.html")
        assert serried(["status", f"run.dir={tmp_path}"]) == 0
        assert "Traceback" not in capsys.readouterr().out


# status ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("host", "is_held", "is_reported"),
    [(host_name(), False, True), (host_name(), True, False), (host_name(), None, False), ("elsewhere", False, False)],
)
def test_a_run_whose_process_is_gone_is_not_shown_as_running(
    host: str, is_held: bool | None, is_reported: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_status(tmp_path, Status("running", 5))
    start = {"event": "start", "time": 1.0, "hosts": [host]}
    step = {"event": "step", "step": 5, "eta_seconds": 9, "time": 2.0}
    (tmp_path / METRICS).write_text("".join(json.dumps(each) + "\n" for each in (start, step)))
    if is_held is not None:  # without the file nothing is known, as on a disk without locks
        (tmp_path / LOCK).touch()
    with lock_folder(tmp_path) if is_held else nullcontext():
        assert serried(["status", f"run.dir={tmp_path}"]) == 0
    printed = capsys.readouterr().out
    assert ("its process is gone; run the same command to resume" in printed) == is_reported == ("eta" not in printed)


def test_status_is_read_back_as_written_and_reason_is_one_printable_line(tmp_path: Path) -> None:
    write_status(tmp_path, Status("failed", 5, "a\x1b[2J\nb", 70))
    assert read_status(tmp_path) == Status("failed", 5, "a\ufffd[2J b", 70)


def test_a_kill_replaces_what_its_consequences_recorded(tmp_path: Path) -> None:
    write_status(tmp_path, Status("failed", 5, "another process ended", 70))
    record_kill(tmp_path, "rank 1 was killed by SIGKILL", since=0)
    found = read_status(tmp_path)
    assert found is not None
    assert found.reason == "rank 1 was killed by SIGKILL"
    record_end(tmp_path, "stopped", step=5, reason="SIGTERM", exit_code=75)
    assert read_status(tmp_path) == found, "only a running one is ended"


# whose folder it is ---------------------------------------------------------------------------------------------------


def test_a_refused_command_leaves_nothing_behind(tmp_path: Path) -> None:
    RunFolder(tmp_path / "new" / "run").close()
    assert list((tmp_path / "new").iterdir()) == []
    (tmp_path / "log").write_text("kept")
    RunFolder(tmp_path).close()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["log", "new"]


def test_earlier_run_moved_in_part_before_a_kill_is_moved_completely(tmp_path: Path) -> None:
    records = ("config.yaml", "status.json", "checkpoints")
    for name in records:
        (tmp_path / name).mkdir()
    folder = RunFolder(tmp_path)
    assert folder.set_run_aside() == tmp_path / "earlier-1"
    (tmp_path / "earlier-1").rename(tmp_path / ".earlier-1.partial")
    (tmp_path / ".earlier-1.partial" / "checkpoints").rename(tmp_path / "checkpoints")  # not moved before the kill
    folder.close()
    folder = RunFolder(tmp_path)
    assert not folder.holds_a_run()
    assert sorted(path.name for path in (tmp_path / "earlier-1").iterdir()) == sorted(records)
    assert sorted(path.name for path in tmp_path.iterdir()) == [".lock", "earlier-1"]
    (tmp_path / "checkpoints").mkdir()  # of a start that was killed before it saved
    assert not folder.holds_a_run()
    folder.close()


def test_claimed_run_folder_is_refused(tmp_path: Path) -> None:
    first = RunFolder(tmp_path / "run")
    with pytest.raises(UserError, match="another process is training"):
        RunFolder(tmp_path / "run")
    first.close()
    RunFolder(tmp_path / "run").close()


@pytest.mark.parametrize(
    "name",
    [
        LOCK,
        "metrics.jsonl",
        "lost.jsonl",
        "log",
        "output",
        "log/rank-0.log",
        "log/hang.txt",
        ".earlier-1.partial",
        ".tracker-wandb.lock",
    ],
)
@pytest.mark.parametrize("is_there", [True, False])
def test_link_in_a_run_folder_is_refused_and_what_it_leads_to_stays(name: str, is_there: bool, tmp_path: Path) -> None:
    elsewhere, link = tmp_path / "elsewhere", tmp_path / "run" / name
    if is_there and name in ("log", "output", ".earlier-1.partial"):
        elsewhere.mkdir()
    elif is_there:
        elsewhere.write_text("precious")
    link.parent.mkdir(parents=True)
    link.symlink_to(elsewhere)
    (tmp_path / "run" / "status.json").write_text("{}")
    with pytest.raises(UserError, match=rf"{re.escape(name)} is a link to .*elsewhere, .*use run.dir=FOLDER"):
        RunFolder(tmp_path / "run")
    assert elsewhere.exists() == is_there
    assert not elsewhere.is_file() or elsewhere.read_text() == "precious"
    assert not elsewhere.is_dir() or not [*elsewhere.iterdir()]
    assert (tmp_path / "run" / "status.json").exists()


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP])
def test_second_start_on_a_disk_without_locks_is_refused_and_the_first_warns_of_other_machines(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = RunFolder(tmp_path / "run")
    assert first.warning is None
    first.close()

    def refuse(*_: Any) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", refuse)
    first = RunFolder(tmp_path / "run")
    assert f"{tmp_path}/run is on a disk that does not support file locks: a second start" in (first.warning or "")
    with pytest.raises(UserError, match="another process is training"):
        RunFolder(tmp_path / "run")
    RunFolder(tmp_path / "other").close()
    assert is_locked(tmp_path / "run") is None
    first.close()
    RunFolder(tmp_path / "run").close()


def test_warning_of_a_disk_without_locks_is_printed_by_a_run_and_a_sweep(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    ended = run_here(tiny_overrides(text, tmp_path / "run", "trainer.steps=1"))
    assert f"WARNING    {tmp_path}/run is on a disk that does not support file locks" in ended.printed
    with _claimed(SimpleNamespace(folder=tmp_path / "sweep")) as lock:  # type: ignore[arg-type]
        assert lock.warning


def test_lock_is_no_link_no_pipe_and_keeps_what_is_in_it(tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("precious")
    (tmp_path / LOCK).symlink_to(tmp_path / "precious")
    with pytest.raises(OSError, match="symbolic links"):
        lock_folder(tmp_path)
    (tmp_path / LOCK).unlink()
    (tmp_path / LOCK).hardlink_to(tmp_path / "precious")
    lock_folder(tmp_path).close()
    assert (tmp_path / "precious").read_text() == "precious"
    (tmp_path / LOCK).unlink()
    os.mkfifo(tmp_path / LOCK)
    assert is_locked(tmp_path) is None
    with pytest.raises(UserError, match="cannot write the run folder"):
        RunFolder(tmp_path)


def test_a_removed_renamed_or_replaced_folder_is_not_ours_and_not_written(tmp_path: Path) -> None:
    path = tmp_path / "run"
    first = RunFolder(path)
    first.begin("", {}, step=0)
    assert first.is_ours
    path.rename(tmp_path / "renamed")
    assert not first.is_ours
    second = RunFolder(path)
    second.begin("", {}, step=0)
    first.stop_early(3, "gone", 75)
    first.close()
    assert second.is_ours
    status = read_status(path)
    assert status is not None
    assert (status.state, status.step) == ("running", 0)
    shutil.rmtree(path)
    assert not second.is_ours
    second.close()
    assert not path.exists()


def test_a_run_whose_folder_is_removed_stops_without_writing(text: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"

    def remove(_: Trainer, step: int) -> None:
        if step == 3:
            shutil.rmtree(run_dir)

    ended = run_here(tiny_overrides(text, run_dir, "checkpoint.every=4"), remove)
    assert ended.code == 75
    assert f"stopped: the run folder {run_dir} was removed, renamed or replaced during training" in ended.printed
    assert ended.printed.count("removed, renamed or replaced") == 1
    assert not run_dir.exists()


def test_a_write_that_fails_leaves_the_old_content_and_no_temporary_file(tmp_path: Path) -> None:
    path = tmp_path / "file"
    write_atomically(path, "old \udcff")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (5, hard))
        with pytest.raises(OSError, match="File too large"):
            write_atomically(path, "new content")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert path.read_text() == "old \\udcff"
    assert list(tmp_path.iterdir()) == [path]


def test_escape_character_in_a_name_does_not_reach_the_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run\x1b]0;x\x07"
    run.mkdir()
    (run / "metrics.jsonl").write_text('{"event": "step", "step": 1, "loss": 2.0}\n')
    (run / "status.json").write_text('{"state": "failed", "step": 1, "reason": "\\u001b[31m", "exit_code": 70}')
    assert serried(["status", f"run.dir={run}"]) == 0
    assert serried(["generate", f"run.dir={run}"]) == 78
    shown = capsys.readouterr()
    assert "failed" in shown.out
    assert not {"\x1b", "\x07"} & {*shown.out, *shown.err}


def test_host_name_is_changed_to_a_valid_file_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("socket.gethostname", lambda: "../rack/7[*]\n")
    write_atomically(tmp_path / "file", "content")
    assert machine() == ".._rack_7____"
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_report_replaces_neither_a_pipe_nor_a_link(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run/metrics.jsonl").write_text('{"event": "step", "step": 1, "loss": 2.0}\n')
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "to-pipe").symlink_to("pipe")
    for name in ("pipe", "to-pipe"):
        assert serried(["report", str(tmp_path / "run"), f"out={tmp_path / name}"]) == 78
        assert f"error: out={tmp_path / name} is a device or a pipe and would be replaced" in capsys.readouterr().err
    assert (tmp_path / "pipe").is_fifo()
    (tmp_path / "latest").symlink_to("page.html")
    assert serried(["report", str(tmp_path / "run"), f"out={tmp_path / 'latest'}"]) == 0
    assert (tmp_path / "latest").is_symlink()
    assert (tmp_path / "page.html").read_text().startswith("<!doctype html>")


def test_numbers_that_no_run_writes_itself_are_metrics_of_the_task() -> None:
    event = {"event": "eval", "step": 3, "set": "books", "loss": 1.0, "accuracy": 0.9, "f1": 1, "note": "x", "ok": True}
    assert named_metrics(event) == {"accuracy": 0.9, "f1": 1}
