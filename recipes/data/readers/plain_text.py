"""Plain text files, one document each, and their split into training and validation.

The split depends only on the relative names and the content of the files, so two machines with the same text get the
same split.
"""

import hashlib
import math
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from serried.configs.errors import UserError
from serried.recipes.data.readers.reading_progress import Progress
from serried.recipes.data.readers.source import SPLITS, Row, Source, Unit
from serried.recipes.data.readers.source_files import (
    PIECE_BYTES,
    Document,
    SourceFile,
    files_state,
    hash_files,
    key_of,
    open_plain,
    read_surrounded,
    skip,
    unchanged,
)

WHOLE_FILES_FROM = 20
"""Minimum number of distinct files for which validation uses whole files instead of the tail of each file."""


@dataclass(frozen=True, kw_only=True)
class Part(Unit):
    """A part of a document: a unit of one row, read in one or more pieces."""

    document: Document
    start_bytes: int

    @classmethod
    def of(cls, document: Document, start_bytes: int, stop_bytes: int, split: str) -> "Part":
        """Return the part from ``start_bytes`` up to ``stop_bytes``."""
        size_bytes = stop_bytes - start_bytes
        return cls(
            name=str(document.path), size_bytes=size_bytes, split=split, document=document, start_bytes=start_bytes
        )

    def all_rows(self, first: int = 0) -> Iterator[Row]:
        if first:
            return
        offset = self.start_bytes
        with unchanged(self.document.path, self.document.stamp), open_plain(self.document.path) as stream:
            skip(stream, offset)
            for before, piece, after in read_surrounded(stream, self.size_bytes):
                yield Row(0, piece, not before, not after, offset, before, after)
                offset += len(piece)


class TextFiles(Source):
    """Text files as a source. The split is known before any document is read."""

    noun = "file"

    def __init__(self, files: Sequence[SourceFile], validation_fraction: float) -> None:
        """``validation_fraction``: fraction of the bytes for validation. With 0, all text is training data."""
        self._files, self._fraction = files, validation_fraction
        self._documents: list[Document] = []

    def identity(self) -> list[str]:
        return [os.path.commonpath([file.path.absolute() for file in self._files])]

    def state(self) -> str | None:
        return files_state(self._files)

    def fingerprint(self, progress: Progress) -> bytes:
        self._documents = read_documents(self._files, progress)
        return key_of(self._documents)

    def units(self) -> list[Part]:
        assert self._documents, "fingerprint comes first"
        if not self._fraction:
            return [Part.of(document, 0, document.size_bytes, "train") for document in self._documents]
        parts = split_documents(self._documents, self._fraction)
        return [part for split in SPLITS for part in parts[split]]


def read_documents(files: Sequence[SourceFile], progress: Progress) -> list[Document]:
    """Hash every file, and leave out empty ones. Raises ``UserError`` if all are empty, or one cannot be read."""
    documents = [document for document in hash_files(files, progress) if document.size_bytes]
    if not documents:
        others = f" and so are the other {len(files) - 1} files" if len(files) > 1 else ""
        raise UserError(
            f"{files[0].path} is empty (0 bytes){others}, so there is nothing to train on; use another source: "
            "data.path=..."
        )
    return documents


def split_documents(documents: Sequence[Document], validation_fraction: float) -> dict[str, list[Part]]:
    """Split the source into ``train`` and ``validation`` so that no byte is in both, in the order of ``documents``.

    With at least ``WHOLE_FILES_FROM`` distinct files, whole files go to validation, in the order of a hash of their
    names, until ``validation_fraction`` of the bytes is reached. Files that would exceed it by a tenth are left out,
    and files of equal content stay together. With fewer files, the tail of each file goes to validation.
    """
    groups: dict[bytes, list[Document]] = {}
    for document in documents:
        groups.setdefault(document.sha256, []).append(document)
    kept = _choose_groups(groups, validation_fraction) if len(groups) >= WHOLE_FILES_FROM else None
    parts: dict[str, list[Part]] = {"train": [], "validation": []}
    for document in documents:
        end = document.size_bytes
        if kept is None:
            end = tail_start(document.read, document.size_bytes, validation_fraction)
        elif document.sha256 in kept:
            end = 0
        if end:
            parts["train"].append(Part.of(document, 0, end, "train"))
        if end < document.size_bytes:
            parts["validation"].append(Part.of(document, end, document.size_bytes, "validation"))
    return parts


def _choose_groups(groups: dict[bytes, list[Document]], fraction: float) -> set[bytes]:
    """Return the hashes of file contents that go to validation."""
    size_bytes = {content: sum(d.size_bytes for d in group) for content, group in groups.items()}
    wanted_bytes = fraction * sum(size_bytes.values())
    # surrogateescape: a file name need not be UTF-8.
    order = sorted(groups, key=lambda c: hashlib.sha256(groups[c][0].name.encode("utf-8", "surrogateescape")).digest())
    kept: set[bytes] = set()
    kept_bytes = 0
    for content in order[:-1]:  # at least the last content is trained on
        # A single file larger than the whole share would be a poor sample of the source.
        if kept_bytes < wanted_bytes and kept_bytes + size_bytes[content] <= 1.1 * wanted_bytes:
            kept.add(content)
            kept_bytes += size_bytes[content]
    rest = sorted((content for content in order if content not in kept), key=size_bytes.__getitem__)
    for content in rest[:-1]:
        if kept_bytes >= 0.5 * wanted_bytes:
            break
        kept.add(content)
        kept_bytes += size_bytes[content]
    return kept


def tail_start(read: Callable[[int, int], bytes], size_bytes: int, fraction: float) -> int:
    """Return the offset in bytes at which about the last ``fraction`` of a text starts.

    The offset is after a line end if that makes the tail neither twice as long nor a mebibyte longer, else at the
    start of a UTF-8 character. It is never 0: the head, which is trained on, keeps at least one byte. ``read(start,
    stop)`` returns the text.
    """
    tail_bytes = math.ceil(size_bytes * fraction)
    cut = max(1, size_bytes - tail_bytes)
    start = max(0, cut - min(tail_bytes, PIECE_BYTES))
    line_end = read(start, cut).rfind(b"\n")
    if line_end >= 0:
        return start + line_end + 1
    # Back to the start of a character (0b10...... is inside one), else forward to the next one, if any.
    low, high = max(0, cut - 4), min(cut + 4, size_bytes)
    around = read(low, high + 1)
    near = (*range(cut, low, -1), *range(cut + 1, high + 1))
    return next((at for at in near if at == size_bytes or around[at - low] & 0xC0 != 0x80), cut)
