"""Mirror the records of a run to one tracker: ``python -m serried.records.trackers NAME RUN_DIR``.

The training process starts this, and keeps the other end of its standard input open for as long as it lives.

Standard output tells the training process what there is to say, a JSON object a line: ``reached`` (whether the tracker
takes records, and, once training has ended, is worth waiting for), ``taken_all``, ``waits`` (so many seconds at most,
for a core), ``note``, ``warning``. Everything else goes to standard error, which leads into a log.
"""

import argparse
import fcntl
import json
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NoReturn

import yaml

from serried.records.trackers import COMMAND, send_command
from serried.records.trackers.cores import be_nice, have_children_be_nice, is_a_core_idle
from serried.records.trackers.metrics_file import MetricsFile
from serried.records.trackers.reach import ANSWER_SECONDS, Reach, ask
from serried.records.trackers.tracker import Held, Row, Run, Tracker

_LOOK_SECONDS = 1.0
_KNOCK_SECONDS = 30.0
_ANSWER_SECONDS_WHEN_AWAITED = 1.0
# Until a client has sent what there is, it takes a processor for 1.2 s (W&B) or 2.8 s (MLflow), of which training that
# uses all cores can lose twice as much: 1.5 percent of these seconds at most. The end of a run may take another half.
_FIRST_SECONDS = {"wandb": 160.0, "mlflow": 375.0}
_TRY_AGAIN_SECONDS = 300.0
_CALL_SECONDS = 300.0
# Another run may have all cores by then, and this process what is left.
_CALL_SECONDS_WHEN_ALONE = 60.0
_CONNECT_SECONDS_WHEN_ALONE = 30.0
_ALONE_SECONDS = 300.0
_WATCH_SECONDS = 0.2
_LOOK_SECONDS_WITHOUT_A_CALL = 5.0
_CONNECTING = "connecting"
_NOT_OF_THE_RUN = ("event", "time", "tracker_run_id", "resumed_from")
_HELPERS = {"wandb": "wandb-core"}
_IGNORED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
"""Slurm sends a job's signals to every process of it. This one ends when the training process has ended."""


class _Voice:
    """Tells the training process, for as long as it listens."""

    def __init__(self) -> None:
        self._output = os.dup(1)
        os.dup2(2, 1)  # what a tracker prints is not for the training process

    def tell(self, **values: Any) -> None:
        log(str(values))
        with suppress(OSError):
            os.write(self._output, json.dumps(values).encode() + b"\n")

    def hand_over(self) -> None:
        """Let the program that takes this one's place speak."""
        os.dup2(self._output, 1)


class _Watch:
    """Knows whether the training process is still there, and which call into the tracker takes too long."""

    def __init__(self, until: float | None, helper: str | None, give_up: Callable[[str], NoReturn]) -> None:
        """``helper``: name of a process that the tracker starts, and may wait for when it is gone."""
        self.alone = threading.Event()
        """Set once the training process has ended, or said that there is no more to come."""
        self.until = until
        """When this process ends at the latest, in unix seconds; None: the training process is still there."""
        self._is_first_attempt = until is None
        self._helper, self._give_up = helper, give_up
        self._call: tuple[str, float, float] | None = None
        self._is_calling = threading.Event()
        threading.Thread(target=self._wait_for_the_end, name="end of training", daemon=True).start()
        threading.Thread(target=self._watch, name="watch", daemon=True).start()

    @contextmanager
    def call(self, what: str, seconds_when_alone: float = _CALL_SECONDS_WHEN_ALONE) -> Iterator[None]:
        """Around a call that might never return."""
        self._call = what, time.time(), seconds_when_alone
        self._is_calling.set()
        try:
            yield
        finally:
            self._is_calling.clear()
            self._call = None

    def count_from_now(self) -> None:
        """Where training has ended: what was waited for until now is not of the time that is left."""
        if self.alone.is_set() and self._is_first_attempt:
            self.until = time.time() + _ALONE_SECONDS

    def let_helper_end(self) -> None:
        """From now on it may."""
        self._helper = None

    def _wait_for_the_end(self) -> None:
        with suppress(OSError):
            while os.read(0, 1):
                pass
        self.until = self.until or time.time() + _ALONE_SECONDS
        self.alone.set()

    def _watch(self) -> None:
        while True:
            if self._is_calling.wait(_LOOK_SECONDS_WITHOUT_A_CALL):
                time.sleep(_WATCH_SECONDS)
            now, call = time.time(), self._call
            if self.until is not None and now > self.until:
                log("out of time")
                _leave(1)
            if (helper := self._helper) is not None and _has_lost_a_helper(helper):
                self._give_up(f"its service {helper} has ended")
            if call is None:
                continue
            if call[0] == _CONNECTING:
                have_children_be_nice()
            what, began, seconds_when_alone = call
            limit = began + _CALL_SECONDS
            if self.until is not None:
                limit = min(limit, max(began, self.until - _ALONE_SECONDS) + seconds_when_alone)
            if now > limit:
                self._give_up(f"{what} took longer than {now - began:.0f} s")


class _Mirror:
    """One tracker, fed."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self._arguments, self._began = arguments, time.monotonic()
        self._run_dir: Path = arguments.run_dir
        self._voice, self._giving_up = _Voice(), threading.Lock()
        self._watch = _Watch(arguments.until, _HELPERS.get(arguments.name), self._give_up)
        self._track = read_config(self._run_dir)["track"]
        self._is_last = False
        """Whether there is no time for another try."""
        self._has_told_that_it_waits = False

    @property
    def _is_online_wandb(self) -> bool:
        arguments = self._arguments
        return bool(arguments.name == "wandb" and self._track["wandb"] == "online" and not arguments.offline)

    @property
    def _does_an_answer_count(self) -> bool:
        """Whether the tracker is reached where its server answers: not after a client has failed, and not for a last
        try, for which no run is to wait."""
        return not (self._arguments.failed or self._is_last)

    def run(self) -> None:
        """Mirror until the training process has ended and everything is written."""
        self._wait_for_the_one_before()
        try:
            self._wait_for_a_chance()
            self._follow()
        except Exception as error:
            traceback.print_exc()
            self._give_up((str(error).strip() or f"its client has failed ({type(error).__name__})").splitlines()[0])

    def _wait_for_the_one_before(self) -> None:
        """Of a run that was killed and started again at once, the mirror may not have ended yet."""
        self._lock = (self._run_dir / f".mirror-{self._arguments.name}.lock").open("w")
        deadline = time.monotonic() + _ALONE_SECONDS
        while time.monotonic() < deadline:
            try:
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                time.sleep(_WATCH_SECONDS)
            except OSError:  # a disk that knows no locks
                break
        self._watch.count_from_now()

    def _wait_for_a_chance(self) -> None:
        """Wait until there is hope to reach the tracker, or no more time. Imports no tracker: until then, training is
        to have the processor."""
        arguments, alone = self._arguments, self._watch.alone
        self._is_last = arguments.last
        if arguments.failed:
            alone.wait(_TRY_AGAIN_SECONDS)
        has_answered = False
        while not self._is_last and not arguments.offline:
            is_awaited = has_answered and alone.is_set()
            reach = self._ask(_ANSWER_SECONDS_WHEN_AWAITED if is_awaited else ANSWER_SECONDS)
            if reach.why_not is None:
                has_answered = reach.has_answered
                if has_answered and self._does_an_answer_count:
                    self._voice.tell(reached=True)
                if not self._waits_for_a_core():
                    return
            else:
                if has_answered or not arguments.warned:
                    self._tell_of_failure(reach.why_not)
                self._is_last = alone.wait(_KNOCK_SECONDS) and not is_awaited  # a second was too short for the last try
                has_answered = False
        arguments.offline = arguments.offline or self._is_online_wandb

    def _ask(self, seconds: float) -> Reach:
        with self._watch.call(_CONNECTING, _CONNECT_SECONDS_WHEN_ALONE):
            return ask(self._arguments.name, self._track, seconds)

    def _waits_for_a_core(self) -> bool:
        """Wait, where training uses all cores, until it has gone on for some time, or ended. Whether it had to."""
        if not self._arguments.nice:  # begun again: five minutes ago, or when training has ended
            return False
        alone, until = self._watch.alone, self._began + _FIRST_SECONDS.get(self._arguments.name, 0.0)
        has_waited = False
        while not alone.is_set() and time.monotonic() < until and not is_a_core_idle(alone.wait):
            has_waited = True
            if not self._has_told_that_it_waits and not alone.is_set():
                self._has_told_that_it_waits = True
                self._voice.tell(waits=until - time.monotonic())
        return has_waited

    def _follow(self) -> None:
        """Write all that there is and all that comes."""
        from serried.records.trackers.rows import (
            Rows,  # with the schema of all of the config: too much for one that only waits
        )

        lines, rows, is_behind = MetricsFile(self._run_dir / "metrics.jsonl"), Rows(self._run_dir), True
        tracker = self._make_tracker()
        has_asked = self._watch.alone.is_set()  # before the tracker is opened, which is an answer too
        has, rollbacks = self._open(tracker)
        while True:
            is_alone = self._watch.alone.is_set()
            if is_alone and not has_asked:
                has_asked = True
                self._ask_at_the_end(tracker)
            is_another, events = lines.read()
            if is_another and rows.start:
                rows, is_behind = Rows(self._run_dir), True
                if tracker.follows_changes:
                    has, rollbacks = self._open(tracker)
            taken: list[Row] = []
            went_back = False
            for event in events:
                for row in rows.feed(event):
                    if row.step > has:
                        taken.append(row)
                        has = row.step
                if rows.rollbacks > rollbacks:  # steps that were told before come again, with other numbers
                    rollbacks, has, went_back = rows.rollbacks, min(has, event["step"]), True
            with self._watch.call("writing"):
                if taken:
                    tracker.write(taken)
                if any(event["event"] not in ("step", "eval") for event in events):
                    # A tracker that remembers the last step it was given is to forget those that were undone.
                    tracker.summarize({**rows.summary, "step": has} if went_back else rows.summary)
            if events:
                continue
            if is_alone:
                break
            if is_behind:
                is_behind = False
                self._caught_up(tracker)
            self._watch.alone.wait(_LOOK_SECONDS)
        summary = {**rows.summary, "state": "killed"} if rows.summary["state"] == "running" else rows.summary
        with self._watch.call("writing"):
            tracker.write([row for row in rows.rest() if row.step > has])
            tracker.summarize(summary)
        if is_behind:
            self._caught_up(tracker)
        self._watch.let_helper_end()
        with self._watch.call("finishing"):
            tracker.close(summary)
        is_elsewhere = self._arguments.name == "wandb" and self._track["wandb"] == "online" and self._arguments.offline
        self._voice.tell(taken_all=not is_elsewhere)

    def _ask_at_the_end(self, tracker: Tracker) -> None:
        """Tell whether there is somebody to wait for: a client may try in vain without a word."""
        if tracker.uses_network:
            reach = self._ask(_ANSWER_SECONDS_WHEN_AWAITED)
            if reach.why_not is not None:
                self._tell_of_failure(reach.why_not)
            elif reach.has_answered and self._does_an_answer_count:
                self._voice.tell(reached=True)

    def _make_tracker(self) -> Tracker:
        if self._arguments.name == "wandb":
            from serried.records.trackers.wandb_tracker import WandbTracker

            process = None if self._watch.alone.is_set() else os.getppid()
            return WandbTracker(is_online=self._is_online_wandb, process=process)
        if self._arguments.name == "tensorboard":
            from serried.records.trackers.tensorboard_tracker import TensorBoardTracker

            return TensorBoardTracker()
        from serried.records.trackers.mlflow_tracker import MlflowTracker

        return MlflowTracker(self._track["mlflow"])

    def _beginning(self) -> Run:
        """The run as its newest start told of it."""
        while (begun := read_beginning(self._run_dir)) is None:
            if self._watch.alone.is_set():
                raise RuntimeError("metrics.jsonl tells of no start")
            self._watch.alone.wait(_LOOK_SECONDS)
        return begun

    def _open(self, tracker: Tracker) -> Held:
        run = self._beginning()
        patience = _CONNECT_SECONDS_WHEN_ALONE if tracker.uses_network else _CALL_SECONDS_WHEN_ALONE
        with self._watch.call(_CONNECTING, patience):
            has = tracker.open(run)
        have_children_be_nice()
        told = {"reached": True} if self._does_an_answer_count else {}
        self._voice.tell(**told, note=tracker.note())
        return has

    def _caught_up(self, tracker: Tracker) -> None:
        with self._watch.call("writing"):
            tracker.caught_up()
        arguments = self._arguments
        with self._giving_up:
            arguments.warned = False  # it is well, and what may come then is to be told too
            if arguments.failed and not self._watch.alone.is_set():
                arguments.failed = False
                self._voice.tell(reached=True)

    def _tell_of_failure(self, reason: str) -> None:
        """Tell that the tracker takes nothing, once why, and what becomes of its records. In one line, after which the
        training process may listen no more."""
        arguments, told = self._arguments, {"reached": False}
        if arguments.warned:
            self._voice.tell(**told)
            return
        arguments.warned = True
        command = send_command(self._run_dir)
        again = f"it is tried again now and then, and at any later time by {command}"
        if self._watch.alone.is_set():
            again = f"its records can be sent at any later time by {command}"
        self._voice.tell(**told, warning=f"{reason.rstrip('.')}; {again}")

    def _give_up(self, reason: str) -> NoReturn:
        """Begin again, as a new program: what a tracker left in this one is gone with it."""
        self._giving_up.acquire()  # for good: of the client's own word and the watch's, the first counts
        arguments = self._arguments
        log(f"gives up: {reason}")
        self._tell_of_failure(reason)
        if self._is_last:
            _leave(1)
        again = ["--warned", *(["--offline"] if arguments.offline else [])]
        again += ["--last" if self._watch.alone.is_set() else "--failed"]
        if self._watch.until is not None:
            again += ["--until", str(self._watch.until)]
        _end_helpers()
        os.environ.pop("WANDB_SERVICE", None)  # where the client in this program reached its own
        self._voice.hand_over()
        os.execv(COMMAND[0], [*COMMAND, arguments.name, str(self._run_dir), *again])


def read_config(run_dir: Path) -> dict[str, Any]:
    """``config.yaml`` of a run."""
    return dict(yaml.safe_load((run_dir / "config.yaml").read_text()))


def read_beginning(run_dir: Path) -> Run | None:
    """The run in ``run_dir`` as its newest start told of it; None: there is no start yet."""
    start, rollbacks = None, 0
    with suppress(FileNotFoundError), (run_dir / "metrics.jsonl").open() as lines:
        for line in lines:
            if '"start"' in line or '"rollback"' in line:
                with suppress(ValueError):
                    event = json.loads(line)
                    rollbacks += event["event"] == "rollback"
                    if event["event"] == "start":
                        start = event
    if start is None:
        return None
    facts = {key: value for key, value in start.items() if key not in _NOT_OF_THE_RUN}
    with suppress(OSError, ValueError):
        facts["environment"] = json.loads((run_dir / "environment.json").read_text())
    return Run(run_dir, start["tracker_run_id"], read_config(run_dir), facts, rollbacks)


def log(text: str) -> None:
    """Write ``text`` to the log."""
    with suppress(OSError):
        print(time.strftime("%Y-%m-%d %H:%M:%S"), text, file=sys.stderr, flush=True)


def _end_helpers() -> None:
    """End what a tracker started: the processes below this one, and those in sessions that they began. Linux only."""
    processes: dict[int, tuple[int, int]] = {}  # -> parent, session
    with suppress(OSError):
        for path in Path("/proc").iterdir():
            with suppress(OSError, ValueError, IndexError):
                fields = (path / "stat").read_text().rpartition(")")[2].split()
                processes[int(path.name)] = int(fields[1]), int(fields[3])
    helpers: set[int] = set()
    while new := {pid for pid, above in processes.items() if pid not in helpers and {os.getpid(), *helpers} & {*above}}:
        helpers |= new
    for pid in helpers - {os.getpid()}:
        with suppress(OSError):
            os.kill(pid, signal.SIGKILL)
    for pid in helpers - {os.getpid()}:
        with suppress(OSError):  # it is not a child of this process, but of a child
            os.waitpid(pid, 0)


def _has_lost_a_helper(name: str) -> bool:
    """Whether the process called ``name`` that a tracker started has ended, and nobody has noticed. Linux only."""
    if not hasattr(os, "waitid"):
        return False
    with suppress(OSError):
        ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        return ended is not None and Path(f"/proc/{ended.si_pid}/comm").read_text().strip() == name
    return False


def _leave(code: int) -> NoReturn:
    _end_helpers()
    os._exit(code)


def main(argv: list[str]) -> NoReturn:
    """Mirror, and end the process."""
    parser = argparse.ArgumentParser(prog="python -m serried.records.trackers", description=__doc__)
    parser.add_argument("name", choices=("wandb", "tensorboard", "mlflow"))
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("--offline", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--nice", type=int, default=0, help="priority, as of the command nice; 19 is the lowest")
    # What one attempt passes to the next, which inherits the priority.
    parser.add_argument("--failed", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--last", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--warned", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--until", type=float, help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    for number in _IGNORED:
        signal.signal(number, signal.SIG_IGN)
    if arguments.nice:
        be_nice(arguments.nice)
    _Mirror(arguments).run()
    _leave(0)


if __name__ == "__main__":
    main(sys.argv[1:])
