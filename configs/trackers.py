"""Which trackers a run asks for, and whether they are installed."""

from importlib.util import find_spec
from pathlib import Path

from serried.configs.errors import UserError
from serried.configs.schema import TrackSection

LABELS = {"wandb": "W&B", "tensorboard": "TensorBoard", "mlflow": "MLflow"}
"""Trackers, by the name that is their key, their extra and the module they are used by."""

_OFF = {"wandb": "track.wandb=off", "tensorboard": "track.tensorboard=false", "mlflow": "track.mlflow=null"}


def asked_for(track: TrackSection) -> list[str]:
    """Names of the trackers that ``track`` asks for."""
    asked = {"wandb": track.wandb != "off", "tensorboard": track.tensorboard, "mlflow": track.mlflow is not None}
    return [name for name, is_asked_for in asked.items() if is_asked_for]


def is_behind_a_network(name: str, track: TrackSection) -> bool:
    """Whether the tracker ``name`` has to reach another machine before it can take anything."""
    return track.wandb == "online" if name == "wandb" else name == "mlflow" and is_address(track.mlflow or "")


def is_address(store: str) -> bool:
    """Whether ``track.mlflow=store`` names a server, rather than a file or a folder."""
    return store.startswith("databricks") or ("://" in store and not store.startswith(("sqlite:", "file:")))


def missing_trackers(track: TrackSection) -> tuple[list[str], str]:
    """Names of the trackers that ``track`` asks for and that are not installed, and what to do about them. Imports
    none."""
    missing = [name for name in asked_for(track) if find_spec(name) is None]
    are = f"{' and '.join(LABELS[name] for name in missing)} {'is' if len(missing) == 1 else 'are'}"
    return missing, f"{are} not installed; pip install -e '.[{','.join(missing)}]'"


def check_trackers(track: TrackSection) -> None:
    """Raise ``UserError`` where a tracker that is asked for is not installed, or has no place to go. Imports none."""
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
            f"track.mlflow={store} is neither an address nor a folder that is there; use "
            f"track.mlflow=sqlite:///runs/mlflow.db for a file, or track.mlflow=./{store} for a new folder"
        )
