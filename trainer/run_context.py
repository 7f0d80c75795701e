"""Objects that all parts of a run share on one rank."""

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
    """Printed before the first step."""
    host_bytes: int
    """Host memory that offloading takes, on the rank that needs the most."""
    mix: Mix | None
    """Activation checkpointing that meets ``trainer.activation_memory_budget``; None: there is no budget."""


class Planner(Protocol):
    """Estimates that a run needs. ``serried.planner.run_planner`` implements them for ``train.py`` and ``fit``."""

    def plan(self, context: "Context", model: Model, start: Start, training: Dataset) -> RunPlan:
        """Return the plan of a run that trains ``model``.

        Raises:
            UserError: the model does not fit the layout.
        """

    def micro_batch(self, config: RunConfig, task: RunTask, session: Session, start: Start) -> tuple[RunConfig, str]:
        """Return ``config`` with a number for ``trainer.micro_batch=auto``, and a line about it. A collective.

        Raises:
            UserError: no number fits.
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
        """Return ``error``; if memory ran out, a failure that says what holds it and what would help. No collective."""


@dataclass(frozen=True)
class Context:
    """The configuration, the task, this rank and its console."""

    config: RunConfig
    task: RunTask
    session: Session
    console: Console
    folder: RunFolder | None
    """The run folder; None except on rank 0."""
    pulse: Pulse
    """Current activity of the training thread, for the watchdog."""
    callbacks: Callbacks
    planner: Planner | None = None
    """None: the run prints no plan."""
