"""``status.json``: the state of a run. Ranks and their launcher write it; all code reads it with this module."""

import json
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from serried.configs.errors import EXIT_FAILED
from serried.configs.formats import printable
from serried.configs.plain_data import NotPlainData, is_count, read_json
from serried.records.files import write_atomically

STATUS = "status.json"
_MOST_BYTES = 2**20


class Members(NamedTuple):
    """Replicas that train a run which continues after losses."""

    generation: int
    """Number of times that the run has continued with other replicas."""
    replicas: int
    total_replicas: int
    """Number of replicas of the layout."""

    def __str__(self) -> str:
        return f"{self.replicas} of {self.total_replicas} replicas"


@dataclass(frozen=True)
class Status:
    """State of a run."""

    state: str
    """State of the run: running, finished, stopped or failed."""
    step: int
    reason: str | None = None
    exit_code: int | None = None
    members: Members | None = None
    """None for a run that does not continue after losses."""
    time: float = field(default=0.0, compare=False)
    """Time of this record in Unix seconds."""


def read_status(run_dir: Path) -> Status | None:
    """Return the contents of ``status.json`` in ``run_dir``; None if it is missing or unreadable."""
    path = run_dir / STATUS
    try:
        values = read_json(path, _MOST_BYTES)
        written = path.stat().st_mtime
    except (OSError, NotPlainData):
        return None
    state, step, code = (values.get(name) for name in ("state", "step", "exit_code"))
    if not isinstance(state, str) or not is_count(step):
        return None
    reason = _line(values.get("reason"))
    counts: list[Any] = [values.get(name) for name in Members._fields]
    members = Members(*counts) if all(is_count(count) for count in counts) else None
    return Status(_line(state) or "", step, reason, code if type(code) is int else None, members, written)


def write_status(run_dir: Path, status: Status) -> None:
    """Replace ``status.json``."""
    values = {name: getattr(status, name) for name in ("state", "step", "reason", "exit_code")}
    values |= status.members._asdict() if status.members is not None else {}
    is_end = status.state != "running"  # ``running`` is written again with each logged step
    write_atomically(run_dir / STATUS, json.dumps(values) + "\n", survives_power_loss=is_end)


def record_end(run_dir: Path, state: str, *, step: int, reason: str, exit_code: int) -> None:
    """Record why this rank ended a run whose status is still ``running``: rank 0 may be killed before it can."""
    now = read_status(run_dir)
    if now is not None and now.state == "running":
        write_status(run_dir, Status(state, step, reason, exit_code, now.members))


def record_kill(run_dir: Path, reason: str, *, since: float) -> None:
    """Record that the run failed for ``reason``: a rank was killed and could not write a status.

    A status ``running`` will not be updated any more, and a status ``failed`` holds the consequence that other
    ranks saw, so both are replaced. A status from before ``since``, in Unix seconds, belongs to an earlier run
    and stays.
    """
    status = read_status(run_dir)
    if status is not None and status.time >= since and status.state in ("running", "failed"):
        write_status(run_dir, replace(status, state="failed", reason=reason, exit_code=EXIT_FAILED))


def _line(value: Any) -> str | None:
    return " ".join(printable(value).split()) if isinstance(value, str) and value else None
