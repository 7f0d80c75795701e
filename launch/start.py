"""From ``python train.py`` to processes: does this one train, start others here, or submit a job?"""

from collections.abc import Mapping

from configs.errors import UserError
from configs.schema import RunConfig
from configs.trackers import check_installed
from launch.ranks import is_started


def start_elsewhere(points: Mapping[tuple[str, ...], RunConfig], *, is_sweep: bool) -> int | None:
    """Start what ``launch`` says and return the exit code; None where this process is itself to train.

    ``points`` are the runs that were asked for, by their command lines: one, unless it is a sweep.

    Raises:
        UserError: the launcher cannot do that, or not here; or a tracker is not installed.
    """
    (argv, config), *_ = points.items()
    check_installed(config.track)
    if is_sweep and is_started():
        raise UserError(
            "-m under torchrun would start every run in every process; type it without torchrun: "
            "python train.py launch=slurm -m ..."
        )
    if is_sweep and config.launch.name != "slurm":
        raise UserError(
            f"a sweep (-m) with launch={config.launch.name} is not in this version yet; use launch=slurm, which makes "
            "it one array job, or start one run for each value"
        )
    if is_started():
        return None
    if config.slurm.dry_run and config.launch.name != "slurm":
        raise UserError(
            f"slurm.dry_run=true prints what launch=slurm would submit, and this is launch={config.launch.name}; use "
            "launch=slurm, or dry_run=true for the plan of the run"
        )
    if config.launch.name == "torchrun":
        return None
    if config.launch.name == "local":
        from launch.local import run_local

        return run_local(config, argv)
    from launch.slurm import submit

    return submit(points)
