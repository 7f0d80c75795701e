"""Weights of float8 products that FSDP2 gathers as float8 numbers: half the bytes of bf16, and the same products.

FSDP2 looks for ``fsdp_pre_all_gather`` and ``fsdp_post_all_gather`` on the tensor that a rank holds of a parameter. It
stays a plain tensor, so optimizers and checkpoints need not know of it.
"""

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from serried.parallel.layout.process_groups import Groups
from serried.parallel.precision.float8_int8 import Float8


def can_gather(rows: int, ranks: int) -> bool:
    """Whether a weight with so many rows is gathered in float8: FSDP2 puts a padded shard in place of an uneven one."""
    return rows % ranks == 0


class Float8Gather:
    """The weights on this rank that are gathered in float8, and their scales."""

    def __init__(self, stages: Iterable[nn.Module], groups: Groups) -> None:
        """``stages``: sharded, with memory for their parameters."""
        self._group = groups.fsdp.get_group("fsdp")
        self.weights: list[_Weight] = []
        layers: Iterable[Any] = (module for stage in stages for module in stage.modules())
        for layer in layers:
            product = getattr(layer, "product", None)
            if isinstance(product, Float8) and product.gathers and can_gather(len(layer.weight), self._group.size()):
                self.weights.append(_Weight(layer.weight, product))

    @torch.no_grad()
    def set_scales(self) -> None:
        """Set the scales of the weights from their current values; there must be at least one weight. A collective;
        call it before they are gathered."""
        largest = torch.stack([torch.linalg.vector_norm(weight.shard, torch.inf) for weight in self.weights]).float()
        dist.all_reduce(largest, dist.ReduceOp.MAX, self._group)
        scales = self.weights[0].product.scales_of(largest)
        for weight, scale in zip(self.weights, scales.unbind(), strict=True):
            weight.scale = scale


class _Weight:
    """One weight: what FSDP2 calls to gather it."""

    scale: Tensor

    def __init__(self, parameter: Any, product: Float8) -> None:
        # FSDP2 looks at this tensor; ``to_local`` returns a view of it. torch's test of plain tensors with these
        # methods takes it so too (test_all_gather_extensions_monkey_patch).
        shard = parameter._local_tensor
        self.shard, self.product = shard, product
        shard.fsdp_pre_all_gather, shard.fsdp_post_all_gather = self._round, self._wrap

    def _round(
        self, mesh: Any, outer_size: Any, outer_stride: Any, module: nn.Module, mp_policy: Any
    ) -> tuple[tuple[Tensor, ...], Tensor]:
        """Return the tensors to gather, and the metadata that ``_wrap`` needs."""
        del mesh, outer_size, outer_stride, module, mp_policy  # FSDP2 checks the number of arguments
        # As bytes: Gloo gathers no float8.
        return (self.product.round(self.shard, self.scale).view(torch.uint8),), self.scale

    def _wrap(
        self, gathered: tuple[Tensor, ...], scale: Tensor, dtype: torch.dtype, *, out: Any = None
    ) -> tuple[Tensor, tuple[Tensor, ...]] | None:
        """Return the whole weight, and what to free beside ``gathered``; ``out``: the one that it returned before."""
        if out is None:
            return self.product.rounded(gathered[0], scale, dtype), ()
        out._scale = scale  # its numbers are in the same memory as before
        return None
