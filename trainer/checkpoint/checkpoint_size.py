"""Sizes of checkpoints in bytes, computed before anything is saved."""

import torch
from torch import nn

from serried.configs.schema.sections import RunConfig
from serried.parallel.plan import ParallelPlan
from serried.trainer.optim.optimizer_state import state_bytes_by_name
from serried.trainer.precision import trained_type


def saved_bytes(config: RunConfig, model: nn.Module, plan: ParallelPlan) -> int:
    """Return the size of a checkpoint in bytes, over all ranks."""
    return sum(_saved_weights_and_state(config, model, plan))


def copied_bytes(config: RunConfig, model: nn.Module, plan: ParallelPlan, device: str) -> int:
    """Return the number of bytes that a save copies to host memory, over all ranks.

    An asynchronous save copies all data, a synchronous save only the data on ``device``.
    """
    weights, state = _saved_weights_and_state(config, model, plan)
    if config.checkpoint.mode == "async":
        return weights + state
    is_on_host = device == "cpu" or config.parallel.offload
    return 0 if is_on_host else weights + state * (not config.optim.offload)


def _saved_weights_and_state(config: RunConfig, model: nn.Module, plan: ParallelPlan) -> tuple[int, int]:
    """Return the bytes of weights, including their averages, and of optimizer state in a checkpoint."""
    named = dict(model.named_parameters())
    trained = {name for name, parameter in named.items() if parameter.requires_grad}
    is_whole = config.adapter.method == "none" and not config.task.has_teacher
    shapes = {name: parameter.shape for name, parameter in named.items()}
    states = state_bytes_by_name(config.optim, shapes, plan.blocks_in(model))
    averages = trained if config.trainer.ema_decay else ()
    width = (trained_type(config) or torch.float32).itemsize
    saved = list(named if is_whole else trained)
    weights = width * sum(named[name].numel() for name in saved) + sum(named[name].nbytes for name in averages)
    state = sum(named[name].numel() * states[name].per_element + states[name].whole for name in saved)
    return weights, int(state)
