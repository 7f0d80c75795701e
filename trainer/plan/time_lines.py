"""The lines of a plan about time: how long a step takes, and what that adds up to."""

from collections.abc import Iterator

from serried.configs.formats import duration, short
from serried.configs.schema import RunConfig
from serried.trainer.plan.planned_time import Timed
from serried.trainer.plan.seconds import Step

_DAY = 86400
_NAMES = {
    "products": "matrix products",
    "attention": "attention",
    "memory": "operations that wait for memory",
    "recomputed": "blocks computed again",
    "tensor": "exchanges of tensor ranks",
    "context": "exchanges of context ranks",
    "expert": "exchanges of expert ranks",
    "data": "gathers and sums of FSDP",
    "pipeline": "waiting in the pipeline",
    "optimizer": "optimizer",
    "stragglers": "waiting in large groups",
}
"""Of the parts of a step."""
_OWN_WORK = ("products", "attention", "memory", "optimizer")
_WORTH_NAMING = 0.01


def time_lines(config: RunConfig, time: Timed | str) -> Iterator[tuple[str, str]]:
    """Yield the lines as (name, text); a single one where the time is unknown."""
    if isinstance(time, str):
        yield "step", f"unknown: {time}"
        return
    step, device = time.step, time.cluster.device
    took = seconds_text(step.seconds, *time.range)
    yield "step", f"{took} on {time.processes} {device.name}: {_parts(step)}"
    yield "rate", _rate(config, time)
    yield "binds", _binds(step)


def seconds_text(*seconds: float) -> str:
    """Format a number, or one and its range: ``1.5 s (1.3 to 1.7)``."""
    unit, factor = ("s", 1) if seconds[0] >= 1 else ("ms", 1000)
    scaled = (each * factor for each in seconds)
    first, *span = (f"{each:.3g}" if each < 999.5 else f"{each:,.0f}" for each in scaled)  # not 1.04e+03
    return f"{first} {unit}" + (f" ({' to '.join(span)})" if span else "")


def _parts(step: Step) -> str:
    shown = sorted(step.parts.items(), key=lambda each: -each[1])
    return ", ".join(
        f"{_NAMES[name]} {seconds / step.seconds:.0%}"
        for name, seconds in shown
        if seconds >= _WORTH_NAMING * step.seconds
    )


def _rate(config: RunConfig, time: Timed) -> str:
    seconds, ranks, device = time.step.seconds, time.processes, time.cluster.device
    each = time.samples * time.weight_per_sample
    low, high = (each / ranks / seconds for seconds in reversed(time.range))
    text = f"{each / ranks / seconds:,.0f} {time.unit}/s a device ({low:,.0f} to {high:,.0f})"
    if time.flops_per_sample and device.measured is None and (peak := device.peak(config.precision.name)):
        text += f", MFU {time.samples * time.flops_per_sample / seconds / ranks / peak:.0%}"
    whole = (config.plan.tokens if time.unit == "tokens" else None) or each * config.trainer.steps
    took = whole / each * seconds
    hours = took * ranks / 3600
    text += f"; {short(whole)} {time.unit}: {duration(took) if took < 100 * _DAY else f'{took / _DAY:,.0f} days'}"
    text += f", {short(hours)} device-hours"
    return text + (
        f", {short(hours * config.plan.price)} at {config.plan.price:g} an hour" if config.plan.price else ""
    )


def _binds(step: Step) -> str:
    def largest(parts: dict[str, float]) -> str:
        name = max(parts, key=lambda each: parts[each])
        return f"{_NAMES[name]}, {parts[name] / step.seconds:.0%} of the step"

    waits = {name: seconds for name, seconds in step.parts.items() if name not in _OWN_WORK}
    text = largest({**step.parts})
    if sum(waits.values()) > _WORTH_NAMING * step.seconds and largest(waits) != text:
        text += f"; apart from the model's own work, most is {largest(waits)}"
    return text
