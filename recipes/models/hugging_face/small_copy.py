"""Small random copies of transformers models, with which a model's code is tested before it trains.

A copy has the code, options and kinds of layers of the model, but few layers, heads and rows, so that a test on the CPU
takes a fraction of a second for a model of any size.
"""

from collections.abc import Sequence
from typing import Any

import torch

_ROWS = 61
"""Size of a copy's vocabulary."""
_WIDTH = 32
"""Hidden width of a copy's feed-forward."""
_WINDOW = 4
"""Sliding window of a copy, which few tokens exceed."""
_STD = 0.05
_MOST_PARAMETERS = 60_000_000
_WIDTHS = ("intermediate_size", "ffn_dim", "ffn_hidden_size", "n_inner")
"""Endings of config keys for the width of a feed-forward."""
_TOKENS = ("pad_token_id", "bos_token_id", "eos_token_id")
WINDOWS = ("sliding_window", "attention_chunk_size")
"""Config keys of models whose layers may compute their own masks."""


def small_copy(model: Any) -> Any:
    """Return a small random copy of a transformers model, in fp32 and evaluation mode, on the CPU; None if its sizes
    cannot be changed."""
    from transformers import AutoConfig

    try:
        config = AutoConfig.for_model(**_small_values(model.config))
        with torch.device("meta"):
            count = sum(parameter.numel() for parameter in type(model)(config).parameters())
        if count > _MOST_PARAMETERS:
            return None
        with torch.device("cpu"), torch.random.fork_rng(devices=[]), torch.no_grad():
            torch.default_generator.manual_seed(0)  # torch.manual_seed would also seed GPUs
            copy = type(model)(config).eval()
            for parameter in copy.parameters():  # otherwise biases would be 0, and logits almost equal
                parameter += _STD * torch.randn_like(parameter)
            copy(torch.ones(1, 2, dtype=torch.int64))
        return copy
    except Exception:  # a model's code may raise any exception, for example if a size depends on another one
        return None


def head_width(config: Any) -> int:
    """Return the width of an attention head of a transformers model with ``config``."""
    width: int = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return width


def _small_values(config: Any) -> dict[str, Any]:
    """Return the values of ``config`` with small sizes. Options and the width of a head do not change."""
    values = config.to_dict()
    new: dict[str, Any] = {key: 0 for key in _TOKENS if values.get(key) is not None}
    heads, groups = (getattr(config, key, None) for key in ("num_attention_heads", "num_key_value_heads"))
    if isinstance(heads, int):
        groups = groups if isinstance(groups, int) else heads
        new["num_key_value_heads"] = min(groups, 2)
        new["num_attention_heads"] = min(groups, 2) * min(heads // groups, 2)
        new["hidden_size"] = new["num_attention_heads"] * head_width(config)
    layers = config.num_hidden_layers
    lists = {key: value for key, value in values.items() if isinstance(value, list | tuple) and len(value) == layers}
    kept = _layers_of_each_kind(list(lists.values()), layers)
    values |= {key: [value[layer] for layer in kept] for key, value in lists.items()}
    new["num_hidden_layers"] = len(kept)
    new["vocab_size"] = _ROWS
    renamed = {config.attribute_map.get(key, key): value for key, value in new.items()}
    values |= {key: value for key, value in renamed.items() if key in values}
    widths = {key: value for key, value in values.items() if key.endswith(_WIDTHS) and value is not None}
    values |= {key: _WIDTH if isinstance(value, int) else [_WIDTH] * len(kept) for key, value in widths.items()}
    values |= {key: _WINDOW for key in WINDOWS if isinstance(values.get(key), int)}
    return values | {"use_cache": False}


def _layers_of_each_kind(lists: Sequence[Sequence[Any]], layers: int) -> list[int]:
    """Return the numbers of the first layers of each kind, at least two.

    ``lists``: settings of the layers, which have one kind if there are none.
    """
    first = {str([each[layer] for each in lists]): layer for layer in reversed(range(layers))}
    return sorted({*first.values()} | {*range(min(2, layers))})
