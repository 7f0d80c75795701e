"""Tasks: the class that users subclass, its capabilities, and text tasks."""

from serried.trainer.callbacks import Event
from serried.trainer.task.batches import map_tensors, to_device
from serried.trainer.task.capabilities import Reference, RunTask, StepMean, task_for_run
from serried.trainer.task.task import Dataset, Task, fingerprint, needs_data_for_example
from serried.trainer.task.text_task import Prompt, Sampling, TextModel, TextTask, Written

__all__ = [
    "Dataset", "Event", "Prompt", "Reference", "RunTask", "Sampling", "StepMean", "Task", "TextModel", "TextTask",
    "Written", "fingerprint", "map_tensors", "needs_data_for_example", "task_for_run", "to_device",
]  # fmt: skip
