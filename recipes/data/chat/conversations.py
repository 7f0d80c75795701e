"""Tokenization of conversations. By default, only the assistant's messages are trained on.

A conversation is rendered by a Jinja template, as in ``transformers``, and tokenized as a whole. Replies are found
without markers in the template (``recipes.data.chat.reply_spans``).
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any, Literal

import numpy as np

from serried.configs.bucket_paths import local_path
from serried.configs.errors import UserError
from serried.configs.plain_data import NotPlainData, expanded, read_bytes
from serried.configs.schema.data import DataSection
from serried.recipes.data.chat.reply_spans import Render, Reply, Sample, content_in, find_samples
from serried.recipes.data.readers.columns import MOST_WEIGHT, without_nulls
from serried.recipes.data.readers.source import Row
from serried.recipes.data.tokenizers.chat_template import CURE, Message, Template, TooMuch, Unlearnable
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

_FORMAT = 4
"""Version of the code that renders conversations and finds replies."""

_ROLES = {
    "human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "chatgpt": "assistant",
    "bot": "assistant", "model": "assistant", "system": "system", "tool": "tool", "function_response": "tool",
    "observation": "tool",
}  # fmt: skip
"""Mapping from the role names of ShareGPT's format, {from, value}, to the usual roles."""

EARLIER_FORMATS = (3, 2)
"""Previous values of ``_FORMAT``, newest first. Their tokens are often the same."""

_ASSISTANTS = ("gpt", "chatgpt", "bot", "model", "human")
"""Role names of ShareGPT's format that some data has in {role, content}. They are renamed if no message is from the
assistant."""

_STAND_IN = "serried-reply-5d1f8a"
"""Placeholder for a reply, to find the text that the template writes before and after it."""

_WEIGHTS = ("weight", "train", "training")
"""Keys of messages that select whether to train on them. ``weight`` may also be another number."""


class ChatEncoder:
    """Encoder of rows that are lists of messages, {role, content} or {from, value}."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        template: str,
        name: str,
        *,
        for_tools: str | None = None,
        variables: Mapping[str, Any] = MappingProxyType({}),
        train_on: Literal["replies", "last", "all"] = "replies",
    ) -> None:
        """Compile the template. Raises ``UserError`` if it is not a Jinja template, or jinja2 is not installed.

        Args:
            name: name of the template, for messages.
            for_tools: template for conversations with tools, if it is a different one.
            variables: additional variables of the template.
            train_on: which tokens are trained on, see ``data.train_on``.
        """
        self._tokenizer, self._train_on = tokenizer, train_on
        tokens = _special_tokens(tokenizer.spec().get("files", {}))
        self._end = tokens.get("eos_token", "")
        self._template = Template(template, name, tokens, for_tools=for_tools, variables=variables)
        self._dtype = token_dtype(tokenizer.vocab_size)

    def spec(self, earlier: int | None = None) -> dict[str, Any]:
        """Return all settings that the tokens depend on, except rows and tokenizer, as plain JSON. ``earlier``: format
        of an earlier version to use instead of the current one."""
        spec: dict[str, Any] = {"format": earlier or _FORMAT, "template": self._template.text}
        if self._template.for_tools is not None and earlier is None:
            spec["for_tools"] = self._template.for_tools
        if self._template.variables:
            spec["variables"] = self._template.variables
        return spec if self._train_on == "replies" else {**spec, "train_on": self._train_on}

    def __call__(self, rows: Sequence[Row], unit: str) -> list[Encoded | UserError]:
        return encoded_rows(rows, unit, self._encode)

    def _encode(self, row: Row) -> Encoded:
        content: Any = row.content
        row_has = content if isinstance(content, dict) else {"messages": content}
        return self.conversation(
            row_has.get("messages"), tools=row_has.get("tools") or (), system=row_has.get("system"),
            weight=row_has.get("weight", 1.0),
        )  # fmt: skip

    def conversation(
        self,
        content: Any,
        where: str = "",
        first: int = 0,
        tools: Sequence[dict[str, Any]] = (),
        system: str | None = None,
        weight: float = 1.0,
    ) -> Encoded:
        """Return the tokens of a conversation, as several samples if the template drops or changes earlier turns.

        Args:
            content: messages of the conversation.
            where: position within the row, for messages.
            first: index of the first message that may be trained on.
            tools: tools that the assistant may call.
            system: system prompt, used if the messages have none.
            weight: weight of the row in the loss.

        Raises:
            UserError: the messages are invalid, or contain nothing to train on. The text is appended to the row's
                position.
        """
        messages = _messages(content, where)
        is_new = bool(system) and not any(message["role"] == "system" for message in messages)
        if is_new:
            messages = [{"role": "system", "content": system}, *messages]
        said = [turn for turn, message in enumerate(messages) if message["role"] == "assistant" and turn >= first]
        weights = {turn: weight * _weight(messages[turn], f"{where}, message {turn + 1}") for turn in said}
        turns = [turn for turn in said if weights[turn]]
        if self._train_on == "all" and any(weights[turn] != weight for turn in turns):
            raise UserError(
                f"{where}: a message has a weight other than 0 and 1, but data.train_on=all trains on all tokens; use "
                "data.train_on=replies, or a column weight for the row"
            )
        if self._train_on == "last":
            turns = [turn for turn in turns if turn == said[-1]]
        try:
            render = partial(self._template.render, tools=tools)
            messages, is_parsed = _with_parsed_arguments(render, messages)
            samples = self._samples(render, messages, said, turns)
            if tools and _rendered(self._template, messages) == samples[-1].text:
                raise Unlearnable(
                    f"{self._template.name} does not render the tools, so the model would not learn which tools exist; "
                    "use a template that renders them (data.chat_template=FILE), or remove the column 'tools'"
                )
            trains_all = [self._train_on == "all" and sample is samples[-1] for sample in samples]
            found = [
                document
                for sample, is_all in zip(samples, trains_all, strict=True)
                for document in self._encoded(sample, {-1: weight, **weights}, trains_all=is_all)
            ]
        except UnicodeEncodeError as error:
            raise UserError(
                f"{where} contains an unpaired surrogate (half a character); fix or remove the row"
            ) from error
        except TooMuch as error:
            raise TooMuch(f"{where}: {error}") from error
        except (UserError, Unlearnable) as error:
            raise UserError(f"{where}: {error}") from error
        found = [document for document in found if document.supervised is not None and document.supervised[1:].any()]
        if not found:
            roles = ", ".join(dict.fromkeys(message["role"] for message in messages)) or "none"
            why = f"no message is from the assistant (roles: {roles})"
            if said:
                of_weight = ", ".join(f"{key}: 0 or false" for key in _WEIGHTS)
                which = "the last reply is" if self._train_on == "last" else "all replies are"
                why = "the assistant's messages are empty" if turns else f"{which} excluded from training ({of_weight})"
            raise UserError(f"{where}: nothing to train on: {why}; fix or remove the row")
        is_new |= is_parsed or bool(tools and self._template.for_tools) or any(document.is_new for document in found)
        return found[-1]._replace(before=tuple(found[:-1]), is_new=is_new)

    def _samples(
        self, render: Render, messages: Sequence[Message], said: Sequence[int], turns: Sequence[int]
    ) -> list[Sample]:
        """Return the samples to train on, according to ``data.train_on``. ``said``: messages of the assistant;
        ``turns``: the subset that may be trained on."""
        name = self._template.name
        if self._train_on != "all":
            return find_samples(render, name, messages, turns, self._end)
        samples = find_samples(render, name, messages, said, self._end)
        if samples[-1].text != (text := render(messages)):
            samples.append(Sample(text, {}, len(messages), is_new=True))
        *earlier, whole = samples
        kept = [
            sample._replace(replies={turn: reply for turn, reply in sample.replies.items() if turn in turns})
            for sample in earlier
        ]
        left_out = {
            turn: whole.replies.get(turn) or content_in(render, name, messages, turn, whole.text)
            for turn in said
            if turn not in turns
        }
        return [*(sample for sample in kept if sample.replies), whole._replace(replies=left_out)]

    def _encoded(self, sample: Sample, weights: Mapping[int, float], *, trains_all: bool) -> Iterator[Encoded]:
        """Yield the tokens of a sample.

        If a prompt is tokenized differently on its own (as in generation) than within the full text, a separate sample
        for its reply comes first. ``weights``: weight of each reply; the key -1 has the weight of the row.
        ``trains_all``: train on all tokens except the replies of the sample. Raises ``UnicodeEncodeError`` if the text
        is not valid.
        """
        sample.text.encode()  # tokenizers fail in other ways on invalid text
        ids, spans = self._tokenizer.encode_marked(sample.text)
        inside = dict[int, Reply]()
        for turn, reply in {} if trains_all else sample.replies.items():
            if reply.is_asked and reply.start and not self._is_asked_so(sample.text, reply.start, ids, spans):
                text = sample.text[: reply.stop]
                if pieces := _in_pieces(self._tokenizer, text, reply.start):
                    inside[turn] = reply
                    alone = Sample(text, {turn: reply}, turn + 1, is_new=True)
                    yield self._supervised(alone, *pieces, weights, trains_all=False)
        replies = {turn: reply for turn, reply in sample.replies.items() if turn not in inside}
        yield self._supervised(sample._replace(replies=replies), ids, spans, weights, trains_all=trains_all)

    def _is_asked_so(self, text: str, asked: int, ids: np.ndarray, spans: np.ndarray) -> bool:
        """Return whether the prompt ``text[:asked]`` alone has the same tokens as in the full text."""
        count = int(np.searchsorted(spans[:, 1], asked, "right"))
        if count < len(ids) and spans[count, 0] < asked:
            return False
        marks = self._tokenizer.added_ids if isinstance(self._tokenizer, HuggingFaceTokenizer) else frozenset()
        # Text before a special token does not change the tokens after it.
        first = next((at for at in range(count - 1, -1, -1) if int(ids[at]) in marks), 0)
        alone, _ = self._tokenizer.encode_marked(text[int(spans[first, 0]) if first else 0 : asked])
        return np.array_equal(alone, ids[first:count])

    def _supervised(
        self, sample: Sample, ids: np.ndarray, spans: np.ndarray, weights: Mapping[int, float], *, trains_all: bool
    ) -> Encoded:
        """Return ``ids`` as a document that is trained on the replies, or with ``trains_all`` on all tokens except the
        replies."""
        supervised, of_tokens = np.full(len(ids), trains_all, np.uint8), np.full(len(ids), weights[-1], np.float32)
        begins, ends = spans.T
        for turn, reply in sample.replies.items():
            # A token may begin with the space before the reply: it is the first token that a model must generate.
            is_inside = (begins < reply.stop) & ((ends > reply.start) | (begins >= reply.start))
            supervised[is_inside], of_tokens[is_inside] = not trains_all, weights[turn]
        if not len(ids) or ids[-1] != self._tokenizer.end_id:  # a template may end with the end token
            # Train on the end token if the template does not end the last reply itself.
            last = sample.replies.get(sample.messages - 1)
            is_end = trains_all if last is None else not trains_all and not last.has_end and last.start < last.stop
            ids, supervised = np.append(ids, self._tokenizer.end_id), np.append(supervised, np.uint8(is_end))
            of_tokens = np.append(of_tokens, np.float32(weights[-1 if last is None else sample.messages - 1]))
        is_weighted = bool((of_tokens[supervised == 1] != 1).any())
        return Encoded(
            ids.astype(self._dtype), supervised, is_new=sample.is_new or is_weighted,
            weights=of_tokens if is_weighted else None,
        )  # fmt: skip


class CompletionEncoder:
    """Encoder of rows with a prompt and its completion, as plain text without a template."""

    def __init__(self, tokenizer: Tokenizer, train_on: str) -> None:
        self._tokenizer, self._train_on = tokenizer, train_on
        self._dtype = token_dtype(tokenizer.vocab_size)

    def spec(self, earlier: int | None = None) -> dict[str, Any]:
        """Return all settings that the tokens depend on, except rows and tokenizer, as plain JSON."""
        return {"format": earlier or _FORMAT, "template": None, "train_on": self._train_on}

    def __call__(self, rows: Sequence[Row], unit: str) -> list[Encoded | UserError]:
        return encoded_rows(rows, unit, self._encode)

    def _encode(self, row: Row) -> Encoded:
        content: Any = row.content
        if not isinstance(content, dict) or not {"prompt", "completion"} <= content.keys():
            raise UserError(
                " is a conversation, but data.chat_template=none needs a prompt and a completion; remove "
                "data.chat_template to use the template of the tokenizer"
            )
        prompt, completion = content["prompt"], content["completion"]
        if not completion:
            raise UserError(": the completion is empty, so there is nothing to train on; fix or remove the row")
        try:
            (prompt + completion).encode()
        except UnicodeEncodeError as error:
            raise UserError(" contains an unpaired surrogate (half a character); fix or remove the row") from error
        pieces = _in_pieces(self._tokenizer, prompt + completion, len(prompt))
        ids, spans = pieces or self._tokenizer.encode_marked(prompt + completion)
        supervised = (spans[:, 1] > len(prompt)).astype(np.uint8)
        start, end = np.array(self._tokenizer.start_ids, np.int64), np.array([self._tokenizer.end_id])
        starts = len(start) and ids[: len(start)].tolist() != start.tolist()  # the prompt may have them already
        ends = ids[-1] != self._tokenizer.end_id
        ids = np.concatenate((start if starts else start[:0], ids, end if ends else end[:0]))
        supervised = np.pad(supervised, (len(start) if starts else 0, 0))
        supervised = np.concatenate((supervised, np.ones(len(ids) - len(supervised), np.uint8)))
        if self._train_on == "all":
            supervised[:] = 1
        weight: Any = content.get("weight", 1.0)
        weights = None if weight == 1 else np.full(len(ids), weight, np.float32)
        return Encoded(ids.astype(self._dtype), supervised, is_new=weights is not None, weights=weights)


def _in_pieces(tokenizer: Tokenizer, text: str, at: int) -> tuple[np.ndarray, np.ndarray] | None:
    """Tokenize the prompt ``text[:at]`` and the rest of ``text`` separately. Return the ids of both together, and the
    range of characters of each id. None if the tokenizer would add a space between them."""
    (before, spans), (ids, following) = tokenizer.encode_marked(text[:at]), tokenizer.encode_marked(text[at:])
    both = np.concatenate((before, ids))
    if tokenizer.decode_marked(both.tolist()) != tokenizer.decode_marked(tokenizer.encode_marked(text)[0].tolist()):
        return None
    return both, np.concatenate((spans, following + at))


def chat_encoder(section: DataSection, tokenizer: Tokenizer) -> ChatEncoder:
    """Return the encoder of conversations."""
    return ChatEncoder(
        tokenizer, *chat_template(section, tokenizer), for_tools=_template_for_tools(section, tokenizer),
        variables=section.chat_template_kwargs, train_on=section.train_on,
    )  # fmt: skip


def encoder_of_rows(section: DataSection, tokenizer: Tokenizer) -> ChatEncoder | CompletionEncoder:
    """Return the encoder for ``data.format=chat``."""
    is_plain = section.chat_template == "none"
    return CompletionEncoder(tokenizer, section.train_on) if is_plain else chat_encoder(section, tokenizer)


def _template_for_tools(section: DataSection, tokenizer: Tokenizer) -> str | None:
    """Return the tokenizer's separate template for conversations with tools. None if it has none, or
    ``data.chat_template`` is set."""
    if section.chat_template is not None or not isinstance(tokenizer, HuggingFaceTokenizer):
        return None
    return tokenizer.chat_templates.get("tool_use")


def template_to_export(section: DataSection, tokenizer: Tokenizer) -> str:
    """Return the template that renders conversations in ``transformers`` as in training: with the values of
    ``data.chat_template_kwargs`` as defaults, and with the template for tools."""
    text, for_tools = chat_template(section, tokenizer)[0], _template_for_tools(section, tokenizer)
    if for_tools is not None:
        text = f"{{% if tools %}}{_enclosed(for_tools)}{{% else %}}{_enclosed(text)}{{% endif %}}"
    defaults = [
        f"{{%- if {name} is not defined %}}{{%- set {name} = {value!r} %}}{{%- endif %}}"
        for name, value in section.chat_template_kwargs.items()
    ]
    return "".join([*defaults, _enclosed(text)]) if defaults else text


def _enclosed(template: str) -> str:
    """Return ``template`` changed so that it renders the same between other tags as on its own: without its final line
    break, which Jinja drops, and with its other whitespace protected from the tags."""
    template = re.sub(r"(\r\n|\r|\n)\Z", "", template)
    begin = "\n" if template[:1].isspace() else ""  # dropped after a tag, and what follows begins a line
    end = "{{ '' }}" if template[-1:].isspace() else ""
    return f"{begin}{template}{end}"


def chat_template(section: DataSection, tokenizer: Tokenizer) -> tuple[str, str]:
    """Return the chat template and its name for messages: ``data.chat_template``, else the tokenizer's, else ChatML.
    Raises ``UserError`` if ``data.chat_template`` is neither a template nor a file with one."""
    given = section.chat_template
    if given is not None and "{" in given:
        return given, "data.chat_template"
    if given is not None:
        try:
            return read_bytes(expanded(local_path(given, "data.chat_template"))).decode(
                "utf-8"
            ), f"data.chat_template={given}"
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
            reason = str(error) if isinstance(error, NotPlainData) else reason
            raise UserError(
                f"cannot read data.chat_template={given}: {reason}; use a file with a Jinja template, the text of a "
                "template, or data.chat_template=null for the template of the tokenizer"
            ) from error
    own = tokenizer.chat_template if isinstance(tokenizer, HuggingFaceTokenizer) else None
    return (CHATML, "ChatML") if own is None else (own, "the tokenizer's template")


def ask(
    template_text: str,
    tokenizer: Tokenizer,
    said: Sequence[str],
    variables: Mapping[str, Any] = MappingProxyType({}),
) -> tuple[list[int], list[int]]:
    """Return the token ids of the prompt for a reply to the messages ``said``, which alternate between user and
    assistant, and the ids that end a reply. ``variables``: additional variables of the template. Raises ``UserError``
    if the template refuses the messages."""
    tokens = _special_tokens(tokenizer.spec().get("files", {}))
    template = Template(template_text, "the chat template", tokens, variables=variables)
    messages = [{"role": ("user", "assistant")[number % 2], "content": text} for number, text in enumerate(said)]
    try:
        asked = template.render(messages, ask_for_reply=True)
        before, _, after = template.render([*messages, {"role": "assistant", "content": _STAND_IN}]).partition(
            _STAND_IN
        )
        is_asked = asked != template.render(messages)
    except Unlearnable as error:
        reason = str(error).removesuffix(f"; {CURE}")  # a prompt has no row to fix
        raise UserError(f"{reason}; train with another template: data.chat_template=FILE") from error
    end_of_turn, _ = tokenizer.encode_marked(after.rstrip() or after)
    ids, spans = tokenizer.encode_marked(asked)
    if not is_asked and before.startswith(asked) and before[len(asked) :].strip():
        # A template without a generation prompt: use the text that it writes before a reply, as in training.
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
    messages = [_message(message, f"{where}, message {number}") for number, message in enumerate(content, 1)]
    roles = {message["role"] for message in messages}
    if "assistant" in roles or not roles & {*_ASSISTANTS}:
        return messages
    return [{**message, "role": _ROLES.get(message["role"], message["role"])} for message in messages]


def _with_parsed_arguments(render: Render, messages: list[Message]) -> tuple[list[Message], bool]:
    """Return the messages, and whether they were changed. Arguments of tool calls that are JSON text, as in OpenAI's
    format, are parsed if the template would otherwise quote them as a string or fail."""
    calls = [call for message in messages for call in message.get("tool_calls") or [] if isinstance(call, dict)]
    functions = [call.get("function", call) for call in calls]
    texts = [it["arguments"] for it in functions if isinstance(it, dict) and isinstance(it.get("arguments"), str)]
    if not texts:
        return messages, False
    try:
        text = render(messages)
        if not any(json.dumps(arguments, ensure_ascii=False) in text for arguments in texts):
            return messages, False
    except Unlearnable:
        pass

    def parsed(value: Any) -> Any:
        try:
            found = json.loads(value) if isinstance(value, str) else value
        except (ValueError, RecursionError):
            return value
        return found if isinstance(found, dict) else value

    def with_parsed(call: Any) -> Any:
        if not isinstance(call, dict):
            return call
        if isinstance(call.get("function"), dict):
            return {**call, "function": with_parsed(call["function"])}
        return {**call, "arguments": parsed(call["arguments"])} if "arguments" in call else call

    return [
        {**message, "tool_calls": [with_parsed(call) for call in message["tool_calls"]]}
        if message.get("tool_calls")
        else message
        for message in messages
    ], True


def _message(message: Message, where: str) -> Message:
    message = {key: value for key, value in message.items() if value is not None}  # tables contain null for absent keys
    if "role" not in message and "from" in message:
        if message["from"] not in _ROLES:
            known = ", ".join(_ROLES)
            raise UserError(f"{where} has the unknown role {message['from']!r}; use one of {known}")
        kept = {key: value for key, value in message.items() if key not in ("from", "value")}
        message = {**kept, "role": _ROLES[message["from"]], "content": message.get("value")}
    if not isinstance(message.get("role"), str):
        has = ", ".join(message) or "nothing"
        raise UserError(
            f"{where} has no role (its keys: {has}); write messages as {{role, content}} or {{from, value}}"
        )
    said = message.get("content")
    if message.get("tool_calls"):
        message = {**message, "content": said, "tool_calls": without_nulls(message["tool_calls"])}
        if said is None:
            return message
    if isinstance(said, list):  # content in parts, for example with images
        texts: list[Any] = [part.get("text") if isinstance(part, dict) else part for part in said]
        other = next((part for part, text in zip(said, texts, strict=True) if not isinstance(text, str)), None)
        if other is not None:
            kind = other.get("type", "text") if isinstance(other, dict) else "text"
            part = "a part without text" if kind == "text" else f"a part of type {kind!r}"
            raise UserError(
                f"{where} ({message['role']}) has {part} in its content, but only text is supported; fix or remove the "
                "row"
            )
        return {**message, "content": "".join(texts)}
    if not isinstance(said, str):
        raise UserError(f"{where} ({message['role']}) has {said!r} as its content, not text; fix or remove the row")
    return message


def _rendered(template: Template, messages: Sequence[Message]) -> str | None:
    """Return the text of a conversation without tools; None if the template requires tools."""
    try:
        return template.render(messages)
    except Unlearnable:
        return None


def _weight(message: Message, where: str) -> float:
    """Return the loss weight of an assistant message; 0 if it is not trained on. Raises ``UserError`` if its keys have
    invalid values."""
    given = {key: message[key] for key in _WEIGHTS if key in message}
    for key, value in given.items():
        is_number = key == "weight" and isinstance(value, int | float) and 0 <= value <= MOST_WEIGHT
        if not is_number and not (isinstance(value, int | float) and value in (0, 1)):
            between = ", or a number between them as its weight" if key == "weight" else ""
            raise UserError(
                f"{where} (assistant) has {key}: {value!r}; use 1 or true to train on the message, 0 or false to "
                f"exclude it{between}"
            )
    return float(given.get("weight", 1)) * all(given.values())
