"""Send the records of a run to one tracker: ``python -m serried.records.trackers NAME RUN_DIR NICENESS [OPTION]``.

The training process starts this process and keeps the other end of its standard input open while it trains. Each
line of standard output is printed by the training process: ``note TEXT`` or ``warning TEXT``. Everything else
goes to standard error, which is a log file. Exit code 0: the tracker received everything. OPTION ``once``: the
run has ended; send its records or fail. OPTION ``again``: this is the second attempt; for W&B, write its offline
files.
"""

import fcntl
import os
import signal
import sys
import threading
import time
import traceback
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

from serried.configs.plain_data import read_json
from serried.configs.renamed_keys import read_saved_config
from serried.configs.requirements import LIVE
from serried.records.metrics import METRICS, GrowingFile, read_events
from serried.records.trackers.rows import Rows, Run, Tracker

_LOOK_SECONDS, _RESTART_SECONDS = 1.0, 30.0
_LINGER_SECONDS, _FINISH_SECONDS = 60.0, 40.0  # after the end of training, for each of two attempts
_IGNORED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
"""Ignored signals. Slurm sends a job's signals to all its processes, and this process must end after the training
process."""


class Follower:
    """Follows ``metrics.jsonl`` until the training process has ended, and feeds one tracker."""

    def __init__(self, name: str, run_dir: Path, option: str) -> None:
        self._name = name
        self._run_dir = run_dir
        self._option = option
        self._is_online = False
        """Whether this is the first attempt to reach W&B's server."""
        self._has_ended = threading.Event()
        """Set when the training process has ended, or has closed the pipe because no more records follow."""
        self._environment = dict(os.environ)  # W&B adds variables of the service that it starts
        self._output = os.dup(1)
        os.dup2(2, 1)  # output of the libraries goes to the log
        threading.Thread(target=self._wait_for_the_end, daemon=True).start()

    def run(self) -> int:
        """Send all records. Return the exit code. After a failure, restart once."""
        try:
            with (self._run_dir / f".tracker-{self._name}.lock").open("wb") as lock:
                with suppress(OSError):  # a file system without locks
                    fcntl.flock(lock, fcntl.LOCK_EX)  # the process of a killed start may not have ended yet
                is_rollback = False
                while not self._follow(is_rollback):
                    is_rollback = True
        except Exception as error:
            traceback.print_exc()
            reason = (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")
            if not self._option:
                self._restart(reason)
            self._report("warning", reason)
            return 1
        return 0

    def _follow(self, is_rollback: bool) -> bool:
        """Send all records, old and new. Return False if a rollback replaced the file, so that all records must be
        read again."""
        events = GrowingFile(self._run_dir / METRICS)
        rows = Rows(self._run_dir)
        run = read_run(self._run_dir)
        tracker = self._open(run)
        if not is_rollback:
            self._report("note", tracker.note)
        # The steps that a rollback undid are recorded again.
        sent = min([tracker.last_step, *run.rollbacks[-1:]]) if is_rollback else tracker.last_step
        while True:
            is_last = self._option == "once" or self._has_ended.is_set()  # asked before the file is read
            if found := events.read():
                complete = [row for event in found for row in rows.feed(event) if row.step > sent]
                tracker.write([*complete, *(rows.newest if self._name in LIVE else [])])
            elif (is_replaced := events.is_replaced()) or is_last:
                break
            else:
                self._has_ended.wait(_LOOK_SECONDS)
        tracker.write([row for row in rows.rest() if row.step > sent])
        has_no_end = rows.summary["state"] == "running" and not is_replaced
        tracker.close({**rows.summary, **({"state": "killed"} if has_no_end else {})})
        return not is_replaced

    def _open(self, run: Run) -> Tracker:
        if self._name == "wandb":
            from serried.records.trackers.wandb_tracker import WandbTracker

            self._is_online = run.config["track"]["wandb"] == "online" and self._option != "again"
            seconds = 0.0 if self._option == "once" else _FINISH_SECONDS  # 0: as long as it takes
            return WandbTracker(run, is_online=self._is_online, finish_seconds=seconds)
        if self._name == "tensorboard":
            from serried.records.trackers.tensorboard_tracker import TensorBoardTracker

            return TensorBoardTracker(run)
        if self._name == "prometheus":
            from serried.records.trackers.prometheus_tracker import PrometheusTracker

            return PrometheusTracker(run)
        if self._name == "webhook":
            from serried.records.trackers.webhook_tracker import WebhookTracker

            return WebhookTracker(run)
        from serried.records.trackers.mlflow_tracker import MlflowTracker

        return MlflowTracker(run)

    def _report(self, kind: str, text: str) -> None:
        with suppress(OSError):  # the training process has ended
            os.write(self._output, f"{kind} {text}\n".encode())

    def _restart(self, reason: str) -> NoReturn:
        """Replace this process by a new program: a client that failed may fail again in the same process."""
        if self._is_online:
            self._report("warning", f"{reason}; records are kept in {self._run_dir / 'wandb'}")
        else:
            self._has_ended.wait(_RESTART_SECONDS)
        _kill_children()
        os.dup2(self._output, 1)
        os.execve(sys.executable, [*sys.orig_argv, "again"], self._environment)

    def _wait_for_the_end(self) -> None:
        with suppress(OSError):
            while os.read(0, 1):
                pass
        self._has_ended.set()
        time.sleep(_LINGER_SECONDS)
        _leave(1)


def read_run(run_dir: Path) -> Run:
    """Return the run in ``run_dir`` as recorded by its newest start."""
    facts: dict[str, Any] = {}
    rollbacks = []
    for event in read_events(run_dir / METRICS):
        if event["event"] == "rollback":
            rollbacks.append(event["step"])
        elif event["event"] == "start":
            facts = event
    with suppress(OSError, ValueError):
        facts["environment"] = read_json(run_dir / "environment.json")
    return Run(run_dir, facts["tracker_run_id"], read_saved_config(run_dir / "config.yaml"), facts, rollbacks)


def _kill_children() -> None:
    """End the service that W&B starts. It ends with this process, except while it tries to reach its server."""
    with suppress(OSError):  # only Linux has this file
        for pid in Path(f"/proc/self/task/{os.getpid()}/children").read_text(encoding="utf-8").split():
            os.kill(int(pid), signal.SIGKILL)


def _leave(code: int) -> NoReturn:
    _kill_children()
    os._exit(code)


def main(name: str, run_dir: str, niceness: str, option: str = "") -> NoReturn:
    """Send the records and end the process."""
    for number in _IGNORED:
        signal.signal(number, signal.SIG_IGN)
    os.setpriority(os.PRIO_PROCESS, 0, max(int(niceness), os.getpriority(os.PRIO_PROCESS, 0)))
    _leave(Follower(name, Path(run_dir), option).run())


if __name__ == "__main__":
    main(*sys.argv[1:])
