"""Output of ``serried plan``: memory, communication, suggested overrides and step time."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import suppress

import torch

from serried.configs.divisors import divisors
from serried.configs.errors import UserError
from serried.configs.formats import duration, short, size
from serried.configs.schema.sections import DEFAULT_MINUTES_BETWEEN, RunConfig
from serried.parallel.layout.checks import with_values
from serried.parallel.layout.mesh import gradient_accumulation
from serried.parallel.step_phases import BACKWARD
from serried.planner.advice import KEEPS_LESS, Advice, Planned, advice
from serried.planner.alternatives import Faster, Search, faster
from serried.planner.devices import Device
from serried.planner.memory_formula import RECEIVE_BUFFERS, WHY_RECEIVE_BUFFERS
from serried.planner.plan_terms import IN_HOST_MEMORY, Fits, Memory
from serried.planner.step_plan import FRAGMENTED_SHARE, RESERVED_BYTES, TRACED, StepPlan, with_unused
from serried.planner.time.planned_time import Timed, planned_device
from serried.planner.time.time_model import Step
from serried.planner.trace.cuda_allocator import has_expandable_segments
from serried.planner.trace.traced_step import CannotTrace, memory_of, trace_step
from serried.planner.traffic import Flow
from serried.trainer.precision import LOW_DTYPES
from serried.trainer.task import RunTask

_ADVICE_LINES = 3
_MUCH = 0.1
_WORTH_NAMING, _WORTH_NAMING_OF_TIME = 0.005, 0.01
_DAY, _HOUR = 86400, 3600
_NAMES = {
    "products": "matrix products",
    "attention": "attention",
    "memory": "memory-bound operations",
    "recomputed": "recomputation",
    "tensor": "tensor-parallel communication",
    "context": "context-parallel communication",
    "expert": "expert-parallel communication",
    "data": "data-parallel communication",
    "pipeline": "pipeline bubbles",
    "optimizer": "optimizer",
    "stragglers": "stragglers in large groups",
}
"""Names of the parts of a step, as printed."""
_OWN_WORK = ("products", "attention", "memory", "optimizer")


def plan_lines(config: RunConfig, task: RunTask, plan: StepPlan) -> Iterator[tuple[str, str]]:
    """Yield the lines of ``plan`` as (name, text). The last line states how reliable the plan is."""
    fits, memory = plan.fits, plan.memory
    if fits is not None:
        yield "fits", _fits(fits, memory)
        memory = with_unused(memory)
    yield ("" if fits is not None else "needs"), _parts(memory)
    buffers = memory.parts.get(RECEIVE_BUFFERS, 0)
    if buffers > _MUCH * memory.peak:
        yield "WARNING", f"{size(buffers)} are {RECEIVE_BUFFERS}: {WHY_RECEIVE_BUFFERS}"
    if plan.flows:
        yield from _travels(plan.flows)
    if fits is not None and fits.answer != "yes":
        planned = Planned(config, task, plan.layout.world)
        traced = () if planned.memory.activations or plan.found != TRACED else _traced_advice(planned, task, plan)
        for number, each in enumerate(advice(planned, BACKWARD, 0.9 * fits.usable, traced)[:_ADVICE_LINES]):
            yield "" if number else "better", f"{each.override:<42} saves about {size(each.saved)}{each.note}"
        if fits.answer == "no" and planned.memory.activations:
            yield from _fitting_lines(Search(planned, task, plan))
    if plan.time is not None:
        yield from time_lines(config, plan.time)
    if fits is not None and fits.answer == "yes":
        yield from _faster_lines(faster(Planned(config, task, plan.layout.world), plan))
    if fits is not None and (device := planned_device(config)) and device.lacks_bf16 and _computes_in_bf16(config):
        yield "WARNING", no_bf16(config, device)
    if isinstance(plan.time, Timed) and (text := _far_apart(config, plan.time.step.seconds)):
        yield "WARNING", text
    trust = f"; {plan.time.trust}" if isinstance(plan.time, Timed) else ""
    yield "trust", f"memory: {plan.found}{_assumed(plan)}{trust}"


def _fitting_lines(search: Search) -> Iterator[tuple[str, str]]:
    """Yield overrides with which the run fits, and the closest overrides that do not fit."""
    for number, each in enumerate(search.found()):
        text = "; ".join([f"{size(each.fits.needed)}, {size(each.fits.margin)} are left", *each.changes()])
        yield "" if number else "fits with", f"{each.words():<42} {text}"
    if nearest := search.nearest():
        yield "nearest", f"{nearest.words():<42} {size(-nearest.fits.margin)} are missing"


def _faster_lines(found: Sequence[Faster]) -> Iterator[tuple[str, str]]:
    """Yield overrides that save time. Each line assumes the overrides of the lines above it."""
    for number, each in enumerate(found):
        more = f"{size(abs(each.bytes))} {'more' if each.bytes > 0 else 'less'}" if each.bytes else "no more memory"
        above = ", with the lines above" if number else ""
        yield "" if number else "faster", f"{each.override:<42} about {each.saved:.0%} less time, {more}{above}"


def _computes_in_bf16(config: RunConfig) -> bool:
    return LOW_DTYPES[config.precision.name] == torch.bfloat16


def no_bf16(config: RunConfig, device: Device) -> str:
    """Return the advice for a device without bf16."""
    return (
        f"precision={config.precision.name}: {device.name} has no hardware support for bf16, so a run is refused; "
        "use precision=fp16"
    )


def _traced_advice(planned: Planned, task: RunTask, plan: StepPlan) -> Iterator[Advice]:
    """Yield overrides that keep less for the backward, with savings from a trace: there is no formula for them."""
    trainer = planned.config.trainer
    changes: list[tuple[str, object, str]] = []
    is_free = trainer.activation_memory_budget == 1 and trainer.activation_checkpoint in KEEPS_LESS
    if planned.plan.blocks and is_free:
        changes.append(("trainer.activation_checkpoint", "full", ", but recomputes blocks"))
    changes += [("trainer.micro_batch", samples, " of activations") for samples in divisors(trainer.micro_batch)[-2:-1]]
    for key, value, note in changes:
        config = with_values(planned.config, {key: value})
        with suppress(CannotTrace, UserError):
            stages = trace_step(config, task, plan.layout, gradient_accumulation(config.trainer, plan.layout))
            yield Advice(f"{key}={value}", plan.memory.peak - memory_of(stages).peak, note)


def _fits(fits: Fits, memory: Memory) -> str:
    much = f"{size(fits.needed)} of {size(fits.usable)} usable on each GPU"
    if fits.held is not None:
        much += f", {size(fits.held)} in use"
    where = f", at the peak in {memory.phase}" if memory.phase else ""
    rank = f" of rank {memory.rank}" if memory.rank else ""
    left = f"{size(fits.margin)} are left" if fits.margin >= 0 else f"{size(-fits.margin)} are missing"
    if fits.margin < 0 and fits.answer == "tight":
        left += ": torch's allocator must release unused memory"
    return f"{fits.answer}: {much}{where}{rank}; {left}"


def _parts(memory: Memory) -> str:
    least = _WORTH_NAMING * memory.peak
    here = {kind: part for kind, part in memory.parts.items() if not kind.endswith(IN_HOST_MEMORY)}
    named = {kind: value for kind, value in here.items() if value >= least and kind != "other"}
    rest = memory.peak - sum(named.values())
    texts = [f"{kind} {size(value)}" for kind, value in named.items()]
    texts += [f"other {size(rest)}"] if rest >= least else []
    apart = [f"{kind} {size(part)}" for kind, part in memory.parts.items() if kind not in here]
    return "; ".join([", ".join(texts), *apart])


def _travels(flows: tuple[Flow, ...]) -> Iterator[tuple[str, str]]:
    """Yield one line for each axis with the bytes that a rank sends in a step, largest first."""
    axes: dict[tuple[str, int], dict[str, int]] = defaultdict(lambda: defaultdict(int))
    for flow in flows:
        axes[flow.axis, flow.ranks][flow.kind.replace("_", "-")] += flow.bytes
    whole = sum(flow.bytes for flow in flows)
    shown = sorted(axes.items(), key=lambda each: -sum(each[1].values()))
    first = f"{size(whole)} per rank and step: "
    for number, ((axis, ranks), kinds) in enumerate(shown):
        sent = sum(kinds.values())
        if number and sent < _WORTH_NAMING * whole:
            continue
        parts = ", ".join(f"{kind} {size(value)}" for kind, value in sorted(kinds.items(), key=lambda each: -each[1]))
        yield "" if number else "sends", f"{'' if number else first}{axis} over {ranks} ranks {size(sent)} ({parts})"


def _far_apart(config: RunConfig, step_seconds: float) -> str | None:
    """Return a line on the work that a crash would lose, if checkpoints are more than an hour apart."""
    checkpoint = config.checkpoint
    steps = min(checkpoint.every, config.trainer.last_step)
    if checkpoint.minutes_between or steps * step_seconds <= _HOUR:
        return None
    return (
        f"{steps:,} steps without a checkpoint take {duration(steps * step_seconds)}, and this work is lost if the run "
        f"is killed; add checkpoint.every_minutes={DEFAULT_MINUTES_BETWEEN}"
    )


def _assumed(plan: StepPlan) -> str:
    if plan.capacity is None:
        return ""
    others = f"{size(RESERVED_BYTES)} for CUDA and NCCL are assumed"
    if plan.memory.unused is None:
        return f"; {FRAGMENTED_SHARE:.0%} for fragmentation and {others}"
    kind = "expandable segments" if has_expandable_segments() else "segments of fixed size"
    return f"; fragmentation by the rules of torch's allocator with {kind}; {others}"


def time_lines(config: RunConfig, time: Timed | str) -> Iterator[tuple[str, str]]:
    """Yield the lines on the step time as (name, text); a single line if it is unknown."""
    if isinstance(time, str):
        yield "step", f"unknown: {time}"
        return
    step, device = time.step, time.cluster.device
    took = seconds_text(step.seconds, *time.range)
    yield "step", f"{took} on {time.processes} {device.name}: {_shares(step)}"
    yield "rate", _rate(config, time)
    yield "bottleneck", _binds(step)


def seconds_text(*seconds: float) -> str:
    """Format a time, or a time and its range: ``1.5 s (1.3 to 1.7)``."""
    unit, factor = ("s", 1) if seconds[0] >= 1 else ("ms", 1000)
    scaled = (second * factor for second in seconds)
    first, *span = (f"{number:.3g}" if number < 999.5 else f"{number:,.0f}" for number in scaled)  # avoids 1.04e+03
    return f"{first} {unit}" + (f" ({' to '.join(span)})" if span else "")


def _shares(step: Step) -> str:
    shown = sorted(step.parts.items(), key=lambda each: -each[1])
    return ", ".join(
        f"{_NAMES[name]} {seconds / step.seconds:.0%}"
        for name, seconds in shown
        if seconds >= _WORTH_NAMING_OF_TIME * step.seconds
    )


def _rate(config: RunConfig, time: Timed) -> str:
    seconds, ranks, device = time.step.seconds, time.processes, time.cluster.device
    each = time.samples * time.weight_per_sample
    low, high = (each / ranks / seconds for seconds in reversed(time.range))
    text = f"{each / ranks / seconds:,.0f} {time.unit}/s per device ({low:,.0f} to {high:,.0f})"
    if time.flops_per_sample and device.measured is None and (peak := device.peak(config.precision.name)):
        text += f", MFU {time.samples * time.flops_per_sample / seconds / ranks / peak:.0%}"
    whole = (config.plan.tokens if time.unit == "tokens" else None) or each * config.trainer.steps
    took = whole / each * seconds
    hours = took * ranks / 3600
    text += f"; {short(whole)} {time.unit}: {duration(took) if took < 100 * _DAY else f'{took / _DAY:,.0f} days'}"
    text += f", {short(hours)} device-hours"
    return text + (
        f", {short(hours * config.plan.price)} at {config.plan.price:g} per hour" if config.plan.price else ""
    )


def _binds(step: Step) -> str:
    def largest(parts: dict[str, float]) -> str:
        name = max(parts, key=lambda each: parts[each])
        return f"{_NAMES[name]}, {parts[name] / step.seconds:.0%} of the step"

    waits = {name: seconds for name, seconds in step.parts.items() if name not in _OWN_WORK}
    text = largest({**step.parts})
    if sum(waits.values()) > _WORTH_NAMING_OF_TIME * step.seconds and largest(waits) != text:
        text += f"; largest overhead: {largest(waits)}"
    return text
