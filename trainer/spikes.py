"""When loss or gradient norm jumps: judged on the device, from the steps before."""

from typing import Any

import torch
from torch import Tensor

from configs.schema import HealthSection

_READY_AT = 0.5
_SMALLEST_DEVIATION = 1e-3


class SpikeWindow:
    """Losses and gradient norms of the last accepted steps, and the limits above which the next ones are a spike.

    All of it stays on the device: whether a step is applied is decided there, without a wait. Loss and norm are the
    same numbers on every rank, so all ranks decide alike; what is rejected never enters the window.
    """

    def __init__(self, section: HealthSection, device: torch.device) -> None:
        self._is_on, self._deviations = section.spike != "off", section.spike_deviations
        self._size = section.spike_window
        self._values = torch.zeros(2, self._size, dtype=torch.float64, device=device)
        self._count = torch.zeros((), dtype=torch.float64, device=device)
        self._slots = torch.arange(self._size, device=device)
        self._no_limits = torch.full((2,), float("inf"), dtype=torch.float64, device=device)

    def limits(self) -> Tensor:
        """Highest loss and highest norm that are no spike, fp64 [2]; infinite until the window is half full."""
        if not self._is_on:
            return self._no_limits
        filled = self._count.clamp(1, self._size)
        mean = self._values.sum(1) / filled
        variance = (self._values.square().sum(1) / filled - mean.square()).clamp(min=0.0)
        # A window of equal numbers has no deviation, and rounding is no spike.
        deviation = torch.maximum(variance.sqrt(), _SMALLEST_DEVIATION * mean.abs())
        is_ready = self._count >= _READY_AT * self._size
        return torch.where(is_ready, mean + self._deviations * deviation, self._no_limits)

    def add(self, loss: Tensor, norm: Tensor, accepted: Tensor) -> None:
        """Take in a step's loss and norm (fp64 scalars) where ``accepted`` (bool scalar); the oldest ones leave."""
        if not self._is_on:
            return
        here = (self._slots == self._count % self._size) & accepted
        self._values = torch.where(here, torch.stack((loss, norm)).unsqueeze(1), self._values)
        self._count += accepted

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps. Waits for the device."""
        return {"values": self._values.tolist(), "count": int(self._count.item())}

    def load(self, state: dict[str, Any] | None) -> None:
        """Go on from ``state``; of a window of another size the newest values are kept."""
        values = torch.tensor((state or {}).get("values", [[], []]), dtype=torch.float64)
        count, size = int((state or {}).get("count", 0)), values.shape[1]
        if size != self._size and size:
            order = [slot % size for slot in range(max(0, count - size), count)][-self._size :]
            values, count = values[:, order], len(order)
        self._values.zero_()
        self._values[:, : values.shape[1]] = values.to(self._values.device)
        self._count.fill_(count)
