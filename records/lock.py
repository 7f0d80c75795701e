"""``.lock`` in the folder of a run or a sweep: held by one process at a time, and released however that ends."""

import errno
import fcntl
import os
import time
from pathlib import Path
from typing import IO

from serried.configs.plain_data import NotPlainData, open_regular

LOCK = ".lock"
_LOOKS, _LOOK_SECONDS = 5, 0.05
"""Before a folder counts as locked by another process: one that only looks holds the lock for a moment."""
_CANNOT_LOCK = (errno.ENOSYS, errno.ENOLCK, errno.ENOTSUP)


def lock_folder(folder: Path) -> IO[bytes]:
    """Lock ``folder`` until the returned file is closed. On a disk without locks it is not locked.

    Raises:
        BlockingIOError: another process holds it.
        OSError: it cannot be written.
    """
    looks = _LOOKS
    while True:
        lock = open(folder / LOCK, "ab", opener=_own)  # noqa: SIM115 -- the caller closes it
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.close()
            looks -= 1
            if not looks:
                raise
            time.sleep(_LOOK_SECONDS)
            continue
        except OSError as error:
            if error.errno not in _CANNOT_LOCK:
                lock.close()
                raise
        if is_same_file(folder / LOCK, lock):  # not removed meanwhile by a command that was refused
            return lock
        lock.close()


def is_locked(folder: Path) -> bool | None:
    """Return whether a process holds the lock of a run's or a sweep's folder; None: that cannot be known."""
    try:
        with open_regular(folder / LOCK) as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)  # for a moment
    except BlockingIOError:
        return True
    except (OSError, NotPlainData):
        return None
    return False


def _own(name: str, flags: int) -> int:
    """Open a file of the folder itself: a link may lead to any file, and a pipe would block."""
    return os.open(name, flags | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)


def is_same_file(path: Path, file: IO[bytes]) -> bool:
    """Return whether ``path`` still leads to the open ``file``; true if the disk does not answer."""
    try:
        return os.path.samestat(path.stat(), os.fstat(file.fileno()))
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError:
        return True
