"""Columns that contain the document of a row: text, conversations, or pairs of answers."""

import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any, Literal, NamedTuple, Protocol

from serried.configs.errors import UserError
from serried.recipes.data.readers.source import AtRow, Content, Place, Row

SHOWN_CHARACTERS = 60
"""Maximum number of characters of a value in a message."""

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
"""Column of the weight of a row in the loss. A row of weight 0 is left out."""
MOST_WEIGHT = 1e6
_SHARED = "conversations"
"""Column of a conversation in ShareGPT's format."""
_REPLIES = ("assistant", "gpt", "chatgpt", "bot", "model")
"""Roles of replies."""
_SIDES = ("chosen", "rejected")
_LABEL = "label"
"""Column with the label of a single answer: whether it is a good one."""
_PROMPTS = ("prompt", "question", "instruction")
"""Prompt columns, one of which may accompany a pair of answers."""
COLUMNS = tuple(
    dict.fromkeys(
        [
            "messages", *(name for pair in _PAIRS for name in pair), *_BESIDE, _TOOLS, _FUNCTIONS, _WEIGHT, *_SIDES,
            _LABEL,
        ]
    )
)  # fmt: skip
"""Columns of conversations and pairs that ``data.columns`` can map to other names."""


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
    format: Literal["text", "chat", "preference", "unpaired"]
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
        if section.format in ("preference", "unpaired"):
            name = "chosen" if section.format == "preference" else _LABEL
            return cls(name, section.format, renamed, ignored=ignored)
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
        if self.format == "unpaired" and _LABEL in names:
            whole = [(name,) for name in ("messages", _SHARED) if name in names]
            answer: Sequence[str] = whole[0] if whole else pair
            held: Sequence[str] = (*answer, _LABEL) if answer else ()
            beside = (_SYSTEM,)
        elif self.format in ("preference", "unpaired"):
            held = _SIDES if {*_SIDES} <= {*names} else ()
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
        others = (*beside, _TOOLS, _FUNCTIONS, _WEIGHT)
        return [*held, *(name for name in others if held and name in names)]

    def check(self, names: Sequence[str], where: str) -> list[str]:
        """Return the columns that contain the document. Raises ``UserError`` if there are none among ``names``, or two
        of them have the same name, as after a join."""
        for ours, theirs in self.renamed:
            if theirs not in names:
                raise UserError(
                    f"{where} has no column {theirs!r} (data.columns.{ours}={theirs}); its columns are "
                    f"{', '.join(names)}"
                )
        if found := self.found(names):
            if twice := [name for name in found if names.count(name) > 1]:
                raise UserError(
                    f"{where} has {names.count(twice[0])} columns named {twice[0]!r}; rename or remove one of them"
                )
            return found
        there = f"its columns are {', '.join(names)}" if names else "it has no columns"
        if self.format == "preference":
            missing = [name for name in _SIDES if name not in names]
            raise UserError(
                f"{where} has no column {' or '.join(missing)}; {there}; rename its columns so "
                'that rows look like {"prompt": "...", "chosen": "...", "rejected": "..."}'
            )
        if self.format == "unpaired":
            missing_label = "a label and no answer" if _LABEL in names else f"no column {_LABEL!r}"
            raise UserError(
                f"{where} has {missing_label}; {there}; rename its columns so that rows are like "
                '{"prompt": "...", "completion": "...", "label": true}'
            )
        if not self.has_template:
            raise UserError(
                f"{where} has no columns 'prompt' and 'completion' for data.chat_template=none; {there}; set "
                "data.columns.prompt=NAME data.columns.completion=NAME, or remove data.chat_template"
            )
        use = f"use {self.key}={names[0] if names else 'NAME'}"
        if self.format == "chat":
            use += ' if it holds messages, as in [{"role": "user", "content": "..."}, ...]'
            use += "; for plain text data.format=text" if "text" in names else ""
        elif Column("messages", "chat").found(names):
            use = f"use data.format=chat to train on conversations, or {self.key}=NAME to train on text"
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
        if self.format in ("preference", "unpaired"):
            return _weighted(_labelled(value) if _LABEL in value else _pair(value), value.get(_WEIGHT))
        if self.format == "chat":
            beside: dict[str, Any] = {}
            is_changed = False
            if isinstance(value, dict):
                weight = _row_weight(value.get(_WEIGHT))
                if not weight:
                    return Changed("", has_zero_weight=True)
                of_row = {} if weight == 1 else {_WEIGHT: weight}
                if not self.has_template:
                    completion: Any = {**_completion(value), **of_row}
                    return Changed(completion) if of_row else completion
                tools = _tools(value.get(_TOOLS))
                functions = [] if tools else _tools_of_functions(value.get(_FUNCTIONS))
                beside = {_TOOLS: tools or functions, **of_row}
                if self._holds_messages(value):
                    beside[_SYSTEM] = _system(value.get(_SYSTEM))
                is_changed = bool(functions or beside.get(_SYSTEM) or of_row)
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
                    f": column {self.name!r} is {described(value)}, not text; to train on conversations use "
                    f"data.format=chat data.messages_column={self.name}"
                )
        raise UserError(
            f": column {self.name!r} is {described(value)}, not {wanted}; fix the row, or use another column: "
            f"{self.key}=NAME"
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
                    f": {name!r} and {both} both contain a conversation; use data.columns.messages={name} to read "
                    f"only {name!r}, or remove one of them"
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
                    f": column {_HISTORY!r} is {described(row[_HISTORY])}, not a list of [question, answer] pairs; fix "
                    "the row, or rename the column"
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
            f": column {_TOOLS!r} is {described(value)}, not a list of JSON schemas; fix the row, or rename the column"
        )
    return without_nulls(found)


def _tools_of_functions(value: Any) -> list[dict[str, Any]]:
    """Return the tools in a column in OpenAI's earlier format."""
    return [{"type": "function", "function": function} for function in _tools(value)]


def _system(value: Any) -> str:
    """Return the system prompt from a separate column. Raises ``UserError`` if it is not text."""
    if value is not None and not isinstance(value, str):
        raise UserError(f": column {_SYSTEM!r} is {described(value)}, not text; fix the row, or rename the column")
    return value or ""


def _row_weight(value: Any) -> float:
    """Return the weight in the column of a row. Raises ``UserError`` if it is not a number of at least 0."""
    try:
        number = 1.0 if value is None else float(value)
    except (TypeError, ValueError):
        number = -1.0
    if not 0 <= number <= MOST_WEIGHT:
        raise UserError(
            f": column {_WEIGHT!r} is {described(value)}, not a number from 0 to {MOST_WEIGHT:,.0f}; fix the row, or "
            f"ignore the column: data.columns.{_WEIGHT}=null"
        )
    return number


def _weighted(content: Content | Changed, weight: Any) -> Content | Changed:
    """Return the content of a row with the ``weight`` of its column. Raises ``UserError`` like ``_row_weight``."""
    number = _row_weight(weight)
    if number == 1:
        return content
    plain: Any = content.content if isinstance(content, Changed) else content
    with_weight: Any = {**plain, _WEIGHT: number}
    return Changed(with_weight) if number else Changed("", has_zero_weight=True)


def _labelled(row: Mapping[str, Any]) -> Content:
    """Return the messages of a prompt and its answer, the label of the answer, and the tools if there are any."""
    words = {"true": True, "1": True, "1.0": True, "false": False, "0": False, "0.0": False}
    label = words.get(str(row[_LABEL]).lower())
    if label is None:
        raise UserError(f": column {_LABEL!r} is {described(row[_LABEL])}, not true or false; fix or remove the row")
    whole = next((name for name in ("messages", _SHARED) if name in row), None)
    if whole is not None:
        if not _is_conversation(row[whole]) or not _is_reply(row[whole][-1]):
            what = "does not end with a reply" if _is_conversation(row[whole]) else f"is {described(row[whole])}"
            raise UserError(f": column {whole!r} {what}, so there is no answer to label; fix or remove the row")
        asked, said = row[whole][:-1], row[whole][-1:]
    else:
        pair = next(pair for pair in _PAIRS if {*pair} <= row.keys())
        for name in pair:
            if not isinstance(row[name], str) and not _is_conversation(row[name]):
                raise UserError(
                    f": column {name!r} is {described(row[name])}, not text or a list of messages; fix or remove the "
                    "row"
                )
        asked, said = _as_messages("user", row[pair[0]]), _as_messages("assistant", row[pair[1]])
    system, tools = _system(row.get(_SYSTEM)), _tools(row.get(_TOOLS))
    asked = [*(_as_messages("system", system) if system else []), *asked]
    content: Any = {"prompt": asked, "completion": said, _LABEL: label}
    return {**content, _TOOLS: tools} if tools else content


def _completion(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return the prompt and the completion of a row without a template."""
    pair = next(pair for pair in _PAIRS if {*pair} <= row.keys())
    for name in pair:
        if not isinstance(row[name], str):
            raise UserError(
                f": column {name!r} is {described(row[name])}, but data.chat_template=none needs text; fix the row, or "
                "remove data.chat_template"
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
                f": column {name!r} is {described(row[name])}, not text or a list of messages such as "
                "{role: assistant, content: ...}; fix or remove the row"
            )
    if isinstance(row["chosen"], str) != isinstance(row["rejected"], str):
        raise UserError(": one of 'chosen' and 'rejected' is text, the other a list of messages; fix the row")
    sides = {name: _as_messages("assistant", row[name]) for name in _SIDES}
    asked: list[dict[str, Any]] = []
    if isinstance(row["chosen"], list) and not isinstance(prompt, list):  # both contain the full conversation
        shared = zip(*sides.values(), strict=False)
        asked = [first for first, _ in takewhile(lambda both: both[0] == both[1], shared)]
        sides = {name: messages[len(asked) :] for name, messages in sides.items()}
    if not asked and isinstance(prompt, str | list) and (isinstance(prompt, str) or _is_conversation(prompt)):
        asked = _as_messages("user", prompt)
    if not asked:
        need = f"put the prompt of both answers into the column {_PROMPTS[0]!r}"
        if prompt is not None:
            reason = f"the prompt is {described(prompt)}, not text or a list of messages"
        elif isinstance(row["chosen"], str):
            reason = "the row has two answers but no prompt"
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


def described(value: Any) -> str:
    """Return the type and the first characters of a value in a row, for a message."""
    if value is None:
        return "null"
    shown = repr(value)
    shown = shown if len(shown) <= SHOWN_CHARACTERS else f"{shown[: SHOWN_CHARACTERS - 1]}…"
    kinds = {bool: "a boolean", int: "a number", float: "a number", list: "a list", dict: "an object", str: "text"}
    return f"{kinds.get(type(value), type(value).__name__)} ({shown})"


def is_row(row: dict[str, Any], column: Column) -> bool:
    """Return whether ``row`` has the columns of a document, in the format of ``column`` or in another format."""
    return any(candidate.found(row) for candidate in (column, Column("text", "text"), Column("messages", "chat"))) or (
        {*_SIDES} <= row.keys()
    )


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
