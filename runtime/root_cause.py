"""Root cause of a failed run: the first failure of any rank. The other ranks' errors are its consequences."""

import os
import time
from contextlib import suppress

from serried.configs.errors import EXIT_FAILED, EXIT_MISTAKE, EXIT_STOPPED, StopRequested
from serried.configs.schema.sections import LaunchSection
from serried.runtime.exit import Failure, exit_code_of, in_one_line
from serried.runtime.signals import Signals
from serried.runtime.store import Exchange

CONNECTIONS_CLOSE_SECONDS = 0.2
_MOST_WAITED_SECONDS, _LOOK_SECONDS = 10.0, 0.05
_NO_ANSWER = (  # messages of Gloo and NCCL
    "Timed out waiting", "Application timeout", "Watchdog caught collective operation timeout",
)  # fmt: skip
_BROKEN_OFF = (
    "Connection closed by peer", "Connection reset by peer", "Broken pipe",
    "remote process exited or there was a network error",
)  # fmt: skip
_SILENCE, _END_OF_ANOTHER = "no answer from another process", "another process ended"


def is_consequence(reason: str) -> bool:
    """Return whether a ``Failure``'s ``reason`` only says that another rank hangs or is gone."""
    return reason.startswith((_SILENCE, _END_OF_ANOTHER))


def is_end_of_another(reason: str) -> bool:
    """Return whether a ``Failure``'s ``reason`` only says that another rank is gone."""
    return reason.startswith(_END_OF_ANOTHER)


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
        self.processes: list[int] = []
        """Process ids of all ranks, each on its own machine."""
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
        """Return ``mine``, unless it is a consequence of the launcher's end before there was anything to save, or in
        a rollback, in which there is nothing to save either."""
        if mine.exit_code == EXIT_MISTAKE or (self.first_step_is_done and not is_consequence(mine.reason)):
            return mine
        time.sleep(CONNECTIONS_CLOSE_SECONDS)  # torchrun's connections close before the kernel reports its end
        end = self._signals.end_of_parent
        when = "" if self.first_step_is_done else " before the first step"
        return mine if end is None else Failure(self._rank, f"{end}{when}", EXIT_STOPPED)

    def of(self, error: BaseException) -> Failure:
        """Return ``error`` as a failure of this rank, without asking the others."""
        if not isinstance(error, StopRequested):
            reason = self._reason(error)
            if self._signals.is_overdue and not self.first_step_is_done and is_consequence(reason):
                return Failure(self._rank, f"{self._signals.deadline} before the first step", EXIT_STOPPED)
            return Failure(self._rank, reason, exit_code_of(error))
        asked, when = str(error), "" if self.first_step_is_done else " before the first step"
        if not asked.startswith("SIG"):  # the same on every rank
            return Failure(self._rank, f"{asked}{when}", EXIT_STOPPED)
        for peer in self._local_ranks if self.processes else ():
            # torchrun sends SIGTERM to all ranks when one has died: that is not a request to stop.
            if not _is_running(self.processes[peer]):
                return Failure(self._rank, f"rank {peer} died without an error message{when}", EXIT_FAILED)
        where = f" on rank {self._rank}" if len(self.processes) > 1 else ""
        return Failure(self._rank, f"{asked}{where}{when}", EXIT_STOPPED)

    def let_end_first(self, rank: int) -> None:
        """Wait until ``rank``, which reports the error, has exited: the launcher stops all ranks when one exits."""
        with suppress(KeyboardInterrupt):
            for _ in range(int(_MOST_WAITED_SECONDS / _LOOK_SECONDS)):
                if rank in self._local_ranks and self.processes and not _is_running(self.processes[rank]):
                    return
                time.sleep(_LOOK_SECONDS)

    def _reason(self, error: BaseException) -> str:
        text = in_one_line(error)
        if isinstance(error, RuntimeError) and any(words in text for words in _NO_ANSWER):
            patience = f"launch.step_timeout_seconds={self._section.step_timeout_seconds:g}"
            return f"{_SILENCE} in time ({patience}): {text}"
        if isinstance(error, RuntimeError) and any(words in text for words in _BROKEN_OFF):
            return f"{_END_OF_ANOTHER}, or the network between them broke: {text}"
        return text


def _is_running(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    return True
