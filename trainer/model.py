"""Model of a run, and what its checkpoints contain: all parameters, or only the trained adapters."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from pathlib import Path

import torch
from torch import nn

from serried.configs.errors import UserError
from serried.configs.schema.sections import RunConfig, TrainerSection
from serried.parallel.activation_checkpoint import Mix, checkpoint_blocks
from serried.parallel.compile import check_blocks, compile_blocks
from serried.parallel.distributed_model import DistributedModel
from serried.parallel.initialize import initialize
from serried.parallel.layout.checks import check_compile, with_values
from serried.parallel.layout.local_shards import HeldTensor
from serried.parallel.layout.mesh import Layout
from serried.parallel.layout.process_groups import Groups
from serried.parallel.parallelize import check_offloadable, check_plan, parallelize
from serried.parallel.plan import ParallelPlan
from serried.parallel.step_phases import Phases
from serried.trainer.adapters import Adapters, modules_to_save
from serried.trainer.checkpoint.retention import ADAPTER, MODEL
from serried.trainer.checkpoint.tensors import Exported, check_names, load_weights, unfit_names
from serried.trainer.compilation import Compilation
from serried.trainer.memory.activation_budget import chosen_mix
from serried.trainer.optim.optimizer import check_optimizer
from serried.trainer.optim.parameter_groups import freeze
from serried.trainer.precision import LOW_DTYPES, frozen_type, set_products, trained_type
from serried.trainer.task import RunTask

_ONE_UNIT_BYTES = 2**30
"""Maximum total size of the parameters for FSDP2 to gather them all at once on a CPU."""


@dataclass(frozen=True)
class Model:
    """The model of a run before it is sharded."""

    task: RunTask
    module: nn.Module
    """Module whose parameters are on the meta device or have values."""
    plan: ParallelPlan
    adapters: Adapters | None
    blocks: tuple[str, ...]
    """Names of the module's repeated blocks, see ``ParallelPlan.blocks_in``."""
    unfit: frozenset[str] | None = None
    """Parameters and buffers that keep their initial values, as ``checkpoint.strict=false`` allows. None: all of
    them must be in a folder of weights."""
    has_values: bool = False
    """Whether the task built the module with its initial values."""

    @property
    def exported(self) -> Exported:
        """Location of each parameter's elements in the run's checkpoints. Empty for parameters of a base model."""
        return self.task.exported if self.adapters is None else self.adapters.exported

    @property
    def stem(self) -> str:
        """Stem of the weight file names in the run's checkpoints."""
        return MODEL if self.adapters is None else ADAPTER

    def fitted_to(self, weights: Path) -> tuple["Model", str]:
        """Return the model that loads only the fitting tensors of the folder ``weights``, and a list of the others.

        Raises:
            UserError: No tensor fits.
        """
        unfit, told = unfit_names(weights, self.module, self._exported_from(weights))
        return replace(self, unfit=unfit), told

    def check_names(self, checkpoint: Path | None, weights: Path | None, otherwise: str = "") -> None:
        """Compare parameter names and shapes with those in ``checkpoint`` and in the model folder ``weights``.

        ``otherwise``: end of the message about a folder ``weights`` that does not match.

        Raises:
            UserError: The parameters in a folder do not match.
        """
        if checkpoint is not None:
            check_names(checkpoint, self.module, self.exported, self.stem)
        if weights is not None and self.unfit is None:
            check_names(weights, self.module, self._exported_from(weights), otherwise=otherwise)

    def start(self, parallel: DistributedModel, weights: Path | None, seed: int) -> None:
        """Load the sharded model from the model folder ``weights``, if given, and initialize the adapters."""
        packed = self.adapters.packed if self.adapters is not None else {}
        if weights is not None:
            exported = self._exported_from(weights)
            load_weights(weights, parallel, exported, left_out=packed, allows_others=self.unfit is not None)
            initialize(self._lacking(parallel, exported), self.task.initial_std, seed)
        if (teacher := self.task.teacher_folder()) is not None:
            load_weights(teacher, parallel, self.task.exported_teacher)
        if weights is not None and self.adapters is not None:
            self.adapters.load_packed(weights, parallel.parameters)
        if self.adapters is not None:
            self.adapters.load_rows(weights, parallel.parameters)
        if self.adapters is not None:
            self.adapters.initialize(parallel, seed)

    def load_adapters(self, folder: Path, parallel: DistributedModel) -> None:
        """Load the adapters and the fully trained heads of the sharded model from ``folder``."""
        assert self.adapters is not None
        self.adapters.check_embeddings(folder)
        load_weights(folder, parallel, self.exported, self.stem)

    def _exported_from(self, weights: Path) -> Exported:
        exported, unfit = self.task.exported_from(weights), self.unfit
        if unfit:
            return lambda name, shape: () if name in unfit else exported(name, shape)
        return exported if self.adapters is None else self.adapters.exported_base(exported)

    def _lacking(self, parallel: DistributedModel, exported: Exported) -> Iterator[HeldTensor]:
        """Yield the parameters that are missing in a model folder, except parameters of a teacher or an adapter."""
        for held in parallel.parameters:
            if self.adapters is not None and not self.adapters.is_of_head(held.name):
                continue
            if self.has_values and self.unfit and held.name in self.unfit:
                continue
            shape = held.spec.shape
            if not exported(held.name, shape) and not self.task.exported_teacher(held.name, shape):
                yield held

    def write_files(self, base: str | None, folder: Path) -> None:
        """Write the configuration files that a checkpoint contains in addition to the weights."""
        self.task.export_files(folder)
        if self.adapters is not None:
            self.adapters.write_config(folder, base, self.task.adapter_settings())


def build_model(config: RunConfig, task: RunTask, device: str | None = None) -> Model:
    """Build the model of ``task`` with the adapters of ``config``.

    Args:
        config: The configuration of the run.
        task: The task that builds the module.
        device: Device type of the run. None to take it from ``config``.

    Raises:
        UserError: The task returns no module, the module cannot be trained, or it does not support the adapters.
    """
    module = task.build_model()
    if not isinstance(module, nn.Module):
        raise UserError(f"{type(task).__name__}.build_model() returned {module!r}; it must return a torch.nn.Module")
    _refuse_untrainable(module, config)
    plan = task.parallel_plan(module).for_model(module)
    plan = replace(plan, is_one_unit=_is_one_unit(config, module, device or config.launch.device))
    blocks, adapters = plan.blocks_in(module), None
    if config.adapter.method != "none":
        heads = [*task.heads(), *modules_to_save(config.adapter.modules_to_save, module, task.exported)]
        adapters = Adapters(config.adapter, module, plan, task.exported, list(dict.fromkeys(heads)))
    has_values = not any(parameter.is_meta for parameter in module.parameters())
    return Model(task, module, plan, adapters, blocks, has_values=has_values)


def model_to_train(config: RunConfig, task: RunTask, device: str | None = None) -> Model:
    """Build the model as ``build_model`` does, and freeze the parameters of frozen groups.

    Raises the errors of ``build_model`` and ``freeze``.
    """
    model = build_model(config, task, device)
    freeze(model.module, config.optim)
    return model


def with_compile(config: RunConfig, task: RunTask, layout: Layout, device: str) -> tuple[RunConfig, str]:
    """Return ``config`` with ``trainer.compile=auto`` resolved, and the reason if blocks are not compiled.

    The reason is empty on a CPU.
    """
    if config.trainer.compile != "auto":
        return config, ""
    off = with_values(config, {"trainer.compile": False})
    if device == "cpu":
        return off, ""
    if config.trainer.activation_checkpoint == "offload":
        return off, "trainer.activation_checkpoint=offload, whose copies to the host cannot be compiled"
    compiled = with_values(config, {"trainer.compile": True})
    model = model_to_train(compiled, task, device)
    try:
        check_compile(compiled, layout)
        check_blocks(model.module, model.plan, config.trainer.keeps_less)
    except UserError as error:
        return off, str(error).partition(";")[0].removeprefix("trainer.compile=true").removeprefix(
            " with "
        ).removeprefix(": ")
    return compiled, ""


def check_model(config: RunConfig, module: nn.Module, plan: ParallelPlan, layout: Layout) -> None:
    """Raise ``UserError`` if ``module`` does not support the parallel layout, compilation or optimizer of ``config``.

    Call this before sharding.
    """
    check_plan(module, plan, layout)
    if config.adapter.trainable_token_indices and plan.tied and layout.stages > 1:
        raise UserError(
            f"adapter.trainable_token_indices with parallel.pipeline={layout.pipeline} and tied embeddings: the first "
            "and the last stage would train the same rows; use parallel.pipeline=1, or adapter.modules_to_save"
        )
    if config.parallel.offload:
        check_offloadable(module)
    becomes_uneven = config.recover.mode != "off"  # after a loss
    if (layout.uneven or becomes_uneven) and any(isinstance(child, nn.SyncBatchNorm) for child in module.modules()):
        key, value = ("recover.mode", "memory") if becomes_uneven else ("parallel.uneven", "true")
        raise UserError(
            f"{key}={value} with SyncBatchNorm: all ranks exchange statistics in each micro-batch, and some would have "
            f"one more; use {key}={'off' if becomes_uneven else 'false'}, or GroupNorm"
        )
    if config.trainer.compiles:
        check_blocks(module, plan, config.trainer.keeps_less)
    check_optimizer(config.optim, module, plan, layout)


def _refuse_untrainable(module: nn.Module, config: RunConfig) -> None:
    """Raise ``UserError`` with advice if ``module`` contains modules or parameters that cannot be trained."""
    if next(module.parameters(), None) is None:
        raise UserError(f"the model, a {type(module).__name__}, has no parameters to train")
    for name, parameter in module.named_parameters():
        if isinstance(parameter, nn.UninitializedParameter):
            raise UserError(
                f"parameter {name} has no shape yet: give the lazy module its sizes (nn.Linear for nn.LazyLinear), or "
                "call the model on one batch in build_model()"
            )
        if parameter.is_complex():
            raise UserError(
                f"parameter {name} is {str(parameter.dtype).removeprefix('torch.')}, but complex parameters are not "
                "supported; use a real parameter with one more dim, and torch.view_as_complex(parameter) in forward()"
            )
    for name, child in module.named_modules():
        if isinstance(child, nn.Embedding | nn.EmbeddingBag) and child.sparse and child.weight.requires_grad:
            raise UserError(
                f"{name or 'the model'} has sparse gradients, but these cannot be summed over ranks; remove sparse=True"
            )
        if isinstance(child, torch.jit.ScriptModule) and config.parallel.strategy in ("fsdp", "hsdp"):
            raise UserError(
                f"parallel={config.parallel.strategy} cannot shard {name or 'the model'}, a torch.jit.ScriptModule; "
                "remove torch.jit.script, or use parallel=ddp"
            )


def _is_one_unit(config: RunConfig, module: nn.Module, device: str) -> bool:
    """Return whether to wrap the model as one FSDP2 unit: faster on a CPU if the full parameters are small."""
    section = config.parallel
    if device != "cpu" or section.strategy not in ("fsdp", "hsdp") or section.reshard_after_forward is not None:
        return False
    is_plain = section.pipeline == section.expert == 1 and not section.sync_every_micro_batch
    if not is_plain or config.adapter.method != "none" or config.task.has_teacher:
        return False
    return sum(parameter.numel() for parameter in module.parameters()) * torch.float32.itemsize <= _ONE_UNIT_BYTES


def sharded(
    config: RunConfig,
    model: Model,
    layout: Layout,
    device: torch.device,
    std_of: Callable[[str], float | None] | None = None,
    *,
    phases: Phases | None = None,
    groups: Groups | None = None,
    compilation: Compilation | None = None,
    mix: Mix | None = None,
) -> DistributedModel:
    """Return ``model`` sharded as configured in ``config``, see ``parallelize``.

    Args:
        config: The configuration of the run.
        model: The model before sharding.
        layout: The parallel layout.
        device: The device of this rank.
        std_of: Standard deviation of the initial values of a parameter, by name.
        phases: Timer of the step's phases. None if the model is not trained.
        groups: The process groups. None to create them.
        compilation: Counts the compiled blocks. None to not compile the model.
        mix: Activation checkpointing of the blocks, if already chosen.
    """
    section = config.trainer if phases is not None else None
    if section is not None and mix is None:
        mix = chosen_mix(config, model.task, layout, model.plan, model.module)
    set_products(config, model.module, model.plan, layout, device)
    return parallelize(
        model.module,
        model.plan,
        std_of,
        seed=config.trainer.seed,
        layout=layout,
        section=config.parallel,
        low_dtype=LOW_DTYPES[config.precision.name],
        device=device,
        phases=phases,
        trained_dtype=trained_type(config),
        frozen_dtype=frozen_type(config, model.plan),
        prepare=partial(_prepare, section, mix, model.plan, compilation),
        groups=groups or Groups(layout, device.type, timedelta(seconds=config.launch.start_timeout_seconds)),
    )


def _prepare(
    section: TrainerSection | None, mix: Mix | None, plan: ParallelPlan, compilation: Compilation | None,
    module: nn.Module,
) -> None:  # fmt: skip
    """Apply activation checkpointing and compilation to the blocks of ``module``, a model or pipeline stage."""
    if section is not None:
        every = section.activation_checkpoint_every if mix is None else 1
        checkpoint_blocks(module, plan, mix or section.activation_checkpoint, every)
    if compilation is not None:
        compilation.blocks += compile_blocks(module, plan, section.compile_mode if section else None)
