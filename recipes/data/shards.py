"""Streams of tokens on disk: memory-mapped safetensors files, read as one.

A shard holds ``tokens`` [tokens], unsigned; ``document_starts`` [documents], int64, counted from the shard's first
token; and, where only some tokens are learned, ``supervised`` [tokens], uint8, 1 for those. Every document is followed
by the end mark. The shards of a split, in order, are one stream: where one ends says nothing about the samples.

Flat files of other tools take part where they lie: a ``FlatTokens`` says where the tokens are, and has the rest in a
shard without tokens.
"""

import contextlib
import os
import socket
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, Any

import numpy as np
import torch

from serried.configs.errors import UserError
from serried.recipes.data.encode import Encoded
from serried.records.tensors import TensorSpec, header, read_header

_DTYPES = {torch.uint8: np.uint8, torch.uint16: np.uint16, torch.uint32: np.uint32, torch.int64: np.int64}
_TORCH_DTYPES = {np.dtype(numpy): dtype for dtype, numpy in _DTYPES.items()}

_HEADER_BYTES = 512
_COPY_BYTES = 1 << 20


@dataclass(frozen=True)
class FlatTokens:
    """Tokens in a file of another tool: ``tokens`` numbers of type ``dtype`` from byte ``offset_bytes`` on."""

    path: Path
    dtype: str
    offset_bytes: int
    tokens: int
    starts: Path
    """A shard with ``document_starts`` alone."""


class TokenStream:
    """The shards of one split as one stream. Reads the headers when opened, tokens where they are touched.

    Positions and documents are counted over all shards. May be used from any number of threads.
    """

    def __init__(self, files: Sequence[Path | FlatTokens]) -> None:
        """Raises ``ValueError``, ``KeyError`` or ``OSError`` for a file that is no shard, or shorter than it says."""
        shards = [_map_flat(file) if isinstance(file, FlatTokens) else _map(file) for file in files]
        self._tokens = [shard["tokens"] for shard in shards]
        self._supervised = [shard["supervised"] for shard in shards if "supervised" in shard]
        self._starts = [shard["document_starts"] for shard in shards]
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
        """Tokens ``start`` up to ``stop``, [stop - start], unsigned."""
        return self._read(self._tokens, start, stop)

    def supervised(self, start: int, stop: int) -> np.ndarray:
        """1 for each token from ``start`` up to ``stop`` that is trained on, [stop - start], uint8."""
        return self._read(self._supervised, start, stop)

    def document_starts(self, start: int, stop: int) -> np.ndarray:
        """Positions at which documents begin, of those from ``start`` up to ``stop``, int64, in order."""
        pieces = []
        for shard in self._shards(start, stop):
            offset = self._token_bounds[shard]
            first, last = np.searchsorted(self._starts[shard], (start - offset, stop - offset))
            pieces.append(self._starts[shard][first:last] + offset)
        return np.concatenate(pieces) if pieces else np.empty(0, np.int64)

    def all_document_starts(self) -> np.ndarray:
        """Where each document begins, [documents], int64: in memory, 8 bytes a document."""
        pieces = [starts + offset for starts, offset in zip(self._starts, self._token_bounds, strict=False)]
        return np.concatenate(pieces) if pieces else np.empty(0, np.int64)

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


def _map_flat(file: FlatTokens) -> dict[str, np.ndarray]:
    tokens = np.memmap(file.path, np.dtype(file.dtype), mode="r", offset=file.offset_bytes, shape=(file.tokens,))
    return _map(file.starts) | {"tokens": np.asarray(tokens)}


def _map(path: Path) -> dict[str, np.ndarray]:
    """The tensors of a safetensors file, mapped.

    ``safetensors`` itself copies slices while it holds the interpreter lock: one page of a slow disk would stop the
    training thread. Copies out of a NumPy map let it go, and cost half (1.2 against 2.7 microseconds for 2,048 tokens).
    """
    try:
        entries = read_header(path)
    except UserError as error:
        raise ValueError(str(error)) from None
    tensors = {}
    for name, (spec, offset) in entries.items():
        dtype = _DTYPES[spec.dtype]
        # As a plain array: np.memmap's own slices cost more. An empty one cannot be mapped.
        mapped = np.memmap(path, dtype, mode="r", offset=offset, shape=spec.shape) if spec.numel else np.empty(0, dtype)
        tensors[name] = np.asarray(mapped)
    return tensors


class ShardWriter:
    """Writes one shard: under another name, and under its own when it is whole. A shard without documents is not made.

    Tokens go to the disk as they come; in memory are 8 bytes a document. ``safetensors.save_file`` wants whole tensors:
    here the header, whose size is fixed by padding it with spaces as the format allows, is written last.
    """

    def __init__(self, path: Path, dtype: np.dtype[Any]) -> None:
        self._path, self._dtype = path, dtype
        self._unfinished = unfinished_beside(path)
        self._supervised_path = unfinished_beside(path.with_suffix(".supervised"))
        self._stream: IO[bytes] | None = None
        self._supervised: IO[bytes] | None = None
        self._starts = array("q")
        self.tokens = 0

    def __enter__(self) -> "ShardWriter":
        return self

    def add(self, encoded: Encoded, *, begins: bool) -> None:
        """Append the tokens of a document, or of a piece of one: ``begins`` where it has the document's start."""
        if self._stream is None:
            self._stream = self._unfinished.open("w+b")
            self._stream.seek(_HEADER_BYTES)
            if encoded.supervised is not None:
                self._supervised = self._supervised_path.open("w+b")
        if begins:
            self._starts.append(self.tokens)
        self._stream.write(encoded.tokens.astype(self._dtype, copy=False).data)
        if self._supervised is not None:
            assert encoded.supervised is not None, "all documents of a shard are supervised, or none is"
            self._supervised.write(encoded.supervised.astype(np.uint8, copy=False).data)
        self.tokens += len(encoded.tokens)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if self._stream is not None and kind is None:
                self._finish(self._stream)
        finally:
            for stream in (self._stream, self._supervised):
                if stream is not None:
                    with contextlib.suppress(OSError):  # a full disk has been told of
                        stream.close()
            self._supervised_path.unlink(missing_ok=True)
            self._unfinished.unlink(missing_ok=True)

    def _finish(self, stream: IO[bytes]) -> None:
        sizes = [("tokens", self._dtype, self.tokens)]
        if self._supervised is not None:
            sizes.append(("supervised", np.dtype(np.uint8), self.tokens))
            self._supervised.seek(0)
            while block := self._supervised.read(_COPY_BYTES):
                stream.write(block)
        # The format wants no holes, and memory maps want their elements aligned.
        padding = -(stream.tell() - _HEADER_BYTES) % 8
        stream.write(bytes(padding))
        sizes += [("padding", np.dtype(np.uint8), padding), ("document_starts", np.dtype(np.int64), len(self._starts))]
        stream.write(np.array(self._starts, "<i8").data)
        write_header(stream, sizes)
        to_disk(stream)
        self._unfinished.replace(self._path)


def write_starts(path: Path, starts: np.ndarray) -> None:
    """Write the shard without tokens that ``FlatTokens`` needs."""
    with path.open("wb") as stream:
        write_header(stream, [("document_starts", np.dtype(np.int64), len(starts))])
        stream.write(starts.astype("<i8").tobytes())
        to_disk(stream)


def write_header(stream: IO[bytes], sizes: Sequence[tuple[str, np.dtype[Any], int]]) -> None:
    """Write the first ``_HEADER_BYTES`` of a shard: name, type and length of its tensors, in the order of the file."""
    specs = [TensorSpec(name, _TORCH_DTYPES[dtype], (length,)) for name, dtype, length in sizes]
    stream.seek(0)
    stream.write(header(specs, _HEADER_BYTES))


def to_disk(stream: IO[bytes]) -> None:
    """Flush to disk: otherwise a power cut after a rename could keep the name and lose the content."""
    stream.flush()
    os.fsync(stream.fileno())


def unfinished_beside(path: Path) -> Path:
    """Return a unique name that names its owner. Not ``tempfile``, whose files only their owner may read."""
    return path.with_name(f"{path.name}.{socket.gethostname()}.{os.urandom(6).hex()}.tmp")
