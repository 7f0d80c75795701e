"""Which folder a process is working in: ``.lock``, held for as long as that process lives."""

import errno
import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from serried.configs.errors import UserError

_LOCK = ".lock"


@contextmanager
def claim_sweep(folder: Path) -> Iterator[None]:
    """Make and lock the folder of a sweep.

    Raises:
        UserError: another process holds it, or it cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = (folder / _LOCK).open("w")
    except OSError as error:
        raise UserError(f"cannot write the sweep's folder {folder}: {error.strerror}; use run.dir=FOLDER") from None
    with lock:
        if not _lock(lock):
            raise UserError(f"another process is running this sweep, {folder}; wait for it, or use run.name=OTHER")
        yield


def is_locked(folder: Path) -> bool:
    """Return whether a process holds the lock of a run's or a sweep's folder."""
    try:
        with (folder / _LOCK).open("r+") as file:
            return not _lock(file)
    except OSError:
        return False


def _lock(file: IO[str]) -> bool:
    """Return whether ``file`` could be locked; true on a disk without locks."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return error.errno not in (errno.EWOULDBLOCK, errno.EAGAIN)
    return True
