"""Overrides of train.py that train as another framework's config does."""

from serried.configs.messages.suggestions import advice
from serried.conversion.converted import Converted
from serried.conversion.foreign_config import ForeignConfig
from serried.conversion.foreign_data import data_of
from serried.conversion.layout_overrides import set_batch, set_layout, set_precision
from serried.conversion.model_overrides import choose_recipe, set_adapter, set_data, set_model, set_sequences
from serried.conversion.training_overrides import (
    set_intervals,
    set_memory,
    set_optimizer,
    set_preference,
    set_rest,
    set_schedule,
    set_steps,
    set_tracking,
)


def converted(config: ForeignConfig, gpus: int | None, steps: int | None, recipe: str | None) -> Converted:
    """Return the overrides for ``config``.

    Args:
        config: the other framework's config.
        gpus: number of GPUs; by default as in the config, or one.
        steps: number of optimizer steps of the run, to convert fractions of it.
        recipe: recipe to use instead of the one that the config implies.
    """
    out = Converted(decide=[*config.undetermined] if gpus is None else [])
    task = choose_recipe(config, out, recipe)
    data = data_of(config, task)
    set_model(config, out)
    set_data(config, out, data, task)
    set_sequences(config, out, task)
    is_adapter = set_adapter(config, out)
    set_batch(config, out, gpus, task)
    set_layout(config, out)
    set_precision(config, out, is_adapter)
    set_optimizer(config, out)
    total = set_steps(config, out, steps)
    set_schedule(config, out, total)
    set_preference(config, out, task)
    set_memory(config, out)
    set_intervals(config, out, data, total)
    set_tracking(config, out)
    set_rest(config, out)
    for setting, known in config.answers:  # else the answer that train.py gives to the name
        answer = known or advice(setting.name.rpartition(".")[2], "")
        out.lack(setting, answer or "serried has no key for this")
    return out
