"""Token files of other tools: raw integers (nanoGPT, Megatron exports), llm.c, and ``.npy``."""

import hashlib
import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import numpy as np

from serried.configs.bucket_paths import BucketFiles, bucket_files
from serried.configs.bucket_urls import is_bucket_url
from serried.configs.errors import UserError
from serried.recipes.data.prepared.ranged_objects import (
    StoredObject,
    StoredObjects,
    read_in_ranges,
    read_objects,
    write_objects,
)
from serried.recipes.data.prepared.token_shards import Shard
from serried.recipes.data.prepared.tokenize import Counts, TokenCounts
from serried.recipes.data.readers.find_files import find_files, list_bucket
from serried.recipes.data.readers.reading_progress import Progress
from serried.recipes.data.readers.source import SPLITS, Source, Unit
from serried.recipes.data.readers.source_files import SourceFile, files_state, stamp_of, unchanged, unreadable
from serried.recipes.data.tokenizers.hugging_face_tokenizer import named_tokenizer
from serried.records.files import write_atomically

_VALIDATION = re.compile(r"(^|[^a-z])(val|valid|validation|dev)([^a-z]|$)", re.IGNORECASE)
_LLM_C = {20240520: "uint16", 20240801: "uint32"}
"""Maps the first integer of an llm.c file to the dtype of its tokens. The header has 256 32-bit integers, followed by
the tokens."""

_LLM_C_HEADER_BYTES = 1024
_SUFFIXES = (".bin", ".npy")
_NPY_TYPES = ("uint8", "uint16", "uint32", "int32", "int64")
_BLOCK_TOKENS = 1 << 22
_HEADER_BYTES = 1 << 16
"""Maximum size of the header of a file."""


class _Scanned(NamedTuple):
    file: SourceFile
    dtype: str
    offset_bytes: int
    tokens: int
    starts: np.ndarray
    """[documents], int64"""
    sha256: bytes


class FlatFiles(Source):
    """Token files as a source. Files with ``val`` in their names are for validation. If there are none, the end of the
    token stream is used."""

    def __init__(self, section: Any) -> None:
        """Find the files. Raises ``UserError`` if there are none."""
        if section.tokenizer in ("chars", "train"):
            raise UserError(
                f"data.tokenizer={section.tokenizer} is created from text, but data=tokens has only tokens; use the "
                "tokenizer that created the tokens, as in data.tokenizer=openai-community/gpt2"
            )
        tokenizer = named_tokenizer(section)
        assert tokenizer is not None
        self._section, self._tokenizer = section, tokenizer
        self._listed: BucketFiles | None = None
        """Files that are read in ranges; None if the files are on this node."""
        if is_bucket_url(section.path) and section.fetch == "ranges":
            self._listed, names = list_bucket(section.path, _SUFFIXES)
            self._files = [SourceFile(name, Path(name), f"{self._listed.url}/{name}") for name in names]
        else:
            self._files = find_files(section.path, _SUFFIXES)
        self._scanned: list[_Scanned] = []

    def identity(self) -> list[str]:
        return [self._section.path, self._section.token_dtype]

    def state(self) -> str | None:
        return files_state(self._files) if self._listed is None else None

    def units(self) -> list[Unit]:
        return []  # there is nothing to tokenize

    def fingerprint(self, progress: Progress) -> bytes:
        """Read all files once: hash them, find end tokens, and check that the tokenizer has every id. Raises
        ``UserError`` if a file is damaged, or contains an id that the tokenizer does not have."""
        progress.total_bytes = sum(self._size_bytes(file) for file in self._files)
        self._scanned = list(progress.map(lambda file: self._scan(file, progress), self._files))
        key = hashlib.sha256()
        for found in self._scanned:  # paths are included, since the tokens are used in place
            path = found.file.url or found.file.path.absolute()
            key.update(f"{path} {found.file.name} {found.dtype} {found.offset_bytes} ".encode() + found.sha256)
        return key.digest()

    def write(self, folder: Path) -> tuple[Counts, dict[str, list[Shard]]]:
        """Write the start positions of documents into ``folder``. Return counts, and the shards of each split."""
        counts, shards = Counts(), dict[str, list[Shard]]()
        places = self._places(folder)
        for split, pieces in _split(self._scanned, self._section.validation_fraction).items():
            shards[split] = []
            for number, (found, start, stop) in enumerate(pieces):
                starts = _starts_in(found, start, stop)
                _count(getattr(counts, split), starts, stop)
                path = folder / f"{split}-{number:05d}.starts"
                write_atomically(path, (starts - start).astype("<i8").tobytes())
                offset = found.offset_bytes + start * np.dtype(found.dtype).itemsize
                shards[split].append(
                    Shard(places[found.file.name], found.dtype, stop - start, path, offset_bytes=offset)
                )
        return counts, shards

    def _places(self, folder: Path) -> dict[str, Path]:
        """Return the path of each file by name: in place, or for files in a bucket, whose place differs between nodes,
        in ``folder``."""
        if not is_bucket_url(self._section.path):
            return {file.name: file.path.absolute() for file in self._files}
        objects = record_files(folder, self._section)
        place_files(folder, self._section)
        return {entry.key: folder / name for name, entry in objects.items()}

    def _size_bytes(self, file: SourceFile) -> int:
        return stamp_of(file.path)[1] if self._listed is None else self._listed.files[file.name][0]

    def _scan(self, file: SourceFile, progress: Progress) -> _Scanned:
        if self._listed is not None:
            return self._scan_object(file, self._listed, progress)
        stamp = stamp_of(file.path)
        try:
            dtype, offset, tokens = self._layout(file.path, stamp[1], str(file.path))
            numbers = np.memmap(file.path, np.dtype(dtype), mode="r", offset=offset, shape=(tokens,))
        except OSError as error:
            raise unreadable(file.path, error) from error
        with unchanged(file.path, stamp):
            return self._scan_numbers(
                file, (dtype, offset, tokens), lambda start, stop: np.asarray(numbers[start:stop]), progress
            )

    def _scan_object(self, file: SourceFile, listed: BucketFiles, progress: Progress) -> _Scanned:
        """Scan an object without storing it."""
        entry, objects = StoredObject(file.name, *listed.files[file.name]), StoredObjects(listed.url)

        def content(start: int, stop: int) -> np.ndarray:
            found = np.empty(stop - start, np.uint8)
            objects.read_into(entry, start, found)
            return found

        with TemporaryDirectory(prefix="serried-") as folder:
            copy = Path(folder) / Path(file.name).name
            copy.write_bytes(content(0, min(_HEADER_BYTES, entry.size_bytes)).tobytes())
            os.truncate(copy, entry.size_bytes)
            dtype, offset, tokens = self._layout(copy, entry.size_bytes, file.url)
        size = np.dtype(dtype).itemsize
        return self._scan_numbers(
            file, (dtype, offset, tokens),
            lambda start, stop: content(offset + start * size, offset + stop * size).view(dtype), progress,
        )  # fmt: skip

    def _scan_numbers(
        self, file: SourceFile, layout: tuple[str, int, int], read: Callable[[int, int], np.ndarray], progress: Progress
    ) -> _Scanned:
        dtype, offset, tokens = layout
        sha256, ends = hashlib.sha256(), [np.array([-1], np.int64)]
        for start in range(0, tokens, _BLOCK_TOKENS):
            block = read(start, min(start + _BLOCK_TOKENS, tokens))
            sha256.update(block.data)
            ends.append(np.flatnonzero(block == self._tokenizer.end_id) + start)
            self._check(block, file.url or str(file.path), start)
            progress.done(block.nbytes)
        starts = np.concatenate(ends) + 1
        return _Scanned(file, dtype, offset, tokens, starts[starts < tokens], sha256.digest())

    def _check(self, block: np.ndarray, path: str, start: int) -> None:
        wrong = np.flatnonzero((block >= self._tokenizer.vocab_size) | (block < 0))
        if len(wrong):
            raise UserError(
                f"{path}: token {start + int(wrong[0]):,} is {int(block[wrong[0]])}, but "
                f"data.tokenizer={self._section.tokenizer} has only {self._tokenizer.vocab_size:,} ids; use the "
                "tokenizer that created the file (data.tokenizer=...), or another dtype (now "
                f"data.token_dtype={self._section.token_dtype})"
            )

    def _layout(self, path: Path, size_bytes: int, named: str) -> tuple[str, int, int]:
        """Return the dtype of the tokens, their offset in the file in bytes, and their count. ``named``: name of the
        file in messages."""
        dtype: str = self._section.token_dtype
        offset = 0
        if path.suffix.lower() == ".npy":
            return _npy_layout(path, named)
        with path.open("rb") as stream:
            header = np.frombuffer(stream.read(12).ljust(12, b"\0"), "<i4")
        if int(header[0]) in _LLM_C and size_bytes >= _LLM_C_HEADER_BYTES:
            dtype, offset = _LLM_C[int(header[0])], _LLM_C_HEADER_BYTES
            promised = offset + int(header[2]) * np.dtype(dtype).itemsize
            if promised != size_bytes:
                raise UserError(
                    f"{named} is truncated or damaged: its header says {int(header[2]):,} tokens ({promised:,} bytes), "
                    f"but the file has {size_bytes:,} bytes; create it again, or exclude it with data.path=..."
                )
        tokens, rest = divmod(size_bytes - offset, np.dtype(dtype).itemsize)
        if rest or not tokens:
            what = "is empty" if not tokens else f"has {size_bytes:,} bytes, not a multiple of the size of {dtype}"
            raise UserError(f"{named} {what}; create it again, or set its dtype: data.token_dtype=uint16|uint32|uint8")
        return dtype, offset, tokens


def record_files(folder: Path, section: Any) -> dict[str, StoredObject]:
    """Write which objects have the tokens of the files in the bucket at ``data.path`` into ``folder``. Return them by
    the name of their file there."""
    listed, names = list_bucket(section.path, _SUFFIXES)
    objects = {f"tokens-{number:05d}.bin": StoredObject(name, *listed.files[name]) for number, name in enumerate(names)}
    write_objects(folder, listed.url, objects)
    return objects


def place_files(folder: Path, section: Any) -> None:
    """Put the files of ``record_files`` into ``folder``: links to copies on this node, or sparse files to read in
    ranges."""
    if section.fetch == "ranges":
        read_in_ranges(folder, section.fetch_limit_bytes)
        return
    _, objects = read_objects(folder)
    copies = bucket_files(section.path, "data.path").fetch([entry.key for entry in objects.values()])
    for name, entry in objects.items():
        (folder / name).unlink(missing_ok=True)  # an interrupted preparation left it
        (folder / name).symlink_to((copies / entry.key).absolute())


def _npy_layout(path: Path, named: str) -> tuple[str, int, int]:
    try:
        array = np.lib.format.open_memmap(path, mode="r")  # refuses pickled Python objects
    except (ValueError, EOFError) as error:
        raise UserError(f"{named} is not a complete .npy file: {error}; create it again") from error
    if array.ndim != 1 or array.dtype.name not in _NPY_TYPES or not array.dtype.isnative or not len(array):
        dtype = array.dtype.name if array.dtype.isnative else f"{array.dtype.name} with swapped bytes"
        raise UserError(
            f"{named} has an array of dtype {dtype} and shape {list(array.shape)}, not a list of tokens; "
            "save a one-dimensional array of uint16 or uint32"
        )
    return array.dtype.name, int(array.offset), len(array)


def _split(scanned: Sequence[_Scanned], fraction: float) -> dict[str, list[tuple[_Scanned, int, int]]]:
    whole = [(found, 0, found.tokens) for found in scanned]
    validation = [piece for piece in whole if _VALIDATION.search(piece[0].file.name)]
    if validation and len(validation) < len(whole):
        return {"train": [piece for piece in whole if piece not in validation], "validation": validation}
    cut = int(sum(found.tokens for found in scanned) * (1 - fraction))
    pieces: dict[str, list[tuple[_Scanned, int, int]]] = {split: [] for split in SPLITS}
    for found in scanned:
        # Split at the next start of a document. If there is none, the last document itself is split.
        at = min(max(cut, 0), found.tokens)
        after = found.starts[np.searchsorted(found.starts, at) :]
        if 0 < at < found.tokens and len(after):
            at = int(after[0])
        pieces["train"] += [(found, 0, at)] if at else []
        pieces["validation"] += [(found, at, found.tokens)] if at < found.tokens else []
        cut -= found.tokens
    return pieces


def _starts_in(found: _Scanned, start: int, stop: int) -> np.ndarray:
    first, last = np.searchsorted(found.starts, (start, stop))
    inside = found.starts[first:last]
    return inside if len(inside) and inside[0] == start else np.concatenate(([start], inside)).astype(np.int64)


def _count(counts: TokenCounts, starts: np.ndarray, stop: int) -> None:
    lengths = np.diff(np.append(starts, stop))
    counts.documents += len(lengths)
    counts.tokens += int(lengths.sum())
    buckets = np.bincount(np.frexp(lengths)[1], minlength=len(counts.lengths))
    counts.lengths = [have + int(more) for have, more in zip(counts.lengths, buckets, strict=True)]
