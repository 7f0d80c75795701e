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

from serried.recipes.models.row_attention import attend_by_rows, suits

Mask = Tensor | BlockMask | None
"""Bool, broadcastable to [B, 1, Q, S], True where a query attends to a key, or that in blocks; None: plainly causal."""

Places = tuple[Tensor, Tensor]

_FLEX_CAPABILITY = (8, 0)
"""Compute capability from which FlexAttention's kernels run: Ampere."""

_BLOCK = 128
"""Queries, and keys, of a block of FlexAttention."""

_HIDDEN_SCORE = -1e30
"""Of a key that a query does not attend to. Finite: a query without any key must not give NaN, and exp() of it is 0."""


def numbered_documents(positions: Tensor) -> Tensor:
    """Number the documents of each sequence, ascending; ``positions`` [B, S] restart from 0 with each."""
    return (positions == 0).cumsum(1)


def causal_mask(documents: Tensor | None, places: Places | None = None, window: int | None = None) -> Mask:
    """Causal attention within documents: ``documents`` [B, S] of ``numbered_documents``. Make it once a forward.

    ``places`` [Q] of the queries and [K] of the keys in the sequence; None: both are all of it, in order. With a
    ``window``, for which they are needed, a query attends to the last so many keys, itself included.
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
        return block_mask(documents, places, window)
    not_later = queries.unsqueeze(1) >= keys
    if window is not None:
        not_later &= queries.unsqueeze(1) - keys < window
    if documents is None:
        return not_later
    same = documents[:, queries].unsqueeze(2) == documents[:, keys].unsqueeze(1)  # [B, Q, K]
    return same.logical_and_(not_later).unsqueeze(1)


def windowed_mask(
    documents: Tensor | None, window: int, length: int, device: torch.device, places: Places | None = None
) -> Mask:
    """As ``causal_mask`` with a ``window``, for sequences of ``length`` tokens."""
    if documents is None and places is None and _has_flex(device):
        return window_blocks(window, length, device)
    every = torch.arange(length, device=device)
    return causal_mask(documents, places or (every, every), window)


@cache
def window_blocks(window: int, length: int, device: torch.device) -> BlockMask:
    """As ``block_mask`` of a plain sequence, which would first make a mask of length x length."""

    def attends(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        del batch, head
        return (query >= key) & (query - key < window)

    def listed(chosen: Tensor) -> tuple[Tensor, Tensor]:
        """How many blocks of keys are chosen for each block of queries, and which, these first; [1, 1, ...] each."""
        order = chosen.int().argsort(dim=1, descending=True, stable=True)
        return chosen.sum(1, dtype=torch.int32)[None, None], order.int()[None, None]

    blocks = torch.arange(-(-length // _BLOCK), device=device)
    apart = (blocks.unsqueeze(1) - blocks) * _BLOCK  # of their first query and key
    some = (apart >= 0) & (apart - _BLOCK + 1 < window)
    every = (apart >= _BLOCK - 1) & (apart + _BLOCK - 1 < window)
    return BlockMask.from_kv_blocks(
        *listed(some & ~every), *listed(every), BLOCK_SIZE=_BLOCK, mask_mod=attends, seq_lengths=(length, length)
    )


def block_mask(documents: Tensor | None, places: Places | None = None, window: int | None = None) -> BlockMask:
    """The mask of FlexAttention, for what ``causal_mask`` takes."""
    if places is None:
        assert documents is not None
        places = (torch.arange(documents.shape[1], device=documents.device),) * 2
    queries, keys = places

    def attends(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        del head
        query, key = queries[query], keys[key]
        seen = query >= key
        if window is not None:
            seen = seen & (query - key < window)
        return seen if documents is None else seen & (documents[batch, query] == documents[batch, key])

    size = None if documents is None else len(documents)
    return create_block_mask(attends, size, None, len(queries), len(keys), device=queries.device)


def attend(
    q: Tensor, k: Tensor, v: Tensor, mask: Mask, *, scale: float | None = None, soft_cap: float | None = None,
    kernel: str = "auto",
) -> Tensor:  # fmt: skip
    """Attention of q [B, H, Q, E] on k, v [B, K, S, E], with K key/value heads; H is a multiple of K.

    ``scale`` of the scores: 1 / sqrt(E) if None. With a ``soft_cap`` a score x becomes cap x tanh(x / cap). Only
    FlexAttention has a kernel for that; without it all scores are held, in fp32. ``kernel="sdpa"`` never takes
    ``row_attention``.
    """
    grouped = q.shape[1] != k.shape[1]
    if isinstance(mask, BlockMask):
        mod = None if soft_cap is None else _soft_capping(soft_cap)
        mixed: Tensor = _compiled_flex_attention()(q, k, v, mod, mask, scale, grouped)
        return mixed
    if soft_cap is not None:
        return _scored(q, k, v, mask, scale, soft_cap)[0]
    if kernel == "auto" and mask is None and suits(q, k, v):
        by_rows: Tensor = attend_by_rows(q, k, v, q.shape[-1] ** -0.5 if scale is None else scale)
        return by_rows
    return F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=grouped
    )  # fmt: skip


def attend_with_logsumexp(
    q: Tensor, k: Tensor, v: Tensor, mask: Mask, *, scale: float | None = None, soft_cap: float | None = None
) -> tuple[Tensor, Tensor]:
    """As ``attend``, with a mask, and the log of the sum of exp(score) of each query, [B, H, Q] fp32.

    With it, results of the same queries on several sets of keys are merged. Where a query attends to no key, its result
    is any number and its logarithm at most -1e29. On a CPU it holds all scores, in fp32.
    """
    if isinstance(mask, BlockMask):
        mod = None if soft_cap is None else _soft_capping(soft_cap)
        out, aux = _compiled_flex_attention()(
            q, k, v, mod, mask, scale, q.shape[1] != k.shape[1], return_aux=AuxRequest(lse=True)
        )
        return out, aux.lse.clamp(min=_HIDDEN_SCORE)
    assert mask is not None
    return _scored(q, k, v, mask, scale, soft_cap)


def _scored(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float | None, soft_cap: float | None
) -> tuple[Tensor, Tensor]:
    """Attention by all scores, and their log-sums."""
    heads, key_heads = q.shape[1], k.shape[1]
    if mask is None:
        mask = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).tril_()
    with torch.autocast(q.device.type, enabled=False):  # fp16 cannot hold the score of what is hidden
        grouped = q.float().unflatten(1, (key_heads, heads // key_heads))  # [B, K, H/K, Q, E]
        scores = grouped @ k.float().unsqueeze(2).transpose(-2, -1)  # [B, K, H/K, Q, S]
        scores = scores * (q.shape[-1] ** -0.5 if scale is None else scale)
        if soft_cap is not None:
            scores = soft_cap * torch.tanh(scores / soft_cap)
        scores = scores.masked_fill(~mask.unsqueeze(-3), _HIDDEN_SCORE)
        out = scores.softmax(-1) @ v.float().unsqueeze(2)
    return out.flatten(1, 2).to(v.dtype), scores.logsumexp(-1).flatten(1, 2)


@cache
def _soft_capping(soft_cap: float) -> Any:
    """What FlexAttention does to a score."""

    def capped(score: Tensor, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        del batch, head, query, key
        return soft_cap * torch.tanh(score / soft_cap)

    return capped


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
