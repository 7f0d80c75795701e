"""Console output of a run, and the log of each rank."""

import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from serried.configs.formats import printable
from serried.runtime.status_line import Doing, Live, is_terminal


class Console:
    """Prints for the user on rank 0; every rank logs to ``log/rank-N.log``, once that is open."""

    def __init__(self, speaks: bool, rank: int) -> None:
        self._speaks, self._rank = speaks, rank
        self._live = Live(self.say, self._present, is_drawn=speaks and is_terminal())
        self._doing: Doing | None = None
        self._describe: Callable[[], Doing | None] = lambda: None
        self.last_step: dict[str, Any] | None = None
        """Values of the step logged last, for the status line."""
        self._log: IO[str] | None = None
        self._pending: list[str] | None = []

    def open(self, run_folder: Path) -> None:
        """Write the log to ``run_folder`` from now on, beginning with what was said before this."""
        with suppress(OSError):  # a node that cannot write there still trains; rank 0 prints what matters
            path = run_folder / "log" / f"rank-{self._rank}.log"
            path.parent.mkdir(parents=True, exist_ok=True)
            self._log = path.open("a", buffering=1, encoding="utf-8", errors="backslashreplace")
            self._log.writelines(self._pending or [])
        self._pending = None

    def say(self, text: str) -> None:
        """Print ``text``, if this rank speaks, and log it."""
        text = printable(text)
        if self._speaks:
            # Standard output may be a file on a full disk: Python keeps the rest for later.
            with suppress(OSError, ValueError), self._live.aside():
                print(text, file=sys.stdout, flush=True)
        self.log(text)

    def progress(self, text: str) -> None:
        """Show how far something is: on a terminal in the status line, which an empty ``text`` clears."""
        if not self._speaks:
            return
        if is_terminal():
            self._live.show(text)
        elif text:
            with suppress(OSError, ValueError), self._live.aside():
                print(printable(text), flush=True)

    def doing(self, what: str, kind: str = "") -> None:
        """Set what the run is doing: shown in the status line of a terminal; elsewhere printed if it takes long.
        Another ``what`` of the same ``kind`` counts as the same activity."""
        self._doing = Doing(what, kind or what)
        self._live.start()

    def follow(self, describe: Callable[[], Doing | None]) -> None:
        """As ``doing``, with what ``describe`` returns, called in another thread; None: what ``doing`` set."""
        self._describe = describe
        self._live.start()

    def _present(self) -> Doing | None:
        return self._describe() or self._doing

    def quiet(self) -> None:
        """From now on only print and log; show no status line."""
        self._live.close()

    def log(self, text: str) -> None:
        """Write ``text`` to this rank's log only."""
        stamp = time.strftime("%Y-%m-%d %H:%M:%S ")
        lines = "".join(f"{stamp}{line}\n" for line in text.splitlines())
        if self._pending is not None:
            self._pending.append(lines)
        elif self._log is not None:
            with suppress(OSError):  # a full disk ends no run
                self._log.write(lines)

    def close(self) -> None:
        """Clear the status line and close the log."""
        self._live.close()
        if self._log is not None:
            with suppress(OSError):  # tries again what a full disk did not take
                self._log.close()
            self._log = None
