"""Dispatch of ``python train.py`` by ``launch``: train in this process, start processes here, or submit a job."""

from collections.abc import Callable, Sequence

from serried.configs.errors import UserError
from serried.configs.requirements import check_data_libraries, check_trackers
from serried.configs.schema.data import TextRunConfig
from serried.configs.schema.sections import RunConfig
from serried.launch.slurm.batch_script import refuse_unequal
from serried.launch.sweep.grid import read_sweep
from serried.launch.sweep.points import Sweep
from serried.launch.sweep.train_sweep import WriteReport, run_sweep, submit_sweep, values_shown
from serried.runtime.process import is_started, torchrun_says
from serried.runtime.signals import end_with_sweep

_RUNS_DESCRIBED = 20
_CONTAINERS = ("kubernetes", "skypilot")
"""Launchers that start the run in a container image."""


def start_elsewhere(
    argv: Sequence[str], config: RunConfig, load: Callable[[], object], stop_seconds: Callable[[], float | None]
) -> int | None:
    """Start the run with the launcher ``launch`` and return the exit code; None if this process must train.

    ``load`` imports training's modules once for all ranks that are forked from this process. ``stop_seconds`` returns
    the planned time from a request to stop until the run is saved on a cluster; None if unknown.

    Raises ``UserError`` if the launcher cannot be used here, or a library that the run needs is not installed.
    """
    _check_libraries(config)
    if is_started():
        return None
    end_with_sweep()
    _refuse_idle_dry_run(config)
    if config.launch.name == "torchrun":
        return None
    if config.launch.name == "local":
        from serried.launch.local.launcher import run_local

        return run_local(config, argv, load)
    if config.launch.name == "kubernetes":
        from serried.launch.kubernetes.submit import submit as create

        return create(argv, config, stop_seconds)
    if config.launch.name == "skypilot":
        from serried.launch.skypilot import submit as create_job

        return create_job(argv, config)
    from serried.launch.slurm.batch_script import submit

    return submit({tuple(argv): config})


def _refuse_idle_dry_run(config: RunConfig) -> None:
    if config.slurm.dry_run and config.launch.name != "slurm":
        raise UserError(
            "slurm.dry_run=true prints the script that launch=slurm would submit, but this is "
            f"launch={config.launch.name}; use launch=slurm, or dry_run=true to print the plan of the run"
        )
    for name, section in (("kubernetes", config.kubernetes), ("skypilot", config.skypilot)):
        if section.dry_run and config.launch.name != name:
            raise UserError(
                f"{name}.dry_run=true prints the YAML that launch={name} would create, but this is "
                f"launch={config.launch.name}; use launch={name}, or dry_run=true to print the plan of the run"
            )


def _check_libraries(config: RunConfig) -> None:
    # Checked before anything starts: otherwise each process would import torch first and then fail in the same way.
    has_others_there = config.launch.name in _CONTAINERS or (
        config.launch.name == "slurm" and (config.slurm.python or config.slurm.container)
    )
    if is_started() or config.launch.name not in _CONTAINERS:  # pods have their own libraries and variables
        check_trackers(config.track)
    if (is_started() or not has_others_there) and isinstance(config, TextRunConfig):
        check_data_libraries(config.data)


def planned_sweep(argv: Sequence[str]) -> Sweep:
    """Return the checked sweep of the command line ``argv``. Raises ``UserError`` if it has none, or if the launcher
    cannot run it from here."""
    if is_started():
        raise UserError(
            "-m under torchrun would start every run in every process; start without torchrun: python train.py -m "
            f"launch=local launch.processes={torchrun_says()[3]} ..."
        )
    sweep = read_sweep(argv)
    if (launcher := sweep.points[0].config.launch.name) in _CONTAINERS:
        raise UserError(
            f"-m cannot be used with launch={launcher}, which creates one run; run the command once for each value, "
            "with another run.name"
        )
    is_submitted = sweep.points[0].config.launch.name == "slurm"
    if is_submitted and sweep.search is not None:
        raise UserError(
            "search.trials cannot be used with launch=slurm, as each trial depends on the results of earlier trials; "
            "submit one job for all trials: sbatch ... --wrap 'python train.py -m launch=local search.trials=20 ...'"
        )
    if is_submitted:
        refuse_unequal([point.config for point in sweep.points])
    return sweep


def start_sweep(sweep: Sweep, write_report: WriteReport) -> int:
    """Train the unfinished runs of ``sweep`` here, or submit them. Return the exit code.

    Args:
        write_report: writes the page that compares the runs in the given folders, best first.

    Raises:
        UserError: a library is not installed, the folders cannot be used, or Slurm refuses the job.
    """
    config = sweep.points[0].config
    for point in sweep.points:
        _check_libraries(point.config)
        _refuse_idle_dry_run(point.config)
    return (submit_sweep if config.launch.name == "slurm" else run_sweep)(sweep, write_report)


def describe_runs(sweep: Sweep | None) -> str:
    """Return the lines about ``sweep`` that a dry run prints below the plan; empty if ``sweep`` is None."""
    if sweep is None:
        return ""
    runs, keys = f"{sweep.runs} runs", " x ".join(sweep.keys)
    if sweep.search is not None:
        corner = values_shown(sweep.keys, sweep.points[0])
        return (
            f"\n{'sweep':<10} {runs}: {keys}; the values of a run are chosen when it starts; the ends of the space are "
            f"checked, and the plan above is for one of them: {corner}"
        )
    lines = [("sweep", f"{runs}: {keys}; all are checked, and the plan above is for the first")]
    lines += [
        (f"run {number}/{sweep.runs}", f"{values_shown(sweep.keys, point)}: {point.config.run.place}")
        for number, point in enumerate(sweep.points[:_RUNS_DESCRIBED], start=1)
    ]
    lines += [("...", f"{sweep.runs - _RUNS_DESCRIBED} more")] if sweep.runs > _RUNS_DESCRIBED else []
    return "".join(f"\n{label:<10} {text}" for label, text in lines)
