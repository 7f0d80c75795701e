"""Signals that ask a run to stop, as received by one process."""

import ctypes
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from serried.configs.errors import EXIT_FAILED, EXIT_STOPPED, StopRequested
from serried.runtime.import_signals import ASKING, LAUNCHER
from serried.runtime.process import STATUS_DECIDES, code_for_agent, tell_launcher

SWEEP = "SERRIED_SWEEP"
"""Environment variable with the id of the sweep process that started this run."""


_UNDER_TORCHRUN = "TORCHELASTIC_RUN_ID"
_UNHEARD_SECONDS = 5.0
_LOOK_SECONDS = 2.0
_ACKNOWLEDGED_SECONDS = 0.5
_TWICE_SECONDS = 1.0  # a terminal and torchrun may both pass on one Ctrl-C
_SPARE_SECONDS = 60.0
_FAR_SECONDS = 3e8  # ten years: no limit
_SET_DEATH_SIGNAL, _GET_DEATH_SIGNAL = 1, 2  # prctl.h


@dataclass(frozen=True)
class Deadline:
    """Time limit of a job, which cannot be extended."""

    at: float
    """Time in Unix seconds."""
    spare_seconds: float
    """Seconds before the limit at which the run must have stopped, as a reserve for the work after the last save.
    Smaller for a short job."""

    def __str__(self) -> str:
        return f"Slurm ends this job at {time.strftime('%H:%M', time.localtime(self.at))}"

    def left_seconds(self) -> float:
        """Return the seconds until the run must have stopped; negative after that."""
        return self.at - self.spare_seconds - time.time()

    def is_near(self, needed_seconds: float) -> bool:
        """Return whether the run must stop now if stopping takes ``needed_seconds``."""
        return self.left_seconds() <= needed_seconds


def deadline_of_job() -> Deadline | None:
    """Return the time limit of this Slurm job; None if there is none, or it belongs to a job that has ended."""
    try:
        at = float(os.environ["SLURM_JOB_END_TIME"])
    except (KeyError, ValueError):
        return None
    left = at - time.time()
    return Deadline(at, min(_SPARE_SECONDS, left / 4)) if 0 < left < _FAR_SECONDS else None


class _Phase(Enum):
    LOAD = "load"
    RAISE = "raise"
    RAISED = "raised"
    HOLD = "hold"
    CLEAN_UP = "clean up"
    LEAVE = "leave"


_NOTHING_TO_SAVE = (
    _Phase.LOAD,
    _Phase.RAISE,
    _Phase.RAISED,
)  # RAISED: until the cleanup begins


class _Handlers:
    """Installed handlers for the signals ``ASKING``, and a pipe that receives the number of each signal immediately."""

    def __init__(self) -> None:
        self._before: dict[int, Any] = {}
        self._pipe: tuple[int, int] | None = None
        self._pipe_before = -1

    @property
    def are_installed(self) -> bool:
        """Whether the handlers are installed."""
        return self._pipe is not None

    def install(self, handle: Callable[[int, FrameType | None], None]) -> int:
        """Install ``handle`` for the signals. Return the read end of the pipe."""
        self._pipe = os.pipe()
        os.set_blocking(self._pipe[1], False)
        self._pipe_before = signal.set_wakeup_fd(self._pipe[1], warn_on_full_buffer=False)
        for number in ASKING:
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:  # nohup
                self._before[number] = signal.signal(number, handle)
        return self._pipe[0]

    def restore(self) -> None:
        """Restore the earlier handlers, and close the write end of the pipe."""
        for number, handler in self._before.items():
            signal.signal(number, handler)
        if self._pipe is not None:
            signal.set_wakeup_fd(self._pipe_before)
            os.close(self._pipe[1])
            self._pipe = None


class Signals:
    """Signal handlers of the main thread, as a context manager.

    At first a signal raises ``StopRequested``, since there is nothing to save. After ``hold`` it is only recorded in
    ``received``, and the training loop acts on it between steps. During the cleanup after a failure, only Ctrl-C
    interrupts. A second Ctrl-C, or one during that cleanup, ends the process immediately.

    Python calls handlers only between two bytecode instructions, and the main thread may be inside a call that waits
    for another rank. Therefore a thread also listens for signals: while there is nothing to save, it ends a process
    that does not react. Under Slurm, until the first step is done, another thread watches the clock and checks for a
    request that arrived before the handlers existed (the job script writes it to a file). Later the training loop
    watches the clock.
    """

    def __init__(self) -> None:
        self.acknowledge: Callable[[], None] | None = None
        """Called in another thread if the training loop has not acted on a first Ctrl-C after half a second."""
        self.last_words: Callable[[], int | None] | None = None
        """Called before the process is ended at once. Returns the exit code if it is already decided."""
        self.last_words_unheard: Callable[[], int] | None = None
        """Called if there is nothing to save and the main thread does not react. Returns the exit code."""
        self._phase = _Phase.RAISE
        self._received: int | None = None
        self.deadline = deadline_of_job()
        self.asks_to_save = threading.Event()
        """Set to request a save, after which the run continues."""
        self._told: str | None = None
        self._looked_enough = threading.Event()
        self._interrupted_at: float | None = None
        self._parent = os.getppid()
        self._handlers = _Handlers()

    def __enter__(self) -> "Signals":
        if threading.current_thread() is not threading.main_thread():
            return self
        pipe = self._handlers.install(self._handle)
        threading.Thread(target=self._listen, args=(pipe,), name="signals", daemon=True).start()
        if self.deadline is not None or STATUS_DECIDES in os.environ:
            threading.Thread(target=self._look_out, name="deadline", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.has_begun()
        self._handlers.restore()  # this ends the listening thread

    @property
    def end_of_parent(self) -> str | None:
        """Message that the parent (torchrun or the launcher) has exited; None while it runs, or without a parent."""
        if _UNDER_TORCHRUN not in os.environ or os.getppid() == self._parent:
            return None
        started = "the command" if LAUNCHER in os.environ else "torchrun"
        return f"{started} (process {self._parent}) ended"

    @property
    def is_overdue(self) -> bool:
        """Whether the run must have stopped by now, because of the time limit of its job."""
        return self.deadline is not None and self.deadline.left_seconds() <= 0

    @property
    def received(self) -> str | None:
        """Description of the first request to stop; None if there was none."""
        if self._told is not None:
            return self._told
        if self._received == signal.SIGTERM and self.end_of_parent is not None:
            return self.end_of_parent
        return None if self._received is None else signal.Signals(self._received).name

    @contextmanager
    def loading(self) -> Iterator[None]:
        """Context manager for imports: raise ``StopRequested`` only at their end, since torch may swallow it.

        If the imports take too long after a signal, the listening thread ends the process.
        """
        if self._phase is not _Phase.RAISE:
            yield
            return
        self._phase = _Phase.LOAD
        yield
        self._phase = _Phase.RAISE
        self._raise_if_asked()

    def hold(self) -> None:
        """Only record signals from now on."""
        if self._phase is _Phase.RAISE:
            self._phase = _Phase.HOLD

    def has_begun(self) -> None:
        """Stop watching the clock: the first step is done, and the training loop watches the clock from now on."""
        self._looked_enough.set()

    def clean_up(self) -> None:
        """Let only Ctrl-C interrupt the process from now on."""
        if self._phase is not _Phase.LEAVE:
            self._phase = _Phase.CLEAN_UP

    def leave(self) -> None:
        """Let no signal interrupt the process from now on: the outcome of the run is decided and recorded."""
        self._phase = _Phase.LEAVE

    def _handle(self, number: int, _: FrameType | None) -> None:
        if number == signal.SIGINT and self._phase is not _Phase.LEAVE:
            self._interrupted()
        if self._received is None:
            self._received = number
        self._raise_if_asked()

    def _raise_if_asked(self) -> None:
        # Error handling must not be interrupted: _listen ends the process if that takes too long.
        if self._received is not None and self._phase is _Phase.RAISE and sys.exc_info()[1] is None:
            self._phase = _Phase.RAISED
            raise StopRequested(self.received)

    def _interrupted(self) -> None:
        now, earlier = time.monotonic(), self._interrupted_at
        if earlier is None:
            self._interrupted_at = now
        is_second = earlier is not None and now - earlier > _TWICE_SECONDS
        if is_second or (earlier is None and self._phase in (_Phase.RAISED, _Phase.CLEAN_UP)):
            self._end_at_once()

    def _end_at_once(self) -> NoReturn:
        code = None
        if self.last_words is not None:
            with suppress(Exception):
                code = self.last_words()
        if code is None:
            with suppress(OSError):
                os.write(2, b"interrupted again: ended at once, without saving\n")
        tell_launcher(ended=True)
        os._exit(EXIT_FAILED if code is None else code)

    def _listen(self, pipe: int) -> None:
        """Read signal numbers from ``pipe`` as they arrive, and act on them if the main thread does not."""
        first_interrupt: float | None = None
        while number := os.read(pipe, 1):
            now = time.monotonic()
            if number[0] in ASKING and self._phase in _NOTHING_TO_SAVE:
                time.sleep(_UNHEARD_SECONDS)
                if self._phase in _NOTHING_TO_SAVE and self._handlers.are_installed:
                    self._end_unheard(number[0])
            elif number[0] == signal.SIGINT and self._phase is not _Phase.LEAVE:
                if first_interrupt is not None and now - first_interrupt > _TWICE_SECONDS:
                    time.sleep(_TWICE_SECONDS)  # give the main thread time to end the process
                    self._end_at_once()
                if first_interrupt is None:
                    first_interrupt = now
                    time.sleep(_ACKNOWLEDGED_SECONDS)
                    if (acknowledge := self.acknowledge) is not None:
                        with suppress(Exception):
                            acknowledge()
        os.close(pipe)

    def _end_unheard(self, number: int) -> NoReturn:
        self._received = self._received or number
        code = EXIT_STOPPED
        if self.last_words_unheard is not None:
            with suppress(Exception):
                code = self.last_words_unheard()
        tell_launcher(ended=True)
        os._exit(code_for_agent(code))

    def _look_out(self) -> None:
        """Act on an earlier request and on the end of the job, until the first step is done."""
        while True:
            if self._told is None and (asked := _asked_before()) is not None:
                self._tell(asked)
            left = self.deadline.left_seconds() if self.deadline is not None else _LOOK_SECONDS
            if left <= 0:
                break
            if self._looked_enough.wait(min(left, _LOOK_SECONDS)):
                return
        assert self.deadline is not None
        self._tell(str(self.deadline))
        # The first step may take half of the remaining time. If it has several short micro-batches, it ends between two
        # of them. There is nothing to save.
        if not self._looked_enough.wait(self.deadline.spare_seconds / 2) and self._phase is _Phase.HOLD:
            self._end_unheard(signal.SIGUSR1)

    def _tell(self, asked: str) -> None:
        """Treat ``asked`` like a received signal, unless the first step is done."""
        if not self._looked_enough.is_set():
            self.ask(asked)

    def ask(self, reason: str) -> None:
        """Request a stop from another thread, as a signal would. The first request counts."""
        if self._received is not None:
            return
        self._told = reason
        if self._phase in _NOTHING_TO_SAVE and self._handlers.are_installed:
            os.kill(os.getpid(), signal.SIGUSR1)
        else:
            self._received = signal.SIGUSR1


def _asked_before() -> str | None:
    """Return the source of an earlier request to stop this start of a Slurm job; None if there was none.

    The request arrived before this process had handlers.
    """
    try:
        # Opened, not only checked for existence: a network disk may still list the file of the previous start.
        return Path(os.environ[STATUS_DECIDES]).read_text(encoding="utf-8").strip() or "a request"
    except (OSError, KeyError):
        return None


def end_with_torchrun() -> None:
    """Make the kernel send SIGTERM to this process when its torchrun dies.

    A torchrun that is killed (by default SIGUSR1 is enough) may not have time to do so, and would leave its processes
    behind, training. Linux only; does nothing if torchrun did not start this process, or a death signal was already
    set.
    """
    if _UNDER_TORCHRUN in os.environ:
        _end_with_parent(lambda parent: os.environ.get(LAUNCHER, str(parent)) != str(parent) or _is_orphan(parent))


def end_with_sweep() -> None:
    """Like ``end_with_torchrun``, for a run that a sweep started: it saves and stops when the sweep is killed."""
    if SWEEP in os.environ:
        _end_with_parent(lambda parent: os.environ[SWEEP] != str(parent))


def _end_with_parent(is_another: Callable[[int], bool]) -> None:
    """Ask the kernel for SIGTERM when the parent dies. ``is_another(pid)`` returns whether ``pid`` did not start
    this process."""
    if sys.platform != "linux":
        return
    parent = os.getppid()
    prctl = ctypes.CDLL(None).prctl
    chosen = ctypes.c_int()
    if prctl(_GET_DEATH_SIGNAL, ctypes.byref(chosen)) != 0 or chosen.value:
        return
    prctl(_SET_DEATH_SIGNAL, signal.SIGTERM)
    if os.getppid() != parent or is_another(parent):  # it died before the request to the kernel
        os.kill(os.getpid(), signal.SIGTERM)


def _is_orphan(parent: int) -> bool:
    """Return whether ``parent`` is the init process. In a container, a torchrun may be process 1 instead."""
    try:
        return parent == 1 and not Path("/proc/1/exe").samefile("/proc/self/exe")
    except OSError:  # no permission, so it did not start this process
        return True
