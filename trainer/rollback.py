"""Rollback to the newest checkpoint after a failed step."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from serried.configs.errors import TrainingStopped
from serried.configs.schema.sections import RunConfig
from serried.parallel.layout.checks import with_values
from serried.trainer.checkpoint.resume import DamagedCheckpoint, Start, find_start, make_room
from serried.trainer.metrics.meter import Meter
from serried.trainer.metrics.run_log import RunLog
from serried.trainer.monitor.heartbeat import SET_UP
from serried.trainer.progress import Progress
from serried.trainer.replica_check import GoBack
from serried.trainer.run_context import Context
from serried.trainer.run_data import Data
from serried.trainer.saver import Saver
from serried.trainer.training_state import TrainingState


class Rollback:
    """Restore the newest checkpoint, and skip the samples that were trained on since then."""

    def __init__(
        self, context: Context, data: Data, state: TrainingState, *, progress: Progress, saver: Saver,
        log: RunLog, meter: Meter,
    ) -> None:  # fmt: skip
        self._context = context
        self._data, self._state = data, state
        self._progress, self._saver = progress, saver
        self._log, self._meter = log, meter
        self.went_back_to: int | None = None
        """Step of the checkpoint that the latest rollback of this start went back to."""
        self.is_loading = False
        """Whether a checkpoint is being loaded into the model, whose state is that of no step meanwhile."""
        self._count = 0
        """Number of rollbacks of the run so far."""

    def __call__(self, back: GoBack) -> int:
        """Roll back, and return the step to resume after. This is a collective call.

        Raises:
            TrainingStopped: There is no checkpoint, or ``health.max_rollbacks`` is reached.
        """
        context, config = self._context, self._context.config
        if self._count >= config.health.max_rollbacks:
            raise TrainingStopped(
                f"{back}; health.max_rollbacks={config.health.max_rollbacks} is reached. Check the data, or "
                "lower optim.lr"
            )
        samples = self._data.samples(back.step)
        context.pulse.enter(SET_UP, back.step)
        context.console.doing("rolling back to a checkpoint")
        self._saver.wait()
        self.is_loading = True
        resume = "auto" if config.checkpoint.resume == "never" else config.checkpoint.resume
        start = self._restore(with_values(config, {"checkpoint.resume": resume}), back)
        self._saver.go_back(self._newest_of_run(start))
        self._progress.resume(start)
        context.callbacks.load_state_dict(start.state)
        self._count, self.went_back_to = self._count + 1, start.step
        self._data.skip(start.step, samples)
        context.pulse.phases.take()  # discard times of the undone step
        self._log.rolled_back(start, back.step, samples, str(back))
        self._meter.start_at(start.step, self._progress.counts.tokens)
        self.is_loading = False
        return start.step

    def _restore(self, config: RunConfig, back: GoBack) -> Start:
        """Restore the newest checkpoint that is not damaged, and return it."""
        context = self._context
        damaged: dict[Path, str] = {}
        while True:
            start = find_start(config, context.session, folder=context.folder, known_damage=damaged)
            if start.checkpoint is None:
                raise TrainingStopped(f"{back}; there is no checkpoint to roll back to yet. Lower checkpoint.every")
            self._state.parallel.reshard()
            try:
                self._state.restore(start)
            except DamagedCheckpoint as error:
                damaged[error.path] = error.damage
            else:
                return start

    def _newest_of_run(self, start: Start) -> int:
        """Return the step of ``start`` if it is a checkpoint of this run, else 0. Newer checkpoints, which cannot be
        read, are moved aside, since they would block later saves. This is a collective call."""
        context = self._context
        if not start.continues(context.config.run.dir):
            return 0

        def set_newer_aside() -> list[str]:
            assert context.folder is not None
            return make_room(context.folder, start)

        for note in context.session.once(set_newer_aside):
            context.console.say(f"note       {note}")
        return start.step

    def state_dict(self) -> dict[str, Any]:
        """Return the number of rollbacks as an entry of a checkpoint's plain data."""
        return {"rollbacks": self._count}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore ``state``, which may be empty."""
        self._count = int(state.get("rollbacks", 0))
