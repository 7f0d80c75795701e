"""A run: built in order, trained step by step, ended in words."""

import gc
import math
import os
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError

from configs.errors import EXIT_FINISHED, TrainingFailed
from configs.schema import RunConfig
from parallel.apply import parallelize
from parallel.mesh import gradient_accumulation, resolve_layout
from trainer.checkpoint.final import save_model
from trainer.loader import BatchLoader, evaluation_batches
from trainer.metrics import RATES, Meter
from trainer.optim import build_optimizer, learning_rate
from trainer.overview import overview
from trainer.precision import LOW_DTYPES, GradScaler
from trainer.recipe import Recipe, to_device
from trainer.sampler import SampleOrder
from trainer.step import FAILURES_THAT_STOP, StepResult, TrainStep
from trainer.track import Console, RunFolder, duration, environment, short, step_line

if TYPE_CHECKING:
    from launch.session import Session

_READ_AT_LEAST_EVERY = 50
_COLLECT_GARBAGE_EVERY = 50


def train(config: RunConfig, recipe: Recipe, session: "Session", config_yaml: str) -> int:
    """Train ``recipe`` as ``config`` says, on all ranks of ``session``. Returns the exit code.

    Raises:
        UserError: something the user can mend; the same on every rank.
        TrainingFailed: the numbers stopped being finite.
    """
    folder: RunFolder | None = None

    def claim() -> str | None:
        nonlocal folder
        folder = RunFolder(config.run.dir)
        return folder.settle(config_yaml, anew=config.checkpoint.resume == "never")

    note = session.once(claim)
    console = Console(session.is_main, session.rank, config.run.dir)
    trainer = None
    try:
        if note:
            console.say(note)
        if session.once(lambda: folder is not None and folder.is_finished):
            return EXIT_FINISHED
        trainer = Trainer(config, recipe, session, folder, console, config_yaml)
        trainer.run()
        return EXIT_FINISHED
    except BaseException as error:
        console.log(traceback.format_exc())
        if folder is not None:
            folder.fail(trainer.step if trainer else 0, error)
        raise
    finally:
        if folder is not None:
            folder.close()


class Trainer:
    """One run on one rank."""

    def __init__(
        self,
        config: RunConfig,
        recipe: Recipe,
        session: "Session",
        folder: RunFolder | None,
        console: Console,
        config_yaml: str,
    ) -> None:
        """Build everything, in the only order that works. ``folder`` is there on rank 0 alone."""
        self._config, self._recipe, self._session = config, recipe, session
        self._folder, self._console = folder, console
        device, trainer = session.device, config.trainer
        layout = resolve_layout(config.parallel, session.world_size)
        accumulation = gradient_accumulation(trainer, layout)
        set_determinism(trainer.deterministic)

        recipe.open_data(session.once_per_node(recipe.prepare))
        training, self._validation = recipe.dataset("train"), recipe.dataset("validation")
        session.same_everywhere("the prepared training data", training.fingerprint)

        model = recipe.build_model()
        parameters = sum(parameter.numel() for parameter in model.parameters())
        plan = recipe.parallel_plan(model)
        for line in overview(config, recipe, layout, accumulation, model, plan, session.place()):
            console.say(line)
        if folder is not None:
            mesh = {"replicate": layout.replicate, "shard": layout.shard}
            folder.begin(config_yaml, environment())
            folder.record("start", world_size=session.world_size, mesh=mesh, parameters=parameters, resumed_from=None)

        self._parallel = parallelize(
            model,
            plan,
            recipe.initial_std,
            seed=trainer.seed,
            layout=layout,
            section=config.parallel,
            low_dtype=LOW_DTYPES[config.precision.name],
            device=device,
        )
        self._train_step = TrainStep(
            self._parallel,
            build_optimizer(self._parallel.module.parameters(), config.optim),
            recipe.loss,
            GradScaler(config.precision, device),
            max_grad_norm=trainer.max_grad_norm,
            nominal_weight=trainer.global_batch * recipe.targets_per_sequence(),
        )
        self._loader = BatchLoader(
            training,
            recipe.collate,
            SampleOrder(len(training), trainer.seed),
            steps=range(trainer.steps),
            accumulation=accumulation,
            data_ranks=layout.data_ranks,
            data_rank=session.rank,
            micro_batch=trainer.micro_batch,
            workers=config.data.workers,
            pin_memory=device.type == "cuda",
        )
        self._meter = Meter(device, session.world_size, recipe.flops_per_token(parameters))
        self._started = time.perf_counter()
        self.step = self._tokens = 0
        self._first_loss = self._last_loss = self._validation_loss = float("nan")

    def run(self) -> None:
        """Train to the last step, evaluate, save the model, and say what happened."""
        for _ in self.steps():
            pass
        self._finish()

    def steps(self) -> Iterator[int]:
        """Train, report and evaluate; yields the number of each step as it is done."""
        with self._loader, _scheduled_garbage_collection() as collect_garbage:
            for step, batches in enumerate(self._loader, start=1):
                self._train(step, batches)
                self._report()
                self._evaluate()
                collect_garbage(step)
                yield step

    def _train(self, step: int, batches: list[Any]) -> None:
        self.step = step
        on_device = [to_device(batch, self._session.device) for batch in batches]
        self._meter.add(step, self._train_step(on_device, self._learning_rate(step)))
        if step == 1:
            self._session.first_step_done()

    def _learning_rate(self, step: int) -> float:
        config = self._config
        return learning_rate(step, config.trainer.steps, config.optim.lr, config.schedule)

    def _is_due(self, every: int) -> bool:
        return every > 0 and (self.step % every == 0 or self.step == self._config.trainer.steps)

    def _report(self) -> None:
        """Read results where that is due, log them, and stop the run where they say so."""
        log = self._is_due(self._config.trainer.log_every) or (self.step == 1 and self._config.trainer.log_every > 0)
        # Reading waits for the device. A CPU has nothing to wait for; a GPU is read now and then even without a log.
        if not (log or self._session.device.type == "cpu" or self._is_due(_READ_AT_LEAST_EVERY)):
            return
        for step, result in self._meter.read():
            self._tokens += int(result.tokens)
            self._last_loss = result.loss
            if step == 1:
                self._first_loss = result.loss
            if log and step == self.step:
                rates = self._meter.rates(self.step, self._tokens, self._loader.take_waited_seconds())
                self._log_step(step, result, rates)
                if self._folder is not None:
                    self._folder.status("running", step=step)
            elif result.skipped:
                self._log_step(step, result, dict.fromkeys(RATES))
            if result.failed_in_row >= FAILURES_THAT_STOP:
                raise TrainingFailed(
                    f"loss or gradient was not finite in {FAILURES_THAT_STOP} steps in a row, to step {step}; "
                    f"the weights are those from before. Lower optim.lr={self._config.optim.lr:g}, raise "
                    f"schedule.warmup_steps={self._config.schedule.warmup_steps}, or look at the data of those steps"
                )

    def _log_step(self, step: int, result: StepResult, rates: dict[str, Any]) -> None:
        trainer = self._config.trainer
        values = {
            "step": step,
            "loss": result.loss,
            "grad_norm": result.grad_norm,
            "lr": self._learning_rate(step),
            "samples": step * trainer.global_batch,
            "tokens": self._tokens,
            **rates,
            "skipped": bool(result.skipped),
            "scale": result.scale if self._config.precision.name == "fp16" else None,
        }
        if self._folder is not None:
            self._folder.record("step", **values)
        self._console.say(step_line(values, trainer.steps, self._session.world_size))

    def _evaluate(self) -> None:
        """Mean loss over the first ``eval_batches`` batches of the validation split, where that is due."""
        trainer = self._config.trainer
        if not self._is_due(trainer.eval_every):
            return
        if self._session.device.type == "cuda":
            torch.cuda.synchronize(self._session.device)  # steps still under way are not the evaluation's time
        started = time.perf_counter()
        batches = evaluation_batches(
            self._validation,
            self._recipe.collate,
            sequences=trainer.eval_batches * trainer.global_batch,
            micro_batch=trainer.micro_batch,
            data_ranks=self._session.world_size,
            data_rank=self._session.rank,
        )
        on_device = (to_device(batch, self._session.device) for batch in batches)
        terms = self._parallel.evaluate(on_device, self._recipe.loss)
        tokens = int(terms.weight.item())
        self._validation_loss = terms.loss_sum.item() / tokens
        seconds = time.perf_counter() - started
        self._meter.pause(seconds)
        if self._folder is not None:
            self._folder.record("eval", step=self.step, loss=self._validation_loss, tokens=tokens)
        self._console.say(
            f"eval {self.step:>{len(str(trainer.steps))}}/{trainer.steps}  validation loss "
            f"{self._validation_loss:.4f}  over {short(tokens)} tokens in {duration(seconds)}"
        )

    def _finish(self) -> None:
        config, session = self._config, self._session
        seconds = time.perf_counter() - self._started
        model = config.run.dir / "model"
        self._console.say(f"saving     {model}")
        try:
            save_model(model, self._parallel, self._recipe, writes=self._folder is not None)
        except (OSError, SafetensorError) as error:
            raise TrainingFailed(f"all steps are done, but the model cannot be saved to {model}: {error}") from error
        validation = "" if math.isnan(self._validation_loss) else f", validation {self._validation_loss:.4f}"
        self._console.say(
            f"finished   {self.step} steps, {short(self._tokens)} tokens in {duration(seconds)}; "
            f"loss {self._first_loss:.4f} -> {self._last_loss:.4f}{validation}"
        )
        if config.trainer.sample_tokens:
            with self._parallel.autocast():
                text = self._recipe.sample(
                    self._parallel.model, config.trainer.sample_tokens, config.trainer.seed, session.device
                )
            self._console.say("sample     what the model writes by itself:")
            self._console.say("\n".join(f"  | {line}" for line in text.splitlines()))
        self._console.say(
            f"files      {config.run.dir}: model/ (opens in transformers), metrics.jsonl, config.yaml, status.json\n"
            f"next       your own text: {session.command()} recipe={config.recipe} data=text "
            f"data.path=FILE_OR_FOLDER run.name=mine"
        )
        if self._folder is not None:
            self._folder.record("stop", step=self.step, state="finished", reason="all steps done")
            self._folder.status("finished", step=self.step, reason="all steps done", exit_code=EXIT_FINISHED)


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
    torch.backends.cudnn.benchmark = not deterministic
