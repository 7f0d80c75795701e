"""The lines of a plan about time: how long a step takes, what that adds up to, and how far to trust it."""

from collections.abc import Iterator

import torch
from torch import nn

from serried.configs.formats import duration, short
from serried.configs.schema import RunConfig
from serried.parallel.mesh import Layout
from serried.parallel.plan import ParallelPlan
from serried.trainer.peak_flops import device_name
from serried.trainer.plan.devices import DEVICES, Cluster, Device, device_of, device_of_driver
from serried.trainer.plan.job import doubts, job_of, shape_of, unknown_why
from serried.trainer.plan.rates import OUTSIDE, RATES, WITHIN, software_for
from serried.trainer.plan.seconds import Job, Step, step_of
from serried.trainer.task import Task

_PER_NODE = 8
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


def planned_device(config: RunConfig) -> Device | None:
    """Return the device that ``config`` is planned for; None: this machine's, which is not in the catalogue.

    Raises:
        UserError: the config names one that is not.
    """
    if config.plan.device is not None:
        return device_of(config.plan.device)
    if torch.cuda.is_available():
        return device_of_driver(device_name(torch.device("cuda")))
    return device_of("h100")


def planned_cluster(config: RunConfig, device: Device) -> Cluster:
    """Return the nodes that ``config`` is planned for."""
    launched = config.launch.processes if config.launch.nodes else None
    return Cluster(device, config.plan.per_node or launched or _PER_NODE)


def time_lines(
    config: RunConfig, task: Task, layout: Layout, accumulation: int, model: nn.Module, plan: ParallelPlan
) -> Iterator[tuple[str, str]]:
    """Yield the lines as (name, text); a single one where the time is unknown."""
    device, shape = planned_device(config), shape_of(config, model, plan)
    if device is None:
        yield "step", f"unknown: this GPU is not in the catalogue; use plan.device={'|'.join(DEVICES)}"
        return
    if shape is None or not device.peak(config.precision.name):
        yield "step", f"unknown: {unknown_why(config, shape, device)}"
        return
    job = job_of(config, shape, layout, accumulation)
    cluster, software = planned_cluster(config, device), software_for(device.name)
    step = step_of(job, cluster, RATES[software])
    doubtful = [*doubts(job, cluster, software)]
    low, high = OUTSIDE if doubtful else WITHIN
    took = seconds_text(step.seconds, low * step.seconds, high * step.seconds)
    yield "step", f"{took} on {layout.world} {device.name}: {_parts(step)}"
    flops = task.flops_per_sample(sum(parameter.numel() for parameter in model.parameters()))
    yield "rate", _rate(config, job, step, (low, high), flops, device)
    yield "binds", _binds(step)
    assumed = "" if config.plan.device or torch.cuda.is_available() else "h100 is assumed (plan.device); "
    yield "trust", assumed + _trust(software, doubtful)


def seconds_text(*seconds: float) -> str:
    """Format a number, or one and its range: ``1.5 s (1.3 to 1.7)``."""
    unit, factor = ("s", 1) if seconds[0] >= 1 else ("ms", 1000)
    first, *span = (f"{each * factor:.3g}" for each in seconds)
    return f"{first} {unit}" + (f" ({' to '.join(span)})" if span else "")


def _parts(step: Step) -> str:
    shown = sorted(step.parts.items(), key=lambda each: -each[1])
    return ", ".join(
        f"{_NAMES[name]} {seconds / step.seconds:.0%}"
        for name, seconds in shown
        if seconds >= _WORTH_NAMING * step.seconds
    )


def _rate(
    config: RunConfig, job: Job, step: Step, span: tuple[float, float], flops: float | None, device: Device
) -> str:
    ranks, tokens = job.layout.world, job.samples * job.sequence
    low, high = (tokens / ranks / step.seconds / factor for factor in reversed(span))
    text = f"{tokens / ranks / step.seconds:,.0f} tokens/s a device ({low:,.0f} to {high:,.0f})"
    if flops and (peak := device.peak(job.precision)):
        text += f", MFU {job.samples * flops / step.seconds / ranks / peak:.0%}"
    whole = config.plan.tokens or tokens * config.trainer.steps
    seconds = whole / tokens * step.seconds
    hours = seconds * ranks / 3600
    text += f"; {short(whole)} tokens: {duration(seconds) if seconds < 100 * _DAY else f'{seconds / _DAY:,.0f} days'}"
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
        text += f"; beside the model's own work most is {largest(waits)}"
    return text


def _trust(software: str, doubtful: list[str]) -> str:
    if doubtful:
        return f"time is a rough guess: no published run has {', nor '.join(doubtful)} (rates of {software})"
    return f"time: rates of {software}; published runs that did not determine them are off by 5% (median) to 18% (p90)"
