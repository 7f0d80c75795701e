"""Planner of a run."""

import torch

from serried.configs.schema.sections import RunConfig
from serried.parallel.layout.checks import checked_layout
from serried.planner import auto_micro_batch
from serried.planner.activations.estimate import planned_mix
from serried.planner.memory_formula import Sizes, planned_memory
from serried.planner.out_of_memory import explained
from serried.planner.overview import overview
from serried.runtime.session import Session
from serried.trainer.checkpoint.resume import Start
from serried.trainer.model import Model
from serried.trainer.monitor.heartbeat import Pulse
from serried.trainer.run_context import Context, RunPlan
from serried.trainer.task import Dataset, RunTask


class RunPlanner:
    """Implementation of ``trainer.run_context.Planner``."""

    def plan(self, context: Context, model: Model, start: Start, training: Dataset) -> RunPlan:
        config, task = context.config, context.task
        session = context.session
        layout, accumulation = checked_layout(config, session.world_size)
        sizes = Sizes(config, layout, model.module, model.plan)
        place, device = session.place(), session.device.type
        lines = overview(config, task, accumulation, sizes, place, device, start, training)
        host_bytes = planned_memory(config, task, accumulation, sizes).on_host if config.offloads_state else 0
        return RunPlan(lines, host_bytes, planned_mix(config, task, layout, model.plan, model.module))

    def micro_batch(self, config: RunConfig, task: RunTask, session: Session, start: Start) -> tuple[RunConfig, str]:
        return auto_micro_batch.for_run(config, task, session, start)

    def explain(
        self,
        error: BaseException,
        config: RunConfig,
        task: RunTask,
        session: Session,
        pulse: Pulse,
        optimizer: torch.optim.Optimizer | None,
    ) -> BaseException:
        return explained(error, config, task, session, pulse, optimizer)
