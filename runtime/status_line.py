"""Status line of a run's current activity, redrawn in a terminal. Elsewhere, a plain line for activities that take
long.

A thread asks for the activity, so the code that performs it only leaves a note and never waits.
"""

import os
import shutil
import sys
import threading
import time
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager, suppress
from typing import NamedTuple

from serried.configs.formats import duration
from serried.runtime.process import say

_TICK_SECONDS = 0.25
_SHOWN_AT_SECONDS, _PRINTED_AT_SECONDS = 5.0, 10.0
_CLEAR = "\r\033[K"


class Doing(NamedTuple):
    """One activity of the run."""

    what: str
    """Description: ``saving step 100``."""
    key: Hashable
    """Identity of the activity. The clock restarts when it changes."""
    line: str = ""
    """Text that a terminal shows instead of ``what``, for steps. Elsewhere, steps are not printed."""


def is_terminal() -> bool:
    """Return whether standard output is a terminal that can redraw a line."""
    return sys.stdout.isatty() and os.environ.get("TERM", "dumb") != "dumb"


class Live:
    """Shows the current activity, between ``start`` and ``close``."""

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
        """Start to show activities. May be called more than once."""
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
        """Clear the line while whole lines of other text are printed."""
        with self._lock:
            self._draw("")  # even if nothing was drawn: the terminal may have put a ^C there
            self._said = time.monotonic()
            yield

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
