"""Model, optimizer and step of a run: all state that training changes and a checkpoint restores."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from serried.configs.schema.sections import RunConfig
from serried.parallel.activation_checkpoint import Mix
from serried.parallel.distributed_model import DistributedModel
from serried.parallel.layout.mesh import Layout
from serried.parallel.layout.process_groups import gather_plain
from serried.parallel.plan import Objective
from serried.records.ranged_files import DamagedFile, has_ranged_files
from serried.trainer.adapter_base_model import Base
from serried.trainer.checkpoint.file_assignment import Part
from serried.trainer.checkpoint.kept_state import KeptState
from serried.trainer.checkpoint.resume import DamagedCheckpoint, Start
from serried.trainer.checkpoint.retention import OPTIMIZER
from serried.trainer.checkpoint.saved_state import taking_from
from serried.trainer.checkpoint.tensors import load_state, state_parts
from serried.trainer.compilation import Compilation
from serried.trainer.data.loader import PADDING_ID, Reader
from serried.trainer.model import Model, sharded
from serried.trainer.optim.optimizer import model_optimizer
from serried.trainer.optim.optimizer_state import ensure_state, group_values, load_plain_state, plain_state
from serried.trainer.optim.weight_average import WeightAverage
from serried.trainer.precision import LOW_DTYPES, GradScaler
from serried.trainer.reference import ReferencePass
from serried.trainer.run_context import Context
from serried.trainer.step import TrainStep
from serried.trainer.task import Dataset, StepMean, to_device


class TrainingState:
    """The sharded model with its optimizer, initialized or loaded from a checkpoint or model folder."""

    def __init__(
        self, context: Context, model: Model, layout: Layout, start: Start, base: Base | None = None,
        reference: ReferencePass | None = None, mix: Mix | None = None,
    ) -> None:  # fmt: skip
        """``base``: base model of the adapters. ``reference``: pass to run first with the pretrained weights. ``mix``:
        activation checkpointing of the blocks, if already chosen."""
        config = context.config
        task = context.task
        device = context.session.device
        context.console.doing(f"reading {config.run.shown(start.source)}" if start.source else "initialising the model")
        self._task = task
        self._session = context.session
        self._model = model
        self.compilation = None
        if config.trainer.compiles:
            here, world = context.session.local_world_size, context.session.world_size
            self.compilation = Compilation(context.console, here, is_on_one_node=here == world)
        std_of = None if start.source or base else task.initial_std
        self.parallel = sharded(
            config, model, layout, device, std_of, phases=context.pulse.phases, compilation=self.compilation, mix=mix
        )
        if self.compilation is not None:
            self.compilation.announce()
        self.module = self.parallel.module
        low_dtype = LOW_DTYPES[config.precision.name]
        self.optimizer = model_optimizer(self.parallel, config.optim, model.blocks, low_dtype, config.trainer.seed)
        self._configured = group_values(self.optimizer)
        self._lr_scales = self._scales_of_groups()
        weights, held = start.weights if base is None else base.folder, None
        if reference is not None and reference.is_needed:
            held = reference.folder
            model.start(self.parallel, held, config.trainer.seed)
            reference.run(self.parallel)  # does not change the weights
        if reference is None or weights not in (None, held):
            model.start(self.parallel, weights, config.trainer.seed)
        if base is not None and base.adapters is not None:
            model.load_adapters(base.adapters, self.parallel)
        decay = config.trainer.ema_decay
        self._average = WeightAverage(decay, self.parallel.parameters, device) if decay else None
        weight = task.weight_per_sample()
        self.step = train_step(config, task, weight, self.parallel, self.optimizer, self._average, task.step_mean())
        if start.kept is not None:
            self.take_over(start.kept)
        elif start.checkpoint is not None:
            self.restore(start)

    def restore(self, start: Start) -> None:
        """Load weights, optimizer state and step from a checkpoint.

        Raises ``DamagedCheckpoint`` on all ranks if a checkpoint in a bucket is damaged, which is found while it is
        read. The state is then undefined.
        """
        assert start.checkpoint is not None
        averages, damage = self._average.of if self._average is not None else None, None
        try:
            load_state(
                start.checkpoint, self.parallel, self.optimizer, self._model.exported, self._model.stem, averages
            )
        except DamagedFile as error:
            damage = str(error)
        if has_ranged_files(start.checkpoint):
            found = next(filter(None, self._session.gather(damage)), None)
            if found is not None:
                raise DamagedCheckpoint(start.checkpoint, found)
        with taking_from(start.checkpoint):
            self.load_state_dict(start.state["step_state"])

    def take_over(self, kept: KeptState) -> None:
        """Continue with the state of the model before a loss, whose shards are the same."""
        owners = {name.rpartition(".")[0] for stem, name, _ in kept.tensors if stem == OPTIMIZER}
        with_state = {id(held.tensor) for held in self.parallel.parameters if held.name in owners}
        ensure_state(self.optimizer, lambda parameter: id(parameter) in with_state)
        kept.copy_to(self.parts())
        self.load_state_dict(kept.plain["step_state"])

    def rehearse(self, context: Context, dataset: Dataset) -> None:
        """Run one forward and backward pass on a micro-batch of ``dataset`` without changing the state.

        See ``TrainStep.rehearse``.
        """
        batch = Reader(dataset, self._task.collate_numbered).read([PADDING_ID] * context.config.trainer.micro_batch)
        buffers = [buffer.clone() for buffer in self.module.buffers()]
        self.step.rehearse(to_device(batch, context.session.device))
        with torch.no_grad():
            for buffer, before in zip(self.module.buffers(), buffers, strict=True):
                buffer.copy_(before)  # such as BatchNorm statistics

    def parts(self) -> Iterator[tuple[str, Part]]:
        """Yield every tensor of a checkpoint, see ``state_parts``."""
        averages = self._average.of if self._average is not None else {}
        return state_parts(self.parallel, self.optimizer, self._model.exported, self._model.stem, averages)

    @contextmanager
    def evaluated(self) -> Iterator[None]:
        """Use the averaged weights in this context, if the run keeps an average."""
        with nullcontext() if self.compilation is None else self.compilation.unreported():
            if self._average is None:
                yield
                return
            self.parallel.reshard()
            with self._average.in_use():
                yield
                self.parallel.reshard()

    def report_compilation(self, step: int) -> None:
        """Report the compilations of ``step``, if blocks are compiled."""
        if self.compilation is not None:
            self.compilation.report(step)

    def learning_rates(self, lr: float) -> dict[str, float]:
        """Return the learning rate of each parameter group of the full model, by name."""
        return {name: lr * scale for name, scale in self._lr_scales.items()}

    def _scales_of_groups(self) -> dict[str, float]:
        scales = {group["name"]: group["lr_scale"] for group in self.optimizer.param_groups if group["params"]}
        if self.parallel.layout.pipeline == 1:
            return scales
        return {name: scale for of in self._session.gather(scales) for name, scale in of.items()}

    def state_dict(self) -> dict[str, Any]:
        """Return the plain data of a checkpoint: the state of the step, and the optimizer state other than tensors.

        This is a collective call. Synchronizes with the device.
        """
        state, layout = self.own_state_dict(), self.parallel.layout
        if layout.pipeline > 1:  # each stage has only its own parameters and groups
            ranks, optimizer = layout.world // layout.pipeline, state["optimizer"]
            answers = gather_plain(None if self._session.rank % ranks else optimizer)
            state["optimizer"] = {
                key: {k: v for of in answers[::ranks] for k, v in of[key].items()} for key in optimizer
            }
        return state

    def own_state_dict(self) -> dict[str, Any]:
        """Like ``state_dict``, but only with the optimizer state of this rank's pipeline stage. No communication."""
        optimizer = plain_state(self.optimizer, self._named(), self._configured)
        return self.step.state_dict() | {"optimizer": optimizer}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore ``state``. Call this after the tensors are loaded."""
        if "optimizer" in state:
            load_plain_state(self.optimizer, self._named(), self._configured, state["optimizer"])
        self.step.load_state_dict(state)

    def _named(self) -> list[tuple[str, Tensor]]:
        """Return the parameters with their names in a checkpoint.

        A parameter that is split or merged in a checkpoint keeps its own name. A tied parameter that this rank holds
        twice is listed twice.
        """
        named = []
        for held in self.parallel.parameters:
            for first in self._model.exported(held.name, held.spec.shape)[:1]:
                named.append((first.name if first.is_whole else held.name, held.tensor))
        return named


def train_step(
    config: RunConfig, objective: Objective, weight: int, parallel: DistributedModel, optimizer: torch.optim.Optimizer,
    average: WeightAverage | None, step_mean: StepMean | None = None,
) -> TrainStep:  # fmt: skip
    """Return the train step for ``config``.

    Args:
        weight: Weight of a sample.
        average: Weight average, if any.
        step_mean: Mean over the global batch that the loss needs, if any.
    """
    return TrainStep(
        parallel,
        optimizer,
        objective,
        GradScaler(config.precision, parallel.device),
        max_grad_norm=config.trainer.max_grad_norm,
        nominal_weight=config.trainer.global_batch * weight,
        health=config.health,
        average=average,
        step_mean=step_mean,
        votes_to_commit=config.recover.mode == "memory",
    )
