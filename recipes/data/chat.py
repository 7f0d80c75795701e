"""Conversations as tokens, of which only the assistant's messages are trained on.

A conversation is rendered by a Jinja template, as ``transformers`` does it, and tokenised whole. Which part of the text
is a reply is found by rendering the conversation up to it: with the beginning of the reply asked for, the text is what
a model is given; with the reply, it ends where the reply does. So no template has to mark the replies, and hardly any
does.
"""

import json
from collections.abc import Callable, Iterable, Sequence
from datetime import datetime
from functools import partial
from typing import Any

import numpy as np

from serried.configs.data_section import DataSection
from serried.configs.errors import UserError
from serried.configs.plain_data import NotPlainData, expanded, read_bytes
from serried.recipes.data.encode import Encoded, row_of_unit
from serried.recipes.data.files import library
from serried.recipes.data.hugging_face_tokenizer import HuggingFaceTokenizer
from serried.recipes.data.rows import without_nulls
from serried.recipes.data.source import Row
from serried.recipes.data.tokenizer import Tokenizer, token_dtype

CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
"""Default template for tokenizers without one."""

_FORMAT = 2
"""Version of rendering and finding replies, which the spec does not contain."""

_NOW = datetime(2024, 7, 26)
"""The date given to templates that ask for it: tokens must not depend on the day."""

_ROLES = {
    "human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "chatgpt": "assistant",
    "bot": "assistant", "system": "system", "tool": "tool", "function_response": "tool", "observation": "tool",
}  # fmt: skip
"""Of conversations in the form of ShareGPT, {from, value}."""

_MOST_CHARACTERS = 2**26
"""That a template may write for one conversation: it may loop as often as it likes."""

_STAND_IN = "serried-reply-5d1f8a"
"""Stands in for a reply, to find where a template puts it."""

_CURE = "use another template, data.chat_template=FILE, or fix the row"

Message = dict[str, Any]

Render = Callable[..., str]
"""``Template.render`` with its tools."""


class ChatEncoder:
    """Encoder of rows that are lists of messages, {role, content} or {from, value}."""

    def __init__(self, tokenizer: Tokenizer, template: str, name: str) -> None:
        """``name``: name of the template in messages. Raises ``UserError`` if it is not a Jinja template, or jinja2 is
        not there."""
        self._tokenizer = tokenizer
        self._template = Template(template, name, _special_tokens(tokenizer.spec().get("files", {})))
        self._dtype = token_dtype(tokenizer.vocab_size)

    def spec(self) -> dict[str, Any]:
        """Plain JSON of everything the tokens depend on besides rows and tokenizer."""
        return {"format": _FORMAT, "template": self._template.text}

    def __call__(self, rows: Sequence[Row], unit: str) -> list[Encoded]:
        found = []
        for row in rows:
            content: Any = row.content
            messages, tools = content, ()
            if isinstance(content, dict):
                messages, tools = content.get("messages"), content.get("tools") or ()
            found.append(self.conversation(messages, row_of_unit(row, unit), tools=tools))
        return found

    def conversation(self, content: Any, where: str, first: int = 0, tools: Sequence[dict[str, Any]] = ()) -> Encoded:
        """Return the tokens of the messages ``content``, with the ``tools`` they may call; only replies from message
        ``first`` on are trained on. Raises ``UserError`` if they are none, or cannot be trained on; says ``where`` they
        are."""
        messages = _messages(content, where)
        try:
            render = partial(self._template.render, tools=tools)
            _check_calls(render, self._template.name, messages)
            text, replies = _replies(render, messages, first)
            if tools and _rendered(self._template, messages) == text:
                raise _Unlearnable(
                    f"{self._template.name} shows no tools, so training would not see which may be called; use a "
                    "template that does, data.chat_template=FILE, or remove the column 'tools'"
                )
            text.encode()  # tokenizers fail in other ways if it is not text
            ids, places = self._tokenizer.encode_marked(text)
        except UnicodeEncodeError as error:
            raise UserError(f"{where} holds half a character (an unpaired surrogate); fix or remove the row") from error
        except (UserError, _Unlearnable) as error:
            raise UserError(f"{where}: {error}") from error
        supervised = np.zeros(len(ids), np.uint8)
        for start, stop in replies:
            supervised[(start <= places) & (places < stop)] = 1
        if not supervised[1:].any():  # the first token is predicted from nothing
            roles = ", ".join(dict.fromkeys(message["role"] for message in messages)) or "none"
            said = (
                "the assistant's messages are empty"
                if replies
                else f"no message is from the assistant (roles: {roles})"
            )
            raise UserError(f"{where}: it has nothing to train on: {said}; fix or remove the row")
        if ids[-1] != self._tokenizer.end_id:  # a template may end with it
            ids, supervised = np.append(ids, self._tokenizer.end_id), np.append(supervised, np.uint8(0))
        return Encoded(ids.astype(self._dtype), supervised)


def chat_encoder(section: DataSection, tokenizer: Tokenizer) -> ChatEncoder:
    """Return the encoder for ``data.format=chat``."""
    return ChatEncoder(tokenizer, *chat_template(section, tokenizer))


def chat_template(section: DataSection, tokenizer: Tokenizer) -> tuple[str, str]:
    """Return the chat template and its name for messages: ``data.chat_template``, else the tokenizer's, else ChatML.
    Raises ``UserError`` if ``data.chat_template`` is neither a template nor a file with one."""
    given = section.chat_template
    if given is not None and "{" in given:
        return given, "data.chat_template"
    if given is not None:
        try:
            return read_bytes(expanded(given)).decode("utf-8"), f"data.chat_template={given}"
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
            reason = str(error) if isinstance(error, NotPlainData) else reason
            raise UserError(
                f"cannot read data.chat_template={given}: {reason}; give a file with a Jinja template, the template "
                "itself, or data.chat_template=null for the tokenizer's own"
            ) from error
    own = tokenizer.chat_template if isinstance(tokenizer, HuggingFaceTokenizer) else None
    return (CHATML, "ChatML") if own is None else (own, "the tokenizer's template")


class Template:
    """A Jinja template, run in a sandbox: templates are untrusted code."""

    def __init__(self, text: str, name: str, special_tokens: dict[str, str]) -> None:
        """``special_tokens``: variables of the template, such as ``bos_token``."""
        self.text, self.name, self._special_tokens = text, name, special_tokens
        self._compiled = _compile(text, name)

    def render(
        self, messages: Sequence[Message], *, ask_for_reply: bool = False, tools: Sequence[dict[str, Any]] = ()
    ) -> str:
        """The text of ``messages``; with ``ask_for_reply``, and of what comes before a reply of the assistant.
        ``tools``: what it may call.

        Raises:
            _Unlearnable: the template refuses them, or fails.
        """
        import jinja2

        try:
            pieces = self._compiled.generate(
                messages=messages, tools=list(tools) or None, documents=None, add_generation_prompt=ask_for_reply,
                **self._special_tokens,
            )  # fmt: skip
            return _joined(pieces)
        except jinja2.TemplateError as error:
            raise _Unlearnable(f"{self.name} refuses it: {error}; {_CURE}") from error
        except Exception as error:  # a template can fail in any way
            reason = f"{type(error).__name__}: {error}"
            raise _Unlearnable(f"{self.name} fails with {reason}; {_CURE}") from error


class _Unlearnable(Exception):
    """A conversation cannot be rendered, or its replies cannot be found. The message is for users."""


def _joined(pieces: Iterable[str]) -> str:
    text, length = [], 0
    for piece in pieces:
        length += len(piece)
        if length > _MOST_CHARACTERS:
            raise OverflowError(f"more than {_MOST_CHARACTERS} characters for one conversation")
        text.append(piece)
    return "".join(text)


def _compile(text: str, name: str) -> Any:
    """As ``transformers`` compiles it; its tests hold templates to the same functions and options."""
    library("jinja2", "data.format=chat")
    import jinja2
    import jinja2.ext
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(jinja2.ext.Extension):
        """Accept ``{% generation %}``, which marks replies in a few templates; replies are found without it."""

        tags = {"generation"}  # noqa: RUF012 -- as its base class has it

        def parse(self, parser: Any) -> Any:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    class Sandbox(ImmutableSandboxedEnvironment):
        """Refuse to repeat a text until it fills the memory."""

        intercepted_binops = frozenset(["*", "**"])

        def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
            sizes = [len(each) if isinstance(each, str | list | tuple) else each for each in (left, right)]
            is_large = (
                right > 64 if operator == "**" else sizes != [left, right] and sizes[0] * sizes[1] > _MOST_CHARACTERS
            )
            if is_large:
                raise OverflowError(f"{operator} with too large a result")
            return super().call_binop(context, operator, left, right)

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    def to_json(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, **options)  # Jinja's own escapes for HTML

    environment = Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols])
    environment.filters["tojson"] = to_json
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = _NOW.strftime
    try:
        return environment.from_string(text)
    except jinja2.TemplateError as error:
        line = getattr(error, "lineno", None)
        at = f" in line {line}" if line else ""
        raise UserError(f"{name} is not a Jinja template{at}: {error}; give another, or leave it out") from error


def ask(template_text: str, tokenizer: Tokenizer, said: Sequence[str]) -> tuple[list[int], list[int]]:
    """The ids that ask for a reply to the messages ``said``, of the user and the assistant in turn, and those with
    which a reply ends. Raises ``UserError`` if the template refuses the messages."""
    template = Template(template_text, "the chat template", _special_tokens(tokenizer.spec().get("files", {})))
    messages = [{"role": ("user", "assistant")[number % 2], "content": text} for number, text in enumerate(said)]
    try:
        asked = template.render(messages, ask_for_reply=True)
        replied = template.render([*messages, {"role": "assistant", "content": _STAND_IN}])
    except _Unlearnable as error:
        raise UserError(f"prompt: {error}") from error
    after = replied.partition(_STAND_IN)[2]
    end_of_turn, _ = tokenizer.encode_marked(after.rstrip() or after)
    return tokenizer.encode_marked(asked)[0].tolist(), end_of_turn.tolist()


def _special_tokens(files: dict[str, str]) -> dict[str, str]:
    """Special tokens of a Hugging Face tokenizer by name, such as ``bos_token``."""
    tokens: dict[str, str] = {}
    for file in ("special_tokens_map.json", "tokenizer_config.json"):
        for name, value in json.loads(files.get(file, "{}")).items():
            text = value.get("content") if isinstance(value, dict) else value
            if name.endswith("_token") and isinstance(text, str):
                tokens[name] = text
    return tokens


def _messages(content: Any, where: str) -> list[Message]:
    """Messages in the form of OpenAI's, {role, content}; raises ``UserError`` for what is not a conversation."""
    if not isinstance(content, list) or not all(isinstance(message, dict) for message in content):
        raise UserError(
            f"{where} is not a list of messages; use data.format=text for text, or data.messages_column=NAME"
        )
    return [_message(message, f"{where}, message {number}") for number, message in enumerate(content, 1)]


def _message(message: Message, where: str) -> Message:
    message = {key: value for key, value in message.items() if value is not None}  # columns of tables are never absent
    if "role" not in message and "from" in message:
        if message["from"] not in _ROLES:
            known = ", ".join(_ROLES)
            raise UserError(f"{where} is from {message['from']!r}, which is not one of {known}; use these roles")
        kept = {key: value for key, value in message.items() if key not in ("from", "value")}
        message = {**kept, "role": _ROLES[message["from"]], "content": message.get("value")}
    if not isinstance(message.get("role"), str):
        has = ", ".join(message) or "nothing"
        raise UserError(f"{where} has no role (it has {has}); messages are {{role, content}} or {{from, value}}")
    said = message.get("content")
    if message.get("tool_calls"):
        message = {**message, "content": said, "tool_calls": without_nulls(message["tool_calls"])}
        if said is None:
            return message
    if isinstance(said, list):  # parts, as of messages with images
        texts: list[Any] = [part.get("text") if isinstance(part, dict) else part for part in said]
        other = next((part for part, text in zip(said, texts, strict=True) if not isinstance(text, str)), None)
        if other is not None:
            kind = other.get("type", "text") if isinstance(other, dict) else "text"
            part = "a part without text" if kind == "text" else f"a part of type {kind!r}"
            raise UserError(
                f"{where} ({message['role']}) has {part} in its content, and only text is trained on; fix or remove "
                "the row"
            )
        return {**message, "content": "".join(texts)}
    if not isinstance(said, str):
        raise UserError(
            f"{where} ({message['role']}) has {said!r} in place of text as its content; fix or remove the row"
        )
    return message


def _rendered(template: Template, messages: Sequence[Message]) -> str | None:
    """Return the text of a conversation without tools; None: the template wants some."""
    try:
        return template.render(messages)
    except _Unlearnable:
        return None


def _check_calls(render: Render, template: str, messages: Sequence[Message]) -> None:
    """Raise ``_Unlearnable`` if calls of tools are not rendered."""
    calling = [number for number, message in enumerate(messages) if message.get("tool_calls")]
    if not calling:
        return
    try:
        text = render(messages)
    except _Unlearnable:  # some templates know no message without content
        messages = [{**message, "content": message["content"] or ""} for message in messages]
        text = render(messages)
    for number in calling:
        silent = {key: value for key, value in messages[number].items() if key != "tool_calls"}
        try:
            is_dropped = text == render([*messages[:number], silent, *messages[number + 1 :]])
        except _Unlearnable:
            continue  # the template wants the calls
        if is_dropped:
            raise _Unlearnable(
                f"{template} leaves out the tool_calls of message {number + 1} (assistant); use a template that shows "
                "them: data.chat_template=FILE"
            )


def _replies(render: Render, messages: Sequence[Message], first: int) -> tuple[str, list[tuple[int, int]]]:
    """Return the text of a conversation, and start and stop of each reply of the assistant from message ``first`` on.

    A reply includes the mark that ends a turn, and not the header before it.
    """
    text = render(messages)
    turns = [turn for turn, message in enumerate(messages) if message["role"] == "assistant" and turn >= first]
    replies = [_by_prefix(render, messages, turn, text) or _by_stand_in(render, messages, turn, text) for turn in turns]
    for turn, reply in zip(turns, replies, strict=True):
        if reply is None:
            raise _Unlearnable(
                f"the template renders message {turn + 1} (assistant) differently once others follow: it drops or "
                "changes earlier replies, most likely their reasoning, or shows tools only before the last question, "
                "so training would not see what was said; end the conversation there, leave that out, or use another "
                "template: data.chat_template=FILE"
            )
    return text, [reply for reply in replies if reply is not None]


def _by_prefix(render: Render, messages: Sequence[Message], turn: int, text: str) -> tuple[int, int] | None:
    """Find the reply as the text that it adds to the conversation before it."""
    try:
        before = render(messages[:turn], ask_for_reply=True)
        through = render(messages[: turn + 1]) if turn + 1 < len(messages) else text
    except _Unlearnable:  # some templates want a user's message in everything
        return None
    if not through.startswith(before) or not text.startswith(through):
        return None
    start, said = len(before), _text_of(messages[turn])
    if said in through[start:]:
        header = through[start : through.index(said, start)]
        if header.strip() and before == render(messages[:turn]):
            start += len(header)  # of a template that does not know how to ask for a reply
    return start, start + len(_without_blank_end(through[start:], said))


def _by_stand_in(render: Render, messages: Sequence[Message], turn: int, text: str) -> tuple[int, int] | None:
    """Find the reply at the place of a stand-in, if the template renders it unchanged.

    For templates that render the last reply differently from earlier ones.
    """
    changed = [*messages[:turn], {**messages[turn], "content": _STAND_IN}]
    try:
        whole = render([*changed, *messages[turn + 1 :]]).split(_STAND_IN)
        alone = render(changed).split(_STAND_IN)
    except _Unlearnable:
        return None
    if len(whole) != 2 or len(alone) != 2:
        return None
    (before, after), (_, end) = whole, alone
    end = end.rstrip() or end
    said = text[len(before) : len(text) - len(after)]
    same = said.strip() == _text_of(messages[turn])
    if not same or text != before + said + after or not after.startswith(end):
        return None
    return len(before), len(before) + len(said) + len(end)


def _text_of(message: Message) -> str:
    said = message["content"]
    return said.strip() if isinstance(said, str) else ""


def _without_blank_end(reply: str, said: str) -> str:
    """Return ``reply`` without the line end after the end-of-turn mark; without a mark, the line end is one."""
    stripped = reply.rstrip()
    return reply if not stripped or (said and stripped.endswith(said)) else stripped
