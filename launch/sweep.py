"""``-m``: the runs of a sweep, here one after the other, each in processes of its own, or as one array job of Slurm."""

import errno
import fcntl
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import IO

from serried.configs.errors import EXIT_FAILED, EXIT_FINISHED, EXIT_MISTAKE, EXIT_STOPPED, TrainingFailed, UserError
from serried.configs.formats import duration
from serried.configs.plain_data import read_yaml
from serried.configs.points import Point, Sweep, labels
from serried.configs.run_config import check
from serried.configs.schema import RunConfig
from serried.launch.forward import NotedSignals, send
from serried.launch.queue import jobs_of, queued_before_another
from serried.launch.slurm import submit
from serried.launch.summary import Outcome, read_outcome, read_summary, shown, table, write_summary
from serried.records.status import record_kill
from serried.runtime.ending import in_one_line, say_why
from serried.runtime.program import training_command
from serried.runtime.signals import SWEEP

WriteReport = Callable[[Sequence[Path], Path], object]
"""Writes the page that compares the runs in some folders to a file."""

CONSOLE = "console.log"
"""In the run folder: what the run would have printed here."""

_LOOK_SECONDS = 0.1
_LIVE_SECONDS = 0.5
_OTHERS_END_SECONDS = 60.0
_LAST_WORDS_SECONDS = 30.0
_FRUITLESS_RUNS = 3
_OURS = ("error: ", "failed: ")
_UNSHAPED_BY = ("run", "launch", "slurm", "track", "profile", "dry_run")
"""Sections that do not change what a run comes to."""


class _AskedToStop(BaseException):
    """A signal came. No ``Exception``: nothing that mends errors of a search may take it for one."""


def run_sweep(sweep: Sweep, write_report: WriteReport) -> int:
    """Train what is not finished, show how all runs compare, and return the exit code.

    A run that fails does not end the others, unless one after the other fails alike before its first step. A signal is
    passed on to the run under way, which saves, and ends the sweep; the same command goes on.

    Raises:
        UserError: the sweep is running already, its folder cannot be written, or a search cannot be had that way.
    """
    with _claimed(sweep.folder), NotedSignals() as signals:
        runs = _Runs(sweep, signals)
        problem: Exception | None = None
        try:
            if sweep.search is not None:
                sweep.search(runs.evaluate)
            else:
                for point in sweep.points:
                    runs.evaluate(point)
        except _AskedToStop:
            pass
        except (TrainingFailed, UserError) as error:
            if not runs.have_begun:
                raise
            problem = error
        return _tell(sweep, runs, write_report, problem)


def _tell(sweep: Sweep, runs: "_Runs", write_report: WriteReport, problem: Exception | None) -> int:
    outcomes = list(runs.outcomes.values())
    summarize(sweep, outcomes, write_report)
    failed = [each for each in outcomes if each.state == "failed"]
    for each in failed:
        say_why(f"failed: {each.run_dir}: {each.reason}")
    if problem is not None:
        say_why(f"{'error' if isinstance(problem, UserError) else 'failed'}: {problem}")
    if runs.signals.received:
        done = sum(each.is_finished for each in outcomes)
        name = runs.signals.received[0].name
        _say("stopped", f"{name}: {done} of {sweep.runs} runs are finished; go on: the same command")
        return EXIT_STOPPED
    if failed or problem is not None:
        return EXIT_MISTAKE if {each.exit_code for each in failed} == {EXIT_MISTAKE} else EXIT_FAILED
    if all(each.is_finished for each in outcomes):
        return EXIT_FINISHED
    _say("stopped", _how_to_go_on(sweep, outcomes))
    return EXIT_STOPPED


def _how_to_go_on(sweep: Sweep, outcomes: Sequence[Outcome]) -> str:
    """What to type where runs have stopped by themselves."""
    stopped = [each.reason or "" for each in outcomes if not each.is_finished]
    reasons = ", ".join(dict.fromkeys(filter(None, stopped))) or "before the last step"
    done = f"{reasons}: {len(outcomes) - len(stopped)} of {sweep.runs} runs are finished"
    if not any(reason.startswith("trainer.stop_at=") for reason in stopped):
        return f"{done}; go on: the same command"
    if sweep.search is not None:  # its trials were chosen by what they came to at this step
        return f"{done}; a search to the last step is another: without trainer.stop_at, and with run.name=OTHER"
    return f"{done}; go on: the same command without trainer.stop_at, or with a higher one"


def values_shown(keys: Sequence[str], point: Point) -> str:
    """What ``point`` has for each of the swept ``keys``, for a person to read."""
    label = labels(keys)
    return " ".join(f"{label[key]}={shown(value)}" for key, value in point.values.items())


def submit_sweep(sweep: Sweep, write_report: WriteReport) -> int:
    """Submit what is neither finished nor in the queue, and show how all runs stand. Returns the exit code.

    Raises:
        UserError: Slurm refuses the job, or squeue does not answer.
    """
    if sweep.points[0].config.slurm.dry_run:
        return submit({point.argv: point.config for point in sweep.points})
    outcomes = [read_outcome(point.config.run.dir, point.values) for point in sweep.points]
    unfinished = [
        (number, point)
        for number, (point, outcome) in enumerate(zip(sweep.points, outcomes, strict=True))
        if not _is_done(point, outcome)
    ]
    queued = queued_before_another([point.config.run.dir for _, point in unfinished])
    left: dict[tuple[str, ...], RunConfig] = {}
    for number, point in unfinished:
        if not jobs_of(point.config.run.dir, queued):
            left[point.argv] = point.config
        elif outcomes[number].state != "running":
            outcomes[number] = replace(outcomes[number], state="queued")
    if left:
        submit(left)
    summarize(sweep, outcomes, write_report)
    if unfinished:
        status = f"serried status run.dir={shlex.quote(str(sweep.folder))}"
        _say("later", f"{status} shows and writes the table and the report as they are then")
    return EXIT_FINISHED


def summarize(sweep: Sweep, outcomes: Sequence[Outcome], write_report: WriteReport) -> None:
    """Print the table of ``outcomes``, and write it and the report into the folder of the sweep."""
    _say("summary", "the best first")
    print("\n".join(f"  {line}" for line in table(sweep.keys, outcomes).splitlines()), flush=True)
    _write(sweep.folder, sweep.keys, outcomes, write_report)


def write_anew(folder: Path, write_report: WriteReport) -> None:
    """Write the table and the report of the sweep in ``folder`` as its runs stand by now, and say so.

    Nothing where there is no sweep, or where the process that is at it writes them itself.
    """
    keys, outcomes = read_summary(folder)
    if outcomes and not _is_locked(folder / ".lock"):
        _write(folder, keys, outcomes, write_report)


def _write(folder: Path, keys: Sequence[str], outcomes: Sequence[Outcome], write_report: WriteReport) -> None:
    files = ["sweep.json", "sweep.csv"] if _note(folder, keys, outcomes) else []
    begun = [each.run_dir for each in sorted(outcomes, key=Outcome.rank) if (each.run_dir / "metrics.jsonl").exists()]
    if begun:
        try:
            write_report(begun, folder / "report.html")
            files.append("report.html")
        except Exception as error:  # whatever is wrong with the page, the runs are trained
            _say("WARNING", f"no report: {in_one_line(error)}")
    if files:
        _say("files", f"{folder}: {', '.join(files)}")


def _note(folder: Path, keys: Sequence[str], outcomes: Sequence[Outcome]) -> bool:
    """Write the table. Returns whether that could be done."""
    try:
        write_summary(folder, keys, outcomes)
    except OSError as error:
        _say("WARNING", f"cannot write {error.filename or folder}: {error.strerror}")
        return False
    return True


class _Runs:
    """The runs of one sweep, and how each stands."""

    def __init__(self, sweep: Sweep, signals: NotedSignals) -> None:
        self.signals = signals
        self._sweep = sweep
        grid = sweep.points if sweep.search is None else ()
        self.outcomes = {each.config.run.dir: read_outcome(each.config.run.dir, each.values) for each in grid}
        self._met = 0
        self._fruitless = 0
        self._last_reason = ""

    @property
    def have_begun(self) -> bool:
        return self._met > 0

    def evaluate(self, point: Point) -> float | None:
        """Train ``point``, unless it is finished. Returns its best validation loss; None: it failed, or has none.

        Raises:
            TrainingFailed: the third run after another that failed alike before its first step.
        """
        if self.signals.received:
            raise _AskedToStop
        run_dir = point.config.run.dir
        if not self.have_begun:
            what = f"{self._sweep.runs} runs: {' x '.join(self._sweep.keys)}"
            _say("sweep", f"{what}; what each prints is in its folder, {CONSOLE}")
        self._met += 1
        before = read_outcome(run_dir, point.values)
        if _is_done(point, before):
            self._keep(before)
            self._line(point, f"finished before; {_losses(before)}")
            return before.validation_loss
        self._line(point, f"{'goes on' if before.step else 'begins'} in {run_dir}")
        self._keep(replace(before, state="running"))
        began = time.time()
        outcome = self._train(point, began)
        self._keep(outcome)
        took = f"after {duration(time.time() - began)}"
        end = _losses(outcome) if outcome.is_finished else outcome.reason
        self._line(point, f"{outcome.state} {took}; {end}")
        if self.signals.received:
            raise _AskedToStop
        self._give_up_if_all_fail_alike(outcome, before)
        return None if outcome.state == "failed" else outcome.validation_loss

    def _keep(self, outcome: Outcome) -> None:
        self.outcomes[outcome.run_dir] = outcome
        _note(self._sweep.folder, self._sweep.keys, list(self.outcomes.values()))

    def _line(self, point: Point, text: str) -> None:
        _say(f"run {self._met}/{self._sweep.runs}", f"{values_shown(self._sweep.keys, point)}: {text}")

    def _give_up_if_all_fail_alike(self, outcome: Outcome, before: Outcome) -> None:
        reason = re.sub(r"\d+", "N", outcome.reason or "")
        is_fruitless = outcome.state == "failed" and outcome.step <= before.step
        self._fruitless = (self._fruitless + 1 if reason == self._last_reason else 1) if is_fruitless else 0
        self._last_reason = reason
        if self._fruitless == _FRUITLESS_RUNS:
            raise TrainingFailed(
                f"{_FRUITLESS_RUNS} runs in a row failed alike before their first step, so the rest is left out; mend "
                "that and give the same command again"
            )

    def _train(self, point: Point, began: float) -> Outcome:
        run_dir = point.config.run.dir
        try:
            run_dir.mkdir(parents=True, exist_ok=True)
            console = (run_dir / CONSOLE).open("ab")
        except OSError as error:
            reason = f"cannot write {run_dir}: {error.strerror}; use run.dir=FOLDER"
            return Outcome(run_dir, point.values, "failed", reason=reason, exit_code=EXIT_MISTAKE)
        with console:
            start = console.tell()
            if not self._wait_for_others(run_dir):
                return Outcome(run_dir, point.values, "stopped", reason="before it began", exit_code=EXIT_STOPPED)
            process = subprocess.Popen(
                [sys.executable, *training_command(), *point.argv],
                stdin=subprocess.DEVNULL, stdout=console, stderr=subprocess.STDOUT,
                process_group=0,  # a terminal's Ctrl-C comes here alone, and is passed on once
                env=os.environ | {SWEEP: str(os.getpid())},
            )  # fmt: skip
            code = self._wait(process, run_dir / CONSOLE, point.config.launch.stop_timeout_seconds)
        if code < 0 and not self.signals.received:
            with suppress(OSError):
                record_kill(run_dir, _killed(-code), since=began)
        return self._ended(point, code, began, _last_words(run_dir / CONSOLE, start))

    def _wait_for_others(self, run_dir: Path) -> bool:
        """Wait for whoever still trains there: a sweep that was killed leaves a run that saves. Whether to go on."""
        deadline, is_told = time.monotonic() + _OTHERS_END_SECONDS, False
        while _is_locked(run_dir / ".lock") and time.monotonic() < deadline and not self.signals.received:
            if not is_told:
                _say("waiting", f"for another process, which is training in {run_dir}")
            is_told = True
            time.sleep(_LOOK_SECONDS)
        return not self.signals.received

    def _wait(self, process: "subprocess.Popen[bytes]", console: Path, stop_timeout_seconds: float) -> int:
        """Until the process has ended: pass on signals, and show its last line on a terminal. Returns its exit code."""
        passed_on, deadline = 0, float("inf")
        with _LiveLine(console) as live:
            while True:
                with suppress(subprocess.TimeoutExpired):
                    return process.wait(_LOOK_SECONDS)
                for number in self.signals.received[passed_on:]:
                    deadline = min(deadline, time.monotonic() + stop_timeout_seconds + _LAST_WORDS_SECONDS)
                    send(process.pid, number)
                    passed_on += 1
                if time.monotonic() > deadline:
                    send(process.pid, signal.SIGKILL)
                live.update()

    def _ended(self, point: Point, code: int, began: float, last_words: str) -> Outcome:
        outcome = read_outcome(point.config.run.dir, point.values)
        is_new = outcome.time >= began and outcome.state != "not begun"
        if code == EXIT_FINISHED:
            return outcome
        if is_new and outcome.state in ("stopped", "failed"):
            return outcome
        if self.signals.received:
            return replace(outcome, state="stopped", reason="before it began", exit_code=EXIT_STOPPED, time=time.time())
        reason = _killed(-code) if code < 0 else last_words or f"exit code {code}"
        state, code = "stopped" if code == EXIT_STOPPED else "failed", EXIT_FAILED if code < 0 else code
        return replace(outcome, state=state, reason=reason, exit_code=code, time=time.time())


def _is_done(point: Point, outcome: Outcome) -> bool:
    """Whether ``point`` is finished as it stands. Where anything is not as it was, the run itself is to judge."""
    config = point.config
    if not outcome.is_finished or outcome.step < config.trainer.steps or config.checkpoint.resume == "never":
        return False
    try:
        earlier = check(read_yaml(config.run.dir / "config.yaml"))
    except (OSError, ValueError, UserError):
        return False
    return _shape(earlier) == _shape(config)


def _shape(config: RunConfig) -> dict[str, object]:
    return config.model_dump(exclude=set(_UNSHAPED_BY))


def _killed(number: int) -> str:
    hint = " (by somebody, or by the system for want of memory: see dmesg)" if number == signal.SIGKILL else ""
    return f"killed by {signal.Signals(number).name}{hint}"


def _last_words(console: Path, start: int) -> str:
    """Why the run failed, from what it printed after byte ``start`` of ``console``."""
    with console.open("rb") as file:
        file.seek(start)
        lines = [line.rstrip() for line in file.read().decode(errors="replace").splitlines() if line.strip()]
    ours = [line.partition(": ")[2] for line in lines if line.startswith(_OURS)]
    return ours[0] if ours else lines[-1] if lines else ""


def _losses(outcome: Outcome) -> str:
    parts = [("loss", outcome.loss), ("validation", outcome.validation_loss)]
    return ", ".join(f"{name} {value:.4f}" for name, value in parts if value is not None) or "no loss"


def _say(label: str, text: str) -> None:
    with suppress(OSError):  # whoever listened is gone
        print(f"{label:<10} {text}", flush=True)


class _LiveLine:
    """On a terminal, the newest line of a file, over itself. Nothing elsewhere: a log wants each line once."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._is_shown = sys.stdout.isatty()
        self._due = 0.0

    def __enter__(self) -> "_LiveLine":
        return self

    def update(self) -> None:
        if not self._is_shown or time.monotonic() < self._due:
            return
        self._due = time.monotonic() + _LIVE_SECONDS
        with suppress(OSError), self._path.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - 4096))
            lines = file.read().decode(errors="replace").splitlines()
            newest = lines[-1] if lines else ""
            print(f"\r\033[K{newest[: shutil.get_terminal_size().columns - 1]}", end="", flush=True)

    def __exit__(self, *_: object) -> None:
        if self._is_shown:
            with suppress(OSError):
                print("\r\033[K", end="", flush=True)


@contextmanager
def _claimed(folder: Path) -> Iterator[None]:
    """Have the folder of the sweep to this process alone.

    Raises:
        UserError: another process has it, or it cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = (folder / ".lock").open("w")
    except OSError as error:
        raise UserError(f"cannot write the sweep's folder {folder}: {error.strerror}; use run.dir=FOLDER") from None
    with lock:
        if not _lock(lock):
            raise UserError(f"another process is at this sweep, {folder}; wait for it, or use run.name=OTHER")
        yield


def _is_locked(path: Path) -> bool:
    try:
        with path.open("r+") as file:
            return not _lock(file)
    except OSError:
        return False


def _lock(file: IO[str]) -> bool:
    """Whether ``file`` could be locked; true where the disk knows no locks."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return error.errno not in (errno.EWOULDBLOCK, errno.EAGAIN)
    return True
