"""Train one run of a sweep in new processes, with its output in a file."""

import os
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

from serried.configs.errors import EXIT_FAILED, EXIT_FINISHED, EXIT_MISTAKE, EXIT_STOPPED
from serried.configs.formats import is_terminal
from serried.launch.local.processes import NotedSignals, killed_by, wait_for_all
from serried.launch.sweep.points import Point
from serried.launch.sweep.sweep_table import Outcome, outcome_of
from serried.records.files import make_scratch
from serried.records.lock import is_locked
from serried.records.status import record_kill
from serried.runtime.console import Doing, Live
from serried.runtime.process import say, training_command
from serried.runtime.signals import SWEEP

CONSOLE = "console.log"
"""File in the run folder that holds the run's output."""

_LOOK_SECONDS = 0.1
_OTHERS_END_SECONDS = 60.0
_LAST_WORDS_SECONDS = 30.0
_ERRORS = ("error: ", "failed: ")


def train(point: Point, signals: NotedSignals) -> Outcome:
    """Start the run ``point``, pass signals on to it, and return how it ended."""
    run, started = point.config.run, time.time()
    run_dir = run.dir
    try:
        if run.url is not None:
            make_scratch(run_dir)
        run_dir.mkdir(parents=True, exist_ok=True)
        console = (run_dir / CONSOLE).open("ab")
    except OSError as error:
        reason = f"cannot write {run_dir}: {error.strerror}; use {run.another_disk}"
        return Outcome(run_dir, point.values, "failed", reason=reason, exit_code=EXIT_MISTAKE, url=run.url)
    with console:
        start = console.tell()
        if not _wait_for_another_process(run_dir, signals):
            return _stopped_before_start(outcome_of(point))
        process = subprocess.Popen(
            [sys.executable, *training_command(), *point.argv],
            stdin=subprocess.DEVNULL, stdout=console, stderr=subprocess.STDOUT,
            process_group=0,  # a terminal's Ctrl-C reaches only this process, which passes it on once
            env=os.environ | {SWEEP: str(os.getpid())},
        )  # fmt: skip
        patience = point.config.launch.stop_timeout_seconds + _LAST_WORDS_SECONDS
        newest = partial(_newest_line, run_dir / CONSOLE)
        live = Live(say, lambda: Doing(f"training in {run.place}", run_dir, newest()), is_drawn=is_terminal())
        code = wait_for_all([process], signals, patience, lambda: live.look(time.monotonic())).get(0, EXIT_FINISHED)
        live.close()
    if code < 0 and not signals.received:
        with suppress(OSError):
            record_kill(run_dir, killed_by(-code), since=started)
    outcome = outcome_of(point)
    ended_here = outcome.time >= started and outcome.state in ("stopped", "failed")
    if code == EXIT_FINISHED or ended_here:
        return outcome
    if signals.received:
        return _stopped_before_start(outcome)
    reason = killed_by(-code) if code < 0 else _error_in(run_dir / CONSOLE, start) or f"exit code {code}"
    state, code = "stopped" if code == EXIT_STOPPED else "failed", EXIT_FAILED if code < 0 else code
    return replace(outcome, state=state, reason=reason, exit_code=code, time=time.time())


def _stopped_before_start(outcome: Outcome) -> Outcome:
    return replace(outcome, state="stopped", reason="before it started", exit_code=EXIT_STOPPED, time=time.time())


def _wait_for_another_process(run_dir: Path, signals: NotedSignals) -> bool:
    """Wait for a process that is still training in the folder: after a sweep is killed, its run still saves. Return
    whether to start."""
    deadline, is_told = time.monotonic() + _OTHERS_END_SECONDS, False
    while is_locked(run_dir) and time.monotonic() < deadline and not signals.received:
        if not is_told:
            say(f"waiting    for another process that is training in {run_dir}")
        is_told = True
        time.sleep(_LOOK_SECONDS)
    return not signals.received


def _newest_line(console: Path) -> str:
    """Return the last line of the run's output; a space if there is none."""
    with suppress(OSError), console.open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - 4096))
        lines = file.read().decode(errors="replace").splitlines()
        return lines[-1] if lines and lines[-1] else " "
    return " "


def _error_in(console: Path, start: int) -> str:
    """Return the error of a failed run, from its output after byte ``start`` of ``console``."""
    with console.open("rb") as file:
        file.seek(start)
        lines = [line.rstrip() for line in file.read().decode(errors="replace").splitlines() if line.strip()]
    errors = [line.partition(": ")[2] for line in lines if line.startswith(_ERRORS)]
    return errors[0] if errors else lines[-1] if lines else ""
