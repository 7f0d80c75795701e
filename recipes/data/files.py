"""Reading of files: plain or compressed, in pieces of bounded size, with detection of changes."""

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
import time
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from serried.configs.errors import UserError
from serried.configs.libraries import not_installed
from serried.recipes.data.source import Reading

COMPRESSED = (".gz", ".bz2", ".xz", ".zst")
"""Endings of files that are decompressed as they are read."""

PIECE_BYTES = 1 << 20
"""Largest piece of a document that is tokenized at once."""

SETTLED_SECONDS = 2.0
"""Age above which the times of a file show whether it has changed."""

Stamp = tuple[int, int, int, int]
"""Inode, size, and times of the last change to content and to the inode: copying tools set the former back."""


@dataclass(frozen=True)
class SourceFile:
    """A file that was found and not yet read. ``name`` is its path relative to the source, with ``/`` between parts."""

    name: str
    path: Path


def assignment(key: str, value: str | os.PathLike[str]) -> str:
    """``key=value`` as a shell and Hydra accept it, quoted only if necessary."""
    value = str(value)
    if re.fullmatch(r"[\w./~+@%-]+", value):
        return f"{key}={value}"
    escaped = value.replace("\\", "\\\\").replace('"', '\\"').replace("'", "'\\''")
    return f"'{key}=\"{escaped}\"'"


def library(name: str, purpose: str) -> Any:
    """Import the optional library ``name``, or raise ``UserError`` with the command that installs it."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise not_installed((error.name or name).partition(".")[0], purpose) from error


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Silence the warnings of Hugging Face's libraries: the error line says the same."""
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
    """Ending of what is in a file, compressed or not: ``.jsonl`` for ``a.jsonl.gz``."""
    name = Path(path)
    return (Path(name.stem) if name.suffix.lower() in COMPRESSED else name).suffix.lower()


def unreadable(path: Path | str, error: OSError) -> UserError:
    """The error for a file that cannot be read."""
    return UserError(
        f"cannot read {path}: {error.strerror or error}; make it readable, or leave it out with data.path=..."
    )


@contextlib.contextmanager
def open_plain(path: Path | str) -> Iterator[IO[bytes]]:
    """Open a file, decompressed according to its name. ``path`` may be an fsspec address.

    Raises:
        UserError: it cannot be opened, or breaks off, also while it is read from inside of the ``with``.
    """
    try:
        with contextlib.ExitStack() as stack:
            yield _decompressed(path, stack)
    except (EOFError, zlib.error, lzma.LZMAError, gzip.BadGzipFile) as error:
        raise _damaged(path, error) from error
    except OSError as error:
        if error.errno is None:  # bz2 and pyarrow say so what is wrong with the content
            raise _damaged(path, error) from error
        raise unreadable(path, error) from error


def _damaged(path: Path | str, error: Exception) -> UserError:
    return UserError(
        f"{path} is damaged or cut off: {' '.join(str(error).split())}; create it again, or leave it out with "
        "data.path=..."
    )


def _decompressed(path: Path | str, stack: contextlib.ExitStack) -> Any:
    if isinstance(path, str) and "://" in path:
        raw: Any = stack.enter_context(library("fsspec", f"reading {path}").open(path, "rb"))
    else:
        raw = stack.enter_context(Path(path).open("rb"))  # noqa: SIM115
    suffix = Path(path).suffix.lower()
    if suffix == ".gz":
        return stack.enter_context(gzip.open(raw))
    if suffix == ".bz2":
        return stack.enter_context(bz2.BZ2File(raw))
    if suffix == ".xz":
        return stack.enter_context(lzma.LZMAFile(raw))
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
    """The next ``length`` bytes (None: all there are) in pieces of at most ``PIECE_BYTES``, as ``cut`` cuts them."""
    rest, left = b"", length
    while True:
        wanted = PIECE_BYTES - len(rest)
        block = _read_exactly(stream, wanted if left is None else min(wanted, left))
        left = None if left is None else left - len(block)
        rest += block
        if len(block) < wanted:
            if rest:
                yield rest
            return
        at = cut(rest)
        yield rest[:at]
        rest = rest[at:]


def _read_exactly(stream: IO[bytes], size: int) -> bytes:
    """``size`` bytes, fewer at the end only: where pieces are cut must not depend on what a read happens to give."""
    block = stream.read(size)
    while 0 < len(block) < size and (more := stream.read(size - len(block))):
        block += more
    return block


def cut(content: bytes) -> int:
    """Where the first piece of a longer text ends: after a line, before a blank, else between two characters."""
    middle = len(content) // 2
    if (line_end := content.rfind(b"\n", middle)) >= 0:
        return line_end + 1
    if (blank := content.rfind(b" ", middle)) > 0:
        return blank
    # Back to the start of a character (0b10...... is inside of one). What is no UTF-8 has none.
    near = range(len(content) - 1, max(0, len(content) - 4), -1)
    return next((at for at in near if content[at] & 0xC0 != 0x80), len(content))


def stamp_of(status: os.stat_result) -> Stamp:
    """What changes when a file does."""
    return status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns


@contextlib.contextmanager
def unchanged(path: Path | str, stamp: Stamp | None) -> Iterator[None]:
    """Raise ``UserError`` if ``path`` has changed since ``stamp`` was taken."""
    _compare(path, stamp)
    yield
    _compare(path, stamp)


def _compare(path: Path | str, stamp: Stamp | None) -> None:
    if stamp is None:
        return
    try:
        now = stamp_of(Path(path).stat())
    except OSError as error:
        raise unreadable(path, error) from error
    if now != stamp:
        raise UserError(
            f"{path} changed while it was being prepared (from {stamp[1]} to {now[1]} bytes); "
            "run again when nothing writes to it"
        )


def files_state(files: Iterable[SourceFile]) -> str | None:
    """Hash of names, sizes and times. None where a file is so fresh that one more change could leave the same times."""
    settled_ns = time.time_ns() - int(SETTLED_SECONDS * 1e9)
    state = hashlib.sha256()
    for file in files:
        try:
            stamp = stamp_of(file.path.stat())
        except OSError:
            return None  # whoever reads it says why
        if max(stamp[2:]) > settled_ns:
            return None
        state.update(repr((file.name, *stamp)).encode())
    return state.hexdigest()


def hash_files(files: Sequence[SourceFile], reading: Reading) -> list[tuple[bytes, Stamp]]:
    """SHA-256 of each file, and its stamp."""

    def hashed(file: SourceFile) -> tuple[bytes, Stamp]:
        sha256 = hashlib.sha256()
        try:
            with file.path.open("rb") as stream:
                stamp = stamp_of(os.fstat(stream.fileno()))
                while block := stream.read(PIECE_BYTES):
                    sha256.update(block)
                    reading.done(len(block))
        except OSError as error:
            raise unreadable(file.path, error) from error
        with unchanged(file.path, stamp):
            return sha256.digest(), stamp

    reading.total(sum(size_of(file) for file in files))
    return list(reading.map(hashed, files))


def size_of(file: SourceFile) -> int:
    """Size in bytes; raises ``UserError`` where the file is gone."""
    try:
        return file.path.stat().st_size
    except OSError as error:
        raise unreadable(file.path, error) from error


def key_of_files(files: Sequence[SourceFile], digests: Sequence[bytes]) -> bytes:
    """Hash of the names and contents of files."""
    key = hashlib.sha256()
    for file, digest in zip(files, digests, strict=True):
        name = file.name.encode("utf-8", "surrogateescape")  # a file name need not be UTF-8
        key.update(len(name).to_bytes(8, "little") + name + digest)
    return key.digest()
