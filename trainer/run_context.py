"""What every part of a run shares on one rank."""

from dataclasses import dataclass

from serried.configs.schema.sections import RunConfig
from serried.records.run_folder import RunFolder
from serried.runtime.console import Console
from serried.runtime.session import Session
from serried.trainer.monitor.heartbeat import Pulse
from serried.trainer.task import Task


@dataclass(frozen=True)
class Context:
    """The configuration, the task, this rank and its console."""

    config: RunConfig
    task: Task
    session: Session
    console: Console
    folder: RunFolder | None
    """The run folder; None except on rank 0."""
    pulse: Pulse
    """What the training thread is doing, for the watchdog."""
