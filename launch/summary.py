"""The runs of a sweep side by side, from their run folders: a table, ``sweep.json`` and ``sweep.csv``."""

import csv
import io
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from statistics import median

from serried.configs.plain_data import is_number, read_json
from serried.configs.schema import DEFAULT_VALIDATION
from serried.launch.points import labels
from serried.records.files import write_atomically
from serried.records.metrics import METRICS, read_events
from serried.records.status import read_status

RECORD = "sweep.json"
"""In the folder of a sweep: its keys and the outcome of each run."""
_TABLE = "sweep.csv"
_LONG = 8


@dataclass(frozen=True)
class Outcome:
    """The state and results of a run."""

    run_dir: Path
    values: Mapping[str, str]
    """The value of each swept key."""
    state: str = "not started"
    """not started, queued, running, finished, stopped or failed."""
    step: int = 0
    reason: str | None = None
    exit_code: int | None = None
    loss: float | None = None
    """Of the last logged step."""
    validation_loss: float | None = None
    """The lowest."""
    tokens_per_second: float | None = None
    """The median of the logged steps."""
    time: float = field(default_factory=time.time)
    """When this was written, in Unix seconds."""

    @property
    def is_finished(self) -> bool:
        return self.state == "finished"

    def rank(self) -> tuple[bool, float, float]:
        """Return a sort key, best first: by validation loss, or by loss without one, and runs without either last."""
        last = float("inf")
        by_validation = last if self.validation_loss is None else self.validation_loss
        return self.validation_loss is None, by_validation, last if self.loss is None else self.loss


def read_outcome(run_dir: Path, values: Mapping[str, str]) -> Outcome:
    """Return the outcome of the run in ``run_dir``."""
    status = read_status(run_dir)
    if status is None:
        return Outcome(run_dir, values)
    losses: list[float | None] = []
    rates: list[float] = []
    validation: list[float] = []
    for line in read_events(run_dir / METRICS):
        if line.get("event") == "step":
            losses.append(line["loss"] if is_number(line.get("loss")) else None)
            rates += [line["tokens_per_second"]] if is_number(line.get("tokens_per_second")) else []
        elif line.get("event") == "eval" and line.get("set") == DEFAULT_VALIDATION and is_number(line.get("loss")):
            validation.append(line["loss"])
    return Outcome(
        run_dir, values, status.state, status.step, status.reason, status.exit_code, losses[-1] if losses else None,
        min(validation, default=None), median(rates) if rates else None, status.time,
    )  # fmt: skip


def write_summary(folder: Path, keys: Sequence[str], outcomes: Sequence[Outcome]) -> None:
    """Write ``sweep.json`` and ``sweep.csv`` into the folder of a sweep.

    Raises:
        OSError: the disk fails.
    """
    folder.mkdir(parents=True, exist_ok=True)
    best = sorted(outcomes, key=Outcome.rank)
    runs = [{**asdict(each), "run_dir": str(each.run_dir)} for each in best]
    write_atomically(
        folder / RECORD, json.dumps({"name": folder.name, "keys": list(keys), "runs": runs}, indent=2) + "\n"
    )
    columns = ["loss", "validation_loss", "tokens_per_second", "state", "step", "reason", "run_dir"]
    text = io.StringIO(newline="")
    rows = csv.DictWriter(text, [*keys, *columns], extrasaction="ignore")
    rows.writeheader()
    rows.writerows({**run, **each.values} for run, each in zip(runs, best, strict=True))
    write_atomically(folder / _TABLE, text.getvalue())


def read_summary(folder: Path) -> tuple[list[str], list[Outcome]]:
    """Return the keys and current outcomes of the sweep in ``folder``; empty if there is none that can be read."""
    try:
        record = read_json(folder / RECORD)
        names = [each.name for each in fields(Outcome)]
        noted = [Outcome(**{name: run[name] for name in names}) for run in record["runs"]]
        keys = [str(key) for key in record["keys"]]
    except (OSError, ValueError, KeyError, TypeError):
        return [], []
    return keys, [newer(Outcome(**{**vars(each), "run_dir": Path(each.run_dir)})) for each in noted]


def newer(noted: Outcome) -> Outcome:
    """Return the outcome in the run folder, unless ``noted`` is newer: a run that fails at start writes no status."""
    found = read_outcome(noted.run_dir, noted.values)
    return found if found.state != "not started" and found.time >= noted.time else noted


def table(keys: Sequence[str], outcomes: Sequence[Outcome]) -> str:
    """Return the runs, best first: swept values, losses, rate, state and folder."""
    label = labels(keys)
    rows = [[*label.values(), "loss", "validation", "tok/s", "state", "folder"]]
    for each in sorted(outcomes, key=Outcome.rank):
        numbers = [_number(each.loss, ".4f"), _number(each.validation_loss, ".4f"), _number(each.tokens_per_second)]
        rows.append([*(shown(each.values.get(key, "")) for key in keys), *numbers, _state(each), str(each.run_dir)])
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )


def shown(value: str) -> str:
    """Return a value for a person to read: long numbers have six digits."""
    try:
        return value if len(value) <= _LONG else f"{float(value):.6g}"
    except ValueError:
        return value


def _state(outcome: Outcome) -> str:
    has_step = outcome.state not in ("finished", "not started", "queued")
    return f"{outcome.state} at {outcome.step}" if has_step else outcome.state


def _number(value: float | None, form: str = ",.0f") -> str:
    return "-" if value is None else format(value, form)
