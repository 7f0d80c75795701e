"""From a task class, and overrides as Python has them, to what composing a configuration takes."""

import inspect
import re
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from hydra.core.override_parser.types import Quote, QuotedString

from serried.configs.declaration import Declaration
from serried.configs.errors import UserError
from serried.configs.schema import Section

if TYPE_CHECKING:
    from serried.trainer.task import Task


def declaration(task: "type[Task]") -> Declaration:
    """Return what composing the configuration needs to know of a task class.

    Raises:
        UserError: ``task`` is not a task, or its ``Config`` is not a section.
    """
    from serried.trainer.task import Task

    if not (inspect.isclass(task) and issubclass(task, Task)):
        raise UserError(
            f"{getattr(task, '__name__', task)} is not a task; give a subclass of serried.Task, or an instance"
        )
    if not (inspect.isclass(task.Config) and issubclass(task.Config, Section)):
        raise UserError(f"{task.__name__}.Config is not a section; write: class Config(serried.Section)")
    return Declaration(task.task_name(), task.Config, task.sections, words(task.defaults), task)


def words(overrides: Iterable[str] | Mapping[str, Any]) -> list[str]:
    """Return ``overrides``, a nested dict or ``key=value`` strings, as ``key=value`` strings."""
    if not isinstance(overrides, Mapping):
        given = overrides if isinstance(overrides, str) else list(overrides)
        if isinstance(given, str) or not all(isinstance(word, str) for word in given):
            raise UserError(f"overrides must be a list of key=value strings or a dict, not {given!r}")
        return given
    found: list[str] = []
    for key, value in overrides.items():
        if isinstance(value, Mapping):
            found += [f"{key}.{word}" for word in words(value)]
        else:
            found.append(f"{key}={_text(value)}")
    return found


def _text(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, list | tuple):
        return f"[{','.join(_text(each) for each in value)}]"
    text = str(value)
    return QuotedString(text, Quote.double).with_quotes() if re.search("[=,]", text) else text
