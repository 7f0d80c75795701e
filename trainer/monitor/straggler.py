"""Which rank's device is slow: all ranks time the same arithmetic, without waiting for each other.

The time of a step says nothing about who is slow, since in it every rank waits for the slowest, inside collectives that
overlap with its own work.
"""

import statistics
import time

import torch

_REPEATS = 3
_PROBE_SHARE = 1e-3
_SLOW_SHARE = 1.2
_SLOW_TIMES = 5


class Pace:
    """How fast this rank's device multiplies matrices, measured now and then."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        size, dtype = (4096, torch.bfloat16) if device.type == "cuda" else (256, torch.float32)
        self._matrix = torch.full((size, size), 1 / size, dtype=dtype, device=device)
        self._seconds, self._cost, self._measured_at = 0.0, 0.0, float("-inf")

    def seconds(self) -> float:
        """Seconds of one product; measured again if that costs less than a thousandth of the time since."""
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
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


class SlowRank:
    """Names a rank that is slower than the others in several measurements in a row."""

    def __init__(self) -> None:
        self._times = 0
        self._rank, self._share = -1, 1.0
        self._last: list[float] = []
        self._told: set[int] = set()

    def judge(self, seconds: list[float]) -> tuple[int, float]:
        """The slowest rank of those whose ``seconds`` these are, and its share of the median."""
        if seconds != self._last:  # only a new measurement counts
            rank = max(range(len(seconds)), key=seconds.__getitem__)
            share = seconds[rank] / statistics.median_low(seconds)
            self._times = self._times * (rank == self._rank) + 1 if share >= _SLOW_SHARE else 0
            self._last, self._rank, self._share = seconds, rank, share
        return self._rank, self._share

    def named(self) -> tuple[int, float] | None:
        """Return the rank that has been slow long enough to report, once, and its share."""
        if self._times < _SLOW_TIMES or self._rank in self._told:
            return None
        self._told.add(self._rank)
        return self._rank, self._share
