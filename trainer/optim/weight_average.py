"""An exponential moving average of the trained weights."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from serried.parallel.layout.local_shards import HeldTensor, local


class WeightAverage:
    """One tensor per trained parameter, sharded as that is.

    After the n-th accepted step it moves towards the weights by 1 - min(decay, (1 + n) / (10 + n)): the first steps
    count less, since an average of few steps should not hold on to the initial weights (as in TensorFlow's
    ``ExponentialMovingAverage``).
    """

    def __init__(self, decay: float, parameters: Sequence[HeldTensor], device: torch.device) -> None:
        """It begins as the weights are now."""
        trained = [held.tensor for held in parameters if held.tensor.requires_grad]
        self._decay = decay
        self._trained = {id(tensor): tensor for tensor in trained}
        self._averages = {id(tensor): tensor.detach().clone() for tensor in trained}
        self._accepted = torch.zeros((), dtype=torch.float64, device=device)

    @property
    def of(self) -> Mapping[int, Tensor]:
        """The average of a parameter, by its ``id``."""
        return self._averages

    @torch.no_grad()
    def update(self, accepted: Tensor) -> None:
        """Follow a step, unless it was rejected; waits for the device only for averages in host memory, once."""
        self._accepted += accepted
        kept = ((1 + self._accepted) / (10 + self._accepted)).clamp(max=self._decay)
        moves: dict[tuple[torch.device, torch.dtype], Tensor] = {}
        for average, weights in self._pairs():
            place = average.device, average.dtype
            if place not in moves:
                moves[place] = ((1 - kept) * accepted).to(average)
            average.lerp_(weights, moves[place])

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Exchange weights and average, while no parameter is gathered; afterwards all is as it was."""
        self._exchange()
        try:
            yield
        finally:
            self._exchange()

    @torch.no_grad()
    def _exchange(self) -> None:
        for average, weights in self._pairs():
            held = weights.clone()
            weights.copy_(average)
            average.copy_(held)

    def _pairs(self) -> Iterator[tuple[Tensor, Tensor]]:
        for key, average in self._averages.items():
            yield local(average), local(self._trained[key])

    def state_dict(self) -> dict[str, int]:
        """Return the plain data of a checkpoint. Waits for the device."""
        return {"accepted": int(self._accepted.item())}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Continue from ``state``."""
        self._accepted.fill_(state["accepted"])
