"""Signals that come while ``train.py`` is imported and its config composed: seconds, where the disk is cold.

Imported first, for what it does. It imports next to nothing itself. Whoever trains, or starts others, has handlers of
its own from then on.
"""

import os
import signal
import sys
from contextlib import suppress
from types import FrameType

from serried.configs.errors import EXIT_STOPPED

LAUNCHER = "SERRIED_LAUNCHER"
"""Environment variable: the process that started this one, where that is ``launch=local``."""

_UNHANDLED = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: signal.SIG_DFL}  # nohup may ignore them


def _end(number: int, _: FrameType | None) -> None:
    """In one line instead of a traceback, with the exit code of whatever is stopped on request."""
    # The launcher says so itself; torchrun ends ranks by SIGTERM where another one has failed.
    is_told = LAUNCHER in os.environ or (number == signal.SIGTERM and "TORCHELASTIC_RUN_ID" in os.environ)
    if os.environ.get("RANK", "0") == "0" and not is_told:
        name = signal.Signals(number).name
        with suppress(OSError):  # whoever listened is gone
            os.write(2, f"stopped: {name} before training began; the same command starts it\n".encode())
    os._exit(EXIT_STOPPED)


def _is_program() -> bool:
    """Whether this process was started to train, and not as a test or a command that imports this."""
    main = sys.modules["__main__"]
    if (spec := getattr(main, "__spec__", None)) is not None:
        return bool(spec.name == "serried.program")
    return os.path.basename(getattr(main, "__file__", None) or "") == "train.py"  # noqa: PTH119


def end_in_one_line() -> None:
    """Make a signal end this process in one line from here on."""
    for number, handler in _UNHANDLED.items():
        if signal.getsignal(number) == handler:
            signal.signal(number, _end)


if _is_program():
    end_in_one_line()
