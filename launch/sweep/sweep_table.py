"""Comparison of the runs of a sweep, read from their run folders: a table, ``sweep.json`` and ``sweep.csv``."""

import csv
import io
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from statistics import median

from serried.configs.formats import columns
from serried.configs.plain_data import is_number, read_json
from serried.configs.schema.sections import DEFAULT_VALIDATION
from serried.launch.sweep.points import Point, labels
from serried.records.files import write_atomically
from serried.records.metrics import METRICS, read_events, without_repeats
from serried.records.status import read_status

RECORD = "sweep.json"
"""File in a sweep's folder with the swept keys and the outcome of each run."""
_TABLE = "sweep.csv"
_RESULTS = (
    "loss", "validation_loss", "metric", "metric_value", "tokens_per_second", "state", "step", "reason", "run_dir",
)  # fmt: skip
_LONG = 8


@dataclass(frozen=True)
class Outcome:
    """The state and results of a run."""

    run_dir: Path
    values: Mapping[str, str]
    """The value of each swept key."""
    state: str = "not started"
    """State of the run: not started, queued, running, finished, stopped or failed."""
    step: int = 0
    reason: str | None = None
    exit_code: int | None = None
    loss: float | None = None
    """Training loss of the last logged step."""
    validation_loss: float | None = None
    """Lowest validation loss."""
    tokens_per_second: float | None = None
    """Median rate of the logged steps, in the task's unit per second."""
    unit: str = "tokens"
    metric: str = "loss"
    """Validation metric by which runs are compared (``checkpoint.best_metric``)."""
    metric_value: float | None = None
    """The best value of a metric other than the loss."""
    is_maximised: bool = False
    time: float = field(default_factory=time.time)
    """Time of this record in Unix seconds."""
    url: str | None = None
    """URL of a run in a bucket, whose ``run_dir`` is this machine's scratch folder."""

    @property
    def place(self) -> str:
        """The run folder as the user knows it: a URL or a path."""
        return self.url or str(self.run_dir)

    @property
    def is_finished(self) -> bool:
        return self.state == "finished"

    @property
    def to_minimise(self) -> float | None:
        """Result of the run, negated if higher is better."""
        value = self.validation_loss if self.metric == "loss" else self.metric_value
        return -value if value is not None and self.is_maximised else value

    def rank(self) -> tuple[bool, float, float]:
        """Return a sort key, best first: by result, then by loss for runs without one. Runs without either come
        last."""
        last, result = float("inf"), self.to_minimise
        return result is None, last if result is None else result, last if self.loss is None else self.loss


def read_outcome(
    run_dir: Path, values: Mapping[str, str], metric: str = "loss", *, is_maximised: bool = False,
    url: str | None = None,
) -> Outcome:  # fmt: skip
    """Return the outcome of the run in ``run_dir``."""
    status = read_status(run_dir)
    if status is None:
        return Outcome(run_dir, values, metric=metric, is_maximised=is_maximised, url=url)
    losses: list[float | None] = []
    rates: list[float] = []
    unit = "tokens"
    evaluated: dict[str, list[float]] = {"loss": [], metric: []}
    for line in without_repeats(read_events(run_dir / METRICS)):
        if line.get("event") == "step":
            losses.append(line["loss"] if is_number(line.get("loss")) else None)
            rates += [line["tokens_per_second"]] if is_number(line.get("tokens_per_second")) else []
        elif line.get("event") == "start":
            unit = str(line.get("unit", unit))
        elif line.get("event") == "eval" and line.get("set") == DEFAULT_VALIDATION:
            for name, found in evaluated.items():
                found += [line[name]] if is_number(line.get(name)) else []
    best = max if is_maximised else min
    return Outcome(
        run_dir, values, status.state, status.step, status.reason, status.exit_code, losses[-1] if losses else None,
        min(evaluated["loss"], default=None), median(rates) if rates else None, unit, metric,
        best(evaluated[metric], default=None) if metric != "loss" else None, is_maximised, status.time, url,
    )  # fmt: skip


def outcome_of(point: Point) -> Outcome:
    """Return the outcome of a run of a sweep."""
    compared = point.config.checkpoint
    is_maximised = compared.best_mode == "max"
    run = point.config.run
    return read_outcome(run.dir, point.values, compared.best_metric, is_maximised=is_maximised, url=run.url)


def write_summary(folder: Path, keys: Sequence[str], outcomes: Sequence[Outcome]) -> None:
    """Write ``sweep.json`` and ``sweep.csv`` into the folder of a sweep."""
    folder.mkdir(parents=True, exist_ok=True)
    best = sorted(outcomes, key=Outcome.rank)
    runs = [{**asdict(outcome), "run_dir": str(outcome.run_dir)} for outcome in best]
    write_atomically(
        folder / RECORD, json.dumps({"name": folder.name, "keys": list(keys), "runs": runs}, indent=2) + "\n"
    )
    text = io.StringIO(newline="")
    rows = csv.DictWriter(text, [*keys, *_RESULTS], extrasaction="ignore")
    rows.writeheader()
    rows.writerows({**run, "run_dir": each.place, **each.values} for run, each in zip(runs, best, strict=True))
    write_atomically(folder / _TABLE, text.getvalue())


def read_summary(folder: Path) -> tuple[list[str], list[Outcome]]:
    """Return the keys and current outcomes of the sweep in ``folder``; empty if there is no readable record."""
    try:
        record = read_json(folder / RECORD)
        names = [attribute.name for attribute in fields(Outcome)]
        noted = [Outcome(**{name: run[name] for name in names if name in run}) for run in record["runs"]]
        keys = [str(key) for key in record["keys"]]
    except (OSError, ValueError, KeyError, TypeError):
        return [], []
    return keys, [newer(Outcome(**{**vars(outcome), "run_dir": Path(outcome.run_dir)})) for outcome in noted]


def newer(noted: Outcome) -> Outcome:
    """Return the outcome in the run folder, unless ``noted`` is newer: a run that fails while it starts writes no
    status."""
    found = read_outcome(noted.run_dir, noted.values, noted.metric, is_maximised=noted.is_maximised, url=noted.url)
    return found if found.state != "not started" and found.time >= noted.time else noted


def table(keys: Sequence[str], outcomes: Sequence[Outcome]) -> str:
    """Return the runs, best first: swept values, losses, metric, rate, state and folder."""
    label = labels(keys)
    metrics = [outcome.metric for outcome in outcomes[:1] if outcome.metric != "loss"]
    units = {outcome.unit for outcome in outcomes if outcome.tokens_per_second is not None} or {"tokens"}
    rate = "tok/s" if units == {"tokens"} else f"{units.pop()}/s" if len(units) == 1 else "rate"
    rows = [[*label.values(), "loss", "validation", *metrics, rate, "state", "folder"]]
    for outcome in sorted(outcomes, key=Outcome.rank):
        results = [outcome.loss, outcome.validation_loss, *([outcome.metric_value] if metrics else [])]
        numbers = [*(_number(result, ".4f") for result in results), _number(outcome.tokens_per_second)]
        rows.append([*(shown(outcome.values.get(key, "")) for key in keys), *numbers, _state(outcome), outcome.place])
    return "\n".join(columns(rows))


def shown(value: str) -> str:
    """Return a value as shown to the user: long numbers are rounded to six digits."""
    try:
        return value if len(value) <= _LONG else f"{float(value):.6g}"
    except ValueError:
        return value


def _state(outcome: Outcome) -> str:
    has_step = outcome.state not in ("finished", "not started", "queued")
    return f"{outcome.state} at {outcome.step}" if has_step else outcome.state


def _number(value: float | None, form: str = ",.0f") -> str:
    return "-" if value is None else format(value, form)
