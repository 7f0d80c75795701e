"""Exceptions that end a run before it is finished, and exit codes."""

from serried.configs.formats import printable

EXIT_FINISHED, EXIT_FAILED, EXIT_STOPPED, EXIT_MISTAKE = 0, 70, 75, 78


class UserError(Exception):
    """A mistake in the command, the config or the environment that the user can fix.

    It is printed as one ``error:`` line with exit code 78, never as a traceback. The message names the wrong value, its
    source, every number involved, and an override to paste. Values from the user cannot add lines or control the
    terminal.

    Args:
        mistakes: One or several messages, printed on one line each.
        head: Line above several messages.

    Example::

        raise serried.UserError(f"task.width={width} is not divisible by 8; use task.width={width // 8 * 8}")
    """

    def __init__(self, *mistakes: object, head: str = "") -> None:
        super().__init__(*mistakes)
        self.head = head

    def __str__(self) -> str:
        mistakes = [" ".join(printable(str(mistake)).split("\n")) for mistake in self.args]
        if len(mistakes) < 2:
            return "".join(mistakes)
        return f"{self.head or f'{len(mistakes)} mistakes'}:\n  " + "\n  ".join(mistakes)

    def _render_traceback_(self) -> list[str]:
        """Return the line that IPython prints in place of a traceback in a notebook."""
        return [f"error: {self}"]


class TrainingFailed(Exception):
    """Raised if training cannot continue, for a reason that a traceback would not explain. One line, exit code 70."""

    def _render_traceback_(self) -> list[str]:
        """Show one line in a notebook instead of a traceback, like ``UserError``."""
        return [f"failed: {self}"]


class TrainingStopped(TrainingFailed):
    """Raised if training must stop, but can be resumed from its newest checkpoint. One line, exit code 75."""


class StopRequested(BaseException):
    """A signal asked to stop before anything could be saved, or ended torch's compiler. The argument is the signal's
    name. Exit code 75.

    Like KeyboardInterrupt it is not an ``Exception``: code that handles errors must not catch it.
    """
