"""Sums over full parameters that may be sharded, for optimizers that use row and column means."""

from collections import Counter
from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from serried.parallel.distributed_model import DistributedModel
from serried.parallel.layout.local_shards import HeldTensor
from serried.parallel.layout.mesh import Layout

_Slot = tuple[str, int]
"""Name of a parameter, and the index of one of its sums."""


class Sums:
    """Sums over the trained parameters of a model, bitwise equal on all ranks that hold a shard."""

    def __init__(self, held: Iterable[HeldTensor], layout: Layout, rank: int, group: dist.ProcessGroup | None) -> None:
        """``group`` contains the ranks of the pipeline stage of ``rank``. None means all ranks."""
        self._held = {shard.tensor: shard for shard in held}
        self._layout, self._rank, self._group = layout, rank, group

    @classmethod
    def of(cls, model: DistributedModel) -> "Sums":
        """Return the ``Sums`` of the trained parameters of ``model``. This is a collective call on all ranks."""
        rank = dist.get_rank() if dist.is_initialized() else 0
        trained = (shard for shard in model.parameters if shard.tensor.requires_grad)
        return cls(trained, model.layout, rank, model.groups.stage)

    @classmethod
    def whole(cls, parameters: Iterable[Tensor]) -> "Sums":
        """Return the ``Sums`` of unsharded ``parameters`` in one process."""
        return cls((HeldTensor.whole("", parameter) for parameter in parameters), Layout("single"), 0, None)

    def held(self, parameter: Tensor) -> HeldTensor:
        """Return ``parameter`` together with its shard on this rank."""
        return self._held[parameter]

    @torch.no_grad()
    def over(self, parts: Iterable[tuple[Tensor, Tensor, Sequence[int]]]) -> list[Tensor]:
        """Return sums of tensors shaped like parameters, over all dims except the ones to keep.

        Each entry of ``parts`` is a parameter, this rank's shard of the tensor, and the dims to keep. Each sum has the
        shape of the full parameter in these dims. All ranks must call this together, with all parameters.
        """
        found: list[Tensor] = []
        exchanged: tuple[dict[_Slot, Tensor], ...] = ({}, {})
        sums_of = Counter[Tensor]()
        for parameter, numbers, kept in parts:
            held = self._held[parameter]
            sums_of[parameter] += 1
            dims = [dim for dim in range(numbers.ndim) if dim not in kept]
            total = numbers.sum(dims) if dims else numbers.clone()
            if self._layout.size(held.spec.sliced_axes) > 1:
                whole = total.new_zeros([held.spec.shape[dim] for dim in kept])
                if self._is_first_holder(held):
                    whole[tuple(held.box.indices()[dim] for dim in kept)] = total
                # A tied parameter may be in two stages, or twice on one rank. A separate all-reduce, with the same
                # values in the same order, makes its sums bitwise equal everywhere.
                slots = exchanged[len(held.spec.holders) > 1]
                total = slots.setdefault((held.name, sums_of[parameter]), whole)
            found.append(total)
        for slots in exchanged:
            self._exchange([slots[key] for key in sorted(slots)])
        return found

    def _is_first_holder(self, held: HeldTensor) -> bool:
        replica, rank = divmod(self._rank, self._layout.block)
        return replica % self._layout.replicate == 0 and (held.box, rank) in held.spec.sources(self._layout)

    def _exchange(self, sums: Sequence[Tensor]) -> None:
        if sums:
            flat = torch.cat([part.reshape(-1) for part in sums])
            dist.all_reduce(flat, group=self._group)
            for part, total in zip(sums, flat.split([part.numel() for part in sums]), strict=True):
                part.copy_(total.view_as(part))
