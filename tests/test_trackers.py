"""W&B, TensorBoard and MLflow show what ``metrics.jsonl`` tells: every step once, whatever happened to the run."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from importlib.util import find_spec
from pathlib import Path
from shutil import rmtree
from types import SimpleNamespace
from typing import Any

import pytest
from mlflow.tracking import MlflowClient

from benchmarks.disturb import family, send
from serried.cli import main
from serried.configs.addresses import masked
from serried.configs.compose import compose
from serried.configs.errors import UserError
from serried.configs.trackers import check_trackers
from serried.records.trackers import cores, processes
from serried.records.trackers.cores import is_a_core_idle
from serried.records.trackers.metrics_file import MetricsFile
from serried.records.trackers.rows import Rows
from tests.cluster import ROOT
from tests.runs import metrics, tiny_overrides
from tests.tracked import Records, accumulator, mirrors, scalars, wait_for, wandb_run
from tests.wandb_server import WandbServer, serving

KEY = "0123456789abcdef0123456789abcdef01234567"
_WAITS = re.compile(r"tracking   W&B: begins in \d+ s, or when training ends: training uses all cores\n")


@pytest.fixture(autouse=True)
def _nobodys_account(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith(("WANDB_", "MLFLOW_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[WandbServer]:
    with serving() as server:
        monkeypatch.setenv("WANDB_BASE_URL", server.url)
        monkeypatch.setenv("WANDB_API_KEY", KEY)
        yield server


def shown(run_dir: Path) -> int:
    """The last step that TensorBoard shows; 0: none."""
    try:
        return scalars(run_dir)[-1][0]
    except KeyError:
        return 0


def warnings(printed: str) -> list[str]:
    return [line for line in printed.splitlines() if line.startswith("WARNING")]


def warned(records: Records, capsys: pytest.CaptureFixture[str]) -> list[str]:
    """The warnings that ``records`` print, once there is one."""
    printed: list[str] = []
    return list(
        wait_for(lambda: records.look() or printed.append(capsys.readouterr().out) or warnings("".join(printed)))
    )


def await_wandb(records: Records, capsys: pytest.CaptureFixture[str]) -> None:
    """Wait until ``records`` tell where W&B shows the run."""
    wait_for(lambda: records.look() or "tracking   W&B: http" in capsys.readouterr().out)


@contextmanager
def in_place_of_mirrors(command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Have a shell ``command`` started where a mirror would be."""
    speaker = tmp_path / "speaker"
    speaker.write_text(f"#!/bin/sh\n{command}\n")
    speaker.chmod(0o755)
    with monkeypatch.context() as patched:
        patched.setattr(processes, "COMMAND", (str(speaker),))
        yield


@pytest.mark.slow
def test_a_run_that_was_killed_with_its_mirrors_and_went_on_shows_each_step_once(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed at step 12 and resumed at 10: steps 11 and 12 are those of the second time."""
    run_dir, store = tmp_path / "run", f"{tmp_path}/mlruns"
    argv = ("track.wandb=offline", "track.tensorboard=true", f"track.mlflow={store}")
    records = Records(text, run_dir, *argv)
    records.steps(1, 12, loss=1.0)
    wait_for(lambda: list(run_dir.glob("tensorboard/events*")) and list(run_dir.glob("wandb/offline-run-*/*.wandb")))
    records.die()
    records = Records(text, run_dir, *argv, step=10)
    records.steps(11, 15, loss=2.0)
    records.end()
    truth = [(line["step"], line["loss"]) for line in metrics(run_dir)]
    assert [step for step, _ in truth] == list(range(1, 16))
    assert scalars(run_dir) == [(step, pytest.approx(loss)) for step, loss in truth]
    history = wandb_run(run_dir)["history"]
    assert [(row["step"], row["train/loss"]) for row in history] == truth
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    client = MlflowClient(tracking_uri=store)
    (run,) = client.search_runs([client.get_experiment_by_name("serried").experiment_id])
    assert [(point.step, point.value) for point in client.get_metric_history(run.info.run_id, "train/loss")] == truth
    assert (run.info.status, run.data.tags["tracker_run_id"]) == ("FINISHED", "abcd1234")
    assert run.data.params["optim.lr"] == "0.003"
    assert run.data.tags["summary.final_validation_loss"] == "2.0"


@pytest.mark.slow
def test_steps_that_a_rollback_undid_are_not_shown(text: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    records = Records(text, run_dir, "track.wandb=offline", "track.tensorboard=true")
    records.steps(1, 8, loss=1.0)
    wait_for(lambda: list(run_dir.glob("tensorboard/events*")) and list(run_dir.glob("wandb/offline-run-*/*.wandb")))
    records.go_back(4, from_step=8)
    records.steps(5, 7, loss=2.0)
    records.end("stopped")
    truth = [(line["step"], line["loss"]) for line in metrics(run_dir)]
    assert truth[3:5] == [(4, 1.25), (5, 2.2)]
    assert scalars(run_dir) == [(step, pytest.approx(loss)) for step, loss in truth]
    run = wandb_run(run_dir)
    assert [(row["step"], row["train/loss"]) for row in run["history"]] == truth
    assert (run["summary"]["state"], run["summary"]["rollbacks"]) == ("stopped", 1)


def test_what_the_trackers_know_of_a_run(text: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    named = ("track.project=books", "track.group=sweep-7", "track.tags=[a,b]", "track.notes='first try'")
    records = Records(text, run_dir, "track.wandb=offline", "track.tensorboard=true", "run.name=mine", *named)
    records.steps(1, 3)
    records.folder.record("checkpoint", step=2, path="checkpoints/step-00000002", seconds=0.1)
    records.end()
    run = wandb_run(run_dir)
    assert (run["id"], run["project"], run["group"], run["tags"]) == ("abcd1234", "books", "sweep-7", ["a", "b"])
    assert (run["name"], run["notes"], run["exit_code"]) == ("mine", "first try", 0)
    assert ("*", "step") in run["axes"], "steps may come again"
    assert run["config"]["optim"]["lr"] == 0.003
    assert run["config"]["run_facts"]["environment"]["torch"] == "2"
    summary = run["summary"]
    assert (summary["state"], summary["final_loss"], summary["best_validation_loss"]) == ("finished", 4 / 3, 1.0)
    assert (summary["checkpoint"], summary["report"]) == ("checkpoints/step-00000002", str(run_dir / "report.html"))
    assert run["history"][2].items() >= {"validation/loss": 1.0, "train/source_tokens/web": 3, "step": 3}.items()
    board = accumulator(run_dir)
    assert [event.value for event in board.Scalars("speed/tokens_per_second")] == [1280.0] * 3
    assert [(event.step, event.value) for event in board.Scalars("validation/loss")] == [(3, 1.0)]
    assert {"_hparams_/experiment", "_hparams_/session_start_info", "_hparams_/session_end_info"} <= set(
        board.Tags()["tensors"]
    )
    assert b"optim.lr" in board.SummaryMetadata("_hparams_/session_start_info").plugin_data.content
    assert not mirrors(run_dir)


def test_online_a_restart_sends_what_the_server_has_not(
    text: Path, tmp_path: Path, server: WandbServer, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = tmp_path / "run"
    records = Records(text, run_dir, "track.wandb=online")
    records.steps(1, 6)
    await_wandb(records, capsys)
    records.end("stopped")
    assert [row["step"] for row in server.runs["abcd1234"].history] == list(range(1, 7))
    records = Records(text, run_dir, "track.wandb=online", step=4)
    records.steps(5, 9)
    await_wandb(records, capsys)
    records.end()
    stored = server.runs["abcd1234"]
    assert [row["step"] for row in stored.history] == list(range(1, 10))
    assert (stored.starts > 1, stored.exit_code, stored.summary["state"]) == (True, 0, "finished")
    assert json.loads(stored.config)["optim"]["value"]["lr"] == 0.003
    for path in run_dir.rglob("*"):
        assert not path.is_file() or KEY.encode() not in path.read_bytes(), f"the key is in {path}"


@contextmanager
def busy_cores() -> Iterator[None]:
    """All that this process may use."""
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in os.sched_getaffinity(0)]
    try:
        yield
    finally:
        for each in busy:
            each.kill()
            each.wait()


def with_seconds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, **seconds: Any) -> None:
    """Have mirrors with other ``seconds``: values of their program."""
    changed = tmp_path / "changed.serried.records.trackers"
    changed.write_text(
        "import sys, serried.records.trackers.__main__ as mirror\n"
        f"vars(mirror).update(COMMAND=(sys.executable, '-P', __file__), **{seconds!r})\n"
        "mirror.main(sys.argv[1:])\n"
    )
    monkeypatch.setattr(processes, "COMMAND", (sys.executable, "-P", str(changed)))


def with_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have runs wait for mirrors for as long as something speaks for it."""
    monkeypatch.setattr(processes, "_WAIT_SECONDS", 10_000.0)
    monkeypatch.setattr(processes, "_ANSWER_SECONDS", 10_000.0)
    monkeypatch.setattr(processes, "_MOST_SHARE", 10_000.0)


@pytest.mark.parametrize(
    ("mode", "until"),
    [
        ("online", "training has ended"),
        ("online", "the server is gone"),
        pytest.param("online", "a core is free", marks=pytest.mark.slow),
        pytest.param("online", "its time has come", marks=pytest.mark.slow),
        pytest.param("offline", "its time has come", marks=pytest.mark.slow),
    ],
)
def test_where_training_uses_all_cores_its_client_waits(
    mode: str,
    until: str,
    text: Path,
    tmp_path: Path,
    server: WandbServer,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    run_dir, seconds = tmp_path / "run", 10.0 if until == "its time has come" else 10_000.0
    with_seconds(tmp_path, monkeypatch, _FIRST_SECONDS={"wandb": seconds})
    with_patience(monkeypatch)
    with ExitStack() as stack:
        stack.enter_context(busy_cores())
        if is_a_core_idle(time.sleep):
            pytest.skip("this machine shares out its cores in another way")
        records = Records(text, run_dir, f"track.wandb={mode}", niceness=1)
        records.steps(1, 3)
        wait_for(lambda: records.look() or _WAITS.search(capsys.readouterr().out))
        (mirror,) = records.mirrors._mirrors
        assert mirror.has_reached
        assert not server.runs
        assert not (run_dir / "wandb").exists()
        if until == "the server is gone":
            server.shutdown()
            server.server_close()
        if until == "a core is free":
            stack.close()
        if until in ("a core is free", "its time has come"):
            wait_for(lambda: records.look() or "tracking   W&B" in capsys.readouterr().out)
        records.end()
    is_offline = mode == "offline" or until == "the server is gone"
    history = wandb_run(run_dir)["history"] if is_offline else server.runs["abcd1234"].history
    assert [row["step"] for row in history] == [1, 2, 3]
    assert len(warnings(capsys.readouterr().out)) == (until == "the server is gone")


@pytest.mark.parametrize(("idle_seconds", "expected"), [(1.5, True), (0.9, False), (0.0, False), (None, True)])
def test_a_core_is_idle_where_those_of_this_process_together_had_the_time_of_one(
    idle_seconds: float | None, expected: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stat, ticks = tmp_path / "stat", os.sysconf("SC_CLK_TCK")
    own = next(iter(os.sched_getaffinity(0)))
    if idle_seconds is not None:
        stat.write_text(f"cpu 9 9 9 9 9\ncpu{own} 7 0 7 1000 0\ncpu{own + 4096} 7 0 7 1000 0\nintr 7\n")
    monkeypatch.setattr(cores, "_STAT", stat)
    clock = iter([100.0, 101.2])
    monkeypatch.setattr(cores, "time", SimpleNamespace(monotonic=lambda: next(clock)))

    def wait(_: float) -> None:
        if idle_seconds is not None:
            idle = 1000 + round(idle_seconds * ticks)
            stat.write_text(f"cpu 9 9 9 9 9\ncpu{own} 7 0 7 {idle} 900\ncpu{own + 4096} 7 0 7 9000 0\nintr 7\n")

    assert is_a_core_idle(wait) is expected


def test_one_that_fails_while_it_is_waited_for_is_waited_for_no_longer(
    text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with_patience(monkeypatch)
    says = """echo '{"reached": true}'; cat; echo '{"reached": true}'; sleep 0.1"""
    fails = says + """; echo '{"reached": false, "warning": "gone"}'; exec sleep 20000"""
    with in_place_of_mirrors(fails, tmp_path, monkeypatch):
        records = Records(text, tmp_path / "run", "track.wandb=online")
    (mirror,) = records.mirrors._mirrors
    try:
        wait_for(lambda: records.look() or mirror.has_reached)
        records.mirrors.end()
        assert mirror.process.poll() is None
        assert warnings(capsys.readouterr().out) == ["WARNING    W&B: gone. metrics.jsonl has everything"]
    finally:
        mirror.process.kill()
        mirror.process.wait()
        records.folder.close()


@pytest.mark.slow
def test_without_a_key_its_records_are_kept_to_be_sent_later(
    text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = tmp_path / "run"
    records = Records(text, run_dir, "track.wandb=online")
    records.steps(1, 5)
    (warning,) = warned(records, capsys)
    records.end()
    assert not warnings(capsys.readouterr().out), "told once"
    run = wandb_run(run_dir)
    assert [row["step"] for row in run["history"]] == list(range(1, 6))
    assert "no key for https://api.wandb.ai: WANDB_API_KEY is not set" in warning
    assert f"at any later time by serried send run.dir={run_dir}. Training goes on" in warning
    assert [run["folder"]] == list(run_dir.glob("wandb/offline-run-*"))


@pytest.mark.slow
@pytest.mark.parametrize("is_there_at_the_end", [True, False])
def test_its_service_killed_no_record_is_lost(
    is_there_at_the_end: bool, text: Path, tmp_path: Path, server: WandbServer, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = tmp_path / "run"
    records = Records(text, run_dir, "track.wandb=online")
    records.steps(1, 3)
    kill_service(run_dir, server)
    records.steps(4, 6)
    (warning,) = warned(records, capsys)
    assert "; it is tried again now and then" in warning
    records.steps(7, 9)
    if not is_there_at_the_end:
        server.shutdown()
        server.server_close()
    records.end()
    if is_there_at_the_end:
        assert not warnings(capsys.readouterr().out), "told once"
        history = server.runs["abcd1234"].history
    else:
        history = wandb_run(run_dir)["history"]
    assert [row["step"] for row in history] == list(range(1, 10))


@pytest.mark.slow
def test_that_its_service_was_killed_is_noticed_without_another_record(
    text: Path, tmp_path: Path, server: WandbServer, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = tmp_path / "run"
    records = Records(text, run_dir, "track.wandb=online")
    records.steps(1, 3)
    stored = wait_for(lambda: server.runs.get("abcd1234"))
    wait_for(lambda: len(stored.history) >= 2)  # nothing is left for the client to do
    kill_service(run_dir, server)
    (warning,) = warned(records, capsys)
    assert "its service wandb-core has ended" in warning
    records.end()
    assert [row["step"] for row in stored.history] == [1, 2, 3]


@pytest.mark.slow
def test_of_a_server_that_is_gone_at_the_end_a_run_tells(
    text: Path, tmp_path: Path, server: WandbServer, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its client tries again without a word."""
    with_patience(monkeypatch)
    run_dir = tmp_path / "run"
    records = Records(text, run_dir, "track.wandb=online")
    records.steps(1, 3)
    await_wandb(records, capsys)
    server.shutdown()
    server.server_close()
    records.steps(4, 6)
    records.end()
    (warning,) = warnings(capsys.readouterr().out)
    assert (
        f"W&B: {server.url} cannot be reached (Connection refused); its records can be sent at any later time"
        in warning
    )
    assert [row["step"] for row in wandb_run(run_dir)["history"]] == list(range(1, 7))


@pytest.mark.slow
def test_tried_again_the_server_is_sent_what_it_has_not(
    text: Path, tmp_path: Path, server: WandbServer, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also after a rollback, of which the server shows both what was before and what is now."""
    run_dir = tmp_path / "run"
    with_seconds(tmp_path, monkeypatch, _TRY_AGAIN_SECONDS=0.5)
    records = Records(text, run_dir, "track.wandb=online")
    records.steps(1, 8)
    stored = wait_for(lambda: server.runs.get("abcd1234"))
    wait_for(lambda: len(stored.history) == 7)  # of the eighth more may come, until the ninth
    records.go_back(4, from_step=8)
    records.steps(5, 7)
    wait_for(lambda: len(stored.history) == 7 + 2 and (stored.summary["step"], stored.summary["rollbacks"]) == (6, 1))
    starts = stored.starts
    kill_service(run_dir, server)
    records.steps(8, 9)
    wait_for(lambda: records.look() or (stored.starts > starts and "tracking   W&B: http" in capsys.readouterr().out))
    records.end()
    assert [row["step"] for row in stored.history] == [*range(1, 8), *range(5, 10)]


def kill_service(run_dir: Path, server: WandbServer) -> None:
    """Kill the process that W&B's client has started, once it has told its server of the run."""
    (mirror,) = wait_for(lambda: server.runs and mirrors(run_dir))
    (stored,) = server.runs.values()  # where the summary may come after the rows
    wait_for(lambda: not stored.history or stored.summary.get("step") == stored.history[-1]["step"])
    for pid in family(mirror)[1:]:
        send(pid, signal.SIGKILL)


def test_a_mirror_that_is_killed_costs_a_warning(
    text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = tmp_path / "run"
    records = Records(text, run_dir, "track.tensorboard=true")
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):  # that ask the run to stop
        (mirror,) = wait_for(lambda: list(run_dir.glob("tensorboard/events*")) and mirrors(run_dir))
        os.kill(mirror, number)
    records.steps(1, 3)
    wait_for(lambda: shown(run_dir) >= 2)
    os.kill(mirror, signal.SIGKILL)
    wait_for(lambda: records.look() or capsys.readouterr().out.count("TensorBoard: its process was killed by signal 9"))
    records.end()
    assert not warnings(capsys.readouterr().out), "told once"


def test_a_mirror_may_say_anything(
    text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever a tracker's library prints there by itself stops nothing, and hides nothing."""
    garbage = [
        b"no JSON", b"{torn", b'{"warning": ', b"{" * 10_000, b'{"a":' * 10_000, b"{\xff\xfe}", b"[]", b"7", b"",
        b'{"warning": 7, "reached": "yes"}', b'{"note": null}', b'{"note": {}}', b"x" * 100_000,
        b'{"warning": "heard"}', b'{"note": "heard\\n too"}',
    ]  # fmt: skip
    (tmp_path / "said").write_bytes(b"\n".join(garbage) + b"\n{unended")
    with in_place_of_mirrors(f"exec cat '{tmp_path / 'said'}'", tmp_path, monkeypatch):
        records = Records(text, tmp_path / "run", "track.wandb=offline")
    printed: list[str] = []
    wait_for(lambda: records.look() or printed.append(capsys.readouterr().out) or "heard too" in "".join(printed))
    assert "W&B: heard" in "".join(printed)
    records.end()


def test_mirrors_that_are_told_to_finish_are_not_waited_for(text: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    records = Records(text, run_dir, "track.tensorboard=true")
    records.steps(1, 3)
    (mirror,) = wait_for(lambda: mirrors(run_dir))
    os.kill(mirror, signal.SIGSTOP)
    records.folder.record("stop", step=3, state="finished", reason="all steps done")
    records.mirrors.finish()
    assert mirrors(run_dir) == [mirror], "it cannot have ended: nobody has waited for it"
    os.kill(mirror, signal.SIGCONT)
    wait_for(lambda: not mirrors(run_dir))  # without another word
    assert [step for step, _ in scalars(run_dir)] == [1, 2, 3]
    records.mirrors.finish()
    records.mirrors.end()
    records.folder.close()


@pytest.mark.parametrize(
    ("mode", "says", "patience", "expected"),
    [
        # To wait here is to wait in vain.
        ("online", "true", 10_000.0, ["WARNING    W&B has not answered yet; its process goes on"]),
        # It may hang since.
        ("online", """echo '{"reached": true}'""", 10_000.0, ["tracking   W&B has not taken all yet; its process"]),
        (
            "online",
            """echo '{"reached": true}'; cat; echo '{"reached": true}'""",
            4.2,
            ["W&B: sending the rest, for at most 4 s", "tracking   W&B has not taken all yet; its process"],
        ),
        # A file needs no answer.
        (
            "offline",
            "true",
            1.2,
            ["W&B: sending the rest, for at most 1 s", "tracking   W&B has not taken all yet; its process"],
        ),
    ],
)
def test_a_tracker_that_does_not_answer_at_the_end_is_not_waited_for_and_another_is(
    mode: str,
    says: str,
    patience: float,
    expected: list[str],
    text: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(processes, "_WAIT_SECONDS", patience)
    monkeypatch.setattr(processes, "_WORTH_A_WORD_SECONDS", patience - 0.2)
    if "cat" in says:
        monkeypatch.setattr(processes, "_WAIT_SHARE", 10_000.0)
    with in_place_of_mirrors(f"{says}; exec sleep 20000", tmp_path, monkeypatch):
        records = Records(text, tmp_path / "run", f"track.wandb={mode}")
    (mirror,) = records.mirrors._mirrors
    wait_for(lambda: records.look() or mirror.has_reached or not says.startswith("echo"))
    records.mirrors.end()
    assert mirror.process.poll() is None
    printed = [line for line in capsys.readouterr().out.splitlines() if "W&B" in line]
    assert len(printed) == len(expected)
    assert all(words in line for words, line in zip(expected, printed, strict=True))
    assert printed[-1].endswith(f"again: serried send run.dir={tmp_path / 'run'}")
    mirror.process.kill()
    mirror.process.wait()
    records.folder.close()


def test_a_folder_that_cannot_be_written_costs_a_warning(
    text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    (run_dir / "tensorboard").write_text("in the way")
    records = Records(text, run_dir, "track.tensorboard=true")
    records.steps(1, 3)
    records.end()
    (warning,) = warnings(capsys.readouterr().out)
    assert "File exists" in warning


def told(capsys: pytest.CaptureFixture[str]) -> list[str]:
    """Lines that were printed, without the one that says that it takes long, which depends."""
    return [line for line in capsys.readouterr().out.splitlines() if "sending, which may take minutes" not in line]


def test_the_records_of_a_run_that_has_ended_can_be_sent_again(
    text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = tmp_path / "run"
    records = Records(text, run_dir, "track.tensorboard=true")
    records.steps(1, 4)
    records.end()
    rmtree(run_dir / "tensorboard")
    capsys.readouterr()
    assert main(["send", f"run.dir={run_dir}"]) == 0
    assert [step for step, _ in scalars(run_dir)] == [1, 2, 3, 4]
    assert told(capsys) == [
        f"tracking   TensorBoard: tensorboard --logdir {run_dir}/tensorboard",
        "tracking   TensorBoard has taken all",
    ]
    assert main(["send", f"run.dir={tmp_path / 'rum'}"]) == 78
    assert f"did you mean run.dir={run_dir}?" in capsys.readouterr().err


def test_a_run_without_trackers_has_nobody_to_be_sent_to(
    text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Records(text, tmp_path / "run").end()
    assert main(["send", f"run.dir={tmp_path / 'run'}"]) == 78
    assert f"the run in {tmp_path / 'run'} has no trackers" in capsys.readouterr().err


def test_a_run_that_is_being_trained_sends_its_records_itself(
    text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    records = Records(text, tmp_path / "run", "track.tensorboard=true")
    assert main(["send", f"run.dir={tmp_path / 'run'}"]) == 78
    assert f"another process is training in {tmp_path / 'run'}" in capsys.readouterr().err
    records.end()


def test_records_are_sent_to_the_store_that_the_run_had(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wherever the command is typed."""
    run_dir, store = tmp_path / "run", "sqlite:///store.db"
    records = Records(text, run_dir, f"track.mlflow={store}", working_directory=tmp_path)
    records.steps(1, 3)
    records.die()
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    (tmp_path / "store.db").unlink(missing_ok=True)
    assert main(["send", f"run.dir={run_dir}"]) == 0
    assert (tmp_path / "store.db").exists()
    assert not any((tmp_path / "elsewhere").iterdir())


@pytest.mark.slow
def test_records_that_cannot_be_sent_are_kept(text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_dir = tmp_path / "run"
    records = Records(text, run_dir, "track.wandb=online")
    records.steps(1, 4)
    records.end()
    kept = wandb_run(run_dir)["folder"]
    capsys.readouterr()
    assert main(["send", f"run.dir={run_dir}"]) == 70
    run = wandb_run(run_dir)
    assert run["folder"] != kept, "written anew"
    assert [row["step"] for row in run["history"]] == [1, 2, 3, 4]
    assert told(capsys) == [
        "WARNING    W&B: no key for https://api.wandb.ai: WANDB_API_KEY is not set, and nobody has typed wandb login; "
        f"its records can be sent at any later time by serried send run.dir={run_dir}. metrics.jsonl has everything",
        f"tracking   W&B, offline; to send them: wandb sync {run['folder']}",
    ]


def test_a_mirror_needs_no_torch() -> None:
    modules = ["__main__", "wandb_tracker", "tensorboard_tracker", "mlflow_tracker"]
    imports = "; ".join(f"import serried.records.trackers.{module}" for module in modules)
    code = f"{imports}; import sys; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, timeout=120)


def test_a_row_gathers_all_of_a_step(tmp_path: Path) -> None:
    rows = Rows(tmp_path)
    events = [
        {"event": "start", "time": 0},
        {"event": "step", "step": 1, "time": 1, "loss": None, "nonfinite": True, "skipped": True, "mfu": 0.4},
        {"event": "spike", "step": 1, "time": 2, "loss_limit": 3.0},
        {"event": "eval", "step": 1, "time": 3, "set": "web", "loss": 2.0, "source_losses": {"a": 1.0}},
        {"event": "checkpoint", "step": 0, "time": 3, "path": "p", "bytes": 7},
        {"event": "step", "step": 2, "time": 4, "loss": 1.0, "skipped": False},
    ]
    (row,) = [row for event in events for row in rows.feed(event)]
    assert (row.step, row.time) == (1, 1)
    assert row.values == {
        "train/nonfinite": True, "train/skipped": True, "speed/mfu": 0.4, "spike/loss_limit": 3.0,
        "validation/web/loss": 2.0, "validation/web/source_loss/a": 1.0,
    }  # fmt: skip
    assert [row.step for row in rows.rest()] == [2]
    assert rows.summary.items() >= {"skipped_steps": 1, "spikes": 1, "checkpoint_step": 0, "final_loss": 1.0}.items()


def test_a_growing_file_is_followed_and_another_read_anew(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    lines = MetricsFile(path)
    assert lines.read() == (False, [])
    path.write_text('{"a": 1}\n{"a":')
    assert lines.read() == (True, [{"a": 1}])
    with path.open("a") as file:
        file.write(" 2}\n")
    assert lines.read() == (False, [{"a": 2}])
    (tmp_path / "other").write_text('{"a": 3}\n')
    (tmp_path / "other").rename(path)
    assert lines.read() == (True, [{"a": 3}])
    assert lines.read() == (False, [])


def test_a_tracker_that_is_not_installed_is_named_before_anything_starts(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "serried.configs.trackers.find_spec", lambda name: None if name == "mlflow" else find_spec(name)
    )
    config = compose(tiny_overrides(text, tmp_path / "run", "track.wandb=offline", "track.mlflow=sqlite:///a.db"))
    with pytest.raises(UserError, match=r"^MLflow is not installed; pip install -e '.\[mlflow\]', or do without: "):
        check_trackers(config.track)


def test_half_an_address_is_no_folder_to_make(text: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"^track.mlflow=postgres is neither .* or track.mlflow=./postgres for"):
        check_trackers(compose(tiny_overrides(text, tmp_path / "run", "track.mlflow=postgres")).track)
    for address in ("./new", "sqlite:///a.db", "databricks", str(tmp_path)):
        check_trackers(compose(tiny_overrides(text, tmp_path / "run", f"track.mlflow={address}")).track)


@pytest.mark.parametrize(
    ("address", "advice"),
    [
        ("https://me:secret@host/path", "track.mlflow=https://me@host/path,"),
        ("HTTPS://me:secret@host/", "track.mlflow=HTTPS://me@host/,"),
        ("https://:secret@host:5000", "track.mlflow=https://@host:5000,"),
        ("postgresql+psycopg2://me:se/cret@host/runs", "track.mlflow=postgresql+psycopg2://me@host/runs,"),
        ("postgresql://host:5432/runs?user=me&password=secret", "track.mlflow=postgresql://host:5432/runs?user=me,"),
        ("mysql://host/runs?PASSWD=secret&ssl_ca=x", "track.mlflow=mysql://host/runs?ssl_ca=x,"),
        ("https://host/?api_key=secret", "track.mlflow=https://host/,"),
        ("https://host/?access_token=secret#top", "without"),
        ("mssql+pyodbc:///?odbc_connect=UID%3Dme%3BPWD%3Dsecret", "use an address without it,"),
    ],
)
def test_a_password_is_kept_out_of_the_config(address: str, advice: str, text: Path, tmp_path: Path) -> None:
    quoted = f"track.mlflow='{address}'"
    with pytest.raises(UserError, match=r"track\.mlflow holds a password") as caught:
        compose(tiny_overrides(text, tmp_path / "run", quoted))
    assert "secret" not in str(caught.value)
    assert advice in str(caught.value)
    if "%" not in address:
        assert "cret" not in masked(address), "nor is it on the page of a run that came by it otherwise"


@pytest.mark.parametrize(
    "address",
    [
        "http://host:5000/#/runs@home", "https://me@host/", "sqlite:////home/me/runs.db", "runs/mlflow",
        "postgresql://me@host:5432/runs?sslkey=/home/me/key&tokenizer=x", "databricks://profile",
    ],
)  # fmt: skip
def test_an_address_without_a_password_is_taken(address: str, text: Path, tmp_path: Path) -> None:
    assert compose(tiny_overrides(text, tmp_path / "run", f"track.mlflow='{address}'")).track.mlflow == address
