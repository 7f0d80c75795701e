"""Construction of the optimizer, its transactional step, and the learning rate as a pure function of the step.

Any ``torch.optim.Optimizer`` can be used.
"""

from collections.abc import Callable, Collection, Iterable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from serried.configs.errors import UserError
from serried.configs.schema.registry import optimizers, schedules, takes
from serried.configs.schema.sections import OptimSection, ScheduleSection
from serried.parallel.axes.model_axes import shard_specs
from serried.parallel.distributed_model import DistributedModel
from serried.parallel.layout.local_shards import local
from serried.parallel.layout.mesh import Layout
from serried.parallel.optim.factor_sums import Sums
from serried.parallel.optim.matrix_exchange import Matrices, matrix_names
from serried.parallel.optim.stochastic_rounding import Rounding
from serried.parallel.plan import ParallelPlan
from serried.parallel.sync.gradient_norm import zero_gradient
from serried.trainer.optim.algorithms.quantized_adamw import check_columns
from serried.trainer.optim.cpu_offload import Offloaded
from serried.trainer.optim.parameter_groups import parameter_groups

Parts = Mapping[str, Callable[[], Any]]
"""Functions that return the optional arguments of an optimizer's build function, by argument name. See
``registry.takes``."""


def model_optimizer(
    model: DistributedModel, section: OptimSection, blocks: Collection[str], low_dtype: torch.dtype | None, seed: int
) -> torch.optim.Optimizer:
    """Build the optimizer that ``section`` chooses for ``model``.

    This is a collective on all ranks; see ``Matrices.of``. ``seed``: seed of the stochastic rounding.
    """
    parts: Parts = {
        "matrices": partial(Matrices.of, model, blocks, low_dtype),
        "sums": partial(Sums.of, model),
        "rounding": partial(Rounding.of, model, seed),
    }
    return build_optimizer([(held.name, held.tensor) for held in model.parameters], section, parts)


def build_optimizer(
    named: Iterable[tuple[str, Tensor]], section: OptimSection, parts: Parts | None = None
) -> torch.optim.Optimizer:
    """Build the optimizer that ``section`` chooses for the trainable parameters among ``named``.

    ``parts``: functions that return the arguments for a distributed model. By default, parameters are unsharded, and
    all two-dimensional parameters are matrices.
    """
    named, build = list(named), optimizers.get(section.name).load()
    parameters = [each for _, each in named]
    whole: Parts = {
        "matrices": partial(Matrices.whole, parameters),
        "sums": partial(Sums.whole, parameters),
        "rounding": partial(Rounding.whole, parameters),
    }
    asked = {name: make() for name, make in {**whole, **(parts or {})}.items() if takes(section, name)}
    optimizer = build(parameter_groups(named, section), section, **asked)
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise UserError(
            f"optim={section.name} builds {optimizer!r}, not a torch.optim.Optimizer; return one from the function "
            f"with @serried.register_optimizer({section.name!r}), or use optim=adamw"
        )
    if section.offload:
        optimizer = Offloaded(optimizer, takes_verdict=takes_verdict(optimizer))
    if takes_verdict(optimizer) and parameters_of(optimizer):
        create_state(optimizer)  # changes no parameter, and allocates the memory of the state early
    return optimizer


def can_offload(section: OptimSection) -> bool:
    """Return whether the optimizer can update parameters one at a time, as offloading requires."""
    return not (takes(section, "matrices") or takes(section, "sums"))


def check_optimizer(section: OptimSection, model: nn.Module, plan: ParallelPlan, layout: Layout) -> str:
    """Check that the optimizer supports ``model``, which is not sharded yet, and ``layout``.

    Returns:
        A note for the plan on the share of the parameters that an optimizer for matrices updates with its own rule;
            empty for other optimizers.

    Raises:
        UserError: the optimizer does not support this model or this layout, or cannot be offloaded.
    """
    if section.offload and not can_offload(section):
        raise UserError(
            f"optim.offload=true updates one parameter at a time, but optim={section.name} needs all parameters at "
            "once; use optim.offload=false, or optim=adamw8bit optim.offload=true"
        )
    # Imported here, so that importing this module does not change the order in which optimizers are registered.
    from serried.trainer.optim.algorithms.quantized_adamw_config import QuantizedAdamSection

    trained = {name: each for name, each in model.named_parameters() if each.requires_grad}
    if isinstance(section, QuantizedAdamSection) and layout.tensor > 1:
        specs = shard_specs(model, plan, layout)
        check_columns(section.name, [specs[name] for name in trained], layout)
    if takes(section, "rounding") and not plan.units:
        raise UserError(
            f"optim={section.name} stores weights in bf16, but {type(model).__name__} may compute in other dtypes, as "
            "its parallel_plan() has no units; use optim=adamw"
        )
    if not takes(section, "matrices"):
        return ""
    names = matrix_names({name: each.shape for name, each in trained.items()}, plan.blocks_in(model))
    if not names:
        raise UserError(
            f"optim={section.name} updates the matrices of repeated blocks, but the model has none; return "
            "ParallelPlan(blocks=...) from parallel_plan(), or use optim=adamw"
        )
    inside, total = (sum(trained[name].numel() for name in which) for which in (names, trained))
    return f" for {inside:,} of {total:,} parameters"


def takes_verdict(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether ``step`` reads ``grad_scale`` and ``found_inf`` on the device.

    Such a step has no effect if ``found_inf`` is 1. torch's optimizers declare this to ``torch.amp.GradScaler`` with
    this private attribute; there is no public one. torch's fused SGD declares it too, but leaves its momentum
    uninitialized after a rejected first step.
    """
    return getattr(optimizer, "_step_supports_amp_scaling", False) and not isinstance(optimizer, torch.optim.SGD)


@torch.no_grad()
def take_step(optimizer: torch.optim.Optimizer, divisor: Tensor, rejected: Tensor) -> None:
    """Update the parameters with their gradients divided by ``divisor``, and free the gradients.

    A ``rejected`` step is rejected on every rank. It changes no bit of the parameters or the optimizer state, and
    creates no state. An optimizer that does not read ``found_inf`` on the device is not called in a rejected step, so
    the host waits for the device at every step. The host also waits if the parameters are in host memory.
    """
    # Blocking copies: torch's optimizers copy to the host without blocking, and read before the copy is complete.
    device = next((parameter.device for parameter in parameters_of(optimizer)), rejected.device)
    divisor, rejected = divisor.to(device), rejected.to(device)
    if takes_verdict(optimizer):
        optimizer.grad_scale = divisor.float()  # type: ignore[attr-defined]
        optimizer.found_inf = rejected.float()  # type: ignore[attr-defined]
        optimizer.step()
    elif not rejected.item():
        for parameter in parameters_of(optimizer):
            if parameter.grad is not None:
                local(parameter.grad).div_(divisor)
        optimizer.step()
    optimizer.zero_grad()


@torch.no_grad()
def create_state(optimizer: torch.optim.Optimizer) -> None:
    """Create the optimizer state as the first step does, so that a checkpoint can be loaded into it.

    This changes the parameters, the state and the values of the groups, unless ``takes_verdict(optimizer)`` is true.
    """
    for parameter in parameters_of(optimizer):
        parameter.grad = zero_gradient(parameter)
    one = torch.ones((), device=parameters_of(optimizer)[0].device)
    take_step(optimizer, one, one if takes_verdict(optimizer) else one - 1)


def parameters_of(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Return all parameters of the optimizer, group by group."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def learning_rate(step: int, steps: int, peak: float, section: ScheduleSection) -> float:
    """Return the learning rate of optimizer step ``step`` (1 is the first, ``steps`` the last).

    Warm-up is linear and reaches ``peak`` at its last step. Then the schedule determines the learning rate.
    """
    section = section.with_warmup_steps(steps)
    if step <= section.warmup_steps:
        return peak * step / section.warmup_steps
    return float(schedules.get(section.name).load()(step, steps, peak, section))
