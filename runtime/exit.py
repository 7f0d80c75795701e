"""End of a process: error messages, the rank that prints them, and the exit code."""

import json
import os
import sys
import time
import traceback
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from serried.configs.errors import (
    EXIT_FAILED,
    EXIT_FINISHED,
    EXIT_MISTAKE,
    EXIT_STOPPED,
    StopRequested,
    TrainingFailed,
    TrainingStopped,
    UserError,
)
from serried.configs.formats import printable
from serried.configs.subcommand_arguments import repeated
from serried.configs.unused_keys import Run, notes
from serried.runtime.import_signals import LAUNCHER
from serried.runtime.process import speaks

STATUS_DECIDES = "SERRIED_STATUS_DECIDES"
"""Environment variable: the job script reads ``status.json``, not exit codes. Its value is a file to create when a
rank stops on request, since no status exists before the first step."""


REPORTS = "SERRIED_REPORTS"
"""Environment variable: file descriptor of the pipe from which ``launch=local`` reads messages of ``tell_launcher``."""
_MOST_TOLD_CHARACTERS = 600  # of at most 6 bytes each: writes of up to 4096 bytes to a pipe are atomic

_TORCHRUN_ENDS_ALL_SECONDS = 10.0
"""Longest time until torchrun ends all processes, once one has ended. A process without a report lets the reporting
one end first."""


class Failure(NamedTuple):
    """The reason why a run ended."""

    rank: int
    """Rank that failed first. The other ranks' errors are consequences."""
    reason: str
    """Reason, on one line."""
    exit_code: int


def in_one_line(error: BaseException) -> str:
    """Return the message of ``error`` on one line."""
    text = str(error).strip().splitlines()
    named = "" if isinstance(error, UserError | TrainingFailed) else f"{type(error).__name__}: "
    return f"{named}{text[0]}" if text else type(error).__name__


def exit_code_of(error: BaseException) -> int:
    """Return the exit code of a process that ``error`` ended."""
    if isinstance(error, StopRequested | TrainingStopped):
        return EXIT_STOPPED
    return EXIT_MISTAKE if isinstance(error, UserError) else EXIT_FAILED


def note_repeated(words: Sequence[str]) -> None:
    """Print a note on rank 0 for each key that has two values in ``words``."""
    _note(repeated(words))


def note_idle(words: Sequence[str], runs: Sequence[Run]) -> None:
    """Print a note on rank 0 for each key in ``words`` that none of ``runs`` reads."""
    _note(notes(words, runs))


def _note(lines: Sequence[str]) -> None:
    for line in lines if speaks() else ():
        say_why(f"note: {line}")


def report_mistake(error: UserError) -> int:
    """Print ``error`` on rank 0 only: without a session all processes make the same mistake.

    Returns the exit code.
    """
    return report_alone(error, is_heard=speaks())


def report_alone(error: UserError | TrainingFailed | StopRequested, *, is_heard: bool) -> int:
    """Print the error that ended this process before it joined the others. Return the exit code."""
    if isinstance(error, StopRequested):
        if is_heard:
            say_why(f"stopped: {error} while the processes were joining; run the same command to resume")
    elif is_heard:
        say_why(f"{'error' if isinstance(error, UserError) else 'failed'}: {error}")
    else:
        with suppress(KeyboardInterrupt):
            time.sleep(_TORCHRUN_ENDS_ALL_SECONDS)
    return exit_code_of(error)


def say_why(line: str) -> None:
    """Print ``line`` to standard error."""
    _print_error(printable(line))


def print_traceback(error: BaseException) -> None:
    """Print ``error`` with its traceback to standard error."""
    _print_error("".join(traceback.format_exception(error)).rstrip("\n"))


def _print_error(text: str) -> None:
    with suppress(OSError, ValueError):  # the reader is gone, or it is a file on a full disk
        print(text, file=sys.stderr, flush=True)
    tell_launcher(said=text[-_MOST_TOLD_CHARACTERS:])


def tell_launcher(**what: Any) -> None:
    """Report to ``launch=local``, if it started this process, that this rank ``ended`` regularly, or the error that
    it ``said``: the standard error of most ranks is a file, and the disk may be full."""
    if os.environ.get(LAUNCHER) == str(os.getppid()):  # only a rank has the descriptor, not its children
        with suppress(OSError, ValueError, KeyError):
            told = json.dumps({"rank": int(os.environ["RANK"]), **what}, ensure_ascii=False)
            os.write(int(os.environ[REPORTS]), f"{told}\n".encode("utf-8", "backslashreplace"))


def code_for_agent(code: int) -> int:
    """Return the exit code of the process for a run that ended with ``code``.

    torchrun's agent treats every code but 0 as a failure. With restarts left, it would restart a run that was
    stopped on request. Our Slurm job reads ``status.json`` instead. In both cases a stopped run exits with 0.
    """
    restarts = os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0") != "0"
    if code != EXIT_STOPPED or not (restarts or STATUS_DECIDES in os.environ):
        return code
    with suppress(OSError, KeyError):
        Path(os.environ[STATUS_DECIDES]).touch()
    return EXIT_FINISHED


def leave(code: int) -> NoReturn:
    """End the process at once.

    Gloo's threads can abort an interpreter that is shutting down (https://github.com/pytorch/pytorch/issues/179291),
    which would turn success into exit code -6.
    """
    code = code_for_agent(code)
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):  # the reader is gone
            stream.flush()
    os._exit(code)
