"""The lines of ``serried plan`` about memory and messages: does it fit, what ranks send, what would help."""

from collections import defaultdict
from collections.abc import Iterator

from torch import nn

from serried.configs.formats import size
from serried.configs.schema import RunConfig
from serried.parallel.mesh import Layout
from serried.parallel.phases import BACKWARD
from serried.parallel.plan import ParallelPlan
from serried.parallel.traffic import Flow
from serried.trainer.plan.advice import Planned, advice
from serried.trainer.plan.memory import formula_memory, planned_flows, planned_memory
from serried.trainer.plan.parts import Amount, Fits, Memory
from serried.trainer.plan.traced import CannotTrace, flows_of, memory_of, trace_step
from serried.trainer.task import Task

_RESERVED_BYTES = 2 * 2**30
"""Of a GPU, for the CUDA context, libraries and NCCL: assumed."""
_FRAGMENTED_SHARE = 0.05
"""Of what comes and goes in a step, which the allocator loses between blocks: assumed."""
_LASTING = ("parameters", "optimizer state", "average of weights", "gradients")
_ADVICE_LINES = 3
_WORTH_NAMING = 0.005


def memory_lines(
    config: RunConfig, task: Task, layout: Layout, accumulation: int, model: nn.Module, plan: ParallelPlan,
    capacity: int | None,
) -> Iterator[tuple[str, str]]:  # fmt: skip
    """Yield the lines as (name, text). ``capacity``: bytes of the GPU that is planned for; None: none is."""
    flows = planned_flows(config, layout, accumulation, model, plan)
    memory = formula_memory(planned_memory(config, task, layout, accumulation, model, plan))
    found = "by formula, plan.mode=trace to trace it"
    if config.plan.mode == "trace":
        try:
            stages = trace_step(config, task, layout, accumulation)
            memory, flows, found = memory_of(stages), flows_of(stages), "traced"
        except CannotTrace as error:
            found = f"by formula, as the step cannot be traced: {error}"
    if capacity is not None:
        fits = fits_of(memory, capacity)
        yield "fits", _fits(fits, memory)
        memory = with_assumed(memory)
    yield ("" if capacity is not None else "needs"), _parts(memory)
    if flows:
        yield from _travels(flows)
    if capacity is not None and fits.answer != "yes":
        planned = Planned(config, task, layout.world)
        for number, each in enumerate(advice(planned, BACKWARD, 0.9 * fits.usable)[:_ADVICE_LINES]):
            yield "" if number else "better", f"{each.override:<42} saves about {size(each.saved)}{each.note}"
    yield "trust", f"memory: {found}{_assumed(capacity)}"


def fits_of(memory: Memory, capacity: int) -> Fits:
    """Return whether ``memory`` fits a GPU of ``capacity`` bytes."""
    return Fits(with_assumed(memory).peak, capacity - _RESERVED_BYTES)


def with_assumed(memory: Memory) -> Memory:
    """Return ``memory`` and what the allocator loses."""
    passing = sum(part.value for kind, part in memory.parts.items() if kind not in _LASTING)
    parts = {**memory.parts, "fragmentation": Amount(_FRAGMENTED_SHARE * passing, "assumed")}
    return Memory(parts, memory.phase, memory.by_phase, memory.rank)


def _fits(fits: Fits, memory: Memory) -> str:
    much = f"{size(fits.needed)} of {size(fits.usable)} usable on each GPU"
    where = f", at the peak in {memory.phase}" if memory.phase else ""
    rank = f" of rank {memory.rank}" if memory.rank else ""
    left = f"{size(fits.margin)} are left" if fits.margin >= 0 else f"{size(-fits.margin)} are missing"
    return f"{fits.answer}: {much}{where}{rank}; {left}"


def _parts(memory: Memory) -> str:
    least = _WORTH_NAMING * memory.peak
    named = {kind: part.value for kind, part in memory.parts.items() if part.value >= least and kind != "other"}
    rest = memory.peak - sum(named.values())
    texts = [f"{kind} {size(value)}" for kind, value in named.items()]
    return ", ".join([*texts, *([f"other {size(rest)}"] if rest >= least else [])])


def _travels(flows: tuple[Flow, ...]) -> Iterator[tuple[str, str]]:
    """What a rank sends in a step, an axis a line, the most first."""
    axes: dict[tuple[str, int], dict[str, int]] = defaultdict(lambda: defaultdict(int))
    for flow in flows:
        axes[flow.axis, flow.ranks][flow.kind.replace("_", "-")] += flow.bytes
    whole = sum(flow.bytes for flow in flows)
    shown = sorted(axes.items(), key=lambda each: -sum(each[1].values()))
    first = f"{size(whole)} from each rank in a step: "
    for number, ((axis, ranks), kinds) in enumerate(shown):
        sent = sum(kinds.values())
        if number and sent < _WORTH_NAMING * whole:
            continue
        parts = ", ".join(f"{kind} {size(value)}" for kind, value in sorted(kinds.items(), key=lambda each: -each[1]))
        yield "" if number else "travels", f"{'' if number else first}{axis} over {ranks} ranks {size(sent)} ({parts})"


def _assumed(capacity: int | None) -> str:
    if capacity is None:
        return ""
    return f"; {_FRAGMENTED_SHARE:.0%} for fragmentation and {size(_RESERVED_BYTES)} for CUDA and NCCL are assumed"
