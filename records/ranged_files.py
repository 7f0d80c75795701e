"""Files whose data is read from a bucket in byte ranges. Only their headers are in the local folder.

A checkpoint in a bucket is used through a local folder with its small files. Its safetensors files there have the real
size and the real header, but no data: this process reads any range of the data from the bucket, and compares it with
the checksums of the manifest.
"""

import base64
import math
import struct
import threading
import zlib
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path

from serried.configs.errors import UserError
from serried.records.store import Store, StoreError, ended_by

BLOCK_BYTES = 2**20
"""Number of bytes with one checksum."""
_READS = 2
"""Number of attempts to read a range with a wrong checksum, which may have been damaged in transit."""


class DamagedFile(UserError):
    """Raised if bytes in a bucket are missing, or differ from their checksum."""


class BlockSums:
    """CRC-32 of each MiB of a file, while it is written or read from front to back."""

    def __init__(self) -> None:
        self._sums: list[int] = []
        self._filled = BLOCK_BYTES

    def add(self, content: memoryview) -> None:
        """Append bytes."""
        while len(content):
            if self._filled == BLOCK_BYTES:
                self._sums.append(0)
                self._filled = 0
            part = content[: BLOCK_BYTES - self._filled]
            self._sums[-1] = zlib.crc32(part, self._sums[-1])
            self._filled += len(part)
            content = content[len(part) :]

    def text(self) -> str:
        """Return the checksums as 4 bytes each, little-endian, in base64."""
        return base64.b64encode(struct.pack(f"<{len(self._sums)}I", *self._sums)).decode()


def block_sums(text: str, size: int) -> Sequence[int]:
    """Return the checksums in ``text`` of a file of ``size`` bytes. Raises ``ValueError`` if their number is wrong."""
    content = base64.b64decode(text, validate=True)
    if len(content) != 4 * math.ceil(size / BLOCK_BYTES):
        raise ValueError(f"{len(content)} bytes of checksums for {size} bytes")
    return struct.unpack(f"<{len(content) // 4}I", content)


class RangedFile:
    """A file in a bucket with a checksum for each MiB. Several threads may read it at once."""

    def __init__(self, store: Store, key: str, size: int, blocks: str) -> None:
        self._store = store
        self._key = key
        self._size = size
        self._sums = block_sums(blocks, size)
        self._small_reads = threading.Lock()
        self._last: tuple[int, memoryview] = (-1, memoryview(b""))
        """Number and content of the last block of the last range: the next tensor may begin in it."""

    def read_into(self, offset: int, view: memoryview) -> None:
        """Fill ``view`` with the bytes from ``offset`` on.

        Raises ``DamagedFile`` if they are missing or differ from their checksums, and ``UserError`` or
        ``TrainingStopped`` if they cannot be read.
        """
        if not len(view):
            return
        first, end = offset // BLOCK_BYTES, offset + len(view)
        last = math.ceil(end / BLOCK_BYTES)
        # Small tensors share a block, which is read once.
        with self._small_reads if last == first + 1 else nullcontext():
            self._read_blocks(first, last, offset - first * BLOCK_BYTES, view)

    def _read_blocks(self, first: int, last: int, skipped: int, view: memoryview) -> None:
        content = memoryview(bytearray(min(self._size, last * BLOCK_BYTES) - first * BLOCK_BYTES))
        number, kept = self._last
        known = len(kept) if number == first else 0
        content[:known] = kept[:known]
        if known < len(content):
            self._read(first + (known > 0), content[known:])
        view[:] = content[skipped : skipped + len(view)]
        self._last = last - 1, memoryview(bytes(content[(last - 1 - first) * BLOCK_BYTES :]))

    def _read(self, first: int, view: memoryview) -> None:
        """Read whole blocks, from number ``first`` on."""
        where = self._store.where(self._key)
        for tries_left in reversed(range(_READS)):
            try:
                self._store.read_into(self._key, first * BLOCK_BYTES, view)
            except StoreError as error:
                try:
                    found = self._store.stat(self._key)
                except StoreError:
                    raise ended_by(error, f"cannot read {error}") from None
                if found is None or found[0] < self._size:
                    raise DamagedFile(f"{where} is missing or too short") from None
                raise ended_by(error, f"cannot read {error}") from None
            pieces = (view[start : start + BLOCK_BYTES] for start in range(0, len(view), BLOCK_BYTES))
            wrong = [number for number, piece in enumerate(pieces, first) if zlib.crc32(piece) != self._sums[number]]
            if not wrong:
                return
            if not tries_left:
                raise DamagedFile(f"{where} is damaged in MiB {wrong[0]}: its checksum differs from the manifest")


_FILES: dict[Path, RangedFile] = {}


def attach(path: Path, file: RangedFile) -> None:
    """Make reads of tensors in ``path`` read ``file``, in this process."""
    _FILES[path.absolute()] = file


def has_ranged_files(folder: Path) -> bool:
    """Return whether this process reads tensors in ``folder`` from a bucket."""
    return any(path.parent == folder.absolute() for path in _FILES)


def ranged_file(path: Path) -> RangedFile | None:
    """Return the file in a bucket whose data ``path`` lacks, or None if it is an ordinary file."""
    return _FILES.get(path.absolute()) if _FILES else None
