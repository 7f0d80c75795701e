"""Durations of steps, which determine when ranks check for a request to stop and how long stopping takes."""

import time
from collections import deque

import torch

from serried.trainer.monitor.time_to_stop import micro_batches_per_look, seconds_to_stop

_REMEMBERED_STEPS, _AVERAGED_STEPS = 10, 2


class StepClock:
    """Durations of one rank's steps, and of the work between two checks for a request to stop."""

    def __init__(self, device: torch.device, *, had_steps: bool = False) -> None:
        """``had_steps``: whether this process had completed steps before, see ``has_steps``."""
        self._device = device
        self._had_steps = had_steps
        self._seconds: deque[float] = deque(maxlen=_REMEMBERED_STEPS)
        """Durations of the latest steps."""
        self._look_seconds: deque[float] = deque(maxlen=_REMEMBERED_STEPS)
        """Longest time between two checks in each of the latest steps. Empty while steps are short."""
        self._is_first = True
        """Whether ``_seconds`` is empty or holds only a first step, which compiles."""
        self._of_all_ranks: float | None = None
        """Duration of a recent step, equal on all ranks; None if not known yet."""
        self._under_way_seconds = 0.0
        """Time from the start of the current step to its vote."""
        self._queued: torch.Event | None = None
        """Event at the end of the work that was queued on the GPU at the latest check."""
        self.restart()

    @property
    def has_steps(self) -> bool:
        """Whether this process has completed a step."""
        return self._had_steps or bool(self._seconds)

    @property
    def longest_seconds(self) -> float:
        """Duration of the longest of the latest steps; 0 before the first."""
        return max(self._seconds, default=0.0)

    def restart(self) -> None:
        """Start measuring the next step now."""
        self._began = self._looked_at = time.monotonic()
        self._voted_at = deque([self._began], maxlen=_AVERAGED_STEPS + 1)

    def vote(self) -> float:
        """Record a vote of this rank, near the end of a step, and return the duration of a step.

        The duration is the mean time between the latest votes. This also holds for a GPU, whose host waits for the
        votes of earlier steps and so is not faster.
        """
        now = time.monotonic()
        self._voted_at.append(now)
        self._under_way_seconds = now - self._began
        return (now - self._voted_at[0]) / (len(self._voted_at) - 1)

    def end_step(self, of_all_ranks: float | None) -> None:
        """Record the end of a step.

        ``of_all_ranks``: mean over all ranks of the results of ``vote``, in this step or, on a GPU, the previous one.
        None if not known.
        """
        now = time.monotonic()
        if self._is_first and self._seconds:
            self._seconds.clear()
            if len(self._look_seconds) > 1:
                self._look_seconds.popleft()
            self._is_first = False
        self._seconds.append(now - self._began)
        self._began, self._under_way_seconds = now, 0.0
        self._of_all_ranks = self._of_all_ranks if of_all_ranks is None else of_all_ranks

    def begin_step(self, micro_batches: int) -> int | None:
        """Return the number of micro-batches between two checks in the next step, equal on all ranks.

        The result is None if the step has no checks. See ``time_to_stop.micro_batches_per_look``.
        """
        per_look = micro_batches_per_look(self._of_all_ranks, micro_batches)
        if per_look is None:
            self._look_seconds.clear()
            self._looked_at = time.monotonic()
        return per_look

    def look(self, *, begins_step: bool) -> None:
        """Record a check. On a GPU, first wait until the work queued at the previous check is done.

        Otherwise the host would be steps ahead, and would launch all micro-batches of a step before the first is
        computed.
        """
        if self._device.type != "cpu":
            before, self._queued = self._queued, torch.Event(self._device.type)
            self._queued.record()
            if before is not None:
                before.synchronize()
        now = time.monotonic()
        seconds, self._looked_at = now - self._looked_at, now
        if begins_step or not self._look_seconds:
            self._look_seconds.append(seconds)
        else:
            self._look_seconds[-1] = max(self._look_seconds[-1], seconds)

    def seconds_to_stop(self, save_seconds: float, every: int, *, is_behind: bool) -> float:
        """Return the time until the run is saved, if it continues now and stops at the next opportunity.

        See ``time_to_stop.seconds_to_stop``.
        """
        look_seconds = None
        if self._look_seconds:
            look_seconds = max((time.monotonic() - self._looked_at, *self._look_seconds))
        return seconds_to_stop(
            max((self._under_way_seconds, *self._seconds)), save_seconds,
            0 if self._is_first else every,  # the duration of steps is not known yet
            look_seconds=look_seconds, is_delayed=self._device.type != "cpu", is_behind=is_behind,
        )  # fmt: skip
