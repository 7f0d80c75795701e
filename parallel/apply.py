"""The one place that knows the order in which a model is cut, put on its device and given its first weights."""

from collections.abc import Callable

import torch
from torch import nn

from serried.configs.schema import ParallelSection
from serried.parallel.data import Replicated, Sharded, Single
from serried.parallel.initialize import initialize
from serried.parallel.mesh import Layout
from serried.parallel.phases import Phases
from serried.parallel.plan import ParallelPlan


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
) -> Single:
    """Cut ``model`` (on meta) by ``plan``, allocate this rank's part on ``device`` and initialise it.

    Without ``std_of`` the memory is left as it is, for weights that are read from a checkpoint. ``low_dtype`` is the
    type of matrix products, None for fp32. ``phases`` are told what is computed. Build the optimizer after this:
    cutting replaces parameters.
    """
    phases = phases or Phases()
    if layout.strategy in ("fsdp", "hsdp"):
        sharded = Sharded(model, layout, device, phases, plan, low_dtype, section)
        _materialize(model, std_of, seed, device)
        return sharded
    _materialize(model, std_of, seed, device)
    if layout.strategy == "ddp":
        return Replicated(model, layout, device, phases, low_dtype)
    return Single(model, layout, device, phases, low_dtype)


def _materialize(
    model: nn.Module, std_of: Callable[[str], float | None] | None, seed: int, device: torch.device
) -> None:
    model.to_empty(device=device)
    if std_of is not None:
        initialize(model, std_of, seed)
