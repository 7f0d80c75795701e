"""Streams of tokens on disk: flat files, memory-mapped and read as one stream.

A shard is a file of tokens and a file with the start of each document, int64, relative to the shard's first token. If
only some tokens are trained on, a third file has one byte per token, 1 if it is trained on. A fourth file then has the
position of each document in its source, for messages. If rows or messages have weights other than 1, another file has
the weight of each token, fp32. Every document is followed by the end token. The shards of a
split, in order, are one stream: their boundaries have no effect on samples. Files of other tools are used in place.

Another file has the CRC-32 of each block of these files, in this order, as uint32. A block is verified when it is first
read, so a bit that changed on the disk ends the run with an error. Shards written by an earlier version have no such
file.
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
from serried.recipes.data.prepared.ranged_objects import RangedFiles, is_ranged
from serried.recipes.data.readers.source import Place
from serried.recipes.data.tokenizers.encode_rows import Encoded
from serried.records.files import replacing

_CHECKSUMS = ".crc32"
_BLOCK_BYTES = 2**16
"""Size of a checksummed block in bytes. Operating systems read ahead about this much for a single token."""
_FILES = ("tokens", "starts", "supervised", "places", "weights")


@dataclass(frozen=True)
class Shard:
    """A file of tokens and its accompanying files."""

    tokens: Path
    """File of token ids."""
    dtype: str
    count: int
    """Number of tokens."""
    starts: Path
    """File with the starts of documents, int64."""
    supervised: Path | None = None
    """File with one byte per token, uint8: 1 if it is trained on. None if all tokens are."""
    offset_bytes: int = 0
    """Offset of the tokens in their file, in bytes."""
    places: Path | None = None
    """File with the position of each document, int64 [documents, 2]: an index into ``named``, and ``Place.number``.
    None if unknown."""
    named: tuple[tuple[str, str], ...] = ()
    """Path and noun of each ``Place`` that ``places`` refers to."""
    weights: Path | None = None
    """File with the weight of each token in the loss, fp32. None if all are 1."""

    def place(self, document: int) -> Place | None:
        """Return the position of a document in its source; None if it is unknown."""
        if self.places is None:
            return None
        which, number = _mapped(self.places, "<i8", 16 * document, 2).tolist()
        path, noun = self.named[which]
        return Place(path, number, "line" if noun == "line" else "row")

    def as_json(self, folder: Path) -> dict[str, Any]:
        """Return plain JSON data. Paths below ``folder`` become relative to it."""
        return {
            name: str(value.relative_to(folder) if value.is_relative_to(folder) else value)
            if isinstance(value, Path)
            else value
            for name, value in asdict(self).items()
        }

    @classmethod
    def from_json(cls, folder: Path, plain: dict[str, Any]) -> "Shard":
        """Create a shard from the result of ``as_json``."""
        paths = {name: folder / plain[name] for name in _FILES if plain.get(name) is not None}
        return cls(**{**plain, **paths, "named": tuple((path, noun) for path, noun in plain.get("named", ()))})


class TokenStream:
    """The shards of one split as one stream. Files are mapped when opened; tokens are read when used.

    Positions and documents are counted over all shards. May be used by any number of threads.
    """

    def __init__(self, shards: Sequence[Shard]) -> None:
        """Map the files. Raises ``ValueError`` or ``OSError`` if a file is missing or too short."""
        folders = {shard.tokens.parent for shard in shards}
        ranged = {folder: RangedFiles(folder) for folder in folders if is_ranged(folder)}

        def numbers(path: Path, dtype: str, offset_bytes: int, count: int | None) -> _Numbers:
            return _Numbers(path, dtype, offset_bytes, count, ranged.get(path.parent))

        self._tokens = [numbers(shard.tokens, shard.dtype, shard.offset_bytes, shard.count) for shard in shards]
        self._supervised = [numbers(shard.supervised, "u1", 0, shard.count) for shard in shards if shard.supervised]
        self._starts = [numbers(shard.starts, "<i8", 0, None) for shard in shards]
        self._weights = [
            None if shard.weights is None else numbers(shard.weights, "<f4", 0, shard.count) for shard in shards
        ]
        supervised = iter(self._supervised)
        for shard, tokens, starts, weights in zip(shards, self._tokens, self._starts, self._weights, strict=True):
            files = [tokens, starts, *([next(supervised)] if shard.supervised else [])]
            _set_checksums(shard.starts, [*files, *([] if weights is None else [weights])])
        self._token_bounds = np.cumsum([0, *(len(tokens) for tokens in self._tokens)])
        self._document_bounds = np.cumsum([0, *(len(starts) for starts in self._starts)])
        if self._supervised and len(self._supervised) != len(shards):
            raise ValueError("some shards store which tokens are trained on, and others do not")
        self.tokens = int(self._token_bounds[-1])
        """Number of tokens."""
        self.documents = int(self._document_bounds[-1])
        self.is_supervised = bool(self._supervised)
        """Whether only some tokens are trained on."""
        self.is_weighted = any(weights is not None for weights in self._weights)
        """Whether any token has a weight other than 1."""

    def read(self, start: int, stop: int) -> np.ndarray:
        """Return the tokens from ``start`` up to ``stop``, [stop - start], unsigned."""
        return self._read(self._tokens, start, stop)

    def supervised(self, start: int, stop: int) -> np.ndarray:
        """Return, for each token from ``start`` up to ``stop``, 1 if it is trained on, [stop - start], uint8."""
        return self._read(self._supervised, start, stop)

    def weights(self, start: int, stop: int) -> np.ndarray:
        """Return the weight in the loss of each token from ``start`` up to ``stop``, [stop - start], fp32."""
        found = np.ones(stop - start, np.float32)
        for shard in self._shards(start, stop) if self.is_weighted else ():
            offset, weights = int(self._token_bounds[shard]), self._weights[shard]
            if weights is not None:
                first, last = max(start - offset, 0), min(stop - offset, len(weights))
                found[first + offset - start : last + offset - start] = weights.read(first, last)
        return found

    def document_starts(self, start: int, stop: int) -> np.ndarray:
        """Return the starts of documents between positions ``start`` and ``stop``, int64, in order."""
        pieces = []
        for shard in self._shards(start, stop):
            offset = self._token_bounds[shard]
            pieces.append(self._starts[shard].between(start - offset, stop - offset) + offset)
        return np.concatenate(pieces) if pieces else np.empty(0, np.int64)

    def all_document_starts(self) -> np.ndarray:
        """Return the start of each document, [documents], int64. This takes 8 bytes of memory per document."""
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
        """Return the indices of the shards that contain positions ``start`` up to ``stop``."""
        if stop <= start:
            return range(0)
        first, last = np.searchsorted(self._token_bounds, (start, stop - 1), side="right") - 1
        return range(int(first), int(last) + 1)


class _Numbers:
    """A memory-mapped file of numbers, or one that is read in ranges. May be read by any number of threads."""

    def __init__(
        self, path: Path, dtype: str, offset_bytes: int, count: int | None, ranged: RangedFiles | None = None
    ) -> None:
        self._path, self._numbers = path, _mapped(path, dtype, offset_bytes, count)
        self._offset_bytes = offset_bytes
        self._ranged = ranged if ranged is not None and path.name in ranged else None
        self.checksums: np.ndarray | None = None
        """Checksum of each block of the file; None if it has none."""
        self._is_intact = np.zeros(self.blocks, bool)

    def __len__(self) -> int:
        return len(self._numbers)

    @property
    def blocks(self) -> int:
        """Number of blocks of the file."""
        return -(-self._numbers.nbytes // _BLOCK_BYTES)

    def read(self, start: int, stop: int) -> np.ndarray:
        """Return the numbers from ``start`` up to ``stop``. Raises ``UserError`` if they have changed on the disk."""
        if self._ranged is not None:
            return self._read_range(self._ranged, start, stop)
        if self.checksums is not None:
            self._compare(start, stop)
        return self._numbers[start:stop]

    def _read_range(self, ranged: RangedFiles, start: int, stop: int) -> np.ndarray:
        size = self._numbers.itemsize
        begin, end = start * size, stop * size
        if stop <= start:
            return self._numbers[start:start]
        if self.checksums is not None:  # whole blocks
            begin = begin // _BLOCK_BYTES * _BLOCK_BYTES
            end = min(-(-end // _BLOCK_BYTES) * _BLOCK_BYTES, self._numbers.nbytes)
        for again in (False, True):  # what is wrong may have been damaged in transit
            content = ranged.read(self._path.name, self._offset_bytes + begin, self._offset_bytes + end, again=again)
            if not self._is_wrong(content, begin // _BLOCK_BYTES):
                return content[start * size - begin : stop * size - begin].view(self._numbers.dtype)
        raise UserError(
            f"{ranged.where(self._path.name)} is damaged: it does not match its checksum; prepare the data again"
        )

    def _is_wrong(self, content: np.ndarray, first_block: int) -> bool:
        """Return whether a block of ``content`` does not match its checksum."""
        return self.checksums is not None and any(
            zlib.crc32(content[at : at + _BLOCK_BYTES].data) != self.checksums[first_block + number]
            for number, at in enumerate(range(0, len(content), _BLOCK_BYTES))
        )

    def between(self, low: int, high: int) -> np.ndarray:
        """Return the numbers in the interval [``low``, ``high``). The file must be sorted in ascending order. Raises
        ``UserError`` if the numbers have changed on the disk."""
        first, last = np.searchsorted(self._numbers, (low, high)).tolist()
        if self.checksums is not None:  # changed numbers may have misled the search; repeat it among verified neighbors
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
            f"prepared data {self._path.parent} is damaged: {self._path.name} does not match its checksum; remove the "
            "folder to prepare the data again"
        )


def _set_checksums(starts: Path, files: Sequence[_Numbers]) -> None:
    """Assign checksums to the ``files`` of a shard, if the shard has checksums. Raises ``ValueError`` if their number
    does not match the files."""
    path = starts.with_suffix(_CHECKSUMS)  # the tokens may be in another program's folder
    if not path.exists():
        return
    checksums, bounds = _mapped(path, "<u4", 0, None), np.cumsum([0, *(numbers.blocks for numbers in files)]).tolist()
    if len(checksums) != bounds[-1]:
        raise ValueError(f"{path.name} has {len(checksums)} checksums for {bounds[-1]} blocks")
    for file, first, last in zip(files, bounds, bounds[1:], strict=False):
        file.checksums = checksums[first:last]


class _Checksums:
    """Computes the checksum of each block of a file while it is written."""

    def __init__(self) -> None:
        self._done = array("I")
        self._current = 0
        self._left = _BLOCK_BYTES

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
    """Memory-map ``count`` numbers, or all if it is None."""
    if count == 0:
        return np.empty(0, dtype)
    with open_regular(path) as file:
        if count is None:
            count = os.fstat(file.fileno()).st_size // np.dtype(dtype).itemsize
        if not count:  # an empty file cannot be mapped
            return np.empty(0, dtype)
        return np.asarray(np.memmap(file, dtype, "r", offset, (count,)))  # slices of an np.memmap are slower


class ShardWriter:
    """Writes one shard under temporary names, and renames it when complete. A shard without documents has no files.

    Tokens are written as they arrive. Memory use is 8 bytes per document, or 24 per conversation.
    """

    def __init__(self, folder: Path, name: str, dtype: np.dtype[Any]) -> None:
        self._dtype = dtype
        kinds = ("bin", "starts", "supervised", "weights", "places")
        self._paths = [folder / f"{name}.{kind}" for kind in kinds]
        self._streams: dict[Path, IO[bytes]] = {}
        self._checksums: dict[Path, _Checksums] = {}
        self._stack = ExitStack()
        self._starts, self._places = array("q"), array("q")
        self._named: dict[tuple[str, str], int] = {}
        self.tokens = 0

    def __enter__(self) -> "ShardWriter":
        return self

    def add(self, encoded: Encoded, *, begins: bool, place: Place | None = None) -> None:
        """Append the tokens of a document, or of a piece of one. ``begins``: whether they include the document's
        start."""
        tokens, _, supervised, weights, _ = self._paths
        if begins:
            self._starts.append(self.tokens)
        self._write(tokens, encoded.tokens.astype(self._dtype, copy=False).data)
        if encoded.supervised is not None:
            self._write(supervised, encoded.supervised.astype(np.uint8, copy=False).data)
            if place is not None:
                which = self._named.setdefault((place.path, place.noun), len(self._named))
                self._places.extend((which, place.number))
        if encoded.weights is not None and weights not in self._streams:
            self._write(weights, np.ones(self.tokens, "<f4").data)
        if weights in self._streams:
            own = np.ones(len(encoded.tokens)) if encoded.weights is None else encoded.weights
            self._write(weights, own.astype("<f4").data)
        self.tokens += len(encoded.tokens)

    def shard(self) -> Shard:
        """Return the shard. It must not be empty."""
        tokens, starts, supervised, weights, places = self._paths
        return Shard(
            tokens, self._dtype.name, self.tokens, starts, supervised if supervised in self._streams else None,
            places=places if self._has_places else None, named=tuple(self._named) if self._has_places else (),
            weights=weights if weights in self._streams else None,
        )  # fmt: skip

    @property
    def _has_places(self) -> bool:
        return bool(self._places) and len(self._places) == 2 * len(self._starts)

    def __exit__(self, *error: Any) -> None:
        if error[0] is None and self._streams:
            self._write(self._paths[1], np.array(self._starts, "<i8").data)
            found = [self._checksums[path].all() for path in self._paths[:4] if path in self._checksums]
            self._write(self._paths[1].with_suffix(_CHECKSUMS), np.concatenate(found).data)
            if self._has_places:
                self._write(self._paths[4], np.array(self._places, "<i8").data)
        self._stack.__exit__(*error)

    def _write(self, path: Path, content: memoryview) -> None:
        if path not in self._streams:
            self._streams[path] = self._stack.enter_context(replacing(path))
            self._checksums[path] = _Checksums()
        self._checksums[path].add(content)
        self._streams[path].write(content)
