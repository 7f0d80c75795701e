"""Evaluation during training."""

import math
import time
from collections.abc import Callable, Collection, Iterable
from functools import partial
from importlib.util import find_spec
from typing import Any

from serried.configs.errors import UserError
from serried.configs.requirements import install_command
from serried.configs.schema.sections import DEFAULT_VALIDATION
from serried.runtime.accelerator import wait_for_device
from serried.trainer.evaluation.evaluate import evaluate_by_source
from serried.trainer.metrics.meter import Meter
from serried.trainer.metrics.run_log import RunLog
from serried.trainer.monitor.heartbeat import EVALUATE
from serried.trainer.monitor.shutdown import Shutdown
from serried.trainer.progress import Progress
from serried.trainer.run_context import Context
from serried.trainer.task import Dataset, TextTask, to_device
from serried.trainer.training_state import TrainingState


class Evaluator:
    """Mean loss over the validation sets, computed on all ranks together."""

    def __init__(
        self, context: Context, state: TrainingState, validation: dict[str, Dataset], *,
        progress: Progress, log: RunLog, meter: Meter, shutdown: Shutdown, benchmarks: Any = None,
    ) -> None:  # fmt: skip
        """``benchmarks``: return value of ``open_benchmarks``."""
        self._context, self._state = context, state
        self._validation = validation
        self._progress, self._log = progress, log
        self._meter, self._shutdown = meter, shutdown
        self._benchmarks = benchmarks
        self.before: tuple[int, dict[str, Any]] | None = None
        """Step of the last evaluation that was begun, and the progress before it."""

    def announce(self) -> None:
        """Record all validation sets as not evaluated. ``evaluate`` removes the sets that it has evaluated."""
        self._progress.missed = list(self._validation)

    def evaluate(self, step: int, names: Iterable[str] | None = None) -> Exception | None:
        """Evaluate each validation set, or the sets in ``names``, on ``trainer.eval_batches`` batches.

        A request to stop ends the evaluation early. The remaining sets are recorded in the progress.

        Returns:
            The error if the evaluation failed and all ranks know it, else None. The caller may save a checkpoint before
            it raises the error. The results of the failed set are discarded. Other errors are raised.
        """
        progress = self._progress
        self.before = step, progress.state_dict()
        progress.missed = list(self._validation if names is None else names)
        before = progress.state_dict()
        try:
            for name in [*progress.missed]:
                before = progress.state_dict()
                if self._shutdown.stops or not self._evaluate_on(name, self._validation[name], step):
                    break
                progress.missed.remove(name)
            self._shutdown.settle_evaluation()
        except Exception as error:
            if self._context.session.exchange.survives(error):
                raise
            failure = self._explained(error)
            if not self._shutdown.share_failure(failure, step):
                raise
            self._state.parallel.reshard()
            progress.load_state_dict(before)
            return failure
        if progress.early_stop is not None and not self._shutdown.stops:
            self._shutdown.end_early(progress.early_stop)
        return None

    def _explained(self, error: Exception) -> Exception:
        """Return ``error``, or a more helpful error with ``error`` as its cause."""
        context = self._context
        if context.planner is None:
            return error
        told = context.planner.explain(
            error, context.config, context.task, context.session, context.pulse, self._state.optimizer
        )
        if told is error:
            return error
        told.__cause__ = error
        assert isinstance(told, Exception)
        return told

    def make_up(self, step: int) -> None:
        """Run the evaluations that were skipped when the run stopped after ``step``."""
        progress = self._progress
        evaluates = self._context.config.trainer.evaluates_every > 0
        progress.missed = [name for name in progress.missed if evaluates and name in self._validation]
        if progress.missed:
            if (failure := self.evaluate(step, progress.missed)) is not None:
                raise failure
            if progress.validated_step == step:
                progress.made_up[str(step)] = dict(progress.validation)

    def _evaluate_on(self, name: str, dataset: Dataset, step: int) -> bool:
        """Evaluate on ``dataset``. Returns False if the evaluation was interrupted."""
        trainer, session = self._context.config.trainer, self._context.session
        wait_for_device(session.device)  # do not include pending training steps in the measured time
        started = time.perf_counter()

        def on_device(batch: Any) -> Any:
            self._context.pulse.enter(EVALUATE, step)
            return to_device(batch, session.device)

        def until_stopped(batches: Iterable[Any]) -> Iterable[Any]:
            return self._shutdown.unless_stopped(map(on_device, batches))

        losses = {}
        weights = {}
        samples = trainer.eval_batches * trainer.global_batch
        metrics: dict[str, list[float]] = {}
        found = evaluate_by_source(
            self._state.parallel,
            self._context.task,
            dataset,
            samples=samples,
            micro_batch=trainer.micro_batch,
            on_device=until_stopped,
        )
        with self._state.evaluated():
            for source, sums in found:
                if self._shutdown.stops:
                    return False
                losses[source], weights[source] = sums.loss_sum, sums.weight
                for metric, (total, weight) in sums.metrics.items():
                    metrics.setdefault(metric, [0.0, 0.0])
                    metrics[metric] = [metrics[metric][0] + total, metrics[metric][1] + weight]
            scores = self._scores(until_stopped, step) if name == DEFAULT_VALIDATION and self._benchmarks else {}
            if scores is None:
                return False
        seconds = time.perf_counter() - started
        self._meter.pause(name, seconds)
        total = sum(weights.values())
        if not total:
            self._log.not_evaluated(step, name)
            return True
        by_source = {source: losses[source] / weights[source] for source in losses if source and weights[source]}
        means = {metric: sums / weight if weight else math.nan for metric, (sums, weight) in metrics.items()}
        means = {"loss": sum(losses.values()) / total, **means, **scores}
        counted = min(len(dataset), samples) if self._context.task.unit == "samples" else int(total)
        if name == DEFAULT_VALIDATION:
            self._progress.evaluated(step, means, self._context.config)
        self._log.evaluated(step, name, means, counted, seconds, by_source)
        return True

    def _scores(self, until_stopped: Callable[[Iterable[Any]], Iterable[Any]], step: int) -> dict[str, float] | None:
        """Return the metrics of ``trainer.evaluate``, or None if the ranks agreed to stop."""
        from serried.trainer.evaluation.lm_eval import Stopped

        micro_batch = self._context.config.trainer.micro_batch
        progress = partial(self._context.pulse.enter, EVALUATE, step)
        try:
            return self._benchmarks.scores(self._state.parallel, micro_batch, until_stopped, progress)
        except Stopped:
            self._state.parallel.reshard()  # the last forward may have left parameters gathered
            return None


def open_benchmarks(context: Context, validation: Collection[str]) -> Any:
    """Return the benchmarks of lm-evaluation-harness in ``trainer.evaluate``, or None if there are none.

    The library is imported only if it is needed. This is a collective call.

    Raises:
        UserError: The library is not installed, the run has no validation data, or a benchmark cannot be used.
    """
    trainer, task = context.config.trainer, context.task
    if not trainer.evaluate:
        return None
    if find_spec("lm_eval") is None:
        raise UserError(f"trainer.evaluate needs the library lm-eval; use: {install_command('eval')}")
    if not isinstance(task, TextTask):
        raise UserError(
            f"trainer.evaluate needs a text model, but {type(task).__name__} is not a serried.TextTask; use "
            "trainer.evaluate=[]"
        )
    if DEFAULT_VALIDATION not in validation:
        raise UserError(
            "trainer.evaluate needs validation data, as its metrics are recorded with the validation loss; use "
            "data.validation_fraction=0.01"
        )
    task.text_ids("", begins=True)  # raises an error for models without token logits
    context.console.doing("loading benchmarks")
    from serried.trainer.evaluation.lm_eval import Benchmarks

    return Benchmarks(trainer.evaluate, trainer.eval_batches * trainer.global_batch, task, context.session)
