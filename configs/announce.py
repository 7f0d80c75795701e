"""Progress lines for slow work before training starts."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from serried.configs.formats import printable

SILENCE_SECONDS = (10.0, 20.0, 30.0, 60.0, 180.0, 300.0)
"""Seconds before the first line and between lines; the last one repeats."""


@contextmanager
def announced(what: str, *, speaks: bool) -> Iterator[None]:
    """While this is open, print how long ``what`` has taken, if this process ``speaks``."""
    done = threading.Event()
    if speaks:
        threading.Thread(target=_print_waiting, args=(what, done), name="announce", daemon=True).start()
    try:
        yield
    finally:
        done.set()


def print_line(label: str, text: str) -> None:
    """Print one line now."""
    with suppress(OSError, ValueError):  # the output is closed
        print(printable(f"{label:<10} {text}"), flush=True)


def _print_waiting(what: str, done: threading.Event) -> None:
    started, times = time.monotonic(), 0
    while not done.wait(SILENCE_SECONDS[min(times, len(SILENCE_SECONDS) - 1)]):
        times += 1
        print_line("waiting", f"{time.monotonic() - started:.0f} s so far: {what}")
