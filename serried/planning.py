"""``serried plan RUN``, ``serried plan compare RUN`` and ``serried plan calibrate``."""

from pathlib import Path
from tempfile import TemporaryDirectory

from serried.configs.addresses import is_address, not_a_path
from serried.configs.command_arguments import run_key
from serried.configs.command_line import config_dirs
from serried.configs.errors import EXIT_FINISHED, UserError
from serried.configs.schema.declaration import declared, declaring
from serried.configs.schema.sections import RunConfig
from serried.records.files import output_file
from serried.runtime.process import is_started, say
from serried.saved import existing_runs, is_run, run_folder, task_that_trained


def calibrate(words: list[str]) -> int:
    """Measure rates with the processes that train.py would have, here or in a job, and write them."""
    from serried.configs.compose import compose
    from serried.launch.local.launcher import run_local
    from serried.launch.slurm.batch_script import measure_by_job
    from serried.program import planned_layout, traced_products

    given = [word for word in words if word.startswith("out=")]
    overrides, folders = config_dirs([word for word in words if word not in given])
    typed = given[-1].partition("=")[2] if given else "rates.json"
    if is_address(typed):
        raise UserError(not_a_path("out", typed))
    out = Path(typed)
    if not out.name or out.is_dir() or not out.parent.is_dir():
        raise UserError(f"out={out} is not a file in an existing folder; use out=rates.json")
    out = output_file(out)
    with declaring(declared()._replace(config_dirs=folders)):
        config = compose(overrides)
        if config.precision.name not in ("fp32", "bf16", "fp16"):
            raise UserError(f"precision={config.precision.name} is not measured; use precision=bf16")
        planned_layout(config.model_copy(update={"dry_run": True}))  # before processes start or a job waits
        if config.launch.name == "slurm" and not is_started():
            return measure_by_job("plan calibrate", words, config)
        if (config.launch.processes or 1) > 1 and not is_started():
            with TemporaryDirectory() as folder:
                there = config.model_copy(update={"run": config.run.model_copy(update={"dir": Path(folder)})})
                return run_local(there, words, program=("-m", "serried", "plan", "calibrate")) or EXIT_FINISHED
        from serried.planner.time.calibrate import calibrate as measure  # with torch, which a login node need not have

        shapes = traced_products(config)  # before the session: the trace has a process group of its own
        return measure(config.launch, out, config.precision.name, shapes)


def plan_run(word: str | None, overrides: list[str], *, is_compared: bool) -> int:
    """Print the plan of the run that ``word`` names, or what it measured beside that."""
    from serried.configs.compose import compose_saved
    from serried.planner.compare import as_it_ran, figures_of
    from serried.program import comparison_text, plan_text

    if word is None:
        raise UserError(f"serried plan compare needs a run folder; {existing_runs(Path('runs'), is_run)}")
    run = run_folder(f"runs/{word}" if run_key(word) == "run.name" else word, is_run)
    overrides, folders = config_dirs(overrides)
    with declaring(task_that_trained(run, "plan")._replace(config_dirs=folders)):
        reads = ("plan", "dry_run") if is_compared else ("",)
        config: RunConfig = compose_saved(run / "config.yaml", [*overrides, "dry_run=true"], reads)
        ran = figures_of(run)
        if ran is not None:
            config = as_it_ran(config, ran, overrides)
        if not is_compared:
            return say(plan_text(config))
        if ran is None or not ran.steps:
            raise UserError(f"the run in {run} has logged no step to compare with; see serried status {run}")
        return say(comparison_text(config, ran))
