"""Wait for the processes of a launcher: signals are passed on, and no process is left behind."""

import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

PASSED_ON = {  # received signal: signal to pass on
    signal.SIGTERM: signal.SIGTERM,
    signal.SIGINT: signal.SIGINT,
    signal.SIGUSR1: signal.SIGUSR1,
    signal.SIGHUP: signal.SIGHUP,
    signal.SIGQUIT: signal.SIGTERM,
}
_LOOK_SECONDS = 0.05
_OTHERS_END_SECONDS = 30.0


class Started(Protocol):
    """A process started by this one: ``subprocess.Popen``, or ``forks.Forked``."""

    returncode: int | None

    def poll(self) -> int | None: ...

    def send_signal(self, sig: int, /) -> None: ...


class NotedSignals:
    """Context manager that records signals which would end this process, for the caller to act on."""

    def __init__(self) -> None:
        self.received: list[signal.Signals] = []
        """The signals to pass on, in the order they arrived."""

    def __enter__(self) -> "NotedSignals":
        # Ignored signals (by nohup, or SIGUSR1 in a batch script) stay ignored, here and in the started processes.
        self._before = {
            number: signal.signal(number, self._note)
            for number in PASSED_ON
            if signal.getsignal(number) != signal.SIG_IGN
        }
        return self

    def _note(self, number: int, _: object) -> None:
        self.received.append(PASSED_ON[signal.Signals(number)])

    def __exit__(self, *_: object) -> None:
        self.restore()

    def restore(self) -> None:
        """Restore the previous signal handlers."""
        for number, handler in self._before.items():
            signal.signal(number, handler)


@contextmanager
def held_back() -> Iterator[None]:
    """Block signals in this process and in processes started within the context."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, PASSED_ON)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def wait_for_all(
    processes: Sequence[Started],
    signals: NotedSignals,
    patience_seconds: float,
    on_look: Callable[[], object] = lambda: None,
) -> dict[int, int]:
    """Wait until all ``processes`` have ended, and pass signals on to them.

    If a process fails, the others are ended: by SIGTERM, then SIGKILL. Processes that still run
    ``patience_seconds`` after a signal are killed, too. ``on_look`` is called several times per second.

    Returns:
        Exit codes, negative for a signal, of the processes that failed before the others were ended, by index.
    """
    failed: dict[int, int] = {}
    passed_on = 0
    deadline = float("inf")
    is_ending = False
    try:
        while True:
            running = [process for process in processes if process.poll() is None]
            failed = failed or {n: process.returncode for n, process in enumerate(processes) if process.returncode}
            if not running:
                return failed
            count = len(signals.received)  # read once: a signal may arrive between two reads
            new, passed_on = signals.received[passed_on:count], count
            if new:
                deadline = min(deadline, time.monotonic() + patience_seconds)
            if failed and not is_ending:
                is_ending = True
                new.append(signal.SIGTERM)
                if not signals.received:
                    deadline = time.monotonic() + _OTHERS_END_SECONDS
            if time.monotonic() > deadline:
                new.append(signal.SIGKILL)
            for process in running:
                for number in new:
                    process.send_signal(number)
            on_look()
            time.sleep(_LOOK_SECONDS)
    finally:
        for process in processes:
            process.send_signal(signal.SIGKILL)


def killed_by(number: int) -> str:
    """Return a description of a process killed by signal ``number``."""
    hint = " (by a user, or by the system when memory ran out: see dmesg)" if number == signal.SIGKILL else ""
    return f"killed by {signal.Signals(number).name}{hint}"
