"""Declaration of a task: all that composing a configuration needs, without importing torch."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any, NamedTuple

from serried.configs.schema.fields import Section

FOLDER = Path(__file__).resolve().parents[1]
"""The YAML files that are shipped."""


class Declaration(NamedTuple):
    """A task class as the configuration sees it. Without arguments: the built-in tasks of ``train.py``."""

    name: str = ""
    """Name of the task, which is the run's name unless the user gives another."""
    section: type[Section] = Section
    """Fields of the section ``task``, apart from its name."""
    sections: tuple[str, ...] = ("model", "data")
    """Sections of the built-in language models that it reads."""
    defaults: Sequence[str] = ()
    """Overrides that the command line overrides, as ``key=value``."""
    task: Any = None
    """The class, or a function that returns the user's instance; None: the built-in task that the configuration
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
    """Return the task whose configuration is composed: it decides which keys there are."""
    return _declared.get()


@contextmanager
def declaring(declaration: Declaration) -> Iterator[None]:
    """Context manager in which configurations have the keys of ``declaration``."""
    token = _declared.set(declaration)
    try:
        yield
    finally:
        _declared.reset(token)
