"""Train a recipe: ``python train.py --help``, ``torchrun --nproc_per_node=8 train.py recipe=llama8b``."""

import sys

from configs.compose import compose, config_yaml, help_text, parse_arguments
from configs.errors import EXIT_FAILED, EXIT_FINISHED, TrainingFailed, UserError
from configs.schema import RunConfig
from launch.session import leave, open_session, planned_processes, report_failure, report_mistake, speaks
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
    from trainer.overview import overview

    recipe = CausalLM(config)
    model = recipe.build_model()
    place = f"planned for {layout.data_ranks} process{'es' if layout.data_ranks > 1 else ''}"
    lines = overview(config, recipe, layout, accumulation, model, recipe.parallel_plan(model), place)
    return "\n".join([*lines, "dry run: no model was allocated and no process started\n"])


def _run(config: RunConfig) -> int:
    from recipes.causal_lm import CausalLM
    from trainer.trainer import train

    try:
        with open_session(config.launch) as session:
            try:
                session.same_everywhere("the config", config_yaml(config))
                return train(config, CausalLM(config), session, config_yaml(config))
            except UserError as error:
                return report_mistake(error, session)
            except BaseException as error:
                return report_failure(error, session)
    except UserError as error:  # while joining: every process sees the same machine
        return report_mistake(error)
    except TrainingFailed as error:  # while joining: nobody to ask who was first
        print(f"failed: {error}", file=sys.stderr, flush=True)
        return EXIT_FAILED


def _print(text: str) -> int:
    if speaks():
        print(text.rstrip("\n"))
    return EXIT_FINISHED


if __name__ == "__main__":
    leave(main(sys.argv[1:]))
