"""Distributed training with the same loss curve on every parallel layout."""

from importlib import import_module
from pathlib import Path
from typing import Any

_HOMES = {
    "Task": "serried.trainer.task.task",
    "TextTask": "serried.trainer.task.text_task",
    "Callback": "serried.trainer.callbacks",
    "Run": "serried.trainer.callbacks",
    "Event": "serried.trainer.callbacks",
    "Inputs": "serried.parallel.plan",
    "LossTerms": "serried.parallel.plan",
    "ParallelPlan": "serried.parallel.plan",
    "Section": "serried.configs.schema.fields",
    "main": "serried.api",
    "fit": "serried.api",
    "load_model": "serried.api",
    "Result": "serried.api",
    "UserError": "serried.configs.errors",
    "TrainingFailed": "serried.configs.errors",
    "TrainingStopped": "serried.configs.errors",
    "register_model": "serried.configs.schema.registry",
    "register_optimizer": "serried.configs.schema.registry",
    "register_schedule": "serried.configs.schema.registry",
    "register_source": "serried.configs.schema.data",
    "ModelFamily": "serried.recipes.models.family",
    "CausalLM": "serried.recipes.text.causal_lm",
}
"""Public names and the modules that define them."""
__all__ = list(_HOMES)


def _check_links(folder: Path) -> None:
    """Raise ``ImportError`` if links to top-level folders are text files, as in a Windows clone without symlinks."""
    broken = [
        path.name
        for path in folder.iterdir()
        if not path.suffix and not path.is_dir() and (path.is_symlink() or path.read_bytes().startswith(b"../"))
    ]
    if broken:
        raise ImportError(
            f"{', '.join(sorted(broken))} in {folder} must be links to the top-level folders of the checkout, but are "
            "broken; on Windows, clone inside WSL 2 (or in developer mode with git clone -c core.symlinks=true); if "
            "the checkout is a copy, copy it with its links"
        )


_check_links(Path(__file__).parent)


def __getattr__(name: str) -> Any:
    """Import a public name on first use, so that ``import serried`` does not import torch."""
    if name not in _HOMES:
        raise AttributeError(f"module 'serried' has no attribute {name!r}; it has {', '.join(_HOMES)}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return list(_HOMES)
