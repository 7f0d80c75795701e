"""The training program: ``python train.py --help``, ``torchrun --nproc_per_node=8 train.py recipe=llama8b``."""

import gc
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from functools import partial

import serried.runtime.import_signals  # noqa: F401 -- first, so that a signal during imports prints one line
from serried.callback_flag import callback_names, load_callback
from serried.configs.compose import compose
from serried.configs.errors import UserError
from serried.configs.help import help_text
from serried.configs.override_parser import Action, config_dirs, parse_arguments
from serried.configs.schema.declaration import BUILT_IN, Declaration, declared, declaring
from serried.configs.schema.registry import tasks
from serried.configs.schema.run_config import config_yaml
from serried.configs.schema.sections import RunConfig
from serried.configs.unused_keys import Run
from serried.launch.start import describe_runs, planned_sweep, start_elsewhere, start_sweep
from serried.planning import grace_seconds, plan_text, planned_layout, with_time_to_stop
from serried.records.report import write_report
from serried.runtime.exit import leave, note_idle, note_repeated, report_mistake
from serried.runtime.import_signals import LAUNCHER, importing, is_program
from serried.runtime.process import (
    check_surroundings,
    is_started,
    make_sums_repeatable,
    may_use_gpus,
    remember_flags,
    remember_script,
    remember_words,
    say,
    sleep_while_waiting,
    typed_command,
)
from serried.runtime.session import Session, run_in_session
from serried.runtime.signals import SWEEP
from serried.task_class import installed, task_of


def main(arguments: list[str], declaration: Declaration = BUILT_IN) -> int:
    """Train the declared task with command-line ``arguments``, and return the exit code.

    Mistakes are printed, not raised.
    """
    if is_program():
        remember_script()
    with suppress(OSError):  # the load is unknown, as in some containers
        sleep_while_waiting(os.getloadavg()[0])
    try:
        check_surroundings(arguments)
        words, callbacks = callback_names(arguments)
        words, folders = config_dirs(words)
        action, overrides = parse_arguments(words)
        chosen = [] if declaration.task else [word for word in overrides if word.startswith("task=")]
        if chosen:
            name = chosen[-1].partition("=")[2]
            declaration, overrides = installed(name), [word for word in overrides if word not in chosen]
            overrides += [f"task.name={name}"] * (declaration is BUILT_IN)
    except UserError as error:
        return report_mistake(error)
    flags = [*(f"--config-dir={folder}" for folder in folders), *(f"--callback={name}" for name in callbacks)]
    remember_flags([*chosen, *flags])
    remember_words(overrides)
    all_callbacks = (*declaration.callbacks, *callbacks)
    with declaring(declaration._replace(config_dirs=folders, callbacks=all_callbacks)):
        config = _do(action, overrides)
        if isinstance(config, int):
            return config
        if config.trainer.deterministic:
            make_sums_repeatable()
        return run_in_session(config.launch, partial(_train, config))


def _do(action: Action, overrides: list[str]) -> int | RunConfig:
    """Perform ``action``. Return its exit code, or the configuration if this process must train."""
    try:
        note_repeated(overrides)
        if action == "help":
            return say(help_text(typed_command(), chosen=overrides))
        sweep = planned_sweep(overrides) if action == "sweep" else None
        configs = [point.config for point in sweep.points] if sweep else [compose(overrides)]
        gc.enable()
        if configs[0].plan.search:
            return say(plan_text(configs[0]))
        note_unread(overrides, configs, is_sweep=sweep is not None)
        config = configs[0]
        if config.launch.name == "slurm" and not config.dry_run and action != "config" and not is_started():
            config, sweep = with_time_to_stop(config, sweep)
        if action == "config" or config.dry_run:
            return say(config_yaml(config) if action == "config" else plan_text(config) + describe_runs(sweep))
        code = (
            start_sweep(sweep, write_report)
            if sweep
            else start_elsewhere(overrides, config, partial(_load, config), partial(grace_seconds, config))
        )
    except UserError as error:
        return report_mistake(error)
    return config if code is None else code


def note_unread(overrides: Sequence[str], configs: Sequence[RunConfig], *, is_sweep: bool = False) -> None:
    """Print a note for each override that no run of ``configs`` uses, unless the parent process has printed it.

    Raises:
        UserError: The layout of a run is invalid.
    """
    runs = [Run(config, planned_layout(config)[0], is_sweep, _is_on_cpu(config)) for config in configs]
    if LAUNCHER not in os.environ and SWEEP not in os.environ:
        note_idle(overrides, runs)


def _is_on_cpu(config: RunConfig) -> bool:
    """Return whether the run certainly computes on a CPU, or is planned for a CPU."""
    is_for_gpus = config.dry_run and (config.plan.model_fields_set or config.parallel.strategy in ("fsdp", "hsdp"))
    is_elsewhere = config.launch.submits or is_for_gpus
    return config.launch.device == "cpu" or not (is_elsewhere or may_use_gpus(config.launch))


def _load(config: RunConfig) -> None:
    """Import all modules that training needs until its first step."""
    is_first = "serried.trainer.run" not in sys.modules
    with importing():
        import torch._dynamo  # noqa: F401 -- imported by optimizers

        import serried.planner.run_planner
        import serried.trainer.run  # noqa: F401

        _ = declared().task or tasks.get(config.task.name).load()
        if is_first:
            gc.freeze()  # exclude the imports from garbage collection, which would copy their memory in a fork


def _train(config: RunConfig, session: Session) -> int:
    with session.signals.loading():
        _load(config)
    from serried.planner.run_planner import RunPlanner
    from serried.trainer.run import train

    session.same_everywhere("the config", text := config_yaml(config))
    callbacks = [load_callback(given) if isinstance(given, str) else given for given in declared().callbacks]
    return train(config, task_of(config), session, text, RunPlanner(), callbacks)


if __name__ == "__main__":
    leave(main(sys.argv[1:]))
