"""Step results, read from the device once per log interval, and throughput."""

import resource
import sys
import time
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from serried.configs.schema.sections import RunConfig
from serried.parallel.sum_table import SumTable
from serried.trainer.monitor.straggler import Pace, SlowRank
from serried.trainer.step import StepResult

SAVING, PROFILING = "(saving)", "(profiling)"
"""Names of pauses other than evaluations. The pause of an evaluation has the name of its dataset, which begins with
a letter."""

_EXCHANGE_SECONDS, _MOST_LINES_WITHOUT = 1.0, 20
"""Minimum time between two exchanges of measurements between ranks, and maximum number of log lines without one.
With steps of milliseconds, an exchange for each log line would cost more than one percent."""

RATES = (
    "step_seconds", "tokens_per_second", "tokens_per_second_per_device", "mfu", "memory_bytes", "memory_reserved_bytes",
    "data_seconds", "slowest_rank", "slowest_share", "time_split", "eta_seconds",
)  # fmt: skip


class Meter:
    """Collects step results and reads them together, so that the host waits for the device once per interval."""

    def __init__(self, device: torch.device, world_size: int, flops_per_step: float, peak_flops: float | None) -> None:
        """
        Args:
            flops_per_step: FLOPs of the model for a global batch.
            peak_flops: Peak FLOP/s of one device; None if unknown.
        """
        self.pauses: dict[str, float] = {}
        """Duration of the last pause of each kind, in seconds."""
        self.slow = SlowRank()
        self._world_size = world_size
        self._flops_per_step, self._peak_flops = flops_per_step, peak_flops
        self._results: list[tuple[int, SumTable]] = []
        self._of_all_ranks = _NumbersOfAllRanks(device, world_size, self.slow)
        self._last_time = time.perf_counter()
        self._last_step = 0
        self._last_tokens = 0
        self._paused_seconds = 0.0

    def add(self, step: int, result: SumTable) -> None:
        """Store the result of a training step without reading it from the device."""
        self._results.append((step, result))

    def start_at(self, step: int, tokens: int) -> None:
        """Start measuring after ``step`` steps and ``tokens`` tokens."""
        self._last_step = step
        self._last_tokens = tokens
        self._last_time = time.perf_counter()
        self._paused_seconds = 0.0
        self._of_all_ranks.start()

    def pause(self, what: str, seconds: float) -> None:
        """Exclude ``seconds`` of ``what``, such as an evaluation, from the rates."""
        self.pauses[what] = seconds
        self._paused_seconds += seconds

    def read(self) -> list[tuple[int, StepResult]]:
        """Return all results since the last read. Waits for the device once."""
        if not self._results:
            return []
        results = self._results
        self._results = []
        rows = torch.stack([table.vector for _, table in results]).tolist()
        return [(step, StepResult.read(table.named(row))) for (step, table), row in zip(results, rows, strict=True)]

    def rates(
        self, step: int, tokens: int, data_seconds: float, time_split: Mapping[str, float] | None
    ) -> dict[str, Any]:
        """Return the rates since the last call, after ``step`` with ``tokens`` trained in total. This is a collective
        call.

        Measurements of all ranks may be from an earlier call, about a second ago. ``time_split`` in the result
        is then None.

        Args:
            data_seconds: Time that this rank waited for data since the last call.
            time_split: Seconds of each phase of a step on this rank. Either all ranks pass it for the same step, or all
                pass None.
        """
        now = time.perf_counter()
        seconds = max(now - self._last_time - self._paused_seconds, 1e-9)
        steps, new_tokens = step - self._last_step, tokens - self._last_tokens
        self._last_time, self._paused_seconds = now, 0.0
        self._last_step, self._last_tokens = step, tokens
        tokens_per_second, step_seconds = new_tokens / seconds, seconds / steps
        of_all_ranks = self._of_all_ranks.after_line(seconds, data_seconds, time_split)
        peak = self._peak_flops
        return {
            "step_seconds": step_seconds,
            "tokens_per_second": tokens_per_second,
            "tokens_per_second_per_device": tokens_per_second / self._world_size,
            "mfu": self._flops_per_step / step_seconds / (peak * self._world_size) if peak else None,
            "data_seconds": self._of_all_ranks.data_share * step_seconds,
            **of_all_ranks,
        }


class _NumbersOfAllRanks:
    """Measurements that ranks exchange about once a second: memory, waits for data, phases of a step, the slowest
    rank."""

    def __init__(self, device: torch.device, world_size: int, slow: SlowRank) -> None:
        self.data_share = 0.0
        """Longest wait for data on any rank, as a share of the time between two exchanges."""
        self._device, self._world_size = device, world_size
        self._pace, self._slow = Pace(device), slow
        self._exchanged: dict[str, Any] = {}
        self.start()

    def start(self) -> None:
        """Discard this rank's measurements, and exchange at the next log line."""
        self._lines_without = 0
        """Number of log lines left without an exchange."""
        self._data_seconds = 0.0
        self._window_seconds = 0.0
        self._time_split: Mapping[str, float] = {}

    def after_line(
        self, seconds: float, data_seconds: float, time_split: Mapping[str, float] | None
    ) -> Mapping[str, Any]:
        """Return the measurements for a log line, ``seconds`` after the previous line.

        This is a collective if the line exchanges.
        """
        self._data_seconds += data_seconds
        self._window_seconds += seconds
        self._time_split = time_split or self._time_split
        if self._lines_without:
            self._lines_without -= 1
            self._exchanged["time_split"] = None
        else:
            self._exchange(seconds)
        return self._exchanged

    def _exchange(self, seconds: float) -> None:
        """Exchange the measurements of all ranks, and schedule the next exchange.

        ``seconds``: time since the last log line.
        """
        split = self._time_split
        allocated, reserved = peak_memory_bytes(self._device)
        pace = self._pace.seconds() if self._world_size > 1 else 0.0
        # On the host, through Gloo: the values are on the host, and the device stays free for training.
        numbers = [float(allocated), float(reserved or 0), self._data_seconds, seconds, pace, *split.values()]
        mine = torch.tensor(numbers, dtype=torch.float64)
        ranks = [mine]
        if dist.is_initialized():
            ranks = [torch.empty_like(mine) for _ in range(self._world_size)]
            dist.all_gather(ranks, mine)
        table = torch.stack(ranks)
        most_allocated, most_reserved, waited, longest = table[:, :4].amax(0).tolist()
        rank, share = self._slow.judge(table[:, 4].tolist()) if self._world_size > 1 else (None, None)
        self._exchanged = {
            "memory_bytes": int(most_allocated),
            "memory_reserved_bytes": int(most_reserved) if reserved is not None else None,
            "slowest_rank": rank,
            "slowest_share": share,
            "time_split": dict(zip(split, table[:, 5:].mean(0).tolist(), strict=True)) or None,
        }
        self.data_share = waited / self._window_seconds
        self.start()
        if self._world_size > 1:  # the result is equal on all ranks, like the table
            self._lines_without = min(int(_EXCHANGE_SECONDS / longest), _MOST_LINES_WITHOUT)


def eta_seconds(config: RunConfig, step: int, step_seconds: float, pauses: Mapping[str, float]) -> float:
    """Return the estimated seconds after ``step`` until this start of the run ends.

    This includes evaluations and saves from this step on, each as long as the last one (``Meter.pauses``).
    """
    last = config.trainer.last_step
    evaluations = sum(seconds for what, seconds in pauses.items() if what not in (SAVING, PROFILING))
    return (
        (last - step) * step_seconds
        + _times_due(config.trainer.evaluates_every, step, last) * evaluations
        + _times_due(config.checkpoint.every or last, step, last) * pauses.get(SAVING, 0.0)
    )


def _times_due(every: int, step: int, last: int) -> int:
    """Return the number of times that an action is due from ``step`` on.

    The action is due every ``every`` steps and after step ``last``.
    """
    return last // every - (step - 1) // every + (last % every > 0) if every else 0


def peak_memory_bytes(device: torch.device) -> tuple[int, int | None]:
    """Return the peak memory of this process in bytes.

    On a GPU, these are the allocated and the reserved memory; on a CPU, the resident memory and None.
    """
    if device.type != "cpu":
        return torch.accelerator.max_memory_allocated(device), torch.accelerator.max_memory_reserved(device)
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit, None
