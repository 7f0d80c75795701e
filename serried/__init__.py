"""Distributed training with the same loss curve on every parallel layout."""

from importlib import import_module
from typing import Any

_PUBLIC = {
    "Section": "serried.configs.schema",
    "register_model": "serried.configs.registry",
    "register_optimizer": "serried.configs.registry",
}
__all__ = list(_PUBLIC)


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used: ``import serried`` itself imports nothing, torch least of all."""
    if name not in _PUBLIC:
        raise AttributeError(f"module 'serried' has no attribute {name!r}")
    return getattr(import_module(_PUBLIC[name]), name)
