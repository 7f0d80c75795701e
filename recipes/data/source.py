"""Protocol of a source of documents: units that are read from front to back, and their rows."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, NamedTuple, Protocol, TypeVar

from serried.configs.schema import SourceSection

Format = Literal["text", "chat"]
"""Content of a row: text, or the messages of a conversation."""

SPLITS = ("train", "validation")

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")


class Row(NamedTuple):
    """One document, or a piece of one that is too long for memory."""

    number: int
    """Place of the document within its unit, from 0."""
    content: bytes | str | list[dict[str, Any]]
    """Text, or the messages of a conversation."""
    begins: bool = True
    """Whether it has the document's start. Only files of plain text come in pieces, one after the other."""
    ends: bool = True
    """Whether it has the document's end."""
    offset_bytes: int = 0
    """Where in its file it starts, for messages; 0 where that is not known."""


class Unit(Protocol):
    """A part of a source that one reader takes from front to back: a file, a row group, a range of rows.

    Units and their rows are functions of the source alone, not of who reads them.
    """

    @property
    def name(self) -> str:
        """Name in messages: a path, ``part.parquet rows 1000 to 1999``."""

    @property
    def size_bytes(self) -> int:
        """About, for progress."""

    @property
    def split(self) -> str | None:
        """The split that all of it belongs to; None: each document's content decides."""

    def all_rows(self, first: int = 0) -> Iterator[Row]:
        """Rows from number ``first`` on, in order, the empty ones too.

        Raises:
            UserError: it cannot be read, has changed, or a row is no document; names the unit and the row.
        """

    def rows(self, first: int = 0) -> Iterator[Row]:
        """As ``all_rows``; empty documents are left out, their numbers are not given again."""


class WithoutEmpty(ABC):
    """Gives ``rows`` to a unit that has ``all_rows``."""

    @abstractmethod
    def all_rows(self, first: int = 0) -> Iterator[Row]:
        """See ``Unit``."""

    def rows(self, first: int = 0) -> Iterator[Row]:
        """See ``Unit``."""
        return (row for row in self.all_rows(first) if row.content)


class Reading(Protocol):
    """How a source is read: threads and progress."""

    def total(self, size_bytes: int) -> None:
        """Report how much there is to read."""

    def done(self, size_bytes: int) -> None:
        """Report that more has been read. From any thread."""

    def map(self, function: Callable[[_Item], _Result], items: Sequence[_Item]) -> Iterator[_Result]:
        """``function`` of each item, in order, on several threads."""


class Source(Protocol):
    """Documents in a fixed order."""

    section: SourceSection
    noun: str
    """Name of a document: ``file`` or ``document``."""

    def identity(self) -> list[str]:
        """Identity of the source on this machine, found without reading it."""

    def state(self) -> str | None:
        """Changes whenever the content may have; found without reading it. None: a change could go unnoticed."""

    def fingerprint(self, reading: Reading) -> bytes:
        """Hash of the content alone, equal on every machine. Reads everything.

        Raises:
            UserError: a part of it cannot be read, or there is nothing in it.
        """

    def units(self) -> Sequence[Unit]:
        """All units, in order."""
