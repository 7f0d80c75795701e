"""Start one process per tracker on rank 0 and print its reports, without ever blocking training."""

import os
import shlex
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import serried
from serried.configs.requirements import LABELS, LIVE, asked_for
from serried.configs.schema.launch_plan_track import TrackSection

COMMAND = (sys.executable, "-P", "-m", "serried.records.trackers")  # -P: do not import ./wandb.py as the library
_END_SECONDS, _NICENESS = 5.0, 10


def choose_run_id(state: Mapping[str, Any], is_continued: bool) -> str:
    """Return the id of the run for trackers: eight letters and digits.

    A run that resumes in its folder, from a checkpoint with ``state``, keeps its id; any other run gets a new
    one.
    """
    kept = state.get("tracker_run_id") if is_continued else None
    return str(kept or uuid.uuid4().hex[:8])


class Trackers:
    """The tracker processes of one run. Does nothing until ``start``, which only rank 0 calls."""

    def __init__(self, run_dir: Path, track: TrackSection, say: Callable[[str], None]) -> None:
        self._run_dir = run_dir.absolute()
        self._names = asked_for(track)
        self._say = say
        self._processes: list[_TrackerProcess] = []

    def start(self, *options: str, niceness: int = _NICENESS, working_directory: Path | None = None) -> None:
        """Start a process for each tracker. ``metrics.jsonl`` must exist."""
        for name in self._names:
            try:
                process = _TrackerProcess(name, self._run_dir, self._say, [str(niceness), *options], working_directory)
                self._processes.append(process)
            except OSError as error:
                self._say(f"WARNING    {LABELS[name]}: cannot start the tracker process: {error.strerror}")

    def finish(self) -> None:
        """Signal to the processes that no more records follow. Does not wait; may be called twice."""
        for process in self._processes:
            process.finish()

    def end(self, seconds: float = _END_SECONDS) -> None:
        """Call ``finish`` and wait a few seconds for the processes to end. They may continue for up to two minutes."""
        self.finish()
        deadline = time.monotonic() + seconds
        for process in self._processes:
            process.thread.join(max(0.0, deadline - time.monotonic()))
            if process.thread.is_alive():
                process.warn("not all records are sent yet; the tracker process continues for at most two minutes")
            process.has_warned = True  # the run has ended: report nothing more
        self._processes = []

    def send(self, working_directory: Path | None) -> bool:
        """Send the records of a run that has ended. Return whether every tracker received all of them.

        ``working_directory``: the folder in which the run started; relative paths in its config refer to it.
        """
        self._names = [name for name in self._names if name not in LIVE]
        self.start("once", niceness=0, working_directory=working_directory)
        self._say(f"{'tracking':<10} sending to {' and '.join(LABELS[name] for name in self._names)}")
        taken = [process.name for process in self._processes if process.wait() == 0]
        for name in taken:
            self._say(f"{'tracking':<10} {LABELS[name]} has received all records")
        return taken == self._names


class _TrackerProcess:
    """A tracker process, and the thread that prints its reports."""

    def __init__(
        self, name: str, run_dir: Path, say: Callable[[str], None], options: list[str], working_directory: Path | None
    ) -> None:
        self.name = name
        self._run_dir = run_dir
        self._say = say
        self.has_warned = False
        self._log = run_dir / "log" / f"tracker-{name}.log"
        self._log.parent.mkdir(exist_ok=True)
        root = str(Path(serried.__file__).parent.parent)  # the process must find serried from any folder
        others = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [*COMMAND, name, str(run_dir), *options],
                cwd=working_directory,
                stdin=subprocess.PIPE,  # closes when this process ends, however it ends
                stdout=subprocess.PIPE,
                stderr=log,
                bufsize=0,
                env={**os.environ, "PYTHONPATH": os.pathsep.join([root, *others])},
                start_new_session=True,  # signals to this process group ask training to stop, not its trackers
            )
        self.thread = threading.Thread(target=self._listen, name=f"tracker {name}", daemon=True)
        self.thread.start()

    def finish(self) -> None:
        assert self._process.stdin is not None
        with suppress(OSError):
            self._process.stdin.close()

    def wait(self) -> int:
        """Wait for the process to end. Return its exit code."""
        self.thread.join()
        return self._process.wait()

    def warn(self, text: str) -> None:
        if not self.has_warned:
            self.has_warned = True
            later = f". To send later: serried send run.dir={shlex.quote(str(self._run_dir))}"
            later = "" if self.name in LIVE else later
            self._say(f"WARNING    {LABELS[self.name]}: {text}{later} (log: {self._log})")

    def _listen(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            kind, _, text = line.decode(errors="replace").strip().partition(" ")
            if kind == "warning":
                self.warn(text)
            elif not self.has_warned:
                self._say(f"{'tracking':<10} {text}")
        if code := self._process.wait():
            self.warn(f"its process was killed by signal {-code}" if code < 0 else f"its process exited with {code}")
