"""Differentiable collectives on plain tensors. All ranks of a group must call them in the same order.

Only this file exchanges tensors that require gradients: autograd silently ignores the other collectives of torch. Each
function documents its backward. All ranks have shards of equal size unless stated otherwise. Sums use the tensor's
dtype.

The implementation uses torch's functional collectives, which have no public name. Each returns a new tensor, so that
activation checkpointing can keep the result instead of repeating the exchange, and torch.compile can trace it.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

_functional = torch.ops._c10d_functional


def _all_gather_on_cpu(x: Tensor, ranks: int, group_name: str) -> Tensor:
    gathered = x.new_empty(ranks * len(x), *x.shape[1:])
    sent, received = (torch.view_as_real(tensor) if x.is_complex() else tensor for tensor in (x, gathered))
    _functional.all_gather_into_tensor_out(sent, ranks, group_name, out=received)
    return gathered


# With Gloo, torch's kernel may crash the process. Two threads run the collectives of a group. After each collective
# they store its name in the same std::string without a lock (ProcessGroupGloo::runLoop:
# pgStatus_->lastCompletedWorkName, in torch 2.11 and 2.13). The name ALLGATHER_COALESCED is too long for the string's
# inline buffer, so both threads may free the old value. ALLGATHER, which FSDP2 uses and which sends the same bytes,
# fits.
_gloo = torch.library.Library("_c10d_functional", "IMPL", "CPU")
_gloo.impl("all_gather_into_tensor", _all_gather_on_cpu)


def gather(x: Tensor, dim: int, group: ProcessGroup) -> Tensor:
    """Return the shards of all ranks, concatenated along ``dim`` in rank order (all-gather).

    Backward: reduce-scatter (``scatter_sum``).
    """
    return Exchange.apply(x, partial(_gathered, dim=dim, group=group), partial(_scattered_sum, dim=dim, group=group))


def scatter_sum(x: Tensor, dim: int, group: ProcessGroup) -> Tensor:
    """Return this rank's shard, along ``dim``, of the sum over all ranks (reduce-scatter). Backward: ``gather``."""
    return Exchange.apply(x, partial(_scattered_sum, dim=dim, group=group), partial(_gathered, dim=dim, group=group))


def copy(x: Tensor, group: ProcessGroup) -> Tensor:
    """Return ``x``, which is equal on all ranks. Backward: the sum of the gradients of all ranks."""
    return Exchange.apply(x, _same, partial(_summed, group=group))


def all_sum(x: Tensor, group: ProcessGroup) -> Tensor:
    """Return the sum over all ranks (all-reduce).

    Backward: the unchanged gradient, which must be equal on all ranks.
    """
    return Exchange.apply(x, partial(_summed, group=group), _same)


def join(x: Tensor, dim: int, sizes: Sequence[int], group: ProcessGroup) -> Tensor:
    """Return the shards of all ranks, concatenated along ``dim``. Their ``sizes`` may differ.

    Backward: this rank's shard of the gradient, which must be equal on all ranks.
    """
    return _Join.apply(x, dim % x.ndim, sizes, group)


def start_shift(x: Tensor, group: ProcessGroup) -> Callable[[], Tensor]:
    """Start sending ``x`` to the next rank of the ring. Call the result to wait for the previous rank's tensor.

    Not differentiable.
    """
    ranks, rank = dist.get_world_size(group), dist.get_rank(group)
    sent, received = [0] * ranks, [0] * ranks
    sent[(rank + 1) % ranks] = received[(rank - 1) % ranks] = x.numel()
    flat = x.contiguous().view(-1)
    rows = torch.empty_like(flat)
    work = dist.all_to_all_single(rows, flat, received, sent, group=group, async_op=True)

    def wait() -> Tensor:
        work.wait()
        return rows.view(x.shape)

    return wait


def all_to_all(x: Tensor, sent: Sequence[int], received: Sequence[int], group: ProcessGroup) -> Tensor:
    """Send ``sent[i]`` rows of ``x`` to rank i, in order, and return ``received[i]`` rows from it.

    Backward: the reverse exchange.
    """
    there, back = (partial(exchange, sent=a, received=b, group=group) for a, b in ((sent, received), (received, sent)))
    return Exchange.apply(x, there, back)


def exchange(x: Tensor, sent: Sequence[int], received: Sequence[int], group: ProcessGroup) -> Tensor:
    """``all_to_all`` that is not differentiable."""
    return _done(_functional.all_to_all_single(x.contiguous(), list(received), list(sent), group.group_name))


def _gathered(x: Tensor, dim: int, group: ProcessGroup) -> Tensor:
    ranks = group.size()
    parts = _done(_functional.all_gather_into_tensor(x.contiguous(), ranks, group.group_name))
    return parts.view(ranks, *x.shape).movedim(0, dim).flatten(dim, dim + 1)


def _scattered_sum(x: Tensor, dim: int, group: ProcessGroup) -> Tensor:
    ranks = group.size()
    assert x.shape[dim] % ranks == 0, f"dim {dim} of {list(x.shape)} is not a multiple of {ranks} ranks"
    parts = x.unflatten(dim, (ranks, -1)).movedim(dim, 0).contiguous()
    return _done(_functional.reduce_scatter_tensor(parts.flatten(0, 1), "sum", ranks, group.group_name))


def _summed(x: Tensor, group: ProcessGroup) -> Tensor:
    return _done(_functional.all_reduce(x.contiguous(), "sum", group.group_name))


def _same(x: Tensor) -> Tensor:
    return x.view_as(x)


def _done(result: Tensor) -> Tensor:
    """Wait for ``result``. On a GPU the stream waits, not the host."""
    return _functional.wait_tensor(result)


class Exchange(torch.autograd.Function):
    """Apply ``there`` to a tensor, and ``back`` to its gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, there: Callable[[Tensor], Tensor], back: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.back = back
        return there(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return ctx.back(gradient), None, None


class _Join(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, sizes: Sequence[int], group: ProcessGroup) -> Tensor:
        rank, width = dist.get_rank(group), max(sizes)
        ctx.dim, ctx.first, ctx.size = dim, sum(sizes[:rank]), sizes[rank]
        assert x.shape[dim] == ctx.size, f"{list(x.shape)} on rank {rank}, expected {ctx.size} on dim {dim}"
        padded = x.new_zeros(*x.shape[:dim], width, *x.shape[dim + 1 :])
        padded.narrow(dim, 0, ctx.size).copy_(x)
        parts = _gathered(padded, dim, group).split(width, dim)
        return torch.cat([part.narrow(dim, 0, size) for part, size in zip(parts, sizes, strict=True)], dim)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        return gradient.narrow(ctx.dim, ctx.first, ctx.size), None, None, None
