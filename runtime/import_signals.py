"""Process setup before other imports: signal handlers, output encoding and garbage collection.

Importing ``train.py`` and composing its config take seconds on a cold disk, and signals may arrive then. This
module is imported first, for its side effects, and imports almost nothing itself. Code that trains or starts
processes later installs its own handlers.
"""

import gc
import io
import os
import signal
import sys
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType

from serried.configs.errors import EXIT_STOPPED, UserError

ASKING = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)
"""Signals that ask a run to stop: from preemption and torchrun, Ctrl-C, Slurm before a time limit, and a closed
terminal."""

LAUNCHER = "SERRIED_LAUNCHER"
"""Environment variable with the id of the ``launch=local`` process that started this process."""
EXIT_UNREPORTED = 74
"""Exit code for the ``launch=local`` process: a signal ended this process before training began, and nothing was
printed."""


def _end(number: int, _: FrameType | None) -> None:
    """End the process with one line instead of a traceback, and with the exit code of a requested stop."""
    if LAUNCHER in os.environ:
        os._exit(EXIT_UNREPORTED)
    # torchrun sends SIGTERM to the other ranks when one has failed.
    is_told = number == signal.SIGTERM and "TORCHELASTIC_RUN_ID" in os.environ
    if os.environ.get("RANK", "0") == "0" and not is_told:
        name = signal.Signals(number).name
        with suppress(OSError):  # the reader is gone
            os.write(2, f"stopped: {name} before training began; run the same command to start it\n".encode())
    os._exit(EXIT_STOPPED)


def is_program() -> bool:
    """Return whether this process was started to train, and is not a test or command that imports this module."""
    return _was_started_as("serried.program", "train.py")


def _was_started_as(module: str, file: str) -> bool:
    main = sys.modules["__main__"]
    if (spec := getattr(main, "__spec__", None)) is not None:
        return bool(spec.name == module)
    return os.path.basename(getattr(main, "__file__", None) or "") == file  # noqa: PTH119


def end_in_one_line(numbers: Iterable[signal.Signals] = ASKING) -> None:
    """Install handlers that end this process with one line on the signals ``numbers``."""
    for number in numbers:
        if signal.getsignal(number) in (signal.SIG_DFL, signal.default_int_handler):  # nohup may ignore them
            signal.signal(number, _end)


def check_temporary_folder() -> None:
    """Raise ``UserError`` if no folder for temporary files is writable: torch cannot be imported without one."""
    try:
        tempfile.gettempdir()
    except FileNotFoundError:
        raise UserError(
            "found no writable folder for temporary files; set the environment variable TMPDIR=FOLDER"
        ) from None


@contextmanager
def importing() -> Iterator[None]:
    """Context manager for importing torch without garbage collection.

    Garbage collection would take a third of the import time and free nothing.

    Raises:
        UserError: torch cannot be imported because no folder for temporary files is writable.
    """
    check_temporary_folder()
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def print_any_text() -> None:
    """Configure standard output and standard error so that printing never fails.

    Characters outside the encoding (such as PYTHONIOENCODING=latin-1) are escaped. Output to a closed stream is
    dropped.
    """
    sys.stdout = sys.stdout or open(os.devnull, "w", encoding="utf-8")  # noqa: PTH123, SIM115 -- None after ``>&-``
    sys.stderr = sys.stderr or open(os.devnull, "w", encoding="utf-8")  # noqa: PTH123, SIM115
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # not the replacement that a notebook or a test may install
            stream.reconfigure(errors="backslashreplace")


if _was_started_as("serried.__main__", "serried"):
    gc.set_threshold(100_000)  # a command mostly imports modules; see importing()
if is_program():
    gc.disable()  # until the config is composed
    end_in_one_line()
    if LAUNCHER in os.environ:  # the launcher started this process with signals blocked
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
    print_any_text()
