"""Choice of the blocks that recompute activations, for ``trainer.activation_memory_budget``."""

import copy
from collections.abc import Mapping
from contextlib import nullcontext
from functools import partial
from math import ceil

import torch
from torch import nn

from serried.configs.errors import UserError
from serried.configs.schema.sections import RunConfig
from serried.parallel.activation_checkpoint import Mix, checkpoint_blocks, mix_within
from serried.parallel.layout.local_shards import empty
from serried.parallel.layout.mesh import Layout
from serried.parallel.plan import ParallelPlan
from serried.trainer.memory.gpu_norms import is_for_gpus, norms_of_a_gpu
from serried.trainer.memory.live_storages import LiveStorages
from serried.trainer.precision import LOW_DTYPES
from serried.trainer.task import RunTask, map_tensors

MODES = ("none", "selective", "full")
"""Modes of activation checkpointing that a budget chooses from."""
_LONGEST_REASON = 160


def chosen_mix(
    config: RunConfig,
    task: RunTask,
    layout: Layout,
    plan: ParallelPlan,
    module: nn.Module,
    kept: Mapping[str, float] | None = None,
) -> Mix | None:
    """Return the mix of activation checkpointing modes, the same on all ranks; None if there is no budget.

    Args:
        module: the unsharded model.
        kept: bytes of activations that all blocks keep, by mode. If None, they are measured.

    Raises:
        UserError: the blocks exceed the budget in every mode, or their memory cannot be measured.
    """
    budget = config.trainer.activation_memory_budget
    if budget == 1:
        return None
    if kept is None:
        if not plan.blocks_in(module):
            raise UserError(
                f"trainer.activation_memory_budget={budget:g}: the model has no repeated blocks to recompute; return "
                "ParallelPlan(blocks=...) from parallel_plan(), or use trainer.activation_memory_budget=1"
            )
        kept = _measured(config, task, layout, plan, module)
    mix = mix_within(budget, kept)
    if mix is None:
        least = ceil(100 * min(kept.values()) / kept["none"]) / 100
        raise UserError(
            f"trainer.activation_memory_budget={budget:g}: recomputation needs the inputs of the blocks, and these "
            f"take a larger share of the activations; use trainer.activation_memory_budget={least:g}"
        )
    return mix


def _measured(
    config: RunConfig, task: RunTask, layout: Layout, plan: ParallelPlan, module: nn.Module
) -> Mapping[str, float]:  # fmt: skip
    """Return the bytes of activations that all blocks keep, by mode, measured in a forward pass on fake tensors."""
    given = f"trainer.activation_memory_budget={config.trainer.activation_memory_budget:g}"
    other = "use trainer.activation_checkpoint=selective with trainer.activation_memory_budget=1"
    for axis in ("tensor", "context", "expert"):
        if getattr(layout, axis) > 1:
            raise UserError(
                f"{given} is not supported with parallel.{axis}={getattr(layout, axis)}, as the activations of this "
                f"model can be measured only without sharding; {other}"
            )
    try:
        kept = {mode: _held_by_blocks(config, task, plan, module, mode) for mode in MODES}
    except UserError:
        raise
    except Exception as error:  # a user's module may raise any error on fake tensors
        raise UserError(
            f"{given}: the activations of the blocks cannot be measured on fake tensors ({reason_of(error)}); {other}"
        ) from error
    if not kept["none"]:
        blocks = ", ".join(plan.blocks_in(module)[:2])
        raise UserError(f"{given}: the loss keeps no activations of the blocks ({blocks}, ...); {other}")
    return kept


def reason_of(error: Exception) -> str:
    """Return a short description of ``error``, raised by a module on fake tensors, as a clause of a message."""
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"[:_LONGEST_REASON]


def _held_by_blocks(config: RunConfig, task: RunTask, plan: ParallelPlan, module: nn.Module, mode: str) -> float:
    from torch._subclasses.fake_tensor import FakeTensorMode  # takes long to import

    tensors = [*module.parameters(), *module.buffers()]
    module = copy.deepcopy(module, {id(tensor): tensor for tensor in tensors})  # copies modules, not tensors
    low_dtype, alive = LOW_DTYPES[config.precision.name], LiveStorages()
    held: list[float] = []
    ended: list[bool] = []
    batch = task.example_batch(config.trainer.micro_batch)
    with (
        FakeTensorMode(allow_non_fake_inputs=True),
        alive,
        norms_of_a_gpu() if is_for_gpus(config) else nullcontext(),
        torch.autocast("cpu", low_dtype, enabled=low_dtype is not None, cache_enabled=False),
    ):
        empty(module)
        checkpoint_blocks(module, plan, mode)
        for name in plan.blocks_in(module):
            block = module.get_submodule(name)
            block.register_forward_pre_hook(lambda *_: held.append(-alive.bytes))
            block.register_forward_hook(lambda *_: held.append(alive.bytes))
        block.register_forward_hook(lambda *_: ended.append(True))
        try:
            task.loss(module, map_tensors(partial(torch.empty_like, device="cpu"), batch))
        except Exception:  # code after the blocks, such as a task's own loss, may need data
            if not ended:
                raise
    return sum(held)
