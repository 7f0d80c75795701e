"""Causal attention on a CPU in blocks of rows, with optional documents, sliding window and capped scores.

Each block of queries is multiplied, in a few large products, with the keys from the first one that any of its queries
attends to up to the end of the block. No mask of queries x keys is created, and keys outside that range are skipped.
In bf16 it is also faster than SDPA's kernel, whose backward is slower in bf16 than in fp32 (torch 2.13).
Probabilities are recomputed in the backward, so that the same tensors are saved as by SDPA. Scores have the dtype of
the queries (fp32 for fp16), while SDPA's are fp32.

Forward and backward are custom operators, so that dispatch modes, fake tensors and torch.compile see one call, as with
SDPA.
"""

from collections.abc import Iterator
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

ROWS = 64
"""Number of queries in a block."""


def suits(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Return whether to use ``attend_by_rows`` for plain causal attention: in bf16 on a CPU, unless there are so few
    tokens that its overhead dominates."""
    is_low = q.dtype == k.dtype == v.dtype == torch.bfloat16
    return is_low and q.device.type == "cpu" and q.shape[2] == k.shape[2] >= ROWS // 2


@torch.library.custom_op("serried::scaled_dot_product_by_rows", mutates_args=())
def attend_by_rows(
    q: Tensor, k: Tensor, v: Tensor, scale: float, first: Tensor | None = None, soft_cap: float | None = None
) -> Tensor:
    """Return the causal attention of q [B, H, S, E] on k, v [B, K, S, E], with K key/value heads; H is a multiple of
    K.

    Args:
        scale: factor of the scores.
        first: [B or 1, S], the first key that each query attends to, ascending; None: key 0.
        soft_cap: a score x becomes soft_cap * tanh(x / soft_cap).
    """
    return _attention(q, k, v, scale, first, soft_cap, None)


@torch.library.custom_op("serried::scaled_dot_product_by_rows_with_logsumexp", mutates_args=())
def attend_by_rows_with_logsumexp(
    q: Tensor, k: Tensor, v: Tensor, scale: float, first: Tensor | None = None, soft_cap: float | None = None
) -> tuple[Tensor, Tensor]:
    """Like ``attend_by_rows``, and also return the log-sum-exp of each query's scores, [B, H, S] fp32."""
    sums = q.new_empty(q.shape[:-1], dtype=torch.float32)
    return _attention(q, k, v, scale, first, soft_cap, sums), sums


def _attention(
    q: Tensor, k: Tensor, v: Tensor, scale: float, first: Tensor | None, soft_cap: float | None, sums: Tensor | None
) -> Tensor:
    """Compute ``attend_by_rows``. Write the log-sum-exp of each query's scores into ``sums``, unless it is None."""
    if q.dtype == torch.float16:
        with torch.autocast("cpu", enabled=False):
            return _attention(q.float(), k.float(), v.float(), scale, first, soft_cap, sums).half()
    out = _empty_like(q)
    queries = _grouped(q * scale, k)
    values = v.flatten(0, 1)
    mixed = out.unflatten(1, (k.shape[1], -1))  # a view
    for block in _blocks(queries, k, first, soft_cap):
        place = mixed[block.sequences, :, :, block.rows]
        place.copy_(torch.bmm(block.probabilities, values[block.heads, block.seen]).view(place.shape))
        if sums is not None:
            line = sums.unflatten(1, (k.shape[1], -1))[block.sequences, :, :, block.rows]
            line.copy_(block.scores.float().logsumexp(-1).view(line.shape))
    return out


@torch.library.custom_op("serried::scaled_dot_product_by_rows_backward", mutates_args=())
def _backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, scale: float, first: Tensor | None, soft_cap: float | None,
    grad_sums: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    if q.dtype == torch.float16:
        with torch.autocast("cpu", enabled=False):
            found = _backward(grad.float(), q.float(), k.float(), v.float(), scale, first, soft_cap, grad_sums)
        return found[0].half(), found[1].half(), found[2].half()
    grad_q = _empty_like(q)
    queries = _grouped(q * scale, k)
    values = v.flatten(0, 1)
    along, incoming = grad_q.unflatten(1, (k.shape[1], -1)), _grouped(grad, k)
    # Accumulated over blocks in fp32.
    grad_k, grad_v = (torch.zeros(k.shape, dtype=torch.float32).flatten(0, 1) for _ in range(2))
    for block in _blocks(queries, k, first, soft_cap):
        coming = incoming[block.heads, :, block.rows].flatten(1, 2)
        # The backward of softmax is the only kernel that subtracts each row's sum and multiplies, in fp32.
        found = torch.bmm(coming, values[block.heads, block.seen].mT)
        scores = torch.ops.aten._softmax_backward_data(found, block.probabilities, -1, q.dtype)
        if grad_sums is not None:  # the gradient of a log-sum-exp is the probabilities
            line = grad_sums.unflatten(1, (k.shape[1], -1))[block.sequences, :, :, block.rows]
            scores += block.probabilities * line.reshape(*scores.shape[:2], 1).to(scores.dtype)
        if block.capped is not None:
            scores *= 1 - block.capped.square()
        grad_v[block.heads, block.seen] += torch.bmm(block.probabilities.mT, coming)
        grad_k[block.heads, block.seen] += torch.bmm(scores.mT, block.queries)
        place = along[block.sequences, :, :, block.rows]
        place.copy_(torch.bmm(scores, block.keys).view(place.shape))
    return grad_q.mul_(scale), grad_k.view(k.shape).to(k.dtype), grad_v.view(v.shape).to(v.dtype)


class _Block(NamedTuple):
    sequences: slice
    """Sequences of the block: all, or a single one if documents differ."""
    heads: slice
    """Key/value heads of these sequences, in the flattened dimension B x K."""
    rows: slice
    seen: slice
    """Range of keys that any of the rows attends to."""
    queries: Tensor
    """Queries, with the heads that share a key/value head stacked."""
    keys: Tensor
    capped: Tensor | None
    """Capped scores divided by the cap; None without a cap."""
    scores: Tensor
    """Scores, with masked ones at -inf."""
    probabilities: Tensor


def _blocks(queries: Tensor, k: Tensor, first: Tensor | None, soft_cap: float | None) -> Iterator[_Block]:
    length, every_key = k.shape[2], k.flatten(0, 1)
    is_apart = first is not None and len(first) > 1
    for number in range(len(k) if is_apart else 1):
        sequences = slice(number, number + 1) if is_apart else slice(None)
        heads = slice(number * k.shape[1], (number + 1) * k.shape[1]) if is_apart else slice(None)
        for start in range(0, length, ROWS):
            rows = slice(start, min(start + ROWS, length))
            edges = None if first is None else first[number, rows]
            seen = slice(0 if edges is None else int(edges[0]), rows.stop)
            asking, keys = queries[heads, :, rows].flatten(1, 2), every_key[heads, seen]
            scores, capped = torch.bmm(asking, keys.mT), None
            if soft_cap is not None:
                capped = torch.tanh(scores / soft_cap)
                scores = capped * soft_cap
            _hide(scores.unflatten(1, (-1, rows.stop - start)), start - seen.start, edges, seen.start)
            yield _Block(sequences, heads, rows, seen, asking, keys, capped, scores, scores.softmax(-1))


def _hide(scores: Tensor, own: int, edges: Tensor | None, start: int) -> None:
    """Mask in ``scores`` [B x K, H/K, R, N] the keys after each query and the keys before ``edges`` [R], in place.

    ``own``: index of the first of the block's own keys. ``start``: position of the first of the N keys.
    """
    rows = scores.shape[2]
    scores[..., own:] += _later(scores.dtype)[:rows, :rows]
    if edges is not None and (most := int(edges[-1]) - start) > 0:
        scores[..., :most].masked_fill_(torch.arange(start, start + most) < edges.unsqueeze(1), float("-inf"))


def _grouped(heads: Tensor, k: Tensor) -> Tensor:
    """Reshape [B, H, S, E] to [B x K, H/K, S, E]."""
    return heads.contiguous().view(-1, heads.shape[1] // k.shape[1], *heads.shape[2:])


def _empty_like(q: Tensor) -> Tensor:
    """Return an empty tensor like ``q`` with the heads of a token contiguous, as the output projection reads them."""
    return torch.empty_like(q.transpose(1, 2), memory_format=torch.contiguous_format).transpose(1, 2)


@cache
def _later(dtype: torch.dtype) -> Tensor:
    """Return the causal mask that is added to the scores of a block's own keys."""
    return torch.full((ROWS, ROWS), float("-inf"), dtype=dtype).triu_(1)


@attend_by_rows.register_fake
def _(q: Tensor, *_: Any) -> Tensor:
    return _empty_like(q)


@attend_by_rows_with_logsumexp.register_fake
def _(q: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return _empty_like(q), q.new_empty(q.shape[:-1], dtype=torch.float32)


@_backward.register_fake
def _(_: Tensor, q: Tensor, k: Tensor, v: Tensor, *__: Any) -> tuple[Tensor, Tensor, Tensor]:
    grad_k, grad_v = (torch.empty_like(tensor, memory_format=torch.contiguous_format) for tensor in (k, v))
    return _empty_like(q), grad_k, grad_v


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    del output
    q, k, v, ctx.scale, first, ctx.soft_cap = inputs
    ctx.save_for_backward(q, k, v, first)


def _differentiate(ctx: Any, grad: Tensor, grad_sums: Tensor | None = None) -> tuple[Tensor | None, ...]:
    q, k, v, first = ctx.saved_tensors
    return *_backward(grad, q, k, v, ctx.scale, first, ctx.soft_cap, grad_sums), None, None, None


for _operator in (attend_by_rows, attend_by_rows_with_logsumexp):
    _operator.register_autograd(_differentiate, setup_context=_keep)
