"""Samples of a rendered conversation, the positions of replies in them, and checks that nothing to train on is missing.

A reply is the text that a model must generate after the template's generation prompt. It begins where that prompt ends,
and ends with the end-of-turn token. Templates therefore need no markers around replies, which few templates have. Most
templates only append messages. The full conversation is then one sample, in which replies are found without rendering
it again for each of them. Other templates drop or change earlier turns, such as the reasoning in Qwen 3 or the end
token in gpt-oss, so the full text no longer contains a reply as it must be generated. Such a reply gets a sample of its
own, which ends with the reply.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from serried.configs.formats import printable
from serried.recipes.data.tokenizers.chat_template import Message, Unlearnable

Render = Callable[..., str]
"""``Template.render``, with the tools of the conversation already bound."""

_CALLS = ("tool_calls", "function_call")
"""Keys of messages that a template must show, besides their content."""
_REASONING = ("reasoning_content", "reasoning", "thinking")
"""Keys with the reasoning of the assistant's messages, in different templates."""

_SHOWN_CHARACTERS = 40

_TAGS = re.compile(r"</?\w+>")
_REASONING_TAGS = "think|thinking|thought|reasoning"
_REASONING_TAG = re.compile(rf"</?({_REASONING_TAGS})>")
_EMPTY_BLOCK = re.compile(rf"\s*<({_REASONING_TAGS})>\s*</\1>\s*")
_OPEN_BLOCK = re.compile(rf"<({_REASONING_TAGS})>\s*\Z")


class Reply(NamedTuple):
    """Start and stop of a reply in the text, in characters. The reply includes the end-of-turn token, but neither the
    header nor an empty reasoning block that the template writes before it."""

    start: int
    stop: int
    has_end: bool
    """Whether the template writes more than whitespace after its content, such as an end-of-turn token."""
    is_asked: bool
    """Whether the text before the reply is the prompt in generation. False if the template has no generation prompt."""


class Sample(NamedTuple):
    """A rendered conversation, or the beginning of one."""

    text: str
    replies: Mapping[int, Reply]
    """Replies to train on, by the number of their message."""
    messages: int
    """Number of messages in the text."""
    is_new: bool
    """Whether earlier versions of this library trained on other tokens."""


_DIGITS = "591827364546"


def stand_in(number: int) -> str:
    """Return a placeholder for the content of message ``number``: only digits, which no template changes."""
    return f"{_DIGITS}{number:07}5463728195"


def find_samples(
    render: Render, name: str, messages: Sequence[Message], turns: Sequence[int], end_of_text: str = ""
) -> list[Sample]:
    """Return the samples of a conversation that together train on each of the replies ``turns`` once.

    Args:
        name: name of the template, for messages.
        end_of_text: text of the end-of-text token, which some templates write after all turns.

    Raises:
        Unlearnable: the template leaves out a message, or a part of one that must be trained on.
    """
    try:
        text = render(messages)
    except Unlearnable:  # some templates fail on tool calls that they do not support
        for number in range(len(messages)):
            _check_calls(render, name, messages, number, "")
        raise
    places = _places(messages, text, _check_shown(render, name, messages, text))
    found, is_new = dict[int, Reply](), False
    alone, alike = dict[int, _Alone](), dict[str, _Alike]()
    for number in range(len(messages)):
        if number not in turns:
            _check_calls(render, name, messages, number, "")
    for turn in turns:
        place = places.get(turn)
        # Some templates strip whitespace only in some places.
        is_plain = messages[turn]["content"] == _text_of(messages[turn])
        is_plain &= not any(messages[turn].get(key) for key in (*_CALLS, *_REASONING))
        is_last = turn + 1 == len(messages)  # the last message may end differently
        # Reasoning before the reply may be in its prompt, and no longer in the full text.
        is_asked_alike = not any(map(_has_reasoning, messages[:turn])) and all(t in found for t in turns if t < turn)
        reply = _as_others(place, alike, text) if place and is_plain and is_asked_alike and not is_last else None
        if reply is None:
            alone[turn] = _alone(render, name, messages, turn, text, end_of_text)
            is_new |= alone[turn].is_new
            reply = alone[turn].within(text)
            if place and is_plain and reply and reply.start <= place.start and place.stop <= reply.stop:
                end = text[place.stop : reply.stop]
                alike[place.header] = _Alike(place.start - reply.start, end, reply.has_end, reply.is_asked)
        if reply is not None:
            found[turn] = reply
    samples = [Sample(text, found, len(messages), is_new)] if found or not turns else []
    left = [turn for turn in turns if turn not in found]
    while left:
        last = alone[left[-1]]
        replies = {turn: reply for turn in left if (reply := alone[turn].within(last.text))}
        samples.insert(0, Sample(last.text, replies, left[-1] + 1, is_new=True))
        left = [turn for turn in left if turn not in replies]
    return samples


def content_in(render: Render, name: str, messages: Sequence[Message], turn: int, text: str) -> Reply:
    """Return the position of the content of message ``turn`` in ``text``, the rendered conversation. Raises
    ``Unlearnable`` if it is not found."""
    marked = _with_stand_in(render, messages, turn)
    if marked is None or not (text.startswith(marked[0]) and text.endswith(marked[1])):
        raise Unlearnable(
            f"{name} changes message {turn + 1} (assistant), so the message cannot be excluded from training with "
            "data.train_on=all; use data.train_on=replies, or remove the message"
        )
    return Reply(len(marked[0]), len(text) - len(marked[1]), has_end=True, is_asked=False)


_REMEDY = "shorten the conversation, or use another template: data.chat_template=FILE"


# finding --------------------------------------------------------------------------------------------------------------


class _Alone(NamedTuple):
    """A reply in the conversation up to and including this reply."""

    text: str
    prompt: int
    """End of the prompt from which the model generates the reply."""
    start: int
    """Start of the reply. The template may write an empty reasoning block between the prompt and this position."""
    rest: int
    """Start of the reply after any empty reasoning block, whether from the template or from the message."""
    stop: int
    has_end: bool
    is_asked: bool
    """Whether the prompt is the template's generation prompt."""
    is_new: bool

    def within(self, text: str) -> Reply | None:
        """Return the position of the reply in ``text``, which has more messages. None if the prompt or the reply
        differs there by more than an empty reasoning block."""
        if not text.startswith(self.text[: self.prompt]):
            return None
        said, start = self.text[self.start : self.stop], self.start
        if not text.startswith(self.text[self.prompt : self.stop], self.prompt):
            said, start = self.text[self.rest : self.stop], self.prompt
            if not text.startswith(said, start):
                return None
        return Reply(start, start + len(said), self.has_end, self.is_asked)


def _alone(render: Render, name: str, messages: Sequence[Message], turn: int, text: str, end_of_text: str) -> _Alone:
    """Return the reply ``turn`` in the conversation up to and including it. ``text``: the full rendered conversation.
    Raises ``Unlearnable`` if the reply is not found, or not shown completely."""
    said, before = messages[: turn + 1], messages[:turn]
    shown = text if turn + 1 == len(messages) else _tried(render, said)
    asked = _tried(render, before, ask_for_reply=True)
    marked = _with_stand_in(render, said, turn)
    header = marked[0] if marked and shown is not None and shown.startswith(marked[0]) else None
    found: tuple[str, int] | None = None
    is_asked, is_new = True, False
    if shown is not None and asked is not None and shown.startswith(asked):
        found = shown, len(asked)
        if header is not None and (between := header[len(asked) :]).strip() and header.startswith(asked):
            if asked == _tried(render, before):
                # A template without a generation prompt: its header before a reply is not generated by the model.
                # The header may be only a space.
                found, is_asked = (shown, len(header)), False
            elif _EMPTY_BLOCK.fullmatch(between) and not _has_block(messages[turn]):
                found, is_new = (shown, len(asked)), True
    elif shown is not None and asked is not None and (opened := _OPEN_BLOCK.search(asked)):
        spliced = _spliced(asked, opened, shown, messages[turn])
        found, is_new = (None if spliced is None else (spliced, len(asked))), True
    elif shown is not None and asked is not None and header is not None:
        behind = _behind(asked, _tried(render, before), header)
        found, is_new = (None if behind is None else (asked + shown[behind:], len(asked))), True
    if found is None and shown is not None and header is not None:
        found = shown, len(header)
        is_asked = is_new = False
    if found is None:
        raise Unlearnable(
            f"{name} renders message {turn + 1} (assistant) differently when more messages follow, so its original "
            f"text would not be trained on; {_REMEDY}"
        )
    shown, prompt = found
    start = prompt
    if is_new and header is not None and shown.startswith(header) and len(header) > prompt:
        start = len(header)
    elif is_asked and not _text_of(messages[turn]) and (empty := _EMPTY_BLOCK.match(shown, prompt)):
        start, is_new = empty.end(), True
    end = marked
    if any(messages[turn].get(key) for key in _CALLS):
        end = _with_stand_in(render, said, turn, silent=True) or marked
    after = end[1] if end else shown[prompt:].rstrip().removesuffix(_text_of(messages[turn]))
    has_end = bool(after.strip())
    stop = prompt + len(shown[prompt:].rstrip()) if has_end else len(shown)
    own_end = after.rstrip().removesuffix(end_of_text).strip()
    if own_end not in ("", after.strip()):  # generation stops at the end-of-turn token, before the end-of-text token
        stop, is_new = prompt + len(shown[prompt:stop].removesuffix(end_of_text).rstrip()), True
    start = min(start, stop)
    own_block = _EMPTY_BLOCK.match(shown, prompt, stop) if _has_block(messages[turn]) else None
    rest = own_block.end() if own_block else start
    for check in (_check_parts, _check_keys, _check_calls):
        check(render, name, said, turn, shown[start:stop])
    return _Alone(shown, prompt, start, rest, stop, has_end, is_asked, is_new)


def _has_reasoning(message: Message) -> bool:
    return any(message.get(key) for key in _REASONING) or _REASONING_TAG.search(_text_of(message)) is not None


def _has_block(message: Message) -> bool:
    """Return whether the content of a message begins with an empty reasoning block."""
    return isinstance(message["content"], str) and bool(_EMPTY_BLOCK.match(message["content"]))


def _spliced(asked: str, opened: re.Match[str], shown: str, message: Message) -> str | None:
    """Return the prompt ``asked``, which opens a reasoning block, followed by the rest of that block and the reply.

    Needed for templates that drop the reasoning of replies (DeepSeek R1), or only empty reasoning. None if the template
    renders the conversation in another way.

    Args:
        opened: match of the opening tag of the block in ``asked``.
        shown: rendered conversation up to and including ``message``.
    """
    if not shown.startswith(asked[: opened.start()]):
        return None
    closing = f"</{opened[1]}>"
    rest = shown[opened.start() :].removeprefix(f"<{opened[1]}>")
    content = message["content"] if isinstance(message["content"], str) else ""
    thought = next((str(message[key]) for key in _REASONING if message.get(key)), "")
    if not thought and closing in content:
        thought = content.partition(closing)[0].lstrip().removeprefix(f"<{opened[1]}>")
    thought = thought.strip("\n")
    head, found, tail = rest.partition(closing)
    if found and (not thought or thought.strip() in head):
        return asked + rest.lstrip("\n")  # a block of the reply, with other whitespace than in the prompt
    if found and not head.strip():
        return asked + f"{thought}{closing}{tail}"
    return None if found else asked + f"{thought}\n{closing}\n\n" + rest.lstrip("\n")


def _behind(asked: str, before: str | None, header: str) -> int | None:
    """Return the position in ``header`` right after the end of the prompt. None if it is not found.

    Needed for templates that change an earlier part of the prompt once the reply follows, such as the reasoning before
    a tool call in gpt-oss.

    Args:
        asked: rendered prompt, including the generation prompt.
        before: the same conversation rendered without a generation prompt.
        header: rendered text before the content of the reply.
    """
    if before is None or not asked.startswith(before) or asked == before:
        return None
    fewest, most = len(asked) - len(before), len(asked)  # binary search for the longest suffix of the prompt
    while fewest < most:
        size = (fewest + most + 1) // 2
        fewest, most = (size, most) if asked[-size:] in header else (fewest, size - 1)
    if fewest == len(asked) - len(before):
        return None
    return header.rfind(asked[-fewest:]) + fewest


def _with_stand_in(
    render: Render, messages: Sequence[Message], turn: int, *, silent: bool = False
) -> tuple[str, str] | None:
    """Render a placeholder as the content of reply ``turn``, and return the text before and after it. None if the text
    does not contain the placeholder exactly once. ``silent``: leave out the tool calls of the reply."""
    changed = {key: value for key, value in messages[turn].items() if not (silent and key in _CALLS)}
    changed["content"] = stand_in(turn)
    text = _tried(render, [*messages[:turn], changed, *messages[turn + 1 :]])
    parts = text.split(stand_in(turn)) if text is not None else []
    return (parts[0], parts[1]) if len(parts) == 2 else None


def _tried(render: Render, messages: Sequence[Message], **options: Any) -> str | None:
    """Return the text of ``messages``. None if the template refuses them, as some do if there is no user message."""
    try:
        return render(messages, **options)
    except Unlearnable:
        return None


def _text_of(message: Message) -> str:
    said = message["content"]
    return said.strip() if isinstance(said, str) else ""


class _Place(NamedTuple):
    """Position of a message's content in the text, unchanged or without surrounding whitespace."""

    start: int
    stop: int
    header: str
    """Text that the template writes between the previous content and this one."""


def _places(messages: Sequence[Message], text: str, shown: str) -> dict[int, _Place]:
    """Return the positions of contents in ``text`` by message number. ``shown``: the text with placeholders for the
    contents. Empty if the template does more than insert the contents."""
    places, position = dict[int, _Place](), 0
    for number, message in enumerate(messages):
        if not _text_of(message):
            continue
        header, found, shown = shown.partition(stand_in(number))
        if not found or not text.startswith(header, position):
            return {}
        position += len(header)
        following = shown.partition(_DIGITS)[0]
        variants = (message["content"], message["content"].lstrip(), message["content"].rstrip(), _text_of(message))
        said = next((variant for variant in variants if text.startswith(variant + following, position)), None)
        if said is None:
            return {}
        places[number] = _Place(position, position + len(said), header)
        position += len(said)
    return places if text[position:] == shown else {}


class _Alike(NamedTuple):
    """Offsets of a reply relative to the content of its message."""

    lead: int
    end: str
    has_end: bool
    is_asked: bool


def _as_others(place: _Place, alike: Mapping[str, _Alike], text: str) -> Reply | None:
    """Return the reply at ``place`` by analogy with another reply that has the same header. Long conversations are thus
    not rendered once per reply. None if there is no such reply, or it ends differently."""
    found = alike.get(place.header)
    if found is None or not text.startswith(found.end, place.stop):
        return None
    return Reply(place.start - found.lead, place.stop + len(found.end), found.has_end, found.is_asked)


# omissions of a template ----------------------------------------------------------------------------------------------


def _check_shown(render: Render, name: str, messages: Sequence[Message], text: str) -> str:
    """Return the text with placeholders for the contents. Raises ``Unlearnable`` if the template leaves out a
    message, for example because its role is unknown."""
    said = [number for number, message in enumerate(messages) if _text_of(message)]
    changed = [dict(message) for message in messages]
    for number in said:
        changed[number]["content"] = stand_in(number)
    shown = _tried(render, changed) or ""
    for number in said:
        if stand_in(number) in shown:
            continue
        one = _tried(render, [*messages[:number], changed[number], *messages[number + 1 :]])
        if one == text:
            role = messages[number]["role"]
            fix = "use the role 'system'" if role == "developer" else "remove the message"
            raise Unlearnable(
                f"{name} does not render the content of message {number + 1} ({role}), so it would not be trained on; "
                f"{fix}, or use a template that renders it: data.chat_template=FILE"
            )
    return shown


def _check_parts(render: Render, name: str, messages: Sequence[Message], turn: int, said: str) -> None:
    """Raise ``Unlearnable`` if the template leaves out a part of a reply, such as its reasoning. ``said``: the rendered
    reply."""
    content = messages[turn]["content"]
    if not isinstance(content, str) or content.strip() in said:
        return
    for part in filter(None, map(str.strip, _TAGS.split(content))):
        if part not in said:
            changed = {**messages[turn], "content": content.replace(part, stand_in(turn), 1)}
            text = _tried(render, [*messages[:turn], changed, *messages[turn + 1 :]])
            if text is not None and stand_in(turn) not in text:
                raise Unlearnable(
                    f"{name} does not render a part of message {turn + 1} (assistant), most likely its reasoning "
                    f"({_shown(part)}), so it would not be trained on; remove this part, {_REMEDY}"
                )


def _check_keys(render: Render, name: str, messages: Sequence[Message], turn: int, said: str) -> None:
    """Raise ``Unlearnable`` if the template leaves out the reasoning of message ``turn``, unless it is in ``said``."""
    for key in _REASONING:
        value = messages[turn].get(key)
        if not value or (isinstance(value, str) and value.strip() in said):
            continue
        silent = {other: its for other, its in messages[turn].items() if other != key}
        if _is_same(render, messages, turn, silent):
            raise Unlearnable(
                f"{name} does not render the {key} of message {turn + 1} (assistant); remove the {key}, {_REMEDY}"
            )


def _check_calls(render: Render, name: str, messages: Sequence[Message], number: int, said: str) -> None:
    """Raise ``Unlearnable`` if the template leaves out a call of message ``number``, unless it is in ``said``."""
    message = messages[number]
    for key in _CALLS:
        calls = message.get(key)
        beside = said.replace(_text_of(message), "", 1)
        if not calls or (isinstance(calls, list) and len(calls) == 1 and _is_shown(calls[0], beside)):
            continue
        less = [{other: value for other, value in message.items() if other != key}]
        if isinstance(calls, list) and len(calls) > 1:
            less += [{**message, key: [*calls[:place], *calls[place + 1 :]]} for place in range(len(calls))]
        if any(_is_same(render, messages, number, silent) for silent in less):
            role = message["role"]
            raise Unlearnable(
                f"{name} does not render the {key} of message {number + 1} ({role}); use a template that does: "
                "data.chat_template=FILE"
            )


def _is_shown(call: Any, said: str) -> bool:
    """Return whether every text of a tool call is in ``said``."""
    function = call.get("function", call) if isinstance(call, dict) else call
    return bool(said) and all(leaf in said for leaf in _leaves(function))


def _leaves(value: Any) -> Iterator[str]:
    if isinstance(value, dict | list):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from _leaves(inner)
    else:
        yield value if isinstance(value, str) else json.dumps(value)


def _is_same(render: Render, messages: Sequence[Message], number: int, silent: Message) -> bool:
    """Return whether the text is the same with the message ``silent`` in place of message ``number``."""
    text = _tried(render, messages)
    if text is None:  # some templates fail on a message without content
        messages = [{**message, "content": message["content"] or ""} for message in messages]
        text, silent = _tried(render, messages), {**silent, "content": silent["content"] or ""}
    return text is not None and text == _tried(render, [*messages[:number], silent, *messages[number + 1 :]])


def _shown(part: str) -> str:
    line = " ".join(part.split())
    return repr(printable(line if len(line) <= _SHOWN_CHARACTERS else f"{line[: _SHOWN_CHARACTERS - 1]}…"))
