"""A run in a bucket from start to end, and the commands on it."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import ClassVar

import pytest

from serried.cli import main as serried
from serried.configs.errors import EXIT_STOPPED
from serried.configs.schema.fields import scratch_folder
from serried.launch.slurm.requeue import verdict_of
from serried.launch.sweep.grid import read_sweep
from serried.launch.sweep.points import Point
from serried.launch.sweep.sweep_table import Outcome, outcome_of
from serried.launch.sweep.train_sweep import run_sweep
from serried.records import object_store
from serried.records.head import Entry, Head, read_head
from serried.records.object_store import open_store
from serried.records.status import Status, read_status, write_status
from serried.trainer.callbacks import Callback, Run
from serried.trainer.monitor import control_file
from serried.trainer.trainer import Trainer
from testing.runs import run_here, tiny_overrides
from testing.s3_server import SECRET, S3Server

pytestmark = pytest.mark.cloud


@pytest.fixture(autouse=True)
def scratch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SERRIED_SCRATCH", str(tmp_path / "scratch"))
    monkeypatch.setattr(control_file, "_LOOK_IN_BUCKET_SECONDS", 0.1)
    return tmp_path / "scratch"


@pytest.fixture
def url(server: S3Server, folder: str) -> str:
    return server.url(folder)


def until(done: Callable[[], bool]) -> None:
    for _ in range(6000):
        if done():
            return
        time.sleep(0.01)
    raise AssertionError


def lines(server: S3Server, folder: str, epoch: int, event: str = "step") -> list[dict]:
    text = server.objects(f"{folder}/records/{epoch}/")[f"{folder}/records/{epoch}/metrics-00000.jsonl"]
    found = [json.loads(line) for line in text.splitlines()]
    return [line for line in found if line["event"] == event]


def test_run_writes_its_records_to_the_bucket_and_commands_read_them(
    server: S3Server, folder: str, url: str, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd
) -> None:
    ended = run_here(tiny_overrides(text, url))
    assert ended.code == 0, ended.printed
    assert f"files      {url}: report.html" in ended.printed
    assert str(tmp_path) not in ended.printed.replace(str(text), "")
    head = read_head(open_store(url))
    assert head is not None
    assert (head.state, head.epoch, head.records) == ("free", 1, 1)
    assert [line["step"] for line in lines(server, folder, 1)] == [1, 2, 3, 4, 5, 6]
    objects = server.objects(f"{folder}/records/1/")
    assert json.loads(objects[f"{folder}/records/1/status.json"])["state"] == "finished"
    assert f"dir: {url}".encode() in objects[f"{folder}/records/1/config.yaml"]
    assert objects[f"{folder}/records/1/report.html"]
    monkeypatch.chdir(tmp_path)
    capfd.readouterr()

    assert serried(["status", url]) == 0
    said = capfd.readouterr().out
    assert said.startswith(f"run     {url}\nstate   finished: all steps done, exit code 0\nstep    6/6, loss "), said
    assert serried(["status", f"run.dir={url}", "--json"]) == 0
    values = json.loads(capfd.readouterr().out)
    assert (values["run"], values["state"], values["step"]) == (url, "finished", 6)
    assert serried(["logs", url]) == 0
    assert "step 6/6  loss " in capfd.readouterr().out
    assert serried(["report", url]) == 0
    assert f"report     {url}: report.html, " in capfd.readouterr().out
    assert (tmp_path / "report.html").stat().st_size > 50_000
    assert serried(["plan", "compare", url]) == 0
    assert "step" in capfd.readouterr().out
    assert serried(["send", url]) == 78
    assert "has no trackers" in capfd.readouterr().err


def test_requests_through_the_bucket_save_and_stop(url: str, text: Path) -> None:
    def ask(trainer: Trainer, step: int) -> None:
        if step in (2, 5):
            control = trainer.shutdown._control
            serried([{2: "save", 5: "stop"}[step], url])
            until(lambda: bool(control.asks_to_stop if step == 5 else control.asks_to_save.is_set()))

    ended = run_here(tiny_overrides(text, url, "checkpoint.every=0", "trainer.steps=100"), ask)
    assert ended.code == 75
    saved = [line.split()[1] for line in ended.printed.splitlines() if line.startswith("saved")]
    assert len(saved) == 2, ended.printed
    assert "stopping   control: stop" in ended.printed
    again = run_here(tiny_overrides(text, url, "checkpoint.every=0", "trainer.steps=100", "trainer.stop_at=8"))
    assert "control: stop" not in again.printed, "it was for the start before"


def test_process_that_lost_the_run_ends_with_75_and_changes_nothing_more(
    server: S3Server, folder: str, url: str, text: Path
) -> None:
    def take(trainer: Trainer, step: int) -> None:
        del trainer
        if step == 3:
            taken.append(Head.claim(open_store(url), patience_seconds=0.0))
            before.update(server.objects(folder))

    taken: list[Head] = []
    before: dict[str, bytes] = {}
    ended = run_here(tiny_overrides(text, url, "trainer.steps=1000", "checkpoint.every=1"), take)
    assert ended.code == 75, ended.printed
    assert f"has taken over {url}; this process writes nothing more" in ended.printed.splitlines()[-1], ended.printed
    taken[0].release()
    after = server.objects(folder)
    assert {key for key in before if before[key] != after.get(key)} <= {
        f"{folder}/head.json", *(key for key in before if "/records/1/" in key)
    }  # fmt: skip


def test_process_that_lost_the_run_in_its_last_save_ends_with_75(url: str, text: Path) -> None:
    def take(trainer: Trainer, step: int) -> None:
        if step == 5:
            trainer.shutdown._control.end()  # so that the save is the first to notice
            taken.append(Head.claim(open_store(url), patience_seconds=0.0))

    taken: list[Head] = []
    ended = run_here(tiny_overrides(text, url, "checkpoint.every=0"), take)
    assert ended.code == 75, ended.printed
    assert f"has taken over {url}; this process writes nothing more" in ended.printed.splitlines()[-1], ended.printed
    taken[0].release()


def test_start_while_another_process_trains_is_refused_in_one_line(url: str, text: Path) -> None:
    other = Head.claim(open_store(url), renew_seconds=0.2)
    ended = run_here(tiny_overrides(text, url))
    assert ended.code == 78
    last = ended.printed.splitlines()[-1]
    assert last.startswith(f"error: process {other.owner[:8]} on ")
    assert f" trains in {url}; it renewed its claim within " in last
    other.release()


class Raises(Callback):
    """A callback that fails."""

    def on_step(self, run: Run) -> None:
        if run.step == 3:
            commands = subprocess.run(["ps", "-ewwo", "args"], capture_output=True, check=True).stdout
            Path(os.environ["SERRIED_SCRATCH"], "commands").write_bytes(commands)
            raise RuntimeError("in step 3")


def test_next_start_has_the_records_of_the_run_and_removes_the_old_copy(
    server: S3Server, folder: str, url: str, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run_here(tiny_overrides(text, url, "trainer.stop_at=2")).code == 75
    monkeypatch.setenv("SERRIED_SCRATCH", str(tmp_path / "another-node"))
    ended = run_here(tiny_overrides(text, url))
    assert ended.code == 0, ended.printed
    assert [line["step"] for line in lines(server, folder, 2)] == [1, 2, 3, 4, 5, 6]
    assert len(lines(server, folder, 2, "start")) == 2
    assert not server.objects(f"{folder}/records/1/")


class Saves(Callback):
    """A callback that keeps the checkpoints it is given."""

    saved: ClassVar[list[object]] = []

    def on_save(self, run: Run) -> None:
        self.saved.append(run.checkpoint)


def test_run_that_starts_again_keeps_the_earlier_one(server: S3Server, folder: str, url: str, text: Path) -> None:
    Saves.saved.clear()
    callback = ("--callback", f"{__name__}:Saves")
    assert run_here([*tiny_overrides(text, url, "trainer.stop_at=4"), *callback]).code == 75
    first = read_head(open_store(url))
    assert first is not None
    assert Saves.saved == [f"{url}/{entry.prefix}" for entry in first.checkpoints]
    assert run_here(tiny_overrides(text, url, "checkpoint.resume=never", "trainer.stop_at=2")).code == 75
    head = read_head(open_store(url))
    assert head is not None
    (earlier,) = head.earlier
    assert (head.records, [entry.step for entry in head.checkpoints]) == (2, [2])
    assert (earlier.records, [entry.step for entry in earlier.checkpoints]) == (1, [2, 4])
    assert [line["step"] for line in lines(server, folder, 1)] == [1, 2, 3, 4]
    assert [line["step"] for line in lines(server, folder, 2)] == [1, 2]
    assert server.objects(f"{folder}/{earlier.checkpoints[1].prefix}/MANIFEST.json")


def test_start_of_a_run_that_was_killed_after_its_last_save_records_its_end(
    server: S3Server, folder: str, url: str, text: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run_here(tiny_overrides(text, url)).code == 0
    key = f"{folder}/records/1/status.json"
    open_store(url).put("records/1/status.json", server.objects(key)[key].replace(b"finished", b"running"))
    ended = run_here(tiny_overrides(text, url))
    assert ended.code == 0
    assert f"{url} is finished: 6 steps, the model is in {url}" in ended.printed
    capfd.readouterr()
    assert serried(["status", url]) == 0
    assert "state   finished" in capfd.readouterr().out
    assert [line["step"] for line in lines(server, folder, 2)] == [1, 2, 3, 4, 5, 6]


def test_start_reads_the_head_once_and_lists_nothing_while_it_trains(
    server: S3Server, folder: str, url: str, text: Path
) -> None:
    def sent() -> list[str]:
        return [line for line in server.requests()[before:] if "/control" not in line]

    before = len(server.requests())
    started: list[str] = []

    def train(trainer: Trainer, step: int) -> None:
        del trainer
        if step == 1:
            started.extend(sent())

    assert run_here(tiny_overrides(text, url), train).code == 0
    head = f"/bucket/{folder}/head.json"
    of_head = [line.removesuffix(f" {head}") for line in started if line.endswith(head)]
    claim = ["GET", "PUT conditional", "PUT conditional"]
    assert of_head[:3] == claim, "read, written, and written under a condition that no longer holds"
    assert not [line for line in of_head[3:] if line.startswith("GET")]
    training = sent()[len(started) :]
    listings = [line for line in training if line.startswith("GET list")]
    assert len(listings) <= 1, "of earlier records, after the first upload"
    assert f"GET {head}" not in training
    commits = [line for line in training if line == f"PUT conditional {head}"]
    assert len(commits) >= 3 + 1 + 1, "three saves, the first upload, and the end"
    manifests = [line for line in training if line.startswith("PUT") and line.endswith("/MANIFEST.json")]
    assert len(manifests) == 3


def test_run_killed_on_one_node_resumes_on_another_with_every_line_once(
    server: S3Server, folder: str, url: str, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SERRIED_JOB", "job-1")  # the next process of the same job need not wait
    words = tiny_overrides(text, url, "trainer.steps=100000", "schedule=constant", "checkpoint.every=10")
    store = open_store(url)

    def saved() -> int:
        head = read_head(store)
        return head.checkpoints[-1].step if head is not None and head.checkpoints else 0

    with subprocess.Popen(
        [sys.executable, "train.py", *words], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    ) as process:
        try:
            until(lambda: saved() >= 20)
        finally:
            process.kill()
    newest = saved()
    recorded = [line["step"] for line in lines(server, folder, 1)]
    assert recorded[:newest] == [*range(1, newest + 1)], "no line up to the newest checkpoint is missing"
    monkeypatch.setenv("SERRIED_SCRATCH", str(tmp_path / "another-node"))
    last = newest + 5
    assert run_here([*words, f"trainer.stop_at={last}"]).code == 75
    resumed = lines(server, folder, 2)
    assert [line["step"] for line in resumed] == [*range(1, last + 1)]
    alone = [word for word in words if not word.startswith("run.dir=")]
    assert run_here([*alone, f"run.dir={tmp_path / 'alone'}", f"trainer.stop_at={last}"]).code == 75
    undisturbed = (tmp_path / "alone/metrics.jsonl").read_text().splitlines()
    losses = [line["loss"] for line in map(json.loads, undisturbed) if line["event"] == "step"]
    assert [line["loss"] for line in resumed] == losses


def test_expired_credentials_cost_a_save_and_no_step(server: S3Server, folder: str, url: str, text: Path) -> None:
    def expire(trainer: Trainer, step: int) -> None:
        if step == 3:
            trainer.saver.wait()
            server.set_faults(expired=1.0)
        if step == 5:
            trainer.saver.wait()
            server.set_faults()

    ended = run_here(tiny_overrides(text, url), expire)
    assert ended.code == 0, ended.printed
    warnings = [line for line in ended.printed.splitlines() if line.startswith("WARNING")]
    assert warnings
    assert all("the credentials have expired" in line for line in warnings), ended.printed
    assert any("step 4" in line for line in warnings), ended.printed
    assert [line["step"] for line in lines(server, folder, 1)] == [1, 2, 3, 4, 5, 6]
    head = read_head(open_store(url))
    assert head is not None
    assert [entry.step for entry in head.checkpoints] == [2, 6]


def test_start_in_an_outage_can_be_repeated(
    server: S3Server, url: str, text: Path, scratch: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(object_store.open_store.__kwdefaults__, "retry_seconds", 0.3)
    server.set_faults(down=1.0)
    ended = run_here(tiny_overrides(text, url))
    assert ended.code == 75, ended.printed
    last = ended.printed.splitlines()[-1]
    assert last.startswith(f"stopped: cannot use run.dir={url}: {url}/head.json: the connection to 127.0.0.1:"), last
    assert last.endswith(" breaks; run the same command to resume")
    (folder,) = scratch.iterdir()
    status = read_status(folder)
    assert status is not None
    assert (status.state, status.exit_code) == ("stopped", 75), "for the launcher"
    server.set_faults()
    assert run_here(tiny_overrides(text, url)).code == 0


def test_end_in_an_outage_loses_nothing_that_was_committed(
    server: S3Server, folder: str, url: str, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SERRIED_JOB", "job-1")  # the next process of the same job need not wait

    def disconnect(trainer: Trainer, step: int) -> None:
        if step == 5:
            trainer.saver.wait()
            server.set_faults(down=1.0)

    with monkeypatch.context() as patched:
        patched.setitem(object_store.open_store.__kwdefaults__, "retry_seconds", 0.3)
        ended = run_here(tiny_overrides(text, url), disconnect)
    assert ended.code == 75, ended.printed
    warnings = [line for line in ended.printed.splitlines() if line.startswith("WARNING")]
    assert len(warnings) == 1, ended.printed
    assert warnings[0].startswith(f"WARNING    the last records are not in {url}/records/1: ")
    why = f"stopped: step 6 is done, but its checkpoint cannot be saved: cannot write {url}/checkpoints/00000006-1-"
    last = ended.printed.splitlines()[-1]
    assert why in ended.printed, ended.printed
    assert last.endswith("the newest checkpoint is from step 4; run the same command to resume"), ended.printed
    server.set_faults()
    assert run_here(tiny_overrides(text, url)).code == 0
    head = read_head(open_store(url))
    assert head is not None
    assert [entry.step for entry in head.checkpoints] == [4, 6]
    assert [line["step"] for line in lines(server, folder, 2)] == [1, 2, 3, 4, 5, 6]


def test_runs_of_a_sweep_are_in_the_bucket_and_compared_in_a_folder(
    url: str, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    sweep = read_sweep([*tiny_overrides(text, url, "run.name=tiny", "trainer.steps=2"), "optim.lr=0.01,0.02"])

    def train(point: Point, signals: object) -> Outcome:
        del signals
        assert run_here(list(point.argv)).code == 0
        return outcome_of(point)

    assert run_sweep(sweep, lambda *_: None, train) == 0
    rows = (tmp_path / "runs/tiny-sweep-lr/sweep.csv").read_text().splitlines()
    assert sorted(row.rpartition(",")[2] for row in rows) == ["run_dir", f"{url}/lr-0.01", f"{url}/lr-0.02"]
    heads = [read_head(open_store(f"{url}/lr-{lr}")) for lr in ("0.01", "0.02")]
    assert [[entry.step for entry in head.checkpoints] for head in heads if head is not None] == [[2], [2]]
    capfd.readouterr()
    assert serried(["status", url]) == 0
    assert capfd.readouterr().out.count("state   finished: all steps done") == 2


@pytest.mark.usefixtures("server")
def test_status_in_the_scratch_folder_decides_whether_a_slurm_job_is_queued_again(url: str, tmp_path: Path) -> None:
    start, run_dir = tmp_path / "17.start", scratch_folder(url)
    run_dir.mkdir(parents=True)
    head = Head.claim(open_store(url))
    outcomes: list[int] = []
    for newest in (10, 10, 10, 20):
        start.touch()
        if newest != max((entry.step for entry in head.content.checkpoints), default=0):
            head.commit(Entry(newest, head.begin(newest)), lambda _: None)
        write_status(run_dir, Status("stopped", newest + len(outcomes), "no answer from a rank", EXIT_STOPPED))
        outcomes.append(verdict_of(url, start)[0])
    head.release()
    assert outcomes == [75, 75, 70, 75], "two starts without a new checkpoint are a crash loop"


def test_process_that_used_a_bucket_is_not_forked(url: str) -> None:
    code = """
import sys
from serried.configs.compose import compose
from serried.launch.local.forks import load_to_fork
from serried.records.object_store import open_store
section = compose(["launch=local", "launch.device=cpu"]).launch
print(load_to_fork(lambda: None, section))
open_store(sys.argv[1]).get("nothing")
print(load_to_fork(lambda: None, section))
"""
    ended = subprocess.run([sys.executable, "-c", code, url], capture_output=True, text=True, timeout=60, check=True)
    assert ended.stdout.split() == ["True", "False"]


LAUNCHER = """
import os, sys
from serried.program import main
from serried.runtime.exit import leave
launcher = os.getpid()
code = main(sys.argv[1:])
if os.getpid() == launcher and "obstore" in sys.modules:
    print("the launcher used the bucket")
leave(code)
"""
"""A launcher that reports if it loaded the library that must not be used before a fork."""


def ended_of(words: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", LAUNCHER, *words], capture_output=True, text=True, timeout=120, check=False
    )


@pytest.mark.usefixtures("server")
def test_bucket_that_does_not_exist_is_refused_in_one_line(text: Path) -> None:
    ended = run_here(tiny_overrides(text, "s3://no-such-bucket/runs/a"))
    assert ended.code == 78
    assert ended.printed.splitlines()[-1] == (
        "error: cannot use run.dir=s3://no-such-bucket/runs/a: bucket no-such-bucket does not exist"
    )


def test_no_file_object_line_or_command_of_a_failed_run_has_a_credential(
    server: S3Server, folder: str, url: str, text: Path, tmp_path: Path, scratch: Path
) -> None:
    words = tiny_overrides(text, url, "launch=local", "launch.processes=2", "launch.device=cpu")
    ended = ended_of([*words, "--callback", f"{__name__}:Raises"])
    assert ended.returncode == 70, ended.stdout + ended.stderr
    assert "the launcher used the bucket" not in ended.stdout
    objects = server.objects(folder)
    assert len([key for key in objects if "/records/1/log/" in key]) == 2, "of both ranks, which the launcher forked"
    assert any(b"Traceback" in content for content in objects.values())
    assert url.encode() in (scratch / "commands").read_bytes()
    written = [path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()]
    printed = [output.encode() for output in (ended.stdout, ended.stderr)]
    for secret in (SECRET.encode(), b"server-key"):
        assert not [content for content in (*written, *printed, *objects.values()) if secret in content]
