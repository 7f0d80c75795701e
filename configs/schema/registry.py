"""Registries of optimizers, schedules, model families and tasks, which a config chooses by name.

The registry of data sources is in ``configs/schema/data.py``.

An entry has a name, its own config section, and a function that loads the implementation. Composing a config needs only
the section and never imports torch. A built-in entry is registered by a module next to its code, such as
``recipes/models/families/llama_config.py`` for ``llama.py``; there is no central list. Installed packages add entries
through entry points, user scripts through ``serried.register_optimizer`` and ``serried.register_model``.
"""

import functools
import inspect
import pkgutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import cached_property, partial
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from typing import Any, TypeVar

from pydantic import create_model

from serried.configs.errors import UserError
from serried.configs.schema.fields import Section
from serried.configs.schema.models import ModelSection
from serried.configs.schema.sections import OptimSection, ScheduleSection, TaskSection
from serried.configs.similar_names import nearest

_Built = TypeVar("_Built", bound=Callable[..., Any])


@dataclass(frozen=True)
class Entry:
    """Registered entry."""

    name: str
    own: type[Section]
    """Section that was registered."""
    section: type[Section]
    """Section of ``RunConfig`` with the keys of the entry and the keys that all entries have."""
    load: Callable[[], Any]
    """Function that imports and returns the implementation."""


@dataclass
class Registry:
    """Named entries of one kind."""

    kind: str
    """Description for messages, such as ``optimizer``."""
    group: str
    """Config group, which is also the section of ``RunConfig``."""
    entry_point_group: str
    base: type[Section] = Section
    """Section with the keys that all entries have."""
    key: str = "name"
    """Key of the section that holds the name."""
    built_in: Sequence[str] = ()
    """Modules that register the built-in entries, as ``package.*_config``. They are imported when an entry is first
    looked up, like the entry points of installed packages."""
    first: str = ""
    """Entry that is listed first; the others follow by name."""
    _entries: dict[str, Entry] = field(default_factory=dict)

    def register(self, name: str, section: type[Section], load: Callable[[], Any] | str) -> None:
        """Add an entry. Raises ``UserError`` if there is another entry of this name.

        Args:
            name: Name in a config.
            section: Section with the keys of the entry.
            load: Function that imports and returns the implementation, or the name of the implementation, as
                ``package.module:Class``.
        """
        self._load_built_in()
        own = section
        if name in self._entries:
            raise UserError(f"{self.kind} {name} is registered twice; give one of the two another name")
        if section is Section:
            section = self.base
        elif not issubclass(section, self.base):  # only its own keys: add the keys that all entries have
            section = create_model(
                section.__name__, __base__=(section, self.base), __doc__=section.__doc__, __module__=section.__module__,
                __cls_kwargs__={"use_attribute_docstrings": False},  # there is no source, and searching for it is slow
            )  # fmt: skip
        self._entries[name] = Entry(name, own, section, partial(_named, load) if isinstance(load, str) else load)

    def registering(self, name: str, section: type[Section]) -> Callable[[_Built], _Built]:
        """Return a decorator that registers the decorated function or class."""

        def add(built: _Built) -> _Built:
            self.register(name, section, lambda: built)
            return built

        return add

    def names(self) -> list[str]:
        """Return the names of all entries, including entries of installed packages, in the order of ``entries``."""
        self._load_built_in()
        return sorted({*self._entries, *self._installed}, key=self._rank)

    def entries(self) -> list[Entry]:
        """Return the entries that imported packages have registered: ``first``, then the others by name."""
        self._load_built_in()
        return [self._entries[name] for name in sorted(self._entries, key=self._rank)]

    def is_found_elsewhere(self, name: str) -> bool:
        """Return whether other processes have the entry ``name``: it is built in, or from an installed package."""
        self._load_built_in()
        is_ours = name in self._entries and self._entries[name].own.__module__.startswith("serried.")
        return is_ours or name in self._installed

    def _rank(self, name: str) -> tuple[bool, str]:
        return name != self.first, name

    def get(self, name: str) -> Entry:
        """Return entry ``name``. The package that provides it is imported if needed. Raises ``UserError`` if there is
        no such entry."""
        self._load_built_in()
        if name not in self._entries and name in self._installed:
            self._import(self._installed[name])
        if name not in self._entries:
            near = nearest(name, self.names())
            hint = f"did you mean {self.group}={near[0]}? " if near else ""
            raise UserError(f"no {self.kind} {name!r} is registered; {hint}registered: {', '.join(self.names())}")
        return self._entries[name]

    @cached_property
    def _installed(self) -> dict[str, EntryPoint]:
        return {point.name: point for point in _entry_points().select(group=self.entry_point_group)}

    def _import(self, point: EntryPoint) -> None:
        try:
            point.load()
        except Exception as error:
            raise UserError(
                f"{self.kind} {point.name}: {point.value} of package {point.dist.name if point.dist else '?'} "
                f"cannot be imported: {error}; update or uninstall the package"
            ) from error

    def _load_built_in(self) -> None:
        patterns, self.built_in = self.built_in, ()
        for path in patterns:
            package_name, _, pattern = path.rpartition(".")
            package = import_module(package_name)
            for module in pkgutil.iter_modules(package.__path__):
                if fnmatchcase(module.name, pattern):
                    import_module(f"{package_name}.{module.name}")


def _named(path: str) -> Any:
    """Import and return the object that ``path`` names, as ``package.module:Class``."""
    module, _, name = path.partition(":")
    return getattr(import_module(module), name)


@functools.cache
def _entry_points() -> Any:
    """Return the entry points of all installed packages. Cached, since reading them takes 15 ms."""
    return entry_points()


optimizers = Registry(
    "optimizer",
    "optim",
    "serried.optimizers",
    OptimSection,
    built_in=("serried.trainer.optim.algorithms.*_config",),
    first="adamw",
)
schedules = Registry(
    "schedule", "schedule", "serried.schedules", ScheduleSection, built_in=("serried.trainer.optim.schedules.*",)
)
models = Registry(
    "model family", "model", "serried.models", ModelSection, key="family",
    built_in=("serried.recipes.models.families.*_config", "serried.recipes.models.hugging_face.*_config"),
    first="llama",
)  # fmt: skip
tasks = Registry(
    "task", "task", "serried.tasks", TaskSection,
    built_in=("serried.recipes.text.*_config", "serried.recipes.classification.*_config"),
    first="causal_lm",
)  # fmt: skip


def task_of_model(name: str) -> Any:
    """Return the class of the task that loads a model trained by the task ``name``: a task without a teacher."""
    opened_as = getattr(tasks.get(name).own, "opened_as", None)
    return tasks.get(opened_as or name).load()


def is_built_in_language_task(name: str) -> bool:
    """Return whether ``name`` is a built-in task with the sections ``model`` and ``data``."""
    section = tasks.get(name).own if name in tasks.names() else Section
    return issubclass(section, TaskSection) and section.__module__.startswith("serried.")


def register_optimizer(name: str, *, section: type[Section] = OptimSection) -> Callable[[_Built], _Built]:
    """Register ``build(param_groups, section) -> torch.optim.Optimizer`` as ``optim=NAME``; a decorator.

    Args:
        name: Value of ``optim`` on the command line.
        section: Keys of the optimizer, in addition to the common ones (``lr``, ``weight_decay``, ``groups``).

    Returns:
        A decorator that returns the function unchanged.

    Raises:
        UserError: The name is registered already.

    Example::

        @serried.register_optimizer("my_sgd")
        def build(param_groups, section):
            return torch.optim.SGD(param_groups, lr=section.lr)
    """
    return optimizers.registering(name, section)


def takes(section: OptimSection, argument: str) -> bool:
    """Return whether the build function of the optimizer has the parameter ``argument``.

    These parameters are ``matrices`` and ``sums``, which communicate between ranks, and ``rounding``, for weights in
    bf16.
    """
    return argument in inspect.signature(optimizers.get(section.name).load()).parameters


def register_schedule(name: str, *, section: type[Section] = ScheduleSection) -> Callable[[_Built], _Built]:
    """Register ``rate(step, steps, peak, section) -> float`` as ``schedule=NAME``; a decorator.

    The function is called for the steps after the warm-up, up to and including ``steps``.

    Args:
        name: Value of ``schedule`` on the command line.
        section: Keys of the schedule, in addition to ``warmup_steps`` and ``min_lr_ratio``.

    Returns:
        A decorator that returns the function unchanged.

    Raises:
        UserError: The name is registered already.

    Example::

        @serried.register_schedule("root")
        def root(step, steps, peak, section):
            return peak * (max(1, section.warmup_steps) / step) ** 0.5
    """
    return schedules.registering(name, section)


def register_model(name: str, *, section: type[Section] = ModelSection) -> Callable[[_Built], _Built]:
    """Register a ``ModelFamily``, or a function ``build(section, vocab_size) -> nn.Module``, as ``model.family=NAME``.

    Use it as a decorator. The module that a function returns maps ``tokens`` [B, S] to logits [B, S, V].

    Args:
        name: Value of ``model.family``.
        section: Keys of the family, in addition to the common ones (``vocab_size``, ``max_sequence_length``, ...).

    Returns:
        A decorator that returns the class or function unchanged.

    Raises:
        UserError: The name is registered already.

    Example::

        @serried.register_model("bigram")
        def build(section, vocab_size):
            return nn.Sequential(nn.Embedding(vocab_size, 64), nn.Linear(64, vocab_size))
    """
    return models.registering(name, section)
