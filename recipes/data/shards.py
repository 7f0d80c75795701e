"""Streams of tokens on disk: flat files, memory-mapped and read as one.

A shard is a file of tokens and, beside it, a file with the start of each document, int64, counted from the shard's
first token. If only some tokens are trained on, a third file has a byte for each token, 1 for those. Every document is
followed by the end mark. The shards of a split, in order, are one stream: their boundaries have no effect on samples.
Files of other tools are used in place.
"""

import os
from array import array
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np

from serried.configs.plain_data import open_regular
from serried.recipes.data.encode import Encoded
from serried.records.files import replacing


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
        paths = {name: folder / plain[name] for name in ("tokens", "starts", "supervised") if plain[name] is not None}
        return cls(**{**plain, **paths})


class TokenStream:
    """The shards of one split as one stream. Maps the files when opened; tokens are read when they are used.

    Positions and documents are counted over all shards. May be used from any number of threads.
    """

    def __init__(self, shards: Sequence[Shard]) -> None:
        """Raises ``ValueError`` or ``OSError`` for a file that is missing or too short."""
        self._tokens = [_mapped(each.tokens, each.dtype, each.offset_bytes, each.count) for each in shards]
        self._supervised = [_mapped(each.supervised, "u1", 0, each.count) for each in shards if each.supervised]
        self._starts = [_mapped(each.starts, "<i8", 0, None) for each in shards]
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
            first, last = np.searchsorted(self._starts[shard], (start - offset, stop - offset))
            pieces.append(self._starts[shard][first:last] + offset)
        return np.concatenate(pieces) if pieces else np.empty(0, np.int64)

    def all_document_starts(self) -> np.ndarray:
        """Return the start of each document, [documents], int64: in memory, 8 bytes a document."""
        return self.document_starts(0, self.tokens)

    def _read(self, shards: list[np.ndarray], start: int, stop: int) -> np.ndarray:
        if not 0 <= start <= stop <= self.tokens:
            raise IndexError(f"tokens {start} to {stop} of {self.tokens}")
        if len(shards) == 1:
            return shards[0][start:stop]
        pieces = []
        for shard in self._shards(start, stop):
            offset = int(self._token_bounds[shard])
            pieces.append(shards[shard][max(start - offset, 0) : stop - offset])
        return pieces[0] if len(pieces) == 1 else np.concatenate(pieces) if pieces else np.empty(0, np.uint8)

    def _shards(self, start: int, stop: int) -> range:
        """Numbers of the shards that hold positions ``start`` up to ``stop``."""
        if stop <= start:
            return range(0)
        first, last = np.searchsorted(self._token_bounds, (start, stop - 1), side="right") - 1
        return range(int(first), int(last) + 1)


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

    Tokens are written as they come; in memory are 8 bytes a document.
    """

    def __init__(self, folder: Path, name: str, dtype: np.dtype[Any]) -> None:
        self._dtype = dtype
        self._paths = [folder / f"{name}.{kind}" for kind in ("bin", "starts", "supervised")]
        self._streams: dict[Path, IO[bytes]] = {}
        self._stack = ExitStack()
        self._starts = array("q")
        self.tokens = 0

    def __enter__(self) -> "ShardWriter":
        return self

    def add(self, encoded: Encoded, *, begins: bool) -> None:
        """Append the tokens of a document, or of a piece of one; ``begins`` if it has the document's start."""
        tokens, _, supervised = self._paths
        if begins:
            self._starts.append(self.tokens)
        self._write(tokens, encoded.tokens.astype(self._dtype, copy=False).data)
        if encoded.supervised is not None:
            self._write(supervised, encoded.supervised.astype(np.uint8, copy=False).data)
        self.tokens += len(encoded.tokens)

    def shard(self) -> Shard:
        """Return the shard, for which something was added."""
        tokens, starts, supervised = self._paths
        return Shard(tokens, self._dtype.name, self.tokens, starts, supervised if supervised in self._streams else None)

    def __exit__(self, *error: Any) -> None:
        if error[0] is None and self._streams:
            self._write(self._paths[1], np.array(self._starts, "<i8").data)
        self._stack.__exit__(*error)

    def _write(self, path: Path, content: memoryview) -> None:
        if path not in self._streams:
            self._streams[path] = self._stack.enter_context(replacing(path))
        self._streams[path].write(content)
