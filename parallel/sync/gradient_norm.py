"""Gradient sums and norms that are equal on every rank."""

from collections.abc import Iterable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from serried.parallel.layout.local_shards import HeldTensor, is_sharded, local
from serried.parallel.layout.mesh import Layout
from serried.parallel.layout.process_groups import Groups

_LONGEST_FP32_ROW = 2**15


def sum_in_fp32(module: nn.Module, *, reduces_each: bool) -> None:
    """Accumulate gradients of micro-batches in fp32, for parameters of lower precision.

    FSDP2 already does so for unreduced gradients. With ``reduces_each``, FSDP2 reduces the gradients of each
    micro-batch and accumulates them in the dtype of ``.grad``.
    """
    for parameter in module.parameters():
        if parameter.requires_grad and not is_sharded(parameter):
            parameter.grad_dtype = torch.float32
        elif parameter.requires_grad and reduces_each:
            parameter.grad_dtype = None  # the first gradient of FSDP2 is bf16
            parameter.register_post_accumulate_grad_hook(_widen)


def _widen(parameter: Tensor) -> None:
    if parameter.grad is not None:
        parameter.grad = parameter.grad.float()


def zero_gradient(parameter: Tensor) -> Tensor:
    """Return zeros with the shape and gradient dtype of ``parameter``."""
    return torch.zeros_like(parameter, dtype=parameter.grad_dtype)


@torch.no_grad()
def sum_of_squares(gradients: Iterable[Tensor]) -> Tensor:
    """Return the sum of squares of this rank's shards of the gradients, an fp64 scalar.

    Norms of rows (the last dim) are computed in fp32 and combined in fp64. This is as fast as one fp32 norm per tensor
    and exact to about 1e-8. The rounding error of one fp32 norm per tensor (1e-5 to 1e-3 on a CPU) would depend on the
    sharding.
    """
    return torch.cat([_row_norms(local(gradient)) for gradient in gradients]).double().square().sum()


@torch.no_grad()
def reduce_partial_gradients(parameters: Iterable[HeldTensor], axis: str, group: dist.ProcessGroup) -> None:
    """Sum the gradients that are partial over ``axis``, with one all-reduce per step."""
    partial = [shard.tensor for shard in parameters if axis in shard.spec.sums_over and shard.tensor.requires_grad]
    if not partial:
        return
    for parameter in partial:
        if parameter.grad is None:
            parameter.grad = zero_gradient(parameter)
    gradients = [local(parameter.grad) for parameter in partial if parameter.grad is not None]
    flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
    flat = flat.to(torch.promote_types(flat.dtype, torch.float32))
    dist.all_reduce(flat, group=group)
    for gradient, total in zip(gradients, flat.split([gradient.numel() for gradient in gradients]), strict=True):
        gradient.copy_(total.view_as(gradient))


@torch.no_grad()
def sum_tied_gradients(parameters: Iterable[HeldTensor], groups: Groups) -> None:
    """Sum the gradients of parameters shared by the first and the last stage, so that both get the same update."""
    tied: dict[str, list[Tensor]] = {}
    for held in parameters:
        if len(held.spec.holders) > 1 and held.tensor.requires_grad:
            if held.tensor.grad is None:
                held.tensor.grad = zero_gradient(held.tensor)
            tied.setdefault(held.name, []).append(local(held.tensor.grad))
    for first, *others in tied.values():
        for other in others:
            first.add_(other)
        if groups.ends is not None:  # otherwise one rank has both stages
            dist.all_reduce(first, group=groups.ends)
        for other in others:
            other.copy_(first)


@torch.no_grad()
def global_sum_of_squares(by_copies: Mapping[int, Sequence[Tensor]], layout: Layout, device: torch.device) -> Tensor:
    """Return the sum of squares of the full reduced gradient, an fp64 scalar bitwise equal on all ranks.

    ``by_copies`` maps the number of ranks that hold each element to this rank's parameters, in ascending order. All
    ranks must pass the same keys.
    """
    squares = {}
    for copies, parameters in by_copies.items():
        trained = [parameter for parameter in parameters if parameter.requires_grad]
        gradients = [parameter.grad for parameter in trained if parameter.grad is not None]
        squares[copies] = (
            sum_of_squares(gradients).to(device)  # from host memory if offloaded
            if gradients
            else torch.zeros((), dtype=torch.float64, device=device)
        )
    # Gradients replicated on all ranks result from an all-reduce, so all ranks already have the same sum.
    whole = squares.pop(layout.world, None) if layout.pipeline == 1 else None
    if not squares:
        assert whole is not None, "a model has a parameter to train"
        return whole
    # All replicas contribute, so that a NaN on any rank reaches all ranks.
    table = torch.stack(list(squares.values()))
    dist.all_reduce(table)
    totals = [row / copies for row, copies in zip(table.unbind(), squares, strict=True)]
    return torch.stack(totals if whole is None else [*totals, whole]).sum()


def _row_norms(gradient: Tensor) -> Tensor:
    rows = gradient if gradient.ndim else gradient.view(1)
    dtype = torch.float64 if rows.shape[-1] > _LONGEST_FP32_ROW else torch.promote_types(rows.dtype, torch.float32)
    return torch.linalg.vector_norm(rows, dim=-1, dtype=dtype).flatten()
