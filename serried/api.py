"""Entry points for a user's own script or notebook: ``main``, ``fit`` and ``load_model``."""

import inspect
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from serried.configs.bucket_urls import is_bucket_url
from serried.configs.compose import compose
from serried.configs.errors import UserError
from serried.configs.override_parser import config_dirs
from serried.configs.schema.declaration import BUILT_IN, declaring
from serried.configs.schema.run_config import config_yaml
from serried.configs.schema.sections import RunConfig
from serried.runtime.import_signals import check_temporary_folder, end_in_one_line
from serried.runtime.process import called_from_python, make_sums_repeatable, remember_script
from serried.task_class import declaration, make_task, words

if TYPE_CHECKING:
    from torch import nn

    from serried.trainer.callbacks import Callback
    from serried.trainer.task import Task


@dataclass(frozen=True)
class Result:
    """Outcome of a run, returned by ``serried.fit``.

    Example:
        >>> result = serried.fit(Houses, ["trainer.steps=100"])
        >>> result.state, result.metrics["absolute_error"], result.checkpoint
    """

    state: str
    """``finished``, ``stopped`` (resumable) or ``failed``."""
    step: int
    """Number of optimizer steps done."""
    loss: float | None
    """Training loss of the last logged step."""
    validation: float | None
    """Loss of the last evaluation on the validation split; None if there was no evaluation."""
    run_dir: Path
    checkpoint: Path | None
    """The newest checkpoint."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Metrics by name, from the last evaluation, or from the last logged step if there was no evaluation."""
    best: Path | None = None
    """The best checkpoint, kept by ``checkpoint.keep_best``; None if there is none."""
    best_value: float | None = None
    """Value of ``checkpoint.best_metric`` at the best checkpoint."""


def main(
    task: "Task | type[Task] | None" = None,
    arguments: list[str] | None = None,
    *,
    callbacks: "Sequence[Callback | type[Callback]]" = (),
) -> NoReturn:
    """Train ``task``, by default a built-in language model, with the command-line options, and exit the process.

    A script that calls this has every feature of ``train.py``: overrides, ``--help``, ``dry_run=true``, sweeps with
    ``-m``, ``launch=local|slurm``, torchrun and resuming.

    Args:
        task: The task, or its class. None means a built-in language model.
        arguments: Command-line arguments. None means ``sys.argv[1:]``.
        callbacks: Callbacks of the run, or their classes.

    Example:
        >>> if __name__ == "__main__":
        ...     serried.main(MyTask, callbacks=[Upload])
    """
    end_in_one_line()
    remember_script()
    from serried.program import main as train
    from serried.runtime.exit import leave, report_mistake

    try:
        declared = (BUILT_IN if task is None else declaration(task))._replace(callbacks=_listed(callbacks))
    except UserError as error:
        leave(report_mistake(error))
    leave(train(sys.argv[1:] if arguments is None else arguments, declared))


def fit(
    task: "Task | type[Task]",
    overrides: Iterable[str] | Mapping[str, Any] = (),
    callbacks: "Sequence[Callback | type[Callback]]" = (),
) -> Result:
    """Train ``task`` in this process, for example in a notebook. Under torchrun, every process must call this.

    Args:
        task: The task, or its class.
        overrides: ``key=value`` strings, or a nested dict.
        callbacks: Callbacks of the run, or their classes.

    Returns:
        The outcome of the run.

    Example:
        >>> result = serried.fit(MyTask, ["trainer.steps=100"], callbacks=[Upload()])
        >>> result.state, result.loss
        ('finished', 0.25)

    Raises:
        UserError: The overrides, the task or its data are invalid.
        TrainingFailed, TrainingStopped: The run ended early.
    """
    from serried.planner.run_planner import RunPlanner
    from serried.program import note_unread
    from serried.runtime.session import open_session
    from serried.trainer.run import train

    callbacks = _listed(callbacks)
    given, folders = config_dirs(words(overrides))
    check_temporary_folder()
    try:
        with declaring(declaration(task)._replace(config_dirs=folders)):
            config = compose(given)
    except UserError as error:
        raise UserError(*(str(each).replace("(command line)", "(overrides)") for each in error.args)) from None
    if config.launch.name != "torchrun" or config.dry_run:
        refused = "dry_run=true" if config.dry_run else f"launch={config.launch.name}"
        raise UserError(
            f"serried.fit trains in this process, so {refused} is not supported; use serried.main in a script"
        )
    with declaring(declaration(task)):
        note_unread(given, [config])
    instance = make_task(config, task if inspect.isclass(task) else lambda: task)
    if config.trainer.deterministic:
        make_sums_repeatable()
    with called_from_python(), _torch_settings_kept(), open_session(config.launch) as session:
        session.same_everywhere("the config", text := config_yaml(config))
        train(config, instance, session, text, RunPlanner(), callbacks)
        ended = session.once(lambda: _read_end(config))  # on the rank that wrote the records
    paths = {name: Path(ended[name]) if ended[name] else None for name in ("checkpoint", "best")}
    return Result(**ended | paths, run_dir=config.run.dir)


def _listed(callbacks: Any) -> "tuple[Callback | type[Callback], ...]":
    """Return ``callbacks`` as a tuple. Raises ``UserError`` if it is a single callback."""
    try:
        return tuple(callbacks)
    except TypeError:
        name = callbacks.__name__ if inspect.isclass(callbacks) else type(callbacks).__name__
        raise UserError(f"callbacks must be a list, not {name}; use callbacks=[{name}]") from None


@contextmanager
def _torch_settings_kept() -> Iterator[None]:
    """Context manager that restores torch's random state, number of threads and determinism on exit."""
    import torch

    threads, state = torch.get_num_threads(), torch.get_rng_state()
    deterministic: Any = torch.utils.deterministic
    mode, fill = torch.get_deterministic_debug_mode(), deterministic.fill_uninitialized_memory
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        torch.set_rng_state(state)
        torch.set_deterministic_debug_mode(mode)
        deterministic.fill_uninitialized_memory = fill


def load_model(path: str | Path, task: "Task | type[Task] | None" = None) -> "nn.Module":
    """Load a trained model on the CPU, in evaluation mode.

    Args:
        path: A run folder or a checkpoint, or the URL of a run in a bucket.
        task: The class of the task that trained it. Not needed for built-in tasks and tasks of installed packages.

    Raises:
        UserError: There is no such checkpoint, or it belongs to another model.

    Example:
        >>> model = serried.load_model("runs/houses", Houses)
    """
    from serried.bucket_copies import copy_with_checkpoint
    from serried.saved import open_model

    if is_bucket_url(path):
        path = copy_with_checkpoint(str(path))
    return open_model(Path(path), declaration(task) if task else None)


def _read_end(config: RunConfig) -> dict[str, Any]:
    """Read the outcome of the run of ``config`` from its records. Return the fields of ``Result``."""
    from serried.records.metrics import METRICS, last_of_each_kind, named_metrics
    from serried.records.status import Status, read_status
    from serried.trainer.checkpoint.checkpoints import CHECKPOINTS
    from serried.trainer.checkpoint.retention import best_checkpoint, committed

    run_dir = config.run.dir
    status = read_status(run_dir) or Status("", 0)
    events = last_of_each_kind(run_dir / METRICS)
    step, evaluation = events.get("step", {}), events.get("eval", {})
    checkpoints = committed(run_dir / CHECKPOINTS)
    best, best_value = best_checkpoint(run_dir / CHECKPOINTS, config.checkpoint) or (None, None)
    return {
        "state": status.state,
        "step": status.step,
        "loss": step.get("loss"),
        "validation": evaluation.get("loss"),
        "checkpoint": str(checkpoints[-1]) if checkpoints else None,
        "best": best and str(best),
        "best_value": best_value,
        "metrics": named_metrics(evaluation or step),
    }
