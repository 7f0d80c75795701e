"""Console output of a run, and the log of each rank."""

import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from serried.runtime.live import Doing, Live, is_terminal


class Console:
    """Lines for the user from rank 0; every rank keeps its own in ``log/rank-N.log``, once that is opened."""

    def __init__(self, speaks: bool, rank: int) -> None:
        self._speaks, self._rank = speaks, rank
        self._live = Live(self.say, self._present, is_drawn=speaks and is_terminal())
        self._doing: Doing | None = None
        self._describe: Callable[[], Doing | None] = lambda: None
        self.last_step: dict[str, Any] | None = None
        """What was told of a step last; for the line that shows how the run stands."""
        self._log: IO[str] | None = None
        self._pending: list[str] | None = []

    def open(self, run_folder: Path) -> None:
        """Write the log to ``run_folder`` from here on, and what was said before: an earlier run's is aside by now."""
        with suppress(OSError):  # a node that cannot write there still trains; what matters is printed by rank 0
            path = run_folder / "log" / f"rank-{self._rank}.log"
            path.parent.mkdir(parents=True, exist_ok=True)
            self._log = path.open("a", buffering=1)
            self._log.writelines(self._pending or [])
        self._pending = None

    def say(self, text: str) -> None:
        """Print ``text``, if this rank speaks, and log it."""
        if self._speaks:
            # It may lead into a file on a full disk; Python keeps what is left for later.
            with suppress(OSError), self._live.aside():
                print(text, file=sys.stdout, flush=True)
        self.log(text)

    def progress(self, text: str) -> None:
        """Say how far something is: on a terminal over what was said before, which an empty ``text`` takes away."""
        if not self._speaks:
            return
        if is_terminal():
            self._live.show(text)
        elif text:
            with suppress(OSError), self._live.aside():
                print(text, flush=True)

    def doing(self, what: str, kind: str = "") -> None:
        """Say what is done from here on: shown on a terminal, told elsewhere where it takes long. Another ``what`` of
        the same ``kind`` is one thing going on."""
        self._doing = Doing(what, kind or what)
        self._live.start()

    def follow(self, describe: Callable[[], Doing | None]) -> None:
        """As ``doing``, of whatever ``describe`` says, asked from another thread; None: what ``doing`` said."""
        self._describe = describe
        self._live.start()

    def _present(self) -> Doing | None:
        return self._describe() or self._doing

    def quiet(self) -> None:
        """From here on say and log, and show nothing besides."""
        self._live.close()

    def log(self, text: str) -> None:
        """Write ``text`` to this rank's log alone."""
        stamp = time.strftime("%Y-%m-%d %H:%M:%S ")
        lines = "".join(f"{stamp}{line}\n" for line in text.splitlines())
        if self._pending is not None:
            self._pending.append(lines)
        elif self._log is not None:
            with suppress(OSError):  # the disk is full: the log is not what the run is for
                self._log.write(lines)

    def close(self) -> None:
        """Leave a clean terminal behind, and let go of the log."""
        self._live.close()
        if self._log is not None:
            with suppress(OSError):  # what a full disk did not take is tried again here
                self._log.close()
            self._log = None
