"""How long a step takes, by the work and the exchanges that its trace counted and rates that were measured."""

from collections import defaultdict
from collections.abc import Mapping, Sequence

from serried.parallel.clock import Cost, duration
from serried.parallel.mesh import ZERO_BUBBLE_SCHEDULES, Layout
from serried.parallel.phases import BACKWARD, FORWARD, OPTIMIZER
from serried.parallel.traffic import Flow
from serried.trainer.plan.measured_rates import MeasuredRates
from serried.trainer.plan.parts import Work
from serried.trainer.plan.seconds import Step, wire
from serried.trainer.plan.traced import TracedStage

_PART_OF_AXIS = {"fsdp": "data", "replicate": "data", "expert fsdp": "data", "world": "data"}
"""Other axes are parts of their own name; messages of a pipeline are on its timeline."""


def traced_step(
    stages: Sequence[TracedStage], flows: Sequence[Flow], layout: Layout, accumulation: int, measured: MeasuredRates
) -> Step:
    """Return how long a step takes."""
    forward, backward = ([_parts(stage, phase, measured) for stage in stages] for phase in (FORWARD, BACKWARD))
    count = len(stages)
    parts: dict[str, float] = defaultdict(float)
    for of_stage in (*forward, *backward):
        for name, seconds in of_stage.items():
            parts[name] += accumulation * seconds / count
    if layout.pipeline > 1:
        parts["pipeline"] = _played(forward, backward, layout, accumulation, flows, measured) - sum(parts.values())
    parts["optimizer"] = sum(sum(_parts(stage, OPTIMIZER, measured).values()) for stage in stages) / count
    computes = {
        when: accumulation * sum(sum(each.values()) for each in of) / count
        for when, of in (("forward", forward), ("backward", backward))
    }
    for (when, part), seconds in _exchanged(flows, layout, measured).items():
        hidden = measured.hidden * min(seconds, computes.get(when, 0.0)) if part == "data" else 0.0
        parts["optimizer" if when == "end" else part] += seconds - hidden
    return Step(sum(parts.values()), {name: seconds for name, seconds in parts.items() if seconds})


def _parts(stage: TracedStage, phase: str, measured: MeasuredRates) -> dict[str, float]:
    """Return the seconds of a phase: of one micro-batch, or of the optimizer."""
    work, rates, device = stage.step.work.get(phase, Work()), measured.rates, measured.cluster.device
    peak = device.peak(measured.precision)
    assert peak
    return {
        "products": sum(times * measured.product_seconds(shape) for shape, times in work.products.items()),
        "attention": work.attention_flops / (peak * rates.attention),
        "memory": work.moved_bytes / (device.memory_rate * rates.memory) + work.launches * rates.launch,
    }


def _exchanged(flows: Sequence[Flow], layout: Layout, measured: MeasuredRates) -> Mapping[tuple[str, str], float]:
    """Return the seconds of exchanges, by phase and part."""
    seconds: dict[tuple[str, str], float] = defaultdict(float)
    for flow in flows:
        if flow.axis in ("pipeline", "ends", "stage"):
            continue
        rate, of_call = wire(layout, flow.axis, measured.cluster, measured.rates)
        seconds[flow.when, _PART_OF_AXIS.get(flow.axis, flow.axis)] += flow.bytes / rate + flow.calls * of_call
    return seconds


def _played(
    forward: Sequence[Mapping[str, float]],
    backward: Sequence[Mapping[str, float]],
    layout: Layout,
    accumulation: int,
    flows: Sequence[Flow],
    measured: MeasuredRates,
) -> float:
    """Return the seconds of a pipeline's step. Of its ranks the first, the second and the last were traced."""
    per_rank = layout.stages // layout.pipeline
    costs = []
    for stage in range(layout.stages):
        rank = layout.pipeline_of(stage)
        traced = min(rank, 1) if rank < layout.pipeline - 1 else len(forward) - 1
        weights = backward[traced]["products"] / 2 if layout.schedule in ZERO_BUBBLE_SCHEDULES else 0.0
        there, back = (sum(each[traced].values()) / per_rank for each in (forward, backward))
        costs.append(Cost(there, back, weights / per_rank))
    sent = [flow for flow in flows if flow.axis == "pipeline" and flow.calls]
    rate, of_call = wire(layout, "pipeline", measured.cluster, measured.rates)
    transfer = max((flow.bytes / flow.calls for flow in sent), default=0.0) / rate + of_call
    return duration(layout, accumulation, costs, transfer)
