"""Capabilities of a task beyond a model, data and a loss, with defaults.

Recipes inherit all of them through ``RunTask``. A user's ``Task`` may define any method, and ``task_for_run`` adds the
defaults of the others.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
from torch import Tensor

from serried.parallel.checkpoint_mapping import Fragment
from serried.trainer.callbacks import Event
from serried.trainer.task.task import Task


@dataclass(frozen=True)
class Reference:
    """Numbers of each sample by the pretrained model, with which training compares.

    They are computed once, before training, by the model of the run on its own layout, and kept in ``folder``.
    """

    columns: int
    """Numbers of a sample."""
    folder: Path
    settings: Mapping[str, Any]
    """Settings that the numbers depend on beside weights and samples, as JSON."""
    numbers: Callable[[Any, Any], tuple[Tensor, Tensor]]
    """Function of the model's output and the batch. Returns the ids of the samples [samples] and their numbers
    [samples, columns] in fp64."""
    use: Callable[[str, np.ndarray], None]
    """Function of the name of a data set and the numbers of all its samples, [samples, columns]; NaN for samples that
    no batch had."""


class Described:
    """Descriptions for the plan and the console."""

    def describe_model(self) -> str:
        """Return a description of the model, one line for the plan."""
        return type(self).__name__

    def describe_data(self) -> str:
        """Return one line for the plan, before or after ``open_data``."""
        return ""

    def describe_reference(self) -> str:
        """Return one line for the plan about the reference of training; empty: there is none."""
        return ""

    def describe_sample(self) -> Sequence[str]:
        """Return lines that show a sample of the training data."""
        return ()

    @property
    def opens_in(self) -> str:
        """Other software that opens a checkpoint as it is."""
        return ""

    def describe_kernels(self, device: str) -> str:
        """Return the names of the model's kernels for the plan, on a device of this type, such as ``cpu``.

        Raises:
            UserError: The model cannot be trained there with this configuration.
        """
        del device
        return ""

    def next_command(self, start: str) -> str:
        """Return the next command of a user after a finished run; ``start`` is the command that started this one."""
        return f"{start} run.name=OTHER for another run"

    def notes(self, starts_from_scratch: bool) -> Sequence[str]:
        """Return warnings for the plan."""
        del starts_from_scratch
        return ()


class Prepared:
    """Data that is downloaded or converted before a run."""

    def prepare(self, show: Callable[[str], None]) -> str:
        """Download or convert the data; called by one process per node. Returns the argument of ``open_data``.

        ``show`` takes progress lines, each in place of the one before; an empty one ends them.
        """
        del show
        return ""

    def open_data(self, place: str) -> None:
        """Open the result of ``prepare``. Called by every process."""

    def further_validation(self) -> Sequence[str]:
        """Return names of validation splits besides ``validation``."""
        return ()


class Exported:
    """Names and files of checkpoints, which other software may open."""

    def export_name(self, name: str) -> str:
        """Return the name in a checkpoint of parameter ``name``."""
        return name

    def exported(self, name: str, shape: Sequence[int]) -> tuple[Fragment, ...]:
        """Return where the elements of parameter ``name`` of ``shape`` lie in the tensors of a checkpoint.

        The default: in one tensor of the same shape, under its ``export_name``.
        """
        return (Fragment.whole(self.export_name(name), shape),)

    def exported_from(self, folder: Path) -> Callable[[str, Sequence[int]], tuple[Fragment, ...]]:
        """Return ``exported`` for the model in ``folder``, with () for parameters that it lacks and that may start from
        initial values. The default: it lacks none."""
        del folder
        return self.exported

    def export_files(self, folder: Path) -> None:
        """Write files beside the weights of a checkpoint, such as a config that lets other software open it."""

    def check_weights(self, folder: Path) -> None:
        """Raise ``UserError`` if the model in ``folder`` computes something else than this one would."""


class Pretrained:
    """Start from the weights of a saved model, and open saved models."""

    def pretrained(self) -> Path | None:
        """Return the folder of the weights that a new run begins with; None: initial values. Called on one rank."""
        return None

    def open_saved(self, checkpoint: Path) -> None:
        """Prepare for the model in ``checkpoint``, which is opened and not trained further. Called before ``prepare``
        and ``build_model``."""

    def check_resumed(self, checkpoint: Path) -> None:
        """Raise ``UserError`` if the numbers that the model in ``checkpoint`` takes or gives, such as ids of tokens or
        classes, mean something else in the data now. Called after ``open_data``, on one rank."""


class Adapted:
    """Adapters, such as LoRA."""

    def heads(self) -> Sequence[str]:
        """Return names of modules that are trained whole beside adapters, such as a new head. Called after
        ``build_model``."""
        return ()

    def adapter_settings(self) -> Mapping[str, Any]:
        """Return further keys of ``adapter_config.json``, which PEFT reads."""
        return {}


class Taught:
    """A frozen teacher within the model."""

    def teacher_folder(self) -> Path | None:
        """Return the folder of the weights of a frozen model within the model; None: there is none."""
        return None

    def exported_teacher(self, name: str, shape: Sequence[int]) -> tuple[Fragment, ...]:
        """Return where parameter ``name`` lies in the tensors of ``teacher_folder()``; () if it belongs to no teacher.

        ``exported`` returns () for the teacher's parameters.
        """
        del name, shape
        return ()


class Compared:
    """Numbers of the pretrained model as the reference of training."""

    def reference_numbers(self) -> Reference | None:
        """Return the numbers to compute with the weights in ``pretrained()`` before training; None: there are none.

        Called after ``open_data``.
        """
        return None


class Hooked:
    """Hooks, which are called on rank 0 alone and must not use collectives. ``serried.Callback`` has the same ones."""

    def on_start(self, event: Event) -> None:
        """Called before the first step."""

    def on_step(self, event: Event) -> None:
        """Called after each logged step."""

    def on_evaluate(self, event: Event) -> None:
        """Called after each evaluation of a data set."""

    def on_save(self, event: Event) -> None:
        """Called after each committed checkpoint."""

    def on_end(self, event: Event) -> None:
        """Called once, after the last step."""


class RunTask(Task, Described, Prepared, Exported, Pretrained, Adapted, Taught, Compared, Hooked):
    """A task with all capabilities, as a run sees it."""


def task_for_run(task: Task) -> RunTask:
    """Return ``task``, whose class becomes a subclass with the defaults of the capabilities that it does not define."""
    if not isinstance(task, RunTask):
        own = type(task)
        names = {name: getattr(own, name) for name in ("__module__", "__qualname__", "__doc__")}
        task.__class__ = type(own.__name__, (own, RunTask), names)
    return cast(RunTask, task)
