"""Lock file ``.lock`` in the folder of a run or a sweep. At most one process holds it. It is released when the process
ends, even if it is killed."""

import errno
import fcntl
import os
import socket
import sys
import time
from pathlib import Path
from typing import IO

from serried.configs.plain_data import NotPlainData, open_regular

LOCK = ".lock"
_LOOKS, _LOOK_SECONDS = 5, 0.05
"""Number and interval in seconds of the tries before a folder counts as locked. Processes that only check the lock hold
it for a moment."""
_CANNOT_LOCK = (errno.ENOSYS, errno.ENOLCK, errno.ENOTSUP)


class FolderLock:
    """Lock of a folder, held until it is closed."""

    def __init__(self, file: IO[bytes], stand_in: socket.socket | None) -> None:
        self._file, self._stand_in = file, stand_in

    @property
    def warning(self) -> str | None:
        """Warning for a disk without file locks, where processes on other machines do not see this lock; None
        otherwise."""
        if self._stand_in is None:
            return None
        return (
            f"{Path(self._file.name).parent} is on a disk that does not support file locks: a second start of this run "
            "on another machine would not be detected, and would damage the run; start the run only once"
        )

    def fileno(self) -> int:
        return self._file.fileno()

    def close(self) -> None:
        self._file.close()
        if self._stand_in is not None:
            self._stand_in.close()

    def __enter__(self) -> "FolderLock":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def lock_folder(folder: Path) -> FolderLock:
    """Lock ``folder``. On a disk without file locks, only other processes of this machine see the lock.

    Raises:
        BlockingIOError: another process holds the lock.
        OSError: the folder cannot be written.
    """
    looks = _LOOKS
    while True:
        lock = open(folder / LOCK, "ab", opener=_own)  # noqa: SIM115 -- the caller closes it
        stand_in = None
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
            try:
                if error.errno not in _CANNOT_LOCK:
                    raise
                stand_in = _address_of(lock)
            except OSError:
                lock.close()
                raise
        held = FolderLock(lock, stand_in)
        if is_same_file(folder / LOCK, held):  # the file was not removed meanwhile by a refused command
            return held
        held.close()


def replace_lock(folder: Path) -> FolderLock:
    """Lock ``folder`` although a frozen process may hold the lock: that process finds another file when it runs again.

    Raises:
        OSError: the folder cannot be written.
    """
    draft = folder / f"{LOCK}.{os.getpid()}"
    lock = open(draft, "ab", opener=_own)  # noqa: SIM115 -- the caller closes it
    stand_in = None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in _CANNOT_LOCK:
            lock.close()
            raise
        stand_in = _address_of(lock)
    draft.replace(folder / LOCK)
    return FolderLock(lock, stand_in)


def is_locked(folder: Path) -> bool | None:
    """Return whether a process holds the lock of a run's or sweep's folder; None if that is unknown."""
    try:
        with open_regular(folder / LOCK) as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)  # held only for a moment
    except BlockingIOError:
        return True
    except (OSError, NotPlainData):
        return None
    return False


def _own(name: str, flags: int) -> int:
    """Open a file inside the folder. Links and pipes are refused: a link could lead to any file, and a pipe would
    block."""
    return os.open(name, flags | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)


def _address_of(file: IO[bytes]) -> socket.socket:
    """Bind a socket address derived from ``file``, which only one process of this machine can hold. It is released when
    the process ends. Raises ``BlockingIOError`` if another process holds it."""
    stat, taken = os.fstat(file.fileno()), socket.socket(socket.AF_UNIX)
    try:
        if sys.platform == "linux":  # only Linux has socket addresses without a file
            taken.bind(f"\0serried-{stat.st_dev}-{stat.st_ino}")
    except OSError as error:
        taken.close()
        raise BlockingIOError(error.errno, error.strerror) from None
    return taken


def is_same_file(path: Path, file: IO[bytes] | FolderLock) -> bool:
    """Return whether ``path`` is still the open ``file``; True if the disk does not respond."""
    try:
        return os.path.samestat(path.stat(), os.fstat(file.fileno()))
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError:
        return True
