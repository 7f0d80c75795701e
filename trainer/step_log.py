"""Results of steps: reading them from the device, logging and health checks."""

from collections.abc import Callable

from serried.parallel.layout.process_groups import gather_plain
from serried.records.metrics import check_metric_names
from serried.trainer.data.loader import BatchLoader
from serried.trainer.metrics.meter import RATES, Meter, eta_seconds
from serried.trainer.metrics.run_log import RunLog
from serried.trainer.optim.optimizer import learning_rate
from serried.trainer.progress import Progress
from serried.trainer.replica_check import respond
from serried.trainer.run_context import Context
from serried.trainer.step import StepResult
from serried.trainer.training_state import TrainingState

_READ_AT_LEAST_EVERY = 50


class StepLog:
    """Read results of steps once per log interval, so that the host does not wait for the device in between."""

    def __init__(
        self, context: Context, state: TrainingState, *, progress: Progress, log: RunLog, meter: Meter,
        samples: Callable[[int], int], sample_ids: Callable[[int, int], list[int]], sources: list[str],
    ) -> None:  # fmt: skip
        """``samples``: returns the number of samples used up to a step. ``sample_ids``: returns the sample indices for
        (step, seed). ``sources``: names of a mixture's sources."""
        self._context, self._state = context, state
        self._progress, self._log = progress, log
        self.meter = meter
        self.newest: tuple[int, StepResult] | None = None
        """The last step that was read, and its result."""
        self._samples = samples
        self._sample_ids = sample_ids
        self._sources = sources

    def learning_rate(self, step: int) -> float:
        config = self._context.config
        return learning_rate(step, config.trainer.steps, config.optim.lr, config.schedule)

    def read(self, step: int, loader: BatchLoader, *, log: bool) -> None:
        """Read the results up to ``step`` if due, and log the result of ``step`` if ``log``.

        Raises:
            GoBack, TrainingStopped, TrainingFailed: A result requires it, see ``trainer.replica_check``.
        """
        is_cpu = self._context.session.device.type == "cpu"  # reading does not wait on a CPU
        if log or is_cpu or step % _READ_AT_LEAST_EVERY == 0:
            self.read_all(step, loader if log else None)

    def read_all(self, newest: int, loader: BatchLoader | None = None) -> None:
        """Read all unread results. If ``loader`` is given, log the result of step ``newest``."""
        for step, result in self.meter.read():
            self.newest = step, result
            check_metric_names(result.metrics)
            counted = result
            if self._context.task.unit == "samples":  # the weight of a loss may not be the number of samples
                counted = result._replace(tokens=self._context.config.trainer.global_batch)
            self._progress.counts.add(counted, self._sources)
            is_logged = loader is not None and step == newest
            if is_logged or result.skipped:
                rates = self._rates(step, loader) if is_logged and loader is not None else dict.fromkeys(RATES)
                lr = self._state.learning_rates(self.learning_rate(step))
                is_broken = result.skipped and not result.is_finite and not result.is_overflow
                ids = self._sample_ids(step, self._context.config.trainer.seed) if is_broken else []
                self._log.step(step, result, lr, self._samples(step), rates, ids)
            self._respond(step, result)

    def write(self, step: int, result: StepResult) -> None:
        """Log the result of ``step``, which was interrupted by a loss. Its rates are not known."""
        lr = self._state.learning_rates(self.learning_rate(step))
        self._log.step(step, result, lr, self._samples(step), dict.fromkeys(RATES), [])

    def _rates(self, step: int, loader: BatchLoader) -> dict[str, object]:
        config, session = self._context.config, self._context.session
        split = self._context.pulse.phases.take()
        rates = self.meter.rates(step, self._progress.counts.tokens, loader.take_waited_seconds(), split)
        rates["eta_seconds"] = eta_seconds(config, step, rates["step_seconds"], self.meter.pauses)
        self._log.running(step)
        if (slow := self.meter.slow.named()) is not None:
            rank, share = slow
            self._log.slow(rank, gather_plain(session.host())[rank], share)
        return rates

    def _respond(self, step: int, result: StepResult) -> None:
        config = self._context.config
        warmup_steps = config.schedule.with_warmup_steps(config.trainer.steps).warmup_steps
        advice = (
            f"Lower optim.lr={config.optim.lr:g}, raise schedule.warmup_steps={warmup_steps}, or look "
            "at the data of those steps"
        )
        if note := respond(config.health, step, result, advice):
            self._log.spiked(step, result, note)
