"""What a source of documents is: units that are read from front to back, and rows in them."""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, Protocol

from configs.schema import SourceSection


class Row(NamedTuple):
    """One document."""

    number: int
    """Place within its unit, from 0."""
    content: bytes | str | list[dict[str, Any]]
    """Text, or the messages of a conversation."""


class Unit(Protocol):
    """A part of a source that one reader takes from front to back: a file, a row group, a range of rows.

    Units and their rows are functions of the source alone, not of who reads them.
    """

    name: str
    """What users know it by, for messages: a path, ``part.parquet rows 1000 to 1999``."""
    size_bytes: int
    """About, for progress."""

    def rows(self, first: int = 0) -> Iterator[Row]:
        """Rows from number ``first`` on, in order; empty documents are left out, their numbers are not given again.

        Raises:
            UserError: it cannot be read, or a row is no document; names the unit and the row.
        """


class Source(Protocol):
    """Documents in a fixed order."""

    section: SourceSection

    def units(self) -> Sequence[Unit]:
        """All units, in order."""
