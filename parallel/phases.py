"""Where the time of a step goes: marks at the borders of its phases, set in a step now and then.

On a GPU a mark is an event in the stream that computes, so phases are times of the device, and nothing is waited for
until the step is read. On a CPU it is the clock. Each moment of a marked step belongs to one phase: the parts add up.
"""

import time
from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

PHASES = ("data", "forward", "backward", "communication", "optimizer", "host")

_Mark = float | torch.cuda.Event


class Phases:
    """The phases of a marked step; in all others a mark costs one comparison."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._marks: list[tuple[str, _Mark]] | None = None
        self._marked: list[tuple[str, _Mark]] = []
        self._before_waits: list[str] = []

    @property
    def are_marked(self) -> bool:
        """Whether this step is marked."""
        return self._marks is not None

    def begin(self) -> None:
        """Mark the step that begins now, with waiting for its data."""
        self._marks, self._before_waits = [], []
        self.enter("data")

    def enter(self, phase: str) -> None:
        """What comes from now on is ``phase``, one of ``PHASES``."""
        if self._marks is not None:
            self._marks.append((phase, self._now()))

    def begin_wait(self) -> None:
        """Until ``end_wait``, what comes is communication, within whatever phase this is."""
        if self._marks is not None:
            self._before_waits.append(self._marks[-1][0])
            self.enter("communication")

    def end_wait(self) -> None:
        """Go on with the phase that was interrupted."""
        if self._marks is not None and self._before_waits:
            self.enter(self._before_waits.pop())

    def wait_after(self, tensors: Sequence[Tensor]) -> list[RemovableHandle]:
        """Once backward has computed the gradients of all ``tensors``, what comes is communication.

        Remove the hooks after that backward. (``register_multi_grad_hook`` allows for tensors that get no gradient, at
        ten times the cost. Where one gets none here, the wait is taken for backward.)
        """
        missing = len(tensors)

        def arrived(_: Tensor) -> None:
            nonlocal missing
            missing -= 1
            if not missing:
                self.enter("communication")

        return [tensor.register_hook(arrived) for tensor in tensors]

    def end(self) -> None:
        """The step is done; if it was marked, it can be read."""
        if self._marks is not None:
            self.enter("host")
            self._marked, self._marks = self._marks, None

    def take(self) -> dict[str, float] | None:
        """Seconds of each phase of the step that was marked since this was last asked; None: there was none.

        On a GPU, ask when the results of that step have been read: the events lie before them.
        """
        if not self._marked:
            return None
        seconds = dict.fromkeys(PHASES, 0.0)
        for (phase, start), (_, end) in pairwise(self._marked):
            seconds[phase] += _seconds_between(start, end)
        self._marked = []
        return seconds

    def _now(self) -> _Mark:
        if self._device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


def _seconds_between(start: _Mark, end: _Mark) -> float:
    if isinstance(start, float) and isinstance(end, float):
        return end - start
    assert isinstance(start, torch.cuda.Event)
    assert isinstance(end, torch.cuda.Event)
    return start.elapsed_time(end) / 1000
