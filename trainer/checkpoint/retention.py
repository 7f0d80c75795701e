"""Which checkpoints are in ``<run>/checkpoints``, and which may be deleted. Read from the disk each time.

A checkpoint is written as ``.step-00000100.partial`` and renamed to ``step-00000100`` once it is whole; it is deleted
by renaming it to ``.step-00000100.deleting`` first. So at whatever moment a process dies, a name without a dot is a
whole checkpoint.
"""

import re
import shlex
import shutil
from collections.abc import Collection, Sequence
from pathlib import Path

from serried.configs.plain_data import NotPlainData, is_number, read_json
from serried.configs.schema.sections import CheckpointSection
from serried.trainer.checkpoint.manifest import MANIFEST, Damaged, check_file, check_size, fsync_folder, read_manifest
from serried.trainer.checkpoint.saved_state import STATE

MODEL, ADAPTER, OPTIMIZER = STEMS = ("model", "adapter_model", "optimizer")
"""Stems of the files of weights, of a run that trains adapters those of the adapters, and of the optimizer's state."""

_NAME = re.compile(r"step-([0-9]{8,255})")
_LEFTOVER = re.compile(r"\.step-[0-9]{8,}\.(partial|deleting)")


def folder_name(step: int) -> str:
    """Name of the checkpoint after ``step`` optimizer steps: 8 digits, more when needed."""
    return f"step-{step:08d}"


def weights_alone(checkpoint: Path) -> str:
    """Say how a run starts with the weights of ``checkpoint`` and none of its state. ``serried export`` reads only
    models that have a configuration; a module of the user's has none."""
    is_described = any((checkpoint / name).is_file() for name in ("config.json", "adapter_config.json"))
    source = shlex.quote(str(checkpoint))
    copy = f"serried export {source} out=weights" if is_described else f"mkdir weights && cp {source}/model* weights"
    return f"its weights alone: {copy}, then checkpoint.resume=weights"


def partial_name(step: int) -> str:
    """Its name while it is written."""
    return f".{folder_name(step)}.partial"


def deleting_name(step: int) -> str:
    """Its name while it is deleted."""
    return f".{folder_name(step)}.deleting"


def step_of(path: Path) -> int | None:
    """Step of the checkpoint that ``path`` is named for; None: it is not named as one."""
    match = _NAME.fullmatch(path.name)
    is_ours = match is not None and folder_name(int(match[1])) == path.name  # not with a ninth digit that is a zero
    return int(match[1]) if match is not None and is_ours else None


def committed(checkpoints: Path) -> list[Path]:
    """The checkpoints of a run, oldest (by step) first: folders named as one that hold a manifest.

    Whether they are undamaged is another question (``read_manifest``, ``check_file``). A folder that is not there has
    none.
    """
    return [path for path in named(checkpoints) if (path / MANIFEST).is_file()]


def named(checkpoints: Path) -> list[Path]:
    """As ``committed``, with those that have lost their manifest: a name without a dot was a whole checkpoint once."""
    try:
        paths = list(checkpoints.iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return []
    found = [(step, path) for path in paths if (step := step_of(path)) is not None and path.is_dir()]
    return [path for _, path in sorted(found)]


def sweep(checkpoints: Path) -> list[str]:
    """Remove what saves and deletions left when they were cut off. Only while nothing is being saved or deleted here.

    Returns one line for each that could not be removed. Never raises for the disk's sake.
    """
    try:
        leftovers = sorted(path for path in checkpoints.iterdir() if _LEFTOVER.fullmatch(path.name))
    except FileNotFoundError:
        return []
    except OSError as error:
        return [f"cannot read {checkpoints}: {error.strerror}"]
    problems: list[str] = []
    for path in leftovers:
        _remove(path, problems)
    return problems


def prune(
    checkpoints: Path, *, keep: int, keep_every: int, best: tuple[str, str] | None, also: Collection[int] = (),
    problems: list[str] | None = None,
) -> list[Path]:  # fmt: skip
    """Delete the checkpoints that need not stay, oldest first. Returns the paths that are gone.

    The newest ``keep`` are kept, those whose step is a multiple of ``keep_every`` (0: none) or in ``also``, and the one
    that was best when it was evaluated, also after it was saved (of equals the oldest), by ``best``, a metric ("loss"
    is one) and "min" or "max". One whose manifest cannot be read, or whose files are not of the manifest's sizes,
    neither counts nor is deleted: damage cannot push out the last good one, and may help to find its cause. Checksums,
    which take reading all, are not compared.

    Does not raise if the disk fails; failures are appended to ``problems``, a line each.
    """
    problems = [] if problems is None else problems
    try:
        intact = [path for path in committed(checkpoints) if _has_its_sizes(path)]
    except OSError as error:
        problems.append(f"cannot read {checkpoints}: {error.strerror}")
        return []
    stay = {*intact[-keep:], *(path for path in intact if _step(path) in also)}
    if keep_every:
        stay |= {path for path in intact if _step(path) % keep_every == 0}
    if best is not None and (found := _best(intact, *best)):
        stay.add(found[0])
    return [path for path in intact if path not in stay and _delete(path, problems)]


def best_checkpoint(checkpoints: Path, section: CheckpointSection) -> tuple[Path, float] | None:
    """Return the checkpoint that ``checkpoint.keep_best`` keeps, with its ``best_metric``; None if there is none."""
    intact = [path for path in committed(checkpoints) if _has_its_sizes(path)] if section.keep_best else []
    return _best(intact, section.best_metric, section.best_mode)


def _best(paths: Sequence[Path], metric: str, mode: str) -> tuple[Path, float] | None:
    later = _evaluated_later(paths[-1], metric) if paths else {}
    found = {path: later.get(_step(path), _evaluated(path, metric)) for path in paths}
    values = {path: value for path, value in found.items() if value is not None}
    if not values:
        return None
    path = (max if mode == "max" else min)(values, key=lambda path: values[path])
    return path, values[path]


def _delete(path: Path, problems: list[str]) -> bool:
    """Return whether the checkpoint is not visible any more. A later ``sweep`` deletes what is left of it."""
    aside = path.with_name(deleting_name(_step(path)))
    try:
        if aside.exists() and not _remove(aside, problems):  # left by an earlier deletion of the same step
            return False
        path.rename(aside)
    except OSError as error:
        problems.append(f"cannot delete {path}: {error.strerror}")
        return False
    try:
        fsync_folder(path.parent)  # a power cut must not bring the name back without its files
    except OSError as error:
        problems.append(f"cannot delete {path}: {error.strerror}")
    else:
        _remove(aside, problems)
    return True


def _remove(path: Path, problems: list[str]) -> bool:
    try:
        if path.is_symlink() or not path.is_dir():
            path.unlink()
        else:
            shutil.rmtree(path)
    except OSError as error:
        problems.append(f"cannot remove {path}: {error.strerror}")
        return False
    return True


def _has_its_sizes(path: Path) -> bool:
    try:
        for name, record in read_manifest(path).items():
            check_size(path, name, record)
    except Damaged:
        return False
    return True


def _evaluated(path: Path, metric: str) -> float | None:
    """The value of ``metric`` on the validation set at the checkpoint's step."""
    try:
        check_file(path, STATE, read_manifest(path)[STATE])
        state = read_json(path / STATE)
        if metric == "loss":
            value = state["validation_loss"]
        else:
            progress = state["progress"]
            value = progress["validation"][metric] if progress["validated_step"] == state["step"] else None
    except (OSError, Damaged, NotPlainData, KeyError, TypeError):
        return None
    return float(value) if is_number(value) else None


def _evaluated_later(newest: Path, metric: str) -> dict[int, float]:
    """The values of ``metric`` at steps that were evaluated after their checkpoint was saved."""
    try:
        made_up = read_json(newest / STATE)["progress"]["made_up"].items()
        return {int(step): float(values[metric]) for step, values in made_up if is_number(values.get(metric))}
    except (OSError, NotPlainData, KeyError, TypeError, AttributeError, ValueError):
        return {}


def _step(path: Path) -> int:
    step = step_of(path)
    assert step is not None, path
    return step
