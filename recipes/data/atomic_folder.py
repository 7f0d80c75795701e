"""A folder that appears complete or not at all, written by one process at a time, and continued after an
interruption."""

import contextlib
import fcntl
import os
import shutil
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from serried.recipes.data.progress import Progress
from serried.recipes.data.shards import unfinished_beside

_ABANDONED_SECONDS = 24 * 3600.0
_GIVEN_UP_SECONDS = 14 * _ABANDONED_SECONDS


@contextlib.contextmanager
def claimed(folder: Path, is_there: Callable[[], bool], progress: Progress) -> Iterator[Path | None]:
    """Lock and return ``<folder>.partial``; None if ``is_there`` by now.

    The lock is on the folder itself, so that it goes with it, and with its owner. Where machines share a disk and not
    its locks, two may write at once: each under names of its own, the same bytes, renamed when they are whole.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    _remove_abandoned(folder.parent)
    partial = folder.with_name(f"{folder.name}.partial")
    while True:
        if is_there():
            yield None
            return
        partial.mkdir(exist_ok=True)
        descriptor = os.open(partial, os.O_RDONLY)
        try:
            _lock(descriptor, progress)
            if _is_still(partial, descriptor):  # its last owner may have renamed or removed it
                _remove_unfinished(partial)
                yield partial
                return
        finally:
            os.close(descriptor)


def publish(partial: Path, folder: Path, is_intact: Callable[[], bool]) -> None:
    """Rename into place, unless another process was first."""
    while True:
        try:
            partial.rename(folder)
            return
        except OSError:
            if not folder.exists():
                raise
        if is_intact():
            shutil.rmtree(partial, ignore_errors=True)
            return
        aside = unfinished_beside(folder)
        with contextlib.suppress(FileNotFoundError):  # another process found it damaged too
            folder.rename(aside)
            shutil.rmtree(aside, ignore_errors=True)


def _lock(descriptor: int, progress: Progress) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        progress.say("another process does it; waiting for that")
        fcntl.flock(descriptor, fcntl.LOCK_EX)
    except OSError:
        pass  # a file system without locks


def _is_still(partial: Path, descriptor: int) -> bool:
    with contextlib.suppress(FileNotFoundError):
        return os.path.samestat(partial.stat(), os.fstat(descriptor))
    return False


def _remove_unfinished(partial: Path) -> None:
    """Remove unfinished files of processes that are dead: on this machine, or old enough."""
    for path in partial.glob("*.tmp"):
        with contextlib.suppress(OSError):
            if f".{socket.gethostname()}." in path.name or time.time() - path.stat().st_mtime > _ABANDONED_SECONDS:
                path.unlink()


def _remove_abandoned(cache: Path) -> None:
    """Remove discarded folders after a day, and partial ones after two idle weeks."""
    for folder, after in [(f, _ABANDONED_SECONDS) for f in cache.glob("*.tmp")] + [
        (f, _GIVEN_UP_SECONDS) for f in cache.glob("*.partial")
    ]:
        with contextlib.suppress(OSError):
            written = max(entry.stat().st_mtime for entry in (folder, *folder.iterdir()))
            if time.time() - written > after:
                shutil.rmtree(folder)
