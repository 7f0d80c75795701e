"""Error messages for values that the schema refuses."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from serried.configs.addresses import not_a_path
from serried.configs.bucket_urls import check_bucket_url
from serried.configs.errors import UserError
from serried.configs.messages.keys import Key, all_keys, is_section, is_source, keys_of, readers
from serried.configs.messages.suggestions import listing, nearest_choice, unknown_key, unknown_section
from serried.configs.plain_data import flatten, value_at
from serried.configs.schema.fields import NOT_IN_32_BITS
from serried.configs.schema.run_config import CHOSEN

_LONGEST_VALUE = 80


@dataclass(frozen=True)
class Origins:
    """Origin of each value of a composed config."""

    typed: Mapping[str, str]
    """Overrides of the command line by key, without choices of groups."""
    layers: Sequence[tuple[Path, str]]
    """YAML files in the order in which they were merged, and the section that each sets; "": the top level. Later files
    take precedence."""
    root: Path
    """Files in this folder are shown relative to it, other files relative to the current folder."""
    of_folder: Mapping[str, str] = field(default_factory=dict)
    """Origin of each key whose value comes from a model folder."""

    def of(self, path: str) -> str:
        """Return ``command line``, or the file and line that set ``path`` or a section that contains it; empty if
        nothing did."""
        parts = path.split(".")
        paths = [".".join(parts[:end]) for end in range(len(parts), 0, -1)]
        if any(key in self.typed for key in paths):
            return "command line"
        if from_folder := next((key for key in paths if key in self.of_folder), None):
            return self.of_folder[from_folder]
        for file, section in reversed(self.layers):
            inside = parts if not section else parts[1:] if parts[0] == section else []
            if inside and (line := _line_of(inside, file)):
                above = next((folder for folder in (self.root, Path.cwd()) if file.is_relative_to(folder)), None)
                return f"{file.relative_to(above) if above else file}:{line}"
        return "command line" if any(key.startswith(f"{path}.") for key in self.typed) else ""


def _line_of(parts: Sequence[str], file: Path) -> int | None:
    """Return the line of the nested key ``parts`` in ``file``, or of a value that replaces a section above it."""
    node, line = yaml.compose(file.read_text(encoding="utf-8")), None
    for part in parts:
        if not isinstance(node, yaml.MappingNode):
            break
        found = next(((key, value) for key, value in node.value if key.value == part), None)
        if found is None:
            return None
        line, node = found[0].start_mark.line + 1, found[1]
    return line


def shown(value: Any) -> str:
    """Return a value in YAML format, on one line of bounded length."""
    if isinstance(value, bool) or value is None:
        text = {True: "true", False: "false", None: "null"}[value]
    elif isinstance(value, list | tuple):
        text = f"[{','.join(shown(item) for item in value)}]"
    elif isinstance(value, dict):
        text = "{" + ",".join(f"{key}:{shown(item)}" for key, item in value.items()) + "}"
    else:
        text = str(value)
    text = " ".join(text.split())
    return text if len(text) <= _LONGEST_VALUE else text[: _LONGEST_VALUE - 1] + "…"


def unfit(key: Key, text: str, source: str) -> str:
    """Return the sentence for a value of the wrong type or not among the choices."""
    given = f"{key.path}={text} ({source})"
    if key.choices:
        near = nearest_choice(key.path, text, key.choices)
        hint = f"; did you mean {key.path}={near[0]}?" if near else ""
        return f"{given} is not {key.expected}{hint}"
    return f"{given} is not {key.expected}; e.g. {key.example}"


def explain(
    error: ValidationError,
    config: Mapping[str, Any],
    origins: Origins,
    groups: Mapping[str, Sequence[str]],
    *,
    alone: bool,
) -> list[str]:
    """Return one sentence for each invalid key of ``config``, in the order of the schema.

    ``alone``: leave out missing keys and contradictions between keys.
    """
    sentences: dict[str, str] = {}
    missing: list[str] = []
    for mistake in error.errors(include_url=False):
        if alone and mistake["type"] in ("value_error", "missing"):
            continue
        path = ".".join(str(part) for part in mistake["loc"])
        while path and mistake["type"] != "extra_forbidden" and path not in all_keys() and not is_section(path):
            path = path.rpartition(".")[0]  # an item of a list: the user typed the list
        if mistake["type"] == "missing" and path == ".".join(str(part) for part in mistake["loc"]):
            missing.append(path)
            continue
        sentences.setdefault(path, _sentence(path, mistake, config, origins, groups))
    if missing:
        # One sentence for all: usually several are missing together.
        examples = " ".join(all_keys()[path if path in all_keys() else keys_of(path)[0]].override for path in missing)
        names = f"{', '.join(missing)} {'has' if len(missing) == 1 else 'have'}"
        sentences[""] = f"{names} no value, in a YAML file or on the command line; e.g. {examples}"
    return list(sentences.values())


def _sentence(
    path: str, mistake: Any, config: Mapping[str, Any], origins: Origins, groups: Mapping[str, Sequence[str]]
) -> str:
    kind, key = mistake["type"], all_keys().get(path)
    if kind == "value_error":  # a complete message from a validator of the schema
        return str(mistake["ctx"]["error"])
    source = origins.of(path) or "configs"
    if kind == "extra_forbidden":
        is_in_section = path not in all_keys() and path.rpartition(".")[0] in all_keys()
        if not is_in_section and (names := readers(path)):  # a key of another optimizer, schedule, ...
            section, above = path.partition(".")[0], path.rpartition(".")[0]
            default = CHOSEN[section].base.model_fields[CHOSEN[section].key].default
            section, key = (above, "name") if is_source(above) else (section, CHOSEN[section].key)
            group = section if key == "name" and section in CHOSEN else f"{section}.{key}"
            chosen = value_at(section, config).get(key, default)
            add = f", or add {group}={names[0]}" if key == "name" else ""
            return (
                f"{path}={shown(mistake['input'])} ({source}) is a key of {group}={', '.join(names)}, but the run uses "
                f"{group}={chosen}; leave it out{add}"
            )
        if isinstance(mistake["input"], dict):
            return unknown_section(path, source)
        return unknown_key(path, shown(mistake["input"]), source, groups, flatten(config))
    value = shown(origins.typed.get(path, value_at(path, config)))
    if kind == "bucket":
        return str(mistake["msg"])
    if kind == "bucket_url":
        return _mistake_in_url(path, str(mistake["input"]))
    if kind == "address":
        return not_a_path(path, str(mistake["input"]), source, takes_buckets=mistake["ctx"]["takes_buckets"])
    if key is None or (key.kind == "object" and kind != "missing"):
        return f"{path}={value} ({source}): {path} is a section, not a key; {listing(path)}"
    if kind in ("greater_than", "greater_than_equal", "less_than", "less_than_equal"):
        return f"{path}={value} ({source}) is out of range: it must be {key.bounds}"
    if kind == "string_pattern_mismatch":
        barred = "slashes, spaces or control characters" if path == "run.name" else "spaces, quotes or backslashes"
        return f"{path}={value} ({source}) must not contain {barred}; e.g. {key.example}"
    if kind == "string_too_short":
        return f"{path} ({source}) is empty; e.g. {key.example}"
    if kind == NOT_IN_32_BITS:
        bounds = ", and ".join(filter(None, [key.bounds, "from 1.2e-38 to 3.4e38 in magnitude (float32)"]))
        return f"{path}={value} ({source}) is out of range: it must be {bounds}; e.g. {key.example}"
    if kind == "finite_number":
        return f"{path}={value} ({source}) is not finite; e.g. {key.example}"
    return unfit(key, value, source)


def _mistake_in_url(key: str, url: str) -> str:
    try:
        return f"{key}={check_bucket_url(url, key)} is not a valid value"
    except UserError as error:
        return str(error)
