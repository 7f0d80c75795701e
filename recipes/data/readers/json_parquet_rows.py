"""Files with one document per row: JSON Lines and JSON arrays, compressed or not, and Parquet."""

import hashlib
import io
import json
import os
import re
import shlex
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import takewhile
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol

from serried.configs.errors import UserError
from serried.recipes.data.readers.reading_progress import Progress
from serried.recipes.data.readers.source import AtRow, Content, Place, Row, Source, Unit
from serried.recipes.data.readers.source_files import (
    COMPRESSED,
    PIECE_BYTES,
    Document,
    SourceFile,
    Stamp,
    files_state,
    hash_files,
    key_of,
    kind_of,
    library,
    open_plain,
    opened,
    skip,
    unchanged,
    unreadable,
)

_UNIT_BYTES = 32 << 20
"""Number of bytes of a .jsonl file that one unit reads."""

_SPACE = re.compile(r"[ \t\r\n]*")
_PEEKED_BYTES = 256
_LONGEST_ITEM = 1 << 26
"""Maximum number of characters in an item of a JSON array."""

_BATCH_ROWS = 256
_SHOWN_CHARACTERS = 60
_LONGEST_LINE = 16 << 20
"""Maximum number of bytes of a line that are read to check whether a file contains rows."""

_PAIRS = (
    ("instruction", "output"), ("prompt", "completion"), ("question", "answer"), ("prompt", "response"),
    ("query", "response"),
)  # fmt: skip
"""Prompt and answer columns of common datasets, such as Alpaca."""
_HISTORY = "history"
_BESIDE = ("input", "system", _HISTORY)
"""Columns that may accompany a prompt and its answer."""
_TOOLS = "tools"
"""Column of the tools that a conversation may call, as JSON schemas."""
_FUNCTIONS = "functions"
"""Column of tools in OpenAI's earlier format, in which a tool has no ``type``."""
_SYSTEM = "system"
_WEIGHT = "weight"
"""Column that selects whether to train on a row."""
_SHARED = "conversations"
"""Column of a conversation in ShareGPT's format."""
_REPLIES = ("assistant", "gpt", "chatgpt", "bot", "model")
"""Roles of replies."""
_SIDES = ("chosen", "rejected")
_PROMPTS = ("prompt", "question", "instruction")
"""Prompt columns, one of which may accompany a pair of answers."""
COLUMNS = tuple(
    dict.fromkeys(
        ["messages", *(name for pair in _PAIRS for name in pair), *_BESIDE, _TOOLS, _FUNCTIONS, _WEIGHT, *_SIDES]
    )
)
"""Columns of conversations and pairs that ``data.columns`` can map to other names."""


_SHOWN_COLUMNS = 20


class Changed(NamedTuple):
    """Content of a row that earlier versions read in another way."""

    content: Content
    has_zero_weight: bool = False
    """Whether the row is left out because its ``weight`` is 0."""


class RowContent(Protocol):
    """Protocol of objects that read the content of a row."""

    def content_of(self, row: Mapping[str, Any]) -> Any:
        """Return the content of ``row``. Raises ``UserError`` if it has none. The message is appended to the row's
        position."""


@dataclass(frozen=True)
class Column:
    """The column, or columns, that contain the document of a row."""

    name: str
    format: Literal["text", "chat", "preference"]
    renamed: tuple[tuple[str, str], ...] = ()
    """Renamed columns, as pairs of the standard name and the name in the rows."""
    has_template: bool = True
    """Whether conversations are rendered by a template. If not, a row is a prompt and its completion."""
    ignored: tuple[str, ...] = ()
    """Columns that are not read. They are not part of ``identity``: earlier versions may not have read them."""

    @classmethod
    def of(cls, section: Any) -> "Column":
        """Create the column from the config section of a source."""
        renamed = tuple(sorted((ours, theirs) for ours, theirs in section.columns.items() if theirs is not None))
        ignored = tuple(ours for ours, theirs in section.columns.items() if theirs is None)
        if section.format == "preference":
            return cls("chosen", section.format, renamed, ignored=ignored)
        is_chat = section.format == "chat"
        name = section.messages_column if is_chat else section.text_column
        return cls(name, section.format, renamed, section.chat_template != "none", ignored)

    @property
    def identity(self) -> str:
        """Everything that determines which columns are read."""
        own = [self.name, *([f"{ours}={theirs}" for ours, theirs in self.renamed])]
        return "\n".join([*own, *([] if self.has_template else ["no template"])])

    @property
    def key(self) -> str:
        """Config key of the column."""
        return "data.messages_column" if self.format == "chat" else "data.text_column"

    def found(self, names: Collection[str]) -> list[str]:
        """Return the columns among ``names`` that contain the document; empty if there are none. For text, it is one
        column. Conversations and pairs of answers may also have columns for the prompt, the tools and the weight."""
        theirs = dict(self.renamed)
        given = {name for name in names if name not in theirs.values()} - theirs.keys() - {*self.ignored}
        given |= {ours for ours, name in self.renamed if name in names}
        return [theirs.get(name, name) for name in self._found(given)]

    def _found(self, names: Collection[str]) -> list[str]:
        """Like ``found``, but ``names`` and the result are standard names."""
        if self.format == "text":
            return [self.name] if self.name in names else []
        beside: Sequence[str] = ()
        pair = next((pair for pair in _PAIRS if {*pair} <= {*names}), ())
        if self.format == "preference":
            held: Sequence[str] = _SIDES if {*_SIDES} <= {*names} else ()
            prompts = [name for name in (*_PROMPTS, _SHARED) if name in names][:1]
            beside = (*prompts, _SYSTEM)
        elif not self.has_template:
            held = pair
        elif self.name in names:
            held, beside = (self.name,), (*pair, _SYSTEM)
        elif self.name == "messages" and _SHARED in names:
            held, beside = (_SHARED,), (*pair, _SYSTEM)
        else:
            held, beside = pair, _BESIDE
        others = (*beside, _TOOLS, _FUNCTIONS, *((_WEIGHT,) if self.format == "chat" else ()))
        return [*held, *(name for name in others if held and name in names)]

    def check(self, names: Sequence[str], where: str) -> list[str]:
        """Return the columns that contain the document. Raises ``UserError`` if there are none among ``names``, or two
        of them have the same name, as after a join."""
        for ours, theirs in self.renamed:
            if theirs not in names:
                raise UserError(
                    f"{where} has no column {theirs!r}, which data.columns.{ours} names; its columns are "
                    f"{', '.join(names)}"
                )
        if found := self.found(names):
            if twice := [name for name in found if names.count(name) > 1]:
                raise UserError(
                    f"{where} has {names.count(twice[0])} columns named {twice[0]!r}; write it with one of them, or "
                    "under two names"
                )
            return found
        there = f"its columns are {', '.join(names)}" if names else "it has no columns"
        if self.format == "preference":
            missing = [name for name in _SIDES if name not in names]
            raise UserError(
                f"{where} has no column{'s' * (len(missing) - 1)} {' and '.join(missing)}; {there}; rename its "
                'columns so that rows are like {"prompt": "...", "chosen": "...", "rejected": "..."}'
            )
        if not self.has_template:
            raise UserError(
                f"{where} has no columns 'prompt' and 'completion', which data.chat_template=none trains on; {there}; "
                "name them with data.columns.prompt=NAME data.columns.completion=NAME, or leave data.chat_template out"
            )
        use = f"use {self.key}={names[0] if names else 'NAME'}"
        if self.format == "chat":
            use += ' if it holds messages, as in [{"role": "user", "content": "..."}, ...]'
            use += "; for plain text data.format=text" if "text" in names else ""
        elif Column("messages", "chat").found(names):
            use = f"to train on conversations use data.format=chat, and for text {self.key}=NAME"
        raise UserError(f"{where} has no column {self.name!r}; {there}; {use}")

    def content_of(self, row: Mapping[str, Any]) -> Content | Changed:
        """Return the document of ``row``. Raises ``UserError`` like ``content``, and if ``row`` lacks the columns."""
        names = self.found(row) or self.check(list(row), "")
        return self.content(row[names[0]] if len(names) == 1 else {name: row[name] for name in names})

    def content(self, value: Any) -> Content | Changed:
        """Convert ``value``, as read from the columns, to the content of a row. Null becomes an empty document. Raises
        ``UserError`` if it is invalid. The message is appended to the row's position."""
        if value is None:
            return ""
        if isinstance(value, dict) and self.renamed:
            ours = {theirs: ours for ours, theirs in self.renamed}
            value = {ours.get(name, name): it for name, it in value.items()}
        if self.format == "preference":
            return _pair(value)
        if self.format == "chat":
            beside: dict[str, Any] = {}
            is_changed = False
            if isinstance(value, dict):
                if not _weighs(value.get(_WEIGHT)):
                    return Changed("", has_zero_weight=True)
                if not self.has_template:
                    return _completion(value)
                tools = _tools(value.get(_TOOLS))
                functions = [] if tools else _tools_of_functions(value.get(_FUNCTIONS))
                beside = {_TOOLS: tools or functions}
                if self._holds_messages(value):
                    beside[_SYSTEM] = _system(value.get(_SYSTEM))
                is_changed = bool(functions or beside.get(_SYSTEM))
                value = self._conversation(value)
            if value is None:
                return ""
            if isinstance(value, list) and all(isinstance(message, dict) for message in value):
                beside = {name: it for name, it in beside.items() if it}
                content = {"messages": value, **beside} if beside and value else value
                return Changed(content) if is_changed and value else content
            wanted = "a list of messages such as {role: user, content: ...}"
        else:
            if isinstance(value, str | bytes):
                return value
            wanted = "text"
            if isinstance(value, list) and value and all(isinstance(message, dict) for message in value):
                raise UserError(
                    f": column {self.name!r} is {_described(value)}, not text; to train on conversations use "
                    f"data.format=chat data.messages_column={self.name}"
                )
        raise UserError(
            f": column {self.name!r} is {_described(value)}, not {wanted}; fix the row, or name another "
            f"column: {self.key}=NAME"
        )

    def _holds_messages(self, row: Mapping[str, Any]) -> bool:
        return any(name in row for name in (self.name, _SHARED))

    def _conversation(self, row: Mapping[str, Any]) -> Any:
        """Return the messages of a row, from the messages column or from a prompt and its answer, each a string or a
        list of messages. Raises ``UserError`` if the row has both."""
        pair = next((pair for pair in _PAIRS if {*pair} <= row.keys()), None)
        for name in (self.name, _SHARED):
            if name not in row:
                continue
            if pair and not self.renamed and row[name] and all(row[side] for side in pair):
                both = " and ".join(map(repr, pair))
                raise UserError(
                    f": it has both {name!r} and {both}, which are two conversations; name one: "
                    f"data.columns.messages={name}, or remove the others"
                )
            return row[name]
        if pair is None:
            return row
        asked, said = (row[name] for name in pair)
        if isinstance(asked, str) and row.get("input"):
            asked = f"{asked}\n\n{row['input']}"  # as in Alpaca: input to the instruction
        parts = [("system", row.get("system") or [])]
        for turn in row.get(_HISTORY) or []:  # as in Alpaca: pairs of prompt and answer of earlier turns
            if not isinstance(turn, list) or [type(text) for text in turn] != [str, str]:
                raise UserError(
                    f": column {_HISTORY!r} is {_described(row[_HISTORY])}, not a list of pairs of a question "
                    "and its answer; fix the row, or give the column another name"
                )
            parts += [("user", turn[0]), ("assistant", turn[1])]
        parts += [("user", asked), ("assistant", said)]
        messages = [each if isinstance(each, list) else [{"role": role, "content": each}] for role, each in parts]
        return [message for side in messages for message in side]


def _tools(value: Any) -> list[dict[str, Any]]:
    """Return the tools in a column, given as a list or as JSON text. Empty if there are none. Raises ``UserError`` for
    any other value."""
    found = value
    if isinstance(value, str):
        try:
            found = json.loads(value or "[]")
        except (ValueError, RecursionError):
            found = value
    if found is None or found == []:
        return []
    if not _is_conversation(found):
        raise UserError(
            f": column {_TOOLS!r} is {_described(value)}, not a list of JSON schemas; fix the row, or "
            "give the column another name"
        )
    return without_nulls(found)


def _tools_of_functions(value: Any) -> list[dict[str, Any]]:
    """Return the tools in a column in OpenAI's earlier format."""
    return [{"type": "function", "function": function} for function in _tools(value)]


def _system(value: Any) -> str:
    """Return the system prompt from a separate column. Raises ``UserError`` if it is not text."""
    if value is not None and not isinstance(value, str):
        raise UserError(
            f": column {_SYSTEM!r} is {_described(value)}, not text; fix the row, or give the column another name"
        )
    return value or ""


def _weighs(value: Any) -> bool:
    """Return whether a row with this ``weight`` is trained on. Raises ``UserError`` if it is neither 0 nor 1."""
    try:
        number = 1.0 if value is None else float(value)
    except (TypeError, ValueError):
        number = -1.0
    if number not in (0, 1):
        raise UserError(
            f": column {_WEIGHT!r} is {_described(value)}, and a row is trained on (1) or not (0); fix the row, or "
            f"ignore the column: data.columns.{_WEIGHT}=null"
        )
    return bool(number)


def _completion(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return the prompt and the completion of a row without a template."""
    pair = next(pair for pair in _PAIRS if {*pair} <= row.keys())
    for name in pair:
        if not isinstance(row[name], str):
            raise UserError(
                f": column {name!r} is {_described(row[name])}, not text, which data.chat_template=none needs; fix the "
                "row, or leave data.chat_template out"
            )
    return {"prompt": row[pair[0]], "completion": row[pair[1]]}


_TURNS_OF_HH = re.compile(r"(?:\A|\n\n)(Human|Assistant): ?")


def _messages_of_hh(text: str) -> list[dict[str, Any]]:
    """Return the messages of a text that has ``Human:`` or ``Assistant:`` before each turn, as in hh-rlhf. Empty if the
    text has another form."""
    begin, *parts = _TURNS_OF_HH.split(text.strip())
    if begin.strip() or len(parts) < 4 or parts[0] != "Human" or parts[-2] != "Assistant":
        return []
    roles = {"Human": "user", "Assistant": "assistant"}
    return [{"role": roles[name], "content": said.strip()} for name, said in zip(parts[::2], parts[1::2], strict=True)]


def without_nulls(value: Any) -> Any:
    """Return plain data without null values, which tables contain for absent keys."""
    if isinstance(value, dict):
        return {key: without_nulls(each) for key, each in value.items() if each is not None}
    return [without_nulls(item) for item in value] if isinstance(value, list) else value


def _pair(row: Mapping[str, Any]) -> Content | Changed:
    """Return the messages of the prompt and of both answers, and the tools if there are any."""
    column = next((name for name in (*_PROMPTS, _SHARED) if row.get(name) is not None), None)
    prompt = None if column is None else row[column]
    # In ShareGPT's format, an answer is one message.
    row = {**row, **{name: [row[name]] for name in _SIDES if isinstance(row[name], dict)}}
    is_changed = False
    if isinstance(prompt, list) and prompt and all(_is_conversation(row[name]) for name in _SIDES):
        begun = [without_nulls(row[name][: len(prompt)]) for name in _SIDES]
        if column == _SHARED and begun[0][:1] == begun[1][:1] and not _is_reply(begun[0][0]):
            prompt = None  # the sides are whole conversations
        elif begun == [without_nulls(prompt)] * 2:
            prompt, is_changed = None, True
    is_changed |= column == _SHARED and prompt is not None
    if prompt is None and all(isinstance(row[name], str) for name in _SIDES):
        of_hh = {name: _messages_of_hh(row[name]) for name in _SIDES}
        row = {**row, **of_hh} if all(of_hh.values()) else row
    for name in _SIDES:
        if not isinstance(row[name], str) and not _is_conversation(row[name]):
            raise UserError(
                f": column {name!r} is {_described(row[name])}, not text or a list of messages such as "
                "{role: assistant, content: ...}; fix or remove the row"
            )
    if isinstance(row["chosen"], str) != isinstance(row["rejected"], str):
        raise UserError(": one of 'chosen' and 'rejected' is text and the other messages; fix the row")
    sides = {name: _as_messages("assistant", row[name]) for name in _SIDES}
    asked: list[dict[str, Any]] = []
    if isinstance(row["chosen"], list) and not isinstance(prompt, list):  # both contain the full conversation
        shared = zip(*sides.values(), strict=False)
        asked = [first for first, _ in takewhile(lambda both: both[0] == both[1], shared)]
        sides = {name: messages[len(asked) :] for name, messages in sides.items()}
    if not asked and isinstance(prompt, str | list) and (isinstance(prompt, str) or _is_conversation(prompt)):
        asked = _as_messages("user", prompt)
    if not asked:
        need = f"give what both reply to in the column {_PROMPTS[0]!r}"
        if prompt is not None:
            reason = f"what these answers reply to is {_described(prompt)}, not text or a list of messages"
        elif isinstance(row["chosen"], str):
            reason, need = "it has two answers and no prompt", f"{need}, apart from the answers"
        else:
            reason = "chosen and rejected begin with different messages"
        raise UserError(f": {reason}; {need}")
    system, tools = row.get("system"), _tools(row.get(_TOOLS))
    prompted = {"prompt": [*(_as_messages("system", system) if system else []), *asked], **sides}
    content = {**prompted, _TOOLS: tools} if tools else prompted
    return Changed(content) if is_changed else content


def _is_reply(message: Mapping[str, Any]) -> bool:
    return message.get("role", message.get("from")) in _REPLIES


def _is_conversation(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(message, dict) for message in value)


def _as_messages(role: str, said: str | list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{"role": role, "content": said}] if isinstance(said, str) else said


def _described(value: Any) -> str:
    if value is None:
        return "null"
    shown = repr(value)
    shown = shown if len(shown) <= _SHOWN_CHARACTERS else f"{shown[: _SHOWN_CHARACTERS - 1]}…"
    kinds = {bool: "a truth value", int: "a number", float: "a number", list: "a list", dict: "an object", str: "text"}
    return f"{kinds.get(type(value), type(value).__name__)} ({shown})"


def _lines_from(path: Path | str) -> str:
    """Return a shell command that rewrites a JSON array, or objects that span several lines, as one object per line."""
    quoted = shlex.quote(str(path))
    return f"jq -c 'if type == \"array\" then .[] else . end' {quoted} > lines.jsonl"


def holds_rows(path: Path, column: Column) -> bool:
    """Return whether a JSON file contains rows, one per line or in an array, and is not one document of text. Raises
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
        return _is_row(row, column) or _is_object(following)
    begun = f"{first}\n{following.decode('utf-8', 'replace')}" if row is None else first
    try:
        row, _ = json.JSONDecoder().raw_decode(begun.removeprefix("[").lstrip())
    except (ValueError, RecursionError):
        return False
    if not isinstance(row, dict) or not _is_row(row, column):
        return False
    if begun.startswith("["):
        return True
    raise UserError(
        f"{path} does not have one row per line; convert it with: {_lines_from(path)}; then use "
        "data.path=lines.jsonl (a copy that ends in .txt is read as one document of text)"
    )


def _is_row(row: dict[str, Any], column: Column) -> bool:
    """Return whether ``row`` has the columns of a document, in the format of ``column`` or in another format."""
    return any(candidate.found(row) for candidate in (column, Column("text", "text"), Column("messages", "chat"))) or (
        {*_SIDES} <= row.keys()
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
                remedy = f"each line is one object; to make lines of the file: {_lines_from(self.path)}"
            raise UserError(f" is not JSON: {reason}; {remedy}") from error
        if not isinstance(row, dict):
            remedy = f"; to make lines of a JSON array: {_lines_from(self.path)}" if isinstance(row, list) else ""
            raise UserError(f" is {_described(row)}, not an object with a column per name{remedy}")
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
        decoder, text, at, wanted, number = json.JSONDecoder(), "", 0, PIECE_BYTES, 0
        following = "["  # "[", then "item", "item or ]" or ", or ]", and "end" after the array
        try:
            while True:
                more = stream.read(wanted)
                text, at, wanted = text[at:] + more, 0, PIECE_BYTES
                while (at := _end_of_space(text, at)) < len(text):
                    mark = text[at]
                    if following == "end":
                        raise self._ends_early(number, is_array=mark == "[")
                    if "item" not in following or (mark == "]" and "]" in following):
                        if mark not in "[,]" or mark not in following:
                            raise UserError(
                                f"{self.path} has {_described(text[at : at + _SHOWN_CHARACTERS])} after row "
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
                    at, number, following = stop, number + 1, ", or ]"
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
                f"{self.path} has another array after the first one, of {rows:,} rows; join them: "
                f"{_lines_from(self.path)}; then use data.path=lines.jsonl"
            )
        return UserError(f"{self.path} has text after its array of {rows:,} rows; correct the file")

    def _content(self, row: Any) -> Any:
        if not isinstance(row, dict):
            raise UserError(f" is {_described(row)}, not an object with a column per name; fix or remove it")
        return self.column.content_of(row)


def _end_of_space(text: str, at: int) -> int:
    """Return the position of the first character of ``text`` from ``at`` on that is not whitespace."""
    found = _SPACE.match(text, at)
    return found.end() if found else at


def _is_array(path: Path) -> bool:
    """Return whether a file is one JSON array instead of lines."""
    with open_plain(path) as stream:
        return stream.read(_PEEKED_BYTES).decode("utf-8-sig", "replace").lstrip().startswith("[")


@dataclass(frozen=True, kw_only=True)
class ParquetRows(Unit):
    """Rows of a Parquet file: the row group ``group``, or all groups in order if it is None."""

    path: Path | str
    column: Column
    group: int | None = None
    stamp: Stamp | None = None

    def all_rows(self, first: int = 0) -> Iterator[Row]:
        with unchanged(self.path, self.stamp), open_parquet(self.path) as file:
            self.column.check(file.schema_arrow.names, str(self.path))
            lengths = [file.metadata.row_group(group).num_rows for group in range(file.metadata.num_row_groups)]
            groups = range(len(lengths)) if self.group is None else [self.group]
            before, number = sum(lengths[: groups[0]]) if groups else 0, 0
            for group in groups:
                if number + lengths[group] > first:
                    for row in self._group(file, group, before + number):
                        if row.number - before >= first:
                            yield row._replace(number=row.number - before)
                number += lengths[group]

    def _group(self, file: Any, group: int, number: int) -> Iterator[Row]:
        """Yield the rows of one row group with their numbers in the file, starting at ``number``."""
        arrow = library("pyarrow", f"reading {Path(self.path).name}")
        names = self.column.found(file.schema_arrow.names)
        batches = file.iter_batches(_BATCH_ROWS, row_groups=[group], columns=names)
        while True:
            try:
                batch = next(batches, None)
            except (arrow.ArrowException, OSError) as error:
                raise UserError(
                    f"{self.path} cannot be read from row {number + 1:,} on (row group {group + 1}): {error}; "
                    "create it again, or leave it out with data.path=..."
                ) from error
            if batch is None:
                return
            yield from rows_of(documents_of(batch), self.column, number, str(self.path))
            number += len(batch)


def documents_of(batch: Any) -> Any:
    """Return the documents of an Arrow table as one array: its only column, or a struct array of several columns."""
    return batch.column(0) if batch.num_columns == 1 else batch.to_struct_array()


def rows_of(values: Any, column: Column, first: int, name: str) -> Iterator[Row]:
    """Yield the rows of an Arrow array. The first has the number ``first``."""
    try:
        contents = values.to_pylist()
    except UnicodeDecodeError:
        contents = [_text_or_error(value) for value in values]
    except ValueError as error:  # raised by Arrow if fields of a column have the same name
        raise UserError(
            f"{Place(name, first, 'row')} or a later one cannot be read: {error}; write the file again"
        ) from None
    for number, content in enumerate(contents, first):
        place = Place(name, number, "row")
        yield row_of(number, place, content, column.content)


def row_of(number: int, place: Place, found: Any, content: Callable[[Any], Any]) -> Row:
    """Return the row with the content ``content(found)``, or with the ``UserError`` that this raised."""
    try:
        if isinstance(found, UserError):
            raise found
        read = content(found)
        if isinstance(read, Changed):
            return Row(number, read.content, place=place, is_new=True, has_zero_weight=read.has_zero_weight)
        return Row(number, read, place=place)
    except UserError as error:
        return Row(number, "", place=place, error=UserError(AtRow(place, str(error))))


def _text_or_error(value: Any) -> Any:
    try:
        return value.as_py()
    except UnicodeDecodeError as error:
        return UserError(
            f" is not UTF-8: byte 0x{error.object[error.start]:02x} at offset {error.start} of its text "
            f"({error.reason}); fix or remove the row"
        )


@contextmanager
def open_parquet(path: Path | str) -> Iterator[Any]:
    """Open a Parquet file, on the disk or at an fsspec address. Raises ``UserError`` if it is invalid or incomplete."""
    arrow = library("pyarrow", f"reading {Path(path).name}")
    parquet = library("pyarrow.parquet", f"reading {Path(path).name}")
    with ExitStack() as stack:
        try:
            file = parquet.ParquetFile(opened(path, stack), pre_buffer=False)
        except (arrow.ArrowException, OSError) as error:
            if isinstance(error, OSError) and error.errno:
                raise unreadable(path, error) from error
            raise UserError(
                f"{path} is not a complete parquet file: {error}; it may be cut off: create it "
                "again, or leave it out with data.path=..."
            ) from error
        yield file


class RowFiles(Source):
    """Files of rows as a source. The split of a document depends on its content."""

    def __init__(self, files: Sequence[SourceFile], column: Column) -> None:
        self._files, self._column = files, column
        self._hashed: list[Document] = []

    def identity(self) -> list[str]:
        return [os.path.commonpath([file.path.absolute() for file in self._files]), self._column.identity]

    def state(self) -> str | None:
        return files_state(self._files)

    def fingerprint(self, progress: Progress) -> bytes:
        self._hashed = hash_files(self._files, progress)
        return hashlib.sha256(key_of(self._hashed) + self._column.identity.encode()).digest()

    def units(self) -> list[Unit]:
        units = [
            unit
            for file in self._hashed
            for unit in units_of_file(file.path, self._column, file.size_bytes, file.stamp)
        ]
        _check_renamed([unit for unit in units if isinstance(unit, JsonLines | JsonArray)], self._column)
        return units


class _Names:
    """The names of the columns of a row."""

    def content_of(self, row: Mapping[str, Any]) -> list[str]:
        return list(row)


def _check_renamed(units: "Sequence[JsonLines | JsonArray]", column: Column) -> None:
    """Raise ``UserError`` if no row of ``units`` has a column that ``data.columns`` names. Reads rows until all are
    found, usually one."""
    missing, names = dict(column.renamed), dict[str, None]()
    rows = (row for unit in units if missing for row in replace(unit, column=_Names()).all_rows())
    for row in rows:
        if row.error is None:
            names.update(dict.fromkeys(map(str, row.content)))
            missing = {ours: theirs for ours, theirs in missing.items() if theirs not in names}
        if not missing:
            return
    if names and missing:
        ours, theirs = next(iter(missing.items()))
        more = [f"and {len(names) - _SHOWN_COLUMNS:,} more"] if len(names) > _SHOWN_COLUMNS else []
        raise UserError(
            f"no row of {units[0].path}{' or the other files' if units[-1].path != units[0].path else ''} has a column "
            f"{theirs!r}, which data.columns.{ours} names; they have {', '.join([*[*names][:_SHOWN_COLUMNS], *more])}"
        )


def units_of_file(path: Path, column: Column, size_bytes: int, stamp: Stamp | None) -> Iterator[Unit]:
    """Yield the units of a file: one per row group, one per 32 MiB of lines, or one per JSON array or compressed
    file."""
    if kind_of(path) == ".parquet":
        with open_parquet(path) as file:
            column.check(file.schema_arrow.names, str(path))
            for group in range(file.metadata.num_row_groups):
                name, size = f"{path} row group {group + 1}", file.metadata.row_group(group).total_byte_size
                yield ParquetRows(name=name, size_bytes=size, path=path, column=column, group=group, stamp=stamp)
        return
    if _is_array(path):
        yield JsonArray(name=str(path), size_bytes=size_bytes, path=path, column=column, stamp=stamp)
        return
    step = size_bytes if path.suffix.lower() in COMPRESSED else _UNIT_BYTES
    for start in range(0, size_bytes, step):
        stop = start + step if start + step < size_bytes else None
        yield JsonLines(
            name=f"{path} from byte {start:,}" if start else str(path), size_bytes=min(step, size_bytes - start),
            path=path, column=column, start_bytes=start, stop_bytes=stop, stamp=stamp,
        )  # fmt: skip
