"""Progress display and worker threads for data preparation."""

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
"""Function that shows a progress line in place of the previous one. An empty string clears the line."""

_EVERY_SECONDS, _EVERY_SECONDS_LIVE = 15.0, 0.5


def usable_cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class Progress:
    """Counts bytes, and shows the number of bytes, the rate and the remaining time: twice per second in a terminal,
    every 15 seconds in a log."""

    def __init__(self, show: Show | None, threads: int) -> None:
        self.threads = threads
        self.total_bytes = 0
        """Total number of bytes of the phase, set by the caller when known."""
        self._show, self._lock = show, threading.Lock()
        self._what = ""
        self._done_bytes = 0
        self._skipped_bytes = 0
        self._started = self._shown = time.monotonic()
        self._every = _EVERY_SECONDS_LIVE if is_terminal() else _EVERY_SECONDS
        self._has_shown = False

    def phase(self, what: str) -> "Progress":
        """Start a phase, such as ``reading``, and return this object."""
        self._what = what
        self.total_bytes = 0
        self._done_bytes = 0
        self._skipped_bytes = 0
        self._started = self._shown = time.monotonic()
        return self

    def skipped(self, size_bytes: int) -> None:
        """Add bytes that were finished earlier. They do not count towards the rate."""
        self._skipped_bytes += size_bytes
        self.done(size_bytes)

    def done(self, size_bytes: int) -> None:
        """Add finished bytes. May be called from any thread."""
        with self._lock:
            self._done_bytes += size_bytes
            now = time.monotonic()
            if now - self._shown >= self._every:
                self._shown = now
                self.say(self._line(now - self._started))

    def say(self, text: str) -> None:
        """Show a message about the preparation."""
        if self._show is not None:
            self._has_shown = True
            self._show(f"preparing data: {text}")

    def __enter__(self) -> "Progress":
        return self

    def __exit__(self, *_: object) -> None:
        """Clear the progress line."""
        if self._show is not None and self._has_shown:
            self._show("")

    def map(self, function: Callable[[_Item], _Result], items: Sequence[_Item]) -> Iterator[_Result]:
        """Apply ``function`` to each item on all threads. Results are in the order of the items."""
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
    """Apply ``function`` to each item on the threads of ``pool``. Results are in the order of the items. At most
    ``ahead`` items are submitted before their results are consumed."""
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
