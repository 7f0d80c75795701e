"""The flag ``--callback``, which adds callbacks to ``train.py`` or a user's script."""

import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from serried.configs.errors import UserError
from serried.configs.similar_names import nearest

_FLAG = "--callback"
_GROUP = "serried.callbacks"
"""Group of entry points of installed packages. An installed callback runs only if it is named."""


def callback_names(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Remove every ``--callback NAME`` from ``argv``. Return the other arguments, and the names.

    Raises:
        UserError: There is no such module, or no installed callback of that name.
    """
    words: list[str] = []
    names: list[str] = []
    left = list(argv)
    while left:
        word = left.pop(0)
        if word == _FLAG:
            if not left:
                raise UserError(f"{_FLAG} needs a value: {_FLAG} package.module:Class")
            names.append(left.pop(0))
        elif word.startswith(f"{_FLAG}="):
            names.append(word.removeprefix(f"{_FLAG}="))
        else:
            words.append(word)
    for name in names:
        _check(name)
    return words, names


def load_callback(name: str) -> Any:
    """Import the callback ``name``: ``package.module:Class``, or an entry point of the group ``serried.callbacks``.

    Raises:
        UserError: The callback cannot be imported, or the module has no such class.
    """
    module, _, attribute = name.partition(":")
    try:
        loaded: Any = import_module(module) if attribute else _installed()[name].load()
    except Exception as error:
        raise _not_importable(name, error) from error
    if not attribute:
        return loaded
    if not hasattr(loaded, attribute):
        raise UserError(f"{_FLAG} {name}: module {module} has no {attribute}")
    return getattr(loaded, attribute)


def _check(name: str) -> None:
    """Raise ``UserError`` if there is no such module or installed callback.

    Only parent packages are imported, not the module.
    """
    module, _, attribute = name.partition(":")
    if module and attribute:
        # train.py may be in a checkout and callbacks.py in the current folder.
        if (here := str(Path.cwd())) not in sys.path:
            sys.path.append(here)
        try:
            is_there = find_spec(module) is not None
        except Exception as error:
            is_missing = isinstance(error, ModuleNotFoundError) and f"{module}.".startswith(f"{error.name}.")
            if not (is_missing or isinstance(error, ValueError)):
                raise _not_importable(name, error) from error
            is_there = False
        if not is_there:
            raise UserError(
                f"{_FLAG} {name}: cannot find the module {module}; run the command in the folder that contains it, or "
                "install its package"
            )
    elif name not in (installed := _installed()):
        near = nearest(name, list(installed))
        hint = f"did you mean {_FLAG} {near[0]}? " if near else ""
        names = f", or the name of an installed callback ({', '.join(installed)})" if installed else ""
        raise UserError(
            f"{_FLAG} {name}: no callback with this name is installed; {hint}use {_FLAG} package.module:Class{names}"
        )


def _not_importable(name: str, error: Exception) -> UserError:
    reason = f"{type(error).__name__}: {error}".splitlines()[0]
    return UserError(f"{_FLAG} {name} cannot be imported: {reason}")


def _installed() -> dict[str, EntryPoint]:
    return {point.name: point for point in entry_points(group=_GROUP)}
