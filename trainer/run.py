"""A run from start to end: choose where to start, train, and record how it ended."""

import re
import traceback
from contextlib import suppress
from functools import partial

from serried.configs.errors import EXIT_FAILED, EXIT_FINISHED, EXIT_STOPPED, StopRequested, UserError
from serried.configs.plain_data import is_count
from serried.configs.schema import run_config
from serried.configs.schema.sections import AUTO, RunConfig
from serried.records.report import write_report
from serried.records.run_folder import RunFolder
from serried.records.status import read_status, record_end
from serried.runtime.console import Console
from serried.runtime.exit import Failure
from serried.runtime.session import Session
from serried.trainer import compilation
from serried.trainer.checkpoint.resume import Start, check_data, find_start
from serried.trainer.checkpoint.retention import weights_alone
from serried.trainer.metrics.run_log import Progress, finished_because
from serried.trainer.model import build_model
from serried.trainer.monitor.heartbeat import END, activity
from serried.trainer.monitor.watchdog import Watchdog
from serried.trainer.run_context import Context, Planner
from serried.trainer.run_data import Data, with_steps
from serried.trainer.task import Task, needs_data_for_example
from serried.trainer.trainer import Trainer


def train(
    config: RunConfig, task: Task, session: Session, config_yaml: str, planner: Planner | None = None
) -> int:  # fmt: skip
    """Train ``task`` as ``config`` says, on all ranks of ``session``. Returns the exit code.

    Without a ``planner`` no plan is printed, and ``trainer.micro_batch`` must be a number.

    Raises:
        UserError: something the user can fix; the same on every rank.
        TrainingFailed: the numbers stopped being finite.
    """
    folder: RunFolder | None = None

    def claim() -> None:
        nonlocal folder
        folder = RunFolder(config.run.dir)

    session.once(claim)
    console = Console(session.is_main, session.rank)
    if folder is not None and folder.warning:
        console.say(f"WARNING    {folder.warning}")
    start, trainer, data = Start(), None, None
    watchdog = Watchdog(config.launch, session, config.run.dir, console, folder)
    console.follow(
        lambda: activity(watchdog.pulse, session.exchange.waits_for, config.trainer.steps, console.last_step)
    )

    def stop_unheard() -> int:
        console.quiet()
        failure = session.cause.of(StopRequested(session.signals.received))
        _tell_end(config, start.step, failure)
        if failure.exit_code == EXIT_STOPPED:
            console.say(f"stopped    {failure.reason}; run the same command to resume")
        return failure.exit_code

    session.signals.last_words_unheard = stop_unheard
    try:
        if config.trainer.epochs is not None:
            data = Data(task, session, console)
            config = task.run = with_steps(config, data.training)
            config_yaml = run_config.config_yaml(config)
        console.doing("looking for a checkpoint")
        start = find_start(config, session, task.pretrained)
        for note in start.notes:
            console.say(note)
        is_last = start.step >= config.trainer.last_step and not session.once(partial(_lacks_evaluation, config, start))
        is_over = is_last or _ended_early(start, config.trainer.early_stopping_patience)
        if start.checkpoint is not None and is_over:
            data = data or Data(task, session, console)
            session.once(partial(task.check_resumed, start.checkpoint))
            check_data(start, data.fingerprint, config, data.earlier_fingerprints)
            build_model(config, task).check_names(start.checkpoint, None)
            return _nothing_to_do(config, start, console, folder)
        if config.trainer.micro_batch == AUTO:
            if planner is None:
                raise UserError("trainer.micro_batch=auto needs a planner; use trainer.micro_batch=1")
            if needs_data_for_example(task):
                data = data or Data(task, session, console)
            console.doing("choosing trainer.micro_batch")
            config, line = planner.micro_batch(config, task, session, start)
            task.run, config_yaml = config, run_config.config_yaml(config)
            console.say(line)
        context = Context(config, task, session, console, folder, watchdog.pulse, planner)
        trainer = Trainer(context, config_yaml, start, data)
        if folder is not None:
            session.signals.last_words = partial(_last_words, console, folder, trainer)
        code = trainer.run()
        session.signals.last_words = partial(_settled, console, code)
        return code
    except BaseException as error:
        session.shield()
        if isinstance(error, RuntimeError) and re.search("Double (and|but expected) Float", str(error)):
            error.add_note(
                "the samples are float64, as NumPy and pandas make them, and the weights are not: "
                "return samples with .float()"
            )
        told = error
        if planner is not None:
            optimizer = trainer.state.optimizer if trainer else None
            told = planner.explain(error, config, task, session, watchdog.pulse, optimizer)
        told = compilation.explained(told, session.signals.received)
        watchdog.pulse.enter(END, trainer.loop.step if trainer else start.step)
        failure = session.cause.first(told)
        console.log(traceback.format_exc())
        if trainer is not None and (folder is None or folder.is_ours):
            trainer.saver.end(trainer.loop.step)
        step = start.step
        if trainer is not None:  # a step in which a run stops, because a peer left before it, is not done
            step = trainer.loop.steps_done if failure.exit_code == EXIT_STOPPED else trainer.loop.step
        if folder is None:
            if failure.rank == session.rank:
                _tell_end(config, step, failure)
        elif failure.exit_code == EXIT_STOPPED:
            folder.stop_early(step, failure.reason, failure.exit_code)
        else:
            folder.fail(step, failure.reason, failure.exit_code)
        is_stopped = failure.exit_code == EXIT_STOPPED
        session.signals.last_words = partial(_settled, console, EXIT_STOPPED if is_stopped else None)
        if told is not error:
            raise told from error
        raise
    finally:
        if trainer is not None:
            trainer.saver.checkpointer.close()
        watchdog.close()
        if trainer is not None:
            trainer.trackers.finish()
        if folder is not None:
            has_records = folder.has_begun and folder.is_ours
            folder.close()
            if has_records:
                _write_page(config, console)
        if trainer is not None:
            trainer.trackers.end()
        console.close()


def _write_page(config: RunConfig, console: Console) -> None:
    """Leave ``report.html`` beside the records. However that goes, the run has ended as it has ended."""
    path = config.run.dir / "report.html"
    try:
        write_report([config.run.dir], path)
    except Exception as error:
        console.log(traceback.format_exc())
        why = getattr(error, "strerror", None) or f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
        console.say(f"WARNING    {path} was not written ({why}); try: serried report {config.run.dir}")


def _tell_end(config: RunConfig, step: int, failure: Failure) -> None:
    state = "stopped" if failure.exit_code == EXIT_STOPPED else "failed"
    with suppress(OSError):
        record_end(config.run.dir, state, step=step, reason=failure.reason, exit_code=failure.exit_code)


def _last_words(console: Console, folder: RunFolder, trainer: Trainer) -> None:
    console.quiet()
    folder.fail(trainer.loop.step, "interrupted twice", EXIT_FAILED)


def _settled(console: Console, code: int | None) -> int | None:
    """Answer a signal after the end was reported, while only trackers and the page are waited for. ``code`` is None if
    the run failed and the reason is not printed yet."""
    console.quiet()
    return code


def _lacks_evaluation(config: RunConfig, start: Start) -> bool:
    """Return whether a stop came before the evaluation after the last step, and no later start made it up."""
    progress, status = start.state.get("progress"), read_status(config.run.dir)
    is_missed = isinstance(progress, dict) and bool(progress.get("missed")) and start.step == config.trainer.steps
    return is_missed and start.continues(config.run.dir) and (status is None or status.state != "finished")


def _ended_early(start: Start, patience: int) -> str | None:
    """Return why the run of the checkpoint finished before its last step, if it did."""
    progress = start.state.get("progress")
    reason = progress.get("early_stop") if isinstance(progress, dict) else None
    waited = progress.get("evaluations_since_best") if isinstance(progress, dict) else None
    return str(reason) if reason and isinstance(waited, int) and 0 < patience <= waited else None


def _nothing_to_do(config: RunConfig, start: Start, console: Console, folder: RunFolder | None) -> int:
    if not start.continues(config.run.dir):
        assert start.checkpoint is not None
        end = f"trainer.steps={config.trainer.steps}"
        if start.step < config.trainer.steps:
            end = f"trainer.stop_at={config.trainer.stop_at}"
        raise UserError(
            f"{start.checkpoint} is at step {start.step}, and {end} leaves nothing to train; raise that, or use "
            f"{weights_alone(start.checkpoint)}"
        )
    early = _ended_early(start, config.trainer.early_stopping_patience)
    if start.step < config.trainer.steps and early is None:
        stop_at = config.trainer.stop_at
        end = f"where trainer.stop_at={stop_at} stops" if start.step == stop_at else f"past trainer.stop_at={stop_at}"
        if folder is not None:  # a batch script looks there whether to queue this again
            folder.status("stopped", step=start.step, reason=f"trainer.stop_at={stop_at}", exit_code=EXIT_STOPPED)
        console.say(
            f"{start.checkpoint} is at step {start.step}, {end}. "
            "Nothing to do.\nto resume: leave out trainer.stop_at, or raise it, up to "
            f"trainer.steps={config.trainer.steps}"
        )
        return EXIT_STOPPED
    if folder is not None:  # of a run that was killed after its last checkpoint
        saved = start.state.get("progress")
        skipped = saved.get("skipped", 0) if isinstance(saved, dict) else 0
        progress = Progress(early_stop=early, skipped=skipped if is_count(skipped) else 0)
        reason = finished_because(progress, start.step)
        folder.status("finished", step=start.step, reason=reason, exit_code=EXIT_FINISHED)
    console.say(
        f"{config.run.dir} is finished: {start.step} steps, the model is in {start.checkpoint}. Nothing to do."
        f"\nstart again: checkpoint.resume=never (keeps these files in {config.run.dir}/earlier-N) "
        f"· elsewhere: {config.another_run}"
    )
    return EXIT_FINISHED
