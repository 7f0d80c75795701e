"""Positions of replies in a rendered conversation, and a check that the template shows everything to train on.

A reply is the text that a model must write. It begins where the template's generation prompt ends, and ends with the
mark that ends the turn. So templates need no marks of replies, which hardly any has. Some templates render a reply
differently once others follow, such as Qwen 3's with tool calls. Then the position of a placeholder for the reply in
the whole conversation shows where it ends.
"""

import re
from collections.abc import Callable, Sequence
from itertools import takewhile
from typing import Any, NamedTuple

from serried.configs.formats import printable
from serried.recipes.data.tokenizers.chat_template import Message, Unlearnable

Render = Callable[..., str]
"""``Template.render`` with its tools."""

_CALLS = ("tool_calls", "function_call")
"""Keys of messages that a template must show, besides their content."""
_REASONING = ("reasoning_content", "reasoning", "thinking")
"""Keys with the reasoning of the assistant's messages, in different templates."""

_SHOWN_CHARACTERS = 40

_TAGS = re.compile(r"</?\w+>")


class Reply(NamedTuple):
    """Start and stop of a reply in the text, in characters. It includes the mark that ends the turn, but not the
    header."""

    start: int
    stop: int
    has_end: bool
    """Whether the template ends it with more than whitespace."""


_DIGITS = "591827364546"


def stand_in(number: int) -> str:
    """Return a placeholder for the content of message ``number``: only digits, which no template changes."""
    return f"{_DIGITS}{number:07}5463728195"


def find_replies(
    render: Render, name: str, messages: Sequence[Message], turns: Sequence[int]
) -> tuple[str, list[Reply]]:
    """Return the text of a conversation, and the replies ``turns`` in it. ``name``: name of the template. Raises
    ``Unlearnable`` if the template leaves out a message, or a part of one that must be trained on."""
    _check_keys(render, name, messages, range(len(messages)), _CALLS)
    text = render(messages)
    places = _places(messages, text, _check_shown(render, name, messages, text))
    replies, alike = [], dict[str, tuple[int, str, bool]]()
    for turn in turns:
        place = places.get(turn)
        is_last = turn + 1 == len(messages)  # the last message may end differently
        reply = _as_others(place, alike, text) if place and not is_last else None
        if reply is None:
            reply = _find(render, messages, turn, text)
            if place and reply and reply.start <= place.start and place.stop <= reply.stop:
                alike[place.header] = place.start - reply.start, text[place.stop : reply.stop], reply.has_end
        said = "" if reply is None else text[reply.start : reply.stop]
        _check_parts(render, name, messages, turn, said)
        _check_keys(render, name, messages, [turn], _REASONING, said)
        if reply is None:
            raise Unlearnable(
                f"{name} renders message {turn + 1} (assistant) differently once others follow, so training would not "
                f"see what was said; {_REMEDY}"
            )
        replies.append(reply)
    return text, replies


_REMEDY = "end the conversation there, leave that out, or use another template: data.chat_template=FILE"


# finding --------------------------------------------------------------------------------------------------------------


def _find(render: Render, messages: Sequence[Message], turn: int, text: str) -> Reply | None:
    alone, whole = (_with_stand_in(render, messages[:stop], turn) for stop in (turn + 1, len(messages)))
    start = _start(render, messages, turn, text, whole or alone)
    if start is None:
        return None
    through = text if turn + 1 == len(messages) else _tried(render, messages[: turn + 1])
    if through is not None and text.startswith(through) and len(through) >= start:
        stop, ended = len(through), alone
        if messages[turn].keys() & {*_CALLS}:
            ended = _with_stand_in(render, messages[: turn + 1], turn, silent=True) or alone
        end = ended[1] if ended else through[start:].rstrip().removesuffix(_text_of(messages[turn]))
    else:
        # The template renders the last reply differently: use the position of a placeholder, with all later messages.
        found = None
        if alone and whole and text.endswith(whole[1]):
            found = alone[1], whole[1]
        elif messages[turn].keys() & {*_CALLS}:
            alone, whole = (
                _with_stand_in(render, messages[:stop], turn, silent=True) for stop in (turn + 1, len(messages))
            )
            found = (alone[1], whole[1]) if alone and whole and text.endswith(whole[1]) else None
        if found is None:
            return None
        after, end = found[1], _common(*found)
        stop = max(len(text) - len(after) + len(end), start)
    has_end = bool(end.strip())
    if has_end:
        stop = start + len(text[start:stop].rstrip())
    return Reply(start, stop, has_end)


def _common(one: str, other: str) -> str:
    """Return the common prefix of both texts."""
    alike = takewhile(lambda both: both[0] == both[1], zip(one, other, strict=False))
    return "".join(each for each, _ in alike)


def _start(
    render: Render, messages: Sequence[Message], turn: int, text: str, shown: tuple[str, str] | None
) -> int | None:
    """Return the position where a reply begins, behind the generation prompt. ``shown``: text before and after its
    placeholder."""
    before = _tried(render, messages[:turn], ask_for_reply=True)
    if before is None or not text.startswith(before):
        return len(shown[0]) if shown and text.startswith(shown[0]) else None
    if shown and shown[0].startswith(before) and text.startswith(shown[0]):
        header = shown[0][len(before) :]
        # A template without a generation prompt: the common text before all replies is not written by the model. It may
        # be a space only.
        if header.strip() and before == _tried(render, messages[:turn]):
            return len(shown[0])
    return len(before)


def _with_stand_in(
    render: Render, messages: Sequence[Message], turn: int, *, silent: bool = False
) -> tuple[str, str] | None:
    """Return the text before and after a placeholder for the content of a reply; None if the template does not show
    the placeholder exactly once. ``silent``: leave out its tool calls."""
    changed = {key: value for key, value in messages[turn].items() if not (silent and key in _CALLS)}
    changed["content"] = stand_in(turn)
    text = _tried(render, [*messages[:turn], changed, *messages[turn + 1 :]])
    parts = text.split(stand_in(turn)) if text is not None else []
    return (parts[0], parts[1]) if len(parts) == 2 else None


def _tried(render: Render, messages: Sequence[Message], **options: Any) -> str | None:
    """Return the text of ``messages``; None if the template refuses them, as some do without a user's message."""
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
    """Return the positions by message number, from the text ``shown`` with placeholders; empty if the template does
    more than insert each content."""
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


def _as_others(place: _Place, alike: dict[str, tuple[int, str, bool]], text: str) -> Reply | None:
    """Return the reply at ``place``, by comparison with a reply that has the same header, so that long conversations
    are not rendered once for each reply; None if there is none, or it ends differently."""
    lead, end, has_end = alike.get(place.header, (0, "", False))
    is_alike = place.header in alike and text.startswith(end, place.stop)
    return Reply(place.start - lead, place.stop + len(end), has_end) if is_alike else None


# what a template leaves out -------------------------------------------------------------------------------------------


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
            rename = "; call its role system" if role == "developer" else ""
            raise Unlearnable(
                f"{name} leaves out what message {number + 1} ({role}) says, so training would not see it"
                f"{rename or '; remove it'}, or use a template that shows it: data.chat_template=FILE"
            )
    return shown


def _check_parts(render: Render, name: str, messages: Sequence[Message], turn: int, said: str) -> None:
    """Raise ``Unlearnable`` if the template leaves out a part of a reply, such as its reasoning. ``said``: the part
    that it shows."""
    content = messages[turn]["content"]
    if not isinstance(content, str) or content.strip() in said:
        return
    for part in filter(None, map(str.strip, _TAGS.split(content))):
        if part not in said:
            changed = {**messages[turn], "content": content.replace(part, stand_in(turn), 1)}
            text = _tried(render, [*messages[:turn], changed, *messages[turn + 1 :]])
            if text is not None and stand_in(turn) not in text:
                raise Unlearnable(
                    f"{name} leaves out a part of message {turn + 1} (assistant), {_shown(part)}, most likely its "
                    f"reasoning, so training would not see it; {_REMEDY}"
                )


def _check_keys(
    render: Render, name: str, messages: Sequence[Message], turns: Sequence[int], keys: Sequence[str], said: str = ""
) -> None:
    """Raise ``Unlearnable`` if the template leaves out one of ``keys`` of the messages ``turns``, unless it is in
    ``said``."""
    for number in turns:
        for key in keys:
            value = messages[number].get(key)
            if not value or (isinstance(value, str) and value.strip() in said):
                continue
            if _is_dropped(render, messages, number, key):
                remedy = "use a template that shows it: data.chat_template=FILE" if key in _CALLS else _REMEDY
                role = messages[number]["role"]
                raise Unlearnable(f"{name} leaves out the {key} of message {number + 1} ({role}); {remedy}")


def _is_dropped(render: Render, messages: Sequence[Message], number: int, key: str) -> bool:
    """Return whether the text is the same without ``key`` of message ``number``."""
    text = _tried(render, messages)
    if text is None:  # some templates fail on a message without content
        messages = [{**message, "content": message["content"] or ""} for message in messages]
        text = render(messages)
    silent = {each: value for each, value in messages[number].items() if each != key}
    return text == _tried(render, [*messages[:number], silent, *messages[number + 1 :]])


def _shown(part: str) -> str:
    line = " ".join(part.split())
    return repr(printable(line if len(line) <= _SHOWN_CHARACTERS else f"{line[: _SHOWN_CHARACTERS - 1]}…"))
