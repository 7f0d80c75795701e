"""Task classes: their declaration, which composing a configuration needs, and the task of a run."""

import inspect
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from hydra.core.override_parser.types import Quote, QuotedString

from serried.configs.errors import UserError
from serried.configs.messages.keys import check_fields
from serried.configs.schema.declaration import BUILT_IN, Declaration, declared
from serried.configs.schema.fields import Section
from serried.configs.schema.registry import is_built_in_language_task, tasks
from serried.configs.schema.sections import RunConfig

if TYPE_CHECKING:
    from serried.trainer.task import RunTask, Task


def declaration(given: "Task | type[Task]") -> Declaration:
    """Return the declaration of a task, given its class or an instance.

    Raises:
        UserError: ``given`` is not a task, or its ``Config`` is not a section.
    """
    from serried.trainer.task import Task

    task = given if inspect.isclass(given) else type(given)
    if not issubclass(task, Task):
        what = given.__name__ if inspect.isclass(given) else f"{given!r}"
        raise UserError(f"{what} is not a task; give a subclass of serried.Task, or an instance of one")
    if not (inspect.isclass(task.Config) and issubclass(task.Config, Section)):
        raise UserError(f"{task.__name__}.Config is not a section; write: class Config(serried.Section)")
    task.Config.model_rebuild(raise_errors=False, _types_namespace=vars(sys.modules[task.__module__]))
    check_fields(task.Config, f"{task.__name__}.Config")
    make = given if inspect.isclass(given) else lambda: given
    return Declaration(task.task_name(), task.Config, task.sections, words(task.defaults), make)


def installed(name: str) -> Declaration:
    """Return the declaration of the built-in or installed task ``name``. Raises ``UserError`` if there is none."""
    return BUILT_IN if is_built_in_language_task(name) else declaration(tasks.get(name).load())


def make_task(config: RunConfig, make: "Callable[[], Task]") -> "RunTask":
    """Create a task with ``make`` and configure it for a run of ``config``."""
    from serried.trainer.checkpoint.resume import resumed_checkpoints
    from serried.trainer.task import task_for_run

    task = task_for_run(make())
    task.configure(config)
    task.resumed = partial(resumed_checkpoints, config)
    return task


def task_of(config: RunConfig) -> "RunTask":
    """Return the task for a run of ``config``: the declared task, or the built-in or installed task of
    ``task.name``."""
    task = make_task(config, declared().task or tasks.get(config.task.name).load())
    _check_text(config, task)
    return task


def _check_text(config: RunConfig, task: "RunTask") -> None:
    """Raise ``UserError`` for keys that apply only to text models."""
    from serried.trainer.task import TextTask

    trainer, name = config.trainer, type(task).__name__
    if isinstance(task, TextTask) or hasattr(config, "model"):
        return
    if trainer.sample_tokens:
        raise UserError(
            f"trainer.sample_tokens={trainer.sample_tokens} but {name} does not generate text; leave it out"
        )
    if trainer.evaluate:
        raise UserError(f"trainer.evaluate needs a text model, but {name} is not a serried.TextTask; leave it out")


def words(overrides: Iterable[str] | Mapping[str, Any]) -> list[str]:
    """Convert ``overrides``, a nested dict or ``key=value`` strings, to ``key=value`` strings."""
    if not isinstance(overrides, Mapping):
        given = list(overrides) if isinstance(overrides, Iterable) and not isinstance(overrides, str) else overrides
        if not isinstance(given, list) or not all(isinstance(word, str) for word in given):
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
        return f"[{','.join(_text(item) for item in value)}]"
    text = str(value)
    return QuotedString(text, Quote.double).with_quotes() if re.search("[=,]", text) else text
