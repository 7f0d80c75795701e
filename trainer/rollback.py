"""Going back to the newest checkpoint after a step that went wrong."""

from serried.configs.errors import TrainingStopped
from serried.parallel.layout.checks import with_values
from serried.trainer.checkpoint.resume import find_start
from serried.trainer.metrics.meter import Meter
from serried.trainer.metrics.run_log import Report
from serried.trainer.monitor.heartbeat import SET_UP
from serried.trainer.replica_check import GoBack
from serried.trainer.run_context import Context
from serried.trainer.run_data import Data
from serried.trainer.saver import Saver
from serried.trainer.training_state import TrainingState


class Rollback:
    """Restores the newest checkpoint and leaves out the samples trained on since."""

    def __init__(
        self, context: Context, data: Data, state: TrainingState, *, saver: Saver, report: Report, meter: Meter,
        count: int,
    ) -> None:  # fmt: skip
        """``count``: earlier rollbacks of the run."""
        self._context, self._data, self._state = context, data, state
        self._saver, self._report, self._meter = saver, report, meter
        self.count = count

    def __call__(self, back: GoBack) -> int:
        """Go back; returns the step to continue after. A collective.

        Raises:
            TrainingStopped: there is no checkpoint, or the run has gone back as often as it may.
        """
        context, config = self._context, self._context.config
        if self.count >= config.health.max_rollbacks:
            raise TrainingStopped(f"{back}; health.max_rollbacks={config.health.max_rollbacks} are used up")
        samples = self._data.samples(back.step)
        context.pulse.enter(SET_UP, back.step)
        context.console.doing("going back to a checkpoint")
        self._saver.wait()
        resume = "auto" if config.checkpoint.resume == "never" else config.checkpoint.resume
        start = find_start(with_values(config, {"checkpoint.resume": resume}), context.session)
        if start.checkpoint is None:
            raise TrainingStopped(f"{back}; there is no checkpoint to go back to yet. Lower checkpoint.every")
        self._state.parallel.reshard()
        self._state.restore(start)
        self.count += 1
        self._data.skip(start.step, samples)
        context.pulse.phases.take()  # of a step that is undone
        self._report.went_back(start, back.step, samples, str(back))
        self._meter.start_at(start.step, self._report.progress.tokens)
        return start.step
