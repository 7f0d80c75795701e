"""Writing a file whole: a reader, and a machine that loses power, sees the old content or the new, never a part."""

import os
import re
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from serried.configs.errors import UserError


def machine() -> str:
    """Return the name of this machine as a part of a file name: names of machines may hold any character."""
    return re.sub(r"[^\w.-]", "_", socket.gethostname(), flags=re.ASCII)


def output_file(out: Path) -> Path:
    """Return the file that the user names by ``out=``, with links followed, since a renamed file takes the place of a
    link. Raises ``UserError`` if it is a device, a pipe or a socket."""
    if os.path.exists(out) and not os.path.isfile(out):  # noqa: PTH110, PTH113 -- false without permission to look
        raise UserError(f"out={out} is a device or a pipe, in whose place a file would be put; use out=FILE")
    return Path(os.path.realpath(out))


@contextmanager
def replacing(path: Path, *, survives_power_loss: bool = True) -> Iterator[IO[bytes]]:
    """Yield a temporary file beside ``path``. When the block ends it is flushed to the disk and takes the place of
    ``path``; if the block or the disk fails, ``path`` stays as it was.

    Its name is unique, and names this machine. ``survives_power_loss=False`` skips the flush, for a file that is
    replaced every few seconds.
    """
    # Not of ``tempfile``, whose files only their owner may read.
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
    """Replace the file ``path``; see ``replacing``."""
    data = content.encode("utf-8", "backslashreplace") if isinstance(content, str) else content
    with replacing(path, survives_power_loss=survives_power_loss) as file:
        file.write(data)
