"""Goodput: the wall-clock time of a run, divided into training steps and everything else.

Each stretch of time between two records belongs to one part, so that the parts always add up to the wall-clock time.
Google's ML Goodput measures the same parts (https://github.com/AI-Hypercomputer/ml-goodput-measurement).
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from serried.configs.formats import duration
from serried.configs.plain_data import is_number
from serried.records.metrics import LOST_METRICS, METRICS, read_events

PARTS = ("start", "compile", "productive", "data", "save stall", "evaluation", "recovery", "lost steps", "gap", "other")
"""Parts of the wall-clock time.

``start``: from the start of the process to the first step, without compiling. ``compile``: the excess of the first
step over the others. ``productive``: steps whose result the run kept, without waiting for data. ``data``: waiting for
data in these steps. ``save stall``: waiting for checkpoints. ``recovery``: from the loss of a replica until the others
continue. ``lost steps``: steps that were trained again after a crash or a rollback, with their evaluations and
checkpoints. ``gap``: from the last record of a start to the next
process, so it contains the unrecorded time before a crash and the time in a queue.
"""
_SHOWN_SHARE = 0.001
_KEYS = frozenset((
    "event", "time", "step", "step_seconds", "data_seconds", "seconds", "stall_seconds", "resumed_from",
    "since_process_seconds", "earlier_seconds",
))  # fmt: skip
"""Keys of events that are kept in memory."""


class Goodput(NamedTuple):
    """Seconds of wall-clock time by part, for the whole run and for each start."""

    seconds: dict[str, float]
    starts: list[dict[str, float]]
    """Seconds by part for each start of the run, including the gap before it."""

    @property
    def total_seconds(self) -> float:
        """Sum of all parts: from the first process to the last record, or to now."""
        return math.fsum(self.seconds.values())

    @property
    def productive_share(self) -> float:
        """Productive part of the wall-clock time, from 0 to 1."""
        return self.seconds["productive"] / self.total_seconds if self.total_seconds else 0.0

    def line(self) -> str:
        """Describe the goodput in one line, the largest parts first."""
        total = self.total_seconds or 1.0
        others = sorted(((name, value) for name, value in self.seconds.items() if name != "productive"), key=_by_size)
        shown = [f"{name} {value / total:.1%}" for name, value in others if value >= _SHOWN_SHARE * total]
        rest = f": {', '.join(shown)}" if shown else ""
        return f"{self.productive_share:.1%} of {duration(self.total_seconds)}{rest}"


def _by_size(part: tuple[str, float]) -> float:
    return -part[1]


def goodput_of(run_dir: Path, *more: Mapping[str, Any], now: float | None = None) -> Goodput:
    """Return the goodput of the run in ``run_dir``; all zeros if it has no records.

    Args:
        more: Events that have not been recorded yet.
        now: Current time in Unix seconds, if the run is still training.
    """
    recorded = (event for name in (METRICS, LOST_METRICS) for event in read_events(run_dir / name))
    return goodput([*({key: event[key] for key in _KEYS & event.keys()} for event in recorded), *more], now=now)


def goodput(events: Iterable[Mapping[str, Any]], *, now: float | None = None) -> Goodput:
    """Return the goodput of a run from its events, in any order.

    Args:
        events: Events of ``metrics.jsonl`` and ``lost.jsonl``. Those without a time are ignored.
        now: Current time in Unix seconds, if the run is still training.
    """
    history = sorted((event for event in events if is_number(event.get("time"))), key=lambda event: event["time"])
    begins = [number for number, event in enumerate(history) if event["event"] == "start"]
    starts: list[dict[str, float]] = []
    clock: float | None = None
    for begin, end in pairwise([*begins, len(history)]):
        first, *events_of_start = history[begin:end]
        is_last = end == len(history)
        began = first["time"] - _seconds(first, "since_process_seconds")
        before = _seconds(first, "earlier_seconds") if clock is None else 0.0
        began = began if clock is None else min(max(clock, began), first["time"])
        parts = dict.fromkeys(PARTS, 0.0)
        parts["lost steps"] = before  # starts that ended before their first checkpoint
        parts["gap"] = 0.0 if clock is None else began - clock
        parts["start"] = first["time"] - began
        later = [_count(history[number].get("resumed_from")) for number in begins if number >= end]
        kept_step = min(later, default=math.inf)
        _add_start(parts, first, events_of_start, kept_step)
        clock = history[end - 1]["time"]
        if is_last and now is not None and history[-1]["event"] != "stop":
            since = max(0.0, now - clock)
            steps = [event["time"] for event in _steps(events_of_start)]
            # A run that has been silent for longer than between any two lines may be hanging.
            usual = 2 * max((after - before for before, after in pairwise(steps)), default=math.inf)
            parts["productive" if steps else "start"] += min(since, usual)
            parts["other"] += max(0.0, since - usual)
        starts.append(parts)
    return Goodput({name: math.fsum(parts[name] for parts in starts) for name in PARTS}, starts)


def _add_start(
    parts: dict[str, float], first: Mapping[str, Any], events: Sequence[Mapping[str, Any]], kept_step: float
) -> None:
    """Add the time from the event ``first`` to the last of ``events`` to ``parts``.

    Args:
        kept_step: Step at which the next start resumed; infinity if there is none.
    """
    undone = [(event["time"], event.get("step", 0)) for event in events if event["event"] == "rollback"]
    undone.append((math.inf, kept_step))

    def is_lost(event: Mapping[str, Any]) -> bool:
        return any(event["time"] <= moment and event.get("step", 0) > step for moment, step in undone)

    steps = _steps(events)
    measured = [_seconds(event, "step_seconds") for event in steps[1:] if is_number(event.get("step_seconds"))]
    usual = median(measured) if measured else None
    paused, lost = 0.0, 0.0
    last_time, last_step = first["time"], _count(first.get("resumed_from"))
    for event in events:
        if event["event"] == "rollback":
            lost += event["time"] - last_time
            last_time, last_step = event["time"], _count(event.get("step"))
        if event["event"] != "step" or "step" not in event:
            continue
        elapsed, count = event["time"] - last_time, event["step"] - last_step
        per_step = _seconds(event, "step_seconds") if is_number(event.get("step_seconds")) else usual
        training = elapsed if per_step is None else min(elapsed, per_step * max(count, 0))
        if is_lost(event):
            lost += elapsed
        else:
            waited = min(training, _seconds(event, "data_seconds") * max(count, 0))
            compiling = 0.0
            if event is steps[0] and usual is not None:
                compiling = max(0.0, training - waited - usual * max(count, 0))
            parts["compile"] += compiling
            parts["data"] += waited
            parts["productive"] += training - waited - compiling
            if event is steps[0]:
                parts["start"] += elapsed - training
            else:
                paused += elapsed - training
        last_time, last_step = event["time"], event["step"]
    rest = max((event["time"] for event in events), default=last_time) - last_time
    if not steps:
        parts["start"] += rest
    elif last_step > kept_step:
        lost += rest
    else:
        paused += rest
    parts["lost steps"] += lost
    kept = [event for event in events if not is_lost(event)]
    for name, kind, key in (
        ("recovery", "recovered", "seconds"), ("save stall", "checkpoint", "stall_seconds"),
        ("evaluation", "eval", "seconds"),
    ):  # fmt: skip
        known = min(paused, math.fsum(_seconds(event, key) for event in kept if event["event"] == kind))
        parts[name] += known
        paused -= known
    parts["other"] += paused


def _steps(events: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    return [event for event in events if event["event"] == "step" and "step" in event]


def _seconds(event: Mapping[str, Any], key: str) -> float:
    value = event.get(key)
    return max(0.0, float(value)) if is_number(value) else 0.0


def _count(step: Any) -> int:
    return int(step) if is_number(step) else 0
