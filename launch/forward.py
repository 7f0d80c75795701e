"""Signals that a launcher passes on to the processes it started."""

import os
import signal
from contextlib import suppress

PASSED_ON = {  # what arrives, and what the processes get
    signal.SIGTERM: signal.SIGTERM,
    signal.SIGINT: signal.SIGINT,
    signal.SIGUSR1: signal.SIGUSR1,
    signal.SIGHUP: signal.SIGHUP,
    signal.SIGQUIT: signal.SIGTERM,
}


class NotedSignals:
    """While open, records signals that would end this process, for the caller to act on."""

    def __init__(self) -> None:
        self.received: list[signal.Signals] = []
        """The signals to pass on, in the order they arrived."""

    def __enter__(self) -> "NotedSignals":
        # Ignored signals (nohup; SIGUSR1 of a batch script) stay ignored, here as in the processes.
        self._before = {
            number: signal.signal(number, self._note)
            for number in PASSED_ON
            if signal.getsignal(number) != signal.SIG_IGN
        }
        return self

    def _note(self, number: int, _: object) -> None:
        self.received.append(PASSED_ON[signal.Signals(number)])

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)


def send(pid: int, number: signal.Signals) -> None:
    """Send ``number`` to the process ``pid``, if it still exists."""
    with suppress(ProcessLookupError):
        os.kill(pid, number)


def killed_by(number: int) -> str:
    """Return the reason of a process that signal ``number`` ended."""
    hint = " (by a user, or by the system when memory ran out: see dmesg)" if number == signal.SIGKILL else ""
    return f"killed by {signal.Signals(number).name}{hint}"
