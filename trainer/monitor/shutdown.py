"""Joint decisions of all ranks to stop or to save, on requests from signals, the file ``control`` or the clock.

Every rank votes with each step. The votes are reduced together with the step's sums, so they need no additional
collective and no wait for the device. All ranks read the sum of the same step, so they make the same decision after the
same step.

In a step of several seconds, the ranks also vote about once a second, on the host and between two micro-batches. If any
rank must stop, all ranks drop this step, which has changed nothing yet, and the run ends with the previous step.
"""

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from enum import IntEnum
from functools import partial
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from serried.configs.errors import TrainingStopped
from serried.configs.schema.sections import RunConfig
from serried.parallel.layout.process_groups import gather_plain
from serried.parallel.runner import StepDropped
from serried.records.run_folder import RunFolder
from serried.runtime.console import Console
from serried.runtime.session import Session
from serried.trainer.monitor.control_file import Control
from serried.trainer.monitor.step_clock import StepClock

_T = TypeVar("_T")


class Action(IntEnum):
    """Decision after a step. The values are votes of the ranks: the largest that their sum reaches is the decision."""

    GO_ON = 0
    SAVE = 1
    STOP = 10**6  # more than all ranks' votes for SAVE


_FAILS_WITHIN_SECONDS = 10.0
_FAILED = 2.0
"""Vote of a rank whose evaluation failed. Otherwise a rank votes 1 to stop and 0 to continue."""


class PeerFailed(Exception):
    """Raised if the evaluation failed on another rank, which has recorded the reason."""


_SOON = 0.1
"""The next save is due soon if it is due within this share of ``checkpoint.every_minutes``."""


class Shutdown:
    """One rank's part in the joint decision to stop or to save. A context manager around the training loop."""

    def __init__(
        self,
        config: RunConfig,
        session: Session,
        console: Console,
        folder: RunFolder | None,
        save_seconds: Callable[[], float],
        *,
        had_steps: bool = False,
    ) -> None:
        """
        Args:
            folder: Run folder, on rank 0 only.
            save_seconds: Returns the duration of a save.
            had_steps: Whether this process had completed steps before a loss.
        """
        self.action = Action.GO_ON
        """Decision of all ranks at this step boundary."""
        self.reason: str | None = None
        """Reason why the run stops, once the ranks have agreed; the same on every rank."""
        self._config = config
        self._session = session
        self._console = console
        self._save_seconds = save_seconds
        self._control = Control(folder, console) if folder is not None else None
        self._deadline: str | None = None
        self._clock = StepClock(session.device, had_steps=had_steps)
        self._travelling: _Votes | None = None
        self._saved_at = time.monotonic()
        """Start time of the latest save, or of training before the first save."""
        self._is_computing = False
        """Whether a batch of ``unless_stopped`` is being computed."""

    def __enter__(self) -> "Shutdown":
        self._session.signals.hold()
        self._session.signals.acknowledge = partial(
            self._console.say, "stopping   SIGINT: after this micro-batch or step (Ctrl-C again: end without saving)"
        )
        if self._control is not None:
            self._control.start()
        self._saved_at = time.monotonic()
        self._clock.restart()
        return self

    def __exit__(self, *_: object) -> None:
        self._session.signals.acknowledge = None
        if self._control is not None:
            self._control.end()

    @property
    def requests(self) -> tuple[bool, bool]:
        """Whether the file ``control``, which is removed when it is read, asked to stop, and to save."""
        control = self._control
        return (False, False) if control is None else (control.asks_to_stop, control.asks_to_save.is_set())

    def repeat(self, requests: tuple[bool, bool]) -> None:
        """Make the ``requests`` of the training loop before a loss again."""
        if self._control is not None:
            self._control.asks_to_stop = requests[0]
            if requests[1]:
                self._control.asks_to_save.set()

    @property
    def stops(self) -> bool:
        """Whether all ranks have agreed to stop."""
        return self.action is Action.STOP

    @property
    def has_steps(self) -> bool:
        """Whether a step has been completed since this process started. Otherwise there is nothing to save."""
        return self._clock.has_steps

    def end_early(self, reason: str) -> None:
        """Make this step the last one. Call it on all ranks at the same step, with the same reason."""
        self.action, self.reason = Action.STOP, reason

    def check_folder(self) -> None:
        """Check that the run folder still belongs to this run. Call it before anything is written there.

        Raises:
            TrainingStopped: the run folder was removed, renamed or replaced, or the run in the bucket taken over.
        """
        if self._control is not None:
            self._control.look_at_folder()
            self._leave_lost_folder()

    def saves(self) -> None:
        """Record that a save begins. This restarts the clock of ``checkpoint.every_minutes``."""
        self._saved_at = time.monotonic()

    def before_micro_batches(self, step: int, count: int, fewest: int) -> Callable[[int], None] | None:
        """Return a function to call before each of the ``count`` micro-batches of ``step``, with its index.

        The result is None if steps are short: the run then stops only between steps.

        ``fewest``: number of micro-batches on the ranks that have the fewest. There is no vote before a micro-batch
        that only some ranks have.

        The function is a collective call on the host. If a rank must stop, it raises ``StepDropped`` on all ranks, and
        sets ``stops``.
        """
        per_look = self._clock.begin_step(fewest)
        if per_look is None:
            return None
        looks = range(0, fewest, per_look)
        return partial(self._look, step, count, looks)

    def _look(self, step: int, count: int, looks: range, index: int) -> None:
        if index not in looks:
            return
        self._clock.look(begins_step=index == 0)
        # Before the first step there is nothing to save, so time limits do not count.
        mine = self._mine() if self.has_steps else self._asked()
        if self._agreed(0.0 if mine is None else 1.0):
            self.action = Action.STOP
            saving = f"saving step {step - 1}" if self.has_steps else "there is nothing to save yet"
            dropped = f"step {step} is dropped after micro-batch {index} of {count}, " if index else ""
            self._settle(f"{dropped}{saving}")
            raise StepDropped(self.reason)

    def vote(self, steps_to_save: int) -> tuple[float, float]:
        """Return this rank's vote for the current step: an action, and the duration of a step.

        ``steps_to_save``: number of steps until the next regular save.

        Raises:
            TrainingStopped: the run folder was removed, renamed or replaced.
        """
        self._leave_lost_folder()
        seconds = self._clock.vote()
        return float(self._action(steps_to_save)), seconds

    def _action(self, steps_to_save: int) -> Action:
        if self._mine() is not None:
            return Action.STOP
        asked = [self._session.signals.asks_to_save]
        asked += [self._control.asks_to_save] if self._control is not None else []
        for request in asked:
            if request.is_set():
                request.clear()
                return Action.SAVE
        if self._control is not None and self._is_long_unsaved(steps_to_save):
            self.saves()  # on a GPU, another vote follows before the save begins
            return Action.SAVE
        return Action.GO_ON

    def _is_long_unsaved(self, steps_to_save: int) -> bool:
        """Return whether to save because of the time since the last save.

        The result is False if a save is due soon, since that save would wait for this one.
        """
        seconds, unsaved = 60 * self._config.checkpoint.minutes_between, time.monotonic() - self._saved_at
        is_due_soon = steps_to_save * self._clock.longest_seconds < _SOON * seconds
        return 0 < seconds <= unsaved and not is_due_soon

    def _leave_lost_folder(self) -> None:
        if self._control is not None and self._control.has_lost_folder:
            self._control.check_claim()
            raise TrainingStopped(
                f"the run folder {self._config.run.dir} was removed, renamed or replaced during training; the progress "
                "since the last checkpoint is lost"
            )

    def count(self, votes: Tensor) -> None:
        """Set ``action`` from the sum of all ranks' votes in the step that just ended.

        ``votes``: the sum, two values on the device. On a GPU, the sum of the previous step is used instead, so that
        the host does not wait for the newest step.
        """
        arrived: Tensor | _Votes | None = votes
        if votes.device.type != "cpu":
            arrived, self._travelling = self._travelling, _Votes(votes)
        total, seconds = (0.0, None) if arrived is None else arrived.tolist()
        self._clock.end_step(None if seconds is None else seconds / self._session.world_size)
        self.action = max(action for action in Action if action <= total)
        if self.stops and self.reason is None:  # the reason is already known if the run has rolled back in between
            self._settle()

    def unless_stopped(self, batches: Iterable[_T]) -> Iterator[_T]:
        """Yield ``batches`` until a rank must stop. All ranks end at the same batch, and ``stops`` is set.

        The ranks vote on the host before each batch, through Gloo. On a GPU, at most two batches are in flight;
        otherwise the host would have launched all batches before the first vote.
        """
        done: deque[torch.Event] = deque()
        for batch in batches:
            self._clock.restart()  # the time since the last step is not the time of work between two checks
            if self._agreed(0.0 if self._mine() is None else 1.0):
                self.action = Action.STOP
                self._settle()
                return
            self._is_computing = True
            yield batch
            self._is_computing = False
            if self._session.device.type != "cpu":
                done.append(torch.Event(self._session.device.type))
                done[-1].record()
                if len(done) == 2:
                    done.popleft().synchronize()

    def settle_evaluation(self) -> None:
        """Agree with all ranks that an evaluation is complete. This is a collective call on the host.

        Raises:
            PeerFailed: the evaluation failed on another rank.
        """
        self._agreed(0.0)
        self._clock.restart()  # the next step begins here

    def share_failure(self, error: Exception, step: int) -> bool:
        """Report to the other ranks that the evaluation after ``step`` failed on this rank with ``error``.

        The other ranks receive the report in the vote before their next batch. If this rank failed inside the model,
        they may wait for it there. The result is then True only if all ranks failed inside the model.

        Returns:
            Whether all ranks have received the report and left the evaluation.
        """
        if isinstance(error, PeerFailed):
            return True
        self._session.cause.first(error)
        try:
            if self._is_computing:
                self._is_computing = False
                return self._session.exchange.all_arrive(f"evaluation/{step}", _FAILS_WITHIN_SECONDS)
            self._agreed(_FAILED)
        except RuntimeError:  # the other ranks are gone
            return False
        return True

    def _agreed(self, vote: float) -> bool:
        """Return whether any rank votes to stop.

        Raises:
            PeerFailed: the evaluation failed on another rank.
        """
        votes = torch.tensor(vote)
        if dist.is_initialized():
            dist.all_reduce(votes, op=dist.ReduceOp.MAX)
        if votes.item() == _FAILED != vote:
            raise PeerFailed("the evaluation failed on another rank")
        return bool(votes.item())

    def _mine(self) -> str | None:
        """Return why this rank wants to stop; None if it does not."""
        if (asked := self._asked()) is not None or self._control is None:
            return asked
        self._deadline = self._deadline or self._overdue()
        return self._deadline

    def _asked(self) -> str | None:
        """Return the source of a request to stop that this rank has received; None if there is none.

        Time limits are not requests.
        """
        if (signal := self._session.signals.received) is not None:
            return signal
        return "control: stop" if self._control is not None and self._control.asks_to_stop else None

    def _overdue(self) -> str | None:
        minutes = self._config.trainer.max_minutes
        if minutes is not None and time.monotonic() - self._session.started >= 60 * minutes:
            return f"trainer.max_minutes={minutes:g}"
        deadline = self._session.signals.deadline
        if deadline is not None and deadline.is_near(self._needed_seconds()):
            return str(deadline)
        return None

    def _needed_seconds(self) -> float:
        """Return the time that a stop needs, in seconds. With less time left, this vote must be to stop."""
        is_behind = self._travelling is not None and not self._travelling.has_arrived
        return self._clock.seconds_to_stop(self._save_seconds(), self._config.checkpoint.every, is_behind=is_behind)

    def _settle(self, then: str = "saving, then the run ends") -> None:
        """Set the reason on every rank and print it with ``then``, a clause on the next action.

        This is a collective call, made after the ranks have agreed to stop.
        """
        self.reason = _in_words(gather_plain(self._mine()))
        self._session.signals.acknowledge = None
        self._console.say(f"stopping   {self.reason}: {then}")


def _in_words(reasons: list[str | None]) -> str:
    """Return the first reason that is not a signal, since a signal may be a consequence.

    If all reasons are signals, return the signal and its ranks.
    """
    first = min((reason for reason in reasons if reason), key=lambda reason: reason.startswith("SIG"))
    alike = [rank for rank, reason in enumerate(reasons) if reason == first]
    if len(reasons) == 1 or not first.startswith("SIG"):
        return first
    if len(alike) == len(reasons):
        return f"{first} on all ranks"
    more = f" and {len(alike) - 1} more" if len(alike) > 1 else ""
    return f"{first} on rank {alike[0]}{more}"


class _Votes:
    """Votes that are being copied from the GPU to the host."""

    def __init__(self, numbers: Tensor) -> None:
        self._numbers = numbers.to("cpu", non_blocking=True)  # in pinned memory
        self._arrived = torch.Event(numbers.device.type)
        self._arrived.record()

    @property
    def has_arrived(self) -> bool:
        return bool(self._arrived.query())

    def tolist(self) -> list[float]:
        self._arrived.synchronize()
        return self._numbers.tolist()
