"""Optional capabilities of a task, with defaults.

Recipes inherit all of them through ``RunTask``. A user's ``Task`` may define any of the methods, and ``task_for_run``
adds the defaults of the others.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
from torch import Tensor

from serried.parallel.checkpoint_mapping import Fragment
from serried.parallel.plan import Objective
from serried.trainer.callbacks import Event
from serried.trainer.task.task import Task


@dataclass(frozen=True)
class Reference:
    """Reference values of the pretrained model for each sample, to which training compares the model.

    The model of the run computes them once, before training, on the run's parallel layout. They are stored in
    ``folder``.
    """

    columns: int
    """Number of values per sample."""
    folder: Path
    settings: Mapping[str, Any]
    """Settings that the values depend on in addition to weights and samples, as JSON data."""
    numbers: Callable[[Any, Any], tuple[Tensor, Tensor]]
    """Maps the model's output and the batch to the sample ids [samples] and their values [samples, columns] in fp64."""
    use: Callable[[str, np.ndarray], None]
    """Receives the name of a data set and the values of all its samples [samples, columns], NaN for samples that were
    not needed."""


@dataclass(frozen=True)
class StepMean:
    """A mean over the global batch that the loss of every sample depends on.

    Before the forward and backward of a step, a forward of all micro-batches on all ranks computes it without
    gradients. An evaluation computes it over all samples that it evaluates.
    """

    objective: Objective
    """Objective whose mean loss is this mean."""
    use: Callable[[Any, Tensor], Any]
    """Maps a batch and the mean, a scalar on the device, to the batch that the task's loss receives."""


class Described:
    """Descriptions for the plan and the console."""

    def describe_model(self) -> str:
        """Return a one-line description of the model for the plan."""
        return type(self).__name__

    def describe_data(self) -> str:
        """Return a one-line description of the data for the plan. May be called before ``open_data``."""
        return ""

    def describe_reference(self) -> str:
        """Return a one-line description of the reference for the plan, or an empty string if there is none."""
        return ""

    def describe_sample(self) -> Sequence[str]:
        """Return lines that show a sample of the training data."""
        return ()

    @property
    def opens_in(self) -> str:
        """Name of other software that can open a checkpoint without conversion."""
        return ""

    def describe_kernels(self, device: str) -> str:
        """Return the names of the model's kernels for the plan. ``device``: device type, such as ``cpu``.

        Raises:
            UserError: The model cannot be trained on this device with this configuration.
        """
        del device
        return ""

    def next_command(self, start: str) -> str:
        """Return the command to suggest after a finished run. ``start``: the command that started the run."""
        return f"{start} run.name=OTHER for another run"

    def notes(self, starts_from_scratch: bool) -> Sequence[str]:
        """Return warnings for the plan."""
        del starts_from_scratch
        return ()


class Prepared:
    """Data that is downloaded or converted before a run."""

    def prepare(self, show: Callable[[str], None]) -> str:
        """Download or convert the data. Called by one process per node. Returns the argument of ``open_data``.

        ``show``: displays a progress line in place of the previous one. An empty line ends the progress.
        """
        del show
        return ""

    def open_data(self, place: str) -> None:
        """Open the result of ``prepare``. Called by every process."""

    def further_validation(self) -> Sequence[str]:
        """Return the names of validation splits other than ``validation``."""
        return ()


class Exported:
    """Names and files of checkpoints, so that other software can open them."""

    def export_name(self, name: str) -> str:
        """Return the name of parameter ``name`` in a checkpoint."""
        return name

    def exported(self, name: str, shape: Sequence[int]) -> tuple[Fragment, ...]:
        """Return the location of the elements of parameter ``name`` in the tensors of a checkpoint.

        By default, one tensor of the same shape, named by ``export_name``.
        """
        return (Fragment.whole(self.export_name(name), shape),)

    def exported_from(self, folder: Path) -> Callable[[str, Sequence[int]], tuple[Fragment, ...]]:
        """Return ``exported`` for the model in ``folder``.

        It returns () for parameters that are missing there and may start from initial values. By default, no
        parameter is missing.
        """
        del folder
        return self.exported

    def export_files(self, folder: Path) -> None:
        """Write files next to the weights of a checkpoint, such as a config that lets other software open it."""

    def check_weights(self, folder: Path) -> None:
        """Raise ``UserError`` if the model in ``folder`` does not compute the same function as this model would."""


class Pretrained:
    """Start from the weights of a saved model, or open a saved model."""

    def pretrained(self) -> Path | None:
        """Return the folder of the weights that a new run starts from. None for initial values. Called on one rank."""
        return None

    def open_saved(self, checkpoint: Path) -> None:
        """Prepare to open the model in ``checkpoint`` without training it.

        Called before ``prepare`` and ``build_model``.
        """

    def check_resumed(self, checkpoint: Path) -> None:
        """Raise ``UserError`` if the ids of tokens or classes have another meaning for the model in ``checkpoint``.

        Called after ``open_data``, on one rank.
        """


class Adapted:
    """Adapters, such as LoRA."""

    def heads(self) -> Sequence[str]:
        """Return the names of modules that are fully trained in addition to the adapters, such as a new head.

        Called after ``build_model``.
        """
        return ()

    def adapter_settings(self) -> Mapping[str, Any]:
        """Return additional items for ``adapter_config.json``, which PEFT reads."""
        return {}


class Taught:
    """A frozen teacher within the model."""

    def teacher_folder(self) -> Path | None:
        """Return the folder of the teacher's weights, or None if the model contains no teacher."""
        return None

    def exported_teacher(self, name: str, shape: Sequence[int]) -> tuple[Fragment, ...]:
        """Return the location of parameter ``name`` in the tensors of ``teacher_folder()``. Empty for other parameters.

        ``exported`` returns () for the teacher's parameters.
        """
        del name, shape
        return ()


class Compared:
    """Reference values of the pretrained model for training."""

    def reference_numbers(self) -> Reference | None:
        """Return the reference to compute before training with the weights in ``pretrained()``, or None.

        Called after ``open_data``.
        """
        return None

    def step_mean(self) -> StepMean | None:
        """Return the mean over the global batch that the loss needs, or None."""
        return None


class Hooked:
    """Hooks that are called on rank 0 only and must not use collectives. ``serried.Callback`` has the same hooks."""

    def on_start(self, event: Event) -> None:
        """Called before the first step of a new or resumed run."""

    def on_step(self, event: Event) -> None:
        """Called after each logged step."""

    def on_evaluate(self, event: Event) -> None:
        """Called after each evaluation of a data set."""

    def on_save(self, event: Event) -> None:
        """Called after each committed checkpoint."""

    def on_end(self, event: Event) -> None:
        """Called once after the last step or a requested stop. Not called if the run fails."""


class RunTask(Task, Described, Prepared, Exported, Pretrained, Adapted, Taught, Compared, Hooked):
    """A task with all capabilities, as used by a run."""


def task_for_run(task: Task) -> RunTask:
    """Return ``task``, after changing its class to a subclass that has the defaults of missing capabilities."""
    if not isinstance(task, RunTask):
        own = type(task)
        names = {name: getattr(own, name) for name in ("__module__", "__qualname__", "__doc__")}
        task.__class__ = type(own.__name__, (own, RunTask), names)
    return cast(RunTask, task)
