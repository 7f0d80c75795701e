"""Objects that all components of a run share on one rank."""

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch

from serried.configs.schema.sections import RunConfig
from serried.parallel.activation_checkpoint import Mix
from serried.records.run_folder import RunFolder
from serried.runtime.console import Console
from serried.runtime.session import Session
from serried.trainer.callbacks import Callbacks
from serried.trainer.checkpoint.resume import Start
from serried.trainer.model import Model
from serried.trainer.monitor.heartbeat import Pulse
from serried.trainer.task import Dataset, RunTask


class RunPlan(NamedTuple):
    """Plan of a run."""

    lines: list[str]
    """Lines to print before the first step."""
    host_bytes: int
    """Host memory for offloading, in bytes, on the rank that needs the most."""
    mix: Mix | None
    """Activation checkpointing for ``trainer.activation_memory_budget``. None if there is no budget."""


class Planner(Protocol):
    """Estimates for a run. ``serried.planner.run_planner`` implements this protocol for ``train.py`` and ``fit``."""

    def plan(self, context: "Context", model: Model, start: Start, training: Dataset) -> RunPlan:
        """Return the plan of a run that trains ``model``.

        Raises:
            UserError: The model does not fit the layout.
        """

    def micro_batch(self, config: RunConfig, task: RunTask, session: Session, start: Start) -> tuple[RunConfig, str]:
        """Return ``config`` with ``trainer.micro_batch=auto`` resolved, and a line to print about it. This is a
        collective call.

        Raises:
            UserError: No micro-batch fits into memory.
        """

    def explain(
        self,
        error: BaseException,
        config: RunConfig,
        task: RunTask,
        session: Session,
        pulse: Pulse,
        optimizer: torch.optim.Optimizer | None,
    ) -> BaseException:
        """Return ``error``, or, if memory ran out, an error that reports memory use and remedies. This is not a
        collective call."""


@dataclass(frozen=True)
class Context:
    """Configuration, task, session, console and other objects shared by the components of a run."""

    config: RunConfig
    task: RunTask
    session: Session
    console: Console
    folder: RunFolder | None
    """The run folder. None except on rank 0."""
    pulse: Pulse
    """Current activity of the training thread, for the watchdog."""
    callbacks: Callbacks
    planner: Planner | None = None
    """Estimates for the run. If None, no plan is printed."""
