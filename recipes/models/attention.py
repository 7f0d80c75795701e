"""Causal attention, within documents where several share a sequence.

Positions alone do not keep documents apart: attention has to stop at their borders. On a CPU that is a mask for
``scaled_dot_product_attention``. On a GPU it is FlexAttention (https://arxiv.org/abs/2412.05496), which leaves out the
blocks in which no document meets itself; it has no backward on a CPU (torch 2.13).
"""

from functools import cache
from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, create_block_mask, flex_attention

Mask = Tensor | BlockMask | None
"""Bool, broadcastable to [B, 1, Q, S], True where a query attends to a key, or that in blocks; None: plainly causal."""

Places = tuple[Tensor, Tensor]

_FLEX_CAPABILITY = (8, 0)
"""Compute capability from which FlexAttention's kernels run: Ampere."""

_HIDDEN_SCORE = -1e30
"""Of a key that a query does not attend to. Finite: a query without any key must not give NaN, and exp() of it is 0."""


def numbered_documents(positions: Tensor) -> Tensor:
    """Number the documents of each sequence, ascending; ``positions`` [B, S] restart from 0 with each."""
    return (positions == 0).cumsum(1)


def causal_mask(documents: Tensor | None, places: Places | None = None) -> Mask:
    """Causal attention within documents: ``documents`` [B, S] of ``numbered_documents``. Make it once a forward.

    ``places`` [Q] of the queries and [K] of the keys in the sequence; None: both are all of it, in order.
    """
    if places is None:
        if documents is None:
            return None
        if _has_flex(documents.device):
            return block_mask(documents)
        same = documents.unsqueeze(2) == documents.unsqueeze(1)  # [B, S, S]
        return same.tril_().unsqueeze(1)
    queries, keys = places
    if _has_flex(queries.device):
        return block_mask(documents, places)
    not_later = queries.unsqueeze(1) >= keys
    if documents is None:
        return not_later
    same = documents[:, queries].unsqueeze(2) == documents[:, keys].unsqueeze(1)  # [B, Q, K]
    return same.logical_and_(not_later).unsqueeze(1)


def block_mask(documents: Tensor | None, places: Places | None = None) -> BlockMask:
    """The mask of FlexAttention, for what ``causal_mask`` takes."""
    if places is None:
        assert documents is not None
        places = (torch.arange(documents.shape[1], device=documents.device),) * 2
    queries, keys = places

    def attends(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        del head
        query, key = queries[query], keys[key]
        if documents is None:
            return query >= key
        return (documents[batch, query] == documents[batch, key]) & (query >= key)

    size = None if documents is None else len(documents)
    return create_block_mask(attends, size, None, len(queries), len(keys), device=queries.device)


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Mask) -> Tensor:
    """Attention of q [B, H, Q, E] on k, v [B, K, S, E], K key/value heads, of which H is a multiple."""
    grouped = q.shape[1] != k.shape[1]
    if mask is None:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)
    if isinstance(mask, Tensor):
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=grouped)
    mixed: Tensor = _compiled_flex_attention()(q, k, v, block_mask=mask, enable_gqa=grouped)
    return mixed


def attend_with_logsumexp(q: Tensor, k: Tensor, v: Tensor, mask: Mask) -> tuple[Tensor, Tensor]:
    """As ``attend``, with a mask, and the log of the sum of exp(score) of each query, [B, H, Q] fp32.

    With it, results of the same queries on several sets of keys are merged. Where a query attends to no key, its result
    is any number and its logarithm at most -1e29. On a CPU it holds all scores, in fp32.
    """
    heads, key_heads = q.shape[1], k.shape[1]
    if isinstance(mask, BlockMask):
        out, aux = _compiled_flex_attention()(
            q, k, v, block_mask=mask, enable_gqa=heads != key_heads, return_aux=AuxRequest(lse=True)
        )
        return out, aux.lse.clamp(min=_HIDDEN_SCORE)
    assert mask is not None
    with torch.autocast(q.device.type, enabled=False):  # fp16 cannot hold the score of what is hidden
        grouped = q.float().unflatten(1, (key_heads, heads // key_heads))  # [B, K, H/K, Q, E]
        scores = grouped @ k.float().unsqueeze(2).transpose(-2, -1) / q.shape[-1] ** 0.5  # [B, K, H/K, Q, S]
        scores = scores.masked_fill(~mask.unsqueeze(-3), _HIDDEN_SCORE)
        out = scores.softmax(-1) @ v.float().unsqueeze(2)
    return out.flatten(1, 2).to(v.dtype), scores.logsumexp(-1).flatten(1, 2)


@cache
def _has_flex(device: torch.device) -> bool:
    """Whether FlexAttention has a kernel there, which Triton makes."""
    if device.type != "cuda" or find_spec("triton") is None:
        return False
    return torch.cuda.get_device_capability(device) >= _FLEX_CAPABILITY


@cache
def _compiled_flex_attention() -> Any:
    # Uncompiled it would hold all scores.
    return torch.compile(flex_attention, dynamic=False)
