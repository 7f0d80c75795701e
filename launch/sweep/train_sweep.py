"""``-m``: train the runs of a sweep here, one after the other, or submit them as one array job of Slurm."""

import re
import shlex
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from serried.configs.compose import config_yaml
from serried.configs.errors import EXIT_FAILED, EXIT_FINISHED, EXIT_MISTAKE, EXIT_STOPPED, TrainingFailed, UserError
from serried.configs.formats import duration
from serried.configs.plain_data import is_count, parse_yaml, value_at
from serried.configs.renamed_keys import read_saved_config_if_there
from serried.configs.schema.fields import AUTO
from serried.configs.schema.sections import RunConfig
from serried.launch.local.processes import NotedSignals
from serried.launch.slurm.batch_script import submit
from serried.launch.slurm.queue import job_folder, jobs_of, queued_before_another
from serried.launch.sweep.one_run import CONSOLE, train
from serried.launch.sweep.points import Point, Sweep, labels
from serried.launch.sweep.sweep_table import Outcome, outcome_of, read_summary, shown, table, write_summary
from serried.records.lock import FolderLock, is_locked, lock_folder
from serried.records.metrics import METRICS
from serried.runtime.exit import in_one_line, say_why
from serried.runtime.process import say

WriteReport = Callable[[Sequence[Path], Path], object]
"""Writes a page that compares the runs in the given folders to a file."""
Train = Callable[[Point, NotedSignals], Outcome]
"""Trains a run until it ends."""

_FRUITLESS_RUNS = 3
_NOT_COMPARED = ("run", "launch", "recover", "slurm", "track", "profile", "dry_run")
"""Config sections that do not change a run's result."""
_PATIENCE = ("trainer.early_stopping_patience", "trainer.patience")
"""Config key that the reason of an early stop names, and the key's name in earlier versions."""


class _AskedToStop(BaseException):
    """Raised when a signal has arrived."""


def run_sweep(sweep: Sweep, write_report: WriteReport, train: Train = train) -> int:
    """Train the unfinished runs, print a table of all runs, and return the exit code.

    A run that fails does not end the sweep, unless several in a row fail for the same reason before their first
    step. A signal is passed on to the current run, which saves, and ends the sweep. The same command resumes it.

    Raises ``UserError`` if another process runs this sweep, or its folder cannot be written.
    """
    with _claimed(sweep) as lock, NotedSignals() as signals:
        if lock.warning:
            say(f"WARNING    {lock.warning}")
        runs = _Runs(sweep, signals, train)
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
            if not runs.started:
                raise
            problem = error
        outcomes = list(runs.outcomes.values())
        summarize(sweep, outcomes, write_report)
        return _report_end(sweep, outcomes, signals, problem)


def _claimed(sweep: Sweep) -> FolderLock:
    folder = sweep.folder
    try:
        folder.mkdir(parents=True, exist_ok=True)
        return lock_folder(folder)
    except BlockingIOError:
        another = sweep.points[0].config.another_run
        raise UserError(f"another process is running this sweep in {folder}; wait for it, or use {another}") from None
    except OSError as error:
        raise UserError(f"cannot write the sweep's folder {folder}: {error.strerror}; use run.dir=FOLDER") from None


def _report_end(sweep: Sweep, outcomes: Sequence[Outcome], signals: NotedSignals, problem: Exception | None) -> int:
    failed = [outcome for outcome in outcomes if outcome.state == "failed"]
    for outcome in failed:
        say_why(f"failed: {outcome.place}: {outcome.reason}")
    if problem is not None:
        say_why(f"{'error' if isinstance(problem, UserError) else 'failed'}: {problem}")
    done = f"{sum(outcome.is_finished for outcome in outcomes)} of {sweep.runs} runs are finished"
    if signals.received:
        say(f"stopped    {signals.received[0].name}: {done}; run the same command to resume")
        return EXIT_STOPPED
    if failed or problem is not None:
        return EXIT_MISTAKE if {outcome.exit_code for outcome in failed} == {EXIT_MISTAKE} else EXIT_FAILED
    stopped = [outcome.reason or "" for outcome in outcomes if not outcome.is_finished]
    if not stopped:
        return EXIT_FINISHED
    reasons = ", ".join(dict.fromkeys(filter(None, stopped))) or "before the last step"
    has_limit = any(reason.startswith("trainer.stop_at=") for reason in stopped)
    limit = " without trainer.stop_at, or with a higher value," if has_limit else ""
    say(f"stopped    {reasons}: {done}; run the same command{limit} to resume")
    return EXIT_STOPPED


def values_shown(keys: Sequence[str], point: Point) -> str:
    """Return the values of the swept ``keys`` as shown to the user."""
    label = labels(keys)
    return " ".join(f"{label[key]}={shown(value)}" for key, value in point.values.items())


def submit_sweep(sweep: Sweep, write_report: WriteReport) -> int:
    """Submit the runs that are neither finished nor in the queue, and print a table of all runs. Return the exit
    code. Raises ``UserError`` if Slurm refuses the job, or squeue does not answer."""
    if sweep.points[0].config.slurm.dry_run:
        return submit({point.argv: point.config for point in sweep.points})
    outcomes = [outcome_of(point) for point in sweep.points]
    unfinished = [
        (number, point)
        for number, (point, outcome) in enumerate(zip(sweep.points, outcomes, strict=True))
        if not _is_done(point, outcome)
    ]
    queued = queued_before_another([job_folder(point.config.run) for _, point in unfinished])
    left: dict[tuple[str, ...], RunConfig] = {}
    for number, point in unfinished:
        if not jobs_of(job_folder(point.config.run), queued):
            left[point.argv] = point.config
        elif outcomes[number].state != "running":
            outcomes[number] = replace(outcomes[number], state="queued")
    if left:
        submit(left)
    summarize(sweep, outcomes, write_report)
    if unfinished:
        say(f"later      serried status run.dir={shlex.quote(str(sweep.folder))} updates the table and the report")
    return EXIT_FINISHED


def summarize(sweep: Sweep, outcomes: Sequence[Outcome], write_report: WriteReport) -> None:
    """Print the table of ``outcomes``, and write it and the report into the sweep's folder."""
    say("summary    best first")
    say("\n".join(f"  {line}" for line in table(sweep.keys, outcomes).splitlines()))
    _write(sweep.folder, sweep.keys, outcomes, write_report)


def update_summary(folder: Path, write_report: WriteReport) -> None:
    """Write the table and the report of the sweep in ``folder`` from the current state of its runs.

    Does nothing if there is no sweep, or if a running process of the sweep will write them.
    """
    keys, outcomes = read_summary(folder)
    if outcomes and not is_locked(folder):
        _write(folder, keys, outcomes, write_report)


def _write(folder: Path, keys: Sequence[str], outcomes: Sequence[Outcome], write_report: WriteReport) -> None:
    files = ["sweep.json", "sweep.csv"] if _write_table(folder, keys, outcomes) else []
    started = [
        outcome.run_dir for outcome in sorted(outcomes, key=Outcome.rank) if (outcome.run_dir / METRICS).exists()
    ]
    if started:
        try:
            write_report(started, folder / "report.html")
            files.append("report.html")
        except Exception as error:  # the runs are trained, with or without a report
            say(f"WARNING    cannot write the report: {in_one_line(error)}")
    if files:
        say(f"files      {folder}: {', '.join(files)}")


def _write_table(folder: Path, keys: Sequence[str], outcomes: Sequence[Outcome]) -> bool:
    try:
        write_summary(folder, keys, outcomes)
    except OSError as error:
        say(f"WARNING    cannot write {error.filename or folder}: {error.strerror}")
        return False
    return True


class _Runs:
    """The runs of one sweep and their outcomes."""

    def __init__(self, sweep: Sweep, signals: NotedSignals, train: Train) -> None:
        self._sweep = sweep
        self._signals = signals
        self._train = train
        grid = sweep.points if sweep.search is None else ()
        self.outcomes = {point.config.run.dir: outcome_of(point) for point in grid}
        self.started = 0
        self._fruitless = 0
        self._last_reason = ""

    def evaluate(self, point: Point) -> float | None:
        """Train ``point`` unless it is finished. Return its result (lower is better); None if it has none.

        Raises:
            TrainingFailed: several runs in a row failed for the same reason before their first step.
        """
        if self._signals.received:
            raise _AskedToStop
        if not self.started:
            what = f"{self._sweep.runs} runs: {' x '.join(self._sweep.keys)}"
            say(f"sweep      {what}; the output of a run is in {CONSOLE} in its folder")
        self.started += 1
        before = outcome_of(point)
        if _is_done(point, before):
            self._keep(before)
            self._print(point, f"finished before; {_losses(before)}")
            return before.to_minimise
        self._print(point, f"{'resumes' if before.step else 'starts'} in {before.place}")
        self._keep(replace(before, state="running"))
        started = time.monotonic()
        outcome = self._train(point, self._signals)
        self._keep(outcome)
        end = _losses(outcome) if outcome.is_finished else outcome.reason
        self._print(point, f"{outcome.state} after {duration(time.monotonic() - started)}; {end}")
        if self._signals.received:
            raise _AskedToStop
        self._count_fruitless(outcome, before)
        return None if outcome.state == "failed" else outcome.to_minimise

    def _keep(self, outcome: Outcome) -> None:
        self.outcomes[outcome.run_dir] = outcome
        _write_table(self._sweep.folder, self._sweep.keys, list(self.outcomes.values()))

    def _print(self, point: Point, text: str) -> None:
        label = f"run {self.started}/{self._sweep.runs}"
        say(f"{label:<10} {values_shown(self._sweep.keys, point)}: {text}")

    def _count_fruitless(self, outcome: Outcome, before: Outcome) -> None:
        reason = re.sub(r"\d+", "N", outcome.reason or "")
        is_fruitless = outcome.state == "failed" and outcome.step <= before.step
        self._fruitless = (self._fruitless + 1 if reason == self._last_reason else 1) if is_fruitless else 0
        self._last_reason = reason
        if self._fruitless == _FRUITLESS_RUNS:
            raise TrainingFailed(
                f"{_FRUITLESS_RUNS} runs in a row failed for the same reason before their first step, so the other "
                "runs are skipped; fix the cause and run the same command again"
            )


def _is_done(point: Point, outcome: Outcome) -> bool:
    """Return whether ``point`` is finished with these settings. If any setting changed, the run itself decides."""
    config, trainer = point.config, point.config.trainer
    if not outcome.is_finished or config.checkpoint.resume == "never" or config.run.url is not None:
        return False  # the scratch folder of a run in a bucket may be out of date
    chosen = ["micro_batch"] * (trainer.micro_batch == AUTO) + ["steps"] * (trainer.epochs is not None)
    chosen += ["compile"] * (trainer.compile == "auto")
    earlier = read_saved_config_if_there(config.run.dir / "config.yaml")
    its = {key: value_at(f"trainer.{key}", earlier) for key in chosen}  # as recorded by the run
    steps = its.get("steps", trainer.steps)
    has_stopped_early = any(key in (outcome.reason or "") for key in _PATIENCE)
    has_ended = (is_count(steps) and outcome.step >= steps) or has_stopped_early
    now = parse_yaml(config_yaml(config))
    now["trainer"] |= its
    return has_ended and _compared(earlier) == _compared(now)


def _compared(settings: dict[str, object]) -> dict[str, object]:
    return {section: value for section, value in settings.items() if section not in _NOT_COMPARED}


def _losses(outcome: Outcome) -> str:
    parts = [("loss", outcome.loss), ("validation", outcome.validation_loss), (outcome.metric, outcome.metric_value)]
    return ", ".join(f"{name} {value:.4f}" for name, value in parts if value is not None) or "no loss"
