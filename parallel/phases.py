"""What the training thread is at: for whoever reports or traces it; in a step now and then, how long each part took.

On a GPU a mark is an event in the stream that computes, so phases are times of the device, and nothing is waited for
until the step is read. On a CPU it is the clock. Each moment of a marked step belongs to one phase: the parts add up.
"""

import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise

import torch
from torch import Tensor

DATA, FORWARD, BACKWARD, COMMUNICATION, OPTIMIZER, HOST = PHASES = (
    "data", "forward", "backward", "communication", "optimizer", "host"
)  # fmt: skip
"""What a step's time is split into. Anything else that is entered within a step is ``host``."""

_Mark = float | torch.cuda.Event


class Phases:
    """One phase at a time. To enter the next is an attribute write, where nobody listens and the step is not marked."""

    def __init__(self) -> None:
        self.now = ""
        """What was entered last; waits are part of what they interrupt."""
        self.listener: Callable[[str], None] | None = None
        """Told of what is entered."""
        self._device = torch.device("cpu")
        self._marks: list[tuple[str, _Mark]] | None = None
        self._marked: list[tuple[str, _Mark]] = []
        self._before_waits: list[str] = []

    @property
    def are_marked(self) -> bool:
        """Whether this step is marked."""
        return self._marks is not None

    def begin(self, device: torch.device) -> None:
        """Mark the step that begins now, with waiting for its data; it is computed on ``device``."""
        self._device, self._marks, self._before_waits = device, [], []
        self._mark(DATA)

    def enter(self, name: str) -> None:
        """What comes from now on is ``name``."""
        self.now = name
        if self.listener is not None:
            self.listener(name)
        if self._marks is not None:
            self._mark(name if name in PHASES else HOST)

    def wait(self) -> None:
        """What comes until the next phase is communication."""
        if self._marks is not None:
            self._mark(COMMUNICATION)

    def begin_wait(self) -> None:
        """Until ``end_wait``, what comes is communication, within whatever phase this is."""
        if self._marks is not None:
            self._before_waits.append(self._marks[-1][0])
            self._mark(COMMUNICATION)

    def end_wait(self) -> None:
        """Go on with the phase that was interrupted."""
        if self._marks is not None and self._before_waits:
            self._mark(self._before_waits.pop())

    def wait_after(self, tensors: Sequence[Tensor]) -> "GradientWait":
        """Once backward has computed the gradients of all ``tensors``, what comes is communication."""
        return GradientWait(tensors, self.wait)

    def end(self) -> None:
        """The step is done; if it was marked, it can be read."""
        if self._marks is not None:
            self._mark(HOST)
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

    def _mark(self, phase: str) -> None:
        assert self._marks is not None
        self._marks.append((phase, self._moment()))

    def _moment(self) -> _Mark:
        if self._device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


class GradientWait:
    """Waits for the gradients of one backward. Remove it after that.

    (``register_multi_grad_hook`` allows for tensors that get no gradient, at ten times the cost. Where one gets none
    here, the end is not noticed.)
    """

    def __init__(self, tensors: Sequence[Tensor], at_the_end: Callable[[], None]) -> None:
        self.last: Tensor | None = None
        """Whose gradient came last; None: some have not come."""
        self._missing, self._at_the_end = len(tensors), at_the_end
        self._hooks = [tensor.register_hook(partial(self._arrived, tensor)) for tensor in tensors]

    def _arrived(self, tensor: Tensor, gradient: Tensor) -> None:
        del gradient
        self._missing -= 1
        if not self._missing:
            self.last = tensor
            self._at_the_end()

    def remove(self) -> None:
        """Take the hooks away."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()


def _seconds_between(start: _Mark, end: _Mark) -> float:
    if isinstance(start, float) and isinstance(end, float):
        return end - start
    assert isinstance(start, torch.cuda.Event)
    assert isinstance(end, torch.cuda.Event)
    return start.elapsed_time(end) / 1000
