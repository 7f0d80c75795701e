"""Command that starts this process's script again: as ranks, as runs of a sweep or in a Slurm job."""

import os
import resource
import shlex
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from serried.configs.errors import UserError

_LEAST_OPEN_FILES = 64
"""Smallest accepted limit on open files. Two ranks on a CPU need 40. With 20, torch ends in a traceback, or waits
forever."""
_LEAST_ADDRESS_SPACE = 900 << 20
"""Smallest accepted address space in bytes. With less, importing torch ends in a traceback, an abort or an endless
loop."""
_training_command: tuple[str, ...] = ("-m", "serried.program")
_flags: tuple[str, ...] = ()
_words: tuple[str, ...] = ()
_is_called = False


def check_surroundings(words: Sequence[str]) -> None:
    """Raise ``UserError`` if the current folder was removed (no path can be resolved), if the address space is too
    small to import torch, if too few files may be open, or if one of the ``words`` is not valid text."""
    try:
        Path.cwd()
    except FileNotFoundError:
        raise UserError("the current folder was removed; cd to another one") from None
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    if limit not in (resource.RLIM_INFINITY, -1) and limit < _LEAST_ADDRESS_SPACE:
        raise UserError(f"ulimit -v {limit >> 10} is too little to import torch; use ulimit -v unlimited")
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if limit not in (resource.RLIM_INFINITY, -1) and limit < _LEAST_OPEN_FILES:
        raise UserError(f"ulimit -n {limit} lets too few files be open at a time; use ulimit -n 1024")
    for word in words:
        try:
            word.encode()
        except UnicodeEncodeError:
            raise UserError(f"{word} is not UTF-8 text; rename the file, or type it in UTF-8") from None


def remember_script() -> None:
    """Record that ``__main__`` is a script that trains: ``train.py``, or a user's script that ends in
    ``serried.main``.

    The processes that this one starts run it too.
    """
    global _training_command
    main = sys.modules["__main__"]
    file = getattr(main, "__file__", None)
    if getattr(main, "__spec__", None) is None and file is not None:  # not python -m
        _training_command = (str(Path(file).resolve()),)


def remember_flags(flags: Sequence[str]) -> None:
    """Record flags to pass on to the processes that this one starts."""
    global _flags
    _flags = tuple(flags)


def remember_words(words: Sequence[str]) -> None:
    """Record the overrides of the command line."""
    global _words
    _words = tuple(words)


def typed_words() -> str:
    """Return the flags and overrides of the command line, quoted for a shell, each preceded by a space.

    Overrides that belong to one run are left out: ``run``, ``dry_run``, the job in ``slurm.dependency``, and
    ``checkpoint.resume=must``, which a new run refuses.
    """
    left_out = {"run", "dry_run", "slurm.dependency", "checkpoint.resume=must"}
    kept = [word for word in _words if not {word, (key := word.partition("=")[0]), key.partition(".")[0]} & left_out]
    return "".join(f" {shlex.quote(word)}" for word in (*_flags, *kept))


def training_command() -> tuple[str, ...]:
    """Return the arguments of the interpreter for training. Overrides are appended to them."""
    return (*_training_command, *_flags)


@contextmanager
def called_from_python() -> Iterator[None]:
    """Context manager for a run that ``serried.fit`` starts, which no command can start again."""
    global _is_called
    _is_called = True
    try:
        yield
    finally:
        _is_called = False


def is_called_from_python() -> bool:
    """Return whether ``serried.fit`` started the run."""
    return _is_called


def typed_command() -> str:
    """Return the user's name for this program: ``train.py``, their script, or ``-m serried.program`` in an installed
    package."""
    if len(_training_command) == 1:
        script = _training_command[0]
        with suppress(FileNotFoundError):  # the current folder was removed
            script = os.path.relpath(script)
        return shlex.quote(script)
    here, train = Path("train.py"), Path(__file__).resolve().parents[1] / "train.py"
    return "train.py" if here.exists() and train.exists() and here.samefile(train) else "-m serried.program"
