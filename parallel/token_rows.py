"""Trained rows of a frozen embedding and head, as with PEFT's ``trainable_token_indices``.

The rows are a parameter of their own, so the optimizer has state only for them. They replace rows of the weight.

Shapes: K trained rows, D dim, V vocabulary.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from serried.parallel.plan import Vocabulary

ROWS, IDS, _ORDER = "token_rows", "token_ids", "token_order"
"""Names of the parameter with the rows [K, D], the buffer with their token ids [K], and the buffer with the indices
that sort these ids [K]."""


def attach_rows(module: Any, tokens: Sequence[int]) -> None:
    """Add zero-filled rows for ``tokens`` to an embedding or a head. An embedding also gets a hook that looks them
    up."""
    shape = (len(tokens), module.weight.shape[1])
    module.register_parameter(ROWS, nn.Parameter(torch.zeros(shape, dtype=torch.float32, device=module.weight.device)))
    ids = torch.tensor(tokens)
    module.register_buffer(IDS, ids, persistent=False)
    module.register_buffer(_ORDER, ids.argsort(), persistent=False)
    if isinstance(module, nn.Embedding):
        share_tokens(module, _unchanged)
        module.register_forward_hook(_look_up)


def share_tokens(module: Any, part: Callable[[Tensor], Tensor]) -> None:
    """Set the function that shards a tensor [B, S, 1] like the output of an embedding with tensor parallelism."""
    if hasattr(module, ROWS):
        module.part_of_tokens = part


def with_rows(module: Any, weight: Tensor, vocabulary: Vocabulary) -> Tensor:
    """Return ``weight``, this rank's rows of a head, with the trained rows of ``module``."""
    index = getattr(module, IDS) - vocabulary.first_row
    is_here = (index >= 0) & (index < len(weight))
    rows = vocabulary.shared(getattr(module, ROWS)).to(weight.dtype)
    return weight.index_copy(0, index[is_here], rows[is_here])


def _unchanged(tokens: Tensor) -> Tensor:
    return tokens


def _look_up(module: Any, arguments: tuple[Tensor, ...], output: Tensor) -> Tensor:
    tokens = module.part_of_tokens(arguments[0].unsqueeze(-1))
    ids, order, rows = getattr(module, IDS), getattr(module, _ORDER), getattr(module, ROWS)
    row = order[torch.searchsorted(ids[order], tokens).clamp(max=len(ids) - 1)]
    return torch.where(ids[row] == tokens, F.embedding(row.squeeze(-1), rows.to(output.dtype)), output)
