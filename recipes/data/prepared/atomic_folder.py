"""Atomic creation of a folder: it is complete or does not exist. One process at a time writes it. After an
interruption, the next process continues."""

import contextlib
import fcntl
import os
import re
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from serried.configs.errors import UserError
from serried.recipes.data.readers.reading_progress import Progress
from serried.recipes.data.readers.source_files import assignment
from serried.records.files import machine

_NAME = re.compile(r"(?:[a-z]+-)?[0-9a-f]{32}\.(?:(partial)|[0-9a-f]{12}\.tmp)")
"""Pattern for the names of temporary folders that this module creates. Names of the final folders end in a hash."""
_CONTENTS = re.compile(
    r"\.?(?:(?:done|train|validation|tokens)-[0-9]{5,}\.(?:json|bin|starts|supervised|weights|places|crc32)"
    r"|(?:tokenizer|summary|shared|held-out|objects)\.json|ranges\.(?:limit|blocks))(?:\..+\.tmp)?"
)
"""Pattern for the names of files in such a folder."""
_ABANDONED_SECONDS = 24 * 3600.0
_GIVEN_UP_SECONDS = 14 * _ABANDONED_SECONDS


def make_folder(folder: Path, write: Callable[[Path], None], is_there: Callable[[], bool], progress: Progress) -> None:
    """Create ``folder``, unless it ``is_there``: call ``write`` with ``<folder>.partial`` and rename it to ``folder``.

    One of the processes that need the folder creates it, and the others wait. After an interruption, the next process
    continues in the same partial folder.

    Raises ``UserError`` if ``write`` raised it, or the disk fails.
    """
    try:
        with _claimed(folder, is_there, progress) as partial:
            if partial is not None:
                try:
                    write(partial)
                except (UserError, OSError) as error:
                    # After a user's mistake, nothing can be reused. After a disk failure, finished parts can.
                    if isinstance(error, UserError) or not any(partial.glob("done-*.json")):
                        shutil.rmtree(partial, ignore_errors=True)
                    raise
                _publish(partial, folder, is_there)
    except OSError as error:
        # Another machine may have been first, if it shares the disk but not its locks.
        if not is_there():
            raise _cannot_write(folder.parent, error, progress.total_bytes) from error


@contextlib.contextmanager
def _claimed(folder: Path, is_there: Callable[[], bool], progress: Progress) -> Iterator[Path | None]:
    """Lock and yield ``<folder>.partial``; yield None if another process completes the folder first.

    The lock is on the partial folder itself, so it is released when the folder is removed or the owner exits. If
    machines share a disk but not its locks, two of them may write at once. Both write the same bytes to different
    temporary files, and rename these when complete.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    _remove_abandoned(folder.parent)
    partial = folder.with_name(f"{folder.name}.partial")
    while not is_there():
        partial.mkdir(exist_ok=True)
        descriptor = os.open(partial, os.O_RDONLY)
        try:
            _lock(descriptor, progress)
            if _is_still(partial, descriptor):  # the previous owner may have renamed or removed it
                for path in partial.glob(f"*.{machine()}.*.tmp"):  # files of processes that have ended
                    path.unlink(missing_ok=True)
                yield partial
                return
        finally:
            os.close(descriptor)
    yield None


def _publish(partial: Path, folder: Path, is_intact: Callable[[], bool]) -> None:
    """Rename the folder into place, unless another machine was first. A damaged folder with this name is removed."""
    if is_intact():
        shutil.rmtree(partial, ignore_errors=True)
        return
    if folder.exists():
        aside = folder.with_name(f"{folder.name}.{os.urandom(6).hex()}.tmp")
        with contextlib.suppress(FileNotFoundError):  # another process also found it damaged
            folder.rename(aside)
            shutil.rmtree(aside, ignore_errors=True)
    partial.rename(folder)


def _lock(descriptor: int, progress: Progress) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        progress.say("waiting for another process that is preparing the same data")
        fcntl.flock(descriptor, fcntl.LOCK_EX)
    except OSError:
        pass  # a file system without locks


def _is_still(partial: Path, descriptor: int) -> bool:
    with contextlib.suppress(FileNotFoundError):
        return os.path.samestat(partial.stat(), os.fstat(descriptor))
    return False


def _remove_abandoned(cache: Path) -> None:
    """Remove discarded folders after a day, and partial folders after two idle weeks. Only this module's folders are
    removed, since other programs may keep files in the cache folder."""
    for folder in cache.iterdir():
        if (named := _NAME.fullmatch(folder.name)) is None or folder.is_symlink():
            continue
        with contextlib.suppress(OSError):
            entries = list(folder.iterdir())
            written = max(entry.stat().st_mtime for entry in (folder, *entries))
            is_over = time.time() - written > (_GIVEN_UP_SECONDS if named[1] else _ABANDONED_SECONDS)
            if is_over and all(_CONTENTS.fullmatch(entry.name) for entry in entries):
                shutil.rmtree(folder)


def _cannot_write(cache: Path, error: OSError, source_bytes: int) -> UserError:
    free = ""
    with contextlib.suppress(OSError):
        there = next(folder for folder in (cache, *cache.parents) if folder.exists())
        free = f", {shutil.disk_usage(there).free:,} bytes free"
    return UserError(
        f"cannot write prepared data to {cache}: {error.strerror} (about {2 * source_bytes:,} bytes needed{free}); "
        f"{other_cache(cache)}"
    )


def other_cache(cache: Path | None) -> str:
    """Return the override that selects another folder for prepared data."""
    other = Path(tempfile.gettempdir()) / "serried"
    return f"choose another folder: {assignment('data.cache_dir', other if other != cache else 'cache')}"
