"""Exponential moving average of the trained weights."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from serried.parallel.layout.local_shards import HeldTensor, local


class WeightAverage:
    """Exponential moving average of the trained parameters, sharded like the parameters.

    After the n-th accepted step it moves towards the weights by 1 - min(decay, (1 + n) / (10 + n)). It moves faster in
    the first steps, so that an average of few steps does not retain the initial weights (as in TensorFlow's
    ``ExponentialMovingAverage``).
    """

    def __init__(self, decay: float, parameters: Sequence[HeldTensor], device: torch.device) -> None:
        """Initialize the average with the current weights."""
        trained = [held.tensor for held in parameters if held.tensor.requires_grad]
        self._decay = decay
        self._trained = {id(tensor): tensor for tensor in trained}
        self._averages = {id(tensor): tensor.detach().clone() for tensor in trained}
        self._accepted = torch.zeros((), dtype=torch.float64, device=device)

    @property
    def of(self) -> Mapping[int, Tensor]:
        """Averages by ``id`` of the parameter."""
        return self._averages

    @torch.no_grad()
    def update(self, accepted: Tensor) -> None:
        """Update the average after a step, unless the step was rejected.

        Waits for the device only if averages are in host memory.
        """
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
        """Context manager that swaps weights and average, and swaps them back on exit.

        Use it while no parameter is all-gathered.
        """
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
        """Return the plain data to save in a checkpoint. Waits for the device."""
        return {"accepted": int(self._accepted.item())}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Load ``state``, a result of ``state_dict``."""
        self._accepted.fill_(state["accepted"])
