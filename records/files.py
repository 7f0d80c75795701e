"""Writing a file whole: a reader, and a machine that loses power, sees the old content or the new, never a part."""

import os
from contextlib import suppress
from pathlib import Path


def write_atomically(path: Path, content: str | bytes, *, survives_power_loss: bool = True) -> None:
    """Replace the file ``path``: write a temporary file beside it, flush that to the disk, rename it.

    ``survives_power_loss=False`` skips the flush, for a file that is replaced every few seconds.

    Raises:
        OSError: it cannot be written; ``path`` is as it was.
    """
    data = content.encode("utf-8", "backslashreplace") if isinstance(content, str) else content
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            file.write(data)
            file.flush()
            if survives_power_loss:
                os.fsync(file.fileno())
        temporary.replace(path)
    except OSError:
        with suppress(OSError):
            temporary.unlink()
        raise
