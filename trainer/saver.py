"""Saving a run: compare replicas, write the checkpoint, and report it."""

import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from serried.configs.errors import TrainingFailed, TrainingStopped
from serried.trainer.checkpoint.checkpoints import checkpoints_of
from serried.trainer.checkpoint.save import Checkpointer, Saved
from serried.trainer.metrics.meter import SAVING, Meter
from serried.trainer.metrics.run_log import RunLog
from serried.trainer.replica_check import ReplicaCheck
from serried.trainer.run_context import Context
from serried.trainer.training_state import TrainingState


class Saver:
    """Write the checkpoints of a run, after comparing the replicas."""

    def __init__(
        self,
        context: Context,
        state: TrainingState,
        log: RunLog,
        meter: Meter,
        *,
        state_dict: Callable[[], dict[str, Any]],
        write_files: Callable[[Path], None],
        saved_step: int,
    ) -> None:
        """
        Args:
            state_dict: Returns the plain data of a checkpoint of the last completed step.
            write_files: Writes the files that are stored with the weights.
            saved_step: Step of this run's newest checkpoint. 0 if there is none.
        """
        config, layout = context.config, state.parallel.layout
        self._state_dict = state_dict
        checkpoints = checkpoints_of(config, context.session, context.folder)
        self.checkpointer = Checkpointer(
            checkpoints, config.checkpoint, layout, context.session, state.parts, write_files
        )
        self.last_save_seconds = 0.0
        """Duration of the latest save in seconds. 0 if there was none."""
        self.saved_step = saved_step
        """Step of the newest complete checkpoint. 0 if there is none."""
        self._begin_seconds = 0.0
        self._state = state
        self._log = log
        self._meter = meter
        self._context = context
        self._replicas = ReplicaCheck(state.parallel.specs.values(), layout, context.session)
        self._compares = config.health.replica_check_every > 0
        self._compared_step = -1

    def go_back(self, step: int) -> None:
        """Continue after the checkpoint of ``step``, the newest of this run; 0 if it has none."""
        self.saved_step, self._compared_step = step, -1

    def compare_replicas(self, step: int) -> None:
        """Compare the replicas bitwise, unless this was already done after ``step``. This is a collective call."""
        if self._compares and self._compared_step != step:
            self.compare_always(step)

    def compare_always(self, step: int) -> None:
        """Compare the replicas bitwise after ``step``, even if the run does not do so. This is a collective call."""
        self._compared_step = step
        self._replicas(step, (part for _, part in self._state.parts()))

    @property
    def is_begun(self) -> bool:
        """Whether a checkpoint was started that ``finish`` must commit."""
        return self.checkpointer.is_begun

    def poll(self) -> None:
        """Report a save that has completed or failed since the last call."""
        self._report(self.checkpointer.poll())

    def wait(self) -> None:
        """Wait for the pending save, if any, and report it."""
        self._report(self.checkpointer.wait())

    def begin(self, step: int) -> None:
        """Start a checkpoint of ``step`` after the pending save is complete. ``finish`` commits it.

        If the run ends before ``finish`` is called, the checkpoint is committed with the current state.
        """
        started = time.perf_counter()
        self.wait()
        self.compare_replicas(step)
        self.checkpointer.begin(step, self._state_dict())
        self._begin_seconds = time.perf_counter() - started

    def finish(self, *, is_evaluated: bool, is_last: bool) -> None:
        """Commit the started checkpoint. Wait until it is complete if it is the last one.

        ``is_evaluated``: whether the step was evaluated after ``begin``, so that the state has changed.

        Raises:
            TrainingFailed: The last checkpoint could not be saved.
            TrainingStopped: It could not be saved since another process has taken over the run, or the bucket did not
                answer.
        """
        started = time.perf_counter()
        self.checkpointer.finish(self._state_dict() if is_evaluated else None)
        saved = self.checkpointer.wait() if is_last else self.checkpointer.poll()
        self._report(saved, is_last=is_last)
        self._meter.pause(SAVING, self._begin_seconds + time.perf_counter() - started)

    def end(self, step: int) -> None:
        """After a failure, wait a short time for the pending save, and report the checkpoint to resume from."""
        try:
            self._report(self.checkpointer.close())
        except Exception:  # most likely a consequence of the failure already reported
            self._context.console.log(traceback.format_exc())
        if self.saved_step:
            self._log.interrupted(step, self.saved_step)

    def give_up(self, sever: Callable[[], None]) -> bool:
        """Abandon a pending save, which needs a lost rank. Returns whether its thread has ended.

        ``sever``: closes the connections that the thread may wait for.
        """
        if not self.checkpointer.give_up(sever):
            return False
        with suppress(RuntimeError):
            self._report(self.checkpointer.poll())  # it was complete before the loss
        return True

    def _report(self, saved: Saved | None, *, is_last: bool = False) -> None:
        """Report ``saved``, the result of a save. Does nothing if it is None."""
        if saved is None:
            return
        if saved.problem is None:
            self.saved_step, self.last_save_seconds = saved.step, saved.seconds
            self._log.saved(saved)
            return
        newest = (
            f"the newest checkpoint is from step {self.saved_step}" if self.saved_step else "no checkpoint exists yet"
        )
        if saved.is_taken_over:
            raise TrainingStopped(saved.problem)
        if is_last:
            what = f"step {saved.step} is done, but its checkpoint cannot be saved: {saved.problem}; {newest}"
            if any(self._context.session.gather(self.checkpointer.had_no_answer)):
                raise TrainingStopped(what)
            raise TrainingFailed(f"{what}. Fix the cause, then run the same command again")
        self._log.not_saved(saved.step, saved.problem, newest)
