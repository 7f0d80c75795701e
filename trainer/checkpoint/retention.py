"""Contents of ``<run>/checkpoints``, and deletion of old checkpoints. The folder is listed again on each call.

A checkpoint is written as ``.step-00000100.partial`` and renamed to ``step-00000100`` when complete. To delete it,
it is renamed to ``.step-00000100.deleting`` first. So even if a process is killed, a folder whose name does not start
with a dot is a complete checkpoint.
"""

import re
import shlex
import shutil
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from serried.configs.plain_data import NotPlainData, is_number, read_json
from serried.configs.schema.sections import CheckpointSection
from serried.trainer.checkpoint.manifest import MANIFEST, Damaged, check_file, check_size, fsync_folder, read_manifest
from serried.trainer.checkpoint.saved_state import STATE

MODEL = "model"
ADAPTER = "adapter_model"
OPTIMIZER = "optimizer"
STEMS = (MODEL, ADAPTER, OPTIMIZER)
"""Stems of the names of weight files, adapter weight files and optimizer state files."""

_Key = TypeVar("_Key")
_NAME = re.compile(r"step-([0-9]{8,255})")
_LEFTOVER = re.compile(r"\.step-[0-9]{8,}\.(partial|deleting)")


def folder_name(step: int) -> str:
    """Return the name of the checkpoint after ``step`` optimizer steps: 8 digits, or more if needed."""
    return f"step-{step:08d}"


def weights_alone(checkpoint: Path) -> str:
    """Return instructions for starting a run from the weights of ``checkpoint`` only."""
    resume = shlex.quote(f"checkpoint.resume={checkpoint}")
    if (checkpoint / "adapter_config.json").is_file():
        return f"its adapters alone: {shlex.quote(f'adapter.path={checkpoint}')}"
    return f"its weights alone: {resume} checkpoint.weights_only=true"


def partial_name(step: int) -> str:
    """Return the name of a checkpoint while it is written."""
    return f".{folder_name(step)}.partial"


def deleting_name(step: int) -> str:
    """Return the name of a checkpoint while it is deleted."""
    return f".{folder_name(step)}.deleting"


def step_of(path: Path) -> int | None:
    """Return the step in the checkpoint name ``path``, or None if it is not a checkpoint name."""
    match = _NAME.fullmatch(path.name)
    is_ours = match is not None and folder_name(int(match[1])) == path.name  # rejects superfluous leading zeros
    return int(match[1]) if match is not None and is_ours else None


def committed(checkpoints: Path) -> list[Path]:
    """Return the checkpoints of a run, ordered by step: folders that have a checkpoint's name and a manifest.

    They are not verified (see ``read_manifest`` and ``check_file``). Empty if the folder does not exist.
    """
    return [path for path in named(checkpoints) if (path / MANIFEST).is_file()]


def named(checkpoints: Path) -> list[Path]:
    """Return all folders that have a checkpoint's name, ordered by step, including folders without a manifest."""
    try:
        paths = list(checkpoints.iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return []
    found = [(step, path) for path in paths if (step := step_of(path)) is not None and path.is_dir()]
    return [path for _, path in sorted(found)]


def sweep(checkpoints: Path) -> list[str]:
    """Remove the remains of interrupted saves and deletions.

    Must not be called during a save or deletion.

    Returns a message for each item that could not be removed. Does not raise if the disk fails.
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
    """Delete the checkpoints that need not be kept, oldest first. Returns the deleted paths.

    Keeps the newest ``keep`` checkpoints, the best one, and checkpoints whose step is a multiple of ``keep_every`` (0:
    none) or in ``also``. ``best``: a metric (such as "loss") and "min" or "max". Evaluations after the save are
    included, and of equally good checkpoints the oldest is the best. A checkpoint with an unreadable manifest or wrong
    file sizes is not counted and not deleted: damage must not displace the last good checkpoint, and may help to find
    the cause. Checksums are not verified, since that requires reading all files.

    Does not raise if the disk fails. One message per failure is appended to ``problems``.
    """
    problems = [] if problems is None else problems
    try:
        intact = [path for path in committed(checkpoints) if _has_its_sizes(path)]
    except OSError as error:
        problems.append(f"cannot read {checkpoints}: {error.strerror}")
        return []
    found = _best(intact, *best) if best is not None else None
    best_step = _step(found[0]) if found else None
    stay = kept_steps([*map(_step, intact)], keep=keep, keep_every=keep_every, also=also, best=best_step)
    return [path for path in intact if _step(path) not in stay and _delete(path, problems)]


def kept_steps(
    steps: Sequence[int], *, keep: int, keep_every: int, also: Collection[int], best: int | None
) -> set[int]:
    """Return which of the ``steps`` with a checkpoint, in ascending order, ``prune`` keeps. ``best``: the best one."""
    every = [step for step in steps if keep_every and step % keep_every == 0]
    return {*steps[-keep:], *every, *(step for step in steps if step in also or step == best)}


def best_checkpoint(checkpoints: Path, section: CheckpointSection) -> tuple[Path, float] | None:
    """Return the checkpoint that ``checkpoint.keep_best`` keeps, and its ``best_metric``. None if there is none."""
    intact = [path for path in committed(checkpoints) if _has_its_sizes(path)] if section.keep_best else []
    return _best(intact, section.best_metric, section.best_mode)


def _best(paths: Sequence[Path], metric: str, mode: str) -> tuple[Path, float] | None:
    later = _evaluated_later(paths[-1], metric) if paths else {}
    found = {path: later.get(_step(path), _evaluated(path, metric)) for path in paths}
    values = {path: value for path, value in found.items() if value is not None}
    if not values:
        return None
    path = best_of(values, mode)
    return path, values[path]


def best_of(values: Mapping[_Key, float], mode: str) -> _Key:
    """Return the key with the best value; the first of equally good ones. ``mode``: "min" or "max"."""
    return (max if mode == "max" else min)(values, key=lambda key: values[key])


def _delete(path: Path, problems: list[str]) -> bool:
    """Delete a checkpoint. Returns whether it is no longer visible. A later ``sweep`` deletes any remains."""
    aside = path.with_name(deleting_name(_step(path)))
    try:
        if aside.exists() and not _remove(aside, problems):  # left over from an earlier deletion of the same step
            return False
        path.rename(aside)
    except OSError as error:
        problems.append(f"cannot delete {path}: {error.strerror}")
        return False
    try:
        fsync_folder(path.parent)  # after a power failure the name must not reappear without its files
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
    """Return the value of ``metric`` on the validation set at the checkpoint's step."""
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
    """Return the values of ``metric`` at steps that were evaluated after their checkpoint was saved."""
    try:
        made_up = read_json(newest / STATE)["progress"]["made_up"].items()
        return {int(step): float(values[metric]) for step, values in made_up if is_number(values.get(metric))}
    except (OSError, NotPlainData, KeyError, TypeError, AttributeError, ValueError):
        return {}


def _step(path: Path) -> int:
    step = step_of(path)
    assert step is not None, path
    return step
