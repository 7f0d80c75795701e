"""Mesh axes along which ranks share the work on one sample.

To add an axis, write a file with a ``ModelAxis`` and add it to ``AXES``.
"""

from collections.abc import Sequence
from typing import Protocol

from torch import nn

from serried.parallel.axes.context import CONTEXT
from serried.parallel.axes.expert import EXPERT, refuse_misfits
from serried.parallel.axes.tensor import TENSOR
from serried.parallel.layout.local_shards import unshardable
from serried.parallel.layout.mesh import Coordinates, Layout
from serried.parallel.layout.process_groups import Groups
from serried.parallel.layout.shard_specs import ShardSpec, Slice, sharding, stages_of
from serried.parallel.plan import ParallelPlan


class ModelAxis(Protocol):
    """Sharding of a model along one mesh axis, derived from its plan."""

    axis: str
    """Name of the mesh axis."""

    def slices(self, plan: ParallelPlan, layout: Layout, name: str, shape: Sequence[int]) -> tuple[Slice, ...]:
        """Return how parameter ``name`` is sharded along the axis; () if it is replicated."""

    def is_partial(self, plan: ParallelPlan, layout: Layout, name: str) -> bool:
        """Return whether the gradients of parameter ``name`` must be summed over the axis."""

    def apply(self, module: nn.Module, plan: ParallelPlan, layout: Layout, place: Coordinates, groups: Groups) -> None:
        """Replace the parameters of ``module`` by the slices of the rank at ``place``; add collectives to its forward.

        The parameters may be on meta or have values.

        Raises:
            UserError: The plan lacks a declaration that the axis needs.
        """


AXES: tuple[ModelAxis, ...] = (TENSOR, EXPERT, CONTEXT)


def active_axes(layout: Layout) -> list[ModelAxis]:
    """Return the axes with a degree above 1."""
    return [axis for axis in AXES if getattr(layout, axis.axis) > 1]


def shard_specs(model: nn.Module, plan: ParallelPlan, layout: Layout) -> dict[str, ShardSpec]:
    """Return the shard spec of every parameter of the full ``model``, which may be on meta, by name.

    Raises:
        UserError: The plan lacks a declaration that an axis needs, or the layout does not fit the experts.
    """
    refuse_misfits(model, plan, layout)
    whole, axes = unshardable(model), active_axes(layout)
    stages = stages_of([name for name, _ in model.named_parameters()], plan, layout)
    specs = {}
    for name, parameter in model.named_parameters():
        shape = tuple(parameter.shape)
        slices = [cut for axis in axes for cut in axis.slices(plan, layout, name, shape)]
        if layout.is_sharded and name not in whole:
            slices.append(sharding(slices, shape, layout))
        is_divided = any("expert" in cut.axes for cut in slices)  # experts are sharded over the ranks of all other axes
        sums_over = tuple(axis.axis for axis in axes if not is_divided and axis.is_partial(plan, layout, name))
        holders = tuple(layout.pipeline_of(stage) for stage in stages[name])
        specs[name] = ShardSpec(name, shape, tuple(slices), holders, sums_over)
    return specs
