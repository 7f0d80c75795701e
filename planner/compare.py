"""Comparison of the plan of a step with the measurements of a run, term by term."""

import gzip
import json
import math
import re
import statistics
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

from serried.configs.errors import UserError
from serried.configs.formats import columns, size
from serried.configs.plain_data import is_count, is_number, open_regular
from serried.configs.schema.sections import RunConfig
from serried.parallel.layout.checks import with_values
from serried.parallel.layout.mesh import Layout
from serried.parallel.step_phases import BACKWARD, DATA, FORWARD, HOST, OPTIMIZER, PIPELINE
from serried.planner.devices import device_of_driver
from serried.planner.memory_formula import Sizes
from serried.planner.plan_lines import seconds_text
from serried.planner.step_plan import FRAGMENTED_SHARE, StepPlan, plan_step
from serried.planner.time.measured_rates import read_rates
from serried.planner.time.planned_time import Timed
from serried.records.metrics import METRICS, read_events, without_repeats
from serried.records.run_folder import PROFILES
from serried.trainer.model import model_to_train
from serried.trainer.task import RunTask

_CLOSE = 0.1
"""Relative error below which a term counts as planned."""
_EXCHANGES = ("data", "tensor", "context", "expert")
_TRACE = re.compile(r"steps-\d+-\d+-rank-0\.json\.gz")
_MOST_BYTES = 2**30
"""Largest number of bytes that are read from a profile."""
_MESSAGES = ("send", "recv", "gloo:send", "gloo:recv")
"""Pipeline messages. The time that ranks wait for them is a separate phase."""


class Exchanged(NamedTuple):
    """Time of rank 0 in collectives, in seconds per step."""

    steps: tuple[int, int]
    """First and last profiled step."""
    seconds: float
    """Time with at least one collective in progress, including waits for a late rank."""
    exposed: float
    """Part of that time without computation."""


@dataclass(frozen=True)
class Figures:
    """Measurements of a run since its last start."""

    device: str
    """Device name reported by the driver, or ``cpu``."""
    processes: int
    nodes: int
    steps: list[int]
    """Steps of the log lines, without the first line."""
    step_seconds: float
    """Median step time of the log lines."""
    phases: dict[str, float]
    """Median seconds per step of each phase; empty if not recorded."""
    memory_bytes: int | None
    """Peak of the rank that needed the most, on a CPU minus the memory at the start; None if not recorded."""
    reserved_bytes: int | None
    exchanged: Exchanged | None
    """None if no steps were profiled."""

    @property
    def is_gpu(self) -> bool:
        return self.device != "cpu"


def figures_of(run: Path) -> Figures | None:
    """Return the measurements of the run in folder ``run`` since its last start; None if it has not started."""
    start: dict[str, Any] = {}
    steps: list[dict[str, Any]] = []
    for event in without_repeats(read_events(run / METRICS)):
        if event["event"] == "start":
            start, steps = event, []
        elif event["event"] == "step" and is_number(event.get("step_seconds")) and is_count(event.get("step")):
            steps.append(event)
    if not is_count(start.get("world_size")) or not isinstance(start.get("device"), str):
        return None
    used = steps[1:] or steps  # the first line includes one-time costs
    splits = [split for step in used if isinstance(split := step.get("time_split"), dict)]
    memory, reserved = (_last(steps, name) for name in ("memory_bytes", "memory_reserved_bytes"))
    before = start.get("memory_bytes")
    if memory is not None and start["device"] == "cpu":
        memory = memory - before if is_count(before) else None
    return Figures(
        start["device"], start["world_size"], len({*start.get("hosts", ["one"])}), [step["step"] for step in used],
        statistics.median([step["step_seconds"] for step in used] or [0.0]),
        {name: statistics.median(split.get(name, 0.0) for split in splits) for name in {*chain(*splits)}},
        memory, reserved, exchanged(run),
    )  # fmt: skip


def _last(steps: list[dict[str, Any]], name: str) -> int | None:
    return next((step[name] for step in reversed(steps) if is_count(step.get(name))), None)


def as_it_ran(config: RunConfig, ran: Figures, given: list[str]) -> RunConfig:
    """Return ``config`` for the processes and the device of the run, unless the overrides ``given`` set others.

    Raises:
        UserError: the rates were measured on another device.
    """
    values: dict[str, Any] = {}
    if not any(word.startswith("launch.") for word in given):
        values = {
            "launch.processes": ran.processes // ran.nodes,
            "launch.nodes": ran.nodes if ran.nodes > 1 else None,
            "launch.device": "cuda" if ran.is_gpu else "cpu",
        }
    known = device_of_driver(ran.device)
    if config.plan.rates is not None:
        measured = read_rates(config.plan.rates)
        rates_of = measured.cluster.device.driver_name
        if measured.is_gpu != ran.is_gpu or (ran.is_gpu and rates_of != ran.device):
            raise UserError(
                f"the rates of plan.rates={config.plan.rates} were measured on {rates_of}, but the run used "
                f"{ran.device}; leave plan.rates out"
            )
    elif config.plan.device is None and known is not None:
        values["plan.device"] = known.name
    return with_values(config, values)


def compared(config: RunConfig, task: RunTask, layout: Layout, accumulation: int, ran: Figures) -> str:
    """Return a table that compares the plan of ``config`` with ``ran``; JSON if ``plan.as_json``."""
    built = model_to_train(config, task)
    is_timed = bool(config.plan.device or config.plan.rates)
    sizes = Sizes(config, layout, built.module, built.plan)
    plan = plan_step(config, task, accumulation, sizes, None, is_timed=is_timed)
    if config.plan.as_json:
        return json.dumps(
            {"plan": plan.as_data(), "run": vars(ran) | {"exchanged": ran.exchanged and ran.exchanged._asdict()}}
        )
    lines = [f"{'compared':<10} steps {ran.steps[0]} to {ran.steps[-1]}, {_place(ran)}; {plan.found}"]
    lines += columns([("term", "plan", "run", "error", "assessment"), *_rows(plan, ran)])
    if isinstance(plan.time, Timed):
        lines.append(f"{'trust':<10} {plan.time.trust}")
    else:
        why = plan.time or f"no rates are known for {ran.device}"
        how = "" if config.plan.rates else "; measure them there: serried plan calibrate, then plan.rates=rates.json"
        lines.append(f"{'times':<10} {why}{how}")
    return "\n".join(lines)


def _place(ran: Figures) -> str:
    return f"{ran.processes} process{'es' if ran.processes > 1 else ''} on {ran.device}"


def _rows(plan: StepPlan, ran: Figures) -> Iterator[tuple[str, ...]]:
    if ran.memory_bytes is not None:
        planned = plan.memory.peak + (0 if ran.is_gpu else plan.memory.on_host)
        yield _row("peak memory", planned, ran.memory_bytes, size, _of_memory(plan, ran))
    else:
        yield "peak memory", size(plan.memory.peak), "-", "", "the run recorded no memory"
    phases, timed = ran.phases, plan.time if isinstance(plan.time, Timed) else None
    parts = timed.step.parts if timed else {}
    waits, update = parts.get("pipeline", 0.0), parts.get("optimizer", 0.0)
    computes = timed.step.seconds - waits - update if timed else None
    if phases:
        yield _timed_row("forward + backward", computes, phases.get(FORWARD, 0.0) + phases.get(BACKWARD, 0.0))
        if ran.processes > 1:
            yield _exchanges(sum(parts.get(name, 0.0) for name in _EXCHANGES) if timed else None, ran)
        if PIPELINE in phases:
            yield _timed_row("waiting in the pipeline", waits if timed else None, phases[PIPELINE])
        yield _timed_row("optimizer", update if timed else None, phases.get(OPTIMIZER, 0.0))
        yield "data and host", "-", seconds_text(phases.get(DATA, 0.0) + phases.get(HOST, 0.0)), "", "not planned"
    says = ""
    if timed:
        low, high = timed.range
        says = "slower than the plan's range" if ran.step_seconds > high else "within the plan's range"
        says = "faster than the plan's range" if ran.step_seconds < low else says
        says += f" of {seconds_text(low)} to {seconds_text(high)}"
    yield _timed_row("step", timed.step.seconds if timed else None, ran.step_seconds, says)


def _exchanges(planned: float | None, ran: Figures) -> tuple[str, ...]:
    """Return the row on communication that does not overlap with computation. Its time is part of the phases."""
    if (found := ran.exchanged) is None:
        how = "recorded in a run with 'profile.steps=[3,4]'"
        return "  exposed communication", "-" if planned is None else seconds_text(planned), "-", "", how
    hidden = 1 - found.exposed / found.seconds if found.seconds else 0.0
    says = f"{seconds_text(found.seconds)} in total, {hidden:.0%} hidden by computation: profile of steps "
    says += f"{found.steps[0]} to {found.steps[1]}"
    return _timed_row("  exposed communication", planned, found.exposed, says)


def _of_memory(plan: StepPlan, ran: Figures) -> str:
    assert ran.memory_bytes is not None
    if not ran.is_gpu:
        return "resident memory since the start, including libraries loaded later and copies by Gloo"
    if not ran.reserved_bytes:
        return ""
    lost = ran.reserved_bytes / ran.memory_bytes - 1
    unused = plan.memory.unused
    planned = f"assumed {FRAGMENTED_SHARE:.0%}" if unused is None else f"planned {unused / plan.memory.peak:.0%}"
    return f"reserved {size(ran.reserved_bytes)}: fragmentation {lost:.0%}, {planned}"


def _timed_row(term: str, planned: float | None, ran: float, says: str = "") -> tuple[str, ...]:
    if planned is None:
        return term, "-", seconds_text(ran), "", says
    return _row(term, planned, ran, seconds_text, says)


def _row(term: str, planned: float, ran: float, shown: Any, says: str) -> tuple[str, ...]:
    error = planned / ran - 1 if ran > 0 else 0.0
    judged = "as planned" if abs(error) < _CLOSE else "more than planned" if error < 0 else "less than planned"
    return term, shown(planned), shown(ran), f"{error:+.1%}", "; ".join(filter(None, (judged, says)))


def exchanged(run: Path) -> Exchanged | None:
    """Return the time in collectives from the newest readable profile of a run folder; None if there is none."""
    found = [path for path in (run / PROFILES).glob("*.json.gz") if _TRACE.fullmatch(path.name)]
    for path in sorted(found, key=lambda path: path.stat().st_mtime, reverse=True):
        try:
            with open_regular(path) as raw, gzip.open(raw) as file:
                events = json.loads(file.read(_MOST_BYTES))["traceEvents"]
            first, last = (int(word) for word in path.name.split("-")[1:3])
            return Exchanged((first, last), *(seconds / (last - first + 1) for seconds in _seconds(events)))
        except (OSError, EOFError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
            continue  # from a killed run, or not a profile of ours
    return None


def _seconds(events: Iterable[Mapping[str, Any]]) -> tuple[float, float]:
    """Return the seconds in collectives, and the part of them without computation."""
    timed = [event for event in events if is_number(event.get("dur")) and is_number(event.get("ts"))]
    kernels = [event for event in timed if event.get("cat") == "kernel"]
    marks = ("nccl", "gloo:")
    exchanges = [event for event in kernels or timed if event["name"].startswith(marks) and not _is_message(event)]
    # GPU work is recorded as kernels, CPU work as operators.
    computes = [event for event in kernels or timed if not event["name"].startswith(marks)]
    computes = [event for event in computes if kernels or event["name"].startswith("aten::")]
    computing = _covered(computes)
    return _covered(exchanges) / 1e6, (_covered([*exchanges, *computes]) - computing) / 1e6


def _is_message(event: Mapping[str, Any]) -> bool:
    return event["name"] in _MESSAGES or event.get("args", {}).get("Collective name") in _MESSAGES


def _covered(events: Iterable[Mapping[str, Any]]) -> float:
    """Return the time in microseconds during which at least one of ``events`` runs."""
    covered, end = 0.0, -math.inf
    for began, ended in sorted((event["ts"], event["ts"] + event["dur"]) for event in events):
        covered += max(0.0, ended - max(began, end))
        end = max(end, ended)
    return covered
