"""Detection of a slow device: all ranks time the same arithmetic, without waiting for each other.

The time of a step does not show which rank is slow: every rank waits for the slowest one in each step, inside
collectives that overlap with its own work.
"""

import statistics
import time

import torch

from serried.runtime.accelerator import wait_for_device

_REPEATS = 3
_PROBE_SHARE = 1e-3
_SLOW_SHARE = 1.2
_SLOW_TIMES = 5


class Pace:
    """Speed of matrix products on this rank's device, measured from time to time."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        size, dtype = (4096, torch.bfloat16) if device.type != "cpu" else (256, torch.float32)
        self._matrix = torch.full((size, size), 1 / size, dtype=dtype, device=device)
        self._seconds = 0.0
        self._cost = 0.0
        self._measured_at = float("-inf")

    def seconds(self) -> float:
        """Return the duration of one matrix product in seconds.

        The product is measured again if that costs less than a thousandth of the time since the last measurement.
        """
        now = time.perf_counter()
        if now - self._measured_at >= self._cost / _PROBE_SHARE:
            self._seconds = min(self._measure() for _ in range(_REPEATS))
            self._measured_at = time.perf_counter()
            self._cost = self._measured_at - now
        return self._seconds

    def _measure(self) -> float:
        self._wait()
        started = time.perf_counter()
        torch.mm(self._matrix, self._matrix)
        self._wait()
        return time.perf_counter() - started

    def _wait(self) -> None:
        wait_for_device(self._device)


class SlowRank:
    """Detects a rank that is slower than the others in several measurements in a row."""

    def __init__(self) -> None:
        self._times = 0
        self._rank, self._share = -1, 1.0
        self._last: list[float] = []
        self._told: set[int] = set()

    def judge(self, seconds: list[float]) -> tuple[int, float]:
        """Return the slowest rank and the ratio of its time to the median.

        ``seconds``: duration of a matrix product, by rank.
        """
        if seconds != self._last:  # only a new measurement counts
            rank = max(range(len(seconds)), key=seconds.__getitem__)
            share = seconds[rank] / statistics.median_low(seconds)
            self._times = self._times * (rank == self._rank) + 1 if share >= _SLOW_SHARE else 0
            self._last = seconds
            self._rank = rank
            self._share = share
        return self._rank, self._share

    def named(self) -> tuple[int, float] | None:
        """Return the rank that has been slow long enough to report, and the ratio of its time to the median.

        The result is None if there is no such rank or it has been returned before.
        """
        if self._times < _SLOW_TIMES or self._rank in self._told:
            return None
        self._told.add(self._rank)
        return self._rank, self._share
