"""Reading the words of a command of ``serried``: ``key=value`` pairs, run folders, numbers."""

from collections.abc import Sequence
from math import nan
from pathlib import Path

from serried.configs.errors import UserError
from serried.configs.explain import shown
from serried.configs.keys import all_keys
from serried.configs.schema import parse_count
from serried.configs.suggest import nearest, pasteable


def last_of_each(words: Sequence[str]) -> list[str]:
    """``words`` without the overrides whose key is given again later: the last one counts, as in Hydra."""
    last = {_key(word): index for index, word in enumerate(words)}
    return [word for index, word in enumerate(words) if not _key(word) or last[_key(word)] == index]


def repeated(words: Sequence[str]) -> list[str]:
    """A note for each key in ``words`` that has two values."""
    values: dict[str, list[str]] = {}
    for word in words:
        if key := _key(word):
            values.setdefault(key, []).append(word.partition("=")[2].strip())
    return [
        f"{key} is given {len(given)} times; the last one counts: {key}={shown(given[-1])}"
        for key, given in values.items()
        if len({*given}) > 1
    ]


def _key(word: str) -> str:
    """The key of an override; "" for another word."""
    key, equals, _ = word.partition("=")
    return key.lstrip("+").strip() if equals and not word.startswith("-") else ""


def pairs(
    words: Sequence[str], command: str, keys: Sequence[str], mistakes: list[str], *, reads_overrides: bool = False
) -> tuple[dict[str, str], list[str]]:
    """Sort ``words`` into the command's own ``keys`` and, if it reads them, overrides of train.py. A bare folder is
    that of the run. What is wrong goes to ``mistakes``."""
    given: dict[str, str] = {}
    overrides: list[str] = []
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
            given.setdefault(name, value)
        elif key not in keys and name in keys:
            mistakes.append(f"{command} has no key {key!r}; did you mean {pasteable(name, value)}?")
        elif key not in keys and reads_overrides and not _is_slip(key, keys):
            overrides.append(word)
        elif not equals or not (value or key == "prompt"):
            mistakes.append(f"{word!r} is not key=value, and there is no such folder; see serried {command} --help")
        elif key not in keys:
            close = nearest(key, keys)
            hint = f"did you mean {pasteable(close[0], value)}?" if close else f"its keys are {', '.join(keys)}"
            mistakes.append(f"{command} has no key {key!r}; {hint}")
            if close[:1] in (["run.dir"], ["run.name"]):  # a run is named, so none is missing
                given.setdefault(close[0], value)
        else:
            given[key] = value
    return given, overrides


_ELSEWHERE = {"max_new_tokens": "tokens", "max_tokens": "tokens", "max_length": "tokens", "text": "prompt"}
"""Names that other programs give to keys of ``serried generate``."""


def run_key(word: str) -> str:
    """The key with which ``word`` would name a run folder; empty if it looks like none."""
    if Path(word).is_dir() or ("/" in word and not word.startswith("-")):
        return "run.dir"
    return "run.name" if (Path("runs") / word).is_dir() else ""


def _is_slip(key: str, keys: Sequence[str]) -> bool:
    """Whether ``key`` is a slip of one of ``keys``, rather than a key of train.py or a slip of one."""
    return key not in all_keys() and bool(close := nearest(key, keys)) and "." not in key and close[0][:1] == key[:1]


def whole_number(given: dict[str, str], key: str, default: int, mistakes: list[str], *, lowest: int) -> int:
    """The whole number given for ``key``; a mistake goes to ``mistakes``."""
    value = parse_count(given.get(key, str(default)))
    if not isinstance(value, int) or not lowest <= value < 2**63:
        mistakes.append(f"{key}={given[key]} is not a whole number of at least {lowest}; e.g. {key}={default}")
        return default
    return value


def number_between(
    given: dict[str, str], key: str, default: float, lowest: float, highest: float, mistakes: list[str]
) -> float:
    """The number given for ``key``; a mistake goes to ``mistakes``."""
    try:
        value = float(given.get(key, default))
    except ValueError:
        value = nan
    if not lowest <= value <= highest:
        mistakes.append(f"{key}={given[key]} is not a number from {lowest:g} to {highest:g}; e.g. {key}={default:g}")
        return default
    return value


def step_number(text: str) -> int:
    """The step of a checkpoint from its text.

    Raises:
        UserError: ``text`` is not a step.
    """
    step = parse_count(text)
    if not isinstance(step, int):
        raise UserError(f"checkpoint={text} is not a step; give the number in its name, e.g. checkpoint=100")
    return step


def byte_count(text: str) -> int:
    """The number of bytes in a size such as ``5GB``.

    Raises:
        UserError: ``text`` is not a size.
    """
    count = parse_count(text.strip().removesuffix("B").removesuffix("b"))
    if not isinstance(count, int) or count < 1:
        raise UserError(f"shard_size={text} is not a size; e.g. shard_size=5GB or shard_size=500MB")
    return count
