"""From the events of ``metrics.jsonl`` to one row of numbers a step, and a summary of the run."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from serried.configs.schema import DEFAULT_VALIDATION
from serried.records.trackers.tracker import Row

_ABOUT_THE_LINE = ("event", "time", "step", "set")
_SPEED = (
    "step_seconds", "tokens_per_second", "tokens_per_second_per_device", "mfu", "data_seconds", "memory_bytes",
    "memory_reserved_bytes", "eta_seconds", "time_split", "slowest_rank", "slowest_share",
)  # fmt: skip


class Rows:
    """Gathers what the events of one step tell into one row, so that a tracker is given each step once."""

    def __init__(self, run_dir: Path) -> None:
        self.start: dict[str, Any] = {}
        """The newest ``start`` event."""
        self.rollbacks = 0
        self.summary: dict[str, Any] = {"run_dir": str(run_dir), "report": str(run_dir / "report.html"), "starts": 0}
        self._gathering: Row | None = None

    def feed(self, event: Mapping[str, Any]) -> Iterator[Row]:
        """Take an event; yields the row of the step before, once the event is of a later one."""
        self._sum_up(event)
        values = dict(_numbers(event))
        if not values:
            return
        if self._gathering is not None and event["step"] > self._gathering.step:
            yield from self.rest()
        if self._gathering is None:
            self._gathering = Row(event["step"], event["time"], {})
        self._gathering.values.update(values)

    def rest(self) -> Iterator[Row]:
        """The row that was being gathered."""
        row, self._gathering = self._gathering, None
        if row is not None:
            yield row

    def _sum_up(self, event: Mapping[str, Any]) -> None:
        kind, summary = event["event"], self.summary
        if kind == "start":
            self.start = dict(event)
            summary.update(state="running", starts=summary["starts"] + 1)
            summary.pop("reason", None)
        elif kind == "step":
            summary["last_step"] = event["step"]
            if event["loss"] is not None:
                summary["final_loss"] = event["loss"]
            if event["skipped"]:
                summary["skipped_steps"] = summary.get("skipped_steps", 0) + 1
        elif kind == "eval" and event["set"] == DEFAULT_VALIDATION and event["loss"] is not None:
            summary["final_validation_loss"] = event["loss"]
            if event["loss"] <= summary.get("best_validation_loss", event["loss"]):
                summary.update(best_validation_loss=event["loss"], best_validation_step=event["step"])
        elif kind == "checkpoint":
            summary.update(checkpoint=event["path"], checkpoint_step=event["step"])
        elif kind == "spike":
            summary["spikes"] = summary.get("spikes", 0) + 1
        elif kind == "rollback":
            self.rollbacks += 1
            summary["rollbacks"] = self.rollbacks
        elif kind == "stop":
            summary.update(state=event["state"], reason=event["reason"])


def _numbers(event: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """The numbers of an event that belongs to a step, named so that a tracker puts them into sections."""
    kind = event["event"]
    for key, value in event.items():
        if kind == "step" and key not in _ABOUT_THE_LINE:
            yield from _named(f"{'speed' if key in _SPEED else 'train'}/{key}", value)
        elif kind == "eval" and key not in (*_ABOUT_THE_LINE, "nonfinite"):
            name = "validation" if event["set"] == DEFAULT_VALIDATION else f"validation/{event['set']}"
            yield from _named(f"{name}/{'source_loss' if key == 'source_losses' else key}", value)
        elif kind == "spike" and key not in (*_ABOUT_THE_LINE, "skipped"):
            yield from _named(f"spike/{key}", value)


def _named(name: str, value: Any) -> Iterator[tuple[str, float]]:
    if isinstance(value, Mapping):
        for key, each in value.items():
            yield from _named(f"{name}/{key}", each)
    elif isinstance(value, bool | int | float):
        yield name, value
