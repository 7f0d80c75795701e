"""What ``status.json`` of a run folder says. The ranks write it; who starts and watches them reads it."""

import json
import os
from pathlib import Path
from typing import NamedTuple

from serried.configs.errors import EXIT_FAILED


class Status(NamedTuple):
    """How a run stands, or ended."""

    state: str
    """running, finished, stopped or failed."""
    step: int
    reason: str | None
    exit_code: int | None
    time: float
    """When it was written, in Unix seconds."""


def read_status(run_dir: Path) -> Status | None:
    """What ``status.json`` in ``run_dir`` says; None where there is none that can be read."""
    path = run_dir / "status.json"
    try:
        values = json.loads(path.read_text())
        return Status(
            str(values["state"]), int(values["step"]), values["reason"], values["exit_code"], path.stat().st_mtime
        )
    except (OSError, ValueError, KeyError, TypeError):
        return None


def tell_of_a_kill(run_dir: Path, reason: str, *, since: float) -> None:
    """Have ``status.json`` say that the run failed for ``reason``: a rank was killed, and had no time to say so.

    Where it says ``running`` nobody is left to say more; where it says ``failed``, that is what the killed rank's peers
    met. A status from before ``since``, in Unix seconds, is an earlier run's, and stays.

    Raises:
        OSError: the disk fails.
    """
    status = read_status(run_dir)
    if status is None or status.time < since or status.state not in ("running", "failed"):
        return
    values = json.loads((run_dir / "status.json").read_text())
    ended = {**values, "state": "failed", "reason": reason, "exit_code": EXIT_FAILED}
    if status.state == "failed" and values.get("last_failure"):
        ended["last_failure"] = {**values["last_failure"], "reason": reason}
    temporary = run_dir / f".status.json.{os.getpid()}.tmp"
    temporary.write_text(json.dumps(ended) + "\n")
    temporary.replace(run_dir / "status.json")
