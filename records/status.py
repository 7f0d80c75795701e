"""``status.json``: state of a run. Ranks and their launcher write it; all code reads it here."""

import json
import re
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from serried.configs.errors import EXIT_FAILED
from serried.configs.formats import printable
from serried.configs.plain_data import NotPlainData, is_count, read_json
from serried.records.files import write_atomically

STATUS = "status.json"
_MOST_BYTES = 2**20


class LastFailure(NamedTuple):
    """Step and reason of the last failure."""

    step: int
    reason: str | None


@dataclass(frozen=True)
class Status:
    """State of a run."""

    state: str
    """running, finished, stopped or failed."""
    step: int
    reason: str | None = None
    exit_code: int | None = None
    failures: int = 0
    """Failures in a row at the same step and for the same reason."""
    last_failure: LastFailure | None = None
    time: float = field(default=0.0, compare=False)
    """When it was written, in Unix seconds."""

    def next(self, state: str, *, step: int, reason: str | None, exit_code: int | None) -> "Status":
        """Return the new status of a run whose status was this one when it started.

        ``failures`` counts failures in a row at the same step and for the same reason (numbers in it, such as ports,
        may differ); a step beyond that ends the series.
        """
        failures, last = self.failures, self.last_failure
        if state == "failed":
            same = last is not None and (last.step, _without_numbers(last.reason)) == (step, _without_numbers(reason))
            failures, last = failures + 1 if same else 1, LastFailure(step, reason)
        elif last is not None and step > last.step:
            failures, last = 0, None
        return Status(state, step, reason, exit_code, failures, last)


NO_STATUS = Status("", 0)
"""Of a run that never started."""


def read_status(run_dir: Path) -> Status | None:
    """Return what ``status.json`` in ``run_dir`` says; None if there is none that can be read."""
    path = run_dir / STATUS
    try:
        values = read_json(path, _MOST_BYTES)
        written = path.stat().st_mtime
    except (OSError, NotPlainData):
        return None
    state, step, code, failures = (values.get(name) for name in ("state", "step", "exit_code", "failures"))
    if not isinstance(state, str) or not is_count(step):
        return None
    return Status(
        _line(state) or "",
        step,
        _line(values.get("reason")),
        code if type(code) is int else None,
        failures if is_count(failures) else 0,
        _last_failure(values.get("last_failure")),
        written,
    )


def _last_failure(values: Any) -> LastFailure | None:
    if not isinstance(values, dict) or not is_count(values.get("step")):
        return None
    return LastFailure(values["step"], _line(values.get("reason")))


def write_status(run_dir: Path, status: Status) -> None:
    """Replace ``status.json``.

    Raises:
        OSError: the disk fails.
    """
    values: dict[str, Any] = {name: getattr(status, name) for name in ("state", "step", "reason", "exit_code")}
    values["failures"] = status.failures
    if status.last_failure is not None:
        values["last_failure"] = status.last_failure._asdict()
    is_end = status.state != "running"  # a running one is replaced with each logged step
    write_atomically(run_dir / STATUS, json.dumps(values) + "\n", survives_power_loss=is_end)


def record_end(run_dir: Path, state: str, *, step: int, reason: str, exit_code: int) -> None:
    """Record why this rank ended a run that is recorded as running: rank 0 may be killed in a collective before it can.

    Raises:
        OSError: the disk fails.
    """
    now = read_status(run_dir)
    if now is not None and now.state == "running":
        write_status(run_dir, now.next(state, step=step, reason=reason, exit_code=exit_code))


def record_kill(run_dir: Path, reason: str, *, since: float) -> None:
    """Record that the run failed for ``reason``: a rank was killed, and had no time to write anything.

    If the status is ``running`` nobody is left to write more; if it is ``failed``, that is what the other ranks saw. A
    status from before ``since``, in Unix seconds, belongs to an earlier run and stays.

    Raises:
        OSError: the disk fails.
    """
    status = read_status(run_dir)
    if status is None or status.time < since or status.state not in ("running", "failed"):
        return
    last = status.last_failure
    if status.state == "failed" and last is not None:
        last = last._replace(reason=reason)
    write_status(run_dir, replace(status, state="failed", reason=reason, exit_code=EXIT_FAILED, last_failure=last))


def _line(value: Any) -> str | None:
    return " ".join(printable(value).split()) if isinstance(value, str) and value else None


def _without_numbers(text: str | None) -> str:
    return re.sub(r"\d+", "N", text or "")
