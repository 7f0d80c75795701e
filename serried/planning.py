"""The layout and the plan of a configuration, computed before a run starts."""

import os
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from serried.configs.errors import UserError
from serried.configs.schema.fields import AUTO
from serried.configs.schema.sections import RunConfig
from serried.launch.sweep.points import Sweep
from serried.parallel.layout.checks import allowed_micro_batches, checked_layout, with_micro_batch
from serried.parallel.layout.mesh import Layout, gradient_accumulation, resolve_layout
from serried.parallel.layout.recovery_checks import (
    Processes,
    check_recovery,
    check_recovery_start,
    torchrun_is_elastic,
)
from serried.runtime.import_signals import LAUNCHER, importing
from serried.runtime.process import is_started, planned_processes, processes_per_node, torchrun_says
from serried.task_class import task_of

if TYPE_CHECKING:
    from serried.planner.compare import Figures
    from serried.trainer.task import RunTask


def planned_layout(config: RunConfig) -> tuple[Layout, int]:
    """Return the layout of a run of ``config``, and the number of gradient accumulation steps.

    Raises:
        UserError: The configuration is inconsistent.
    """
    count = planned_processes(config.launch, config.dry_run)
    if config.trainer.micro_batch == AUTO:  # chosen later; any valid value will do here
        layout = resolve_layout(config.parallel, count)
        config = with_micro_batch(config, allowed_micro_batches(config, layout)[0])
    layout, accumulation = checked_layout(config, count)
    if config.recover.mode != "off":
        check_recovery(config, layout)
        if not config.dry_run:
            check_recovery_start(config, layout, _started_processes(config))
    return layout, accumulation


def _started_processes(config: RunConfig) -> Processes:
    """Return the processes of a run that are started already, or that ``config`` will start."""
    section = config.launch
    if LAUNCHER in os.environ or not is_started():
        return Processes(section.name, section.nodes or 1, processes_per_node(section))
    _, _, world, per_node = torchrun_says()
    if "TORCHELASTIC_RUN_ID" not in os.environ:  # a pod's entry point started them
        return Processes(section.name, world // per_node, per_node)
    words = [f"--rdzv-backend={backend}"] if (backend := os.environ.get("PET_RDZV_BACKEND")) else []
    with suppress(OSError):
        words += Path(f"/proc/{os.getppid()}/cmdline").read_text("utf-8", "replace").split("\0")
    restarts = os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0")
    return Processes("torchrun", world // per_node, per_node, int(restarts), torchrun_is_elastic(words))


def plan_text(config: RunConfig) -> str:
    """Return the plan of a run of ``config``, or the result of a layout search with ``plan.search``."""
    with importing():
        from serried.planner.overview import dry_run
        from serried.planner.search import search

    if config.plan.search:
        return search(config, task_of(config), planned_processes(config.launch, dry_run=True))
    return dry_run(*_step(config))


def _step(config: RunConfig) -> "tuple[RunConfig, RunTask, Layout, int, str]":
    """Resolve ``trainer.micro_batch`` of ``config``.

    Returns:
        The config, the task, the layout, the number of gradient accumulation steps, and a line that explains the
        micro-batch size if it was chosen automatically.
    """
    from serried.planner.overview import chosen, planned_compile

    task, why = task_of(config), ""
    layout, accumulation = planned_layout(config)
    if config.trainer.micro_batch == AUTO:
        config, why = chosen(config, task, layout)
        accumulation = gradient_accumulation(config.trainer, layout)
    config = planned_compile(config, task, layout)
    return config, task, layout, accumulation, why


def with_time_to_stop(config: RunConfig, sweep: Sweep | None) -> tuple[RunConfig, Sweep | None]:
    """Return ``config`` and ``sweep`` with ``slurm.signal_seconds`` set to leave enough time to stop.

    The time is planned from ``config``.
    """
    is_known = config.launch.device != "cpu" and getattr(getattr(config, "model", None), "vocab_size", None) is not None
    if config.slurm.signal_seconds is not None or not is_known:
        return config, sweep
    needed = None
    with suppress(Exception), importing():  # a login node may lack torch or other requirements of a plan
        from serried.planner.overview import planned_stop_seconds

        needed = planned_stop_seconds(*_step(config)[:4])
    changed = {"slurm": config.slurm.model_copy(update={"signal_seconds": config.slurm.signals_before(needed or 0.0)})}
    if sweep is not None:
        points = tuple(replace(point, config=point.config.model_copy(update=changed)) for point in sweep.points)
        sweep = replace(sweep, points=points)
    return config.model_copy(update=changed), sweep


def grace_seconds(config: RunConfig) -> float | None:
    """Return the planned seconds from a request to stop until a run on Kubernetes is saved; None if unknown."""
    with suppress(Exception), importing():  # this machine may lack requirements of a plan
        from serried.planner.overview import planned_stop_seconds

        return planned_stop_seconds(
            *_step(config)[:4], node_bytes_per_second=config.kubernetes.bandwidth_bytes_per_second
        )
    return None


def traced_products(config: RunConfig) -> list[tuple[int, int, int]]:
    """Return the shapes of the matrix products in a step of ``config``, sorted by FLOPs, largest first."""
    from serried.planner.trace.traced_step import CannotTrace, products_of, trace_step

    try:
        return products_of(trace_step(*_step(config)[:4]))
    except CannotTrace as error:
        raise UserError(
            f"the matrix products to measure are unknown, because the step cannot be traced: {error}; use another "
            "model or layout"
        ) from None


def comparison_text(config: RunConfig, ran: "Figures") -> str:
    """Return a comparison of the plan of ``config`` with a run's measurements."""
    from serried.planner.compare import compared

    return compared(*_step(config)[:4], ran)
