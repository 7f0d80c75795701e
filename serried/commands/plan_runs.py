"""``serried recipes`` and ``serried plan``."""

from pathlib import Path
from tempfile import TemporaryDirectory

from serried.configs.addresses import is_address, not_a_path
from serried.configs.errors import EXIT_FINISHED, UserError
from serried.configs.messages.suggestions import nearest
from serried.configs.override_parser import config_dirs
from serried.configs.schema.declaration import declared, declaring
from serried.configs.schema.sections import RunConfig
from serried.configs.subcommand_arguments import run_key
from serried.records.files import output_file
from serried.runtime.process import is_started, say, typed_command
from serried.saved import existing_runs, is_run, run_folder, task_that_trained

_PARTS_OF_PLAN = ("search", "compare", "calibrate")


def recipes(words: list[str]) -> int:
    """List the recipes."""
    from serried.configs.help import recipes_text

    if words:
        raise UserError(
            f"serried recipes takes no arguments, but got {' '.join(words)}; to see the plan of a recipe: serried plan "
            f"recipe={words[0].removeprefix('recipe=')}"
        )
    return say(
        f"{recipes_text()}\nTrain one: python {typed_command()} recipe=NAME. Show its plan: serried plan recipe=NAME"
    )


def plan(words: list[str]) -> int:
    """Print the plan of a run, on any machine: memory, communication, time and suggestions.

    RUN          run folder, to plan its config on the same number of processes; overrides are applied on top
    plan.mode    trace (default): traces a step on tensors without data; formula: uses only sizes, which is faster
    plan.device  h100, rtx4090, ...: the GPU to plan for; plan.memory=24GiB: another memory size; plan.tokens=15T
                 and plan.price=2.5: also print total time and cost
    plan.rates   rates of another machine, a file written by serried plan calibrate
    json=true    print one JSON object
    search       as the first argument: print the fastest of all valid layouts with their overrides instead;
                 out=layouts.html: also write a page
    compare RUN  compare the plan with the measurements of the run
    calibrate    measure the rates of this machine with launch.processes=N (or under torchrun), or of a cluster with
                 launch=slurm launch.nodes=N, for the shapes of a recipe, and write them to out=rates.json
    """
    from serried.program import main as train

    part = words[0] if words and words[0] in _PARTS_OF_PLAN else ""
    words = words[bool(part) :]
    if part == "calibrate":
        return _calibrate(words)
    if "json=true" in words:
        words = [word for word in words if word != "json=true"] + ["plan.as_json=true"]
    if part == "search":
        words = [f"plan.{word}" if word.startswith("out=") else word for word in words] + ["plan.search=true"]
    elif not any(word.startswith("plan.mode=") for word in words):
        words = [*words, "plan.mode=trace"]
    run = next((word for word in words if "=" not in word and not word.startswith("-")), None)
    if run is not None and not Path(run).exists() and (close := nearest(run, _PARTS_OF_PLAN)):
        raise UserError(f"there is no folder {run}; did you mean serried plan {close[0]}?")
    if run is not None and run.endswith(".py"):
        why = "serried plan search supports only built-in models; " if part == "search" else ""
        raise UserError(f"{run} is a script; {why}plan its task with: python {run} dry_run=true plan.mode=trace")
    if run is not None or part == "compare":
        return _plan_run(run, [word for word in words if word != run], is_compared=part == "compare")
    return train([*words, *([] if "dry_run=true" in words else ["dry_run=true"])])


def _calibrate(words: list[str]) -> int:
    """Measure rates with the same processes as train.py, on this machine or in a job, and write them to a file."""
    from serried.configs.compose import compose
    from serried.launch.local.launcher import run_local
    from serried.launch.slurm.batch_script import measure_by_job
    from serried.planning import planned_layout, traced_products

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
            raise UserError(
                f"serried plan calibrate does not support precision={config.precision.name}; use precision=bf16"
            )
        planned_layout(config.model_copy(update={"dry_run": True}))  # checks the layout before processes or a job start
        if config.launch.name == "slurm" and not is_started():
            return measure_by_job("plan calibrate", words, config)
        if (config.launch.processes or 1) > 1 and not is_started():
            with TemporaryDirectory() as folder:
                there = config.model_copy(update={"run": config.run.model_copy(update={"dir": Path(folder)})})
                return run_local(there, words, program=("-m", "serried", "plan", "calibrate")) or EXIT_FINISHED
        from serried.planner.time.calibrate import calibrate as measure  # imports torch, which a login node may lack

        shapes = traced_products(config)  # before the session, since the trace creates its own process group
        return measure(config.launch, out, config.precision.name, shapes)


def _plan_run(word: str | None, overrides: list[str], *, is_compared: bool) -> int:
    """Print the plan of the run ``word``, or a comparison of the plan with the run's measurements."""
    from serried.configs.compose import compose_saved
    from serried.planner.compare import as_it_ran, figures_of
    from serried.planning import comparison_text, plan_text

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
