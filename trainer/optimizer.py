"""Parameter groups, the optimizer, its transactional step, and the learning rate as a pure function of the step."""

from collections.abc import Iterable

import torch
from torch import Tensor

from serried.configs.registry import optimizers, schedules
from serried.configs.schema import OptimSection, ScheduleSection
from serried.parallel.held import local

_STATE_BYTES = 3 * 4  # a weight and its two moments, fp32


def state_bytes(parameters: int) -> int:
    """Bytes of so many parameters with their optimizer state: what a checkpoint takes, over all ranks."""
    return _STATE_BYTES * parameters


def build_optimizer(parameters: Iterable[Tensor], section: OptimSection) -> torch.optim.Optimizer:
    """Build the optimizer that ``section`` names, with weight decay on matrices and not on vectors (norms)."""
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    sharded, whole = [p for p in trained if local(p) is not p], [p for p in trained if local(p) is p]
    groups = []
    for kind in (sharded, whole) if sharded and whole else (trained,):  # no kernel takes both in one list
        groups += [
            {"name": "matrices", "params": [p for p in kind if p.ndim >= 2], "weight_decay": section.weight_decay},
            {"name": "norms", "params": [p for p in kind if p.ndim < 2], "weight_decay": 0.0},
        ]
    optimizer: torch.optim.Optimizer = optimizers.get(section.name).load()(groups, section)
    if takes_verdict(optimizer):
        make_state(optimizer)  # changes nothing, and memory is known early
    return optimizer


def takes_verdict(optimizer: torch.optim.Optimizer) -> bool:
    """Whether ``step`` reads ``grad_scale`` and ``found_inf`` on the device and changes nothing if the latter is 1.

    The attribute is how torch's optimizers tell ``torch.amp.GradScaler`` so; there is no public one.
    """
    return getattr(optimizer, "_step_supports_amp_scaling", False)


@torch.no_grad()
def take_step(optimizer: torch.optim.Optimizer, divisor: Tensor, rejected: Tensor) -> None:
    """Update the parameters with their gradients over ``divisor``, unless the step is ``rejected``: then neither they
    nor the optimizer's state change by a bit, and state that does not exist yet is not made.

    Waits for the device if the optimizer does not take the verdict there.
    """
    if takes_verdict(optimizer):
        optimizer.grad_scale = divisor.float()  # type: ignore[attr-defined]
        optimizer.found_inf = rejected.float()  # type: ignore[attr-defined]
        optimizer.step()
    elif not rejected.item():
        for parameter in trained_parameters(optimizer):
            if parameter.grad is not None:
                parameter.grad.div_(divisor.to(parameter.grad.dtype))
        optimizer.step()
    optimizer.zero_grad()


@torch.no_grad()
def make_state(optimizer: torch.optim.Optimizer) -> None:
    """Have the optimizer make the state that its first step makes, to be filled from a checkpoint.

    Parameters and state are of no use afterwards, unless the optimizer takes a verdict: then they are those of a
    rejected step.
    """
    parameters = trained_parameters(optimizer)
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    device = parameters[0].device if parameters else None
    if takes_verdict(optimizer):
        take_step(optimizer, torch.ones((), device=device), torch.ones((), device=device))
    else:
        optimizer.step()
        optimizer.zero_grad()


def trained_parameters(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """All parameters of the optimizer, group by group."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def learning_rate(step: int, steps: int, peak: float, section: ScheduleSection) -> float:
    """Return the learning rate of optimizer step ``step`` (1 is the first, ``steps`` the last).

    Warm-up is linear and reaches ``peak`` at step ``warmup_steps``; what follows is up to the schedule.
    """
    if step <= section.warmup_steps:
        return peak * step / section.warmup_steps
    return float(schedules.get(section.name).load()(step, steps, peak, section))
