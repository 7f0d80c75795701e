"""The training process's side of the mirrors: starts them on rank 0, passes on the little they have to say, and never
waits for them while it trains."""

import json
import os
import secrets
import string
import subprocess
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from serried.configs.schema import TrackSection
from serried.configs.trackers import LABELS, asked_for, is_behind_a_network
from serried.records.trackers import COMMAND, python_path, send_command
from serried.runtime.console import Console

_ID_LETTERS, _ID_LENGTH = string.ascii_lowercase + string.digits, 8
_WAIT_SECONDS = 10.0
_WAIT_SHARE, _MOST_SHARE = 1 / 200, 1 / 50
"""Of the time that the run took: for a tracker that has not answered since it ended. The latter is for runs of seconds,
if the tracker had answered before: many a server takes ``_ANSWER_SECONDS``."""
_ANSWER_SECONDS = 0.2
_WORTH_A_WORD_SECONDS = 1.0
_LOOK_SECONDS = 0.02
_READ_BYTES, _MOST_READS = 65_536, 16
_NICENESS = 19
"""Of a core that training wants too, a thread of such a process gets 15 parts of 1024 + 15."""


def choose_run_id(state: Mapping[str, Any], is_continued: bool) -> str:
    """What trackers know the run by: eight letters and digits. A run that goes on in its folder, from a checkpoint with
    ``state``, keeps its own; one that begins there has a new one, also where it begins with another's checkpoint."""
    kept = state.get("tracker_run_id") if is_continued else None
    return str(kept or "".join(secrets.choice(_ID_LETTERS) for _ in range(_ID_LENGTH)))


class Mirrors:
    """The mirrors of one run. Every rank has them; where none is asked for, and on all ranks but 0, nothing happens."""

    def __init__(self, run_dir: Path, track: TrackSection, console: Console) -> None:
        self._run_dir, self._track, self._console = run_dir.absolute(), track, console
        self._mirrors: list[_Mirror] = []
        self._started, self._has_ended, self._lacks_one = 0.0, False, False

    def start(self, niceness: int = _NICENESS, working_directory: Path | None = None) -> None:
        """Start a process for each tracker that is asked for. ``metrics.jsonl`` is there by now.

        ``niceness``: as of the command nice. ``working_directory``: where relative paths of the config begin; this
        process's when not given.
        """
        self._started = time.monotonic()
        for name in asked_for(self._track):
            try:
                needs_an_answer = is_behind_a_network(name, self._track)
                self._mirrors.append(_Mirror(name, self._run_dir, needs_an_answer, niceness, working_directory))
            except OSError as error:
                self._lacks_one = True
                self._warn(name, f"cannot start a process for it: {error.strerror}")

    def look(self) -> None:
        """Say what the mirrors have to say, and which has ended without a word. Waits for nothing."""
        for mirror in self._mirrors:
            code = mirror.process.poll()  # before its last words are read
            for told in mirror.heard():
                warning, note = _line(told.get("warning")), _line(told.get("note"))
                if warning and not mirror.has_warned:
                    mirror.has_warned = True
                    self._warn(mirror.name, warning)
                elif isinstance(seconds := told.get("waits"), float) and not self._has_ended:
                    until = f"in {seconds:.0f} s, or when training ends: training uses all cores"
                    self._console.say(f"{'tracking':<10} {LABELS[mirror.name]}: begins {until}")
                elif note:
                    # It is well, and what may come then is to be told too.
                    mirror.has_warned = mirror.has_warned and self._has_ended
                    self._console.say(f"{'tracking':<10} {note}")
            if code is not None and not mirror.has_warned and (code or not mirror.is_to_end):
                mirror.has_warned = True
                how = f"was killed by signal {-code}" if code < 0 else f"ended (exit code {code})"
                self._warn(mirror.name, f"its process {how}; see {mirror.log}")

    def finish(self) -> None:
        """Tell the mirrors to take the rest and end: nothing more is written. Waits for nothing, and may come twice."""
        self._has_ended = True
        self.look()
        for mirror in self._mirrors:
            mirror.finish()

    def end(self) -> None:
        """``finish``, and wait for the mirrors a little: what they hold is a copy. For a tracker that does not answer
        then, or has failed, no longer than a small share of the run."""
        self.finish()
        began, waited, has_spoken = time.monotonic(), 0.0, False
        run_seconds = began - self._started

        def is_to_wait_for(mirror: _Mirror) -> bool:
            return mirror.process.poll() is None and waited < mirror.patience_seconds(run_seconds)

        while waiting := [mirror for mirror in self._mirrors if is_to_wait_for(mirror)]:
            self.look()
            waited = time.monotonic() - began
            if waited > _WORTH_A_WORD_SECONDS and not has_spoken:
                has_spoken = True
                awaited = [mirror for mirror in waiting if mirror.is_awaited]
                names = " and ".join(LABELS[mirror.name] for mirror in awaited or waiting)
                what = "sending the rest" if awaited else "waiting for an answer"
                limit = max(mirror.patience_seconds(run_seconds) for mirror in waiting)
                self._console.say(f"{'tracking':<10} {names}: {what}, for at most {limit:.0f} s")
            time.sleep(_LOOK_SECONDS)
        self.look()
        for mirror in self._mirrors:
            if mirror.process.poll() is None and not mirror.has_warned:
                begins, what = ("tracking  ", "taken all") if mirror.has_reached else ("WARNING   ", "answered")
                self._console.say(
                    f"{begins} {LABELS[mirror.name]} has not {what} yet; its process goes on for at most five minutes, "
                    f"see {mirror.log}; again: {send_command(self._run_dir)}"
                )
        self._mirrors = []

    def complete(self) -> bool:
        """``finish``, and wait until the mirrors have ended, minutes at most. Whether each tracker has taken all."""
        self.finish()
        began, has_spoken = time.monotonic(), False
        while waiting := [mirror for mirror in self._mirrors if mirror.process.poll() is None]:
            self.look()
            if time.monotonic() - began > _WORTH_A_WORD_SECONDS and not has_spoken:
                has_spoken = True
                names = " and ".join(LABELS[mirror.name] for mirror in waiting)
                self._console.say(f"{'tracking':<10} {names}: sending, which may take minutes")
            time.sleep(_LOOK_SECONDS)
        self.look()
        for mirror in self._mirrors:
            if mirror.has_taken_all:
                self._console.say(f"{'tracking':<10} {LABELS[mirror.name]} has taken all")
        return not self._lacks_one and all(mirror.has_taken_all for mirror in self._mirrors)

    def _warn(self, name: str, text: str) -> None:
        rest = (
            "metrics.jsonl has everything" if self._has_ended else "Training goes on, and metrics.jsonl has everything"
        )
        self._console.say(f"WARNING    {LABELS[name]}: {text}. {rest}")


class _Mirror:
    """One process that mirrors to one tracker."""

    def __init__(
        self, name: str, run_dir: Path, needs_an_answer: bool, niceness: int, working_directory: Path | None
    ) -> None:
        self.name, self.has_warned, self.has_reached, self.is_to_end = name, False, not needs_an_answer, False
        self._needs_an_answer = needs_an_answer
        self.is_awaited = False
        """Whether its tracker has answered since the run ended, or needs no answer, and has not failed."""
        self.has_taken_all = False
        """Whether its tracker has, and not a file in its place."""
        self.log = run_dir / "log" / f"mirror-{name}.log"
        try:
            self.log.parent.mkdir(exist_ok=True)
            log: Any = self.log.open("ab")
        except OSError:
            log = subprocess.DEVNULL
        try:
            self.process = subprocess.Popen(
                [*COMMAND, name, str(run_dir), f"--nice={niceness}"],
                cwd=working_directory,
                stdin=subprocess.PIPE,  # closes when this process ends, however it ends
                stdout=subprocess.PIPE,
                stderr=log,
                env={**os.environ, "PYTHONPATH": python_path()},
                start_new_session=True,  # signals to this process group ask training to stop, not its mirror
            )
        finally:
            if log is not subprocess.DEVNULL:
                log.close()
        assert self.process.stdout is not None
        self._output = self.process.stdout.fileno()
        os.set_blocking(self._output, False)
        self._heard = b""

    def heard(self) -> list[dict[str, Any]]:
        """What the process has told since: JSON objects, one a line. What is none is left out, and of a flood the rest
        is for the next time."""
        with suppress(OSError):
            for _ in range(_MOST_READS):
                if not (data := os.read(self._output, _READ_BYTES)):
                    break
                self._heard += data
        *lines, rest = self._heard.split(b"\n")
        self._heard = rest[:_READ_BYTES]
        told = [each for each in map(_object, lines) if each is not None]
        for each in told:
            self.has_taken_all = self.has_taken_all or each.get("taken_all") is True
            if "reached" in each:
                self.has_reached = each["reached"] is True
                self.is_awaited = self.is_to_end and self.has_reached
        return told

    def patience_seconds(self, run_seconds: float) -> float:
        """How long it is waited for when the run, which took ``run_seconds``, has ended."""
        if self.is_awaited:
            return _WAIT_SECONDS
        least = min(_ANSWER_SECONDS, _MOST_SHARE * run_seconds) if self.has_reached else 0.0
        return min(_WAIT_SECONDS, max(least, _WAIT_SHARE * run_seconds))

    def finish(self) -> None:
        """Tell the process that there is no more to come."""
        if not self.is_to_end:
            self.is_to_end, self.is_awaited = True, self.has_reached and not self._needs_an_answer
        assert self.process.stdin is not None
        with suppress(OSError):
            self.process.stdin.close()


def _object(line: bytes) -> dict[str, Any] | None:
    """The JSON object in ``line``, which a tracker's library may have written; None where it is none."""
    with suppress(ValueError, RecursionError):
        if isinstance(told := json.loads(line), dict):
            return told
    return None


def _line(told: Any) -> str:
    """``told`` as one line; empty where it is no text."""
    return " ".join(told.split()) if isinstance(told, str) else ""
