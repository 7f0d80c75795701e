"""Train a recipe: ``python train.py --help``, ``torchrun --nproc_per_node=8 train.py recipe=llama8b``."""

import sys
from contextlib import suppress

from configs.compose import compose, config_yaml, help_text, parse_arguments
from configs.errors import EXIT_FINISHED, UserError
from configs.schema import RunConfig
from launch.session import Session, leave, planned_processes, report_mistake, run_in_session, speaks
from parallel.mesh import Layout, gradient_accumulation, resolve_layout


def main(arguments: list[str]) -> int:
    """Do what the command line says and return the exit code. Mistakes and failures are printed here, not raised."""
    try:
        action, overrides = parse_arguments(arguments)
        if action == "help":
            return _print(help_text())
        config = compose(overrides)
        if action == "config":
            return _print(config_yaml(config))
        layout = resolve_layout(config.parallel, planned_processes(config.launch, config.dry_run))
        accumulation = gradient_accumulation(config.trainer, layout)
        if config.dry_run:
            return _print(_plan(config, layout, accumulation))
    except UserError as error:
        return report_mistake(error)
    return _run(config)


def _plan(config: RunConfig, layout: Layout, accumulation: int) -> str:
    from recipes.causal_lm import CausalLM
    from trainer.overview import dry_run

    return dry_run(config, CausalLM(config), layout, accumulation)


def _run(config: RunConfig) -> int:
    text = config_yaml(config)

    def work(session: Session) -> int:
        from recipes.causal_lm import CausalLM
        from trainer.trainer import train

        session.same_everywhere("the config", text)
        return train(config, CausalLM(config), session, text)

    return run_in_session(config.launch, work)


def _print(text: str) -> int:
    if speaks():
        with suppress(BrokenPipeError):  # into a pager or head that has read enough
            print(text.rstrip("\n"), flush=True)
    return EXIT_FINISHED


if __name__ == "__main__":
    leave(main(sys.argv[1:]))
