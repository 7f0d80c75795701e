"""``metrics.jsonl``: one JSON object per line, readable even after a crash or on a full disk."""

import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from serried.configs.errors import UserError
from serried.configs.plain_data import NotPlainData, is_count, is_number, open_regular, parse_json
from serried.configs.schema.sections import DEFAULT_VALIDATION

METRICS = "metrics.jsonl"
LOST_METRICS = "lost.jsonl"
"""File with the records of steps that were lost in a crash or a rollback."""
_OURS = frozenset((
    "event", "time", "step", "set", "nonfinite", "loss", "grad_norm", "lr", "lr_by_group", "samples", "tokens",
    "source_tokens", "source_losses", "seconds", "step_seconds", "tokens_per_second", "tokens_per_second_per_device",
    "samples_per_second", "samples_per_second_per_device", "mfu", "memory_bytes", "memory_reserved_bytes",
    "data_seconds", "slowest_rank", "slowest_share", "time_split", "eta_seconds", "skipped", "scale",
    "expert_tokens", "expert_load",
))  # fmt: skip
"""Keys of events ``step`` and ``eval`` that every run writes. Other numbers are metrics of the task."""
_MOST_LINE_BYTES = 16 * 2**20
_EVENTS_AT_A_TIME = 1000
_LAST_BYTES = 4 * 2**20


def parse_event(line: bytes | str) -> dict[str, Any] | None:
    """Return the event in one line; None if the line is torn or not a valid event.

    ``event`` is a string; ``step``, if present, is an integer >= 0; ``time``, if present, is a finite number.
    """
    try:
        event = parse_json(line)
    except NotPlainData:
        return None
    if not isinstance(event, dict) or not isinstance(event.get("event"), str):
        return None
    has_step, has_time = is_count(event.get("step", 0)), is_number(event.get("time", 0))
    return event if has_step and has_time else None


def check_metric_names(names: Iterable[str]) -> None:
    """Raise ``UserError`` if a task gives a metric the name of a value that every run records."""
    if taken := [name for name in names if name in _OURS]:
        raise UserError(
            f"the task has a metric named {taken[0]}, but every run records its own value with this name; rename the "
            "metric"
        )


def named_metrics(event: Mapping[str, Any]) -> dict[str, float]:
    """Return the metrics that the task reported in an event ``step`` or ``eval``."""
    return {name: value for name, value in event.items() if name not in _OURS and is_number(value)}


def read_events(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the events of a ``metrics.jsonl`` in order. Invalid lines are skipped; an unreadable file yields
    nothing."""
    try:
        with open_regular(path) as file:
            while line := file.readline(_MOST_LINE_BYTES):
                if (event := parse_event(line)) is not None:
                    yield event
    except (OSError, NotPlainData):
        return


def without_repeats(events: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return ``events`` with the last of several lines of a step, in the place of the first.

    A step that is trained again after a loss has two lines with the same numbers, up to rounding, if the lost process
    wrote one before it was lost, or later, as it was only frozen.
    """
    kept: list[dict[str, Any]] = []
    places: dict[tuple[Any, ...], int] = {}
    for event in events:
        key = event["event"], event.get("step"), str(event.get("set"))
        if key in places:
            kept[places[key]] = event
            continue
        if key[0] in ("step", "eval"):
            places[key] = len(kept)
        kept.append(event)
    return kept


def last_of_each_kind(path: Path) -> dict[str, dict[str, Any]]:
    """Return the last event of each kind in a ``metrics.jsonl``. For ``eval``, only the default validation set
    counts. For ``step``, it is the last event of the newest step."""
    last: dict[str, dict[str, Any]] = {}
    for event in read_events(path):
        kind = event["event"]
        is_old = kind == "step" and kind in last and event.get("step", 0) < last[kind].get("step", 0)
        if event.get("set", DEFAULT_VALIDATION) == DEFAULT_VALIDATION and not is_old:
            last[kind] = event
    return last


def logged_images(run_dir: Path, images: Any) -> dict[str, list[Path]]:
    """Return the files of ``images`` of an event ``log`` by name. Files that are missing or outside ``run_dir`` are
    left out."""
    found: dict[str, list[Path]] = {}
    for name, paths in images.items() if isinstance(images, Mapping) else ():
        parts = [Path(path) for path in paths if isinstance(path, str)] if isinstance(paths, list) else []
        inside = [run_dir / path for path in parts if not path.is_absolute() and ".." not in path.parts]
        found[str(name)] = [path for path in inside if path.is_file()]
    return found


def last_events(path: Path, step: int) -> list[dict[str, Any]]:
    """Return the events of ``step`` in the last lines of a ``metrics.jsonl``."""
    try:
        with open_regular(path) as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _LAST_BYTES))
            lines = file.read().splitlines()
    except (OSError, NotPlainData):
        return []
    return [event for event in map(parse_event, lines) if event is not None and event.get("step") == step]


class GrowingFile:
    """A ``metrics.jsonl`` that is read while a run writes it. A rollback replaces it by another file.

    Raises:
        OSError: the file cannot be opened.
        NotPlainData: the path is not a regular file.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = open_regular(path)
        self._torn = b""

    def read(self) -> list[dict[str, Any]]:
        """Return the next events, at most 1000."""
        events: list[dict[str, Any]] = []
        while len(events) < _EVENTS_AT_A_TIME and (line := self._torn + self._file.readline(_MOST_LINE_BYTES)):
            self._torn = b"" if line.endswith(b"\n") else line
            if self._torn:
                break
            if (event := parse_event(line)) is not None:
                events.append(event)
        return events

    def is_replaced(self) -> bool:
        """Return whether the path now leads to another file."""
        return not os.path.samestat(self._path.stat(), os.fstat(self._file.fileno()))
