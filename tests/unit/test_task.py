"""The class that users subclass shows what they write; a run adds defaults of everything else."""

from pathlib import Path

from torch import nn

import serried
from serried.trainer.task import RunTask, task_for_run


class Exporting(serried.Task):
    """Defines methods of two capabilities, one of them with ``super``."""

    written: Path | None = None

    def build_model(self) -> nn.Module:
        return nn.Linear(2, 2)

    def export_files(self, folder: Path) -> None:
        super().export_files(folder)  # type: ignore[misc]
        self.written = folder

    def export_name(self, name: str) -> str:
        return f"layer.{name}"


def test_task_shows_at_most_16_methods() -> None:
    methods = [name for name, value in vars(serried.Task).items() if callable(value) or isinstance(value, classmethod)]
    own = [name for name in methods if not name.startswith("_") and name not in ("Config", "resumed")]
    assert len(own) <= 16, own
    assert serried.Task.__mro__ == (serried.Task, object), "or it would show what it inherits"


def test_run_keeps_methods_that_a_task_defines_and_adds_the_others() -> None:
    task = Exporting()
    made = task_for_run(task)
    assert made is task
    assert isinstance(made, RunTask)
    assert (type(made).__name__, made.task_name(), made.describe_model()) == ("Exporting", "exporting", "Exporting")
    made.export_files(Path("folder"))
    assert task.written == Path("folder")
    assert made.exported("weight", (2, 2))[0].name == "layer.weight"
    assert made.pretrained() is None
    assert task_for_run(made) is made
