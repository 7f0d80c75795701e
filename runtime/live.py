"""What is done at present, for whoever looks on: a line that changes on a terminal, a plain one now and then elsewhere.

A thread asks what is done and since when; whoever does it only leaves a word, and never waits. A long silence is broken
sooner where something is done once, later where it is one of many that take long by nature.
"""

import os
import shutil
import sys
import threading
import time
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager, suppress
from typing import NamedTuple

from serried.configs.announce import SILENCE_SECONDS

_TICK_SECONDS, _TICK_SECONDS_LIVE = 1.0, 0.25
_SLOW_AT_TIMES_LONGEST = 2.0
_SHOWN_AT_SECONDS = 5.0
_CLEAR = "\r\033[K"


class Doing(NamedTuple):
    """One thing that is done."""

    what: str
    """In words: ``saving step 100``."""
    kind: str
    """What it has in common with others of its kind."""
    number: Hashable = None
    """Which of its kind; a clock starts where kind or number change."""
    is_routine: bool = False
    """Whether it is one of many: only one that takes longer than its like is worth a word."""
    line: str = ""
    """What a terminal shows in place of ``what``, for as long as it takes no longer than usual."""


def is_terminal() -> bool:
    """Whether somebody looks at the standard output, on something that can rewrite a line."""
    return sys.stdout.isatty() and os.environ.get("TERM", "dumb") != "dumb"


class Live:
    """Shows what is done, from ``start`` to ``close``."""

    def __init__(self, say: Callable[[str], None], describe: Callable[[], Doing | None], *, is_drawn: bool) -> None:
        """``say`` prints a plain line; ``describe``, called in a thread of its own, says what is done, None: nothing.
        ``is_drawn``: show a line that changes, on a terminal, instead of plain ones."""
        self._say, self._describe, self._is_drawn = say, describe, is_drawn
        self._shown = ""
        """Takes the place of what is described."""
        self._drawn = ""
        """What stands on the terminal's last line."""
        self._doing: Doing | None = None
        self._since = self._said = time.monotonic()
        self._times_said = 0
        self._longest: dict[str, float] = {}
        # A handler of signals may print while this thread does.
        self._lock = threading.RLock()
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Show what is done, from here on. May be called more than once."""
        if self._thread is None and not self._closing.is_set():
            self._thread = threading.Thread(target=self._run, name="live", daemon=True)
            self._thread.start()

    def show(self, text: str) -> None:
        """Show ``text`` in place of what is described, until an empty one comes. On a terminal."""
        with self._lock:
            self._shown = text
            if not self._closing.is_set():
                self._draw(text)

    @contextmanager
    def aside(self) -> Iterator[None]:
        """While something else is printed: whole lines."""
        with self._lock:
            self._clear()
            self._said, self._times_said = time.monotonic(), 0
            yield

    def close(self) -> None:
        """Leave a clean line behind. May be called more than once, from any thread."""
        self._closing.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(_TICK_SECONDS)
        with self._lock:
            self._clear()

    def _run(self) -> None:
        tick = _TICK_SECONDS_LIVE if self._is_drawn else _TICK_SECONDS
        while not self._closing.wait(tick):
            with suppress(OSError):  # it may lead into a file on a full disk
                self.look()

    def look(self) -> None:
        """Show, or say, what is done now, where that is due."""
        doing, now = self._describe(), time.monotonic()
        before = self._doing
        if doing is None or before is None or (doing.kind, doing.number) != (before.kind, before.number):
            if before is not None:
                self._longest[before.kind] = max(self._longest.get(before.kind, 0.0), now - self._since)
            self._since, self._times_said = now, 0
        self._doing = doing
        if doing is None:
            return
        seconds = now - self._since
        if self._is_drawn:
            with self._lock:
                text = self._shown or _line(doing, seconds)
                if text != self._drawn and not self._closing.is_set():
                    self._draw(text)
        elif now - max(self._since, self._said) >= self._patience(doing):
            times = self._times_said
            self._say(f"waiting    {_clock(seconds)} so far: {doing.what}")
            self._times_said = times + 1

    def _patience(self, doing: Doing) -> float:
        silence = SILENCE_SECONDS[min(self._times_said, len(SILENCE_SECONDS) - 1)]
        usual = _SLOW_AT_TIMES_LONGEST * self._longest.get(doing.kind, 0.0) if doing.is_routine else 0.0
        return max(silence, usual)

    def _clear(self) -> None:
        self._draw("")  # even where nothing was drawn: the terminal may have put a ^C there by itself

    def _draw(self, text: str) -> None:
        """Have ``text`` be the terminal's last line, as much of it as fits."""
        if not self._is_drawn:
            return
        self._drawn = text
        fitting = text[: max(1, shutil.get_terminal_size().columns - 1)]
        with suppress(OSError):
            print(f"{_CLEAR}{fitting}", end="", file=sys.stdout, flush=True)


def _line(doing: Doing, seconds: float) -> str:
    takes = f"{doing.what}  {_clock(seconds)}"
    if not doing.line:
        return takes
    return doing.line if seconds < _SHOWN_AT_SECONDS else f"{doing.line}  {takes}"


def _clock(seconds: float) -> str:
    """34 s, 2:05 min, 1:02:05 h."""
    minutes, rest = divmod(int(seconds), 60)
    if minutes < 60:
        return f"{minutes}:{rest:02d} min" if minutes else f"{rest} s"
    return f"{minutes // 60}:{minutes % 60:02d}:{rest:02d} h"
