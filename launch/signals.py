"""The signals that ask a run to stop, as one process sees them."""

import ctypes
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from enum import Enum
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

from configs.errors import EXIT_FAILED, StopRequested

ASKING = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)
"""Preemption and torchrun, Ctrl-C, Slurm before a time limit, a terminal that is gone."""

_TWICE_SECONDS = 1.0  # a terminal and torchrun may both pass on one Ctrl-C
_SET_DEATH_SIGNAL, _GET_DEATH_SIGNAL = 1, 2  # prctl.h


class _Phase(Enum):
    RAISE = "raise"
    HOLD = "hold"
    CLEAN_UP = "clean up"
    LEAVE = "leave"


class Signals:
    """Handlers of the main thread, from ``with`` to its end.

    At first a signal raises ``StopRequested``: there is nothing to save. After ``hold`` it only leaves its name in
    ``received``, for whoever knows a good moment. While what has failed is cleaned up nothing interrupts. Ctrl-C twice,
    or during that clean-up, ends the process at once.
    """

    def __init__(self) -> None:
        self.received: str | None = None
        """What asked first."""
        self.last_words: Callable[[], None] | None = None
        """Called before the process is ended at once."""
        self._phase = _Phase.RAISE
        self._interrupted_at: float | None = None
        self._parent = os.getppid()
        self._earlier: dict[int, Any] = {}

    def __enter__(self) -> "Signals":
        for number in ASKING if threading.current_thread() is threading.main_thread() else ():
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:  # nohup
                self._earlier[number] = signal.signal(number, self._handle)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for number, handler in self._earlier.items():
            signal.signal(number, handler)

    def hold(self) -> None:
        """From here on a signal only leaves its name."""
        if self._phase is _Phase.RAISE:
            self._phase = _Phase.HOLD

    def clean_up(self) -> None:
        """From here on nothing interrupts but Ctrl-C."""
        if self._phase is not _Phase.LEAVE:
            self._phase = _Phase.CLEAN_UP

    def leave(self) -> None:
        """From here on nothing interrupts: how the run ended is settled and told."""
        self._phase = _Phase.LEAVE

    def _handle(self, number: int, _: FrameType | None) -> None:
        if number == signal.SIGINT and self._phase is not _Phase.LEAVE:
            self._interrupted()
        if self.received is None:
            lost = os.getppid() != self._parent and number == signal.SIGTERM
            self.received = f"the end of torchrun (process {self._parent})" if lost else signal.Signals(number).name
        if self._phase is _Phase.RAISE:
            self._phase = _Phase.CLEAN_UP
            raise StopRequested(self.received)

    def _interrupted(self) -> None:
        now, earlier = time.monotonic(), self._interrupted_at
        if earlier is None:
            self._interrupted_at = now
        is_second = earlier is not None and now - earlier > _TWICE_SECONDS
        if is_second or (earlier is None and self._phase is _Phase.CLEAN_UP):
            if self.last_words is not None:
                with suppress(Exception):
                    self.last_words()
            with suppress(OSError):
                os.write(2, b"interrupted again: ended at once, without saving\n")
            os._exit(EXIT_FAILED)


def end_with_torchrun() -> None:
    """Have the kernel send SIGTERM to this process when its torchrun dies, which itself may have no time to.

    Otherwise a torchrun that is killed (SIGUSR1 is enough, by default) leaves its processes behind, training. Linux
    only; nothing where torchrun did not start this process, or somebody chose a signal before.
    """
    if sys.platform != "linux" or "TORCHELASTIC_RUN_ID" not in os.environ:
        return
    parent = os.getppid()
    prctl = ctypes.CDLL(None).prctl
    chosen = ctypes.c_int()
    if prctl(_GET_DEATH_SIGNAL, ctypes.byref(chosen)) != 0 or chosen.value:
        return
    prctl(_SET_DEATH_SIGNAL, signal.SIGTERM)
    if os.getppid() != parent or _is_orphan(parent):  # it died before the kernel was asked
        os.kill(os.getpid(), signal.SIGTERM)


def _is_orphan(parent: int) -> bool:
    """Whether ``parent`` is the init process and not a torchrun, which in a container may be process 1 itself."""
    try:
        return parent == 1 and not Path("/proc/1/exe").samefile("/proc/self/exe")
    except OSError:  # not ours to look at, so not ours
        return True
