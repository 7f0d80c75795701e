"""Trainer: builds the components of a run in order, and trains step by step."""

from collections.abc import Generator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from serried.configs.bucket_paths import with_urls
from serried.configs.errors import EXIT_FINISHED, EXIT_STOPPED, UserError
from serried.configs.hugging_face.adapter_folder import ADAPTER_CONFIG
from serried.configs.hugging_face.adapter_settings import adapters_in
from serried.configs.plain_data import expanded
from serried.configs.schema.sections import RunConfig
from serried.parallel.layout.checks import checked_layout
from serried.parallel.nf4 import whole_numel
from serried.records.environment import environment
from serried.records.trackers.tracker_processes import choose_run_id
from serried.runtime.accelerator import device_name
from serried.runtime.agreement import NotRecoverable, Report
from serried.trainer.adapter_base_model import (
    Base,
    check_adapters,
    check_rows,
    find_base,
    initial_weights,
    same_files,
    teacher_keys,
)
from serried.trainer.adapters import Adapters
from serried.trainer.checkpoint.checkpoint_size import copied_bytes, saved_bytes
from serried.trainer.checkpoint.checkpoints import checkpoints_of
from serried.trainer.checkpoint.kept_state import KeptState
from serried.trainer.checkpoint.resume import (
    Start,
    check_data,
    download_on_all_nodes,
    make_room,
    plain,
    steps_before_changes,
)
from serried.trainer.compilation import check_compiler
from serried.trainer.evaluator import Evaluator, open_benchmarks
from serried.trainer.loop import NOTHING_LEFT, Loop
from serried.trainer.memory.host_memory import check_host_memory
from serried.trainer.metrics.meter import PROFILING, Meter
from serried.trainer.metrics.peak_flops import peak_flops
from serried.trainer.metrics.profiler import StepProfiler, remember_allocations
from serried.trainer.metrics.run_log import RunLog
from serried.trainer.model import Model, check_model, model_to_train
from serried.trainer.monitor.heartbeat import END
from serried.trainer.monitor.shutdown import Shutdown
from serried.trainer.monitor.time_to_stop import estimated_save_seconds
from serried.trainer.precision import check_products
from serried.trainer.progress import Progress
from serried.trainer.reference import ReferencePass
from serried.trainer.replica_check import digest
from serried.trainer.rollback import Rollback
from serried.trainer.run_context import Context
from serried.trainer.run_data import Data, check_validation
from serried.trainer.saver import Saver
from serried.trainer.step_log import StepLog
from serried.trainer.task import RunTask, TextTask
from serried.trainer.training_state import TrainingState


class Trainer:
    """One run on one rank."""

    def __init__(self, context: Context, config_yaml: str, start: Start, data: Data | None = None) -> None:
        """Build all components. Their order matters. ``data``: given if it is already open."""
        self.context = context
        config = context.config
        task = context.task
        session = context.session
        console = context.console
        layout, _ = checked_layout(config, session.world_size)
        if config.trainer.compiles:
            check_compiler(session.device)
        check_products(config, session.device)
        set_determinism(config.trainer.deterministic)
        self._data = data = data or Data(task, session, console)
        before_changes = _check_resumed(context, start, data)
        data.start(start, config.trainer.global_batch)
        check_validation(config, data.validation)
        self.validation = data.validation
        benchmarks = open_benchmarks(context, data.validation)
        remember_allocations(config, session.device, console)
        model, base = _build_model(context, start)
        teacher, reference = task.teacher_folder(), task.reference_numbers()
        before = ReferencePass(context, data, reference, start) if reference is not None else None
        teacher_files = teacher and same_files("teacher", teacher, start, context)
        module, plan = model.module, model.plan
        parameters = sum(whole_numel(parameter) for parameter in module.parameters())
        check_model(config, module, plan, layout)
        shown = start if base is None else replace(start, weights=base.folder, adapters=base.adapters)
        planned = context.planner.plan(context, model, shown, data.training) if context.planner else None
        for line in planned.lines if planned and start.kept is None else ():
            console.say(line)
        needed, copied = saved_bytes(config, module, plan), copied_bytes(config, module, plan, session.device.type)
        check_host_memory(config, planned.host_bytes if planned else 0, copied // layout.world, session)
        for line in task.describe_sample() if start.kept is None else ():
            console.say(line)
        for note in session.once(partial(_begin, context, start, config_yaml, needed)):
            console.say(note)
        if start.kept is None:
            console.open(config.run.dir)
        self.progress = progress = Progress()
        progress.resume(start)
        for name in context.callbacks.load_state_dict(start.state):
            console.say(
                f"WARNING    {config.run.shown(start.checkpoint)} has the state of the callback {name}, which this run "
                "does not have"
            )
        self._log = log = RunLog(context, start, progress)
        tracker_run_id = session.once(partial(choose_run_id, start.state, start.continues(config.run.dir)))
        self.rest = NOTHING_LEFT
        """What is left to do of the step to start after."""
        self._unchanging = {
            # After a loss, the layout is another one than configured.
            "config": plain(config) if start.kept is None else start.state["config"],
            "changed_after": before_changes,
            "base": base and base.record,
            "teacher": teacher_files,
            "teacher_keys": teacher_keys(start, context),
            "reference": before and before.files,
            "origin": start.origin,
            "tracker_run_id": tracker_run_id,
        }
        flops_per_sample = _flops(task, module)
        peak = peak_flops(device_name(session.device), config.precision.name)
        hosts = session.gather(session.host())
        if start.kept is None:
            log.started(
                layout, parameters, start, flops_per_sample=flops_per_sample, peak_flops=peak, hosts=hosts,
                tracker_run_id=tracker_run_id, earlier_seconds=_earlier_seconds(context),
            )  # fmt: skip
        self.state = state = TrainingState(
            context, model, layout, start, base, before, planned.mix if planned else None
        )
        if before is not None:
            before.use()
        if config.trainer.deterministic and layout.is_replicated and plan.units:  # otherwise DDP keeps its buckets
            state.rehearse(context, next(iter(data.validation.values()), data.training))
        meter = Meter(session.device, session.world_size, (flops_per_sample or 0.0) * config.trainer.global_batch, peak)
        write_files = partial(model.write_files, _name_of_base(config, base))
        saved_step = start.saved_step(config.run.dir)
        self.saver = saver = Saver(
            context, state, log, meter, state_dict=self.state_dict, write_files=write_files, saved_step=saved_step
        )
        first_save = estimated_save_seconds(needed, layout.world)
        self.shutdown = Shutdown(
            config, session, console, context.folder, lambda: saver.last_save_seconds or first_save,
            had_steps=start.first_step is not None and start.step > start.first_step,
        )  # fmt: skip
        self._rollback = Rollback(context, data, state, progress=progress, saver=saver, log=log, meter=meter)
        self._rollback.load_state_dict(start.state)
        self.loop = Loop(
            context, data, state,
            log=StepLog(
                context, state, progress=progress, log=log, meter=meter, samples=data.samples,
                sample_ids=data.sample_ids, sources=data.sources,
            ),
            evaluator=Evaluator(
                context, state, data.validation, progress=progress, log=log, meter=meter, shutdown=self.shutdown,
                benchmarks=benchmarks,
            ),
            saver=saver,
            shutdown=self.shutdown,
            rollback=self._rollback,
            profiler=StepProfiler(
                config, session, console, context.pulse.phases, partial(meter.pause, PROFILING),
                first_step=start.step + 1,
            ),
        )  # fmt: skip
        self.loop.start_at(start.step)
        meter.start_at(start.step, progress.counts.tokens)

    def steps(self) -> Generator[int, None, None]:
        """Return the training loop as a generator, see ``Loop.steps``."""
        rest, self.rest = self.rest, NOTHING_LEFT
        return self.loop.steps(rest)

    def report(self, rank: int) -> Report:
        """Return the state of this rank, ``rank``, after a loss."""
        done = self.loop.steps_done
        return Report(rank, done, done + (self.state.step.transaction.prepared is not None))

    def keep(self, step: int) -> KeptState:
        """Return this rank's state after ``step``, which it has committed, or prepared. No communication.

        Raises:
            GoBack: The step asks for a rollback.
            NotRecoverable: The state is that of no step.
        """
        if self._rollback.is_loading:
            raise NotRecoverable("the run was going back to a checkpoint")
        if self.state.step.transaction.is_committing:
            raise NotRecoverable(f"the update of step {self.loop.step} failed halfway")
        if self.loop.steps_done < step:
            result = self.state.step.commit()
            self._data.step = step
            self.loop.log.meter.add(step, result)
        self.state.step.drop()
        self.loop.step = step
        self.loop.log.read_all(step)
        return KeptState.of(self.state.parts(), self._plain(self.state.own_state_dict()))

    def end(self, seconds: float) -> int:
        """Report the end of the run, after ``seconds`` of training. Returns the exit code."""
        step = self.loop.step
        self.context.pulse.enter(END, step)
        self.state.parallel.reshard()
        self._log.ended(step, seconds, self._sample(), self.shutdown.reason)
        return EXIT_FINISHED if self.progress.is_finished(step, self.context.config) else EXIT_STOPPED

    def _sample(self) -> str | None:
        """Return text generated by the trained model, if configured and the run is finished. This is a collective
        call."""
        trainer, task = self.context.config.trainer, self.context.task
        is_finished = self.progress.is_finished(self.loop.step, self.context.config)
        if not trainer.sample_tokens or not is_finished or not isinstance(task, TextTask):
            return None
        parallel = self.state.parallel
        with self.state.evaluated():
            return task.sample(parallel, trainer.sample_tokens, trainer.seed)

    def state_dict(self) -> dict[str, Any]:
        """Return the plain data of a checkpoint of the last completed step: facts of the run, and component states.

        This is a collective call. Synchronizes with the device.
        """
        return self._plain(self.state.state_dict())

    def _plain(self, step_state: dict[str, Any]) -> dict[str, Any]:
        step, progress = self.loop.step, self.progress
        return {
            "version": 1,
            "step": step,
            **self._rollback.state_dict(),
            "validation_loss": progress.validation_loss if progress.validated_step == step else None,
            "progress": progress.state_dict(),
            **self.context.callbacks.state_dict(),
            "step_state": step_state,
            **self._data.state_dict(),
            **self._unchanging,
            "world_size": self.context.session.world_size,
            "torch": torch.__version__,
        }


def _check_resumed(context: Context, start: Start, data: Data) -> list[int]:
    """Compare the checkpoint's training data with ``data``.

    Returns the steps of checkpoints to keep because data or settings changed after them.
    """
    config, session = context.config, context.session
    if start.checkpoint is not None:
        session.once(partial(context.task.check_resumed, start.checkpoint))
    if (change := data.earlier_fingerprints.get(start.state.get("data_fingerprint", ""))) is not None:
        context.console.say(
            f"WARNING    data changed since {config.run.shown(start.checkpoint)}: {change}; to keep the earlier data, "
            "use the version of serried that started the run"
        )
    has_other_data = check_data(start, data.fingerprint, config, data.earlier_fingerprints)
    before_changes = steps_before_changes(start, has_other_data, config.run.dir)
    if start.step in before_changes and start.step not in start.state.get("changed_after", []):
        context.console.say(
            f"{config.run.shown(start.checkpoint)} is kept: later checkpoints have other settings or data"
        )
    return before_changes


def _build_model(context: Context, start: Start) -> tuple[Model, Base | None]:
    """Return the model, and the base model of its adapters if it has any.

    Checks that the weights to start from fit the model.
    """
    context.console.doing("building the model")
    config = context.config
    task = context.task
    session = context.session
    torch.manual_seed(config.trainer.seed)  # for models that initialize themselves in build_model()
    model = model_to_train(config, task, session.device.type)
    is_meta = any(parameter.is_meta for parameter in model.module.parameters())
    if not is_meta:
        bits = digest(parameter.detach() for parameter in model.module.parameters())
        session.same_everywhere("the model that build_model() returned", f"{int(bits):x}")
    weights, base = start.weights, None
    if model.adapters is not None:
        folder = session.once(lambda: str(initial_weights(config, task) or ""))
        if is_meta and not folder:
            raise UserError(
                f"adapter.method={config.adapter.method} needs a base model, since only the adapters are trained: "
                "model.path=FOLDER_OR_NAME"
            )
        if folder:
            download_on_all_nodes(Path(folder), lambda: initial_weights(config, task), session)
        base = find_base(Path(folder) if folder else None, model.module, start.checkpoint, session)
        if start.checkpoint is None:
            adapters = session.once(partial(_adapters_to_start_with, config, model.adapters, start, base))
            base = replace(base, adapters=adapters and Path(adapters))
            if base.adapters is not None and (path := config.adapter.path) is not None:
                download_on_all_nodes(base.adapters, lambda: adapters_in(path), session)
        weights = base.folder
    elif weights is not None and session.once((weights / ADAPTER_CONFIG).is_file):
        raise UserError(
            f"checkpoint.resume={config.checkpoint.resume} has adapters; use adapter=lora and the base model, or merge "
            "the adapters with PEFT"
        )
    if weights is not None:
        session.once(partial(task.check_weights, weights))
        if base is None and not config.checkpoint.strict:
            model, differences = model.fitted_to(weights)
            if differences:
                context.console.say(f"WARNING    {with_urls(str(weights))}: {differences}")
    model.check_names(start.checkpoint, weights, "" if base else ", or checkpoint.strict=false to load what fits")
    return model, base


def _adapters_to_start_with(config: RunConfig, adapters: Adapters, start: Start, base: Base) -> str | None:
    """Return the folder of the adapters that a new run starts from, or None if the run initializes them.

    Called on one rank. Raises ``UserError`` if the adapters do not match, or if ``checkpoint.resume`` names another
    model.
    """
    given = start.weights if start.origin is not None else None
    is_peft = given is not None and (given / ADAPTER_CONFIG).is_file()
    path = None if config.adapter.merge else config.adapter.path
    if is_peft and path is not None:
        raise UserError(f"adapter.path={path} and checkpoint.resume={given} both name adapters; keep one")
    if given is not None and is_peft:
        if base.folder is not None:
            check_rows(given, base.folder, config)
        adapters.check_folder(given)
        return str(given)
    if given is None or (base.folder and given.is_dir() and given.samefile(base.folder)):
        if path is None:
            return None
        found = adapters_in(path)
        check_adapters(found, base.record)
        if base.folder is not None:
            check_rows(found, base.folder, config)
        adapters.check_folder(found)
        return str(found)
    key, given_as = "task.model" if hasattr(config.task, "model") else "model.path", with_urls(str(given))
    of_base = (f"{key}={base.folder}", f"use {key}={given_as}") if base.folder else None
    is_base, instead = of_base or ("the one that build_model() returns", "load the weights there")
    raise UserError(
        f"checkpoint.resume={given_as} has a model without adapters, but the base model of "
        f"adapter.method={config.adapter.method} is {is_base}; {instead}, or remove checkpoint.resume"
    )


def _name_of_base(config: RunConfig, base: Base | None) -> str | None:
    """Return the base model's name for ``adapter_config.json``: its name on the Hub if it has one, else its folder."""
    path = getattr(getattr(config, "model", None), "path", None)
    is_on_hub = path is not None and not expanded(path).exists()
    if base is None or (is_on_hub and not config.adapter.merge):
        return path
    return base.record["path"]


def _flops(task: RunTask, module: nn.Module) -> float | None:
    """Return the FLOPs per sample. Frozen weights need no weight gradients, which are a third of the cost."""
    counts = {True: 0, False: 0}
    for name, parameter in module.named_parameters():
        if not task.exported_teacher(name, parameter.shape):
            counts[parameter.requires_grad] += whole_numel(parameter)
    whole = task.flops_per_sample(counts[True] + counts[False])
    return whole and whole * (1 - counts[False] / (counts[True] + counts[False]) / 3)


def _earlier_seconds(context: Context) -> float:
    """Return the duration of the starts of this run that ended before their first checkpoint; 0 except on rank 0."""
    if context.folder is None or context.config.checkpoint.resume == "never":
        return 0.0
    return context.folder.earlier_seconds


def _begin(context: Context, start: Start, config_yaml: str, needed_bytes: int) -> list[str]:
    """Start the records in the run folder after all checks of user input. Called on rank 0. Returns notes to print."""
    folder, checkpoints = context.folder, checkpoints_of(context.config, context.session, context.folder)
    assert folder is not None
    if start.kept is not None:
        return checkpoints.sweep()
    try:
        notes = checkpoints.sweep()
        if problem := checkpoints.lack_of_space(needed_bytes):
            raise UserError(f"{problem}; use {folder.another_disk} on another disk, or free space")
        notes += make_room(folder, start)
        folder.begin(config_yaml, environment(), start.step)
    except OSError as error:
        where = error.filename or folder.path
        raise UserError(f"cannot write {where}: {error.strerror}; use {folder.another_disk}") from None
    return notes


def set_determinism(deterministic: bool) -> None:
    """Make runs of the same command bitwise identical.

    Operations without a deterministic implementation raise an error. See ``make_sums_repeatable`` for sums inside GPU
    libraries.
    """
    torch.use_deterministic_algorithms(deterministic)
    # Not needed: every element is written before it is read.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
