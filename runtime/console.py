"""Console output of a run: lines on rank 0, the log of each rank, and the status line.

In a terminal, the status line shows the current phase and is redrawn in place; elsewhere a plain line is printed if a
phase takes long. A thread prints the phase, so the training code only sets it and never waits.
"""

import shutil
import sys
import threading
import time
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any, NamedTuple

from serried.configs.formats import duration, is_terminal, printable
from serried.runtime.process import say

_TICK_SECONDS = 0.25
_SHOWN_AT_SECONDS, _PRINTED_AT_SECONDS = 5.0, 10.0
_CLEAR = "\r\033[K"


class Doing(NamedTuple):
    """One activity of the run."""

    what: str
    """Description, such as ``saving step 100``."""
    key: Hashable
    """Identity of the activity. The clock restarts when it changes."""
    line: str = ""
    """Text for a step, which a terminal shows instead of ``what``. Elsewhere, steps are not printed."""


class Live:
    """Status line that shows the current activity, between ``start`` and ``close``."""

    def __init__(self, say: Callable[[str], object], describe: Callable[[], Doing | None], *, is_drawn: bool) -> None:
        """Prepare the line without showing it.

        Args:
            say: prints a plain line.
            describe: returns the activity; called in another thread.
            is_drawn: redraw a line in a terminal instead of printing plain ones.
        """
        self._say = say
        self._describe = describe
        self._is_drawn = is_drawn
        self._progress = self._drawn = ""
        self._key: Hashable = None
        self._since = self._said = time.monotonic()
        self._lock = threading.RLock()  # a signal handler may print while the same thread draws
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="status line", daemon=True)

    def start(self) -> None:
        """Start showing activities. May be called more than once."""
        if self._thread.ident is None and not self._closed.is_set():
            self._thread.start()

    def show(self, progress: str) -> None:
        """Show ``progress`` in a terminal instead of the activity, until it is empty."""
        with self._lock:
            self._progress = progress
            if not self._closed.is_set():
                self._draw(progress)

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Context manager that clears the status line while other text is printed."""
        with self._lock:
            self._draw("")  # even if nothing was drawn: the terminal may have put a ^C there
            self._said = time.monotonic()
            yield

    def draw_if(self, is_drawn: bool) -> None:
        """Redraw a line from now on, or print plain ones."""
        self._is_drawn = is_drawn

    def close(self) -> None:
        """Clear the line and stop. May be called more than once, from any thread."""
        self._closed.set()
        if self._thread.ident is not None and self._thread is not threading.current_thread():
            self._thread.join(1.0)
        with self._lock:
            self._draw("")

    def _run(self) -> None:
        while not self._closed.wait(_TICK_SECONDS):
            with suppress(OSError):  # standard output may be a file on a full disk
                self.look(time.monotonic())

    def look(self, now: float) -> None:
        """Show the activity at time ``now``, or print it if it has taken long."""
        doing = self._describe()
        if doing is None or doing.key != self._key:
            self._key, self._since = doing and doing.key, now
        if doing is None:
            return
        seconds = now - self._since
        if self._is_drawn:
            taken = "" if doing.line and seconds < _SHOWN_AT_SECONDS else f"{doing.what}  {duration(seconds)}"
            text = self._progress or f"{doing.line}  {taken}".strip()
            with self._lock:
                if text != self._drawn and not self._closed.is_set():
                    self._draw(text)
            return
        said = max(self._since, self._said)
        if not doing.line and now - said >= max(_PRINTED_AT_SECONDS, said - self._since):  # at 10 s, 20 s, 40 s, ...
            self._said = now
            self._say(f"waiting    {duration(seconds)} so far: {doing.what}")

    def _draw(self, text: str) -> None:
        if self._is_drawn:
            self._drawn = text
            fitting = text[: max(1, shutil.get_terminal_size().columns - 1)]
            with suppress(OSError):
                print(f"{_CLEAR}{fitting}", end="", flush=True)


@contextmanager
def announced(what: str, *, speaks: bool) -> Iterator[None]:
    """Context manager that prints from time to time how long ``what`` has taken, if this process ``speaks``."""
    live = Live(say, lambda: Doing(what, what), is_drawn=False)
    if speaks:
        live.start()
    try:
        yield
    finally:
        live.close()


class Console:
    """Prints for the user on rank 0. Every rank logs to ``log/rank-N.log`` after ``open``."""

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

    def speak(self) -> None:
        """Print from now on, since this is rank 0 now."""
        self._speaks = True
        self._live.draw_if(is_terminal())

    def progress(self, text: str) -> None:
        """Show the progress of an operation.

        In a terminal, the status line shows it, and an empty ``text`` clears it.
        """
        if not self._speaks:
            return
        if is_terminal():
            self._live.show(text)
        elif text:
            with suppress(OSError, ValueError), self._live.aside():
                print(printable(text), flush=True)

    def doing(self, what: str, kind: str = "") -> None:
        """Set the current activity.

        A terminal shows it in the status line; elsewhere it is printed if it takes long. Another ``what`` of the same
        ``kind`` counts as the same activity.
        """
        self._doing = Doing(what, kind or what)
        self._live.start()

    def follow(self, describe: Callable[[], Doing | None]) -> None:
        """Like ``doing``, but call ``describe`` for the activity, in another thread.

        If it returns None, the activity set by ``doing`` is shown.
        """
        self._describe = describe
        self._live.start()

    def _present(self) -> Doing | None:
        return self._describe() or self._doing

    def quiet(self) -> None:
        """Stop the status line. Text is still printed and logged."""
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
