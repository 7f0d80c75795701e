"""The training script of ``serried verify``: a small language model with uneven masks and an optional fault.

    python training_script.py task.fault=kill task.rank=1 task.at=10 ...

Faults are keys of this task only. They cannot make another task fail.
"""

import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

import serried
from serried.recipes.data.samples.token_dataset import Batch, Sample
from serried.recipes.models.layers.lm_head import IGNORE
from serried.verify.started_runs import FAULT, RAISED

_FOREVER_SECONDS = 10**6
_FOREVER_CYCLES = 2**60


class VerifiedTask(serried.CausalLM):
    """A causal language model whose samples have different numbers of targets, as in fine-tuning."""

    class Config(serried.Section):
        """The fault, and the rank on which it happens."""

        free = ("fault", "rank", "at", "sleep_seconds", "refuses_waits")

        fault: Literal["none", "kill", "raise", "data", "kernel"] = "none"
        """``kill``: SIGKILL; ``raise``: exception; ``data``: a batch never arrives; ``kernel``: a device operation
        hangs."""
        rank: int = 0
        """Rank of the fault."""
        at: int = 1
        """Micro-batch of the rank at which the fault happens, counted from 1."""
        sleep_seconds: float = 0.0
        """Time added to each micro-batch."""
        refuses_waits: tuple[int, int] | None = None
        """Micro-batches [first, end) in which it is an error if the host waits for the GPU."""

    def configure(self, run: Any) -> None:
        super().configure(run)
        self._begun = self._read = 0

    def collate_numbered(self, samples: Sequence[Sample], ids: np.ndarray) -> Batch:
        batch = super().collate_numbered(samples, ids)
        for row, sample in enumerate(ids.tolist()):
            batch.targets[row, sample * 7919 % batch.targets.shape[1] + 1 :] = IGNORE
        self._read += 1
        if self._is_due("data", self._read):
            self._note()
            time.sleep(_FOREVER_SECONDS)
        return batch

    def inputs(self, batch: Batch) -> Any:
        self._begun += 1
        time.sleep(self.config.sleep_seconds)
        if self.config.refuses_waits is not None and self._begun in self.config.refuses_waits:
            is_first = self._begun == self.config.refuses_waits[0]
            torch.cuda.set_sync_debug_mode("error" if is_first else "default")
        for fault in ("kill", "raise", "kernel"):
            if self._is_due(fault, self._begun):
                self._note()
                self._fail(fault, batch)
        return super().inputs(batch)

    def _is_due(self, fault: str, count: int) -> bool:
        # Tasks do not normally know their rank. This one does, to fail on a single rank.
        rank = int(os.environ.get("RANK", "0"))
        return self.config.fault == fault and rank == self.config.rank and count >= self.config.at

    def _note(self) -> None:
        (Path(self.run.run.dir) / FAULT).touch()

    def _fail(self, fault: str, batch: Batch) -> None:
        if fault == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if fault == "raise":
            raise RuntimeError(RAISED)
        if batch.tokens.is_cuda:
            torch.cuda._sleep(
                _FOREVER_CYCLES
            )  # private, because no public operation hangs; tests/cli/test_verify.py guards it
        else:
            time.sleep(_FOREVER_SECONDS)


if __name__ == "__main__":
    serried.main(VerifiedTask)
