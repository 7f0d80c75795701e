"""Which trackers a run turns on, and whether they are installed. Imports none of them."""

from importlib.util import find_spec
from pathlib import Path

from serried.configs.errors import UserError
from serried.configs.schema.sections import TrackSection

LABELS = {"wandb": "W&B", "tensorboard": "TensorBoard", "mlflow": "MLflow"}
"""Trackers by name, which is also their config key, their extra and their module."""

_OFF = {"wandb": "track.wandb=off", "tensorboard": "track.tensorboard=false", "mlflow": "track.mlflow=null"}


def asked_for(track: TrackSection) -> list[str]:
    """Return the names of the trackers that ``track`` turns on."""
    asked = {"wandb": track.wandb != "off", "tensorboard": track.tensorboard, "mlflow": track.mlflow is not None}
    return [name for name, is_asked_for in asked.items() if is_asked_for]


def missing_trackers(track: TrackSection) -> tuple[list[str], str]:
    """Return the names of the trackers that are turned on but not installed, and the advice to print."""
    missing = [name for name in asked_for(track) if find_spec(name) is None]
    are = f"{' and '.join(LABELS[name] for name in missing)} {'is' if len(missing) == 1 else 'are'}"
    return missing, f"{are} not installed; pip install -e '.[{','.join(missing)}]'"


def check_trackers(track: TrackSection) -> None:
    """Raise ``UserError`` if a tracker that is turned on is not installed, or ``track.mlflow`` names no store."""
    missing, advice = missing_trackers(track)
    if missing:
        raise UserError(f"{advice}, or do without: {' '.join(_OFF[name] for name in missing)}")
    store = track.mlflow
    if (
        store is not None
        and not store.startswith("databricks")
        and not set(store) & set("/:.")
        and not Path(store).exists()
    ):
        raise UserError(
            f"track.mlflow={store} is neither an address nor an existing folder; use "
            f"track.mlflow=sqlite:///runs/mlflow.db for a file, or track.mlflow=./{store} for a new folder"
        )
