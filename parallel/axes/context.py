"""Context parallelism: every sequence is sharded over ranks.

Only attention needs the tokens of other ranks. ``Gather`` collects all keys and values on every rank; ``Ring`` passes
them from rank to rank and never holds more than two shards (Ring Attention, https://arxiv.org/abs/2310.01889). A
sequence is split into 2 x ranks chunks. Each rank has one chunk from the front and one from the back: later tokens
attend to more keys, so with contiguous shards the first rank would have far less to compute than the last.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from serried.configs.errors import UserError
from serried.parallel.activation_checkpoint import kept
from serried.parallel.collectives import gather, start_shift
from serried.parallel.layout.mesh import Coordinates, Layout
from serried.parallel.layout.process_groups import Groups
from serried.parallel.layout.shard_specs import Slice
from serried.parallel.plan import Context, ParallelPlan, matches, with_sinks


def head_tail(whole: Tensor, dim: int, parts: int, index: int) -> Tensor:
    """Return shard ``index`` of ``whole``: chunks ``index`` and 2 x parts - 1 - ``index`` of 2 x parts along ``dim``.

    Raises:
        UserError: The sequence length is not a multiple of 2 x parts.
    """
    length = whole.shape[dim]
    if length % (2 * parts):
        raise UserError(
            f"parallel.context={parts} needs sequences of a multiple of {2 * parts} = 2 x {parts} tokens, but this one "
            f"has {length}; pad the sequences of the batch, or use parallel.context=1"
        )
    size = length // (2 * parts)
    head, tail = (whole.narrow(dim, chunk * size, size) for chunk in (index, 2 * parts - 1 - index))
    return torch.cat((head, tail), dim)


def holder_of(place: int, length: int, parts: int) -> tuple[int, int]:
    """Return the shard that contains token ``place`` of a sequence of ``length``, and the index in this shard."""
    size = length // (2 * parts)
    chunk, index = divmod(place, size)
    return (chunk, index) if chunk < parts else (2 * parts - 1 - chunk, size + index)


class _Part(Context):
    """Context of a rank that has one of several shards of each sequence."""

    def __init__(self, whole: Context, group: dist.ProcessGroup) -> None:
        """``whole``: the context of the unsharded model, which provides the attention functions."""
        super().__init__(whole.attend_locally, whole.attend_with_logsumexp)
        self.whole = whole
        self._group, self._parts, self._index = group, group.size(), group.rank()

    def whole_length(self, stream: Tensor) -> int:
        return super().whole_length(stream) * self._parts

    def part(self, whole: Tensor, dim: int) -> Tensor:
        return head_tail(whole, dim, self._parts, self._index)

    def _places(self, length: int, device: torch.device) -> list[Tensor]:
        """Return, for each rank, the positions of its tokens in the sequence."""
        places = torch.arange(length, device=device)
        return [head_tail(places, 0, self._parts, index) for index in range(self._parts)]


class Gather(_Part):
    """All-gather keys and values; reduce-scatter their gradients."""

    def mask(self, make: Callable[[tuple[Tensor, Tensor] | None], Any], length: int, device: torch.device) -> Any:
        """Return the attention mask.

        Keys are in rank order. Sorting them by position would need a copy.
        """
        places = self._places(length, device)
        return make((places[self._index], torch.cat(places)))

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Any, sinks: Tensor | None = None) -> Tensor:
        keys, values = gather(torch.stack((k, v)), 3, self._group).unbind()
        return super().attend(q, keys, values, mask, sinks)


class Ring(_Part):
    """Pass keys and values around a ring of ranks, in the forward and, with their gradients, in the backward.

    The forward keeps only this rank's shard. The backward recomputes the attention to each shard, because the kernels
    return gradients only together with a forward.
    """

    def mask(self, make: Callable[[tuple[Tensor, Tensor] | None], Any], length: int, device: torch.device) -> Any:
        """Return one mask per hop, the first for this rank's own keys.

        A mask is None if no query attends to the keys of the hop.
        """
        places = self._places(length, device)
        sources = [(self._index - hop) % self._parts for hop in range(self._parts)]
        masks = [make((places[self._index], places[source])) for source in sources]
        # A block mask already lists the blocks to compute, and checking it would synchronize with the device.
        return [None if isinstance(mask, Tensor) and not mask.any() else mask for mask in masks]

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Any, sinks: Tensor | None = None) -> Tensor:
        mixed, logsumexp = _RingAttention.apply(q, k, v, mask, self.attend_with_logsumexp, self._group)
        return mixed if sinks is None else with_sinks(mixed, logsumexp, sinks)


class _RingAttention(torch.autograd.Function):
    """Attention over the keys of all ranks, and the logsumexp of each query's scores.

    Combines the attention over each rank's keys, weighted by its sum of exp(score).
    """

    @staticmethod
    def forward(  # type: ignore[no-untyped-def]
        ctx, q: Tensor, k: Tensor, v: Tensor, masks: Sequence[Any], kernel: Callable[..., Any], group: dist.ProcessGroup
    ) -> tuple[Tensor, Tensor]:
        mixed, logsumexp = kept(partial(_around_the_ring, q, k, v, masks, kernel, group))
        ctx.save_for_backward(q, k, v, mixed, logsumexp)
        ctx.masks, ctx.kernel, ctx.group = masks, kernel, group
        ctx.set_materialize_grads(False)  # only models with sinks use the logsumexp
        return mixed, logsumexp

    @staticmethod
    def backward(  # type: ignore[no-untyped-def]
        ctx, grad: Tensor, grad_logsumexp: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        q, k, v, mixed, logsumexp = ctx.saved_tensors
        pair = torch.stack((k, v))
        # The gradients of a shard start at the first rank that receives it, are added up along the ring, and return to
        # the owner after the last hop.
        grad_q, home = (torch.zeros_like(tensor, dtype=torch.float32) for tensor in (q, pair))
        travelling: Callable[[], Tensor] | None = None
        along = (grad.float() * mixed.float()).sum(-1)  # [B, H, Q]
        if grad_logsumexp is not None:
            along -= grad_logsumexp
        for hop, mask in enumerate(ctx.masks):
            received = start_shift(pair, ctx.group) if hop + 1 < len(ctx.masks) else None
            mine = torch.zeros_like(home) if hop else home
            if mask is not None:
                leaves = [tensor.detach().requires_grad_() for tensor in (q, *pair.unbind())]
                with torch.enable_grad():
                    out, sums = ctx.kernel(*leaves, mask)
                weight = (sums.detach() - logsumexp).exp()  # weight of this hop in the merged result
                grad_out = grad.float() * weight.unsqueeze(-1)
                grad_sums = weight * ((grad.float() * out.detach().float()).sum(-1) - along)
                found = torch.autograd.grad((out, sums), leaves, (grad_out.to(out.dtype), grad_sums))
                grad_q += found[0]
                mine += torch.stack(found[1:])
            if hop:
                if travelling is not None:
                    mine += travelling()
                travelling = start_shift(mine, ctx.group)
            if received is not None:
                pair = received()
        if travelling is not None:
            home += travelling()
        return grad_q.to(q.dtype), home[0].to(k.dtype), home[1].to(v.dtype), None, None, None


def _around_the_ring(
    q: Tensor, k: Tensor, v: Tensor, masks: Sequence[Any], kernel: Callable[..., Any], group: dist.ProcessGroup
) -> tuple[Tensor, Tensor]:
    """Return the attention over the keys of all ranks, and the log of the sums of exp(score)."""
    pair = torch.stack((k, v))
    mixed, logsumexp = torch.empty(0), torch.empty(0)
    for hop, mask in enumerate(masks):
        received = start_shift(pair, group) if hop + 1 < len(masks) else None  # overlaps with this hop's attention
        if mask is not None:
            out, sums = kernel(q, *pair.unbind(), mask)
            if hop == 0:  # every query attends to itself
                mixed, logsumexp = out.float(), sums
            else:
                both = torch.logaddexp(logsumexp, sums)
                mixed = mixed * (logsumexp - both).exp().unsqueeze(-1) + out * (sums - both).exp().unsqueeze(-1)
                logsumexp = both
        if received is not None:
            pair = received()
    return mixed.to(q.dtype), logsumexp


class ContextAxis:
    """The context axis. It does not shard parameters."""

    axis = "context"

    def slices(self, plan: ParallelPlan, layout: Layout, name: str, shape: Sequence[int]) -> tuple[Slice, ...]:
        """Return (): parameters are not sharded along this axis.

        Raises:
            UserError: The plan does not declare ``context``.
        """
        del name, shape
        if not plan.context:
            raise UserError(
                f"parallel.context={layout.context}: the model does not declare where tokens of a sequence attend to "
                "each other; return ParallelPlan(context=...) from parallel_plan(), or use parallel.context=1"
            )
        return ()

    def is_partial(self, plan: ParallelPlan, layout: Layout, name: str) -> bool:
        """Return False: context ranks hold FSDP2 shards, so FSDP2 sums gradients over them."""
        del plan, layout, name
        return False

    def apply(self, module: nn.Module, plan: ParallelPlan, layout: Layout, place: Coordinates, groups: Groups) -> None:
        """Replace the ``Context`` of attention modules, so that they attend to the tokens of all ranks."""
        del place
        assert groups.context is not None
        kind = Ring if layout.context_method == "ring" else Gather
        for point in context_points(module, plan):
            point.context = kind(point.context, groups.context)


def context_points(module: nn.Module, plan: ParallelPlan) -> list[Any]:
    """Return the modules of this rank's pipeline stages that have a ``Context``."""
    named = [child for name, child in module.named_modules() if any(matches(name, glob) for glob in plan.context)]
    return [child for child in named if isinstance(getattr(child, "context", None), Context)]


@contextmanager
def with_whole_sequences(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Context manager in which each rank computes its own, whole sequences."""
    parts = [
        (module, part)
        for root in modules
        for module in root.modules()
        if isinstance(part := getattr(module, "context", None), _Part)
    ]
    points: list[tuple[Any, _Part]] = [*parts]
    for module, part in points:
        module.context = part.whole
    try:
        yield
    finally:
        for module, part in points:
            module.context = part


CONTEXT = ContextAxis()
