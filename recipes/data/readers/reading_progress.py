"""Progress and threads of a preparation."""

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

from serried.configs.formats import duration, is_terminal, size

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")

Show = Callable[[str], None]
"""Shows a line of progress, which replaces the previous one. An empty line clears it."""

_EVERY_SECONDS, _EVERY_SECONDS_LIVE = 15.0, 0.5


def usable_cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class Progress:
    """Counts bytes, and shows how many were read, the rate and the remaining time: often in a terminal, rarely in a
    log."""

    def __init__(self, show: Show | None, threads: int) -> None:
        self.threads = threads
        self.total_bytes = 0
        """Total bytes of the phase; set when known."""
        self._show, self._lock = show, threading.Lock()
        self._what = ""
        self._done_bytes = 0
        self._skipped_bytes = 0
        self._started = self._shown = time.monotonic()
        self._every = _EVERY_SECONDS_LIVE if is_terminal() else _EVERY_SECONDS
        self._has_shown = False

    def phase(self, what: str) -> "Progress":
        """Start a phase, such as ``reading``."""
        self._what = what
        self.total_bytes = 0
        self._done_bytes = 0
        self._skipped_bytes = 0
        self._started = self._shown = time.monotonic()
        return self

    def skipped(self, size_bytes: int) -> None:
        """Add work that was done earlier, which does not count for the rate."""
        self._skipped_bytes += size_bytes
        self.done(size_bytes)

    def done(self, size_bytes: int) -> None:
        """Add finished work. May be called from any thread."""
        with self._lock:
            self._done_bytes += size_bytes
            now = time.monotonic()
            if now - self._shown >= self._every:
                self._shown = now
                self.say(self._line(now - self._started))

    def say(self, text: str) -> None:
        """Show another fact about the preparation."""
        if self._show is not None:
            self._has_shown = True
            self._show(f"preparing data: {text}")

    def __enter__(self) -> "Progress":
        return self

    def __exit__(self, *_: object) -> None:
        """Clear the line."""
        if self._show is not None and self._has_shown:
            self._show("")

    def map(self, function: Callable[[_Item], _Result], items: Sequence[_Item]) -> Iterator[_Result]:
        """Apply ``function`` to each item, on all threads. Results are in order."""
        with ThreadPoolExecutor(self.threads) as pool:
            yield from ordered(pool, function, items, 4 * self.threads)

    def _line(self, seconds: float) -> str:
        done = min(self._done_bytes, self.total_bytes)
        rate = (done - self._skipped_bytes) / max(seconds, 1e-3)
        left = (self.total_bytes - done) / rate if rate > 0 else 0.0
        return f"{self._what} {size(done)} of {size(self.total_bytes)}, {size(rate)}/s, eta {duration(left)}"


def ordered(
    pool: ThreadPoolExecutor, function: Callable[[_Item], _Result], items: Iterable[_Item], ahead: int
) -> Iterator[_Result]:
    """Apply ``function`` to each item. Results are in order. At most ``ahead`` items are taken before their results
    are."""
    waiting: deque[Future[_Result]] = deque()
    try:
        for item in items:
            waiting.append(pool.submit(function, item))
            if len(waiting) >= ahead:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        for future in waiting:
            future.cancel()
