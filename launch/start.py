"""From ``python train.py`` to processes: does this one train, start others here, or submit a job?"""

from collections.abc import Callable, Sequence

from serried.configs.errors import UserError
from serried.configs.libraries import check_data_libraries
from serried.configs.points import Sweep
from serried.configs.schema import RunConfig, TextRunConfig
from serried.configs.trackers import check_trackers
from serried.launch.slurm import refuse_unequal
from serried.launch.sweep import WriteReport, run_sweep, submit_sweep, values_shown
from serried.runtime.ranks import is_started, torchrun_says
from serried.runtime.signals import end_with_sweep

_RUNS_DESCRIBED = 20


def start_elsewhere(argv: Sequence[str], config: RunConfig) -> int | None:
    """Start what ``launch`` says and return the exit code; None where this process is itself to train.

    Raises:
        UserError: the launcher cannot do that, or not here; or a library that the run needs is not installed.
    """
    _check_libraries(config)
    if is_started():
        return None
    end_with_sweep()
    _refuse_idle_dry_run(config)
    if config.launch.name == "torchrun":
        return None
    if config.launch.name == "local":
        from serried.launch.local import run_local

        return run_local(config, argv)
    from serried.launch.slurm import submit

    return submit({tuple(argv): config})


def _refuse_idle_dry_run(config: RunConfig) -> None:
    if config.slurm.dry_run and config.launch.name != "slurm":
        raise UserError(
            f"slurm.dry_run=true prints what launch=slurm would submit, and this is launch={config.launch.name}; use "
            "launch=slurm, or dry_run=true for the plan of the run"
        )


def _check_libraries(config: RunConfig) -> None:
    """Before anything is started: each process would take as long as torch to be imported to find the same."""
    check_trackers(config.track)
    has_others_there = config.launch.name == "slurm" and (config.slurm.python or config.slurm.container)
    if (is_started() or not has_others_there) and isinstance(config, TextRunConfig):
        check_data_libraries(config.data)


def planned_sweep(argv: Sequence[str], read_sweep: Callable[[Sequence[str]], Sweep]) -> Sweep:
    """What ``read_sweep`` makes of ``argv``, where that can be started from here.

    Raises:
        UserError: the launcher cannot do that, or not here; or there is no such sweep.
    """
    if is_started():
        raise UserError(
            "-m under torchrun would start every run in every process; type it without torchrun: python train.py -m "
            f"launch=local launch.processes={torchrun_says()[3]} ..."
        )
    sweep = read_sweep(argv)
    is_submitted = sweep.points[0].config.launch.name == "slurm"
    if is_submitted and sweep.search is not None:
        raise UserError(
            "hydra/sweeper=optuna with launch=slurm: each run is chosen when the ones before it have ended; have one "
            "job train them all: sbatch ... --wrap 'python train.py -m launch=local hydra/sweeper=optuna ...'"
        )
    if is_submitted:
        refuse_unequal([point.config for point in sweep.points])
    return sweep


def start_sweep(sweep: Sweep, write_report: WriteReport) -> int:
    """Train the runs of ``sweep``, a planned one, here, or submit those that are not finished; return the exit code.

    ``write_report`` compares the runs in the end: it is given their folders, the best first, and the file to write.

    Raises:
        UserError: a library that the runs need is not installed, the launcher cannot do what is asked, the folders
            cannot be used, or Slurm refuses the job.
    """
    config = sweep.points[0].config
    for point in sweep.points:
        _check_libraries(point.config)
        _refuse_idle_dry_run(point.config)
    return (submit_sweep if config.launch.name == "slurm" else run_sweep)(sweep, write_report)


def describe_runs(sweep: Sweep | None) -> str:
    """Lines to stand below the plan of the first of the points of ``sweep``, of which nothing is started: its runs, or
    what is known of a search. Empty where there is none."""
    if sweep is None:
        return ""
    runs, keys = f"{sweep.runs} runs", " x ".join(sweep.keys)
    if sweep.search is not None:
        end = values_shown(sweep.keys, sweep.points[0])
        return (
            f"\n{'sweep':<10} {runs}: {keys}; each is chosen as it begins; the ends of the space are checked, and this "
            f"is the plan of one of them, {end}"
        )
    lines = [("sweep", f"{runs}: {keys}; all are checked, and this is the plan of the first")]
    lines += [
        (f"run {number}/{sweep.runs}", f"{values_shown(sweep.keys, point)}: {point.config.run.dir}")
        for number, point in enumerate(sweep.points[:_RUNS_DESCRIBED], start=1)
    ]
    lines += [("...", f"{sweep.runs - _RUNS_DESCRIBED} more")] if sweep.runs > _RUNS_DESCRIBED else []
    return "".join(f"\n{label:<10} {text}" for label, text in lines)
