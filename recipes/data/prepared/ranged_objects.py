"""Objects in a bucket that are read in ranges, in place of the large files of a folder of prepared data.

``objects.json`` in the folder names the objects. Each has a sparse file of its name and size, which receives the
blocks that were read, up to ``data.fetch_limit``. ``ranges.blocks`` has the CRC-32 of each of them, so a block that
is incomplete after a crash is read from the bucket again. The processes of a node share these files without a lock,
because all of them write the same bytes.
"""

import json
import os
import re
import threading
import zlib
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from serried.configs.errors import TrainingStopped, UserError
from serried.configs.plain_data import is_count, parse_json, read_regular
from serried.records.files import write_atomically
from serried.records.object_store import open_store
from serried.records.store import Conflict, Store, StoreError

OBJECTS = "objects.json"
BLOCK_BYTES = 2**16
_LIMIT, _BLOCKS = "ranges.limit", "ranges.blocks"
_MOST_BLOCKS = 128
"""Maximum number of blocks of a request."""
_COUNT_EVERY = 64
"""Number of kept blocks after which a process counts the blocks that all processes have kept."""
_NAME = re.compile(r"(?:train|validation|tokens)-[0-9]{5,}\.(?:bin|supervised|weights)")


class StoredObject(NamedTuple):
    """An object that stands in for a file."""

    key: str
    """Name relative to the URL of all objects of a folder."""
    size_bytes: int
    tag: str

    @property
    def blocks(self) -> int:
        """Number of blocks, of which the last may be shorter."""
        return -(-self.size_bytes // BLOCK_BYTES)


def is_large(name: str) -> bool:
    """Return whether a file of prepared data has several bytes per token. The others are small beside it."""
    return _NAME.fullmatch(name) is not None


def is_written_here(name: str) -> bool:
    """Return whether a file in a folder with objects is of this node, and not part of the prepared data."""
    return name in (_LIMIT, _BLOCKS)


def write_objects(folder: Path, url: str, objects: Mapping[str, StoredObject]) -> None:
    """Record objects below ``url`` that stand in for files of ``folder``, by name."""
    write_atomically(folder / OBJECTS, json.dumps({"url": url, "files": objects}, indent=1) + "\n")


def read_objects(folder: Path) -> tuple[str, dict[str, StoredObject]]:
    """Return the arguments of ``write_objects``; no objects if it was not called. Raises ``ValueError`` if they are
    damaged."""
    if not (folder / OBJECTS).exists():
        return "", {}
    plain: Any = parse_json(read_regular(folder / OBJECTS))
    objects = {name: StoredObject(*entry) for name, entry in plain["files"].items()}
    for name, entry in objects.items():
        if not is_large(name) or not is_count(entry.size_bytes) or not entry.size_bytes:
            raise ValueError(f"{OBJECTS} has the file {name!r} of {entry.size_bytes!r} bytes")
    return str(plain["url"]), objects


def read_in_ranges(folder: Path, limit_bytes: int) -> None:
    """Create the sparse files of the objects of ``folder``. At most ``limit_bytes`` of their content is kept there."""
    _, objects = read_objects(folder)
    for name, entry in objects.items():
        with (folder / name).open("wb") as file:
            file.truncate(entry.size_bytes)
    # Not sparse: if the disk is full, writing to a mapped file without space would kill the process.
    write_atomically(folder / _BLOCKS, bytes(4 * sum(entry.blocks for entry in objects.values())))
    use_limit(folder, limit_bytes)


def use_limit(folder: Path, limit_bytes: int) -> None:
    """Change the limit of the content that is kept in ``folder``."""
    write_atomically(folder / _LIMIT, f"{limit_bytes}\n")


def is_ranged(folder: Path) -> bool:
    """Return whether files of ``folder`` are read in ranges."""
    return (folder / _LIMIT).exists() and (folder / OBJECTS).exists()


class StoredObjects:
    """Objects below a URL, which any number of threads may read. The bucket is not used before the first read, because
    a process that has used it must not fork."""

    def __init__(self, url: str) -> None:
        self.url = url
        self._store: Store | None = None
        self._opening = threading.Lock()

    def read_into(self, entry: StoredObject, offset: int, content: np.ndarray) -> None:
        """Fill ``content`` with the bytes of an object from ``offset`` on.

        Raises:
            UserError: The object is missing or has changed.
            TrainingStopped: The bucket does not answer.
        """
        with self._opening:
            self._store = self._store or open_store(self.url, "data.path")
        where = self._store.where(entry.key)
        try:
            self._store.read_into(entry.key, offset, content.data, entry.tag)
        except Conflict:
            raise UserError(
                f"{where} changed since it was listed; restore that version, or start a new run with the new one"
            ) from None
        except StoreError as error:
            try:
                is_missing = self._store.stat(entry.key) is None
            except StoreError:
                is_missing = False
            if is_missing:
                raise UserError(f"{where} does not exist any more; restore it, or start a new run") from None
            raise TrainingStopped(f"cannot read {error}") from None


class RangedFiles:
    """Files of a folder whose content is in a bucket. They may be read by any number of threads."""

    def __init__(self, folder: Path) -> None:
        """Open the files. No request is sent before they are read. Raises ``ValueError`` or ``OSError`` if the folder
        is damaged."""
        self._folder = folder
        url, self._entries = read_objects(folder)
        self._objects = StoredObjects(url)
        self._limit_blocks = int(read_regular(folder / _LIMIT)) // BLOCK_BYTES
        first_blocks = np.cumsum([0, *(entry.blocks for entry in self._entries.values())]).tolist()
        self._sums = np.memmap(folder / _BLOCKS, "<u4", "r+", shape=(first_blocks[-1],))
        """Checksum of each block of all objects; 0: it is not kept."""
        self._first_blocks = dict(zip(self._entries, first_blocks, strict=False))
        self._kept_blocks = 0
        self._left_until_count = 0

    def __contains__(self, name: str) -> bool:
        return name in self._entries

    def where(self, name: str) -> str:
        """Return the URL of the object of a file."""
        return f"{self._objects.url}/{self._entries[name].key}"

    def read(self, name: str, start: int, stop: int, *, again: bool = False) -> np.ndarray:
        """Return bytes ``start`` up to ``stop`` of a file, [stop - start], uint8. ``again``: ignore what is kept.

        Raises:
            UserError: The object is missing or has changed.
            TrainingStopped: The bucket does not answer.
        """
        entry = self._entries[name]
        first, last = start // BLOCK_BYTES, -(-stop // BLOCK_BYTES)
        begin = first * BLOCK_BYTES
        content = np.zeros(min(last * BLOCK_BYTES, entry.size_bytes) - begin, np.uint8)
        sums = self._sums[self._first_blocks[name] :][first:last]
        is_here = not again and sums.any() and self._read_kept(name, begin, content)
        missing = [n for n, kept in enumerate(sums) if not is_here or not kept or kept != _sum(_block(content, n))]
        for blocks in _consecutive(missing):
            offset = blocks.start * BLOCK_BYTES
            part = content[offset : blocks.stop * BLOCK_BYTES]
            self._objects.read_into(entry, begin + offset, part)
            if self._may_keep(len(blocks)):
                self._keep(name, begin + offset, part, sums[blocks.start : blocks.stop])
        return content[start - begin : stop - begin]

    def _may_keep(self, blocks: int) -> bool:
        if self._left_until_count <= 0:
            self._kept_blocks = int(np.count_nonzero(self._sums))
            self._left_until_count = _COUNT_EVERY
        self._left_until_count -= blocks
        self._kept_blocks += blocks
        return self._kept_blocks <= self._limit_blocks

    def _read_kept(self, name: str, offset: int, content: np.ndarray) -> bool:
        """Fill ``content`` with what is kept. Return False if it cannot be read."""
        try:
            with (self._folder / name).open("rb", buffering=0) as file:
                os.preadv(file.fileno(), [content.data], offset)
        except OSError:  # the folder was removed, or the disk fails
            return False
        return True

    def _keep(self, name: str, offset: int, content: np.ndarray, sums: np.ndarray) -> None:
        try:
            with (self._folder / name).open("r+b", buffering=0) as file:
                os.pwrite(file.fileno(), content.data, offset)
        except OSError:  # the disk is full, or the folder was removed: what is read later is not kept
            self._limit_blocks = 0
            return
        sums[:] = [_sum(_block(content, number)) for number in range(len(sums))]


def _block(content: np.ndarray, number: int) -> np.ndarray:
    return content[number * BLOCK_BYTES : (number + 1) * BLOCK_BYTES]


def _sum(content: np.ndarray) -> int:
    """Return the CRC-32 of ``content``, but never 0."""
    return zlib.crc32(content.data) or 1


def _consecutive(numbers: Sequence[int]) -> Iterator[range]:
    """Yield ascending ``numbers`` as ranges of at most ``_MOST_BLOCKS``."""
    for _, group in groupby(enumerate(numbers), lambda item: item[1] - item[0]):
        run = [number for _, number in group]
        for first in range(run[0], run[-1] + 1, _MOST_BLOCKS):
            yield range(first, min(first + _MOST_BLOCKS, run[-1] + 1))
