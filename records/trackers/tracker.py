"""What a tracker is to the process that feeds it."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

Summary = Mapping[str, Any]


class Row(NamedTuple):
    """All numbers of one step."""

    step: int
    time: float
    """Of the first of them, in unix seconds."""
    values: dict[str, float]


class Held(NamedTuple):
    """What a tracker has of a run already."""

    step: int
    """The last; -1: none."""
    rollbacks: int
    """How many of the run's it was told of: the steps after the last of them are the newest."""


@dataclass(frozen=True)
class Run:
    """The run that is mirrored."""

    folder: Path
    identity: str
    """``tracker_run_id``: the same for all starts of a run."""
    config: dict[str, Any]
    """config.yaml: the resolved ``RunConfig``."""
    facts: dict[str, Any]
    """What the start of the run told: processes, mesh, parameters, ...; and ``environment.json``."""
    rollbacks: int
    """How often it had gone back when this was read."""

    @property
    def name(self) -> str:
        """``run.name``."""
        return str(self.config["run"]["name"])

    @property
    def track(self) -> dict[str, Any]:
        """The section ``track``."""
        return dict(self.config["track"])

    def time_of(self, step: int) -> float | None:
        """When the line of ``step`` was written to ``metrics.jsonl``, in unix seconds; None: it has none."""
        mark = re.compile(rf'"step": {step}\b')
        with (self.folder / "metrics.jsonl").open() as lines:
            for line in filter(mark.search, lines):
                event = json.loads(line)
                if (event["event"], event["step"]) == ("step", step):
                    return float(event["time"])
        return None


class Tracker(Protocol):
    """One tracker. Whatever it raises costs its records, never the run."""

    uses_network: bool
    """Whether ``open`` may wait for another machine."""
    follows_changes: bool
    """Whether ``open`` is to be called again, and all told anew, when lines of ``metrics.jsonl`` were taken back."""

    def open(self, run: Run) -> Held:
        """Begin to mirror ``run``. Returns what the tracker has of it already."""

    def write(self, rows: Sequence[Row]) -> None:
        """Take ``rows``, whose steps increase."""

    def caught_up(self) -> None:
        """All that there was at ``open`` is written: what earlier starts left may go. Called once after each."""

    def summarize(self, summary: Summary) -> None:
        """Take what is known of the whole run so far."""

    def close(self, summary: Summary) -> None:
        """The run has ended."""

    def note(self) -> str:
        """Where to look, for the user."""


def flat(tree: Any, prefix: str = "") -> dict[str, Any]:
    """Leaves of nested sections, by their dotted names."""
    if not isinstance(tree, Mapping):
        return {prefix.rstrip("."): tree}
    return {key: value for name, part in tree.items() for key, value in flat(part, f"{prefix}{name}.").items()}
