"""Suggestions for mistyped keys and choices: similar names, and names that other frameworks use."""

import functools
import math
import os
import re
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from difflib import SequenceMatcher, get_close_matches
from pathlib import Path
from typing import Any, NamedTuple

from serried.configs.messages.keys import all_keys, all_sections, is_name, is_section, key_notes, keys_of, readers
from serried.configs.plain_data import expanded
from serried.configs.renamed_keys import RENAMED
from serried.configs.schema.fields import parse_count
from serried.configs.schema.registry import tasks
from serried.configs.schema.run_config import CHOSEN
from serried.configs.similar_names import nearest

Groups = Mapping[str, Sequence[str]]
"""Config groups and their choices."""
_DATA_FILES = (".json", ".jsonl", ".parquet", ".txt", ".csv", ".md", ".gz", ".zst")
_A_SLIP = 0.85
"""Minimum similarity between a name and the same name with a typo."""


class Names(NamedTuple):
    """Names that other software uses, normalized: ``maxSteps``, ``max-steps`` and ``max_steps`` are the same name."""

    keys: dict[str, list[str]]
    """Keys or groups that each name may mean."""
    choices: dict[str, list[str]]
    """Overrides for the name of each choice, such as ``precision=fp16`` for ``fp16``."""
    advice: dict[str, str]
    """Advice for each name or ``group=choice``."""


@functools.cache
def other_names() -> Names:
    """Return the names that other software uses, from ``key_notes.yaml``."""
    names = Names({}, {}, {})
    for target, known in key_notes()["names"].items():
        table = names.choices if "=" in target else names.keys
        for name in dict.fromkeys(_squeezed_names(known)):
            table.setdefault(name, []).append(target)
    for entry in key_notes()["advice"]:
        names.advice.update(dict.fromkeys(_squeezed_names(entry["names"]), entry["answer"]))
    return names


def _squeezed_names(known: str) -> Iterator[str]:
    return (squeezed(word.rpartition(":")[2]) for word in known.split())


def squeezed(name: str) -> str:
    return re.sub(r"[-_]", "", name).lower()


def pasteable(key: str, value: str) -> str:
    """Return ``key=value``, quoted for a shell."""
    return shlex.quote(f"{key}={value}")


def nearest_choice(key: str, typed: str, choices: Sequence[str]) -> list[str]:
    """Return the ``choices`` of a key or group that ``typed`` may mean, best first."""
    named = _choice_named(key, typed)
    return [named] if named in choices else nearest(typed, choices)


def _choice_named(key: str, typed: str) -> str:
    """Return the choice of ``key`` that other frameworks call ``typed``; empty if there is none."""
    known = (override.partition(" ")[0].partition("=") for override in other_names().choices.get(squeezed(typed), []))
    return next((choice for name, _, choice in known if name == key), "")


def nearest_keys(typed: str, names: Iterable[str]) -> list[str]:
    """Return up to three of the full dotted ``names`` that are similar to ``typed``, best first.

    Names are compared as a whole and, with a slightly lower score, by their last part: ``stpes`` matches
    ``trainer.steps``. A shared section is not enough: ``trainer.foo`` matches nothing.
    """
    typed = typed.lower().replace("/", ".").replace("-", "_")
    section, _, leaf = typed.rpartition(".")
    leaf = "" if section and leaf == "path" else leaf  # data.path does not mean adapter.path

    def likeness(name: str) -> tuple[float, float]:
        whole = _likeness(typed, name, 0.8)
        return max(whole, 0.88 * _likeness(leaf, name.rpartition(".")[2], 0.75)), whole

    ranked = sorted(((likeness(name), name) for name in names), key=lambda pair: pair[0], reverse=True)[:3]
    return [name for (score, _), name in ranked if score and score >= ranked[0][0][0] - 0.06]


def _likeness(one: str, other: str, least: float) -> float:
    """Return how similar two names are, from 0 to 1; 0 if below ``least``."""
    matcher = SequenceMatcher(None, one, other, autojunk=False)
    if min(matcher.real_quick_ratio(), matcher.quick_ratio()) < least:  # upper bounds, which are fast to compute
        return 0.0
    ratio = matcher.ratio()
    return ratio if ratio >= least else 0.0


def meant(key: str, value: str, groups: Groups) -> list[str]:
    """Return overrides to paste for a mistyped ``key=value``, best first; empty if none.

    Without a value, the overrides contain an example value.
    """
    if key in RENAMED:
        return [_assignment(RENAMED[key], value, groups)]
    section, _, last = key.rpartition(".")
    names = keys_of(section) if section not in all_sections() and is_section(section) else [*all_keys(), *groups]
    if key in names:
        return [_assignment(key, value, groups)]
    known = other_names()
    here = {*all_keys(), *groups}  # a task of another kind may lack the key that this name means

    def named(name: str) -> list[str]:
        return [path for path in known.keys.get(name, []) if path in here]

    aliases = named(squeezed(key)) or named(squeezed(last))
    if not aliases and (switches := known.choices.get(squeezed(last))):
        return [_switched(switches[0], value, groups)]
    near = nearest_keys(key, names)
    slips = [name for name in near if _likeness(key.lower(), name, _A_SLIP)]
    if aliases:
        near = [*aliases, *slips]  # a name of another framework may also be a typo of a key: offer both
    elif near[:1] != slips[:1] or not near:
        close = get_close_matches(squeezed(last), known.keys, n=1, cutoff=0.85)
        near = [*(target for name in close for target in named(name)), *near]
    sure = {*aliases, *groups, *slips}
    near = [name for name in near if name in sure or _fits(name, value)] or near
    if near and (found := _named_by_path(near[0], value)):
        return [found]
    return [_assignment(name, value, groups) for name in dict.fromkeys(near)][:3]


def _named_by_path(group: str, value: str) -> str:
    """Return overrides that use ``value``, a path or a name on the Hub, as the model or data; empty if it is
    neither."""
    path = value.strip("[]\"'")
    is_file = Path(path).suffix in _DATA_FILES or os.path.exists(expanded(path))  # noqa: PTH110 -- Path's raises in unreadable folders
    if group not in ("model", "data") or "," in path or not path or not (is_file or "/" in path):
        return ""
    if group == "model":
        return f"model=auto {pasteable('model.path', path)}"
    is_of_hub = re.fullmatch(r"[\w.-]+/[\w.-]+", path) and not is_file
    return f"data={'hf' if is_of_hub else 'text'} {pasteable('data.path', path)}"


def _switched(override: str, value: str, groups: Groups) -> str:
    """Return the override for a switch: ``precision=fp16`` for ``fp16=true``, ``track.wandb=offline`` for
    ``wandb=offline``."""
    key = override.partition("=")[0]
    if found := _named_by_path(key, value):
        return found
    choices = groups.get(key) or (all_keys()[key].choices if key in all_keys() else ())
    chosen = nearest_choice(key, value, choices)[:1]
    return pasteable(key, chosen[0]) if chosen and value.lower() not in ("true", "1", "yes") else override


def _fits(name: str, value: str) -> bool:
    """Return whether ``value``, or each value of a sweep, has the type of the key ``name``."""
    values = [value] if value.startswith("[") else value.split(",")
    return all(all_keys()[name].may_take(item) for item in values)


def _assignment(name: str, value: str, groups: Groups) -> str:
    if found := _named_by_path(name, value):
        return found
    if name not in groups:
        value = _CONVERTED.get(name, str)(_choice_named(name, value) or value)
        if name in all_keys() and all_keys()[name].kind == "texts" and not all_keys()[name].may_take(value):
            value = f"[{value}]"
        return pasteable(name, value) if value else all_keys()[name].example
    chosen = [choice if choice in groups[name] else _choice_named(name, choice) for choice in value.split(",")]
    # Several choices are a sweep.
    return f"{name}={','.join(chosen) if {*chosen} <= {*groups[name]} else '|'.join(groups[name])}"


_TIME_LIMITS = (  # days, hours, minutes, seconds
    r"(?:(\d+)d)?(?:(\d+)h)?(?:(\d+)m(?:in)?)?()",
    r"(\d+)-(\d+)(?::(\d+))?(?::(\d+))?",
    r"()(\d+):(\d+):(\d+)",
    r"()()(\d+)(?::(\d+))?",
)


def _in_minutes(limit: str) -> str:
    """Return a time limit such as ``4:00:00``, ``30:00``, ``1-12`` or ``4h30m`` in minutes; unchanged if it is not
    one."""
    for pattern in _TIME_LIMITS:
        if found := re.fullmatch(pattern, limit):
            days, hours, minutes, seconds = (int(part or 0) for part in found.groups())
            return str(60 * (24 * days + hours) + minutes + (seconds > 0))
    return limit


def _last_number(text: str) -> str:
    """Return the last number in ``text``, such as ``8`` for ``gpu:h100:8``."""
    return (re.findall(r"\d+", text.rpartition(":")[2]) or [text])[-1]


def _in_whole_minutes(limit: str) -> str:
    """Return the same as ``_in_minutes``, with a fraction of a minute rounded up."""
    return str(math.ceil(float(limit))) if re.fullmatch(r"\d*\.\d+", limit) else _in_minutes(limit)


_CONVERTED = {
    "checkpoint.every_minutes": _in_whole_minutes,
    "slurm.time_minutes": _in_minutes,
    "slurm.gpus_per_node": _last_number,
}


# Advice ---------------------------------------------------------------------------------------------------------------

_Config = Mapping[str, Any]
_FIGURES: dict[str, tuple[str, Callable[[float, _Config], float]]] = {
    "steps_of_tokens": ("1000", lambda n, at: math.ceil(n / at["trainer.global_batch"] / at["data.sequence_length"])),
    "accumulated": ("512", lambda n, at: n * at["trainer.micro_batch"] * _processes(at)),
    "share_of_lr": ("0.1", lambda n, at: min(1.0, n / float(at["optim.lr"]))),
}
"""Placeholders of advice in addition to ``{value}``: an example, and a function of the typed value and the other values
of the config by key."""


def _processes(at: _Config) -> int:
    return int(os.environ.get("WORLD_SIZE") or at.get("launch.processes") or 1)


def advice(key: str, value: str, config: _Config | None = None) -> str | None:
    """Return why there is no such key and what to use instead; ``None`` if another key may be meant.

    ``config``: other values of the run's config by key, if known, for the numbers in the sentence.
    """
    known = other_names().advice
    section, last = key.partition(".")[0], key.rpartition(".")[2]
    near = get_close_matches(key, all_keys(), 1, _A_SLIP) if "." in key else []
    if near and near[0].endswith(f".{last}"):
        return None  # dapter.rank is adapter.rank, not torchrun's
    if near and squeezed(key) not in known and (len(last) < 4 or squeezed(last) not in known):
        return None  # optim.ep is optim.eps, not expert parallelism
    names = [key, last] if section in all_sections() else [key, last, section]
    sentence = next((known[squeezed(name)] for name in names if squeezed(name) in known), None)
    if sentence is None:
        return None
    at = {path: parse_count(leaf) for path, leaf in (config or {}).items()}
    figures = {name: _figure(*figure, value, at) for name, figure in _FIGURES.items()}
    return sentence.format(value=value or "N", **figures)


def _figure(example: str, compute: Callable[[float, _Config], float], value: str, at: _Config) -> str:
    try:
        result = compute(float(parse_count(value)), at)
        return f"{result:.0f}" if result == int(result) else f"{result:.3g}"
    except (KeyError, TypeError, ValueError, ArithmeticError):
        return example


# Sentences ------------------------------------------------------------------------------------------------------------


def unknown_key(key: str, value: str, source: str, groups: Groups, config: _Config | None = None) -> str:
    """Return the sentence for a key that the schema does not have."""
    given = f"{key}={value} ({source})"
    if new := RENAMED.get(key):
        return f"{given} has been renamed; use {_assignment(new, value, groups)}"
    section = key.rpartition(".")[0]
    own = _keys_of_choice(section, config or {})
    same = [name for name in own or () if squeezed(name) == squeezed(key)]
    reason = None if same else advice(key, value, config)
    if reason and (own is None or {*re.findall(rf"{section}\.\w+", reason)} <= {*own}):
        return f"{given}: {reason}"
    if others := _tasks_with(key):
        return f"unknown key {given}; it is a key of {', '.join(others)}"
    parts = key.split(".")
    if ".".join(parts[:2]) in all_keys().named and len(parts) > 3 and not is_name(parts[2]):
        return f"{given}: {parts[2]} is not a valid name; use letters, digits, _ and -, starting with a letter"
    named = {word: word.strip("'").partition("=")[0] for word in meant(key, value, groups)}
    # A user's task has no model and no data.
    suggestions = [word for word, name in named.items() if name in all_keys() or name in groups]
    if own is not None:  # suggest no key of another optimizer or schedule
        near = [pasteable(name, value) for name in [*same, *nearest_keys(key, own)]]
        elsewhere = [word for word in suggestions if not named[word].startswith(f"{section}.") or named[word] in own]
        suggestions = list(dict.fromkeys([*near, *elsewhere]))[:3]
    if suggestions:
        idle = _read_elsewhere([word.partition("=")[0].strip("'") for word in suggestions], config or {})
        return f"unknown key {given}; did you mean {' or '.join(suggestions)}?{idle}"
    if own is not None:
        return f"unknown key {given}; the keys of {section} are {', '.join(name.partition('.')[2] for name in own)}"
    if section in all_keys():
        return f"unknown key {given}; {section} is a key, not a section; write {pasteable(section, value)}"
    if is_section(section):
        return f"unknown key {given}; {listing(section)}"
    return f"unknown key {given}; --help lists the keys"


def _tasks_with(key: str) -> list[str]:
    """Return overrides that choose a task with its own key ``key``."""
    section, _, last = key.partition(".")
    known = tasks.entries() if section == tasks.group else []
    return [f"task={entry.name}" for entry in known if last in entry.section.model_fields]


def _read_elsewhere(keys: Sequence[str], config: _Config) -> str:
    """Return a note for the first of ``keys`` that the chosen model family does not read, with the families that read
    it; empty if there is none."""
    has_model = any(path.startswith("model.") for path in config)
    family = config.get("model.family", CHOSEN["model"].base.model_fields["family"].default)
    for key in keys if has_model else ():
        families = readers(key) if key.startswith("model.") else []
        if families and family not in families:
            return f" {key} is a key of model.family={', '.join(families)}, but the run uses model.family={family}"
    return ""


def _keys_of_choice(section: str, config: _Config) -> list[str] | None:
    """Return the keys of the chosen optimizer or schedule if ``section`` is its section; else None."""
    name = config.get(f"{section}.name")
    if section not in ("optim", "schedule") or name not in CHOSEN[section].names():
        return None
    return [f"{section}.{field}" for field in CHOSEN[section].get(name).section.model_fields]


def listing(section: str) -> str:
    """Return the clause that lists the keys of a section, for use after a semicolon."""
    if section in all_keys().named:
        return f"it has one section for each name you choose, such as {section}.web; {listing(f'{section}.web')}"
    return f"the keys of {section} are {', '.join(key.rpartition('.')[2] for key in keys_of(section))}"


def unknown_section(name: str, source: str) -> str:
    """Return the sentence for a section in a YAML file that the schema does not have."""
    if reason := advice(name, ""):
        return f"section {name} ({source}): {reason}"
    near = nearest(name, all_sections())
    return f"unknown section {name} ({source}); " + (
        f"did you mean {' or '.join(near)}?" if near else f"sections: {', '.join(all_sections())}"
    )


def unknown_choice(group: str, choice: str, choices: Sequence[str], source: str = "") -> str:
    """Return the sentence for ``group=choice`` when there is no such choice."""
    where = f" ({source})" if source else ""
    plural = f"{group}s" if group in ("recipe", "model", "schedule") else group
    if reason := other_names().advice.get(squeezed(f"{group}={choice}")):
        return f"{group}={choice}{where}: {reason.format(value=choice)}; {plural}: {', '.join(choices)}"
    near = nearest_choice(group, choice, choices)[:1]
    if group == "model" and not near and choice in CHOSEN["model"].names():
        write = f"write FOLDER/model/{choice}.yaml with family: {choice}, and add --config-dir FOLDER"
        return f"model={choice}{where} is a family, which needs a YAML file; {write}"
    if found := _named_by_path(group, choice):
        chats = ", with recipe=sft if its rows are conversations" if group == "data" else ""
        return f"{group}={choice}{where} is not a preset; for a file, a folder or a name on the Hub use {found}{chats}"
    hint = f" Did you mean {pasteable(group, near[0])}?" if near else ""
    return f"no {group} {choice!r}{where}.{hint} {plural}: {', '.join(choices)}"
