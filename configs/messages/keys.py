"""Description of each config key, derived from the schema, for checks, error messages and ``--help``."""

import functools
import itertools
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, replace
from inspect import isclass
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Union, get_args, get_origin

from pydantic import create_model
from pydantic.json_schema import SkipJsonSchema

from serried.configs.errors import UserError
from serried.configs.plain_data import read_yaml
from serried.configs.schema.data import names_of_singles
from serried.configs.schema.fields import NAME_PATTERN, Section
from serried.configs.schema.run_config import CHOSEN, base_schema, chosen_in, registered_sections
from serried.configs.schema.sections import RunConfig

_WORDS = {
    "integer": ("a whole number", "8"),
    "number": ("a number", "0.1"),
    "boolean": ("true or false", "true"),
    "string": ("text", "some-name"),
    "array": ("a list of two numbers", "[0.9,0.95]"),
    "integers": ("a list of whole numbers", "[1,2]"),
    "numbers": ("a list of numbers", "[1.0,1.5]"),
    "texts": ("a list of strings", "[a,b]"),
    "object": ("a section", "null"),
    "mapping": ("a mapping of names to values", "{name: value}"),
    "value": ("text, a number, true or false, null, or a list of these", "true"),
}

_LISTS = ("array", "texts", "integers", "numbers")
_NULL = {"type": "null"}


@functools.cache
def key_notes() -> dict[str, Any]:
    """Return the content of ``key_notes.yaml``: names that other frameworks use, and examples of values."""
    return read_yaml(Path(__file__).parents[1] / "key_notes.yaml")


@dataclass(frozen=True)
class Key:
    """One key of the config.

    Its JSON Schema is generated on first use. For all keys this takes as long as composing a config, and most runs need
    only a few.
    """

    path: str
    """Full dotted name, such as ``trainer.steps``."""
    section: type[Section]
    """Section that declares the key."""
    field_name: str
    """Name of the field in this section. It differs from the last part of ``path`` if the field has an alias."""
    one_of: tuple[str, ...] = ()
    """Allowed values, if the schema does not contain them; else empty."""
    is_entry: bool = False
    """Whether the key is an entry of a mapping field."""

    @property
    def kind(self) -> str:
        """Kind of the values of the key:

        - ``integer``, ``number``, ``boolean``, ``string`` or ``array``: JSON type
        - ``integers``, ``numbers`` or ``texts``: list of any length
        - ``object``: section that may be null
        - ``mapping``: values under names that the user chooses
        - ``value``: entry of a mapping whose values have no common JSON type
        """
        if is_mapping(self.annotation):
            return str(self._field.get("type", "value")) if self.is_entry else "mapping"
        if "$ref" in self._field and _section_in(self.annotation)[0]:
            return "object"
        lists = {"string": "texts", "integer": "integers", "number": "numbers"}
        return lists.get(self._field.get("items", {}).get("type"), str(self._field["type"]))

    @property
    def choices(self) -> tuple[str, ...]:
        """Allowed values, if there are only a few; else empty."""
        const = [self._field["const"]] if "const" in self._field else []
        return self.one_of or tuple(self._field.get("enum", const))

    @property
    def nullable(self) -> bool:
        return _NULL in self._alternatives

    @property
    def takes_list(self) -> bool:
        """Whether the value may be a list."""
        return any(schema.get("type") == "array" for schema in self._alternatives)

    @property
    def bounds(self) -> str:
        """Allowed range in words, such as ``at least 1``; empty if there is none."""
        return _bounds(self._field)

    @property
    def word(self) -> str:
        """Word that is allowed in place of a number, such as ``auto``; empty if there is none."""
        others = (schema for schema in self._alternatives if schema is not self._field)
        return next((schema["const"] for schema in others if "const" in schema), "")

    @property
    def purpose(self) -> str:
        """Description of the field, from its ``Field`` or its docstring, on one line."""
        description = self.section.model_fields[self.field_name].description or ""
        return " ".join(description.split()) or self.section.purposes().get(self.field_name, "")

    @property
    def is_free_text(self) -> bool:
        """Whether any text is allowed as the value."""
        return self.kind == "string" and not self.choices

    def may_take(self, value: str) -> bool:
        """Return whether ``value``, as typed, has the type of the key. The range is not checked."""
        if value in ("", "null", self.word) or "${" in value:
            return bool(self.nullable or value != "null")
        if self.takes_list and value.startswith("["):
            return True
        if self.kind in _LISTS:
            return False
        if self.kind == "boolean":
            return value.lower() in ("true", "false")
        if self.kind in ("integer", "number"):
            return value[0] in "+-.0123456789"
        return not self.choices or value in self.choices

    @property
    def expected(self) -> str:
        """Description of an allowed value, to follow the words "is not"."""
        words = f"one of {', '.join(self.choices)}" if self.choices else _WORDS[self.kind][0]
        lists = [_WORDS["texts"][0]] * (self.takes_list and self.kind not in _LISTS)
        return " or ".join([words, *lists, *filter(None, [self.word]), *["null"] * self.nullable])

    @property
    def override(self) -> str:
        """Example override to paste."""
        return self.example.partition(", ")[0]

    @property
    def example(self) -> str:
        """Example override to paste into a shell, possibly followed by other values."""
        made_up = self.choices[0] if self.choices else _WORDS[self.kind][1]
        values = str(key_notes()["examples"].get(self.path, made_up))
        first, *others = values.split(", ")
        return ", ".join([shlex.quote(f"{self.path}={first}"), *others])

    @property
    def annotation(self) -> Any:
        """Type of the field."""
        return self.section.model_fields[self.field_name].annotation

    @property
    def _field(self) -> dict[str, Any]:
        return next(schema for schema in self._alternatives if schema != _NULL)

    @property
    def _alternatives(self) -> list[dict[str, Any]]:
        """JSON Schema of each type that the value may have."""
        found = _types(self.section, self.field_name)
        if not self.is_entry:
            return found
        entry = found[0].get("additionalProperties")
        return list(entry.get("anyOf", [entry])) if isinstance(entry, dict) else [{}]  # {}: any value


@functools.cache
def _types(section: type[Section], name: str) -> list[dict[str, Any]]:
    field = section.model_fields[name]
    # From a model, not a TypeAdapter, which would inline an Enum, so that it would look like a text.
    alone: dict[str, Any] = {name: (field.annotation, field)}
    (described,) = create_model("Config", __base__=Section, **alone).model_json_schema()["properties"].values()
    return list(described.get("anyOf", [described]))


_NAMED_SOURCES = {"data.sources", "data.validation"}

NAME = "NAME"
"""Placeholder in a path for a name that the user chooses."""


class Keys(dict[str, Key]):
    """Keys by full dotted name.

    Keys below a name that the user chooses, such as ``data.sources.web.path``, are found under any name, but not
    listed.
    """

    def __init__(self) -> None:
        self.named: dict[str, dict[str, Key]] = {}
        """Keys of sections with user-chosen names: parent section -> keys by last part. Their paths contain
        ``NAME``."""

    def __contains__(self, path: object) -> bool:
        return super().__contains__(path) or self._found(path) is not None

    def __missing__(self, path: str) -> Key:
        if found := self._found(path):
            return found
        raise KeyError(path)

    def get(self, path: str, default: Any = None) -> Any:
        return super().get(path) or self._found(path) or default

    def _found(self, path: object) -> Key | None:
        above, _, last = str(path).rpartition(".")
        section, _, name = above.rpartition(".")
        key = self.named.get(section, {}).get(last)
        if key and is_name(name):
            return replace(key, path=str(path))
        mapping: Key | None = self.get(above) if above else None
        if mapping and not mapping.is_entry and is_mapping(mapping.annotation):
            return replace(mapping, path=str(path), is_entry=True)
        return None


def is_mapping(annotation: Any) -> bool:
    """Return whether a field of this type maps names that the user chooses to plain values."""
    return get_origin(annotation) is dict and _section_in(annotation)[0] is None


def is_name(text: str) -> bool:
    """Return whether ``text`` is a valid name for a source or a validation set."""
    return re.fullmatch(NAME_PATTERN, text) is not None


def all_keys() -> Keys:
    """Return every key that a run may have, by full dotted name, for all registered optimizers, schedules, ..."""
    return _keys_of_any(base_schema(), registered_sections())


def own_keys(group: str, name: str) -> dict[str, Key]:
    """Return the keys that only the optimizer (schedule, ...) ``name`` has."""
    registry = CHOSEN[group]
    found = _keys_of(registry.get(name).section, f"{group}.")
    return {path: key for path, key in found.items() if path.split(".")[1] not in registry.base.model_fields}


def check_fields(section: type[Section], name: str) -> None:
    """Raise ``UserError`` if a field of the user-defined ``section``, called ``name``, cannot be a key."""
    keys = _keys_of(section, "")
    for key in itertools.chain(keys.values(), *(named.values() for named in keys.named.values())):
        try:
            _ = key.kind
        except Exception as error:
            kind = getattr(key.annotation, "__forward_arg__", getattr(key.annotation, "__name__", key.annotation))
            raise UserError(
                f"{name}.{key.path}: {kind} is not supported as the type of a key; use int, float, bool, str, Path, "
                "Literal, a list of numbers or strings, or a serried.Section"
            ) from error


def readers(path: str) -> list[str]:
    """Return the names of the optimizers (schedules, ...) whose section has the key ``path``; empty for other keys."""
    group, _, last = path.partition(".")
    chosen = chosen_in(base_schema())
    entries = chosen[group].entries() if group in chosen else []
    if is_source(path.rpartition(".")[0]):
        return [entry.name for entry in entries if path.rpartition(".")[2] in entry.own.model_fields]
    return [entry.name for entry in entries if last.partition(".")[0] in entry.section.model_fields]


def is_source(path: str) -> bool:
    """Return whether ``path`` is a source of a mixture or a validation set, under a name that the user chose."""
    above, _, name = path.rpartition(".")
    return above in _NAMED_SOURCES and is_name(name)


@functools.cache
def _keys_of_any(schema: type[RunConfig], sections: tuple[tuple[str, type[Section]], ...]) -> Keys:
    for _, section in sections:
        if not section.__module__.startswith("serried."):  # built-in sections are known to be valid
            check_fields(section, section.__name__)
    own, registered = _keys_of(schema, ""), [_keys_of(section, f"{group}.") for group, section in sections]
    of_group: dict[str, dict[str, Key]] = {}
    for path, key in itertools.chain.from_iterable(found.items() for found in registered):
        of_group.setdefault(path.partition(".")[0], {}).setdefault(path, key)
    keys = Keys()
    for path, key in own.items():
        for other, found_key in of_group.pop(path.partition(".")[0], {}).items():
            keys.setdefault(other, found_key)
        keys.setdefault(path, key)
    for found in [own, *registered]:
        keys.named = found.named | keys.named
    for named in _NAMED_SOURCES & keys.named.keys():
        inner = keys.named[named] = dict(keys.named[named])
        for name in names_of_singles():
            for key in _keys_of(CHOSEN["data"].get(name).own, f"{named}.{NAME}.").values():
                inner.setdefault(key.path.rpartition(".")[2], key)
        inner["name"] = replace(inner["name"], one_of=tuple(names_of_singles()))
    return keys


@functools.cache
def _keys_of(model: type[Section], above: str) -> Keys:
    keys = Keys()

    def walk(declaring: type[Section], prefix: str, found: dict[str, Key]) -> None:
        for name, field in declaring.model_fields.items():
            if any(type(marker) is SkipJsonSchema for marker in field.metadata):
                continue
            alias = field.validation_alias if isinstance(field.validation_alias, str) else name
            path, (below, is_named) = prefix + alias, _section_in(field.annotation)
            if below and is_named:
                named: dict[str, Key] = {}
                walk(below, f"{path}.{NAME}.", named)
                keys.named[path] = {key.rpartition(".")[2]: each for key, each in named.items()}
                continue
            if below is None or NoneType in get_args(field.annotation):
                found[path] = Key(path, declaring, name)
            if below is not None:
                walk(below, f"{path}.", found)

    walk(model, above, keys)
    return keys


def _section_in(annotation: Any) -> tuple[type[Section] | None, bool]:
    """Return the section class in the type of a field, and whether the field maps names that the user chooses to
    sections.

    In a union, the first type other than None decides.
    """
    origin, types = get_origin(annotation), get_args(annotation)
    if origin in (Union, UnionType):
        return _section_in(next(kind for kind in types if kind is not NoneType))
    is_named = origin in (dict, Mapping)
    kind = types[1] if is_named else annotation
    kind = get_args(kind)[0] if get_origin(kind) is Annotated else kind
    return (kind, is_named) if isclass(kind) and issubclass(kind, Section) else (None, False)


def all_sections() -> list[str]:
    """Return the dotted names of all sections."""
    return list(dict.fromkeys(path.rpartition(".")[0] for path in all_keys() if "." in path))


def is_section(path: str) -> bool:
    """Return whether ``path`` has keys or sections below it."""
    above, _, name = path.rpartition(".")
    return path in all_sections() or path in all_keys().named or (above in all_keys().named and is_name(name))


def keys_of(section: str) -> list[str]:
    """Return the full names of the keys directly below a section."""
    above, _, name = section.rpartition(".")
    if above in all_keys().named and is_name(name):
        return [f"{section}.{last}" for last in all_keys().named[above]]
    if section in all_keys().named:
        return keys_of(f"{section}.{NAME}")
    return [path for path in all_keys() if path.rpartition(".")[0] == section]


def _bounds(field: dict[str, Any]) -> str:
    """Format ``{"minimum": 0, "exclusiveMaximum": 1}`` as ``at least 0 and below 1``."""
    limits = (  # inside a nullable field pydantic 2 writes `ge` where it writes `minimum` elsewhere
        ("at least", field.get("minimum", field.get("ge"))),
        ("above", field.get("exclusiveMinimum", field.get("gt"))),
        ("at most", field.get("maximum", field.get("le"))),
        ("below", field.get("exclusiveMaximum", field.get("lt"))),
    )
    return " and ".join(f"{words} {_short(limit)}" for words, limit in limits if limit is not None)


def _short(limit: float) -> str:
    """Format ``10**15`` as ``1e15``. A number that this would round is written in full."""
    short = f"{limit:g}".replace("e+", "e").replace("e0", "e").replace("e-0", "e-")
    return short if float(short) == limit else str(limit)
