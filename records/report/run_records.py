"""The records of a run folder as plain data, readable even after a crash or on a full disk."""

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from serried.configs.plain_data import flatten, is_count, is_number, read_if_there
from serried.configs.renamed_keys import read_saved_config_if_there
from serried.records.goodput import Goodput, goodput
from serried.records.metrics import LOST_METRICS, METRICS, logged_images, named_metrics, read_events, without_repeats
from serried.records.run_folder import shown_place
from serried.records.status import Status, read_status

_WHERE_KNOWN = {
    "lr": ("lr", ""),
    "tokens_per_second": ("throughput", ""),
    "mfu": ("mfu", ""),
    "memory_bytes": ("memory", "peak"),
    "memory_reserved_bytes": ("memory", "reserved"),
    "scale": ("scale", ""),
    "slowest_share": ("slowest", ""),
}
_BY_NAME = {
    "lr_by_group": "lr", "source_tokens": "source_tokens", "time_split": "time_split", "expert_load": "expert_load",
}  # fmt: skip
_KEPT_MARKS = 1000
"""Maximum number of drawn marks of each kind; further marks are only counted."""


class Curve(NamedTuple):
    """Steps and values of a measured quantity."""

    steps: list[int]
    values: list[float]
    """NaN for a non-finite value."""


class Mark(NamedTuple):
    """An event at a step."""

    kind: str
    """Kind of event: restart, lost, joined, rollback, spike, skipped or checkpoint."""
    step: int
    text: str


@dataclass
class Records:
    """The records of one run."""

    path: Path
    config: dict[str, Any]
    """Config values by dotted key; empty if there is no readable ``config.yaml``."""
    environment: dict[str, Any]
    status: Status | None
    starts: list[dict[str, Any]] = field(default_factory=list)
    """Events ``start``, extended by ``first_step``, ``last_step``, ``seconds`` (how long it ran) and ``end`` (its
    event ``stop``, or None)."""
    curves: dict[tuple[str, str], Curve] = field(default_factory=dict)
    """Curves by (chart, name within the chart). The charts of a task's metrics are called ``metric:NAME``."""
    marks: list[Mark] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=dict)
    """Number of marks by kind."""
    steps: list[int] = field(default_factory=list)
    """Logged steps. The lists below hold the tokens and seconds of training up to each of them."""
    tokens: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    last: dict[str, Any] = field(default_factory=dict)
    """Last event ``step``."""
    last_time: float | None = None
    """Time of the last line, in Unix seconds."""
    evaluated: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Last event ``eval`` of each validation set."""
    texts: dict[str, tuple[int, str]] = field(default_factory=dict)
    """Last text of each name that a callback logged, with its step."""
    images: dict[str, tuple[int, list[Path]]] = field(default_factory=dict)
    """Last images of each name that a callback logged, with their step."""
    waited_seconds: float = 0.0
    """Time spent waiting for data, within ``timed_seconds``."""
    timed_seconds: float = 0.0
    undone_lines: int = 0
    """Number of logged steps that were lost in a crash or a rollback."""

    goodput: Goodput = field(default_factory=lambda: goodput([]))

    @property
    def place(self) -> str:
        """Run folder as the user gave it: a path, or the URL of a run in a bucket."""
        return shown_place(self.path, self.config.get("run.dir"))

    @property
    def elapsed_seconds(self) -> float:
        """Total running time of all starts, in seconds."""
        return sum(start["seconds"] for start in self.starts)


def read_records(run_dir: Path) -> Records:
    """Return the records in ``run_dir``. Missing, torn or malformed records are left out; nothing is raised."""
    config = flatten(read_saved_config_if_there(run_dir / "config.yaml"))
    environment = read_if_there(run_dir / "environment.json")
    records = Records(run_dir, config, environment, read_status(run_dir))
    events, lost = list(read_events(run_dir / METRICS)), list(read_events(run_dir / LOST_METRICS))
    records.goodput = goodput([*events, *lost])
    for event in without_repeats(events):
        _add(records, event)
    undone: dict[int, float] = {}
    for event in lost:
        if event.get("event") == "step" and (step := event.get("step")) is not None:
            records.undone_lines += 1
            undone[step] = _number(event.get("loss"))
    if undone:
        records.curves["loss", "undone"] = Curve(sorted(undone), [undone[step] for step in sorted(undone)])
    rate, groups = records.curves.get(("lr", "")), [key for key in records.curves if key[0] == "lr" and key[1]]
    if all(records.curves[key] == rate for key in groups):
        for key in groups:
            del records.curves[key]
    else:
        records.curves.pop(("lr", ""), None)
    return records


def _add(records: Records, event: dict[str, Any]) -> None:
    kind = event["event"]
    step = event.get("step")
    time = event.get("time")
    if kind == "start":
        resumed = event.get("resumed_from")
        first = resumed if is_count(resumed) else 0
        if records.starts or first:
            ranks = event.get("world_size")
            on = f", on {ranks} rank{'' if ranks == 1 else 's'}" if is_count(ranks) else ""
            _mark(records, "restart", first, f"restarted at step {first}{on}")
        records.starts.append({**event, "first_step": first, "last_step": first, "seconds": 0.0, "end": None})
    if not records.starts:  # a torn first line
        records.starts.append(
            {"first_step": step or 0, "last_step": step or 0, "seconds": 0.0, "end": None, "time": time}
        )
    start = records.starts[-1]
    if is_number(time):
        records.last_time = float(time)
        if is_number(start.get("time")):
            start["seconds"] = max(start["seconds"], float(time) - float(start["time"]))
    if kind == "stop":
        start["end"] = event
    if step is None:
        return
    start["last_step"] = max(start["last_step"], step)
    if kind == "step":
        _add_step(records, step, event)
    elif kind == "eval":
        _add_evaluation(records, step, event)
    elif kind == "log":
        _add_logged(records, step, event)
    elif kind == "checkpoint":
        _mark(records, "checkpoint", step, f"checkpoint of step {step}")
    elif kind == "spike":
        _mark(records, "spike", step, f"loss spike in step {step}{' (skipped)' if event.get('skipped') else ''}")
    elif kind in ("lost", "joined"):
        _mark(records, kind, step, _membership(event))
    elif kind == "rollback":
        since = f" from step {event['from_step']}" if is_count(event.get("from_step")) else ""
        _mark(records, "rollback", step, f"returned to step {step}{since}: {event.get('reason') or 'no reason given'}")


def _membership(event: dict[str, Any]) -> str:
    """Describe the loss of replicas, or a node that joined."""
    counts = [event.get(name) for name in ("replicas", "total_replicas")]
    left = f"; {counts[0]} of {counts[1]} replicas" if all(map(is_count, counts)) else ""
    if event["event"] == "joined":
        return f"{event.get('node') or 'a node'} joined at step {event['step']}{left}"
    nodes = event.get("nodes")
    who = ", ".join(map(str, nodes)) if isinstance(nodes, list) and nodes else "a replica"
    return f"lost {who} in step {event['step']}: {event.get('reason') or 'no reason given'}{left}"


def _add_step(records: Records, step: int, event: dict[str, Any]) -> None:
    if records.steps and step <= records.steps[-1]:  # an interrupted clean-up left this line twice
        return
    records.last = event
    records.steps.append(step)
    tokens = event.get("tokens")
    records.tokens.append(tokens if is_number(tokens) else math.nan)
    records.seconds.append(records.elapsed_seconds)
    _add_point(records, step, "loss", "training", _number(event.get("loss")))
    _add_point(records, step, "grad_norm", "", _number(event.get("grad_norm")))
    for key, (chart, name) in _WHERE_KNOWN.items():
        if is_number(value := event.get(key)):
            _add_point(records, step, chart, name, value)
    for key, chart in _BY_NAME.items():
        for name, value in _items(event.get(key)):
            _add_point(records, step, chart, name, value)
    for name, value in named_metrics(event).items():
        _add_point(records, step, f"metric:{name}", "training", value)
    waited, whole = event.get("data_seconds"), event.get("step_seconds")
    if is_number(waited) and is_number(whole) and whole > 0:
        _add_point(records, step, "data_share", "", waited / whole)
        records.waited_seconds += waited
        records.timed_seconds += whole
    if event.get("skipped"):
        why = "its loss or gradient was not finite" if event.get("nonfinite") else "its loss or gradient was a spike"
        _mark(records, "skipped", step, f"step {step} was skipped without an update: {why}")


def _add_evaluation(records: Records, step: int, event: dict[str, Any]) -> None:
    name = str(event.get("set", "validation"))
    if event.get("tokens") == 0 or (name in records.evaluated and step <= records.evaluated[name]["step"]):
        return
    records.evaluated[name] = event
    _add_point(records, step, "validation", name, _number(event.get("loss")))
    for metric, value in named_metrics(event).items():
        _add_point(records, step, f"metric:{metric}", name, value)
    for source, value in _items(event.get("source_losses")):
        _add_point(records, step, "source_loss", f"{name}: {source}", value)


def _add_logged(records: Records, step: int, event: dict[str, Any]) -> None:
    """Add values that a callback logged. A number is left out if its step is not later than the last step with a number
    of this name."""
    for name, value in _items(event.get("metrics")):
        curve = records.curves.get((f"metric:{name}", "logged"))
        if curve is None or step > curve.steps[-1]:
            _add_point(records, step, f"metric:{name}", "logged", value)
    texts = event.get("texts")
    for name, text in texts.items() if isinstance(texts, dict) else ():
        records.texts[str(name)] = (step, str(text))
    for name, paths in logged_images(records.path, event.get("images")).items():
        records.images[name] = (step, paths)


def _add_point(records: Records, step: int, chart: str, name: str, value: float) -> None:
    curve = records.curves.get((chart, name))
    if curve is None:
        curve = records.curves[chart, name] = Curve([], [])
    curve.steps.append(step)
    curve.values.append(value)


def _mark(records: Records, kind: str, step: int, text: str) -> None:
    records.counts[kind] = records.counts.get(kind, 0) + 1
    if records.counts[kind] <= _KEPT_MARKS:
        records.marks.append(Mark(kind, step, text))


def _items(values: Any) -> list[tuple[str, float]]:
    return [(str(k), v) for k, v in values.items() if is_number(v)] if isinstance(values, dict) else []


def _number(value: Any) -> float:
    return value if is_number(value) else math.nan
