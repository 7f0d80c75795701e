"""What a user's own script or notebook calls: ``main``, ``fit`` and ``load_model``."""

import inspect
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from serried.configs.compose import compose, config_dirs, config_yaml
from serried.configs.declaration import BUILT_IN, Declaration, declaring
from serried.configs.errors import UserError
from serried.runtime.early import end_in_one_line
from serried.runtime.program import remember_script

if TYPE_CHECKING:
    from torch import nn

    from serried.trainer.task import Task


@dataclass(frozen=True)
class Result:
    """How a run ended."""

    state: str
    """``finished``, ``stopped`` (resumable) or ``failed``."""
    step: int
    """Optimizer steps done."""
    loss: float | None
    """Training loss of the last logged step."""
    validation: float | None
    """Loss of the last evaluation on the validation split; None without one."""
    run_dir: Path
    checkpoint: Path | None
    """The newest checkpoint."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Named metrics by name: of the last evaluation if there was one, else of the last logged step."""


def main(task: "type[Task] | None" = None, arguments: list[str] | None = None) -> NoReturn:
    """Train ``task``, or without one a built-in language model, as the command line says and end the process.

    The script that calls this has every feature of ``train.py``: overrides, ``--help``, ``dry_run=true``, sweeps with
    ``-m``, ``launch=local|slurm``, torchrun, resume.
    """
    end_in_one_line()
    remember_script()
    from serried.program import main as train
    from serried.runtime.ending import leave

    leave(train(sys.argv[1:] if arguments is None else arguments, declaration(task) if task else BUILT_IN))


def fit(task: "Task | type[Task]", overrides: Iterable[str] | Mapping[str, Any] = ()) -> Result:
    """Train ``task`` in this process, for example in a notebook, and return how the run ended.

    ``overrides`` are ``key=value`` strings or a nested dict. Under torchrun, every process must call this.

    Raises:
        UserError: the overrides, the task or its data are wrong.
        TrainingFailed, TrainingStopped: the run ended early.
    """
    from serried.runtime.session import open_session
    from serried.trainer.run import train

    instance = task() if inspect.isclass(task) else task
    given, folders = config_dirs(words(overrides))
    with declaring(declaration(type(instance))._replace(config_dirs=folders)):
        config = compose(given)
    if config.launch.name != "torchrun":
        raise UserError(f"launch={config.launch.name} starts other processes; use serried.main in a script for that")
    instance.configure(config)
    with open_session(config.launch) as session:
        train(config, instance, session, config_yaml(config))
    return read_result(config.run.dir)


def load_model(path: str | Path, task: "Task | type[Task] | None" = None) -> "nn.Module":
    """Return the model in ``path``, a run folder or a checkpoint, on the CPU in evaluation mode.

    ``task`` is the class that trained it; not needed for the built-in tasks.

    Raises:
        UserError: there is no such checkpoint, or it is of another model.
    """
    from serried.trainer.saved_model import open_model

    return open_model(Path(path), declaration(task if inspect.isclass(task) else type(task)) if task else None)


def declaration(task: "type[Task]") -> Declaration:
    """Return what composing the configuration needs to know of a task class."""
    return Declaration(task.task_name(), task.Config, task.sections, words(task.defaults), task)


def words(overrides: Iterable[str] | Mapping[str, Any]) -> list[str]:
    """Return ``overrides``, a nested dict or ``key=value`` strings, as ``key=value`` strings."""
    if not isinstance(overrides, Mapping):
        if isinstance(overrides, str):
            raise UserError(f"overrides must be a list of key=value strings or a dict, not {overrides!r}")
        return list(overrides)
    found: list[str] = []
    for key, value in overrides.items():
        if isinstance(value, Mapping):
            found += [f"{key}.{word}" for word in words(value)]
        else:
            found.append(f"{key}={_text(value)}")
    return found


def _text(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, list | tuple):
        return f"[{','.join(_text(each) for each in value)}]"
    return str(value)


def read_result(run_dir: Path) -> Result:
    """Return how the run in ``run_dir`` ended, from its records."""
    from serried.configs.schema import DEFAULT_VALIDATION
    from serried.records.metrics import named_metrics, read_events
    from serried.records.run_folder import METRICS
    from serried.records.status import NO_STATUS, read_status
    from serried.trainer.checkpoint.resume import CHECKPOINTS
    from serried.trainer.checkpoint.retention import committed

    status = read_status(run_dir) or NO_STATUS
    step: dict[str, Any] = {}
    evaluation: dict[str, Any] = {}
    for event in read_events(run_dir / METRICS):
        if event["event"] == "step":
            step = event
        elif event["event"] == "eval" and event["set"] == DEFAULT_VALIDATION:
            evaluation = event
    checkpoints = committed(run_dir / CHECKPOINTS)
    return Result(
        status.state,
        status.step,
        step.get("loss"),
        evaluation.get("loss"),
        run_dir,
        checkpoints[-1] if checkpoints else None,
        named_metrics(evaluation or step),
    )
