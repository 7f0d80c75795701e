"""Optional libraries, trackers and compilers that a run needs, and how to install them. Imports none of them."""

import os
import re
import shutil
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

from serried.configs.errors import UserError
from serried.configs.schema.data import DataSection, SourceSection
from serried.configs.schema.launch_plan_track import TrackSection

LABELS = {
    "wandb": "W&B", "tensorboard": "TensorBoard", "mlflow": "MLflow", "prometheus": "Prometheus", "webhook": "webhook",
}  # fmt: skip
"""Display names of trackers, by the name that config keys and extras use."""
_LIBRARIES = {
    "wandb": "wandb", "tensorboard": "tensorboard", "mlflow": "mlflow", "prometheus": "prometheus_client",
}  # fmt: skip
_ADDRESS = re.compile(r"https?://[^\s/?#]+([/?#]\S*)?")
LIVE = ("prometheus", "webhook")
"""Trackers that show only the current state of a run. The records of an ended run cannot be sent to them."""

_OFF = {
    "wandb": "track.wandb=off",
    "tensorboard": "track.tensorboard=false",
    "mlflow": "track.mlflow=null",
    "prometheus": "track.prometheus=null",
}


def asked_for(track: TrackSection) -> list[str]:
    """Return the names of the trackers that ``track`` turns on."""
    asked = {
        "wandb": track.wandb != "off", "tensorboard": track.tensorboard, "mlflow": track.mlflow is not None,
        "prometheus": track.prometheus is not None, "webhook": track.webhook is not None,
    }  # fmt: skip
    return [name for name, is_asked_for in asked.items() if is_asked_for]


def missing_trackers(track: TrackSection) -> tuple[list[str], str]:
    """Return the names of the trackers that are turned on but not installed, and the advice to print."""
    missing = [name for name in asked_for(track) if name in _LIBRARIES and find_spec(_LIBRARIES[name]) is None]
    are = f"{' and '.join(LABELS[name] for name in missing)} {'is' if len(missing) == 1 else 'are'}"
    return missing, f"{are} not installed; {install_command(*missing)}"


def check_trackers(track: TrackSection) -> None:
    """Raise ``UserError`` if a tracker that is turned on is not installed, ``track.mlflow`` names no store, or
    ``track.webhook`` names no environment variable with an address."""
    missing, advice = missing_trackers(track)
    if missing:
        raise UserError(f"{advice}, or use {' '.join(_OFF[name] for name in missing)}")
    if track.webhook is not None and not _ADDRESS.fullmatch(os.environ.get(track.webhook, "")):
        raise UserError(
            f"track.webhook={track.webhook}: the environment variable {track.webhook} does not contain an address; use "
            f"export {track.webhook}=https://... before the run, or track.webhook=null"
        )
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


def check_data_libraries(data: DataSection) -> None:
    """Raise ``UserError`` if a library that the data needs is not installed."""
    for name, purpose in _needed(data):
        if find_spec(name) is None:
            raise not_installed(name, purpose)


def not_installed(name: str, purpose: str, extra: str = "data") -> UserError:
    """Return the error for library ``name`` of the optional dependencies ``extra``, which ``purpose`` needs."""
    return UserError(f"{purpose} needs the library {name}, which is not installed here; use: {install_command(extra)}")


def install_command(*extras: str) -> str:
    """Return the command that installs the libraries of ``extras``, for this checkout or the installed package."""
    checkout = Path(__file__).resolve().parents[1]
    if not (checkout / "pyproject.toml").is_file():
        return f"pip install 'serried[{','.join(extras)}]'"
    return f"pip install -e '{'.' if Path().resolve() == checkout else checkout}[{','.join(extras)}]'"


def _needed(data: DataSection) -> Iterator[tuple[str, str]]:
    """Yield the name of each needed library and the setting that needs it."""
    sources: dict[str, SourceSection] = {"": data}
    sources |= {f"data.sources.{name}: ": each for name, each in data.mixed.items()}
    sources |= {f"data.validation.{name}: ": each for name, each in data.validation.items()}
    for key, source in sources.items():
        for library in source.libraries:
            yield library, f"{key}data={source.name}"
    tokenizer = data.tokenizer
    if tokenizer == "train":
        yield "tokenizers", "data.tokenizer=train"
    elif tokenizer not in ("bytes", "chars") and not _is_here(tokenizer):
        yield "huggingface_hub", f"data.tokenizer={tokenizer}"
        yield "tokenizers", f"data.tokenizer={tokenizer}"


def _is_here(name: str) -> bool:
    # Methods of Path raise if there is no such user, or a folder may not be read.
    return os.path.exists(os.path.expanduser(name))  # noqa: PTH110, PTH111


def missing_compiler(device: str) -> tuple[str, str] | None:
    """Return the missing requirement of torch.compile on a ``device`` such as ``cpu``, and how to install it; None if
    nothing is missing."""
    # On a GPU, Triton compiles the launchers of its kernels, in C.
    language, variable, usual = ("C", "CC", ["gcc", "clang"]) if device == "cuda" else ("C++", "CXX", ["g++"])
    named = os.environ.get(variable, "").split()[:1] or usual
    if not any(map(shutil.which, named)):
        return (
            f"a {language} compiler, but {named[0]} was not found",
            f"install one, name it in the environment ({variable}={usual[0]})",
        )
    if device == "cuda" and find_spec("triton") is None:
        return "Triton on a GPU", "pip install triton"
    return None
