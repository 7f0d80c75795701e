"""Input of trackers: the run, and the events of ``metrics.jsonl`` as one row per step."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from serried.records.metrics import logged_images
from serried.records.run_folder import place_of

_SECTIONS = {"step": "train", "eval": "validation", "spike": "spike"}
_LOGGED = "log"
"""Event with the values that a callback logged, and the section in which trackers show them."""
_COUNTED = {"start": "starts", "rollback": "rollbacks", "spike": "spikes", "lost": "losses", "joined": "joins"}
"""Events that the summary counts, and the names of their numbers."""
_NOT_NUMBERS = ("event", "time", "step", "set")
_SPEED = (
    "step_seconds", "tokens_per_second", "tokens_per_second_per_device", "mfu", "data_seconds", "memory_bytes",
    "memory_reserved_bytes", "eta_seconds", "time_split", "slowest_rank", "slowest_share",
)  # fmt: skip
"""Metrics of a step that trackers show in the section ``speed/``. All others are shown under ``train/``."""


class Run(NamedTuple):
    """The run whose records are sent, as its newest start recorded it."""

    folder: Path
    identity: str  # tracker_run_id: the same for all starts of a run
    config: Mapping[str, Any]
    facts: Mapping[str, Any]  # the start event, and environment.json
    rollbacks: Sequence[int]  # the steps that rollbacks returned to

    @property
    def name(self) -> str:
        """``run.name``."""
        return str(self.config["run"]["name"])


class Row(NamedTuple):
    """Numbers, texts and images of one step."""

    step: int
    time: float  # time of the first of them, in Unix seconds
    values: dict[str, float]
    texts: dict[str, str]
    images: dict[str, list[Path]]  # PNG files


class Tracker(Protocol):
    """Interface of a tracker, which is created from a ``Run``. An exception costs records, never the run."""

    last_step: int
    """Last step of the run that the tracker already has; -1 if none."""
    note: str
    """Address of the run, printed for the user."""

    def write(self, rows: Sequence[Row]) -> None:
        """Send ``rows``, in increasing order of steps."""

    def close(self, summary: Mapping[str, Any]) -> None:
        """Send the summary of the run and close."""


class Rows:
    """Collects the metrics of one step from its events, so that a tracker gets each step once."""

    def __init__(self, run_dir: Path) -> None:
        place = place_of(run_dir)
        self.summary: dict[str, Any] = {"run_dir": place, "report": f"{place}/report.html"}
        self._run_dir = run_dir
        self._row: Row | None = None

    def feed(self, event: Mapping[str, Any]) -> Iterator[Row]:
        """Process an event; yield the row of the previous step if the event belongs to a later step."""
        self._sum_up(event)
        values, texts = dict(_numbers(event)), _texts(event)
        images = self._images(event)
        is_late = event["event"] == "step" and self._row is not None and event.get("step", 0) < self._row.step
        if is_late or not (values or texts or images):  # late: a rank that was frozen writes a step that others redid
            return
        if self._row is not None and event["step"] > self._row.step:
            yield from self.rest()
        self._row = self._row or Row(event["step"], event["time"], {}, {}, {})
        self._row.values.update(values)
        self._row.texts.update(texts)
        self._row.images.update(images)

    @property
    def newest(self) -> list[Row]:
        """List with the row that is not complete yet; empty if there is none."""
        return [] if self._row is None else [self._row]

    def rest(self) -> Iterator[Row]:
        """Yield the row that is not complete yet, if there is one."""
        row, self._row = self._row, None
        if row is not None:
            yield row

    def _images(self, event: Mapping[str, Any]) -> dict[str, list[Path]]:
        """Return the image files of an event by name."""
        images = logged_images(self._run_dir, event.get("images") if event["event"] == _LOGGED else None)
        return {f"{_LOGGED}/{name}": paths for name, paths in images.items()}

    def _sum_up(self, event: Mapping[str, Any]) -> None:
        kind, summary = event["event"], self.summary
        if (counted := _COUNTED.get(kind)) is not None:
            summary[counted] = summary.get(counted, 0) + 1
        if kind == "start":
            summary.update(state="running", reason=None)
        elif kind == "stop":
            summary.update(state=event["state"], reason=event["reason"])
        elif kind == "checkpoint":
            summary["checkpoint"] = event["path"]


def _numbers(event: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """Yield the name and value of each number in an event that belongs to a step. Names begin with the section in which
    trackers show the number."""
    if event["event"] == _LOGGED:
        yield from _named(_LOGGED, event.get("metrics"))
        return
    section = _SECTIONS.get(event["event"])
    further = "" if event.get("set", "validation") == "validation" else f"/{event['set']}"
    for key, value in event.items() if section else ():
        if key not in _NOT_NUMBERS:
            yield from _named(f"{'speed' if key in _SPEED else section}{further}/{key}", value)


def _texts(event: Mapping[str, Any]) -> dict[str, str]:
    """Return the texts of an event by name."""
    texts = event.get("texts") if event["event"] == _LOGGED else None
    return {f"{_LOGGED}/{name}": str(text) for name, text in texts.items()} if isinstance(texts, Mapping) else {}


def _named(name: str, value: Any) -> Iterator[tuple[str, float]]:
    if isinstance(value, Mapping):
        for key, each in value.items():
            yield from _named(f"{name}/{key}", each)
    elif isinstance(value, bool | int | float):
        yield name, value
