"""Reading of plain or compressed files in pieces of bounded size, with detection of changes."""

import bz2
import contextlib
import gzip
import hashlib
import importlib
import io
import logging
import lzma
import os
import re
import sys
import time
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise
from pathlib import Path
from typing import IO, Any

from serried.configs.errors import UserError
from serried.configs.requirements import not_installed
from serried.recipes.data.readers.reading_progress import Progress

COMPRESSED = (".gz", ".bz2", ".xz", ".zst")
"""Suffixes of files that are decompressed while they are read."""

PIECE_BYTES = 1 << 20
"""Maximum size in bytes of a piece of a document that is tokenized at once, without the text around it."""

AROUND_BYTES = 1 << 14
"""Size in bytes of the text on each side of a piece that is tokenized together with it."""

SETTLED_SECONDS = 2.0
"""Age of a file in seconds above which its timestamps reliably show whether it has changed."""

Stamp = tuple[int, int, int, int]
"""Inode, size, mtime and ctime of a file. The ctime is included because copying tools may restore the mtime."""


@dataclass(frozen=True)
class SourceFile:
    """A file that was found but not read yet. ``name``: path relative to the source, with ``/`` as separator."""

    name: str
    path: Path
    url: str = ""
    """URL of the object in a bucket that was downloaded to ``path``; empty for other files."""


def assignment(key: str, value: str | os.PathLike[str]) -> str:
    """Return ``key=value`` as a shell and Hydra accept it, quoted only if necessary."""
    value = str(value)
    if re.fullmatch(r"(\w+://)?[\w./~+@%-]+", value):
        return f"{key}={value}"
    escaped = value.replace("\\", "\\\\").replace('"', '\\"').replace("'", "'\\''")
    return f"'{key}=\"{escaped}\"'"


def library(name: str, purpose: str, extra: str = "data") -> Any:
    """Import the optional library ``name``. Raises ``UserError`` with the command that installs ``extra`` if it is
    missing."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise not_installed((error.name or name).partition(".")[0], purpose, extra) from error


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Context manager that silences warnings of the Hugging Face libraries, since our error message contains the
    same."""
    loggers = [logging.getLogger(name) for name in ("datasets", "huggingface_hub", "fsspec")]
    levels = [logger.level for logger in loggers]
    try:
        for logger in loggers:
            logger.setLevel(logging.CRITICAL)
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


def kind_of(path: Path | str) -> str:
    """Return the suffix before any compression suffix: ``.jsonl`` for ``a.jsonl.gz``."""
    name = Path(path)
    return (Path(name.stem) if name.suffix.lower() in COMPRESSED else name).suffix.lower()


def ending_of(path: Path) -> str:
    """Return the suffix including any compression suffix: ``.jsonl.gz`` for ``a.jsonl.gz``."""
    return "".join(path.suffixes[-2:]) if path.suffix.lower() in COMPRESSED else path.suffix


def unreadable(path: Path | str, error: OSError) -> UserError:
    """Return the error for a file that cannot be read."""
    return UserError(
        f"cannot read {path}: {error.strerror or error}; make it readable, or leave it out with data.path=..."
    )


@contextlib.contextmanager
def open_plain(path: Path | str) -> Iterator[IO[bytes]]:
    """Open a file, decompressed according to its name. ``path`` may be an fsspec address. Raises ``UserError`` if it
    cannot be opened, or cannot be read further inside the ``with`` block."""
    try:
        with contextlib.ExitStack() as stack:
            yield _decompressed(path, stack)
    except (EOFError, zlib.error, lzma.LZMAError, gzip.BadGzipFile) as error:
        raise _damaged(path, error) from error
    except OSError as error:
        if error.errno is None:  # bz2 and pyarrow report damaged content in this way
            raise _damaged(path, error) from error
        raise unreadable(path, error) from error


def _damaged(path: Path | str, error: Exception) -> UserError:
    return UserError(f"{path} is damaged or cut off: {error}; create it again, or leave it out with data.path=...")


def opened(path: Path | str, stack: contextlib.ExitStack) -> Any:
    """Open a local file or an fsspec address. It is closed with ``stack``."""
    if isinstance(path, str) and "://" in path:
        return stack.enter_context(library("fsspec", f"reading {path}").open(path, "rb"))
    return stack.enter_context(Path(path).open("rb"))


def _decompressed(path: Path | str, stack: contextlib.ExitStack) -> Any:
    raw, suffix = opened(path, stack), Path(path).suffix.lower()
    if suffix in (".gz", ".bz2", ".xz"):
        kinds: dict[str, Any] = {".gz": gzip.open, ".bz2": bz2.BZ2File, ".xz": lzma.LZMAFile}
        return stack.enter_context(kinds[suffix](raw))
    if suffix == ".zst":
        arrow = library("pyarrow", f"reading {Path(path).name}")
        return io.BufferedReader(arrow.CompressedInputStream(arrow.PythonFile(raw, "r"), "zstd"), PIECE_BYTES)
    return raw


def skip(stream: IO[bytes], size: int) -> None:
    """Skip the next ``size`` bytes."""
    if stream.seekable():
        stream.seek(size, os.SEEK_CUR)
        return
    while size and (block := stream.read(min(size, PIECE_BYTES))):
        size -= len(block)


def read_pieces(stream: IO[bytes], length: int | None = None) -> Iterator[bytes]:
    """Yield the next ``length`` bytes, or all if it is None, in pieces of at most ``PIECE_BYTES``, split by ``cut``."""
    rest, left = b"", sys.maxsize if length is None else length
    while True:
        wanted = min(PIECE_BYTES - len(rest), left)
        block = stream.read(wanted)
        left -= len(block)
        rest += block
        if len(rest) < PIECE_BYTES:
            if rest:
                yield rest
            return
        at = cut(rest)
        yield rest[:at]
        rest = rest[at:]


def read_surrounded(stream: IO[bytes], length: int | None = None) -> Iterator[tuple[bytes, bytes, bytes]]:
    """Yield each piece of ``read_pieces`` as (text before, piece, text after). The text before and after has at most
    ``AROUND_BYTES`` each, and is empty at the start and end of the stream."""
    before = b""
    for piece, following in pairwise(chain(read_pieces(stream, length), [b""])):
        stop = min(AROUND_BYTES, len(following))
        while stop < len(following) and AROUND_BYTES - stop < 3 and following[stop] & 0xC0 == 0x80:
            stop -= 1  # back to the start of a character
        yield before, piece, following[:stop]
        before = piece[-AROUND_BYTES:]
        before = before[next((at for at in range(min(4, len(before))) if before[at] & 0xC0 != 0x80), 0) :]


def cut(content: bytes) -> int:
    """Return the position at which to split a text in its second half: after a line, else before a space, else between
    characters."""
    middle = len(content) // 2
    if (line_end := content.rfind(b"\n", middle)) >= 0:
        return line_end + 1
    if (blank := content.rfind(b" ", middle)) > 0:
        return blank
    # Back to the start of a character (0b10...... is inside one). Text that is not UTF-8 may have none.
    near = range(len(content) - 1, max(0, len(content) - 4), -1)
    return next((at for at in near if content[at] & 0xC0 != 0x80), len(content))


@dataclass(frozen=True)
class Document:
    """A file whose content was hashed."""

    name: str
    path: Path
    size_bytes: int
    """Size of the decompressed content."""
    sha256: bytes
    """Hash of the decompressed content."""
    stamp: Stamp | None
    """State of the file when it was hashed. None if changes are not checked."""

    def read(self, start_bytes: int, stop_bytes: int) -> bytes:
        """Return bytes ``start_bytes`` up to ``stop_bytes``. Raises ``UserError`` if the file has changed since it
        was hashed."""
        with unchanged(self.path, self.stamp), open_plain(self.path) as stream:
            skip(stream, start_bytes)
            return stream.read(stop_bytes - start_bytes)


def hash_files(files: Sequence[SourceFile], progress: Progress) -> list[Document]:
    """Hash every file. Raises ``UserError`` if one cannot be read, or changes while it is read."""

    def hashed(file: SourceFile) -> Document:
        sha256 = hashlib.sha256()
        size_bytes = 0
        stamp = stamp_of(file.path)
        with unchanged(file.path, stamp), open_plain(file.path) as stream:
            while block := stream.read(PIECE_BYTES):
                sha256.update(block)
                size_bytes += len(block)
                progress.done(len(block))
        return Document(file.name, file.path, size_bytes, sha256.digest(), stamp)

    progress.total_bytes = sum(stamp_of(file.path)[1] for file in files)
    return list(progress.map(hashed, files))


def key_of(documents: Sequence[Document]) -> bytes:
    """Return a hash of the names and contents of files."""
    key = hashlib.sha256()
    for document in documents:
        name = document.name.encode("utf-8", "surrogateescape")  # a file name need not be UTF-8
        key.update(len(name).to_bytes(8, "little") + name + document.sha256)
    return key.digest()


def stamp_of(path: Path) -> Stamp:
    """Return values that change when a file changes. Raises ``UserError`` if the file cannot be accessed."""
    try:
        status = path.stat()
    except OSError as error:
        raise unreadable(path, error) from error
    return status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns


@contextlib.contextmanager
def unchanged(path: Path | str, stamp: Stamp | None) -> Iterator[None]:
    """Context manager that raises ``UserError`` if ``path`` has changed since ``stamp`` was taken, before or after
    the block."""
    for is_before in (True, False):
        if stamp is not None and (now := stamp_of(Path(path))) != stamp:
            raise UserError(
                f"{path} changed while it was being prepared (from {stamp[1]} to {now[1]} bytes); "
                "run again when nothing writes to it"
            )
        if is_before:
            yield


def files_state(files: Iterable[SourceFile]) -> str | None:
    """Return a hash of names, sizes and times; None if a file is so recent that a change could leave its times
    unchanged."""
    settled_ns = time.time_ns() - int(SETTLED_SECONDS * 1e9)
    state = hashlib.sha256()
    for file in files:
        stamp = stamp_of(file.path)
        if max(stamp[2:]) > settled_ns:
            return None
        state.update(repr((file.name, *stamp)).encode())
    return state.hexdigest()
