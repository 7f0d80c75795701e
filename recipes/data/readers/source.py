"""Interfaces of a source of documents, of its units, which are read from front to back, and of their rows."""

import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple

from serried.configs.bucket_urls import is_bucket_url
from serried.configs.errors import UserError
from serried.configs.schema.data import DataSection, sources
from serried.configs.schema.sections import LoadingSection
from serried.recipes.data.readers.reading_progress import Progress
from serried.recipes.data.readers.source_files import PIECE_BYTES, open_plain

SPLITS = ("train", "validation")
SHOWN_ROWS = 10
"""Maximum number of bad rows that an error shows. Further ones are only counted."""

Content = bytes | str | list[dict[str, Any]] | dict[str, list[dict[str, Any]]]
"""A document: text; the messages of a conversation, or a dict of ``messages`` and, for example, ``tools``; or a dict of
the messages of ``prompt``, ``chosen`` and ``rejected``, with optional ``tools``."""


class Place(NamedTuple):
    """Position of a row, for messages."""

    path: str
    """Path of a file, or name of a dataset."""
    number: int
    """Index of the row; for a line, the offset of its first byte."""
    noun: Literal["line", "row"]

    def __str__(self) -> str:
        """Return the position as text, such as ``chats.jsonl line 12``, counted from 1. Reads the file up to the
        line."""
        if self.noun == "row":
            return f"{self.path} row {self.number + 1:,}"
        if is_bucket_url(self.path):  # the data may have been prepared on another node
            return f"{self.path} at byte {self.number:,}"
        lines, position = 1, self.number
        with open_plain(self.path if "://" in self.path else Path(self.path)) as stream:
            while position and (block := stream.read(min(position, PIECE_BYTES))):
                lines += block.count(b"\n")
                position -= len(block)
        return f"{self.path} line {lines:,}"


class AtRow(NamedTuple):
    """Message about a mistake in a row, as an argument of ``UserError``. Finding the row's position may take time, so
    it is done only when the message is shown."""

    where: Place | str
    said: str
    """Text after the position, beginning with a space, comma or colon."""

    def __str__(self) -> str:
        return f"{self.where}{self.said}"


def bad_rows(shown: Sequence[str], count: int, head: str = "", key: str = "data.bad_rows") -> UserError:
    """Return the error for ``count`` bad rows. ``shown``: messages about the first of them. ``key``: config key that,
    set to ``skip``, leaves them out."""
    cure = f"fix or remove them, or leave them out with {key}=skip"
    if count == 1:
        return UserError(f"{shown[0]}; or leave such rows out: {key}=skip")
    more = [f"and {count - len(shown):,} more"] if count > len(shown) else []
    return UserError(*shown, *more, head=f"{head or f'{count:,} rows cannot be used'}; {cure}")


class Row(NamedTuple):
    """A document, or a piece of a document that is too long for memory."""

    number: int
    """Number of the document within its unit, from 0."""
    content: Content
    begins: bool = True
    """Whether it contains the document's start. Only plain text files are read in pieces."""
    ends: bool = True
    """Whether it contains the document's end."""
    offset_bytes: int = 0
    """Offset within its file, for messages; 0 if unknown."""
    before: bytes = b""
    """Text right before a piece, in complete characters."""
    after: bytes = b""
    place: Place | None = None
    """Position of a row of a table. None if the document is the whole unit, or is known only by its number in the
    unit."""
    error: UserError | None = None
    """Error that describes why the row is not a valid document, with empty content; None for a valid row."""
    is_new: bool = False
    """Whether earlier versions of this library read the row differently."""
    has_zero_weight: bool = False
    """Whether the row is left out because its ``weight`` is 0. The content of such a row is empty."""


@dataclass(frozen=True, kw_only=True)
class Unit(ABC):
    """A part of a source that one reader reads from front to back: a file, a row group, a range of rows.

    Units and their rows depend only on the source, not on the process that reads them.
    """

    name: str
    """Name in messages, such as a path or ``part.parquet row group 3``."""
    size_bytes: int
    """Approximate size in bytes, for the progress display."""
    split: str | None = None
    """Split of all its documents; None if it depends on each document's content."""

    @abstractmethod
    def all_rows(self, first: int = 0) -> Iterator[Row]:
        """Yield the rows from number ``first`` on, in order, including empty rows and rows with an ``error``. Raises
        ``UserError`` with the unit's name if it cannot be read, or has changed."""

    def rows(self, first: int = 0) -> Iterator[Row]:
        """Yield rows that are not empty. Rows with an error are left out, since the preparation, which reads all rows,
        reports them."""
        return (row for row in self.all_rows(first) if row.content)


class Source(ABC):
    """Source of documents in a fixed order."""

    noun: ClassVar[str] = "document"
    """Name of a document in messages: ``file`` or ``document``."""
    validation_split: str | None = None
    """Name of the split that is used for validation. None if a fraction of the documents is used instead."""

    @abstractmethod
    def identity(self) -> list[str]:
        """Return strings that identify the source on this machine, without reading it."""

    def state(self) -> str | None:
        """Return a string that changes whenever the content may have changed, without reading the source. None if there
        is no such string. The source is then read at each start."""
        return None

    @abstractmethod
    def fingerprint(self, progress: Progress) -> bytes:
        """Return a hash of the content only, equal on every machine. Reads everything. Raises ``UserError`` if the
        source is empty, or a part of it cannot be read."""

    @abstractmethod
    def units(self) -> Sequence[Unit]:
        """Return all units, in order."""


@dataclass(frozen=True, kw_only=True)
class _Yielded(Unit):
    """Unit of the documents that a function yields."""

    read: Callable[[], Iterable[Content]]

    def all_rows(self, first: int = 0) -> Iterator[Row]:
        for number, content in enumerate(self.read()):
            if number >= first:
                yield Row(number, content)


class Documents(Source):
    """Source of the documents that a registered function yields, as one unit."""

    def __init__(self, section: DataSection, read: Callable[[], Iterable[Content]]) -> None:
        self._section = section
        self._unit = _Yielded(name=f"data={section.name}", size_bytes=0, read=read)

    def identity(self) -> list[str]:
        return [self._section.model_dump_json(exclude={*LoadingSection.model_fields})]

    def fingerprint(self, progress: Progress) -> bytes:
        sha256, size_bytes = hashlib.sha256(), 0
        for row in self._unit.all_rows():
            content = row.content if isinstance(row.content, bytes) else json.dumps(row.content).encode()
            sha256.update(len(content).to_bytes(8, "little") + content)
            size_bytes += len(content)
            progress.done(len(content))
        self._unit = replace(self._unit, size_bytes=size_bytes)
        return sha256.digest()

    def units(self) -> list[Unit]:
        return [self._unit]


def open_source(section: DataSection) -> Source:
    """Open the source that ``section`` names. This finds files and loads datasets, but reads no document. Raises
    ``UserError`` if the source does not exist or is not available."""
    read = sources.get(section.name).load()
    opened = read(section)
    return opened if isinstance(opened, Source) else Documents(section, lambda: read(section))
