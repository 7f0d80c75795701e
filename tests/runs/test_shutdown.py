"""Stopping: whatever asks for it, the run ends at a step boundary with a checkpoint, and goes on as if nothing was."""

import gc
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch

from serried.configs.errors import StopRequested
from serried.configs.schema.declaration import BUILT_IN
from serried.configs.schema.launch_plan_track import LaunchSection
from serried.program import main
from serried.records.trackers.tracker_processes import Trackers
from serried.runtime.exit import Cause
from serried.runtime.import_signals import ASKING
from serried.runtime.rendezvous import Exchange
from serried.runtime.session import open_session
from serried.runtime.signals import Signals
from serried.trainer.checkpoint.checkpoints import FolderCheckpoints
from serried.trainer.checkpoint.save import Checkpointer
from serried.trainer.loop import Loop
from serried.trainer.monitor.straggler import SlowRank
from serried.trainer.trainer import Trainer
from testing.disturb import family, is_alive, started
from testing.forked_runs import Typed, typed, typed_on
from testing.rank_pool import ROOT, Cluster
from testing.runs import (
    ObservedRecipe,
    different_tensors,
    metrics,
    run_here,
    status,
    steps_saved,
    tiny_overrides,
    train_reported,
)

STEPS = 6
_OUT_OF_TIME = r"Slurm ends this job at \d\d:\d\d"
SAME_LINE = ("step", "loss", "grad_norm", "lr", "samples", "tokens", "skipped")


def arguments(text: Path, run_dir: Path, *more: str) -> list[str]:
    how = ["parallel=fsdp", "trainer.deterministic=true", "trainer.eval_every=3", "trainer.eval_batches=4"]
    return tiny_overrides(text, run_dir, *how, "checkpoint.every=2", f"trainer.steps={STEPS}", *more)


class _Struck(ObservedRecipe):
    """Sends signals to its own process while it computes or reads."""

    def __init__(self, at: str, count: int, numbers: list[int]) -> None:
        super().__init__()
        self._at, self._count, self._numbers = at, count, numbers

    def strike(self, at: str) -> None:
        if at == self._at:
            self._count -= 1
            if self._count == 0:
                for number in self._numbers:
                    os.kill(os.getpid(), number)

    def prepare(self, *arguments: Any) -> Any:
        self.strike("set-up")
        return super().prepare(*arguments)

    def collate_numbered(self, samples: Any, ids: Any) -> Any:
        self.strike("data")
        return super().collate_numbered(samples, ids)

    def loss(self, model: Any, batch: Any) -> Any:
        self.strike("step" if torch.is_grad_enabled() else "evaluation")
        return super().loss(model, batch)


def train_struck(argv: list[str], at: str, count: int, numbers: list[int], ranks: list[int]) -> int:
    """As ``train.py`` does it; each of ``ranks`` gets the signals when it is ``at`` some work the ``count``-th time."""
    if int(os.environ.get("RANK", "0")) not in ranks:
        return main(argv)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # the tests themselves may run under nohup
    write = Checkpointer._write
    struck: list[_Struck] = []

    def make() -> _Struck:
        struck.append(_Struck(at, count, numbers))
        return struck[-1]

    def strike_and_write(self: Checkpointer, *arguments: Any) -> Any:
        struck[-1].strike("save")
        return write(self, *arguments)

    with patch.object(Checkpointer, "_write", strike_and_write):
        return main(argv, BUILT_IN._replace(task=make))


@pytest.fixture(scope="module")
def undisturbed(cluster: Cluster, text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run_dir = tmp_path_factory.mktemp("undisturbed") / "run"
    answers = cluster.run(2, "serried.program:main", arguments=arguments(text, run_dir))
    assert [answer.value for answer in answers] == [0, 0]
    return run_dir


def goes_on_as_undisturbed(cluster: Cluster, argv: list[str], run_dir: Path, undisturbed: Path) -> None:
    answers = cluster.run(2, "serried.program:main", arguments=argv)
    assert [answer.value for answer in answers] == [0, 0], answers[0].printed
    told, expected = metrics(run_dir), metrics(undisturbed)
    assert [[line[key] for key in SAME_LINE] for line in told] == [
        [line[key] for key in SAME_LINE] for line in expected
    ]
    assert not different_tensors(run_dir, undisturbed)


TERM, USR1, INT, HUP = signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP


@pytest.mark.parametrize("number", ASKING)
def test_a_signal_while_the_program_is_imported_ends_it_in_one_line(number: signal.Signals, tmp_path: Path) -> None:
    (tmp_path / "hydra.py").write_text(f"import os; os.kill(os.getpid(), {number.value}); raise SystemExit('went on')")
    before = signal.signal(number, signal.SIG_DFL)  # tests under nohup ignore SIGHUP, and so would what they start
    try:
        done = subprocess.run(
            [sys.executable, "train.py"], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False,
            env=os.environ | {"PYTHONPATH": str(tmp_path)},
        )  # fmt: skip
    finally:
        signal.signal(number, before)
    assert done.returncode == 75
    said = f"stopped: {number.name} before training began; run the same command to start it\n"
    assert (done.stdout, done.stderr) == ("", said)


@pytest.mark.parametrize(
    ("at", "count", "numbers", "ranks", "workers", "steps", "reason"),
    [
        ("step", 1, [TERM], [1], 2, [1], "SIGTERM on rank 1"),
        ("evaluation", 2, [TERM], [1], 2, [3], "SIGTERM on rank 1"),
        ("save", 1, [USR1], [0], 2, [3, 4, 5], "SIGUSR1 on rank 0"),  # the next save, after step 4, waits for this one
        *(
            pytest.param(*each, marks=pytest.mark.slow)
            for each in (
                ("step", 4, [INT], [0, 1], 2, [4], "SIGINT on all ranks"),
                ("step", 5, [HUP, TERM, USR1, TERM], [1], 2, [5], "SIGHUP on rank 1"),
                ("data", 2, [TERM], [1], 0, [2], "SIGTERM on rank 1"),
                ("data", 4, [TERM], [1], 2, [1, 2, 3, 4], "SIGTERM on rank 1"),
            )
        ),
    ],
)
def test_signal_ends_the_run_with_a_checkpoint_that_resumes_bitwise(
    at: str, count: int, numbers: list[int], ranks: list[int], workers: int, steps: list[int], reason: str,
    cluster: Cluster, text: Path, tmp_path: Path, undisturbed: Path,
) -> None:  # fmt: skip
    run_dir = tmp_path / "run"
    argv = arguments(text, run_dir, f"data.workers={workers}")
    struck = {"argv": argv, "at": at, "count": count, "numbers": [int(number) for number in numbers], "ranks": ranks}
    first, second = cluster.run(2, "tests.runs.test_shutdown:train_struck", **struck)
    assert (first.value, second.value) == (75, 75), first.printed + second.printed
    assert second.printed == ""
    step = status(run_dir)["step"]
    assert step in steps
    assert status(run_dir) == {"state": "stopped", "step": step, "reason": reason, "exit_code": 75}
    assert f"stopping   {reason}: saving, then the run ends" in first.printed
    assert first.printed.rstrip().endswith(f"next       run the same command to resume ({step} of {STEPS} steps done)")
    assert [(line["step"], line["state"], line["reason"]) for line in metrics(run_dir, "stop")] == [
        (step, "stopped", reason)
    ]
    saved = [line["step"] for line in metrics(run_dir, "checkpoint")]
    assert saved == sorted({*range(2, step + 1, 2), step}), "each once"
    assert [line["step"] for line in metrics(run_dir, "eval")] == ([3] if step > 3 else []), "none that was cut short"
    goes_on_as_undisturbed(cluster, argv, run_dir, undisturbed)


def test_on_a_gpu_a_signal_ends_the_run_at_most_a_step_later(text: Path, tmp_path: Path) -> None:
    if not torch.cuda.is_available():
        pytest.skip("this machine has no GPU")

    def ask(_: Trainer, step: int) -> None:
        if step == 2:
            os.kill(os.getpid(), TERM)

    assert run_here(tiny_overrides(text, tmp_path / "run", "trainer.log_every=0"), ask).code == 75
    assert status(tmp_path / "run")["step"] in (3, 4)
    assert steps_saved(tmp_path / "run")[-1] == status(tmp_path / "run")["step"]


@pytest.mark.parametrize("rank", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_before_the_first_step_a_signal_ends_the_run_at_once_and_resumable(
    rank: int, cluster: Cluster, text: Path, tmp_path: Path, undisturbed: Path
) -> None:
    run_dir = tmp_path / "run"
    argv = arguments(text, run_dir, "launch.start_timeout_seconds=6")  # for rank 0, while rank 1's process lives on
    struck = {"argv": argv, "count": 1, "numbers": [int(TERM)], "ranks": [rank]}
    if rank == 0:
        answers = cluster.run(2, "tests.runs.test_shutdown:train_struck", at="set-up", **struck)
    else:
        answers = cluster.run(2, "tests.runs.test_shutdown:stop_rank_1_while_the_model_is_cut", argv=argv)
    assert [answer.value for answer in answers] == [75, 75]
    reason = f"SIGTERM on rank {rank} before the first step"
    printed = "".join(answer.printed for answer in answers)
    assert printed.count("stopped: ") == printed.count(reason) == 1
    assert "Traceback" not in printed
    assert (status(run_dir)["state"], status(run_dir)["step"], status(run_dir)["reason"]) == ("stopped", 0, reason)
    goes_on_as_undisturbed(cluster, argv, run_dir, undisturbed)


def stop_rank_1_while_the_model_is_cut(argv: list[str]) -> int:
    if os.environ["RANK"] == "0":
        return main(argv)
    with patch("serried.trainer.model.parallelize", lambda *_, **__: os.kill(os.getpid(), TERM)):
        return _as_a_process(argv)


def test_a_stop_before_the_first_step_of_a_resumed_run_loses_nothing(text: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    assert run_here(tiny_overrides(text, run_dir, "trainer.stop_at=4")).code == 75
    before = (run_dir / "metrics.jsonl").read_text()
    with patch("serried.trainer.training_state.load_state", lambda *_: os.kill(os.getpid(), USR1)):
        ended = run_here(tiny_overrides(text, run_dir))
    assert ended.code == 75
    assert "stopped: SIGUSR1 before the first step" in ended.printed
    assert (status(run_dir)["state"], status(run_dir)["step"]) == ("stopped", 4)
    assert (run_dir / "metrics.jsonl").read_text().startswith(before)
    assert run_here(tiny_overrides(text, run_dir)).code == 0
    assert [line["step"] for line in metrics(run_dir)] == list(range(1, STEPS + 1))


def _as_a_process(argv: list[str]) -> int:
    """``main``, and then let go of every connection, as a process does when it ends."""
    code = main(argv)
    gc.collect()
    return code


def fail_and_be_told(argv: list[str]) -> int:
    """Rank 1 fails in step 3; rank 0 gets what torchrun sends then."""
    rank = os.environ["RANK"]
    step = Loop._train

    def train(self: Loop, number: int, batches: Any) -> None:
        if number == 3:
            if rank == "1":
                raise ZeroDivisionError("here")
            os.kill(os.getpid(), TERM)
        step(self, number, batches)

    with patch.object(Loop, "_train", train):
        return _as_a_process(argv)


def test_signal_caused_by_a_failure_is_not_a_request_to_stop(cluster: Cluster, text: Path, tmp_path: Path) -> None:
    # With fsdp torch's caches of DTensor would keep the connections of rank 1, which a process that ends lets go.
    argv = arguments(text, tmp_path / "run", "parallel=ddp")
    answers = cluster.run(2, "tests.runs.test_shutdown:fail_and_be_told", argv=argv)
    assert [answer.value for answer in answers] == [70, 70]
    now = status(tmp_path / "run")
    assert (now["state"], now["step"], now["exit_code"]) == ("failed", 3, 70)
    assert now["reason"] == "ZeroDivisionError: here"


def test_no_trainer_outlives_a_run_that_failed(text: Path, tmp_path: Path) -> None:
    """It holds process groups, for whose end other ranks wait; the session may be held longer."""
    held: list[Any] = []

    def fail(self: Loop, *_: Any) -> None:
        held.extend((self._context.session, self._context.console, weakref.ref(self)))
        raise ZeroDivisionError("here")

    with patch.object(Loop, "_train", fail):
        assert run_here(arguments(text, tmp_path / "run")).code == 70
    gc.collect()
    assert held[-1]() is None


def stop_beside_the_dead() -> list[object]:
    with open_session(LaunchSection()) as session:
        child = subprocess.Popen([sys.executable, "-c", ""])
        child.wait()
        session.cause.processes[1] = child.pid
        answer = list(session.cause.first(StopRequested("SIGTERM"))) if session.rank == 0 else []
        session.gather("done")
        return answer


def test_rank_that_died_silently_is_not_a_request_to_stop(cluster: Cluster) -> None:
    """torchrun sends SIGTERM to the others then, as it does when it is asked to end."""
    answer = cluster.run(2, "tests.runs.test_shutdown:stop_beside_the_dead")[0].value
    assert answer == [0, "rank 1 died without an error message before the first step", 70]


def test_step_that_another_rank_left_is_not_done(text: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    assert run_here(tiny_overrides(text, run_dir, "trainer.stop_at=2")).code == 75
    typed_on(2, "-m", "tests.support.leaving", *tiny_overrides(text, run_dir))
    assert (status(run_dir)["state"], status(run_dir)["step"]) == ("stopped", 2)
    assert metrics(run_dir, "stop")[-1]["step"] == 2


def test_rank_that_waits_in_vain_still_reacts_to_signals(text: Path, tmp_path: Path) -> None:
    """Python's handlers do not run inside a call that waits."""
    argv = tiny_overrides(text, tmp_path / "run")
    script = (
        "import os, signal, threading, sys, torch.distributed as dist\n"
        "from datetime import timedelta\n"
        "from unittest.mock import patch\n"
        "from serried.program import main\n"
        "store = dist.TCPStore('127.0.0.1', 0, is_master=True, wait_for_workers=False)\n"
        "def wait(*_, **__):\n"
        "    threading.Timer(1, lambda: os.kill(os.getpid(), signal.SIGTERM)).start()\n"
        "    store.wait(['never'], timedelta(seconds=100))\n"
        f"with patch('serried.trainer.model.parallelize', wait): main({argv})\n"
    )
    done = typed("-c", script)
    assert (done.returncode, done.stderr) == (75, "")
    now = status(tmp_path / "run")
    assert (now["state"], now["step"], now["reason"]) == ("stopped", 0, "SIGTERM before the first step")


def ask_after(last: int) -> Callable[[Trainer, int], None]:
    def ask(_: Trainer, step: int) -> None:
        if step == last:
            os.kill(os.getpid(), TERM)

    return ask


def test_step_that_a_run_stops_after_is_logged(text: Path, tmp_path: Path) -> None:
    assert run_here(tiny_overrides(text, tmp_path / "run", "trainer.log_every=100"), ask_after(2)).code == 75
    assert [line["step"] for line in metrics(tmp_path / "run")] == [1, 3]


def test_a_request_in_the_last_step_leaves_the_evaluation_to_the_same_command(text: Path, tmp_path: Path) -> None:
    argv = tiny_overrides(text, tmp_path / "run", "trainer.steps=6", "trainer.eval_every=4")
    ended = run_here(argv, ask_after(5))
    assert ended.code == 75
    assert [line["step"] for line in metrics(tmp_path / "run", "eval")] == [4]
    assert " (step 4)" in next(line for line in ended.printed.splitlines() if line.startswith("stopped"))
    assert ended.printed.endswith("next       run the same command for the evaluation after step 6\n")
    assert run_here(argv).code == 0
    assert [line["step"] for line in metrics(tmp_path / "run")] == [1, 2, 3, 4, 5, 6]
    assert [line["step"] for line in metrics(tmp_path / "run", "eval")] == [4, 6]
    assert (status(tmp_path / "run")["state"], status(tmp_path / "run")["step"]) == ("finished", 6)
    assert "Nothing to do" in run_here(argv).printed


def test_run_whose_last_checkpoint_cannot_be_saved_has_failed(text: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"

    def ask(_: Trainer, step: int) -> None:
        if step == 2:
            os.kill(os.getpid(), TERM)

    with patch.object(FolderCheckpoints, "begin", lambda *_: ("", "the disk is full")):
        ended = run_here(tiny_overrides(text, run_dir, "checkpoint.every=0"), ask)
    assert ended.code == 70
    assert "failed: step 3 is done, but its checkpoint cannot be saved: the disk is full" in ended.printed
    assert status(run_dir)["state"] == "failed"


# the control file, and clocks --------------------------------------------------------------------------------


def until(done: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 180
    while not done():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_the_control_file_saves_and_stops(text: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    control = run_dir / "control"

    def write(trainer: Trainer, step: int) -> None:
        del trainer
        if step == 1:
            control.write_text("now\n")
            until(lambda: "contains 'now'" in log())
        if step in (2, 5):
            control.write_text({2: "save", 5: " STOP\n"}[step])
            until(lambda: not control.exists())

    def log() -> str:
        return (run_dir / "log/rank-0.log").read_text()

    ended = run_here(tiny_overrides(text, run_dir, "checkpoint.every=0", "trainer.steps=100"), write)
    assert ended.code == 75
    assert ended.printed.count("WARNING") == 1
    assert (
        f"WARNING    {control} contains 'now'; write stop (save and stop) or save (save and continue)" in ended.printed
    )
    assert steps_saved(run_dir) == [3, 6]
    assert (status(run_dir)["step"], status(run_dir)["reason"]) == (6, "control: stop")
    assert not control.exists(), "or the next start would stop, too"


def save_by_control(argv: list[str], control: str) -> int:
    def ask() -> None:
        Path(control).write_text("save")
        until(lambda: not Path(control).exists())

    return train_reported(argv, acts={3: ask} if os.environ["RANK"] == "0" else {})


def test_all_ranks_save_when_the_control_file_says_so(cluster: Cluster, text: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    argv = arguments(text, run_dir, "checkpoint.every=0")
    answers = cluster.run(2, "tests.runs.test_shutdown:save_by_control", argv=argv, control=str(run_dir / "control"))
    assert [answer.value for answer in answers] == [0, 0]
    assert steps_saved(run_dir) == [3, STEPS]


def save_by_time(argv: list[str]) -> int:
    """Each step takes 15 minutes by the clock of rank 0."""
    ahead = [0.0]
    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + ahead[0])

    def wait() -> None:
        ahead[0] += 900

    acts = dict.fromkeys(range(1, STEPS + 1), wait) if os.environ["RANK"] == "0" else {}
    monitor = "serried.trainer.monitor"
    with patch(f"{monitor}.shutdown.time", clock), patch(f"{monitor}.step_clock.time", clock):
        return train_reported(argv, acts=acts)


@pytest.mark.parametrize(
    ("keys", "saved", "kept"),
    [
        (["checkpoint.every=100", "checkpoint.keep=1", "checkpoint.keep_best=true"], [2, 4, 6], [6]),  # evaluated: 3, 6
        pytest.param(["checkpoint.every=100", "checkpoint.every_minutes=0"], [6], [6], marks=pytest.mark.slow),
        pytest.param(["checkpoint.every=0", "checkpoint.every_minutes=45"], [3, 6], [3, 6], marks=pytest.mark.slow),
    ],
)
def test_all_ranks_save_when_the_clock_of_rank_0_says_so(
    keys: list[str], saved: list[int], kept: list[int], cluster: Cluster, text: Path, tmp_path: Path
) -> None:
    answers = cluster.run(2, "tests.runs.test_shutdown:save_by_time", argv=arguments(text, tmp_path / "run", *keys))
    assert [answer.value for answer in answers] == [0, 0], answers[0].printed
    assert [line["step"] for line in metrics(tmp_path / "run", "checkpoint")] == saved
    assert steps_saved(tmp_path / "run") == kept


def test_max_minutes_stops_the_run(text: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    assert run_here(tiny_overrides(text, run_dir, "trainer.max_minutes=0.0001")).code == 75
    assert (status(run_dir)["step"], status(run_dir)["reason"]) == (1, "trainer.max_minutes=0.0001")
    ended = run_here(tiny_overrides(text, run_dir, "trainer.max_minutes=1000"))
    assert ended.code == 0
    assert "changed since" not in ended.printed


@pytest.mark.parametrize("left", [400, 4e9, -400])  # of a job that has ended, in a shell that was started in it
def test_run_with_enough_time_is_not_stopped_early(
    left: float, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_JOB_END_TIME", str(int(time.time() + left)))
    assert run_here(tiny_overrides(text, tmp_path / "run")).code == 0


def test_a_run_ends_before_slurm_ends_it(text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_dir = tmp_path / "run"
    monkeypatch.setenv("SLURM_JOB_END_TIME", str(int(time.time() + 400)))
    with patch("serried.trainer.monitor.shutdown.Shutdown._needed_seconds", lambda _: 500.0):
        assert run_here(tiny_overrides(text, run_dir)).code == 75
    assert status(run_dir)["step"] == 1
    assert re.fullmatch(_OUT_OF_TIME, status(run_dir)["reason"])


# before anybody can hear ----------------------------------------------------------------------------------------------


def start_apart(code: str, *argv: str, **environment: str) -> Typed:
    """``code``, and then ``train.py`` with ``argv``, in a process that ignores SIGUSR1, as under a batch script."""
    ignores = "import signal, sys, time; signal.signal(signal.SIGUSR1, signal.SIG_IGN)"
    train = "from serried.program import *; leave(main(sys.argv[1:]))"
    script = f"{ignores}; from unittest.mock import patch\n{code}\n{train}"
    return Typed("-c", script, *argv, env=os.environ | environment)


def ended(process: Typed) -> tuple[int, str]:
    """Its exit code, and what it has said of its end."""
    done = process.end(120)
    return done.returncode, done.stderr


_OF_TWO = {  # of whom the other never comes
    "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "0",
}  # fmt: skip
_PREPARE = (
    "patch('serried.recipes.text.causal_lm.CausalLM.prepare', "
    "lambda *_: [time.sleep(0.1) for _ in range(1000)]).start()"
)
_FIRST_STEP = "patch('serried.trainer.step.TrainStep.__call__', lambda *_: time.sleep(100)).start()"
_ENDS_SOON = """\
import os, serried.trainer.trainer, serried.recipes.text.causal_lm  # which take their time on a busy machine
os.environ["SLURM_JOB_END_TIME"] = str(int(time.time() + 12))
"""


@pytest.mark.slow
def test_before_the_first_step_a_run_ends_before_slurm_ends_it(text: Path, tmp_path: Path) -> None:
    """Wherever it is: it waits for another process, prepares data, or is in a first step that cannot be broken off."""
    processes = [
        start_apart(_ENDS_SOON + code, *tiny_overrides(text, tmp_path / str(number)), **environment)
        for number, (code, environment) in enumerate([
            ("", _OF_TWO), (_PREPARE, {}), (_FIRST_STEP, {}), (_FIRST_STEP, {"TORCHELASTIC_MAX_RESTARTS": "2"}),
        ])
    ]  # fmt: skip
    (code, said), *others = [ended(process) for process in processes]
    assert code == 75
    assert re.fullmatch(
        rf"stopped: {_OUT_OF_TIME} while the processes were joining; run the same command to resume\n", said
    )
    assert [code for code, _ in others] == [75, 75, 0], others  # for 75 torchrun would start it again
    for number in (1, 2, 3):
        now = status(tmp_path / str(number))
        assert (now["state"], now["step"], now["exit_code"]) == ("stopped", 0, 75)
        assert re.fullmatch(f"{_OUT_OF_TIME} before the first step", now["reason"])


def test_a_request_from_before_there_was_a_process_is_heard(text: Path, tmp_path: Path) -> None:
    """The script of a Slurm job hears what comes while Python starts, and leaves it in a file."""
    before, later = tmp_path / "17.stopped", tmp_path / "18.stopped"
    before.write_text("SIGUSR1\n")
    argv = tiny_overrides(text, tmp_path / "run")
    waits = start_apart("", *argv, **_OF_TWO, SERRIED_STATUS_DECIDES=str(before))
    prepares = start_apart(_PREPARE, *argv, SERRIED_STATUS_DECIDES=str(later))
    assert ended(waits) == (0, "stopped: SIGUSR1 while the processes were joining; run the same command to resume\n")
    until(lambda: (tmp_path / "run" / ".lock").exists())
    later.write_text("SIGUSR1\n")
    assert ended(prepares) == (0, "stopped: SIGUSR1 before the first step; run the same command to resume\n")
    assert (status(tmp_path / "run")["state"], status(tmp_path / "run")["exit_code"]) == ("stopped", 75)


# ending at once -------------------------------------------------------------------------------------------------------


def hang_and_be_interrupted_twice(argv: list[str]) -> None:
    step = Loop._train

    def train(self: Loop, number: int, batches: Any) -> None:
        step(self, number, batches)
        if number == 3:
            os.kill(os.getpid(), INT)
            os.kill(os.getpid(), INT)  # a terminal and torchrun may both pass on one Ctrl-C
            assert self._context.session.signals.received == "SIGINT"
            self._context.session.signals._interrupted_at = time.monotonic() - 5
            os.kill(os.getpid(), INT)
            time.sleep(60)

    with patch.object(Loop, "_train", train):
        main(argv)


def test_second_ctrl_c_ends_the_run_at_once(text: Path, tmp_path: Path) -> None:
    argv = tiny_overrides(text, tmp_path / "run")
    script = f"from tests.runs.test_shutdown import *; hang_and_be_interrupted_twice({argv})"
    done = typed("-c", script)
    assert done.returncode == 70
    assert done.stderr.endswith("interrupted again: ended at once, without saving\n")
    now = status(tmp_path / "run")
    assert (now["state"], now["step"], now["reason"], now["exit_code"]) == ("failed", 3, "interrupted twice", 70)


def end_and_be_interrupted_twice(argv: list[str]) -> None:
    def wait(_: Trackers) -> None:
        os.kill(os.getpid(), INT)
        time.sleep(1.1)  # what is sooner is one Ctrl-C that came twice
        os.kill(os.getpid(), INT)
        time.sleep(60)

    with patch.object(Trackers, "end", wait):
        main(argv)


@pytest.mark.parametrize(
    ("more", "state", "code"),
    [([], "finished", 0), pytest.param(["trainer.stop_at=2"], "stopped", 75, marks=pytest.mark.slow)],
)
def test_signal_after_recorded_outcome_keeps_it(
    more: list[str], state: str, code: int, text: Path, tmp_path: Path
) -> None:
    argv = tiny_overrides(text, tmp_path / "run", *more)
    script = f"from tests.runs.test_shutdown import *; end_and_be_interrupted_twice({argv})"
    done = typed("-c", script)
    assert (done.returncode, done.stderr) == (code, "")
    assert (status(tmp_path / "run")["state"], status(tmp_path / "run")["exit_code"]) == (state, code)
    assert [line["state"] for line in metrics(tmp_path / "run", "stop")] == [state]


# the launcher ----------------------------------------------------------------------------


def train_without_a_store(argv: list[str], port: int, folder: str) -> int:
    """The store is gone, for each rank, before step 2; step 3 is interrupted by what the kernel sends then. A rank
    counts as slow meanwhile."""
    os.environ["MASTER_PORT"] = str(port)
    train = Loop._train

    def lose_store(self: Loop, step: int, batches: Any) -> None:
        if step == 2:
            (Path(folder) / f"in-step-2-{os.environ['RANK']}").touch()
            until(lambda: (Path(folder) / "gone").exists())
            with pytest.raises(RuntimeError):
                self._context.session.gather("")
        if step == 3:
            os.kill(os.getpid(), TERM)
        train(self, step, batches)

    with patch.object(Loop, "_train", lose_store), patch.object(SlowRank, "named", lambda _: (1, 2.0)):
        return _as_a_process(argv)


@pytest.mark.parametrize(
    "more",
    [
        pytest.param(
            ("parallel.pipeline=2", "model.layers=2", "trainer.ema_decay=0.9", "trainer.eval_every=2"),
            marks=pytest.mark.slow,
        ),
        ("data=hf", "data.streaming=true", "data.validation_fraction=0.2"),
    ],
)
def test_run_whose_store_ended_with_the_launcher_saves_and_stops(
    more: tuple[str, ...], cluster: Cluster, text: Path, tmp_path: Path
) -> None:
    from torch.distributed import TCPStore

    run_dir, stores = tmp_path / "run", [TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)]
    port = stores[0].port

    is_over = threading.Event()

    def end_store() -> None:
        until(lambda: is_over.is_set() or len([*tmp_path.glob("in-step-2-*")]) == 2)
        stores.clear()
        (tmp_path / "gone").touch()

    if "data=hf" in more:
        (tmp_path / "rows").mkdir()
        rows = [json.dumps({"text": path.read_text()[:200]}) for path in sorted(text.glob("*.txt"))]
        (tmp_path / "rows" / "rows.jsonl").write_text("\n".join(rows * 2))
        more = (*more, f"data.path={tmp_path / 'rows'}")
    argv = arguments(text, run_dir, "checkpoint.every=0", "trainer.log_every=1", *more)
    launcher = threading.Thread(target=end_store)
    launcher.start()
    try:
        answers = cluster.run(
            2, "tests.runs.test_shutdown:train_without_a_store", argv=argv, port=port, folder=str(tmp_path)
        )  # fmt: skip
    finally:
        is_over.set()
        launcher.join()
    assert [answer.value for answer in answers] == [75, 75], answers[0].printed
    assert (status(run_dir)["state"], status(run_dir)["step"]) == ("stopped", 3)
    assert steps_saved(run_dir) == [3]
    assert "Traceback" not in answers[0].printed


def test_error_of_the_lost_store_after_the_end_of_the_launcher_is_a_stop(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.distributed import DistNetworkError, TCPStore

    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "1")
    signals, exchange = Signals(), Exchange(0, 2, 1.0)
    host = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    exchange.store = TCPStore("127.0.0.1", host.port, is_master=False)
    del host
    with pytest.raises(DistNetworkError) as of_store:
        exchange.gather("")

    def found(error: BaseException) -> tuple[str, int]:
        cause = Cause(0, range(2), LaunchSection(), signals, exchange)
        cause.first_step_is_done = True
        return cause.first(error)[1:]

    assert found(of_store.value)[1] == 70, "the launcher still runs"
    signals._parent = -1
    assert found(of_store.value) == ("torchrun (process -1) ended", 75)
    assert found(ZeroDivisionError("here"))[1] == 70


# torchrun --------------------------------------------------------------------------------


@pytest.mark.slow
def test_no_process_outlives_its_torchrun_unsaved(
    cluster: Cluster, text: Path, tmp_path: Path, undisturbed: Path
) -> None:
    """SIGUSR1 kills torchrun, unless it is told otherwise: its processes hear of that from the kernel. The storm of
    signals has the others."""
    run_dir = tmp_path / "run"
    argv = arguments(text, run_dir, "launch.device=cpu")
    with started(2, argv, tmp_path / "output.txt", script=("-m", "tests.support.waiting")) as agent:
        until(lambda: agent.poll() is not None or '"step": 2,' in _text(run_dir / "metrics.jsonl"))
        processes = family(agent.pid)
        os.kill(agent.pid, USR1)
        until(lambda: not any(map(is_alive, processes)))
    printed = (tmp_path / "output.txt").read_text()
    # The kernel's SIGTERM may come before the last thread of torchrun has gone.
    reasons = ["SIGTERM on all ranks", f"torchrun (process {agent.pid}) ended"]
    assert status(run_dir)["state"] == "stopped", printed
    assert status(run_dir)["reason"] in reasons
    assert steps_saved(run_dir)[-1] == status(run_dir)["step"]
    assert status(run_dir)["step"] == 3
    goes_on_as_undisturbed(cluster, argv, run_dir, undisturbed)


def _text(path: Path) -> str:
    return path.read_text() if path.exists() else ""
