"""Declaration of a task: everything that composing a configuration needs, without importing torch."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any, NamedTuple

from serried.configs.schema.fields import Section

FOLDER = Path(__file__).resolve().parents[1]
"""Folder of the shipped YAML files."""


class Declaration(NamedTuple):
    """Declared task, as composing sees it. Without arguments: the built-in tasks of ``train.py``."""

    name: str = ""
    """Name of the task, and of the run unless the user sets another."""
    section: type[Section] = Section
    """Fields of the section ``task``, apart from its name."""
    sections: tuple[str, ...] = ("model", "data")
    """Sections of the built-in language models that the task uses."""
    defaults: Sequence[str] = ()
    """Default overrides of the task, as ``key=value``. The command line takes precedence."""
    task: Any = None
    """Task class, or a function that returns the user's instance; None: the built-in task that the configuration
    names."""
    config_dirs: tuple[Path, ...] = ()
    """Folders of the user's own YAML files."""
    callbacks: tuple[Any, ...] = ()
    """Callbacks of the run: classes, instances, or names given by ``--callback``."""
    shipped: Path = FOLDER
    """Folder of the YAML files that composition starts from."""

    @property
    def root(self) -> str:
        """Name of the YAML file that composition starts from."""
        return "train" if self.sections else "task"

    @property
    def folders(self) -> tuple[Path, ...]:
        """All folders with YAML files."""
        return (self.shipped, *self.config_dirs)


BUILT_IN = Declaration()
_declared: ContextVar[Declaration] = ContextVar("declared", default=BUILT_IN)


def declared() -> Declaration:
    """Return the declared task, which determines the keys of the configuration."""
    return _declared.get()


@contextmanager
def declaring(declaration: Declaration) -> Iterator[None]:
    """Context manager in which configurations have the keys of ``declaration``."""
    token = _declared.set(declaration)
    try:
        yield
    finally:
        _declared.reset(token)
