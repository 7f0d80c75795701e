"""The phase that the training thread is in, and in some steps how long each phase took.

On a GPU a mark is an event in the stream that computes, so phases are times of the device, and nothing is waited for
until the step is read. On a CPU it is the clock. Each moment of a marked step belongs to one phase: the phases add up.
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
    """One phase at a time. Entering one is an attribute write, unless there is a listener or the step is marked."""

    def __init__(self) -> None:
        self.now = ""
        """The phase entered last; waiting for other ranks is part of it."""
        self.peers: tuple[int, ...] = ()
        """Ranks from which a message is awaited, in a pipeline."""
        self.listener: Callable[[str], None] | None = None
        """Called with the name of each phase that is entered."""
        self._device = torch.device("cpu")
        self._marks: list[tuple[str, _Mark]] | None = None
        self._marked: list[tuple[str, _Mark]] = []

    def begin(self, device: torch.device) -> None:
        """Mark the step that begins now, on ``device``, in phase ``data``."""
        self._device, self._marks = device, []
        self._mark(DATA)

    def enter(self, name: str) -> None:
        """Begin phase ``name``."""
        self.now = name
        if self.listener is not None:
            self.listener(name)
        if self._marks is not None:
            self._mark(name if name in PHASES else HOST)

    def end(self) -> None:
        """End the step; if it was marked, ``take`` returns it."""
        if self._marks is not None:
            self._mark(HOST)
            self._marked, self._marks = self._marks, None

    def take(self) -> dict[str, float] | None:
        """Return the seconds of each phase of the step marked since the last call; None if there was none.

        On a GPU, call it after the results of that step have been read: the events come before them.
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
