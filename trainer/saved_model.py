"""A trained model, opened from its run folder or checkpoint."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from pydantic import ValidationError
from torch import nn

from serried.configs.errors import UserError
from serried.configs.plain_data import NotPlainData
from serried.configs.renamed_keys import read_saved_config
from serried.configs.schema.declaration import Declaration, declaring
from serried.configs.schema.registry import task_of_model, tasks
from serried.configs.schema.run_config import check
from serried.parallel.layout.checks import with_values
from serried.parallel.layout.mesh import Layout
from serried.trainer.checkpoint.read_while_training import reading, with_chosen
from serried.trainer.checkpoint.resume import CHECKPOINTS
from serried.trainer.checkpoint.retention import committed
from serried.trainer.evaluation.evaluate import check_weights, load_model
from serried.trainer.task import Task


def open_model(path: Path, declaration: Declaration | None, installed: Callable[[str], Declaration]) -> nn.Module:
    """Return the model of a run folder (its newest checkpoint) or of a checkpoint, on the CPU, in evaluation mode.

    Without a ``declaration`` it is of a task that is built in or ``installed``.

    Raises ``UserError`` if there is no checkpoint, it is damaged, or it is of another model or task.
    """
    if not path.exists():
        raise UserError(f"{path} does not exist (looked in {Path.cwd()}); give a run folder or a checkpoint in one")
    return with_chosen(
        lambda: (committed(path / CHECKPOINTS) or [path])[-1], partial(_open, path, declaration, installed)
    )


def _open(
    path: Path, declaration: Declaration | None, installed: Callable[[str], Declaration], checkpoint: Path
) -> nn.Module:
    """Do the work of ``open_model`` with ``checkpoint``, the one that ``path`` means."""
    saved = checkpoint.parent.parent / "config.yaml"
    try:
        plain = read_saved_config(saved)
    except (OSError, NotPlainData) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise UserError(f"{path} is neither a run folder nor a checkpoint in one: {saved}: {reason}") from None
    saved_task = plain.get("task")
    name = saved_task.get("name") if isinstance(saved_task, dict) else None
    if declaration is None:
        if name not in tasks.names():
            raise UserError(
                f"{path} was trained by the task {name}; give its class: serried.load_model(path, task=...)"
            )
        declaration = installed(name)
    try:
        with declaring(declaration):
            config = check(plain)
    except ValidationError as error:
        first, given = error.errors()[0], declaration.name or name
        why = f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
        raise UserError(f"{path} was trained by the task {name}, and {given} does not fit: {why}") from None
    # Frozen weights below adapters are then fp32 too, and the model needs no autocast.
    config = with_values(config, {"precision.name": "fp32"})
    task: Task = (declaration.task or task_of_model(config.task.name))()
    task.configure(config)
    with reading(checkpoint):
        task.open_saved(checkpoint)
        check_weights(checkpoint)
        return load_model(config, task, Layout("single"), torch.device("cpu"), checkpoint).module
