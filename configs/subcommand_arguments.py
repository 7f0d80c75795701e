"""Parser of the arguments of ``serried SUBCOMMAND``: ``key=value`` pairs, run folders, numbers."""

from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

from serried.configs.addresses import is_address, not_a_path
from serried.configs.bucket_urls import is_bucket_url
from serried.configs.errors import UserError
from serried.configs.messages.invalid_values import shown
from serried.configs.messages.keys import all_keys
from serried.configs.messages.suggestions import nearest, pasteable
from serried.configs.schema.fields import parse_count

_Number = TypeVar("_Number", int, float)
_WRITE_TO_BUCKETS = ("export", "merge", "report")
"""Commands whose ``out`` may be a URL of a bucket."""
_ELSEWHERE = {"max_new_tokens": "tokens", "max_tokens": "tokens", "max_length": "tokens", "text": "prompt"}
"""Names that other programs give to keys of ``serried generate``."""


def last_of_each(words: Sequence[str]) -> list[str]:
    """Return ``words`` without overrides whose key appears again later: the last one counts, as in Hydra."""
    last = {_key(word): index for index, word in enumerate(words)}
    return [word for index, word in enumerate(words) if not _key(word) or last[_key(word)] == index]


def values_of(words: Sequence[str]) -> dict[str, str]:
    """Return the value of each key in the overrides among ``words``, as typed; the last one counts."""
    return {key: word.partition("=")[2].strip() for word in words if (key := _key(word))}


def repeated(words: Sequence[str]) -> list[str]:
    """Return a note for each key in ``words`` with several values, and a note if ``trainer.epochs`` replaces
    ``trainer.steps``."""
    values: dict[str, list[str]] = {}
    for word in words:
        if key := _key(word):
            values.setdefault(key, []).append(word.partition("=")[2].strip())
    notes = [
        f"{key} is given {len(given)} times; the last value is used: {key}={shown(given[-1])}"
        for key, given in values.items()
        if len({*given}) > 1
    ]
    steps, epochs = (values.get(f"trainer.{name}", ["null"])[-1] for name in ("steps", "epochs"))
    if "null" not in (steps, epochs):
        notes.append(f"trainer.steps={shown(steps)} has no effect: trainer.epochs={shown(epochs)} sets the steps")
    return notes


def _key(word: str) -> str:
    """Return the key of an override; empty for any other word."""
    key, equals, _ = word.partition("=")
    return key.lstrip("+").strip() if equals and not word.startswith("-") else ""


def pairs(
    words: Sequence[str], command: str, keys: Sequence[str], *, reads_overrides: bool = False
) -> tuple[dict[str, str], list[str]]:
    """Split ``words`` into the command's own ``keys`` and, if it reads them, overrides of train.py. A bare folder is
    the run folder. Raises ``UserError``, which lists all words that are neither."""
    given: dict[str, str] = {}
    overrides: list[str] = []
    mistakes: list[str] = []
    left = last_of_each(words)
    while left:
        word = left.pop(0)
        key, equals, value = word.partition("=")
        name = key.lstrip("-").replace("-", "_") if word.startswith("-") else key
        name = _ELSEWHERE.get(name, name)
        run = "" if equals else run_key(word)
        if run and "run.dir" in keys and not {"run.dir", "run.name"} & {*given}:
            given[run] = word
        elif word.startswith("-") and name in keys:
            if not equals and left and "=" not in left[0] and not left[0].startswith("--"):
                value = left.pop(0)
                word = f"{word} {value}"
            mistakes.append(f"{word}: keys have no dashes; write {pasteable(name, value or name.upper())}")
        elif key not in keys and name in keys:
            mistakes.append(f"{command} has no key {key!r}; did you mean {pasteable(name, value)}?")
        elif key not in keys and reads_overrides and not _is_slip(key, keys) and (equals or run or word[0] == "-"):
            overrides.append(word)
        elif not equals or not (value or key == "prompt"):
            mistakes.append(f"{word!r} is neither key=value nor an existing folder; see serried {command} --help")
        elif key not in keys:
            close = nearest(key, keys)
            hint = f"did you mean {pasteable(close[0], value)}?" if close else f"its keys are {', '.join(keys)}"
            mistakes.append(f"{command} has no key {key!r}; {hint}")
        elif key in ("out", "run.dir") and is_address(value) and not _takes_bucket(command, key, value):
            takes_buckets = key == "run.dir" or command in _WRITE_TO_BUCKETS
            mistakes.append(not_a_path(key, value, takes_buckets=takes_buckets))
        else:
            given[key] = value
    if mistakes:
        raise UserError(*mistakes)
    return given, overrides


def _takes_bucket(command: str, key: str, value: str) -> bool:
    return is_bucket_url(value) and (key == "run.dir" or command in _WRITE_TO_BUCKETS)


def run_key(word: str) -> str:
    """Return the key for ``word`` as the name of a run folder; empty if it does not look like one."""
    if Path(word).is_dir() or ("/" in word and not word.startswith("-")):
        return "run.dir"
    return "run.name" if (Path("runs") / word).is_dir() else ""


def _is_slip(key: str, keys: Sequence[str]) -> bool:
    """Return whether ``key`` is a typo of one of ``keys``, and not a key of train.py."""
    return key not in all_keys() and bool(close := nearest(key, keys)) and "." not in key and close[0][:1] == key[:1]


def number(given: dict[str, str], key: str, default: _Number, lowest: float, highest: float) -> _Number:
    """Return the number given for ``key``, with the type of ``default``. Raises ``UserError`` if it is not a number or
    out of range."""
    kind = type(default)
    try:
        value = kind(parse_count(given.get(key, default)))
        if lowest <= value <= highest:
            return value
    except ValueError:
        pass
    what = "whole number" if kind is int else "number"
    raise UserError(f"{key}={given[key]} is not a {what} from {lowest:g} to {highest:g}; e.g. {key}={default:g}")
