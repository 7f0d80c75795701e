"""Persistent buffers of a model, such as BatchNorm statistics. They are replicated on every rank."""

from collections.abc import Callable, Collection, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from serried.parallel.layout.local_shards import HeldTensor
from serried.parallel.layout.process_groups import Groups


class Buffers:
    """Persistent buffers of a model."""

    def __init__(
        self, modules: Sequence[nn.Module], names: Mapping[str, bool], groups: Groups,
        equal: Callable[[], Collection[Tensor]],
    ) -> None:  # fmt: skip
        """
        Args:
            modules: The model, or this rank's stages of it.
            names: For each persistent buffer of the model, by name, whether every stage has a copy.
            groups: Process groups of this rank.
            equal: Returns the buffers that are equal on all ranks without synchronization.
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
        """Restore the buffers of this rank's modules from the result of ``copy``."""
        for held, before in zip(self.held(), copies, strict=True):
            held.tensor.copy_(before)

    @torch.no_grad()
    def share(self) -> None:
        """Broadcast the buffers of the first rank of a stage to its other ranks. Checkpoints store the same values.

        Statistics otherwise depend on each rank's samples. There is one broadcast per dtype, since a CNN has hundreds
        of buffers.
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
