"""Conversations as tokens. Only the assistant's messages are trained on.

A conversation is rendered by a Jinja template, as in ``transformers``, and tokenized as a whole. Replies are found
without marks in the template (``recipes.data.chat.reply_spans``).
"""

import json
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np

from serried.configs.errors import UserError
from serried.configs.plain_data import NotPlainData, expanded, read_bytes
from serried.configs.schema.data import DataSection
from serried.recipes.data.chat.reply_spans import find_replies
from serried.recipes.data.readers.json_parquet_rows import without_nulls
from serried.recipes.data.readers.source import Row
from serried.recipes.data.tokenizers.chat_template import Message, Template, TooMuch, Unlearnable
from serried.recipes.data.tokenizers.encode_rows import Encoded, encoded_rows
from serried.recipes.data.tokenizers.hugging_face_tokenizer import HuggingFaceTokenizer
from serried.recipes.data.tokenizers.tokenizer import Tokenizer, token_dtype

CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
"""Default template for tokenizers without one."""

_FORMAT = 3
"""Version of rendering and of finding replies, which the template does not determine."""

_ROLES = {
    "human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "chatgpt": "assistant",
    "bot": "assistant", "system": "system", "tool": "tool", "function_response": "tool", "observation": "tool",
}  # fmt: skip
"""Roles of conversations in ShareGPT's format, {from, value}, by their names there."""

EARLIER_FORMAT = 2
"""Previous version, whose tokens are often equal."""

_STAND_IN = "serried-reply-5d1f8a"
"""Placeholder for a reply, to find the template's text before and after it."""

_WEIGHTS = ("weight", "train", "training")
"""Keys of messages that select whether to train on them."""


class ChatEncoder:
    """Encoder of rows that are lists of messages, {role, content} or {from, value}."""

    def __init__(self, tokenizer: Tokenizer, template: str, name: str) -> None:
        """``name``: name of the template in messages. Raises ``UserError`` if it is not a Jinja template, or jinja2
        is not installed."""
        self._tokenizer = tokenizer
        self._template = Template(template, name, _special_tokens(tokenizer.spec().get("files", {})))
        self._dtype = token_dtype(tokenizer.vocab_size)

    def spec(self) -> dict[str, Any]:
        """Return everything the tokens depend on besides rows and tokenizer, as plain JSON."""
        return {"format": _FORMAT, "template": self._template.text}

    def __call__(self, rows: Sequence[Row], unit: str) -> list[Encoded | UserError]:
        return encoded_rows(rows, unit, self._encode)

    def _encode(self, row: Row) -> Encoded:
        content: Any = row.content
        messages, tools = content, ()
        if isinstance(content, dict):
            messages, tools = content.get("messages"), content.get("tools") or ()
        return self.conversation(messages, tools=tools)

    def conversation(
        self, content: Any, where: str = "", first: int = 0, tools: Sequence[dict[str, Any]] = ()
    ) -> Encoded:
        """Return the tokens of the messages ``content``, with the ``tools`` they may call.

        Only replies from message ``first`` on are trained on. Raises ``UserError`` if the messages are invalid, or
        contain nothing to train on. Its text continues the description of the row's place; ``where`` is the position
        within the row.
        """
        messages = _messages(content, where)
        said = [turn for turn, message in enumerate(messages) if message["role"] == "assistant" and turn >= first]
        turns = [turn for turn in said if _is_trained(messages[turn], f"{where}, message {turn + 1}")]
        name = self._template.name
        try:
            text, replies = find_replies(partial(self._template.render, tools=tools), name, messages, turns)
            if tools and _rendered(self._template, messages) == text:
                raise Unlearnable(
                    f"{name} shows no tools, so training would not see which may be called; use a template that does, "
                    "data.chat_template=FILE, or remove the column 'tools'"
                )
            text.encode()  # tokenizers fail in other ways on invalid text
            ids, spans = self._tokenizer.encode_marked(text)
        except UnicodeEncodeError as error:
            raise UserError(f"{where} holds half a character (an unpaired surrogate); fix or remove the row") from error
        except TooMuch as error:
            raise TooMuch(f"{where}: {error}") from error
        except (UserError, Unlearnable) as error:
            raise UserError(f"{where}: {error}") from error
        supervised = np.zeros(len(ids), np.uint8)
        begins, ends = spans.T
        for reply in replies:
            # A token may begin with the space before the reply: it is the first token that a model must write.
            supervised[(begins < reply.stop) & ((ends > reply.start) | (begins >= reply.start))] = 1
        if not supervised[1:].any():  # the first token is never a target
            roles = ", ".join(dict.fromkeys(message["role"] for message in messages)) or "none"
            why = f"no message is from the assistant (roles: {roles})"
            if said:
                of_weight = ", ".join(f"{key}: 0 or false" for key in _WEIGHTS)
                why = "the assistant's messages are empty" if turns else f"none is to be trained on ({of_weight})"
            raise UserError(f"{where}: it has nothing to train on: {why}; fix or remove the row")
        if ids[-1] != self._tokenizer.end_id:  # a template may end with the end mark
            # End mark of a last reply that the template does not end.
            is_end = bool(replies) and turns[-1] == len(messages) - 1 and not replies[-1].has_end
            ids, supervised = np.append(ids, self._tokenizer.end_id), np.append(supervised, np.uint8(is_end))
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


def ask(template_text: str, tokenizer: Tokenizer, said: Sequence[str]) -> tuple[list[int], list[int]]:
    """Return the token ids that ask for a reply to the messages ``said``, alternately of the user and the assistant,
    and the ids with which a reply ends. Raises ``UserError`` if the template refuses the messages."""
    template = Template(template_text, "the chat template", _special_tokens(tokenizer.spec().get("files", {})))
    messages = [{"role": ("user", "assistant")[number % 2], "content": text} for number, text in enumerate(said)]
    try:
        asked = template.render(messages, ask_for_reply=True)
        before, _, after = template.render([*messages, {"role": "assistant", "content": _STAND_IN}]).partition(
            _STAND_IN
        )
        is_asked = asked != template.render(messages)
    except Unlearnable as error:
        raise UserError(f"prompt: {error}") from error
    end_of_turn, _ = tokenizer.encode_marked(after.rstrip() or after)
    ids, spans = tokenizer.encode_marked(asked)
    if not is_asked and before.startswith(asked) and before[len(asked) :].strip():
        # A template without a generation prompt: use its text before a reply, as seen in training.
        ids, spans = tokenizer.encode_marked(before + _STAND_IN)
        ids = ids[spans[:, 1] <= len(before)]
    return ids.tolist(), end_of_turn.tolist()


def _special_tokens(files: dict[str, str]) -> dict[str, str]:
    """Return the special tokens of a Hugging Face tokenizer by name, such as ``bos_token``."""
    tokens: dict[str, str] = {}
    for file in ("special_tokens_map.json", "tokenizer_config.json"):
        for name, value in json.loads(files.get(file, "{}")).items():
            text = value.get("content") if isinstance(value, dict) else value
            if name.endswith("_token") and isinstance(text, str):
                tokens[name] = text
    return tokens


def _messages(content: Any, where: str) -> list[Message]:
    """Return the messages in OpenAI's format, {role, content}. Raises ``UserError`` if ``content`` is not a
    conversation."""
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
            raise UserError(f"{where} is from {message['from']!r}, not one of {known}; use these roles")
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
    if isinstance(said, list):  # parts, for example of messages with images
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
    """Return the text of a conversation without tools; None if the template requires some."""
    try:
        return template.render(messages)
    except Unlearnable:
        return None


def _is_trained(message: Message, where: str) -> bool:
    """Return whether a message of the assistant is trained on. Raises ``UserError`` if its keys have invalid values."""
    given = {key: message[key] for key in _WEIGHTS if key in message}
    for key, value in given.items():
        if not isinstance(value, int | float) or value not in (0, 1):
            raise UserError(
                f"{where} (assistant) has {key}: {value!r}, and a message is trained on (1, true) or not (0, false); "
                "fix or remove the row"
            )
    return all(given.values())
