"""Saving a run: the replica check before, the checkpoint, and its report after."""

import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from serried.parallel.layout.mesh import Layout
from serried.trainer.checkpoint.resume import CHECKPOINTS
from serried.trainer.checkpoint.save import Checkpointer
from serried.trainer.metrics.meter import SAVING, Meter
from serried.trainer.metrics.run_log import Report
from serried.trainer.replica_check import ReplicaCheck
from serried.trainer.run_context import Context
from serried.trainer.training_state import TrainingState


class Saver:
    """Writes checkpoints of a run, after comparing the replicas."""

    def __init__(
        self,
        context: Context,
        state: TrainingState,
        layout: Layout,
        report: Report,
        meter: Meter,
        write_files: Callable[[Path], None],
    ) -> None:
        """``write_files`` writes what belongs beside the weights."""
        config = context.config
        self.checkpointer = Checkpointer(
            config.run.dir / CHECKPOINTS, config.checkpoint, layout, context.session, state.parts, write_files
        )
        self._state, self._report, self._meter, self._console = state, report, meter, context.console
        self._replicas = ReplicaCheck(state.parallel.specs.values(), layout, context.session)
        self._compares = config.health.replica_check_every > 0
        self._compared_step = -1

    def compare_replicas(self, step: int) -> None:
        """Compare the bits that replicas hold, unless that was done in this step. A collective."""
        if self._compares and self._compared_step != step:
            self._compared_step = step
            self._replicas(step, (part for _, part in self._state.parts()))

    def poll(self) -> None:
        """Report a save that has ended."""
        self._report.saved(self.checkpointer.poll())

    def wait(self) -> float:
        """Wait for the save under way, report it, and return the seconds that took."""
        started = time.perf_counter()
        self._report.saved(self.checkpointer.wait())
        return time.perf_counter() - started

    def save(self, step: int, state: Callable[[], dict[str, Any]], *, waited_seconds: float, is_last: bool) -> None:
        """Begin a checkpoint of ``step``, after ``wait``. The last one of a run is waited for.

        ``state`` gives the plain data in it; ``waited_seconds`` is what ``wait`` took.
        """
        self.compare_replicas(step)
        started = time.perf_counter()
        self.checkpointer.save(step, state())
        saved = self.checkpointer.wait() if is_last else self.checkpointer.poll()
        self._report.saved(saved, is_last=is_last)
        self._meter.pause(SAVING, waited_seconds + time.perf_counter() - started)

    def end(self, step: int) -> None:
        """After a failure: wait a short time for a save under way, and report the checkpoint to resume from."""
        try:
            self._report.saved(self.checkpointer.close())
        except Exception:  # most likely of the same cause, which is reported
            self._console.log(traceback.format_exc())
        self._report.broken_off(step)
