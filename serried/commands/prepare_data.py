"""``serried prepare``."""

from serried.configs.errors import UserError
from serried.runtime.process import say


def prepare(words: list[str]) -> int:
    """Tokenize the data once, before training or on another machine.

    show            print this many samples, with the tokens that are trained on marked
    data.workers    threads; one per core by default
    data.cache_dir  folder to write; pass the same value to train.py
    """
    from serried.configs.compose import compose
    from serried.configs.subcommand_arguments import number, pairs
    from serried.recipes.text.causal_lm import CausalLM
    from serried.runtime.console import Console

    given, overrides = pairs(words, "prepare", ("show",), reads_overrides=True)
    show = number(given, "show", 0, 0, 1000)
    config = compose(overrides)
    threads = config.data.workers if "workers" in config.data.model_fields_set else None
    if threads == 0:
        raise UserError("data.workers=0 leaves no thread to prepare data; use data.workers=1, or leave it out")
    recipe = CausalLM(config)
    recipe.open_data(recipe.prepare(Console(speaks=True, rank=0).progress, threads))
    recipe.vocab_size()  # raises if the model is too small for the tokenizer
    return say("\n".join([recipe.summary(), *recipe.shown_samples(show)]))
