"""``RunConfig`` of one run, with the sections of the chosen optimizer, schedule, ..."""

import functools
from collections.abc import Mapping
from copy import copy
from typing import Any, TypeVar

import yaml
from pydantic import Field, create_model

from serried.configs.schema.data import TextRunConfig, sources
from serried.configs.schema.declaration import declared
from serried.configs.schema.fields import Section
from serried.configs.schema.registry import Registry, models, optimizers, schedules, tasks
from serried.configs.schema.sections import RunConfig, TaskSection

Config = TypeVar("Config", bound=RunConfig)

CHOSEN: dict[str, Registry] = {registry.group: registry for registry in (optimizers, schedules, models, sources)}
"""Registries of the sections of ``RunConfig`` whose class depends on a name, by section."""


def chosen_in(schema: type[RunConfig]) -> dict[str, Registry]:
    """Return the registries that a configuration of ``schema`` chooses from, by section."""
    annotations = {name: field.annotation for name, field in schema.model_fields.items()}
    return {
        group: registry
        for group, registry in CHOSEN.items()
        if registry.key in getattr(annotations.get(group), "model_fields", {})
    }


def run_config_class(plain: Mapping[str, Any], schema: type[Config]) -> type[Config]:
    """Return ``schema`` with the sections that the config ``plain``, as nested dicts, chooses. Raises ``UserError`` if
    a chosen name is not registered."""
    chosen = chosen_in(schema)
    names = {group: _name(plain, registry, schema) for group, registry in chosen.items()}
    sections = [(group, CHOSEN[group].get(name).section) for group, name in names.items() if name]
    chosen_here = {tasks.group: {}, **plain}  # the built-in task by default
    name = _name(chosen_here, tasks, schema) if _task_is_chosen(schema) else None
    if name and tasks.get(name).section is not TaskSection:  # a task with its own keys
        sections.append((tasks.group, tasks.get(name).section))
    return _with_sections(schema, tuple(sections))


def _task_is_chosen(schema: type[RunConfig]) -> bool:
    """Return whether the configuration chooses the task. False for a script, which declares its own."""
    return schema.model_fields[tasks.group].annotation is TaskSection


def base_schema() -> type[RunConfig]:
    """Return the ``RunConfig`` of the declared task, before names in it are resolved."""
    task = declared()
    return _base_of(task.section, task.name, bool(task.sections))


@functools.cache
def _base_of(section: type[Section], name: str, is_text: bool) -> type[RunConfig]:
    base: type[RunConfig] = TextRunConfig if is_text else RunConfig
    if section is Section and not name:
        return base
    bases = (section, TaskSection) if section is not Section else TaskSection  # a task without its own keys
    task = create_model(section.__name__, __base__=bases, __doc__=section.__doc__, name=(str, name))
    own: dict[str, Any] = {"task": (task, ...)}
    if (loading := getattr(section, "loading", None)) is not None:
        own["data"] = (loading, Field(default_factory=loading))
    return create_model(base.__name__, __base__=base, __module__=base.__module__, **own)


def check(plain: Mapping[str, Any]) -> RunConfig:
    """Validate a resolved config, given as nested dicts, as the ``RunConfig`` of the declared task.

    Raises:
        UserError: A chosen name is not registered.
        ValidationError: A value is invalid.
    """
    schema = run_config_class(plain, base_schema())
    return schema.model_validate({key: _set(key, value, schema) for key, value in plain.items()})


def _set(group: str, values: Any, schema: type[RunConfig]) -> Any:
    """Return ``values`` without nulls for keys that only other sources, optimizers, ... have.

    Such a null unsets a value from a YAML file.
    """
    if group not in chosen_in(schema) or not isinstance(values, dict):
        return values
    own: Any = schema.model_fields[group].annotation
    known = {name for entry in CHOSEN[group].entries() for name in entry.section.model_fields}
    unset = {name for name, value in values.items() if value is None and name in known - own.model_fields.keys()}
    return {name: value for name, value in values.items() if name not in unset}


def registered_sections() -> tuple[tuple[str, type[Section]], ...]:
    """Return the group and the section of each registered name. Each one replaces the field of ``RunConfig`` with that
    group's name."""
    schema = base_schema()
    chosen = [*chosen_in(schema).values(), *([tasks] if _task_is_chosen(schema) else [])]
    return tuple((registry.group, entry.section) for registry in chosen for entry in registry.entries())


def _name(plain: Mapping[str, Any], registry: Registry, schema: type[RunConfig]) -> str | None:
    section = plain.get(registry.group)
    known: Any = schema.model_fields[registry.group].annotation
    default = known.model_fields[registry.key].get_default()
    name = section.get(registry.key, default) if isinstance(section, Mapping) else None
    return name if isinstance(name, str) else None


@functools.cache
def _with_sections(schema: type[Config], sections: tuple[tuple[str, type[Section]], ...]) -> type[Config]:
    fields: dict[str, Any] = {}
    for group, section in sections:
        field = copy(schema.model_fields[group])
        if field.default_factory is not None:
            field.default_factory = section
        fields[group] = (section, field)
    return create_model(schema.__name__, __base__=schema, __module__=schema.__module__, **fields)


def config_yaml(config: RunConfig) -> str:
    """Return the resolved config as YAML. Parsing and validating it gives an equal config."""
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False, allow_unicode=True, width=120)
