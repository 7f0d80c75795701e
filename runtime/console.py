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
    """Prints for the user on rank 0. Every rank logs to ``log/rank-N.log``, once that is open."""

    def __init__(self, speaks: bool, rank: int) -> None:
        self._speaks, self._rank = speaks, rank
        self._live = Live(self.say, self._present, is_drawn=speaks and is_terminal())
        self._doing: Doing | None = None
        self._describe: Callable[[], Doing | None] = lambda: None
        self.last_step: dict[str, Any] | None = None
        """Values of the last logged step, for the status line."""
        self._log: IO[str] | None = None
        self._pending: list[str] | None = []

    def open(self, run_folder: Path) -> None:
        """Write the log to ``run_folder`` from now on, including the text that was printed before."""
        with suppress(OSError):  # a node that cannot write there still trains; rank 0 prints the important lines
            path = run_folder / "log" / f"rank-{self._rank}.log"
            path.parent.mkdir(parents=True, exist_ok=True)
            self._log = path.open("a", buffering=1, encoding="utf-8", errors="backslashreplace")
            self._log.writelines(self._pending or [])
        self._pending = None

    def say(self, text: str) -> None:
        """Print ``text`` if this is rank 0, and log it."""
        text = printable(text)
        if self._speaks:
            # Standard output may be a file on a full disk: Python keeps the rest for later.
            with suppress(OSError, ValueError), self._live.aside():
                print(text, file=sys.stdout, flush=True)
        self.log(text)

    def progress(self, text: str) -> None:
        """Show the progress of an operation: in a terminal in the status line, which an empty ``text`` clears."""
        if not self._speaks:
            return
        if is_terminal():
            self._live.show(text)
        elif text:
            with suppress(OSError, ValueError), self._live.aside():
                print(printable(text), flush=True)

    def doing(self, what: str, kind: str = "") -> None:
        """Set the current activity. A terminal shows it in the status line; elsewhere it is printed if it takes
        long. Another ``what`` of the same ``kind`` counts as the same activity."""
        self._doing = Doing(what, kind or what)
        self._live.start()

    def follow(self, describe: Callable[[], Doing | None]) -> None:
        """Like ``doing``, but ask ``describe`` for the activity, in another thread. If it returns None, the activity
        set by ``doing`` is shown."""
        self._describe = describe
        self._live.start()

    def _present(self) -> Doing | None:
        return self._describe() or self._doing

    def quiet(self) -> None:
        """Print and log only from now on, without a status line."""
        self._live.close()

    def log(self, text: str) -> None:
        """Write ``text`` only to this rank's log."""
        stamp = time.strftime("%Y-%m-%d %H:%M:%S ")
        lines = "".join(f"{stamp}{line}\n" for line in text.splitlines())
        if self._pending is not None:
            self._pending.append(lines)
        elif self._log is not None:
            with suppress(OSError):  # a full disk does not end the run
                self._log.write(lines)

    def close(self) -> None:
        """Clear the status line and close the log."""
        self._live.close()
        if self._log is not None:
            with suppress(OSError):  # tries again to write text that did not fit on a full disk
                self._log.close()
            self._log = None
