"""Distributed training with the same loss curve on every parallel layout."""

from importlib import import_module
from typing import Any

_HOMES = {
    "Task": "serried.trainer.task",
    "TextTask": "serried.trainer.task",
    "Inputs": "serried.parallel.plan",
    "LossTerms": "serried.parallel.plan",
    "ParallelPlan": "serried.parallel.plan",
    "Section": "serried.configs.schema.sections",
    "main": "serried.api",
    "fit": "serried.api",
    "load_model": "serried.api",
    "register_model": "serried.configs.schema.registry",
    "register_optimizer": "serried.configs.schema.registry",
}
__all__ = list(_HOMES)


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used: ``import serried`` alone does not import torch."""
    if name not in _HOMES:
        raise AttributeError(f"module 'serried' has no attribute {name!r}; it has {', '.join(_HOMES)}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return list(_HOMES)
