"""Detection of spikes of loss and gradient norm on the device, relative to previous steps."""

from typing import Any

import torch
from torch import Tensor

from serried.configs.schema.sections import HealthSection

_READY_AT = 0.5
_SMALLEST_DEVIATION = 1e-3
_TAKEN_TOGETHER = 8


class SpikeWindow:
    """Losses and gradient norms of the latest accepted steps, and the limits above which the next values are a spike.

    All state stays on the device: whether a step is applied is decided there, without synchronization. Loss and norm
    are equal on every rank, so all ranks make the same decision. Rejected values never enter the window.
    """

    def __init__(self, section: HealthSection, device: torch.device) -> None:
        self._is_on, self._deviations = section.spike != "off", section.spike_deviations
        self._size = section.spike_window
        self._taken_together = min(_TAKEN_TOGETHER, self._size // 4)
        self._values = torch.zeros(
            2, self._size + 1, dtype=torch.float64, device=device
        )  # the last column takes rejected values
        self._count = torch.zeros((), dtype=torch.int64, device=device)
        self._limits = torch.full((2,), float("inf"), dtype=torch.float64, device=device)
        self._new: list[tuple[Tensor, Tensor, Tensor]] = []

    def limits(self) -> Tensor:
        """Return the highest loss and the highest norm that are not a spike, fp64 [2]; infinite until the window is
        half full."""
        return self._limits

    def add(self, loss: Tensor, norm: Tensor, accepted: Tensor) -> None:
        """Add a step's loss and norm (fp64 scalars) if ``accepted`` (bool scalar), and drop the oldest ones.

        Steps are processed a few at a time: kernels this small cost more to launch than to run.
        """
        if not self._is_on:
            return
        self._new.append((loss, norm, accepted))
        if len(self._new) == self._taken_together:
            losses, norms, are_accepted = (torch.stack(column) for column in zip(*self._new, strict=True))
            self._new.clear()
            places = (self._count + are_accepted.cumsum(0) - 1) % self._size
            places = torch.where(are_accepted, places, self._size)
            self._values.index_copy_(1, places, torch.stack((losses, norms)))
            self._count += are_accepted.sum()
            self._judge()

    def _judge(self) -> None:
        values, filled = self._values[:, :-1], self._count.clamp(1, self._size)
        mean = values.sum(1) / filled
        variance = (values.square().sum(1) / filled - mean.square()).clamp(min=0.0)
        # Equal values have no deviation, and a rounding difference is not a spike.
        deviation = torch.maximum(variance.sqrt(), _SMALLEST_DEVIATION * mean.abs())
        is_ready = self._count >= _READY_AT * self._size
        self._limits = torch.where(is_ready, mean + self._deviations * deviation, float("inf"))

    def state_dict(self) -> dict[str, Any]:
        """Return the window for a checkpoint. Waits for the device."""
        return {
            "values": self._values[:, :-1].tolist(),
            "count": int(self._count.item()),
            "new": [[_finite(loss), _finite(norm), bool(accepted)] for loss, norm, accepted in self._new],
        }

    def load_state_dict(self, state: dict[str, Any] | None) -> None:
        """Load ``state``. If its window has another size, the newest values are kept."""
        state = state or {"values": [[], []], "count": 0, "new": []}
        values, count = torch.tensor(state["values"], dtype=torch.float64), int(state["count"])
        device, size = self._values.device, values.shape[1]
        if size != self._size and size:
            order = [place % size for place in range(max(0, count - size), count)][-self._size :]
            values, count = values[:, order], len(order)
        self._values.zero_()
        self._values[:, : values.shape[1]] = values.to(device)
        self._count.fill_(count)
        self._judge()
        self._new.clear()
        for loss, norm, accepted in state["new"]:
            loss, norm = (torch.tensor(value, dtype=torch.float64, device=device) for value in (loss, norm))
            self.add(loss, norm, torch.tensor(accepted, device=device))


def _finite(value: Tensor) -> float:
    """Return ``value``, or 0 if it is not finite, which JSON cannot represent.

    A value that is not finite was rejected, so it never enters the window.
    """
    return value.item() if value.isfinite() else 0.0
