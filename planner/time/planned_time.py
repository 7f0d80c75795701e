"""Step time predicted from the rates of published runs or from measured rates."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from serried.configs.errors import UserError
from serried.configs.schema.sections import RunConfig
from serried.parallel.layout.mesh import ZERO_BUBBLE_SCHEDULES, Layout
from serried.parallel.step_phases import BACKWARD, FORWARD, OPTIMIZER
from serried.planner.activations.estimate import planned_mix
from serried.planner.devices import DEVICES, Cluster, Device, device_of, device_of_driver
from serried.planner.memory_formula import Sizes
from serried.planner.plan_terms import Work
from serried.planner.time.measured_rates import MeasuredRates, read_rates
from serried.planner.time.pipeline_timeline import Cost, duration
from serried.planner.time.published_rates import ADAPTERS, FLOAT8, MEASURED, OUTSIDE, RATES, WITHIN, Rates, software_for
from serried.planner.time.step_work import doubts, job_of, shape_of, unknown_why
from serried.planner.time.time_model import Job, Step, step_of, wire
from serried.planner.trace.traced_step import Traced
from serried.planner.traffic import Flow
from serried.runtime.accelerator import accelerator_type, device_names
from serried.trainer.task import RunTask

_PER_NODE = 8
_PART_OF_AXIS = {"fsdp": "data", "replicate": "data", "expert fsdp": "data", "world": "data"}
"""Part of the step time that an axis counts toward; by default, a part with the name of the axis. Pipeline messages are
in the timeline."""


class UnknownTime(Exception):
    """Raised if the step time is unknown. The message is the reason, as a clause."""


@dataclass(frozen=True)
class Timed:
    """Predicted time of a step, with its uncertainty."""

    step: Step
    span: tuple[float, float]
    """Ratio of measured to predicted time, p10 to p90."""
    cluster: Cluster
    processes: int
    samples: int
    flops_per_sample: float | None
    weight_per_sample: int
    unit: str
    trust: str

    @property
    def range(self) -> tuple[float, float]:
        """Shortest and longest expected time, in seconds."""
        low, high = self.span
        return low * self.step.seconds, high * self.step.seconds

    def as_data(self) -> dict[str, Any]:
        low, high = self.range
        rate = self.samples * self.weight_per_sample / self.step.seconds
        return {
            "device": self.cluster.device.name,
            "seconds": self.step.seconds,
            "low": low,
            "high": high,
            "parts": dict(self.step.parts),
            f"{self.unit}_per_second": rate,
            "trust": self.trust,
        }


def planned_device(config: RunConfig) -> Device | None:
    """Return the device that ``config`` is planned for; None if it is this machine's GPU and not in the catalogue.

    Raises:
        UserError: the config names a device that is not in the catalogue, or rates of another device.
    """
    if config.plan.rates is not None:
        device: Device | None = measured_rates(config).cluster.device
    elif config.plan.device is not None:
        device = device_of(config.plan.device)
    elif accelerator_type() is not None:
        device = device_of_driver(device_names()[0])
    else:
        device = device_of("h100")
    memory = config.plan.memory_bytes
    return device._replace(memory_bytes=memory) if device is not None and memory else device


def unknown_device(config: RunConfig, device: Device, processes: int) -> str | None:
    """Return the reason, as a clause, that the speed of ``processes`` devices is unknown; None if it is known."""
    plan = config.plan
    if plan.memory and not plan.device and not plan.rates and not accelerator_type() is not None:
        return f"plan.memory={plan.memory} does not give the speed of the device; add plan.device=NAME of a similar one"
    per_node = planned_cluster(config, device).per_node
    if device.network_rate is None and processes > per_node:
        return (
            f"the network between nodes of {per_node} {device.name} is unknown; use plan.per_node={processes} for a "
            "single node, or plan.rates=FILE"
        )
    return None


def planned_cluster(config: RunConfig, device: Device) -> Cluster:
    """Return the nodes that ``config`` is planned for."""
    if config.plan.rates is not None:
        measured = measured_rates(config).cluster
        return measured._replace(per_node=config.plan.per_node or measured.per_node)
    launched = config.launch.processes if config.launch.nodes else None
    return Cluster(device, config.plan.per_node or launched or _PER_NODE)


def planned_rates(config: RunConfig, device: Device) -> Rates:
    """Return the measured rates, or the published rates for ``device``."""
    return measured_rates(config).rates if config.plan.rates is not None else RATES[software_for(device.name)]


def measured_rates(config: RunConfig) -> MeasuredRates:
    """Return the rates in ``plan.rates``.

    Raises:
        UserError: the file has no rates, or they were measured on another device than the planned one.
    """
    assert config.plan.rates is not None
    measured = read_rates(config.plan.rates)
    name, is_gpu = measured.cluster.device.name, measured.is_gpu
    wanted = config.plan.device
    if wanted is not None and device_of(wanted).name != name:
        raise UserError(
            f"the rates of plan.rates={measured.path} were measured on {name}, but plan.device={wanted}; leave out "
            "one of the two"
        )
    if config.launch.device != "auto" and is_gpu != (config.launch.device != "cpu"):
        raise UserError(
            f"the rates of plan.rates={measured.path} were measured on {name}, but "
            f"launch.device={config.launch.device}; leave out one of the two"
        )
    return measured


def time_of(
    config: RunConfig, task: RunTask, accumulation: int, sizes: Sizes, stages: Sequence[Traced], flows: Sequence[Flow]
) -> Timed:
    """Return the predicted time of a step: from traced work if rates were measured, otherwise from model sizes.

    Raises:
        UnknownTime: there are no rates for this model or device.
    """
    layout = sizes.layout
    model = sizes.model
    plan = sizes.plan
    device, shape = planned_device(config), shape_of(config, model, plan)
    if device is None:
        raise UnknownTime(f"this GPU is not in the catalogue; use plan.device={'|'.join(DEVICES)}, or plan.rates=FILE")
    if not device.peak(config.precision.name):
        raise UnknownTime(unknown_why(config, shape, device))
    if why := unknown_device(config, device, layout.world):
        raise UnknownTime(why)
    cluster = planned_cluster(config, device)
    mix = planned_mix(config, task, layout, plan, model)

    def timed(step: Step, span: tuple[float, float], trust: str) -> Timed:
        flops = task.flops_per_sample(sum(parameter.numel() for parameter in model.parameters()))
        return Timed(
            step, span, cluster, layout.world, config.trainer.global_batch, flops, task.weight_per_sample(), task.unit,
            trust,
        )  # fmt: skip

    if config.plan.rates is not None:
        if config.offloads_state:
            raise UnknownTime("the speed of copies of parameters and optimizer state to host memory was not measured")
        measured = measured_rates(config)
        notes = "".join(f"; {note}" for note in measured.notes())
        if stages:
            step = traced_step(stages, flows, layout, accumulation, measured)
        elif shape is not None:
            step = step_of(job_of(config, shape, layout, accumulation, mix), cluster, measured.rates)
        else:
            raise UnknownTime("the sizes of this model are unknown; use plan.mode=trace")
        return timed(step, MEASURED, f"time: rates measured on {measured.date} in {measured.path}{notes}")
    if shape is None:
        raise UnknownTime(unknown_why(config, shape, device))
    job, software = job_of(config, shape, layout, accumulation, mix), software_for(device.name)
    doubtful = [*doubts(job, cluster, software)]
    assumed = "" if config.plan.device or accelerator_type() is not None else "h100 is assumed (plan.device); "
    step = step_of(job, cluster, RATES[software])
    spans = [OUTSIDE if doubtful else WITHIN, *[FLOAT8] * (job.precision == "8bit"), *[ADAPTERS] * job.is_adapter]
    span = min(low for low, _ in spans), max(high for _, high in spans)
    return timed(step, span, assumed + _trust(software, doubtful, job))


def _trust(software: str, doubtful: Sequence[str], job: Job) -> str:
    text = f"time: rates of {software}; the error for held-out published runs is 5% (median) to 18% (p90)"
    if doubtful:
        text = f"time is a rough guess: no published run has {', nor '.join(doubtful)} (rates of {software})"
    if job.precision == "8bit":
        text += "; the error for torchtitan's FP8 runs is 8% (median) to 29% (p90)"
        text += "; NVIDIA's FP8 takes 20 to 40% less time"
    if job.is_adapter:
        text += "; published runs with adapters took 0.75 times (one device) to 1.67 times (pipelines) as long"
    return text


def traced_step(
    stages: Sequence[Traced], flows: Sequence[Flow], layout: Layout, accumulation: int, measured: MeasuredRates
) -> Step:
    """Return the time of a step, from the traced work of its stages."""
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
        when: accumulation * sum(sum(parts_of_stage.values()) for parts_of_stage in of) / count
        for when, of in (("forward", forward), ("backward", backward))
    }
    for (when, part), seconds in _exchanged(flows, layout, measured).items():
        hidden = measured.hidden * min(seconds, computes.get(when, 0.0)) if part == "data" else 0.0
        parts["optimizer" if when == "end" else part] += seconds - hidden
    return Step(sum(parts.values()), {name: seconds for name, seconds in parts.items() if seconds})


def _parts(stage: Traced, phase: str, measured: MeasuredRates) -> dict[str, float]:
    """Return the seconds of a phase by part: for one micro-batch, or for the optimizer."""
    work = stage.work.get(phase, Work())
    rates = measured.rates
    device = measured.cluster.device
    peak = device.peak(measured.precision)
    assert peak
    return {
        "products": sum(times * measured.product_seconds(shape) for shape, times in work.products.items()),
        "attention": 0.5 * work.attention_flops / (peak * rates.attention),  # a trace counts masked scores, too
        "memory": work.moved_bytes / (device.memory_rate * rates.memory) + work.launches * rates.launch,
    }


def _exchanged(flows: Sequence[Flow], layout: Layout, measured: MeasuredRates) -> Mapping[tuple[str, str], float]:
    """Return the seconds of communication by (phase, part)."""
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
    """Return the seconds of a pipeline's step. ``forward`` and ``backward`` are traces of its first, second and last
    rank."""
    per_rank = layout.stages // layout.pipeline
    costs = []
    for stage in range(layout.stages):
        rank = layout.pipeline_of(stage)
        traced = min(rank, 1) if rank < layout.pipeline - 1 else len(forward) - 1
        weights = backward[traced]["products"] / 2 if layout.schedule in ZERO_BUBBLE_SCHEDULES else 0.0
        there, back = (sum(traces[traced].values()) / per_rank for traces in (forward, backward))
        costs.append(Cost(there, back, weights / per_rank))
    sent = [flow for flow in flows if flow.axis == "pipeline" and flow.calls]
    rate, of_call = wire(layout, "pipeline", measured.cluster, measured.rates)
    transfer = max((flow.bytes / flow.calls for flow in sent), default=0.0) / rate + of_call
    return duration(layout, accumulation, costs, transfer)
