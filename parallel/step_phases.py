"""The current phase of the training thread and, for some steps, the duration of each phase.

On a GPU a mark is an event in the compute stream, so durations are device times, and nothing is synchronized until they
are read. On a CPU a mark is a clock reading. The phases of a marked step add up to the duration of the step.
"""

import time
from collections.abc import Callable
from itertools import pairwise

import torch

DATA, FORWARD, BACKWARD, PIPELINE, OPTIMIZER, HOST = PHASES = (
    "data", "forward", "backward", "pipeline", "optimizer", "host",
)  # fmt: skip
"""Phases into which the time of a step is split.

``pipeline`` is the time in which a stage waits for others. Any other phase entered within a step counts as ``host``.
"""

_Mark = float | torch.Event


class Phases:
    """The current phase. Entering a phase only sets an attribute, unless there is a listener or the step is marked."""

    def __init__(self) -> None:
        self.now = ""
        """The current phase. Time spent waiting for other ranks is part of it."""
        self.peers: tuple[int, ...] = ()
        """Ranks that this rank waits for, in a pipeline."""
        self.listener: Callable[[str], None] | None = None
        """Called with the name of each new phase."""
        self._device = torch.device("cpu")
        self._marks: list[tuple[str, _Mark]] | None = None
        self._marked: list[tuple[str, _Mark]] = []

    def begin(self, device: torch.device) -> None:
        """Start a marked step on ``device``, in phase ``data``."""
        self._device, self._marks = device, []
        self._mark(DATA)

    def enter(self, name: str) -> None:
        """Enter phase ``name``."""
        self.now = name
        if self.listener is not None:
            self.listener(name)
        if self._marks is not None:
            self._mark(name if name in PHASES else HOST)

    def end(self) -> None:
        """End the step. If it was marked, ``take`` returns its durations."""
        if self._marks is not None:
            self._mark(HOST)
            self._marked, self._marks = self._marks, None

    def take(self) -> dict[str, float] | None:
        """Return the seconds of each phase of the step marked since the last call; None if there was none.

        On a GPU, call it after reading the results of that step, so that its events have completed.
        """
        if not self._marked:
            return None
        marked = {phase for phase, _ in self._marked}
        seconds = {phase: 0.0 for phase in PHASES if phase != PIPELINE or phase in marked}
        for (phase, start), (_, end) in pairwise(self._marked):
            seconds[phase] += _seconds_between(start, end)
        self._marked = []
        return seconds

    def _mark(self, phase: str) -> None:
        assert self._marks is not None
        self._marks.append((phase, self._moment()))

    def _moment(self) -> _Mark:
        if self._device.type == "cpu":
            return time.perf_counter()
        event = torch.Event(self._device.type, enable_timing=True)
        event.record()
        return event


def _seconds_between(start: _Mark, end: _Mark) -> float:
    if isinstance(start, float) and isinstance(end, float):
        return end - start
    assert isinstance(start, torch.Event)
    assert isinstance(end, torch.Event)
    return start.elapsed_time(end) / 1000
