"""Causal attention in bf16 on a CPU, in blocks of rows.

There the backward of SDPA's kernel is slower in bf16 than in fp32 (torch 2.13). Here a block of queries meets the keys
up to its end in a few large products, which run in the processor's bf16 units. Probabilities are computed again in the
backward, which so keeps what SDPA's does. Scores are rounded to bf16; those of SDPA are not.

Both directions are operations of torch: dispatch modes, fake tensors and torch.compile see one call, as of SDPA.
"""

from collections.abc import Iterator
from functools import cache
from typing import Any

import torch
from torch import Tensor

ROWS = 64
"""Queries of a block."""


def suits(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether ``attend_by_rows`` is for them. For a few tokens it takes longer to call than to compute."""
    is_low = q.dtype == k.dtype == v.dtype == torch.bfloat16
    return is_low and q.device.type == "cpu" and q.shape[2] == k.shape[2] >= ROWS // 2


@torch.library.custom_op("serried::scaled_dot_product_by_rows", mutates_args=())
def attend_by_rows(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """Causal attention of q [B, H, S, E] on k, v [B, K, S, E], with K key/value heads; H is a multiple of K."""
    out, queries, values = _empty_like(q), _grouped(q * scale, k), v.flatten(0, 1)
    mixed = out.unflatten(1, (k.shape[1], -1))  # a view
    for rows, probabilities, _, _ in _blocks(queries, k):
        found = torch.bmm(probabilities, values[:, : rows.stop])
        mixed[:, :, :, rows] = found.view(mixed[:, :, :, rows].shape)
    return out


@torch.library.custom_op("serried::scaled_dot_product_by_rows_backward", mutates_args=())
def _backward(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    grad_q, queries, values = _empty_like(q), _grouped(q * scale, k), v.flatten(0, 1)
    along, incoming = grad_q.unflatten(1, (k.shape[1], -1)), _grouped(grad, k)
    # Sums over blocks, in fp32.
    grad_k, grad_v = (torch.zeros(k.shape, dtype=torch.float32).flatten(0, 1) for _ in range(2))
    for rows, probabilities, asking, keys in _blocks(queries, k):
        coming = incoming[:, :, rows].flatten(1, 2)
        # The one kernel that subtracts each row's sum and multiplies, in fp32: that of softmax's own backward.
        found = torch.bmm(coming, values[:, : rows.stop].mT)
        scores = torch.ops.aten._softmax_backward_data(found, probabilities, -1, torch.bfloat16)
        grad_v[:, : rows.stop] += torch.bmm(probabilities.mT, coming)
        grad_k[:, : rows.stop] += torch.bmm(scores.mT, asking)
        along[:, :, :, rows] = torch.bmm(scores, keys).view(along[:, :, :, rows].shape)
    return grad_q.mul_(scale), grad_k.view(k.shape).to(k.dtype), grad_v.view(v.shape).to(v.dtype)


def _grouped(heads: Tensor, k: Tensor) -> Tensor:
    """[B, H, S, E] -> [B x K, H/K, S, E]."""
    return heads.contiguous().view(-1, heads.shape[1] // k.shape[1], *heads.shape[2:])


def _blocks(queries: Tensor, k: Tensor) -> Iterator[tuple[slice, Tensor, Tensor, Tensor]]:
    """Yield rows of each block, its probabilities, queries (heads of a group below each other) and keys."""
    length, keys = k.shape[2], k.flatten(0, 1)
    for start in range(0, length, ROWS):
        rows = slice(start, min(start + ROWS, length))
        asking, size = queries[:, :, rows].flatten(1, 2), rows.stop - start
        scores = torch.bmm(asking, keys[:, : rows.stop].mT)
        scores.unflatten(1, (-1, size))[..., start:] += _hidden()[:size, :size]
        yield rows, scores.softmax(-1), asking, keys[:, : rows.stop]


def _empty_like(q: Tensor) -> Tensor:
    """With the heads of a token beside each other, as the projection after attention reads them."""
    return torch.empty_like(q.transpose(1, 2), memory_format=torch.contiguous_format).transpose(1, 2)


@cache
def _hidden() -> Tensor:
    """Added to the scores of a block's own keys."""
    return torch.full((ROWS, ROWS), float("-inf"), dtype=torch.bfloat16).triu_(1)


@attend_by_rows.register_fake
def _(q: Tensor, *_: Any) -> Tensor:
    return _empty_like(q)


@_backward.register_fake
def _(_: Tensor, q: Tensor, k: Tensor, v: Tensor, *__: Any) -> tuple[Tensor, Tensor, Tensor]:
    grad_k, grad_v = (torch.empty_like(each, memory_format=torch.contiguous_format) for each in (k, v))
    return _empty_like(q), grad_k, grad_v


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    del output
    *tensors, ctx.scale = inputs
    ctx.save_for_backward(*tensors)


def _differentiate(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    return *_backward(grad, *ctx.saved_tensors, ctx.scale), None


attend_by_rows.register_autograd(_differentiate, setup_context=_keep)
