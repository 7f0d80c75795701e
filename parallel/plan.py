"""What a recipe says to the library: how its model may be cut, and what its loss came to. No ranks, no devices."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor


class LossTerms(NamedTuple):
    """An un-normalised loss of this rank's part of a batch."""

    loss_sum: Tensor
    """Summed over valid targets, scalar."""
    weight: Tensor
    """Number of valid targets, scalar."""
    by_source: Tensor | None = None
    """Valid targets of each source of a mixture, [sources]; None: there is one source. Either on all ranks or none."""

    def totals(self) -> Tensor:
        """All of it, detached: fp64 [2 + sources]."""
        pair = torch.stack((self.loss_sum.detach().double(), self.weight.double()))
        return pair if self.by_source is None else torch.cat((pair, self.by_source.double()))


@dataclass(frozen=True)
class ParallelPlan:
    """Declared by a model, carried out by ``parallel.apply``."""

    units: tuple[tuple[str, ...], ...] = ()
    """Groups of module names whose parameters are gathered and freed together under sharding, in forward order.

    Parameters in no unit stay gathered through the whole forward and backward. The last unit is not freed after its
    forward, since backward starts there.
    """
