"""Rows of JSON Lines files and JSON arrays, compressed or not."""

import io
import json
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from serried.configs.errors import UserError
from serried.recipes.data.readers.columns import SHOWN_CHARACTERS, Column, RowContent, described, is_row, row_of
from serried.recipes.data.readers.source import Place, Row, Unit
from serried.recipes.data.readers.source_files import PIECE_BYTES, Stamp, open_plain, skip, unchanged

_SPACE = re.compile(r"[ \t\r\n]*")
_PEEKED_BYTES = 256
_LONGEST_ITEM = 1 << 26
"""Maximum number of characters in an item of a JSON array."""

_LONGEST_LINE = 16 << 20
"""Maximum number of bytes of a line that are read to check whether a file contains rows."""


def _lines_from(path: Path | str) -> str:
    """Return a shell command that rewrites a JSON array, or objects that span several lines, as one object per line."""
    quoted = shlex.quote(str(path))
    return f"jq -c 'if type == \"array\" then .[] else . end' {quoted} > lines.jsonl"


def holds_rows(path: Path, column: Column) -> bool:
    """Return whether a JSON file contains rows, one per line or in an array, rather than one document of text. Raises
    ``UserError`` if its rows span several lines."""
    with open_plain(path) as stream:
        line = next((line for line in iter(partial(stream.readline, _LONGEST_LINE), b"") if line.strip()), b"")
        first = line.decode("utf-8-sig", "replace").strip()
        if not first.startswith(("{", "[")):
            return False
        try:
            row = json.loads(first)
            following = next((line for line in iter(partial(stream.readline, _LONGEST_LINE), b"") if line.strip()), b"")
        except (ValueError, RecursionError):  # an object that spans several lines
            row, following = None, stream.read(PIECE_BYTES)
    if isinstance(row, dict):
        return is_row(row, column) or _is_object(following)
    begun = f"{first}\n{following.decode('utf-8', 'replace')}" if row is None else first
    try:
        row, _ = json.JSONDecoder().raw_decode(begun.removeprefix("[").lstrip())
    except (ValueError, RecursionError):
        return False
    if not isinstance(row, dict) or not is_row(row, column):
        return False
    if begun.startswith("["):
        return True
    raise UserError(
        f"{path} does not have one row per line; convert it with: {_lines_from(path)}; then use "
        "data.path=lines.jsonl (a copy that ends in .txt is read as one document of text)"
    )


def _is_object(line: bytes) -> bool:
    try:
        return isinstance(json.loads(line), dict)
    except (ValueError, RecursionError):
        return False


@dataclass(frozen=True, kw_only=True)
class JsonLines(Unit):
    """The lines of a file that start at byte ``start_bytes`` or later, and before ``stop_bytes``."""

    path: Path | str
    column: RowContent
    start_bytes: int = 0
    stop_bytes: int | None = None
    """End in bytes; None: the end of the file."""
    stamp: Stamp | None = None

    def all_rows(self, first: int = 0) -> Iterator[Row]:
        with unchanged(self.path, self.stamp), open_plain(self.path) as stream:
            if self.start_bytes:  # a line belongs to the unit that contains its first byte
                skip(stream, self.start_bytes - 1)
            position = self.start_bytes - 1 + len(stream.readline()) if self.start_bytes else 0
            number = 0
            while (self.stop_bytes is None or position < self.stop_bytes) and (line := stream.readline()):
                if number >= first and line.strip():
                    place = Place(str(self.path), position, "line")
                    yield row_of(number, place, (line, position), lambda found: self._content(*found))
                position += len(line)
                number += 1

    def _content(self, line: bytes, position: int) -> Any:
        try:
            row = json.loads(line.decode("utf-8-sig" if position == 0 else "utf-8"))
        except UnicodeDecodeError as error:
            raise UserError(
                f" is not UTF-8: byte 0x{line[error.start]:02x} at offset "
                f"{position + error.start} of the file ({error.reason}); fix or remove the line"
            ) from error
        except (ValueError, RecursionError) as error:
            reason = f"{error.msg} at column {error.colno}" if isinstance(error, json.JSONDecodeError) else str(error)
            remedy = "the file may be cut off: create it again, or remove the line"
            if line.strip() in (b"[", b"{"):
                remedy = f"each line must be one object; convert the file with: {_lines_from(self.path)}"
            raise UserError(f" is not JSON: {reason}; {remedy}") from error
        if not isinstance(row, dict):
            remedy = f"; convert the JSON array with: {_lines_from(self.path)}" if isinstance(row, list) else ""
            raise UserError(f" is {described(row)}, not an object that maps column names to values{remedy}")
        return self.column.content_of(row)


@dataclass(frozen=True, kw_only=True)
class JsonArray(Unit):
    """The objects of a file that is one JSON array."""

    path: Path | str
    column: RowContent
    stamp: Stamp | None = None

    def all_rows(self, first: int = 0) -> Iterator[Row]:
        with unchanged(self.path, self.stamp), open_plain(self.path) as stream:
            for number, item in enumerate(self._items(io.TextIOWrapper(stream, "utf-8-sig"))):
                if number >= first:
                    yield row_of(number, Place(str(self.path), number, "row"), item, self._content)

    def _items(self, stream: io.TextIOWrapper) -> Iterator[Any]:
        """Yield the items of the array. Raises ``UserError`` if the file is not exactly one complete array. This is not
        a bad row that could be left out, because the rest of the file cannot be read."""
        decoder = json.JSONDecoder()
        text, at = "", 0
        wanted, number = PIECE_BYTES, 0
        following = "["  # "[", then "item", "item or ]" or ", or ]", and "end" after the array
        try:
            while True:
                more = stream.read(wanted)
                text, at = text[at:] + more, 0
                wanted = PIECE_BYTES
                while (at := _end_of_space(text, at)) < len(text):
                    mark = text[at]
                    if following == "end":
                        raise self._ends_early(number, is_array=mark == "[")
                    if "item" not in following or (mark == "]" and "]" in following):
                        if mark not in "[,]" or mark not in following:
                            raise UserError(
                                f"{self.path} has {described(text[at : at + SHOWN_CHARACTERS])} after row "
                                f"{number:,}, not a comma or the end of the array; correct the file"
                            )
                        following = {"[": "item or ]", ",": "item", "]": "end"}[mark]
                        at += 1
                        continue
                    try:
                        item, stop = decoder.raw_decode(text, at)
                    except ValueError as error:  # the item may be incomplete
                        wanted = max(PIECE_BYTES, len(text) - at)
                        if not more or wanted > _LONGEST_ITEM:
                            raise UserError(
                                f"{self.path} row {number + 1:,} is not JSON: {error}; the file may be cut off: "
                                "create it again"
                            ) from error
                        break
                    if stop == len(text) and more:  # a number may be incomplete
                        break
                    at, number = stop, number + 1
                    following = ", or ]"
                    yield item
                if not more:
                    break
        except UnicodeDecodeError as error:
            raise UserError(f"{self.path} is not UTF-8 ({error.reason}); convert the file") from error
        except RecursionError as error:
            raise UserError(f"{self.path} row {number + 1:,} is nested too deeply; fix or remove the row") from error
        if following != "end":
            raise UserError(
                f"{self.path} ends after row {number:,}, before the end of its array; it may be cut off: create it "
                "again"
            )

    def _ends_early(self, rows: int, *, is_array: bool) -> UserError:
        if is_array:
            return UserError(
                f"{self.path} has a second array after the first {rows:,} rows; join them with: "
                f"{_lines_from(self.path)}; then use data.path=lines.jsonl"
            )
        return UserError(f"{self.path} has text after its array of {rows:,} rows; correct the file")

    def _content(self, row: Any) -> Any:
        if not isinstance(row, dict):
            raise UserError(f" is {described(row)}, not an object that maps column names to values; fix or remove it")
        return self.column.content_of(row)


def _end_of_space(text: str, at: int) -> int:
    """Return the position of the first character of ``text`` from ``at`` on that is not whitespace."""
    found = _SPACE.match(text, at)
    return found.end() if found else at


def is_array(path: Path) -> bool:
    """Return whether a file is one JSON array instead of lines."""
    with open_plain(path) as stream:
        return stream.read(_PEEKED_BYTES).decode("utf-8-sig", "replace").lstrip().startswith("[")
