"""A run from start to end: choose the checkpoint to start from, train, and record the result."""

import gc
import re
import time
import traceback
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from serried.configs.bucket_paths import with_urls
from serried.configs.errors import (
    EXIT_FAILED,
    EXIT_FINISHED,
    EXIT_STOPPED,
    StopRequested,
    TrainingStopped,
    UserError,
)
from serried.configs.requirements import missing_compiler
from serried.configs.schema import run_config
from serried.configs.schema.fields import AUTO
from serried.configs.schema.sections import RunConfig
from serried.parallel.layout.checks import with_values
from serried.parallel.layout.mesh import resolve_layout
from serried.records.bucket_run import BucketRun
from serried.records.files import make_scratch
from serried.records.object_store import open_store
from serried.records.record_upload import RecordUpload
from serried.records.report import write_report
from serried.records.run_folder import RunFolder
from serried.records.status import read_status, record_end
from serried.records.trackers.tracker_processes import Trackers
from serried.runtime.agreement import Fenced
from serried.runtime.console import Console, Doing
from serried.runtime.exit import Failure, say_stopped
from serried.runtime.process import take_console, tell_launcher
from serried.runtime.session import Session
from serried.trainer import compilation
from serried.trainer.adapter_base_model import initial_weights
from serried.trainer.callbacks import Callback, Callbacks
from serried.trainer.checkpoint.checkpoints import checkpoints_of
from serried.trainer.checkpoint.resume import DamagedCheckpoint, Start, check_data, find_start
from serried.trainer.checkpoint.retention import step_of, weights_alone
from serried.trainer.checkpoint.saved_state import read_state
from serried.trainer.model import build_model, with_compile
from serried.trainer.monitor.heartbeat import END, SET_UP, Pulse, activity
from serried.trainer.monitor.watchdog import Watchdog
from serried.trainer.progress import Counts, Progress, has_missed_evaluations, saved_early_stop, saved_skipped
from serried.trainer.recovery.recovery import Kept, Recovery
from serried.trainer.run_context import Context, Planner
from serried.trainer.run_data import Data, with_steps
from serried.trainer.task import RunTask, needs_data_for_example
from serried.trainer.trainer import Trainer


def train(
    config: RunConfig, task: RunTask, session: Session, config_yaml: str, planner: Planner | None = None,
    callbacks: Sequence[Callback | type[Callback]] = (),
) -> int:  # fmt: skip
    """Train ``task`` as configured in ``config`` on all ranks of ``session``. Returns the exit code.

    Args:
        config: The configuration of the run.
        task: The task to train.
        session: The processes of the run.
        config_yaml: ``config`` as YAML, for the run folder.
        planner: Estimates memory and time. If None, no plan is printed, and ``trainer.micro_batch`` must be a number.
        callbacks: Classes or instances. Their hooks are called in this order, after the task's hooks.

    Raises:
        UserError: A problem that the user can fix. It is the same on every rank.
        TrainingFailed: Loss or gradient was not finite in several consecutive steps, or a callback failed.
    """
    if config.recover.mode == "memory" and session.device.type != "cpu":
        raise UserError(
            "recover.mode=memory needs launch.device=cpu: this version cannot close the connections between GPUs; use "
            "recover.mode=off"
        )
    console = Console(session.is_main, session.rank)
    folder, upload = _claimed_folder(config, session, console)
    if folder is not None and folder.warning:
        console.say(f"WARNING    {folder.warning}")
    with ExitStack() as at_end:  # called in reverse order
        at_end.callback(console.close)
        if upload is not None:
            at_end.callback(upload.close)
        trackers = Trackers(config.run.dir, config.track, console.say)
        at_end.callback(trackers.end)
        pulse = Pulse()
        hooks = Callbacks(config, folder, pulse, console.log)
        run = _Run(Context(config, task, session, console, folder, pulse, hooks, planner), config_yaml, callbacks)
        at_end.callback(run.close_folder)
        at_end.callback(trackers.finish)
        run.watch()
        at_end.callback(run.end_watch)
        console.follow(run.activity)
        session.signals.last_words_unheard = run.stop_unheard
        built: list[Trainer] = []  # the trainer; the only reference, so that a loss can release it
        try:
            session.once(partial(hooks.make, task, callbacks))
            run.find_start()
            if run.is_over():
                return run.nothing_to_do()
            built.append(run.build())
            at_end.callback(_close_saver, built)
            if upload is not None:
                upload.start()
            if session.is_main:
                trackers.start()
            run.watch_for_losses(built[0])
            started = time.perf_counter()
            while True:
                try:
                    for _ in built[0].steps():
                        pass
                    code = built[0].end(time.perf_counter() - started)
                    break
                except RuntimeError as error:
                    if not run.survives(error):
                        raise
                run.recover(built, trackers)  # outside of the except block, which refers to the trainer
            run.ends_as_planned()
            session.signals.last_words = partial(_settled, console, code)
            return code
        except Fenced as error:
            return run.leave(error)
        except BaseException as error:
            if run.is_fenced:
                return run.leave(error)
            if (explained := run.fail(error, built[0] if built else None)) is not error:
                raise explained from error
            raise


class _Run:
    """Start and end of a run on this rank.

    It has no reference to the trainer: signals and the status line refer to it after the end, when the trainer's
    process groups must be released.
    """

    def __init__(self, context: Context, config_yaml: str, callbacks: Sequence[Callback | type[Callback]] = ()) -> None:
        self.context, self._config_yaml = context, config_yaml
        self._callbacks = callbacks
        self._watchdog: Watchdog | None = None
        self._recovery: Recovery | None = None
        self._takes_over = False
        """Whether this rank is rank 0 since a loss, and the trainer is not complete yet."""
        self.start = Start()
        self._data: Data | None = None
        self._damaged: dict[Path, str] = {}
        """Damage of checkpoints that was found while they were read, by path."""

    def _configure(self, config: RunConfig) -> None:
        """Replace the configuration with ``config``, in which automatic values are resolved."""
        self.context.task.run, self._config_yaml = config, run_config.config_yaml(config)
        self.context = replace(self.context, config=config)
        self.context.callbacks.config = config

    def _open_data(self) -> Data:
        if self._data is None:
            self._data = Data(self.context.task, self.context.session, self.context.console)
        return self._data

    def find_start(self) -> None:
        """Choose the checkpoint or weights to start from."""
        if self.context.config.trainer.epochs is not None:
            self._configure(with_steps(self.context.config, self._open_data().training))
        if self.context.config.trainer.compile == "auto":
            self._choose_compile()
        context = self.context
        context.console.doing("looking for a checkpoint")
        weights = partial(initial_weights, context.config, context.task, is_new=True)
        self.start = find_start(context.config, context.session, weights, context.folder, self._damaged)
        for note in self.start.notes:
            context.console.say(note)

    def is_over(self) -> bool:
        """Return whether the run already ended with the checkpoint that was found. This is a collective call."""
        config = self.context.config
        start = self.start
        session = self.context.session
        is_last = start.step >= config.trainer.last_step and not session.once(partial(_lacks_evaluation, config, start))
        is_early = saved_early_stop(start.state, config.trainer.early_stopping_patience) is not None
        return start.checkpoint is not None and (is_last or is_early)

    def nothing_to_do(self) -> int:
        """Check that the checkpoint belongs to this run, report that it is finished, and return the exit code."""
        context, start = self.context, self.start
        assert start.checkpoint is not None
        data = self._open_data()
        context.session.once(partial(context.task.check_resumed, start.checkpoint))
        check_data(start, data.fingerprint, context.config, data.earlier_fingerprints)
        build_model(context.config, context.task).check_names(start.checkpoint, None)
        return _nothing_to_do(context.config, start, context.console, context.folder)

    def build(self) -> Trainer:
        """Resolve ``trainer.micro_batch=auto``, and build the trainer."""
        if self.context.config.trainer.micro_batch == AUTO:
            self._choose_micro_batch()
        trainer = self._trainer()
        if (folder := self.context.folder) is not None:
            self.context.session.signals.last_words = partial(_last_words, self.context.console, folder, trainer)
        return trainer

    def _trainer(self) -> Trainer:
        """Return the trainer. If the checkpoint turns out to be damaged, it starts from an earlier one."""
        while True:
            try:
                return Trainer(self.context, self._config_yaml, self.start, self._data)
            except DamagedCheckpoint as error:
                self._damaged[error.path] = error.damage
            gc.collect()  # of the first model
            self.find_start()

    # losses of replicas ---------------------------------------------------------------------------------------------

    def watch(self) -> None:
        """Start the watchdog of the current ranks."""
        context = self.context
        self._watchdog = Watchdog(
            context.config.launch, context.session, context.config.run.dir, context.console, context.folder,
            context.pulse,
        )  # fmt: skip
        if self._recovery is not None:
            self._watchdog.on_loss(self._recovery.lose, lambda: self.is_fenced)

    def end_watch(self) -> None:
        """End the watchdog."""
        if self._watchdog is not None:
            self._watchdog.close()

    def _stop_watch(self) -> None:
        if self._watchdog is not None:
            self._watchdog.stop()

    def watch_for_losses(self, trainer: Trainer) -> None:
        """With ``recover.mode=memory``, watch the other ranks from now on. This is a collective call."""
        context = self.context
        if context.config.recover.mode == "memory":
            self._recovery = Recovery(context.session, context.config, trainer.state.parallel.layout, self.start.step)
            if self._watchdog is not None:
                self._watchdog.on_loss(self._recovery.lose, lambda: self.is_fenced)
            if context.folder is not None:
                context.folder.members = self._recovery.members

    def ends_as_planned(self) -> None:
        """Tell the other ranks that the end of this rank is no loss."""
        if self._recovery is not None:
            self._recovery.close()

    def survives(self, error: RuntimeError) -> bool:
        """Return whether ``error`` is the consequence of a loss. ``recover`` then continues the run."""
        if not self.context.session.exchange.survives(error):
            return False
        self.context.console.log(traceback.format_exc())
        return True

    def recover(self, built: list[Trainer], trackers: Trackers) -> None:
        """Replace the trainer in ``built`` by a trainer of the ranks that are left after a loss.

        Raises:
            TrainingStopped: The run cannot continue from memory.
            Fenced: The other ranks continue without this one.
        """
        recovery = self._recovery
        assert recovery is not None
        self.context.session.signals.last_words = None  # it refers to the trainer
        self.start = Start(state={"step": built[0].loop.steps_done})
        kept = recovery.keep(built.pop())
        while True:
            self._stop_watch()
            gc.collect()  # of the trainer, which refers to process groups
            try:
                recovery.form()
                self._rebuild(recovery, kept, built, trackers)
                break
            except RuntimeError as error:
                if not self.survives(error):
                    raise
            built.clear()
            gc.collect()
            recovery.agree_again(kept)
        self.start = replace(self.start, kept=None)  # the tensors of the model before the loss
        recovery.report(kept, self.context.console, self.context.folder)

    def _rebuild(self, recovery: Recovery, kept: Kept, built: list[Trainer], trackers: Trackers) -> None:
        """Build the trainer of the current ranks in ``built``, with the state ``kept``."""
        session = self.context.session
        if session.is_main and self.context.folder is None:
            self._take_over(kept.step)
        self.context.pulse.enter(SET_UP, kept.step)
        self.watch()
        self._configure(recovery.configured(self.context.config))
        saved = self._saved_callbacks() if self._takes_over else {}
        newest = self._newest_checkpoint() if session.is_main else 0
        self.start, rest, logs = recovery.start(kept, newest, saved)
        trainer = Trainer(self.context, self._config_yaml, self.start, self._data)
        built.append(trainer)
        trainer.saver.compare_always(kept.step)
        trainer.rest = rest
        trainer.loop.log.newest = kept.newest
        trainer.shutdown.repeat(kept.requests)
        if self._takes_over:
            self._takes_over = False
            self.context.callbacks.call("on_start", kept.step)
            trackers.start()
        if logs and kept.newest is not None:
            trainer.loop.log.write(*kept.newest)
        if (folder := self.context.folder) is not None:
            session.signals.last_words = partial(_last_words, self.context.console, folder, trainer)

    def _take_over(self, step: int) -> None:
        """Do on this rank what the lost rank 0 did: console, records, callbacks."""
        context = self.context
        take_console()
        context.console.speak()
        try:
            folder = RunFolder(context.config.run.dir, takes_over=True)
            folder.continue_records(step)
        except (OSError, UserError) as error:
            raise TrainingStopped(f"rank 0 is lost, and its records cannot be continued: {error}") from None
        hooks = Callbacks(context.config, folder, context.pulse, context.console.log)
        hooks.make(context.task, self._callbacks)
        self.context, self._takes_over = replace(context, folder=folder, callbacks=hooks), True

    def _newest_checkpoint(self) -> int:
        context = self.context
        saved = checkpoints_of(context.config, context.session, context.folder).saved()
        return (step_of(saved[0]) or 0) if saved else 0

    def _saved_callbacks(self) -> dict[str, Any]:
        """Return the state of the callbacks in the newest checkpoint; empty if there is none."""
        context = self.context
        for path in checkpoints_of(context.config, context.session, context.folder).saved()[:1]:
            return {key: value for key, value in read_state(path).items() if key == "callbacks"}
        return {}

    @property
    def is_fenced(self) -> bool:
        """Whether the other ranks have continued without this one."""
        return self._recovery is not None and self._recovery.is_fenced

    def leave(self, error: BaseException) -> int:
        """End this rank, without which the others continue. Returns the exit code."""
        context = self.context
        context.session.shield()
        self.ends_as_planned()
        context.session.cause.record(context.session.rank, str(error), EXIT_STOPPED)
        context.session.cause.ended_run = True
        context.console.quiet()
        context.console.log(traceback.format_exc())
        context.console.log("stopped    the other processes continue without this one")
        if context.folder is not None:
            context.folder.close()
            self.context = replace(context, folder=None)
        tell_launcher(fenced=True)
        return EXIT_STOPPED

    def close_folder(self) -> None:
        """Release the run folder, and write ``report.html`` if the folder has records of this run."""
        context, folder = self.context, self.context.folder
        if folder is not None:
            has_records = folder.has_begun and folder.is_ours
            folder.close()
            if has_records:
                _write_page(context.config, context.console)

    # automatic values -----------------------------------------------------------------------------------------------

    def _choose_compile(self) -> None:
        context, device = self.context, self.context.session.device
        if device.type != "cpu":
            self._open_data()  # the model may depend on the data
        layout = resolve_layout(context.config.parallel, context.session.world_size)
        config, why_not = with_compile(context.config, context.task, layout, device.type)
        if config.trainer.compiles and (reason := self._missing_compiler()):
            config, why_not = with_values(config, {"trainer.compile": False}), reason
        self._configure(config)
        if why_not:
            context.console.say(f"compile    off with trainer.compile=auto: {why_not}")

    def _missing_compiler(self) -> str | None:
        """Return a description of a host that lacks a requirement of torch.compile; None if no host does. All ranks
        compile, or none. This is a collective call."""
        session = self.context.session
        missing = missing_compiler(session.device.type)
        found = session.gather(missing and f"{session.host()} needs {missing[0]}; {missing[1]}")
        return next(filter(None, found), None)

    def _choose_micro_batch(self) -> None:
        context = self.context
        if context.planner is None:
            raise UserError("trainer.micro_batch=auto needs a planner; use trainer.micro_batch=1")
        if needs_data_for_example(context.task):
            self._open_data()
        context.console.doing("choosing trainer.micro_batch")
        config, line = context.planner.micro_batch(context.config, context.task, context.session, self.start)
        self._configure(config)
        context.console.say(line)

    def activity(self) -> Doing | None:
        """Return the current activity of this rank, for the status line."""
        context = self.context
        waits_for, steps = context.session.exchange.waits_for, context.config.trainer.steps
        return activity(context.pulse, waits_for, steps, context.console.last_step)

    def stop_unheard(self) -> int:
        """Record a stop on a signal that arrived while no training loop could respond to it. Returns the exit code."""
        context = self.context
        context.console.quiet()
        failure = context.session.cause.of(StopRequested(context.session.signals.received))
        _record_end(context.config, self.start.step, failure)
        if failure.exit_code == EXIT_STOPPED:
            context.console.say(f"stopped    {failure.reason}; run the same command to resume")
        return failure.exit_code

    def fail(self, error: BaseException, trainer: Trainer | None) -> BaseException:
        """Record that the run ended with ``error``, and report the checkpoint to resume from.

        ``trainer``: None if it was not built yet. Returns the error to raise: ``error`` or a more helpful one.
        """
        context = self.context
        session, folder = context.session, context.folder
        session.shield()
        self.ends_as_planned()
        explained = self._explained(error, trainer)
        step = steps_done = self.start.step
        if trainer is not None:
            step, steps_done = trainer.loop.step, trainer.loop.steps_done
        context.pulse.enter(END, step)
        failure = session.cause.first(explained)
        if self._recovery is not None and failure.rank == session.rank and self._recovery.has_lost_rank_0:
            take_console()
            if failure.exit_code == EXIT_STOPPED and not session.is_main:
                say_stopped(failure.reason)
        context.console.log(traceback.format_exc())
        if trainer is not None and (folder is None or folder.is_ours):
            trainer.saver.end(step)
        is_stopped = failure.exit_code == EXIT_STOPPED
        if is_stopped:  # the current step is not complete, since a peer stopped before it
            step = steps_done
        if folder is None:
            if failure.rank == session.rank:
                _record_end(context.config, step, failure)
        elif is_stopped:
            folder.stop_early(step, failure.reason, failure.exit_code)
        else:
            folder.fail(step, failure.reason, failure.exit_code)
        session.signals.last_words = partial(_settled, context.console, EXIT_STOPPED if is_stopped else None)
        return explained

    def _explained(self, error: BaseException, trainer: Trainer | None) -> BaseException:
        """Return ``error``, or a more helpful error."""
        context = self.context
        if isinstance(error, RuntimeError) and re.search("Double (and|but expected) Float", str(error)):
            error.add_note(
                "the samples are float64, the default of NumPy and pandas, but the weights are not: return samples "
                "with .float()"
            )
        explained = error
        if context.planner is not None:
            optimizer = trainer.state.optimizer if trainer else None
            explained = context.planner.explain(
                error, context.config, context.task, context.session, context.pulse, optimizer
            )
        return compilation.explained(explained, context.session.signals.received)


def _claimed_folder(
    config: RunConfig, session: Session, console: Console
) -> tuple[RunFolder | None, BucketRun | RecordUpload | None]:
    """Claim the run folder on rank 0. Return it, and the upload of this node's records to a bucket; None on ranks that
    have none. This is a collective call."""
    claimed: list[RunFolder] = []
    runs: list[BucketRun] = []
    url = config.run.url

    def claim() -> int:
        if url is not None:
            make_scratch(config.run.dir)
        claimed.append(RunFolder(config.run.dir, url))
        if url is None:
            return 0
        try:
            run = BucketRun(url, claimed[0], console.say)
        except BaseException as error:
            if isinstance(error, TrainingStopped):  # batch scripts read the status to decide whether to requeue the job
                claimed[0].stop_early(0, str(error), EXIT_STOPPED)
            claimed[0].close()
            raise
        runs.append(run)
        return run.epoch

    epoch = session.once(claim)
    upload: BucketRun | RecordUpload | None = runs[0] if runs else None
    if url is not None:
        make_scratch(config.run.dir)
        if session.local_rank == 0 and upload is None:
            upload = RecordUpload(open_store(url), epoch, config.run.dir, console.log, is_main=False)
    return claimed[0] if claimed else None, upload


def _close_saver(built: Sequence[Trainer]) -> None:
    for trainer in built:
        trainer.saver.checkpointer.close()


def _write_page(config: RunConfig, console: Console) -> None:
    """Write ``report.html`` into the run folder. An error only prints a warning and does not change the result."""
    path = config.run.dir / "report.html"
    try:
        write_report([config.run.dir], path)
    except Exception as error:
        console.log(traceback.format_exc())
        why = getattr(error, "strerror", None) or f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
        console.say(f"WARNING    {path} was not written ({why}); try: serried report {config.run.place}")


def _record_end(config: RunConfig, step: int, failure: Failure) -> None:
    state = "stopped" if failure.exit_code == EXIT_STOPPED else "failed"
    with suppress(OSError):
        record_end(config.run.dir, state, step=step, reason=failure.reason, exit_code=failure.exit_code)


def _last_words(console: Console, folder: RunFolder, trainer: Trainer) -> None:
    console.quiet()
    folder.fail(trainer.loop.step, "interrupted twice", EXIT_FAILED)


def _settled(console: Console, code: int | None) -> int | None:
    """Handle a signal after the end of the run was reported, while trackers finish and the report is written.

    ``code``: None if the run failed and the reason is not printed yet.
    """
    console.quiet()
    return code


def _lacks_evaluation(config: RunConfig, start: Start) -> bool:
    """Return whether the last step's evaluation was skipped by a stop and not completed by a later start."""
    status = read_status(config.run.dir)
    is_missed = has_missed_evaluations(start.state) and start.step == config.trainer.steps
    return is_missed and start.continues(config.run.dir) and (status is None or status.state != "finished")


def _nothing_to_do(config: RunConfig, start: Start, console: Console, folder: RunFolder | None) -> int:
    assert start.checkpoint is not None
    checkpoint = config.run.shown(start.checkpoint)
    if not start.continues(config.run.dir):
        end = f"trainer.steps={config.trainer.steps}"
        if start.step < config.trainer.steps:
            end = f"trainer.stop_at={config.trainer.stop_at}"
        raise UserError(
            f"{checkpoint} is at step {start.step}, so {end} leaves nothing to train; raise it, or use "
            f"{with_urls(weights_alone(start.checkpoint))}"
        )
    early = saved_early_stop(start.state, config.trainer.early_stopping_patience)
    if start.step < config.trainer.steps and early is None:
        stop_at = config.trainer.stop_at
        end = f"where trainer.stop_at={stop_at} stops" if start.step == stop_at else f"past trainer.stop_at={stop_at}"
        if folder is not None:  # batch scripts read the status to decide whether to requeue the job
            folder.status("stopped", step=start.step, reason=f"trainer.stop_at={stop_at}", exit_code=EXIT_STOPPED)
        console.say(
            f"{checkpoint} is at step {start.step}, {end}. Nothing to do.\nto resume: remove trainer.stop_at, or "
            f"raise it, up to trainer.steps={config.trainer.steps}"
        )
        return EXIT_STOPPED
    if folder is not None:  # the run may have been killed after its last checkpoint
        progress = Progress(Counts(skipped=saved_skipped(start.state)), early_stop=early)
        reason = progress.finished_because(start.step)
        folder.status("finished", step=start.step, reason=reason, exit_code=EXIT_FINISHED)
    kept = f"in {config.run.dir}/earlier-N" if config.run.url is None else "in the bucket"
    console.say(
        f"{config.run.place} is finished: {start.step} steps, the model is in {checkpoint}. Nothing to do."
        f"\nstart again: checkpoint.resume=never (keeps these files {kept}) "
        f"· elsewhere: {config.another_run}"
    )
    return EXIT_FINISHED
