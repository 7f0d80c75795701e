"""Layouts that fit the memory of a GPU, for a plan that does not."""

from collections.abc import Iterator, Mapping
from itertools import product
from typing import Any

from torch import nn

from serried.configs.errors import UserError
from serried.configs.schema import RunConfig
from serried.parallel.checks import check_layout
from serried.parallel.mesh import gradient_accumulation, resolve_layout
from serried.parallel.plan import ParallelPlan
from serried.trainer.plan.memory import Sizes, planned_memory
from serried.trainer.task import Task

_DEGREES = (1, 2, 4, 8)
_CONTEXT_DEGREES = (*_DEGREES, 16, 32)
_PER_NODE = 8
"""Tensor ranks exchange much: they stay within a node, with the context ranks that are beside them."""


def fitting(config: RunConfig, task: Task, processes: int, model: nn.Module, plan: ParallelPlan, limit: int) -> str:
    """Return the overrides with which a rank needs at most ``limit`` bytes, in a clause; on more processes if none of
    the layouts of ``processes`` does."""
    for more in (1, 2, 4, 8, 16):
        for overrides in _candidates(config):
            changed = _changed(config, overrides)
            try:
                layout = resolve_layout(changed.parallel, processes * more)
                accumulation = gradient_accumulation(changed.trainer, layout)
                check_layout(changed, layout, accumulation)
                needed = planned_memory(changed, task, accumulation, Sizes(changed, layout, model, plan)).total
            except UserError:
                continue
            if needed <= limit:
                words = [f"{key}={str(value).lower()}" for key, value in overrides.items()]
                return f"these fit: {' '.join([*_more(config, more), *words])}"
    return f"no layout of up to {processes * 16} processes fits; use shorter samples or a smaller model"


def _candidates(config: RunConfig) -> Iterator[dict[str, Any]]:
    """Yield overrides that save memory, the fewest and least costly first."""
    parallel, trainer = config.parallel, config.trainer
    syncs = [False] if parallel.sync_every_micro_batch else [False, True]
    micro_batches = [0] if trainer.micro_batch == 1 else [0, 1]
    modes = {"none": ["", "selective", "full"], "selective": ["", "full"]}
    checkpoints = modes.get(trainer.activation_checkpoint, [""]) if trainer.activation_memory_budget == 1 else [""]
    degrees = [
        (tensor, context, pipeline, ring)
        for pipeline, context, tensor in product(_DEGREES, _CONTEXT_DEGREES, _DEGREES)
        for ring in ([False, True] if context > 1 and parallel.context_method == "gather" else [False])
        if tensor == 1 or tensor * context <= _PER_NODE
    ]
    found = []
    for micro_batch, sync, checkpoint, degree in product(micro_batches, syncs, checkpoints, degrees):
        tensor, context, pipeline, ring = degree
        overrides: dict[str, Any] = {"trainer.activation_checkpoint": checkpoint} if checkpoint else {}
        overrides |= {"trainer.micro_batch": micro_batch} if micro_batch else {}
        overrides |= {"parallel.sync_every_micro_batch": True} if sync else {}
        overrides |= {"parallel.context_method": "ring"} if ring else {}
        axes = {"tensor": tensor, "context": context, "pipeline": pipeline}
        overrides |= {f"parallel.{axis}": degree for axis, degree in axes.items() if degree != getattr(parallel, axis)}
        found.append((len(overrides), pipeline, tensor * context, overrides))
    return (overrides for *_, overrides in sorted(found, key=lambda each: each[:3]))


def _changed(config: RunConfig, overrides: Mapping[str, Any]) -> RunConfig:
    sections: dict[str, dict[str, Any]] = {"parallel": {}, "trainer": {}}
    for key, value in overrides.items():
        section, _, name = key.partition(".")
        sections[section][name] = value
    return config.model_copy(
        update={name: getattr(config, name).model_copy(update=update) for name, update in sections.items()}
    )


def _more(config: RunConfig, factor: int) -> list[str]:
    if factor == 1:
        return []
    nodes, processes = config.launch.nodes, config.launch.processes or 1
    return [f"launch.nodes={nodes * factor}"] if nodes else [f"launch.processes={processes * factor}"]
