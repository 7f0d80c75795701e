"""The training loop: data, step, log, evaluation, checkpoint."""

import gc
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

from serried.configs.errors import TrainingFailed, TrainingStopped
from serried.parallel.layout.mesh import fewest_micro_batches
from serried.parallel.runner import StepDropped
from serried.trainer.data.loader import BatchLoader
from serried.trainer.evaluator import Evaluator
from serried.trainer.metrics.profiler import StepProfiler
from serried.trainer.monitor.heartbeat import DATA, LOG, SAVE, TRAIN
from serried.trainer.monitor.shutdown import Action, Shutdown
from serried.trainer.replica_check import GoBack
from serried.trainer.rollback import Rollback
from serried.trainer.run_context import Context
from serried.trainer.run_data import Data
from serried.trainer.saver import Saver
from serried.trainer.step_log import StepLog
from serried.trainer.task import to_device
from serried.trainer.training_state import TrainingState

_COLLECT_GARBAGE_EVERY = 50
_STEPS_BETWEEN_TIMED = 10
"""Minimum number of steps between two steps with timed phases, so that the cost of timing is negligible."""


class Rest(NamedTuple):
    """The work after an update that a loss has interrupted."""

    evaluate: bool = False
    save: bool = False


NOTHING_LEFT = Rest()


def is_due(step: int, every: int, last_step: int) -> bool:
    """Return whether something that happens every ``every`` steps (0: never) and after the last one, is due."""
    return every > 0 and (step % every == 0 or step == last_step)


class Loop:
    """Train step by step. Every rank runs the same loop."""

    def __init__(
        self, context: Context, data: Data, state: TrainingState, *, log: StepLog, evaluator: Evaluator, saver: Saver,
        shutdown: Shutdown, profiler: StepProfiler, rollback: Rollback,
    ) -> None:  # fmt: skip
        self._context = context
        self._data, self._state = data, state
        self.log, self._profiler = log, profiler
        self.evaluator, self._saver = evaluator, saver
        self._shutdown, self._rollback = shutdown, rollback
        self.step = 0
        """The current step, or the last completed one."""
        self._timed_step = 0
        self._is_first = True

    @property
    def steps_done(self) -> int:
        """The last completed step."""
        return self._data.step

    def start_at(self, step: int) -> None:
        """Resume after ``step``."""
        self.step = self._timed_step = step

    def steps(self, rest: Rest = NOTHING_LEFT) -> Generator[int, None, None]:
        """Train until the last step or a request to stop. Yields the number of each completed step.

        ``rest``: what is left to do of the step to start after.
        """
        with self._shutdown, _scheduled_garbage_collection() as collect_garbage:
            if any(rest):
                self._complete_step(rest)
            elif self.step:
                self.evaluator.make_up(self.step)
            is_over, is_dropped = self._shutdown.stops, False
            while not is_over:
                try:
                    started = time.perf_counter()
                    with self._loader() as loader, self._profiler:
                        self._begin_step()
                        for step, batches in enumerate(loader, start=self.step + 1):
                            try:
                                self._train(step, batches)
                            except StepDropped:
                                is_dropped = True
                                self._save_step_before()
                                break
                            self._note_first_step(time.perf_counter() - started)
                            self._log(loader)
                            self._begin_save()
                            failure = self._evaluate()
                            self._finish_save(ends=failure is not None)
                            if failure is not None:
                                raise failure
                            self._raise_failure_of_callback()
                            collect_garbage(step)
                            self._state.report_compilation(step)
                            yield step
                            if self._shutdown.stops:
                                break
                            self._begin_step()
                    is_over = True
                except GoBack as back:  # if this step also requests a stop, the run stops after the next one
                    self.start_at(self._rollback(back))
                    is_over = is_dropped

    def _loader(self) -> BatchLoader:
        """Return a loader of this rank's batches from the next step to the last."""
        layout, place = self._state.parallel.layout, self._state.parallel.place
        return self._data.loader(self._context.task, self._context.config, layout.data_ranks, place.data_rank)

    def _begin_step(self) -> None:
        """Enter the data phase of the next step. Time its phases if the step will be logged."""
        step, every = self.step + 1, self._context.config.trainer.log_every
        self._profiler.begin(step)
        self._context.pulse.enter(DATA, step)
        if every and step % every == 0 and step >= self._timed_step + _STEPS_BETWEEN_TIMED:
            self._timed_step = step
            self._context.pulse.phases.begin(self._context.session.device)

    def _train(self, step: int, batches: list[Any]) -> None:
        self.step = step
        self._context.pulse.enter(TRAIN, step)
        on_device = [to_device(batch, self._context.session.device) for batch in batches]
        parallel, seed = self._state.parallel, self._context.config.trainer.seed
        seeds = self._data.micro_batch_seeds(step, seed, len(batches), parallel.layout, parallel.place.data_rank)
        vote = partial(self._shutdown.vote, self._steps_to_save(step))
        # A rollback is recorded with the next save, so the step after it is not dropped.
        may_drop = self._rollback.went_back_to != self.steps_done
        fewest = fewest_micro_batches(self._context.config.trainer, parallel.layout)
        before = self._shutdown.before_micro_batches(step, len(batches), fewest) if may_drop else None
        result = self._state.step(on_device, self.log.learning_rate(step), vote, seeds, before)
        self._data.step = step
        self._context.pulse.phases.end()
        self.log.meter.add(step, result)
        self._shutdown.count(result["votes"])

    def _log(self, loader: BatchLoader) -> None:
        """Read and log the results if they are due. Stop the run if the results require it."""
        self._context.pulse.enter(LOG, self.step)
        every, is_an_end = self._context.config.trainer.log_every, self.step == 1 or self._shutdown.stops
        is_logged = self._is_due(every) or (is_an_end and every > 0)
        try:
            self.log.read(self.step, loader, log=is_logged)
        except (GoBack, TrainingFailed):
            self._saver.compare_replicas(self.step)  # a replica with corrupt values looks like a failed training
            raise

    def _evaluate(self) -> Exception | None:
        """Compare replicas and evaluate if due. Returns an evaluation error that all ranks know, or None."""
        config = self._context.config
        if self._is_due(config.health.replica_check_every):
            self._saver.compare_replicas(self.step)
        return self.evaluator.evaluate(self.step) if self._is_evaluated else None

    def _begin_save(self) -> None:
        """Start a checkpoint if one is due, and report completed checkpoints.

        Called before the evaluation. If a rank fails in the evaluation, the checkpoint is saved without its results.
        """
        self._saver.poll()
        config, is_asked_for = self._context.config, self._shutdown.action is not Action.GO_ON
        is_last, every = self.step == config.trainer.last_step, config.checkpoint.every
        if is_last or is_asked_for or (every and self.step % every == 0):
            if self._is_evaluated:
                self.evaluator.announce()
            self._begin()

    def _begin(self) -> None:
        self._shutdown.check_folder()
        self._shutdown.saves()
        self._context.pulse.enter(SAVE, self.step)
        self.log.read_all(self.step)
        self._saver.begin(self.step)

    def _finish_save(self, *, ends: bool) -> None:
        """Complete the checkpoint of this step. If the run ends here, start one if needed, and wait for it."""
        is_last = self.step == self._context.config.trainer.last_step or self._shutdown.stops or ends
        is_begun = self._saver.is_begun
        is_evaluated = is_begun and self._is_evaluated
        if not (is_begun or is_last):
            return
        if not is_begun:
            self._begin()
        elif is_evaluated:
            self._shutdown.check_folder()
            self._context.pulse.enter(SAVE, self.step)
        self._saver.finish(is_evaluated=is_evaluated, is_last=is_last)

    def _complete_step(self, rest: Rest) -> None:
        """Do what is left of a step that a loss has interrupted after its update."""
        if rest.save:
            self._begin()
        failure = self.evaluator.evaluate(self.step) if rest.evaluate else None
        if rest.save:
            self._finish_save(ends=failure is not None)
        if failure is not None:
            raise failure
        self._raise_failure_of_callback()

    def _save_step_before(self) -> None:
        """Save the last completed step if this is not already done. The current step was dropped.

        Raises:
            TrainingStopped: The dropped step is the first step since the start of this process.
        """
        self.step = self.steps_done
        if not self._shutdown.has_steps:
            raise TrainingStopped(f"{self._shutdown.reason} before the first step")
        self._context.pulse.enter(SAVE, self.step)
        self._saver.wait()
        if self._saver.saved_step != self.step:
            self._finish_save(ends=True)
        self._raise_failure_of_callback()

    def _raise_failure_of_callback(self) -> None:
        """End the run if a callback has failed, after the pending checkpoint is complete."""
        if self._context.callbacks.has_failed:
            self._context.pulse.enter(SAVE, self.step)
            self._saver.wait()
            self._context.callbacks.raise_failure()

    def _steps_to_save(self, step: int) -> int:
        """Return the number of steps from ``step`` to the next step at which a checkpoint is scheduled."""
        config = self._context.config
        to_last, every = config.trainer.last_step - step, config.checkpoint.every
        return min(to_last, -step % every) if every else to_last

    def _note_first_step(self, seconds: float) -> None:
        """Report the first step since the start of this process. ``seconds`` includes the wait for its data."""
        if self._is_first:
            self._is_first = False
            self._context.session.first_step_done(seconds)

    @property
    def _is_evaluated(self) -> bool:
        """Whether the model is evaluated after the current step."""
        return self._is_due(self._context.config.trainer.evaluates_every)

    def _is_due(self, every: int) -> bool:
        return is_due(self.step, every, self._context.config.trainer.last_step)


@contextmanager
def _scheduled_garbage_collection() -> Iterator[Callable[[int], None]]:
    """Collect garbage only between steps. If ranks collected at different times, each would wait for the others."""

    def collect(step: int) -> None:
        if step % _COLLECT_GARBAGE_EVERY == 0:
            gc.collect(1)

    was_enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield collect
    finally:
        if was_enabled:
            gc.enable()
