"""Renamed keys. Configs of earlier versions are read with the current names."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from serried.configs.plain_data import read_yaml

RENAMED = {
    "parallel.schedule": "parallel.pipeline_schedule",
    "precision.recipe": "precision.scaling",
    "trainer.patience": "trainer.early_stopping_patience",
    "trainer.quantize_aware": "precision.quantize_aware",
    "trainer.workers": "data.workers",
}
"""Maps old keys to new keys. An old key on the command line is an error that names the new key."""


def with_new_names(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``config``, a nested dict that a run of any version wrote, with each renamed key under its new name."""
    renamed = {name: dict(values) if isinstance(values, dict) else values for name, values in config.items()}
    for old, new in RENAMED.items():
        section, _, key = old.partition(".")
        new_section, _, new_key = new.partition(".")
        if isinstance(renamed.get(section), dict) and key in renamed[section]:
            value = renamed[section].pop(key)
            if isinstance(target := renamed.setdefault(new_section, {}), dict):
                target.setdefault(new_key, value)
    return renamed


def read_saved_config(path: Path) -> dict[str, Any]:
    """Return the config in ``path``, the ``config.yaml`` of a run folder.

    Raises:
        OSError: it cannot be read.
        NotPlainData: it is not a mapping within the limits.
    """
    return with_new_names(read_yaml(path))


def read_saved_config_if_there(path: Path) -> dict[str, Any]:
    """Return the config in ``path``, the ``config.yaml`` of a run folder; an empty one if it cannot be read."""
    try:
        return read_saved_config(path)
    except (OSError, ValueError):
        return {}
