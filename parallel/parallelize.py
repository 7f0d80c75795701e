"""Shard a model, move it to its device and initialize it, in this order."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import nn

from serried.configs.errors import UserError
from serried.configs.schema.sections import ParallelSection
from serried.parallel.axes.context import context_points
from serried.parallel.axes.expert import Loads, mixtures
from serried.parallel.axes.model_axes import active_axes, shard_specs
from serried.parallel.axes.pipeline_stages import SkippedModule, shared_buffers, split
from serried.parallel.axes.tensor import check_roles
from serried.parallel.distributed_model import DistributedModel
from serried.parallel.fp16_weight_gradients import widen_gradients
from serried.parallel.fsdp_units import units_of
from serried.parallel.initialize import clear_rows, initialize, padding_rows
from serried.parallel.layout.local_shards import persistent_buffers, set_types, tie, tied_names, unshardable
from serried.parallel.layout.mesh import Layout
from serried.parallel.layout.process_groups import Groups
from serried.parallel.plan import ParallelPlan
from serried.parallel.precision.float8_all_gather import Float8Gather
from serried.parallel.runner import Direct, Runner
from serried.parallel.step_phases import Phases
from serried.parallel.sync.gradient_norm import sum_in_fp32
from serried.parallel.sync.gradient_sync import GradientSync, NoSync, Replicated, Summed

if TYPE_CHECKING:
    from serried.parallel.sync.fsdp import Sharded


def check_plan(model: nn.Module, plan: ParallelPlan, layout: Layout) -> None:
    """Check, before the model is sharded, that ``plan`` has the declarations that ``layout`` needs. Raises
    ``UserError`` if one is missing."""
    if layout.tensor > 1:
        if plan.refuse_roles is not None and (mistake := plan.refuse_roles()):
            raise UserError(f"parallel.tensor={layout.tensor}: {mistake}")
        check_roles(model, plan, layout)
    if layout.stages > len(plan.blocks):
        split(model, plan, layout, 0)  # raises before copying


def check_offloadable(model: nn.Module) -> None:
    """Raise ``UserError`` if a parameter cannot be offloaded with ``parallel.offload=true``."""
    if name := next(iter(unshardable(model)), None):
        raise UserError(
            f"parallel.offload=true: FSDP2 offloads only sharded parameters, and cannot shard {name} because it is a "
            "scalar or an integer tensor; use parallel.offload=false, or optim.offload=true"
        )


def parallelize(
    model: nn.Module,
    plan: ParallelPlan,
    std_of: Callable[[str], float | None] | None,
    *,
    seed: int,
    layout: Layout,
    section: ParallelSection,
    low_dtype: torch.dtype | None,
    device: torch.device,
    phases: Phases | None = None,
    trained_dtype: torch.dtype | None = None,
    frozen_dtype: torch.dtype | None = None,
    prepare: Callable[[nn.Module], None] = lambda _: None,
    groups: Groups | None = None,
) -> DistributedModel:
    """Shard ``model`` by ``plan``, allocate this rank's shards on ``device`` and initialize them.

    Build the optimizer afterwards, because sharding replaces parameters.

    Args:
        model: The model. If it has values, it keeps them, and they must be the same on all ranks.
        plan: How the model may be sharded.
        std_of: Initializes a model on meta; see ``initialize``. None leaves it uninitialized, to load a checkpoint.
        seed: Seed of the initialization.
        layout: The parallel layout.
        section: The configuration section ``parallel``.
        low_dtype: Dtype of matrix products. None means fp32.
        device: Device of this rank.
        phases: Phases of a step, to record time.
        trained_dtype: Dtype of trained parameters. None means fp32 or wider.
        frozen_dtype: Dtype of frozen parameters. None means fp32 or wider.
        prepare: Called with the model, or each of this rank's stages, after the mesh axes were applied and before FSDP2
            or DDP. It may change how blocks run, but not their parameters.
        groups: Existing process groups.
    """
    model.zero_grad()  # a model that was trained elsewhere before may still have gradients
    set_types(model, trained_dtype, frozen_dtype)
    specs, groups = shard_specs(model, plan, layout), groups or Groups(layout, device.type)
    tied, buffers = tied_names(model), shared_buffers(persistent_buffers(model), plan)
    padding = padding_rows(model)  # before the split into stages
    is_meta = any(parameter.is_meta for parameter in model.parameters())
    groups.make(ties_ends=bool(plan.tied))
    place = layout.coordinates(dist.get_rank() if dist.is_initialized() else 0)
    stages, phases = split(model, plan, layout, place.pipeline), phases or Phases()
    if low_dtype == torch.float16:
        for stage in stages.values():
            widen_gradients(stage, plan)
    gathered_dtype = gathered_type(plan, low_dtype) if layout.is_sharded else None
    loads = Loads(list(stages.values()), plan, specs)
    is_low = bool(gathered_dtype or trained_dtype)
    autocast = partial(_forward_context, device, None if is_low else low_dtype, loads)

    def sharded(stage: nn.Module) -> "Sharded":
        from serried.parallel.sync.fsdp import Sharded  # imports torch.distributed.tensor and sympy

        for axis in active_axes(layout):
            axis.apply(stage, plan, layout, place, groups)
        for point in context_points(stage, plan):
            point.context.hidden_parts = layout.tensor if layout.sequence else 1
        prepare(stage)
        units = () if plan.is_one_unit else _units_of_stage(stage, plan) if plan.units else units_of(stage)
        experts = [mixture.experts for mixture in mixtures(stage, plan).values()] if layout.expert > 1 else []
        whole = unshardable(stage)
        divided = ParallelPlan(units, is_one_unit=plan.is_one_unit)
        sync = Sharded(stage, groups, divided, gathered_dtype, section, [*whole.values()], experts)
        _allocate(sync.root, stage, tied, device, is_meta=is_meta, on_host=section.offload)
        return sync

    runner: Runner
    sync: GradientSync
    if layout.is_sharded:
        _refuse_tied_units(model, plan, tied)
        syncs = {number: sharded(stage) for number, stage in stages.items()}
        sync = syncs[min(syncs)]
    else:
        prepare(model)
        _allocate(model, model, tied, device, is_meta=is_meta)
        if not layout.is_replicated:
            sync = NoSync(model)
        else:
            sync = Summed(model) if trained_dtype else Replicated(model, layout, device, uses_all=bool(plan.units))
    if layout.pipeline > 1:
        from serried.parallel.pipeline_runner import Pipeline  # imports all of torch._dynamo: 2 s

        runner = Pipeline(syncs, layout, groups, device, phases, autocast)
    else:
        runner = Direct(sync, phases, autocast)
    if trained_dtype:
        for stage in stages.values():
            sum_in_fp32(stage, reduces_each=section.sync_every_micro_batch)
    gather = Float8Gather(stages.values(), groups) if layout.is_sharded else None
    parallel = DistributedModel(
        list(stages.values()), runner, specs, groups, device,
        loads=loads, buffers=buffers, gather=gather if gather and gather.weights else None,
    )  # fmt: skip
    if is_meta and std_of is not None:
        initialize(parallel.parameters, std_of, seed)
        clear_rows(parallel.parameters, padding)
    return parallel


@contextmanager
def _forward_context(device: torch.device, dtype: torch.dtype | None, loads: Loads) -> Iterator[None]:
    """Context manager for forwards: autocast and counting of expert loads."""
    with torch.autocast(device.type, dtype, enabled=dtype is not None), loads.counting():
        yield


def _units_of_stage(stage: nn.Module, plan: ParallelPlan) -> tuple[tuple[str, ...], ...]:
    """Return the units of ``plan`` that have parameters in ``stage``.

    The placeholder of a tied module belongs to no unit, since the head reads its parameter.
    """

    def is_here(name: str) -> bool:
        module = stage.get_submodule(name)
        return not isinstance(module, SkippedModule) and any(True for _ in module.parameters())

    units = [tuple(name for name in unit if is_here(name)) for unit in plan.units]
    return tuple(unit for unit in units if unit)


def gathered_type(plan: ParallelPlan, low_dtype: torch.dtype | None) -> torch.dtype | None:
    """Return the dtype in which FSDP2 gathers parameters. None means fp32 with autocast, as on one process.

    None is used for a model without declared units, which may compute in several dtypes, and for fp16, in which the
    micro-batch gradients of FSDP2 would overflow.
    """
    return low_dtype if plan.units and low_dtype != torch.float16 else None


def _allocate(
    root: nn.Module, model: nn.Module, tied: Mapping[str, str], device: torch.device, *, is_meta: bool,
    on_host: bool = False,
) -> None:  # fmt: skip
    """Allocate parameters and buffers on ``device``. With ``on_host``, parameters are in host memory."""
    if not is_meta:
        # FSDP2 moves offloaded parameters itself.
        if not on_host and any(tensor.device != device for tensor in (*root.parameters(), *root.buffers())):
            root.to(device)  # raises for tensors without data
        return
    buffers = {name: each for name, each in model.named_buffers() if not each.is_meta}
    root.to_empty(device="cpu" if on_host else device)
    for module in model.modules() if on_host else ():
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, buffer.to(device))
    tie(model, tied)  # to_empty allocates separate memory for each name
    for name, buffer in buffers.items():
        model.get_buffer(name).copy_(buffer)


def _refuse_tied_units(model: nn.Module, plan: ParallelPlan, tied: Mapping[str, str]) -> None:
    """Raise ``UserError`` if modules with a shared parameter are in different units: FSDP2 would untie them."""
    unit_of = {
        f"{name}.{parameter}": number
        for number, unit in enumerate(plan.units)
        for name in unit
        for parameter, _ in model.get_submodule(name).named_parameters(remove_duplicate=False)
    }
    for name, first in tied.items():
        if unit_of.get(name) != unit_of.get(first):
            raise UserError(
                f"{name} and {first} are one parameter but in different units of the parallel plan; put their modules "
                "into the same unit, or into none"
            )
