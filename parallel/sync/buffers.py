"""Buffers of a model's state, such as the statistics of BatchNorm: every rank holds them whole."""

from collections.abc import Callable, Collection, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from serried.parallel.layout.local_shards import HeldTensor
from serried.parallel.layout.process_groups import Groups


class Buffers:
    """The buffers that belong to the state of a model."""

    def __init__(
        self, modules: Sequence[nn.Module], names: Mapping[str, bool], groups: Groups,
        equal: Callable[[], Collection[Tensor]],
    ) -> None:  # fmt: skip
        """
        Args:
            modules: The model, or this rank's stages of it.
            names: Names of the buffers of the whole model; whether every stage has a copy.
            groups: Process groups of this rank.
            equal: Returns buffers that are equal on all ranks without an exchange.
        """
        self.names = names
        self._modules, self._groups = modules, groups
        self._equal = equal

    def held(self) -> list[HeldTensor]:
        """Return the buffers of this rank's modules."""
        layout = self._groups.layout
        here = (layout.coordinates(dist.get_rank() if dist.is_initialized() else 0).pipeline,)
        everywhere = tuple(map(layout.pipeline_of, range(layout.stages)))
        of_modules = [dict(module.named_buffers()) for module in self._modules]
        return [
            HeldTensor.whole(name, buffers[name], everywhere if is_shared else here)
            for name, is_shared in self.names.items()
            for buffers in of_modules
            if name in buffers
        ]

    def copy(self) -> list[Tensor]:
        """Return copies of the buffers of this rank's modules."""
        return [held.tensor.clone() for held in self.held()]

    @torch.no_grad()
    def restore(self, copies: Sequence[Tensor]) -> None:
        """Set the buffers of this rank's modules to the result of ``copy``."""
        for held, before in zip(self.held(), copies, strict=True):
            held.tensor.copy_(before)

    @torch.no_grad()
    def share(self) -> None:
        """Give every rank of a stage the buffers of the stage's first rank, as in a checkpoint.

        Statistics come from each rank's samples. The buffers of a type take one broadcast, as a CNN has hundreds.
        """
        layout = self._groups.layout
        if not self.names or layout.world == layout.pipeline:
            return
        by_type: dict[torch.dtype, list[Tensor]] = {}
        equal = self._equal()
        for held in self.held():
            if not any(held.tensor is buffer for buffer in equal):
                by_type.setdefault(held.tensor.dtype, []).append(held.tensor)
        for buffers in by_type.values():
            flat = torch.cat([buffer.flatten() for buffer in buffers])
            dist.broadcast(flat, group=self._groups.stage, group_src=0)
            for buffer, values in zip(buffers, flat.split([buffer.numel() for buffer in buffers]), strict=True):
                buffer.copy_(values.view_as(buffer))
