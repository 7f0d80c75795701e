"""All-gather of weights in float8 by FSDP2: half the bytes of bf16, with the same matrix products.

FSDP2 looks for ``fsdp_pre_all_gather`` and ``fsdp_post_all_gather`` on the local tensor of a parameter. It remains a
plain tensor, so optimizers and checkpoints are unaffected.
"""

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from serried.parallel.layout.process_groups import Groups
from serried.parallel.precision.float8_int8 import Float8


def can_gather(rows: int, ranks: int) -> bool:
    """Return whether a weight with ``rows`` rows can be gathered in float8.

    It cannot if the shards are uneven, since FSDP2 replaces an uneven shard by a padded one.
    """
    return rows % ranks == 0


class Float8Gather:
    """Weights on this rank that are all-gathered in float8, and their scales."""

    def __init__(self, stages: Iterable[nn.Module], groups: Groups) -> None:
        """``stages`` must be sharded, with allocated parameters."""
        self._group = groups.fsdp.get_group("fsdp")
        self.weights: list[_Weight] = []
        layers: Iterable[Any] = (module for stage in stages for module in stage.modules())
        for layer in layers:
            product = getattr(layer, "product", None)
            if isinstance(product, Float8) and product.gathers and can_gather(len(layer.weight), self._group.size()):
                self.weights.append(_Weight(layer.weight, product))

    @torch.no_grad()
    def set_scales(self) -> None:
        """Set the scales of the weights from their current values. This is a collective call.

        Call it before the weights are gathered. There must be at least one weight.
        """
        largest = torch.stack([torch.linalg.vector_norm(weight.shard, torch.inf) for weight in self.weights]).float()
        dist.all_reduce(largest, dist.ReduceOp.MAX, self._group)
        scales = self.weights[0].product.scales_of(largest)
        for weight, scale in zip(self.weights, scales.unbind(), strict=True):
            weight.scale = scale


class _Weight:
    """One weight, with the hooks that FSDP2 calls to gather it."""

    scale: Tensor

    def __init__(self, parameter: Any, product: Float8) -> None:
        # FSDP2 inspects this tensor; ``to_local`` returns a view of it. torch's own test does the same
        # (test_all_gather_extensions_monkey_patch).
        shard = parameter._local_tensor
        self.shard, self.product = shard, product
        shard.fsdp_pre_all_gather, shard.fsdp_post_all_gather = self._round, self._wrap

    def _round(
        self, mesh: Any, outer_size: Any, outer_stride: Any, module: nn.Module, mp_policy: Any
    ) -> tuple[tuple[Tensor, ...], Tensor]:
        """Return the tensors to gather, and the metadata that ``_wrap`` needs."""
        del mesh, outer_size, outer_stride, module, mp_policy  # FSDP2 checks the number of arguments
        # Gathered as bytes, because Gloo does not support float8.
        return (self.product.round(self.shard, self.scale).view(torch.uint8),), self.scale

    def _wrap(
        self, gathered: tuple[Tensor, ...], scale: Tensor, dtype: torch.dtype, *, out: Any = None
    ) -> tuple[Tensor, tuple[Tensor, ...]] | None:
        """Return the full weight, and the tensors to free together with ``gathered``.

        ``out`` is the weight returned by an earlier call, to be updated in place.
        """
        if out is None:
            return self.product.rounded(gathered[0], scale, dtype), ()
        out._scale = scale  # its values are in the same memory as before
        return None
