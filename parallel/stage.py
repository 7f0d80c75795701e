"""What the training thread computes at present, for whoever reports, traces or times it."""

from collections.abc import Callable

FORWARD, BACKWARD, OPTIMIZER = "forward", "backward", "optimizer"


class Stage:
    """One name at a time. To begin the next is an attribute write, and a call where somebody listens."""

    def __init__(self) -> None:
        self.now = ""
        self.listener: Callable[[str], None] | None = None

    def enter(self, name: str) -> None:
        """Begin ``name``; what was before it has ended."""
        self.now = name
        if self.listener is not None:
            self.listener(name)
