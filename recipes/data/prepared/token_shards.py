"""Streams of tokens on disk: flat files, memory-mapped and read as one.

A shard is a file of tokens and, beside it, a file with the start of each document, int64, counted from the shard's
first token. If only some tokens are trained on, a third file has a byte for each token, 1 for those, and a fourth one
where each document is, for messages. Every document is followed by the end mark. The shards of a split, in order, are
one stream: their boundaries have no effect on samples. Files of other tools are used in place.

Beside them is a file with the CRC-32 of each block of these files, in this order, as uint32. A block is compared when
it is first read: a bit that the disk has changed ends the run instead of changing it. Shards that an earlier version
made have no such file.
"""

import os
import zlib
from array import array
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np

from serried.configs.errors import UserError
from serried.configs.plain_data import open_regular
from serried.recipes.data.readers.source import Place
from serried.recipes.data.tokenizers.encode_rows import Encoded
from serried.records.files import replacing

_CHECKSUMS = ".crc32"
_BLOCK_BYTES = 2**16
"""As much as a system reads ahead of a single token."""
_FILES = ("tokens", "starts", "supervised", "places")


@dataclass(frozen=True)
class Shard:
    """Tokens of a file, and the files beside it."""

    tokens: Path
    """A file of numbers."""
    dtype: str
    count: int
    """Number of tokens."""
    starts: Path
    """Starts of documents, int64."""
    supervised: Path | None = None
    """Which tokens are trained on, uint8; None: all of them."""
    offset_bytes: int = 0
    """Start of the tokens within their file."""
    places: Path | None = None
    """Where each document is, int64 [documents, 2]: which of ``named``, and the number in it; None: not known."""
    named: tuple[tuple[str, str], ...] = ()
    """Path and noun of the ``Place`` of documents."""

    def place(self, document: int) -> Place | None:
        """Return where a document is; None: it is not known."""
        if self.places is None:
            return None
        which, number = _mapped(self.places, "<i8", 16 * document, 2).tolist()
        path, noun = self.named[which]
        return Place(path, number, "line" if noun == "line" else "row")

    def as_json(self, folder: Path) -> dict[str, Any]:
        """Return plain data; paths below ``folder`` become relative to it."""
        return {
            name: str(value.relative_to(folder) if value.is_relative_to(folder) else value)
            if isinstance(value, Path)
            else value
            for name, value in asdict(self).items()
        }

    @classmethod
    def from_json(cls, folder: Path, plain: dict[str, Any]) -> "Shard":
        """Return what ``as_json`` described."""
        paths = {name: folder / plain[name] for name in _FILES if plain.get(name) is not None}
        return cls(**{**plain, **paths, "named": tuple((path, noun) for path, noun in plain.get("named", ()))})


class TokenStream:
    """The shards of one split as one stream. Maps the files when opened; tokens are read when they are used.

    Positions and documents are counted over all shards. May be used from any number of threads.
    """

    def __init__(self, shards: Sequence[Shard]) -> None:
        """Raises ``ValueError`` or ``OSError`` for a file that is missing or too short."""
        self._tokens = [_Numbers(each.tokens, each.dtype, each.offset_bytes, each.count) for each in shards]
        self._supervised = [_Numbers(each.supervised, "u1", 0, each.count) for each in shards if each.supervised]
        self._starts = [_Numbers(each.starts, "<i8", 0, None) for each in shards]
        supervised = iter(self._supervised)
        for shard, *files in zip(shards, self._tokens, self._starts, strict=True):
            _set_checksums(shard.starts, [*files, *([next(supervised)] if shard.supervised else [])])
        self._token_bounds = np.cumsum([0, *(len(tokens) for tokens in self._tokens)])
        self._document_bounds = np.cumsum([0, *(len(starts) for starts in self._starts)])
        if self._supervised and len(self._supervised) != len(shards):
            raise ValueError("some shards say which tokens are learned, and others do not")
        self.tokens = int(self._token_bounds[-1])
        """Length of the stream."""
        self.documents = int(self._document_bounds[-1])
        self.is_supervised = bool(self._supervised)
        """Whether only some tokens are trained on."""

    def read(self, start: int, stop: int) -> np.ndarray:
        """Return tokens ``start`` up to ``stop``, [stop - start], unsigned."""
        return self._read(self._tokens, start, stop)

    def supervised(self, start: int, stop: int) -> np.ndarray:
        """Return 1 for each token from ``start`` up to ``stop`` that is trained on, [stop - start], uint8."""
        return self._read(self._supervised, start, stop)

    def document_starts(self, start: int, stop: int) -> np.ndarray:
        """Return the starts of documents from position ``start`` up to ``stop``, int64, in order."""
        pieces = []
        for shard in self._shards(start, stop):
            offset = self._token_bounds[shard]
            pieces.append(self._starts[shard].between(start - offset, stop - offset) + offset)
        return np.concatenate(pieces) if pieces else np.empty(0, np.int64)

    def all_document_starts(self) -> np.ndarray:
        """Return the start of each document, [documents], int64: in memory, 8 bytes a document."""
        return self.document_starts(0, self.tokens)

    def _read(self, shards: "list[_Numbers]", start: int, stop: int) -> np.ndarray:
        if not 0 <= start <= stop <= self.tokens:
            raise IndexError(f"tokens {start} to {stop} of {self.tokens}")
        if len(shards) == 1:
            return shards[0].read(start, stop)
        pieces = []
        for shard in self._shards(start, stop):
            offset = int(self._token_bounds[shard])
            pieces.append(shards[shard].read(max(start - offset, 0), min(stop - offset, len(shards[shard]))))
        return pieces[0] if len(pieces) == 1 else np.concatenate(pieces) if pieces else np.empty(0, np.uint8)

    def _shards(self, start: int, stop: int) -> range:
        """Numbers of the shards that hold positions ``start`` up to ``stop``."""
        if stop <= start:
            return range(0)
        first, last = np.searchsorted(self._token_bounds, (start, stop - 1), side="right") - 1
        return range(int(first), int(last) + 1)


class _Numbers:
    """A file of numbers, memory-mapped. May be read from any number of threads."""

    def __init__(self, path: Path, dtype: str, offset_bytes: int, count: int | None) -> None:
        self._path, self._numbers = path, _mapped(path, dtype, offset_bytes, count)
        self.checksums: np.ndarray | None = None
        """Of each block of the file; None: it has none."""
        self._is_intact = np.zeros(self.blocks, bool)

    def __len__(self) -> int:
        return len(self._numbers)

    @property
    def blocks(self) -> int:
        """Number of blocks of the file."""
        return -(-self._numbers.nbytes // _BLOCK_BYTES)

    def read(self, start: int, stop: int) -> np.ndarray:
        """Return numbers ``start`` up to ``stop``. Raises ``UserError`` if the disk has changed them."""
        if self.checksums is not None:
            self._compare(start, stop)
        return self._numbers[start:stop]

    def between(self, low: int, high: int) -> np.ndarray:
        """Return the numbers from ``low`` up to ``high`` of a file in ascending order. Raises ``UserError`` if the disk
        has changed them."""
        first, last = np.searchsorted(self._numbers, (low, high)).tolist()
        if self.checksums is not None:  # the search may have been misled: the neighbours show it
            begin = max(first - 1, 0)
            around = self.read(begin, min(last + 1, len(self)))
            if np.searchsorted(around, (low, high)).tolist() != [first - begin, last - begin]:
                raise self._damaged()
        return self._numbers[first:last]

    def _compare(self, start: int, stop: int) -> None:
        size = self._numbers.itemsize
        blocks = slice(start * size // _BLOCK_BYTES, -(-stop * size // _BLOCK_BYTES))
        if stop <= start or self._is_intact[blocks].all():
            return
        assert self.checksums is not None
        content = self._numbers.view(np.uint8)
        for block in np.flatnonzero(~self._is_intact[blocks]) + blocks.start:
            found = zlib.crc32(content[block * _BLOCK_BYTES : (block + 1) * _BLOCK_BYTES].data)
            if found != self.checksums[block]:
                raise self._damaged()
            self._is_intact[block] = True

    def _damaged(self) -> UserError:
        return UserError(
            f"prepared data {self._path.parent} is damaged: {self._path.name} has other bytes than were written; "
            "remove the folder, and it is prepared again"
        )


def _set_checksums(starts: Path, files: Sequence[_Numbers]) -> None:
    """Give ``files`` of a shard their checksums, if there are any. Raises ``ValueError`` if they are of other files."""
    path = starts.with_suffix(_CHECKSUMS)  # tokens may be another program's file, elsewhere
    if not path.exists():
        return
    checksums, bounds = _mapped(path, "<u4", 0, None), np.cumsum([0, *(each.blocks for each in files)]).tolist()
    if len(checksums) != bounds[-1]:
        raise ValueError(f"{path.name} has {len(checksums)} checksums of {bounds[-1]} blocks")
    for file, first, last in zip(files, bounds, bounds[1:], strict=False):
        file.checksums = checksums[first:last]


class _Checksums:
    """Computes the checksums of a file's blocks as it is written."""

    def __init__(self) -> None:
        self._done, self._current, self._left = array("I"), 0, _BLOCK_BYTES

    def add(self, content: memoryview) -> None:
        rest = content.cast("B") if content.nbytes else content
        while rest.nbytes:
            part, rest = rest[: self._left], rest[self._left :]
            self._current, self._left = zlib.crc32(part, self._current), self._left - len(part)
            if not self._left:
                self._end_block()

    def all(self) -> np.ndarray:
        if self._left < _BLOCK_BYTES:
            self._end_block()
        return np.array(self._done, "<u4")

    def _end_block(self) -> None:
        self._done.append(self._current)
        self._current, self._left = 0, _BLOCK_BYTES


def _mapped(path: Path, dtype: str, offset: int, count: int | None) -> np.ndarray:
    """Map ``count`` numbers; None: as many as there are."""
    if count == 0:
        return np.empty(0, dtype)
    with open_regular(path) as file:
        if count is None:
            count = os.fstat(file.fileno()).st_size // np.dtype(dtype).itemsize
        if not count:  # an empty file cannot be mapped
            return np.empty(0, dtype)
        return np.asarray(np.memmap(file, dtype, "r", offset, (count,)))  # plain: slices of np.memmap cost more


class ShardWriter:
    """Writes one shard under temporary names, and renames it when it is complete. A shard without documents has no
    files.

    Tokens are written as they come; in memory are 8 bytes a document, 24 of a conversation.
    """

    def __init__(self, folder: Path, name: str, dtype: np.dtype[Any]) -> None:
        self._dtype = dtype
        self._paths = [folder / f"{name}.{kind}" for kind in ("bin", "starts", "supervised", "places")]
        self._streams: dict[Path, IO[bytes]] = {}
        self._checksums: dict[Path, _Checksums] = {}
        self._stack = ExitStack()
        self._starts, self._places = array("q"), array("q")
        self._named: dict[tuple[str, str], int] = {}
        self.tokens = 0

    def __enter__(self) -> "ShardWriter":
        return self

    def add(self, encoded: Encoded, *, begins: bool, place: Place | None = None) -> None:
        """Append the tokens of a document, or of a piece of one; ``begins`` if it has the document's start."""
        tokens, _, supervised, _ = self._paths
        if begins:
            self._starts.append(self.tokens)
        self._write(tokens, encoded.tokens.astype(self._dtype, copy=False).data)
        if encoded.supervised is not None:
            self._write(supervised, encoded.supervised.astype(np.uint8, copy=False).data)
            if place is not None:
                which = self._named.setdefault((place.path, place.noun), len(self._named))
                self._places.extend((which, place.number))
        self.tokens += len(encoded.tokens)

    def shard(self) -> Shard:
        """Return the shard, for which something was added."""
        tokens, starts, supervised, places = self._paths
        return Shard(
            tokens, self._dtype.name, self.tokens, starts, supervised if supervised in self._streams else None,
            places=places if self._has_places else None, named=tuple(self._named) if self._has_places else (),
        )  # fmt: skip

    @property
    def _has_places(self) -> bool:
        return bool(self._places) and len(self._places) == 2 * len(self._starts)

    def __exit__(self, *error: Any) -> None:
        if error[0] is None and self._streams:
            self._write(self._paths[1], np.array(self._starts, "<i8").data)
            found = [self._checksums[path].all() for path in self._paths[:3] if path in self._checksums]
            self._write(self._paths[1].with_suffix(_CHECKSUMS), np.concatenate(found).data)
            if self._has_places:
                self._write(self._paths[3], np.array(self._places, "<i8").data)
        self._stack.__exit__(*error)

    def _write(self, path: Path, content: memoryview) -> None:
        if path not in self._streams:
            self._streams[path] = self._stack.enter_context(replacing(path))
            self._checksums[path] = _Checksums()
        self._checksums[path].add(content)
        self._streams[path].write(content)
