"""End of a process: its error message and exit code, and the root cause.

The first failure of any rank is the root cause of a failed run. The other ranks' errors are its consequences.
"""

import os
import sys
import time
import traceback
from collections.abc import Sequence
from contextlib import suppress
from typing import NamedTuple, NoReturn

from serried.configs.errors import (
    EXIT_FAILED,
    EXIT_MISTAKE,
    EXIT_STOPPED,
    StopRequested,
    TrainingFailed,
    TrainingStopped,
    UserError,
)
from serried.configs.formats import printable
from serried.configs.schema.launch_plan_track import LaunchSection
from serried.configs.subcommand_arguments import repeated
from serried.configs.unused_keys import Run, notes
from serried.runtime.peer_sockets import first_node_is_gone, first_node_refuses
from serried.runtime.process import code_for_agent, is_running, speaks, tell_launcher
from serried.runtime.rendezvous import Exchange
from serried.runtime.signals import Signals

CONNECTIONS_CLOSE_SECONDS = 0.2
_MOST_WAITED_SECONDS, _LOOK_SECONDS = 10.0, 0.05
_LOSS_KNOWN_SECONDS = 10.0
_NO_ANSWER = (  # messages of Gloo and NCCL
    "Timed out waiting", "Application timeout", "Watchdog caught collective operation timeout",
)  # fmt: skip
_BROKEN_OFF = (
    "Connection closed by peer", "Connection reset by peer", "Broken pipe",
    "remote process exited or there was a network error",
)  # fmt: skip
_SILENCE, _END_OF_ANOTHER = "no answer from another process", "another process ended"

_MOST_TOLD_CHARACTERS = 600  # at most 6 bytes per character: writes of up to 4096 bytes to a pipe are atomic
_TORCHRUN_ENDS_ALL_SECONDS = 10.0
"""Longest time until torchrun ends all processes, after one has ended. A process that prints no report waits this
long, so that the process that prints one ends first."""


class Failure(NamedTuple):
    """The reason why a run ended."""

    rank: int
    """Rank that failed first. The other ranks' errors are consequences."""
    reason: str
    """Reason, on one line."""
    exit_code: int


def in_one_line(error: BaseException) -> str:
    """Return the message of ``error`` on one line."""
    text = str(error).strip().splitlines()
    named = "" if isinstance(error, UserError | TrainingFailed) else f"{type(error).__name__}: "
    return f"{named}{text[0]}" if text else type(error).__name__


def exit_code_of(error: BaseException) -> int:
    """Return the exit code of a process that ``error`` ended."""
    if isinstance(error, StopRequested | TrainingStopped):
        return EXIT_STOPPED
    return EXIT_MISTAKE if isinstance(error, UserError) else EXIT_FAILED


def note_repeated(words: Sequence[str]) -> None:
    """Print a note on rank 0 for each key that has two values in ``words``."""
    _note(repeated(words))


def note_idle(words: Sequence[str], runs: Sequence[Run]) -> None:
    """Print a note on rank 0 for each key in ``words`` that none of ``runs`` reads."""
    _note(notes(words, runs))


def _note(lines: Sequence[str]) -> None:
    for line in lines if speaks() else ():
        say_why(f"note: {line}")


def report_mistake(error: UserError) -> int:
    """Print ``error`` on rank 0 only, because without a session all processes raise the same error.

    Returns the exit code.
    """
    return report_alone(error, is_heard=speaks())


def report_alone(error: UserError | TrainingFailed | StopRequested, *, is_heard: bool) -> int:
    """Print the error that ended this process before it joined the others. Return the exit code.

    ``is_heard``: whether this process is one that prints.
    """
    if isinstance(error, StopRequested):
        if is_heard:
            say_why(f"stopped: {error} while the processes were joining; run the same command to resume")
    elif is_heard:
        say_why(f"{'error' if isinstance(error, UserError) else 'failed'}: {error}")
    else:
        with suppress(KeyboardInterrupt):
            time.sleep(_TORCHRUN_ENDS_ALL_SECONDS)
    return exit_code_of(error)


def say_why(line: str) -> None:
    """Print ``line`` to standard error."""
    _print_error(printable(line))


def say_stopped(reason: str) -> None:
    """Print why the run stopped, and how to resume it."""
    say_why(f"stopped: {reason}; run the same command to resume")


def print_traceback(error: BaseException) -> None:
    """Print ``error`` with its traceback to standard error."""
    _print_error("".join(traceback.format_exception(error)).rstrip("\n"))


def _print_error(text: str) -> None:
    with suppress(OSError, ValueError):  # the reader has closed the pipe, or the file is on a full disk
        print(text, file=sys.stderr, flush=True)
    tell_launcher(said=text[-_MOST_TOLD_CHARACTERS:])


def leave(code: int) -> NoReturn:
    """End the process at once.

    Gloo's threads can abort an interpreter that is shutting down (https://github.com/pytorch/pytorch/issues/179291),
    which would turn success into exit code -6.
    """
    code = code_for_agent(code)
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):  # the reader has closed the pipe
            stream.flush()
    os._exit(code)


def is_consequence(reason: str) -> bool:
    """Return whether a ``Failure``'s ``reason`` only says that another rank hangs or is gone."""
    return reason.startswith((_SILENCE, _END_OF_ANOTHER))


def is_end_of_another(reason: str) -> bool:
    """Return whether a ``Failure``'s ``reason`` only says that another rank is gone."""
    return reason.startswith(_END_OF_ANOTHER)


def is_broken_off(error: RuntimeError) -> bool:
    """Return whether ``error`` is the message of Gloo or NCCL that a connection to another rank was closed."""
    return any(words in in_one_line(error) for words in _BROKEN_OFF)


class Cause:
    """The reason why the run ended, as far as this rank knows."""

    def __init__(
        self, rank: int, local_ranks: range, section: LaunchSection, signals: Signals, exchange: Exchange
    ) -> None:
        """``local_ranks``: the ranks on this machine."""
        self.is_reported = False
        """Whether the root cause was reported; consequences are not reported."""
        self.ended_run = False
        """Whether an error ended the work of this rank."""
        self.first_step_is_done = False
        self.hears_of_losses = False
        """Whether the watchdog sets ``lost`` if a rank is gone."""
        self.lost: str | None = None
        """Clause about the rank whose process has ended without an error message."""
        self.processes: list[int] = []
        """Process ids by rank. An id is valid on the machine of its rank."""
        self._local_ranks = local_ranks
        self._rank = rank
        self._section = section
        self._signals = signals
        self._exchange = exchange
        self._failure: Failure | None = None

    def record(self, rank: int, reason: str, exit_code: int) -> None:
        """Record the root cause, which was reported; later failures are consequences and are not reported again."""
        self._failure, self.is_reported = Failure(rank, reason, exit_code), True

    def first(self, error: BaseException) -> Failure:
        """Return the failure that ended the run: ``error`` of this rank, unless another rank failed before."""
        if self._failure is None:
            mine = self._failure = self.of(error)
            try:
                self._failure = Failure(*self._exchange.first("failure", mine))
            except RuntimeError:  # the store ended with its host
                self._failure = self._without_store(mine)
        return self._failure

    def _without_store(self, mine: Failure) -> Failure:
        """Return ``mine``, unless it is a consequence of the launcher's end while there is nothing to save.

        There is nothing to save before the first step and in a rollback.
        """
        if mine.exit_code == EXIT_MISTAKE or (self.first_step_is_done and not is_consequence(mine.reason)):
            return mine
        if self.hears_of_losses and is_end_of_another(mine.reason) and first_node_refuses():
            return mine._replace(reason=f"{_END_OF_ANOTHER}: {first_node_is_gone()} refuses connections")
        time.sleep(CONNECTIONS_CLOSE_SECONDS)  # torchrun's connections close before the kernel reports its end
        end = self._signals.end_of_parent
        when = "" if self.first_step_is_done else " before the first step"
        return mine if end is None else Failure(self._rank, f"{end}{when}", EXIT_STOPPED)

    def of(self, error: BaseException) -> Failure:
        """Return ``error`` as a failure of this rank, without an exchange with other ranks."""
        if not isinstance(error, StopRequested):
            reason = self._reason(error)
            if self._signals.is_overdue and not self.first_step_is_done and is_consequence(reason):
                return Failure(self._rank, f"{self._signals.deadline} before the first step", EXIT_STOPPED)
            if is_end_of_another(reason) and (lost := self._await_loss()) is not None:
                reason = f"{_END_OF_ANOTHER}: {lost}"
            # A hang is resumable, whether the watchdog or the timeout of a collective notices it first.
            return Failure(self._rank, reason, EXIT_STOPPED if reason.startswith(_SILENCE) else exit_code_of(error))
        asked, when = str(error), "" if self.first_step_is_done else " before the first step"
        if not asked.startswith("SIG"):  # the same on every rank
            return Failure(self._rank, f"{asked}{when}", EXIT_STOPPED)
        for peer in self._local_ranks if self.processes else ():
            # torchrun sends SIGTERM to all ranks when one has died: that is not a request to stop.
            if not is_running(self.processes[peer]):
                return Failure(self._rank, f"rank {peer} died without an error message{when}", EXIT_FAILED)
        where = f" on rank {self._rank}" if len(self.processes) > 1 else ""
        return Failure(self._rank, f"{asked}{where}{when}", EXIT_STOPPED)

    def _await_loss(self) -> str | None:
        """Return the clause on the lost rank, which the watchdog knows after about four seconds."""
        deadline = time.monotonic() + _LOSS_KNOWN_SECONDS * self.hears_of_losses
        while self.lost is None and time.monotonic() < deadline and not self._is_reported_elsewhere():
            time.sleep(_LOOK_SECONDS)
        return self.lost

    def _is_reported_elsewhere(self) -> bool:
        try:
            return self._exchange.has("failure")
        except RuntimeError:  # the store ended with its host
            return True

    def let_end_first(self, rank: int) -> None:
        """Wait until ``rank``, which reports the error, has exited: the launcher stops all ranks when one exits."""
        with suppress(KeyboardInterrupt):
            for _ in range(int(_MOST_WAITED_SECONDS / _LOOK_SECONDS)):
                if rank in self._local_ranks and self.processes and not is_running(self.processes[rank]):
                    return
                time.sleep(_LOOK_SECONDS)

    def _reason(self, error: BaseException) -> str:
        text = in_one_line(error)
        if isinstance(error, RuntimeError) and any(words in text for words in _NO_ANSWER):
            patience = f"launch.step_timeout_seconds={self._section.step_timeout_seconds:g}"
            return f"{_SILENCE} in time ({patience}): {text}"
        if isinstance(error, RuntimeError) and is_broken_off(error):
            return f"{_END_OF_ANOTHER}, or the network connection to it broke: {text}"
        return text
