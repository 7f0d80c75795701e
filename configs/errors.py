"""How a run can end short of finishing, and the exit codes that say so."""

from collections.abc import Iterator
from contextlib import contextmanager

EXIT_FINISHED, EXIT_FAILED, EXIT_STOPPED, EXIT_MISTAKE = 0, 70, 75, 78


class UserError(Exception):
    """A mistake in the command, the config or the surroundings that the user can mend.

    It reaches the user as one ``error:`` line and exit code 78, never as a traceback, so the message carries
    what was wrong, where, every number involved, and an override to paste. Several mistakes, an argument each, have a
    line each.
    """

    def __str__(self) -> str:
        if len(self.args) < 2:
            return super().__str__()
        return f"{len(self.args)} mistakes:\n  " + "\n  ".join(map(str, self.args))


@contextmanager
def noted(mistakes: list[str]) -> Iterator[None]:
    """Put a mistake that ends what is done here among the others, to be told with them."""
    try:
        yield
    except UserError as error:
        mistakes += error.args


class TrainingFailed(Exception):
    """Training cannot go on, for a reason that a traceback would not explain. One line, exit code 70."""


class TrainingStopped(TrainingFailed):
    """Training cannot go on here, and can from its newest checkpoint. One line, exit code 75."""


class StopRequested(BaseException):
    """A signal asked to stop before there was anything to save. Its name; exit code 75.

    Like KeyboardInterrupt no ``Exception``: nothing that mends errors may take it for one.
    """
