"""Signals that a process which started others passes on to them."""

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
    """While this is open, signals that would end the process are noted instead, for others to act on."""

    def __init__(self) -> None:
        self.received: list[signal.Signals] = []
        """As they are to be passed on, in the order they came."""

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
    """Send ``number`` to the process ``pid``, if it is still there."""
    with suppress(ProcessLookupError):
        os.kill(pid, number)
