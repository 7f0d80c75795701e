"""Atomic file writes: readers see either the old or the new content, never a part of it, even after a power loss."""

import os
import re
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from serried.configs.errors import UserError


def machine() -> str:
    """Return the host name as part of a file name: host names may contain any character."""
    return re.sub(r"[^\w.-]", "_", socket.gethostname(), flags=re.ASCII)


def output_file(out: Path) -> Path:
    """Return the output file that ``out=`` names, with links followed, since a renamed file would replace a link.
    Raises ``UserError`` if it is a device, a pipe or a socket."""
    if os.path.exists(out) and not os.path.isfile(out):  # noqa: PTH110, PTH113 -- false without permission to look
        raise UserError(f"out={out} is a device or a pipe and would be replaced by a file; use out=FILE")
    return Path(os.path.realpath(out))


@contextmanager
def replacing(path: Path, *, survives_power_loss: bool = True) -> Iterator[IO[bytes]]:
    """Yield a temporary file next to ``path``. At the end of the block it is flushed to the disk and replaces
    ``path``; if the block or the disk fails, ``path`` stays unchanged.

    Its name is unique and contains the host name. ``survives_power_loss=False`` skips the flush, for a file that
    is replaced every few seconds.
    """
    # Not created by ``tempfile``, whose files only the owner may read.
    temporary = path.with_name(f".{path.name}.{machine()}.{os.urandom(6).hex()}.tmp")
    try:
        with temporary.open("wb") as file:
            yield file
            file.flush()
            if survives_power_loss:
                os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def write_atomically(path: Path, content: str | bytes, *, survives_power_loss: bool = True) -> None:
    """Replace the content of the file ``path`` atomically; see ``replacing``."""
    data = content.encode("utf-8", "backslashreplace") if isinstance(content, str) else content
    with replacing(path, survives_power_loss=survives_power_loss) as file:
        file.write(data)


def make_scratch(folder: Path) -> None:
    """Create a scratch folder for a run in a bucket, which only this user can read.

    Raises ``UserError`` if it cannot be created, or its parent, which may be in a folder that all users share, belongs
    to another user.
    """
    try:
        folder.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        folder.mkdir(exist_ok=True, mode=0o700)
        owner = folder.parent.lstat().st_uid
    except OSError as error:
        reason = error.strerror or str(error)
    else:
        if owner == os.getuid() or "SERRIED_SCRATCH" in os.environ:
            return
        reason = f"{folder.parent} belongs to another user"
    raise UserError(f"cannot use the scratch folder {folder}: {reason}; set SERRIED_SCRATCH to a folder of yours")
