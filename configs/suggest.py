"""From what was typed to what was meant: nearest names, and names that other frameworks use.

The names live beside the fields they stand for, in ``Section.aliases`` and ``Section.advice``.
"""

import functools
import math
import os
import re
import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import SequenceMatcher, get_close_matches
from typing import Any

from pydantic import BaseModel

from serried.configs.keys import all_keys, all_sections, is_name, is_section, keys_of
from serried.configs.near import nearest
from serried.configs.run_config import registered_sections
from serried.configs.schema import Section, TextRunConfig, parse_count

_A_SLIP = 0.85
"""Likeness of a key and the same key with one wrong letter, or more."""
_NO_VALUE: Mapping[str, Any] = {}


@dataclass(frozen=True)
class Names:
    """The names that a schema knows from elsewhere, squeezed: ``maxSteps``, ``max-steps`` and ``max_steps`` are one."""

    keys: dict[str, list[str]] = field(default_factory=dict)
    """Name -> the keys or groups it may stand for."""
    choices: dict[str, list[str]] = field(default_factory=dict)
    """Name of a choice -> overrides that choose it: ``fp16`` -> ``precision=fp16``."""
    advice: dict[str, str] = field(default_factory=dict)
    """Name, or ``group=choice`` -> a sentence."""
    by_framework: list[tuple[str, dict[str, list[str]]]] = field(default_factory=list)
    """Key, override or sentence, and its names in each framework; "" for the others."""


def squeezed(name: str) -> str:
    return re.sub(r"[-_]", "", name).lower()


def names_of(schema: type[BaseModel] = TextRunConfig) -> Names:
    """What the sections of ``schema``, and their base classes, say of other frameworks' names."""
    return _names_of(schema, registered_sections())


@functools.cache
def _names_of(schema: type[BaseModel], registered: tuple[tuple[str, type[Section]], ...]) -> Names:
    names = Names()
    _collect([schema], "", names, registered)
    return names


def _collect(
    sections: Sequence[type[BaseModel]], prefix: str, names: Names, registered: Sequence[tuple[str, type[Section]]]
) -> None:
    """Add what ``sections``, of which a run has one at ``prefix``, say."""
    fields = {name: info for section in reversed(sections) for name, info in section.model_fields.items()}
    for base in dict.fromkeys(base for section in sections for base in section.__mro__ if issubclass(base, Section)):
        for target, known in vars(base).get("aliases", {}).items():
            if target.partition("=")[0] in fields:
                table = names.choices if "=" in target else names.keys
                for name in _tagged(f"{prefix}{target}", known, names):
                    found = table.setdefault(squeezed(name), [])
                    found += [] if f"{prefix}{target}" in found else [f"{prefix}{target}"]
        for known, sentence in vars(base).get("advice", ()):
            for name in _tagged(sentence, known, names):
                names.advice.setdefault(squeezed(name), sentence)
    for name, info in fields.items():
        if isinstance(info.annotation, type) and issubclass(info.annotation, Section):
            own = [section for group, section in registered if not prefix and group == name]
            _collect(own or [info.annotation], f"{prefix}{name}.", names, registered)


def _tagged(target: str, known: str, names: Names) -> list[str]:
    """The names in ``known``, such as ``hf:max_steps num_steps``, noted under their frameworks."""
    row: dict[str, list[str]] = {}
    for word in known.split():
        tag, has_tag, name = word.partition(":")
        row.setdefault(tag if has_tag else "", []).append(name if has_tag else word)
    names.by_framework.append((target, row))
    return list(dict.fromkeys(name for each in row.values() for name in each))


def pasteable(key: str, value: str) -> str:
    """``key=value`` as it has to be typed into a shell."""
    return shlex.quote(f"{key}={value}")


def nearest_choice(key: str, typed: str, choices: Sequence[str]) -> list[str]:
    """The ``choices`` of a key or group that ``typed`` may stand for, best first."""
    known = [override.partition("=") for override in names_of().choices.get(squeezed(typed), [])]
    meant = [choice.partition(" ")[0] for name, _, choice in known if name == key]
    return [choice for choice in meant if choice in choices] or nearest(typed, choices)


def nearest_keys(typed: str, names: Iterable[str]) -> list[str]:
    """Up to three of the full dotted ``names`` that ``typed`` may be a slip of, best first.

    A name is as near as its whole or, a little less, as its last part: ``stpes`` is near ``trainer.steps``. A shared
    section is not enough: ``trainer.foo`` is near nothing.
    """
    typed = typed.lower().replace("/", ".").replace("-", "_")
    leaf = typed.rpartition(".")[2]

    def likeness(name: str) -> tuple[float, float]:
        whole, last = _ratio(typed, name), _ratio(leaf, name.rpartition(".")[2])
        whole = whole if whole >= 0.8 else 0.0
        return max(whole, 0.9 * last if last >= 0.75 else 0.0), whole

    ranked = sorted(((likeness(name), name) for name in names), key=lambda pair: pair[0], reverse=True)[:3]
    return [name for (score, _), name in ranked if score and score >= ranked[0][0][0] - 0.06]


def _ratio(one: str, other: str) -> float:
    return SequenceMatcher(None, one, other, autojunk=False).ratio()


def meant(key: str, value: str, groups: Mapping[str, Sequence[str]]) -> list[str]:
    """Overrides to paste that somebody who typed ``key=value`` may have meant; best first, empty if none.

    Without a value the overrides get an example of one.
    """
    section, _, last = key.rpartition(".")
    names = keys_of(section) if section not in all_sections() and is_section(section) else [*all_keys(), *groups]
    if key in names:
        return [_assignment(key, value, groups)]
    known = names_of()
    aliases = known.keys.get(squeezed(key)) or known.keys.get(squeezed(last), [])
    if not aliases and (switches := known.choices.get(squeezed(last))):
        return [_switched(switches[0], value, groups)]
    near = nearest_keys(key, names)
    if aliases:
        # A name from elsewhere may also be one slip away from a real key: offer both.
        near = [*aliases, *(name for name in near if _ratio(key.lower(), name) >= _A_SLIP)]
    elif not near or _ratio(key.lower(), near[0]) < _A_SLIP:
        near = [*_near_alias(squeezed(last)), *near]
    sure = {*aliases, *groups, *(name for name in near if _ratio(key.lower(), name) >= _A_SLIP)}
    near = [name for name in near if name in sure or _fits(name, value)] or near
    return [_assignment(name, value, groups) for name in dict.fromkeys(near)][:3]


def _near_alias(last: str) -> list[str]:
    close = get_close_matches(last, names_of().keys, n=1, cutoff=0.85)
    return [key for name in close for key in names_of().keys[name]]


def _switched(override: str, value: str, groups: Mapping[str, Sequence[str]]) -> str:
    """``fp16=true`` -> ``precision=fp16``; ``wandb=offline`` -> ``track.wandb=offline``."""
    key = override.partition("=")[0]
    choices = groups.get(key) or (all_keys()[key].choices if key in all_keys() else ())
    chosen = nearest_choice(key, value, choices)[:1]
    return pasteable(key, chosen[0]) if chosen and value.lower() not in ("true", "1", "yes") else override


def _fits(name: str, value: str) -> bool:
    """Whether ``value``, or each of several to sweep over, is of the kind of the key ``name``."""
    values = [value] if value.startswith("[") else value.split(",")
    return all(all_keys()[name].may_take(each) for each in values)


def _assignment(name: str, value: str, groups: Mapping[str, Sequence[str]]) -> str:
    if name not in groups:
        return pasteable(name, _CONVERTED.get(name, str)(value)) if value else all_keys()[name].example
    chosen = [each if each in groups[name] else next(iter(_alias_of(name, each)), "") for each in value.split(",")]
    # Several are a sweep.
    return f"{name}={','.join(chosen) if {*chosen} <= {*groups[name]} else '|'.join(groups[name])}"


def _alias_of(group: str, typed: str) -> list[str]:
    known = [override.partition("=") for override in names_of().choices.get(squeezed(typed), [])]
    return [choice.partition(" ")[0] for name, _, choice in known if name == group]


def _in_minutes(limit: str) -> str:
    """A time limit such as ``4:00:00``, ``30:00``, ``1-12`` or ``4h30m`` in minutes; unchanged if it is none."""
    if found := re.fullmatch(r"(?:(\d+)d)?(?:(\d+)h)?(?:(\d+)m(?:in)?)?", limit.lower()):
        days, hours, minutes = (int(part or 0) for part in found.groups())
        return str(60 * (24 * days + hours) + minutes)
    found = re.fullmatch(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?", limit)
    if found is None:
        return limit
    days, *parts = (int(part or 0) for part in found.groups())
    if found[1] is None and found[4] is None:  # minutes, or minutes:seconds
        parts = [0, parts[0], parts[1]]
    hours, minutes, seconds = parts
    return str(60 * (24 * days + hours) + minutes + (seconds > 0))


def _last_number(text: str) -> str:
    """``gpu:h100:8`` -> ``8``."""
    found = re.findall(r"\d+", text.rpartition(":")[2])
    return found[-1] if found else text


_CONVERTED = {"slurm.time_minutes": _in_minutes, "slurm.gpus_per_node": _last_number}


# Advice ---------------------------------------------------------------------------------------------------------------

_Number = Callable[[str], float]
_FIGURES: dict[str, tuple[str, Callable[[float, _Number], float]]] = {
    "steps_of_tokens": ("1000", lambda n, at: math.ceil(n / at("trainer.global_batch") / at("data.sequence_length"))),
    "accumulated": ("512", lambda n, at: n * at("trainer.micro_batch") * _processes(at)),
    "warmup_of_share": ("100", lambda n, at: math.ceil(n * at("trainer.steps"))),
    "share_of_lr": ("0.1", lambda n, at: n / at("optim.lr") if 0 < n < at("optim.lr") else 0.1),
    "beta": ("0.99", lambda n, _: n if 0 <= n < 1 else 0.99),
    "old_beta1": ("0.9", lambda _, at: at("optim.betas.0")),
    "old_beta2": ("0.95", lambda _, at: at("optim.betas.1")),
}
"""What a sentence of advice may hold in braces, beside ``{value}``: an example, and how it is computed from the value
typed and the rest of the config."""


def _processes(at: _Number) -> float:
    if (started := os.environ.get("WORLD_SIZE", "")).isdigit():
        return float(started)
    try:
        return at("launch.processes")
    except (KeyError, TypeError):
        return 1.0


def advice(key: str, value: str, config: Mapping[str, Any] = _NO_VALUE) -> str | None:
    """Why there is no key to write in place of ``key``, and what to do; ``None`` if there may be one.

    ``config``: the rest of the run's config, if it is known, for the numbers in the sentence.
    """
    known = names_of().advice
    section, last = key.partition(".")[0], key.rpartition(".")[2]
    is_slip = "." in key and any(_ratio(key, name) >= _A_SLIP for name in all_keys())
    if is_slip and squeezed(key) not in known and (len(last) < 4 or squeezed(last) not in known):
        return None  # optim.ep is optim.eps, not expert parallelism
    names = [key, last] if section in all_sections() else [key, last, section]
    sentence = next((known[squeezed(name)] for name in names if squeezed(name) in known), None)
    if sentence is None:
        return None
    figures = {name: _figure(name, value, config) for name in _FIGURES if f"{{{name}}}" in sentence}
    return sentence.format(value=value or "N", **figures)


def _figure(name: str, value: str, config: Mapping[str, Any]) -> str:
    example, compute = _FIGURES[name]

    def at(path: str) -> float:
        node: Any = config
        for part in path.split("."):
            node = node[int(part)] if isinstance(node, list | tuple) else node[part]
        return float(parse_count(node))

    try:
        result = compute(float(parse_count(value)), at)
        return f"{result:.0f}" if result == int(result) else f"{result:.3g}"
    except (KeyError, IndexError, TypeError, ValueError, ZeroDivisionError, OverflowError):
        return example


# Sentences ------------------------------------------------------------------------------------------------------------


def unknown_key(
    key: str, value: str, source: str, groups: Mapping[str, Sequence[str]], config: Mapping[str, Any] = _NO_VALUE
) -> str:
    """The sentence for a key that the schema does not have."""
    given = f"{key}={value} ({source})"
    if reason := advice(key, value, config):
        return f"{given}: {reason}"
    parts = key.split(".")
    if ".".join(parts[:2]) in all_keys().named and len(parts) > 3 and not is_name(parts[2]):
        return f"{given}: {parts[2]} is not a valid name; use letters, digits, _ and -, starting with a letter"
    named = {each: each.strip("'").partition("=")[0] for each in meant(key, value, groups)}
    # A user's task has no model and no data.
    if suggestions := [each for each, name in named.items() if name in all_keys() or name in groups]:
        return f"unknown key {given}; did you mean {' or '.join(suggestions)}?"
    section = key.rpartition(".")[0]
    if is_section(section):
        return f"unknown key {given}; {listing(section)}"
    return f"unknown key {given}; --help lists the keys"


def listing(section: str) -> str:
    """The keys of a section, to stand after a semicolon."""
    if section in all_keys().named:
        return f"it has one section for each name you choose, as in {section}.web; {listing(f'{section}.web')}"
    return f"the keys of {section} are {', '.join(key.rpartition('.')[2] for key in keys_of(section))}"


def unknown_section(name: str, source: str) -> str:
    """The sentence for a whole section, given in a YAML file, that the schema does not have."""
    if reason := advice(name, ""):
        return f"section {name} ({source}): {reason}"
    near = nearest(name, all_sections())
    return f"unknown section {name} ({source}); " + (
        f"did you mean {' or '.join(near)}?" if near else f"sections: {', '.join(all_sections())}"
    )


def unknown_choice(group: str, choice: str, choices: Sequence[str], source: str = "") -> str:
    """The sentence for ``group=choice`` when there is no such choice."""
    where = f" ({source})" if source else ""
    plural = f"{group}s" if group in ("recipe", "model", "schedule") else group
    if reason := names_of().advice.get(squeezed(f"{group}={choice}")):
        return f"{group}={choice}{where}: {reason.format(value=choice)}; {plural}: {', '.join(choices)}"
    near = nearest_choice(group, choice, choices)[:1]
    hint = f" Did you mean {pasteable(group, near[0])}?" if near else ""
    return f"no {group} {choice!r}{where}.{hint} {plural}: {', '.join(choices)}"
