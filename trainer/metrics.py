"""What is measured: results of steps, read from the device once per log interval, and rates."""

import resource
import sys
import time
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from trainer.pace import Pace, SlowRank
from trainer.step import StepResult

# Dense bf16 peak of one device in FLOP/s, from the vendors' datasheets, by the exact name the driver reports. A device
# that is not here gets no utilisation rather than a guess.
PEAK_FLOPS = {
    "NVIDIA A100-SXM4-40GB": 312e12,
    "NVIDIA A100-SXM4-80GB": 312e12,
    "NVIDIA H100 80GB HBM3": 989e12,
    "NVIDIA H100 PCIe": 756e12,
    "NVIDIA H200": 989e12,
}

RATES = (
    "step_seconds", "tokens_per_second", "mfu", "memory_bytes", "data_seconds", "slowest_rank", "slowest_share"
)  # fmt: skip


@dataclass
class Meter:
    """Collects step results and reads them together, so that the host waits for the device once per interval."""

    device: torch.device
    world_size: int
    flops_per_token: float
    _results: list[tuple[int, Tensor]] = field(default_factory=list)
    _last_time: float = field(default_factory=time.perf_counter)
    _last_step: int = 0
    _last_tokens: int = 0
    _paused_seconds: float = 0.0
    slow: SlowRank = field(default_factory=SlowRank)

    def __post_init__(self) -> None:
        self._pace = Pace(self.device)

    def add(self, step: int, result: Tensor) -> None:
        """Remember a TrainStep's result without reading it."""
        self._results.append((step, result))

    def start_at(self, step: int, tokens: int) -> None:
        """Count from here: ``step`` steps and ``tokens`` tokens were done before."""
        self._last_step, self._last_tokens, self._last_time = step, tokens, time.perf_counter()

    def pause(self, seconds: float) -> None:
        """Leave ``seconds`` (an evaluation, say) out of the rates."""
        self._paused_seconds += seconds

    def read(self) -> list[tuple[int, StepResult]]:
        """All results since the last read. Waits for the device."""
        if not self._results:
            return []
        table = torch.stack([result for _, result in self._results]).tolist()
        steps = [step for step, _ in self._results]
        self._results.clear()
        return [(step, StepResult.read(row)) for step, row in zip(steps, table, strict=True)]

    def rates(self, step: int, tokens: int, data_seconds: float) -> dict[str, float | int | None]:
        """Rates since the last call, now that ``step`` is done and ``tokens`` are trained. A collective.

        ``data_seconds``: what this rank waited for data since the last call.
        """
        now = time.perf_counter()
        seconds = max(now - self._last_time - self._paused_seconds, 1e-9)
        steps, new_tokens = step - self._last_step, tokens - self._last_tokens
        self._last_time, self._last_step, self._last_tokens, self._paused_seconds = now, step, tokens, 0.0
        tokens_per_second = new_tokens / seconds
        peak = PEAK_FLOPS.get(torch.cuda.get_device_name(self.device)) if self.device.type == "cuda" else None
        # On the host, through Gloo: these are host numbers, and the device has better things to do.
        mine = [float(peak_memory_bytes(self.device)), data_seconds, self._pace.seconds() if self.world_size > 1 else 0]
        ranks = [torch.tensor(mine, dtype=torch.float64)]
        if dist.is_initialized():
            ranks = [torch.empty(3, dtype=torch.float64) for _ in range(self.world_size)]
            dist.all_gather(ranks, torch.tensor(mine, dtype=torch.float64))
        memory, waited, paces = zip(*(rank.tolist() for rank in ranks), strict=True)
        rank, share = self.slow.judge(list(paces)) if self.world_size > 1 else (None, None)
        return {
            "step_seconds": seconds / steps,
            "tokens_per_second": tokens_per_second,
            "mfu": self.flops_per_token * tokens_per_second / (peak * self.world_size) if peak else None,
            "memory_bytes": int(max(memory)),
            "data_seconds": max(waited) / steps,
            "slowest_rank": rank,
            "slowest_share": share,
        }


def peak_memory_bytes(device: torch.device) -> int:
    """Most memory this process has held: allocated on the GPU, resident on the CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
