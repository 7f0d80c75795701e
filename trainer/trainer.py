"""A run: built in order, trained step by step."""

import gc
import os
import sys
import time
import traceback
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn

from serried.configs.errors import (
    TrainingFailed,
    TrainingStopped,
    UserError,
)
from serried.configs.schema import DEFAULT_VALIDATION, RunConfig
from serried.parallel.apply import parallelize
from serried.parallel.mesh import Layout, gradient_accumulation, resolve_layout
from serried.parallel.plan import ParallelPlan
from serried.records.environment import environment
from serried.records.run_folder import RunFolder
from serried.records.trackers.processes import Mirrors, choose_run_id
from serried.runtime.console import Console
from serried.runtime.session import Session
from serried.trainer.checkpoint.resume import CHECKPOINTS, Start, check_data, find_start, make_room, plain
from serried.trainer.checkpoint.retention import sweep
from serried.trainer.checkpoint.save import Checkpointer, lack_of_space
from serried.trainer.checkpoint.state import check_names, load_state, load_weights, state_parts
from serried.trainer.evaluation import source_losses
from serried.trainer.health import GoBack, ReplicaCheck, respond
from serried.trainer.loader import PADDING_ID, BatchLoader
from serried.trainer.metrics import PROFILING, RATES, SAVING, Meter, eta_seconds
from serried.trainer.optim import build_optimizer, learning_rate, state_bytes
from serried.trainer.overview import overview
from serried.trainer.peak_flops import device_name, peak_flops
from serried.trainer.precision import LOW_DTYPES, GradScaler
from serried.trainer.profile import StepProfiler, remember_allocations
from serried.trainer.report import Report
from serried.trainer.sampler import Mixture, Stream, sample_order
from serried.trainer.shutdown import Action, Shutdown
from serried.trainer.step import StepResult, TrainStep
from serried.trainer.task import Dataset, Task, to_device
from serried.trainer.watchdog import DATA, END, EVALUATE, LOG, SAVE, SET_UP, TRAIN, Pulse

_READ_AT_LEAST_EVERY = 50
_COLLECT_GARBAGE_EVERY = 50
_STEPS_BETWEEN_MARKED = 10
"""Of so many steps at most one has its phases marked: a share of the time that does not show."""


class Trainer:
    """One run on one rank."""

    def __init__(
        self,
        config: RunConfig,
        task: Task,
        session: Session,
        folder: RunFolder | None,
        console: Console,
        config_yaml: str,
        start: Start,
        pulse: Pulse,
    ) -> None:
        """Build everything, in the only order that works. ``folder`` is there on rank 0 alone."""
        self._config, self._task, self._session = config, task, session
        self._console, self._origin, self._pulse = console, start.origin, pulse
        device, trainer = session.device, config.trainer
        layout = resolve_layout(config.parallel, session.world_size)
        accumulation = gradient_accumulation(trainer, layout)
        set_determinism(trainer.deterministic)
        training = self._open_data(start)
        remember_allocations(config, device, console)
        model = self._build_model(start)
        parameters = sum(parameter.numel() for parameter in model.parameters())
        plan = task.parallel_plan(model)
        for line in overview(config, task, layout, accumulation, model, plan, session.place(), start, training):
            console.say(line)
        for line in task.describe_sample():
            console.say(line)
        for note in session.once(partial(_begin, folder, start, config_yaml, parameters)):
            console.say(note)
        console.open(config.run.dir)
        self._report = Report(config, session, folder, console, start)
        self._tracker_run_id = session.once(partial(choose_run_id, start.state, start.continues(config.run.dir)))
        flops_per_token = task.flops_per_token(parameters)
        peak = peak_flops(device_name(device), config.precision.name)
        self._report.begun(
            layout, parameters, start, flops_per_token=flops_per_token, peak_flops=peak,
            hosts=session.gather(session.host()), tracker_run_id=self._tracker_run_id,
        )  # fmt: skip
        self.mirrors = Mirrors(config.run.dir, config.track, console)
        self._shutdown = Shutdown(config, session, console, folder, lambda: self._report.last_save_seconds)
        self._build_step(model, plan, layout, start)
        self.checkpointer = Checkpointer(
            config.run.dir / CHECKPOINTS,
            config.checkpoint,
            layout,
            session,
            lambda: state_parts(self._module, self._optimizer, task.export_name),
            task.export_files,
        )
        self._replicas, self._compared_step = ReplicaCheck(layout, session), -1
        self.step = self.steps_done = self._first_step = self._marked_step = start.step
        self._position = start.step, int(start.state.get("samples", 0))
        self._rollbacks = int(start.state.get("rollbacks", 0))
        self._open_loader = partial(
            BatchLoader,
            training,
            task.collate,
            sample_order(training, trainer.seed),
            accumulation=accumulation,
            data_ranks=layout.data_ranks,
            data_rank=session.rank,
            micro_batch=trainer.micro_batch,
            workers=config.data.workers,
            pin_memory=device.type == "cuda",
            on_starved=self._starved,
        )
        self._loader = self._load_from_here()
        positions = trainer.global_batch * task.targets_per_sequence()
        self._meter = Meter(device, session.world_size, flops_per_token * positions, peak)
        self._meter.start_at(start.step, self._report.progress.tokens)
        self._profiler = StepProfiler(
            config, session, console, pulse.phases, partial(self._meter.pause, PROFILING), first_step=start.step + 1
        )
        self._started = time.perf_counter()

    def _open_data(self, start: Start) -> Dataset:
        """Prepare what is not prepared yet, and check that it is what the run began with. Returns the training data."""
        task, session = self._task, self._session
        self._console.doing("preparing data")
        task.open_data(session.once_per_node(partial(task.prepare, self._console.progress)))
        training = task.dataset("train")
        self._validation = {name: task.dataset(name) for name in (DEFAULT_VALIDATION, *task.further_validation())}
        session.same_everywhere("the prepared training data", training.fingerprint)
        check_data(start, training.fingerprint, self._config)
        self._fingerprint = training.fingerprint
        self._sources = list(training.parts) if isinstance(training, Mixture) else []
        self._stream = training if isinstance(training, Stream) else None
        if self._stream is not None and start.checkpoint is not None:
            self._stream.load(start.state.get("stream", {}), start.state["samples"])
        return training

    def _build_model(self, start: Start) -> nn.Module:
        """The model on the meta device, once it is clear that the weights to begin with fit it."""
        self._console.doing("building the model")
        model = self._task.build_model()
        if start.weights is not None:
            self._session.once(partial(self._task.check_weights, start.weights))
        if start.source is not None:
            check_names(start.source, model, self._task.export_name)
        return model

    def _build_step(self, model: nn.Module, plan: ParallelPlan, layout: Layout, start: Start) -> None:
        """Cut the model, make the optimizer, and fill both."""
        config, task, device = self._config, self._task, self._session.device
        self._console.doing(f"reading {start.source}" if start.source else "drawing the first weights")
        self._parallel = parallelize(
            model,
            plan,
            None if start.source else task.initial_std,
            seed=config.trainer.seed,
            layout=layout,
            section=config.parallel,
            low_dtype=LOW_DTYPES[config.precision.name],
            device=device,
            phases=self._pulse.phases,
        )
        self._module = self._parallel.module
        self._optimizer = build_optimizer(self._module.parameters(), config.optim)
        self._train_step = TrainStep(
            self._parallel,
            self._optimizer,
            task.loss,
            GradScaler(config.precision, device),
            max_grad_norm=config.trainer.max_grad_norm,
            nominal_weight=config.trainer.global_batch * task.targets_per_sequence(),
            health=config.health,
        )
        if start.checkpoint is not None:
            self._take_up(start)
        elif start.weights is not None:
            load_weights(start.weights, self._module, task.export_name)
        if config.trainer.deterministic and layout.strategy == "ddp":
            # Not one of the training data: a stream gives each sample once.
            batch = [self._validation[DEFAULT_VALIDATION][0]] * config.trainer.micro_batch
            padding = task.collate(batch, np.full(len(batch), PADDING_ID))
            self._train_step.rehearse(to_device(padding, device))

    def _take_up(self, start: Start) -> None:
        """Have weights, optimizer and step as a checkpoint has them."""
        assert start.checkpoint is not None
        load_state(start.checkpoint, self._module, self._optimizer, self._task.export_name)
        self._train_step.load(start.state["step_state"])

    def run(self) -> int:
        """Train to the last step, evaluating and saving where that is due, and say what happened. Returns the exit
        code."""
        if self._session.is_main:
            self.mirrors.start()
        for _ in self.steps():
            pass
        self._pulse.enter(END, self.step)
        seconds = time.perf_counter() - self._started
        self._parallel.reshard()
        return self._report.ended(self.step, seconds, self._sample(), self._shutdown.reason)

    def steps(self) -> Generator[int, None, None]:
        """Train, report, evaluate and save, until the last step or a request to stop; yields the number of each step as
        it is done."""
        with self._shutdown, _scheduled_garbage_collection() as collect_garbage:
            while True:
                try:
                    yield from self._steps_from_here(collect_garbage)
                    return
                except GoBack as back:
                    self._go_back(back)

    def _steps_from_here(self, collect_garbage: Callable[[int], None]) -> Generator[int, None, None]:
        with self._loader, self._profiler:
            self._begin_step()
            for step, batches in enumerate(self._loader, start=self.step + 1):
                self._train(step, batches)
                self._log()
                if self._is_due(self._config.health.replica_check_every):
                    self._compare_replicas()
                self._evaluate()
                self._save()
                collect_garbage(step)
                yield step
                if self._shutdown.stops:
                    return
                self._begin_step()

    def _begin_step(self) -> None:
        """Say that the next step waits for its data, and have its phases marked where its log line will tell them."""
        step, every = self.step + 1, self._config.trainer.log_every
        self._profiler.begin(step)
        self._pulse.enter(DATA, step)
        if every and step % every == 0 and step >= self._marked_step + _STEPS_BETWEEN_MARKED:
            self._marked_step = step
            self._pulse.phases.begin(self._session.device)

    def _load_from_here(self) -> BatchLoader:
        step, sample = self._position
        return self._open_loader(steps=range(step, self._config.trainer.last_step), first_index=sample)

    def _go_back(self, back: GoBack) -> None:
        """Take up the newest checkpoint, and go on with the samples behind those of the steps that are undone.

        Raises:
            TrainingStopped: there is none, or the run has gone back as often as it may.
        """
        config = self._config
        if self._rollbacks >= config.health.max_rollbacks:
            raise TrainingStopped(f"{back}; health.max_rollbacks={config.health.max_rollbacks} are used up")
        samples = self._samples(back.step)
        if self._stream is not None:
            self._stream.rewind(samples)
        self._pulse.enter(SET_UP, self.step)
        self._console.doing("going back to a checkpoint")
        self._report.saved(self.checkpointer.wait())
        resume = "auto" if config.checkpoint.resume == "never" else config.checkpoint.resume
        checkpoint = config.checkpoint.model_copy(update={"resume": resume})
        start = find_start(config.model_copy(update={"checkpoint": checkpoint}), self._session)
        if start.checkpoint is None:
            raise TrainingStopped(f"{back}; there is no checkpoint to go back to yet. Lower checkpoint.every")
        self._parallel.reshard()
        self._take_up(start)
        self._rollbacks += 1
        self.step = self.steps_done = start.step
        self._position = start.step, samples
        self._marked_step = start.step
        self._pulse.phases.take()  # of a step that is undone
        self._loader = self._load_from_here()
        self._report.went_back(start, back.step, samples, str(back))
        self._meter.start_at(start.step, self._report.progress.tokens)

    def _compare_replicas(self) -> None:
        """Compare the bits that replicas hold, unless that was done in this step."""
        if self._config.health.replica_check_every and self._compared_step != self.step:
            self._compared_step = self.step
            parts = state_parts(self._module, self._optimizer, self._task.export_name)
            self._replicas(self.step, (part.local for _, part in parts))

    def _train(self, step: int, batches: list[Any]) -> None:
        self.step = step
        self._pulse.enter(TRAIN, step)
        on_device = [to_device(batch, self._session.device) for batch in batches]
        result = self._train_step(on_device, self._learning_rate(step), self._shutdown.vote)
        self.steps_done = step
        self._pulse.phases.end()
        self._meter.add(step, result)
        self._shutdown.count(result[StepResult._fields.index("votes")])
        if step == self._first_step + 1:
            self._session.first_step_done(time.perf_counter() - self._started)

    def _learning_rate(self, step: int) -> float:
        config = self._config
        return learning_rate(step, config.trainer.steps, config.optim.lr, config.schedule)

    def _is_due(self, every: int) -> bool:
        return every > 0 and (self.step % every == 0 or self.step == self._config.trainer.last_step)

    def _starved(self, seconds: float) -> None:
        rank = self._session.rank
        text = f"WARNING    rank {rank} has waited {seconds:.0f} s for data, after step {self.step}: a slow source?"
        self._console.say(text)
        if not self._session.is_main:  # whose console speaks for it alone
            print(text, file=sys.stderr, flush=True)

    def _log(self) -> None:
        """Read results where that is due, log them, and stop the run where they say so."""
        self._pulse.enter(LOG, self.step)
        every, is_an_end = self._config.trainer.log_every, self.step == 1 or self._shutdown.stops
        log = self._is_due(every) or (is_an_end and every > 0)
        # Reading waits for the device. A CPU has nothing to wait for; a GPU is read now and then even without a log.
        if log or self._session.device.type == "cpu" or self._is_due(_READ_AT_LEAST_EVERY):
            self._read_results(log=log)

    def _read_results(self, *, log: bool) -> None:
        for step, result in self._meter.read():
            progress = self._report.progress
            progress.add(result, self._sources)
            is_logged = log and step == self.step
            if is_logged or result.skipped:
                rates = dict.fromkeys(RATES)
                if is_logged:
                    waited, split = self._loader.take_waited_seconds(), self._pulse.phases.take()
                    rates = self._meter.rates(step, progress.tokens, waited, split)
                    rates["eta_seconds"] = eta_seconds(self._config, step, rates["step_seconds"], self._meter.pauses)
                    self._report.running(step)
                    self.mirrors.look()
                    if (slow := self._meter.slow.named()) is not None:
                        rank, share = slow
                        self._report.slow(rank, self._session.gather(self._session.host())[rank], share)
                lr = {group["name"]: self._learning_rate(step) for group in self._optimizer.param_groups}
                self._report.step(step, result, lr, self._samples(step), rates)
            self._respond(step, result)

    def _respond(self, step: int, result: StepResult) -> None:
        config = self._config
        advice = (
            f"Lower optim.lr={config.optim.lr:g}, raise schedule.warmup_steps={config.schedule.warmup_steps}, or look "
            "at the data of those steps"
        )
        try:
            if note := respond(config.health, step, result, advice):
                self._report.spiked(step, result, note)
        except (GoBack, TrainingFailed):
            self._compare_replicas()  # a replica that holds a wrong number looks the same
            raise

    def _evaluate(self) -> None:
        """Mean loss over ``eval_batches`` batches of each validation set, where that is due."""
        if not self._is_due(self._config.trainer.eval_every):
            return
        for name, dataset in self._validation.items():
            if not self._shutdown.stops:
                self._evaluate_on(name, dataset)

    def _evaluate_on(self, name: str, dataset: Dataset) -> None:
        trainer = self._config.trainer
        if self._session.device.type == "cuda":
            torch.cuda.synchronize(self._session.device)  # steps still under way are not the evaluation's time
        started = time.perf_counter()
        losses, tokens = {}, {}
        found = source_losses(
            self._parallel,
            self._task,
            dataset,
            self._session,
            sequences=trainer.eval_batches * trainer.global_batch,
            micro_batch=trainer.micro_batch,
            on_device=lambda batches: self._shutdown.unless_stopped(map(self._to_evaluate, batches)),
        )
        for source, loss_sum, count in found:
            if self._shutdown.stops:
                return
            losses[source], tokens[source] = loss_sum, count
        seconds = time.perf_counter() - started
        self._meter.pause(name, seconds)
        total = sum(tokens.values())
        if not total:
            self._report.not_evaluated(self.step, name)
            return
        by_source = {source: losses[source] / tokens[source] for source in losses if source and tokens[source]}
        self._report.evaluated(self.step, name, sum(losses.values()) / total, total, seconds, by_source)

    def _to_evaluate(self, batch: Any) -> Any:
        self._pulse.enter(EVALUATE, self.step)
        return to_device(batch, self._session.device)

    def _samples(self, step: int) -> int:
        """Samples trained on when ``step`` is done: where the data order stands."""
        first_step, first_sample = self._position
        return first_sample + (step - first_step) * self._config.trainer.global_batch

    def _save(self) -> None:
        """Begin a checkpoint where that is due, and tell of one that has ended."""
        self._report.saved(self.checkpointer.poll())
        every, is_asked_for = self._config.checkpoint.every, self._shutdown.action is not Action.GO_ON
        is_last = self.step == self._config.trainer.last_step or self._shutdown.stops
        if not (is_last or is_asked_for or (every and self.step % every == 0)):
            return
        self._shutdown.check_folder()
        self._pulse.enter(SAVE, self.step)
        started = time.perf_counter()
        self._report.saved(self.checkpointer.wait())
        waited = time.perf_counter() - started
        self._read_results(log=False)
        self._compare_replicas()
        started = time.perf_counter()
        self.checkpointer.save(self.step, self._state())
        saved = self.checkpointer.wait() if is_last else self.checkpointer.poll()
        self._report.saved(saved, is_last=is_last)
        self._meter.pause(SAVING, waited + time.perf_counter() - started)

    def end_save(self) -> None:
        """Whatever ended the run: let a save under way end, if it does so soon, and say what there is to go on from."""
        try:
            self._report.saved(self.checkpointer.close())
        except Exception:  # of the same cause, most likely: that one is told
            self._console.log(traceback.format_exc())
        self._report.broken_off(self.step)

    def _sample(self) -> str | None:
        """Text of the trained model, where the run asks for some and is finished. A collective."""
        trainer = self._config.trainer
        if not trainer.sample_tokens or self.step < trainer.steps:
            return None
        with self._parallel.autocast():
            return self._task.sample(self._parallel.model, trainer.sample_tokens, trainer.seed, self._session.device)

    def _state(self) -> dict[str, Any]:
        progress = self._report.progress
        return {
            "version": 1,
            "step": self.step,
            "samples": self._samples(self.step),
            "rollbacks": self._rollbacks,
            "validation_loss": progress.validation_loss if progress.validated_step == self.step else None,
            "progress": asdict(progress),
            "step_state": self._train_step.state(),
            "data_fingerprint": self._fingerprint,
            **self._stream_state(),
            "origin": self._origin,
            "tracker_run_id": self._tracker_run_id,
            "world_size": self._session.world_size,
            "torch": torch.__version__,
            "config": plain(self._config),
        }

    def _stream_state(self) -> dict[str, Any]:
        """Where a stream stands. A collective."""
        if self._stream is None:
            return {}
        parts = self._session.gather(self._stream.state(self._samples(self.step)))
        return {"stream": {key: value for part in parts for key, value in part.items()}}


def _begin(folder: RunFolder | None, start: Start, config_yaml: str, parameters: int) -> list[str]:
    """On rank 0, once nothing in the user's hands can fail: a mistyped path moves no run. Returns what to tell."""
    assert folder is not None
    try:
        notes = sweep(folder.path / CHECKPOINTS)
        if problem := lack_of_space(folder.path, state_bytes(parameters)):
            raise UserError(f"{problem}; use run.dir=FOLDER on another disk, or free some")
        notes += make_room(folder, start)
        folder.begin(config_yaml, environment(), start.step)
    except OSError as error:
        where = error.filename or folder.path
        raise UserError(f"cannot write {where}: {error.strerror}; use run.dir=FOLDER") from None
    return notes


@contextmanager
def _scheduled_garbage_collection() -> Iterator[Callable[[int], None]]:
    """Collect between steps and never inside one: where ranks collect at different times, all wait for each in turn."""

    def collect(step: int) -> None:
        if step % _COLLECT_GARBAGE_EVERY == 0:
            gc.collect(1)

    gc.collect()
    gc.disable()
    try:
        yield collect
    finally:
        gc.enable()


def set_determinism(deterministic: bool) -> None:
    """Same command, same bits; an operation that cannot promise that raises. Set before the device is first used."""
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(deterministic)
    # Every element is written before it is read.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
