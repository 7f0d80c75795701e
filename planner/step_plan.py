"""Plan of a step: its memory, communication and time."""

from dataclasses import dataclass, replace
from typing import Any

from serried.configs.schema.sections import RunConfig
from serried.parallel.layout.mesh import AXES, Layout
from serried.planner.memory_formula import Sizes, formula_memory, planned_flows, planned_memory
from serried.planner.plan_terms import IN_HOST_MEMORY, Fits, Memory
from serried.planner.time.planned_time import Timed, UnknownTime, time_of
from serried.planner.trace.cuda_allocator import has_expandable_segments
from serried.planner.trace.traced_step import CannotTrace, Traced, flows_of, reserved_memory_of, trace_step
from serried.planner.traffic import Flow
from serried.trainer.task import RunTask

TRACED = "traced"
"""``StepPlan.found`` of a traced plan."""
RESERVED_BYTES = 2 * 2**30
"""Assumed bytes of the CUDA context, libraries and NCCL on a GPU."""
FRAGMENTED_SHARE = 0.05
"""Assumed fragmentation if the step is not traced, as a share of the memory that is allocated and freed in a step."""
_LASTING = ("parameters", "optimizer state", "average of weights", "gradients")


@dataclass(frozen=True)
class StepPlan:
    """Memory, communication and time of a step."""

    layout: Layout
    memory: Memory
    """Memory without the assumed parts."""
    found: str
    """How memory and flows were computed, as a clause."""
    flows: tuple[Flow, ...]
    capacity: int | None
    """Memory in bytes of the planned GPU; None if no GPU is planned for."""
    time: Timed | str | None
    """Time of a step. Text: the reason why it is unknown. None: it was not requested."""

    @property
    def fits(self) -> Fits | None:
        """Whether the memory suffices; None if no GPU is planned for."""
        return None if self.capacity is None else fits_of(self.memory, self.capacity)

    def as_data(self) -> dict[str, Any]:
        """Return the plan as plain data, with bytes per rank and seconds per step."""
        fits, flows = self.fits, [vars(flow) for flow in self.flows]
        return {
            "processes": self.layout.world,
            "layout": {axis: getattr(self.layout, axis) for axis in (*AXES, "expert")},
            "memory": {
                "found": self.found,
                "bytes": self.memory.peak,
                "phase": self.memory.phase,
                "rank": self.memory.rank,
                "parts": {kind: round(part) for kind, part in self.memory.parts.items()},
            },
            "fits": fits and {"answer": fits.answer, "needed": fits.needed, "usable": fits.usable, "held": fits.held},
            "flows": flows,
            "time": {"unknown": self.time} if isinstance(self.time, str) else self.time and self.time.as_data(),
        }


def plan_step(
    config: RunConfig, task: RunTask, accumulation: int, sizes: Sizes, capacity: int | None, *, is_timed: bool
) -> StepPlan:
    """Plan a step as set in ``config.plan``."""
    layout, flows = sizes.layout, planned_flows(config, accumulation, sizes)
    memory = formula_memory(planned_memory(config, task, accumulation, sizes))
    stages: list[Traced] = []
    found = "by formula (plan.mode=trace traces a step instead)"
    if config.plan.mode == "trace":
        try:
            stages = trace_step(config, task, layout, accumulation)
            memory, found = reserved_memory_of(stages, is_expandable=has_expandable_segments()), TRACED
            flows = flows if layout.is_replicated else flows_of(stages)  # the trace of DDP has one process
        except CannotTrace as error:
            found = f"by formula, because the step cannot be traced: {error}"
    time: Timed | str | None = None
    if is_timed:
        try:
            time = time_of(config, task, accumulation, sizes, stages, flows)
        except UnknownTime as error:
            time = str(error)
    return StepPlan(layout, memory, found, flows, capacity, time)


def fits_of(memory: Memory, capacity: int) -> Fits:
    """Return whether ``memory`` fits a GPU of ``capacity`` bytes."""
    needed = with_unused(memory).peak
    return Fits(needed, capacity - RESERVED_BYTES, None if memory.unused is None else memory.peak)


def with_unused(memory: Memory) -> Memory:
    """Return ``memory`` with the allocator's fragmentation included."""
    passing = sum(
        part for kind, part in memory.parts.items() if kind not in _LASTING and not kind.endswith(IN_HOST_MEMORY)
    )
    lost = FRAGMENTED_SHARE * passing if memory.unused is None else memory.unused
    return replace(memory, parts={**memory.parts, "fragmentation": lost})
