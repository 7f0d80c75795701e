"""Decide at the end of a Slurm or Kubernetes job whether to start it again.

``python -m serried.launch.slurm.requeue RUN START`` prints how the run ended, and exits with 75 to queue the job again.
For a run in a bucket, this is the machine of rank 0, which has its status in the scratch folder.
"""

import json
import re
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from serried.configs.bucket_urls import is_bucket_url
from serried.configs.errors import EXIT_FAILED, EXIT_FINISHED, EXIT_STOPPED, UserError
from serried.configs.formats import printable
from serried.configs.plain_data import parse_json, read_bytes
from serried.configs.schema.fields import scratch_folder
from serried.records.head import read_head
from serried.records.object_store import open_store
from serried.records.status import read_status
from serried.records.store import Store, StoreError
from serried.runtime.cloud_notice import NOTICE

ENDS = "ends.jsonl"
"""File next to the start files that records how each start of the run ended, as a line of JSON."""

_WANTED = ("control", "trainer.stop_at")  # requested by the user
ANOTHER_POD = "another pod ended"
_ASKED_FOR = ("SIGTERM", "SIGINT", "SIGHUP", ANOTHER_POD, NOTICE)  # mostly preemption, not a fault of the run
_OUT_OF_TIME = ("SIGUSR1", "Slurm ends this job")
_CHECKPOINT = re.compile(r"step-([0-9]{8,})")
_FRUITLESS_STARTS = 2
_BUCKET_RETRY_SECONDS = 20.0


def verdict(
    run_dir: Path, start: Path, *, is_recorded: bool = True, has_lost_pod: bool = False,
    newest_checkpoint: Callable[[], int | None] | None = None,
) -> tuple[int, str]:  # fmt: skip
    """Return the job's exit code, which is 75 if it should be started again, and a line with the reason.

    ``start`` is a file named after the job and created when this start began: a ``status.json`` older than it
    belongs to an earlier start. A run whose state is still ``running`` was killed, and resumes from its
    checkpoint. Ending twice in the same way at the same step, or two starts in a row without a checkpoint, count
    as a crash loop. If ``is_recorded`` is false, crash loops are not detected here, since another process records the
    end. ``has_lost_pod``: whether another pod ended before the processes here, which explains their end.
    ``newest_checkpoint`` returns the step of the newest checkpoint of a run that has none in ``run_dir``.
    """
    find_newest = newest_checkpoint or partial(_newest_checkpoint, run_dir)
    status = read_status(run_dir)
    if status is not None and status.time >= start.stat().st_mtime:
        state = status.state
        step = status.step
        where = f"at step {status.step}"
        reason = "killed without a message" if state == "running" else status.reason or ""
        if has_lost_pod and state in ("running", "failed"):
            state, reason = "stopped", ANOTHER_POD
        if state in ("finished", "failed"):
            if is_recorded:
                _note(find_newest(), start, state, step, reason)
            return status.exit_code or 0, f"{state} {where}: {reason}"
    elif _was_stopped(start):
        state = "stopped"
        step = -1
        where = "before training began"
        reason = start.with_suffix(".stopped").read_text("utf-8", "replace").strip() or "a signal"
    else:
        return EXIT_FAILED, f"failed before training began; see the logs of the nodes in {start.parent}"
    is_same, fruitless = _note(find_newest(), start, state, step, reason) if is_recorded else (False, 0)
    if reason.startswith(_WANTED):
        return EXIT_FINISHED, f"stopped {where}: {reason}. Not started again; run the same command to resume"
    if not reason.startswith(_ASKED_FOR) and (is_same or fruitless >= _FRUITLESS_STARTS):
        what = f"ended {where}" if is_same else f"saved no checkpoint, and the last one ended {where}"
        is_out_of_time = reason.startswith(_OUT_OF_TIME)
        fix = "raise slurm.time_minutes, or lower checkpoint.every" if is_out_of_time else "fix the cause"
        return (
            EXIT_FAILED,
            f"crash loop: two starts in a row {what} ({reason}). Not started again; {fix}, and submit the same command",
        )
    return EXIT_STOPPED, f"stopped {where}: {reason}"


def earlier_end(start: Path) -> str | None:
    """Return how the last start of this job ended, if nothing should follow; else None.

    ``start``: start file of the job, next to the recorded ends.
    """
    end = _last_end(start.parent)
    state, reason = end.get("state"), str(end.get("reason"))
    if end.get("job") == start.stem and (state == "finished" or (state == "stopped" and reason.startswith(_WANTED))):
        return printable(f"{state} at step {end.get('step')}: {reason}")
    return None


def _was_stopped(start: Path) -> bool:
    """Return whether a request to stop ended the start before a status was written. A rank or a node's shell then
    creates a file. False if a node failed, since Slurm then sends SIGTERM to the other nodes."""
    return start.with_suffix(".stopped").exists() and not start.with_suffix(".failed").exists()


def _note(newest: int | None, start: Path, state: str, step: int, reason: str) -> tuple[bool, int]:
    """Record how this start ended. Return whether the previous start of the same job ended in the same way, and the
    number of starts in a row that saved nothing. Starts that were asked to end are not counted: they may have had no
    time to save."""
    before = _last_end(start.parent)
    # Compared without numbers: ranks, seconds and times of day differ between starts.
    now = {"job": start.stem, "state": state, "step": step, "reason": re.sub(r"\d+", "N", reason)}
    is_same = all(before.get(key) == value for key, value in now.items())
    fruitless = before.get("fruitless", 0) if before.get("job") == start.stem else 0
    if newest != before.get("newest_checkpoint"):
        fruitless = 0
    elif not reason.startswith(_ASKED_FOR):
        fruitless += 1
    with (start.parent / ENDS).open("a", encoding="utf-8") as file:
        file.write(json.dumps({**now, "newest_checkpoint": newest, "fruitless": fruitless}) + "\n")
    return is_same, fruitless


def _newest_checkpoint(run_dir: Path) -> int | None:
    """Return the step of the newest checkpoint; None if there is none. Folders of complete checkpoints have no dot
    in their name."""
    names = (_CHECKPOINT.fullmatch(path.name) for path in (run_dir / "checkpoints").glob("step-*"))
    return max((int(name[1]) for name in names if name is not None), default=None)


def _last_end(folder: Path) -> dict[str, Any]:
    try:
        return dict(parse_json(read_bytes(folder / ENDS).splitlines()[-1]))
    except (OSError, ValueError, IndexError, TypeError):
        return {}


def newest_in_bucket(store: Store) -> int | None:
    """Return the step of the newest checkpoint of the run in ``store``; None if there is none, or no answer."""
    with suppress(StoreError, UserError):
        if (head := read_head(store)) is not None and head.checkpoints:
            return head.checkpoints[-1].step
    return None


def verdict_of(run: str, start: Path) -> tuple[int, str]:
    """Return the ``verdict`` of the run at ``run``, a path or the URL of a run in a bucket."""
    if not is_bucket_url(run):
        return verdict(Path(run), start)

    def newest_checkpoint() -> int | None:
        with suppress(UserError):  # no credentials outside of the job's steps
            return newest_in_bucket(open_store(run, retry_seconds=_BUCKET_RETRY_SECONDS))
        return None

    return verdict(scratch_folder(run), start, newest_checkpoint=newest_checkpoint)


if __name__ == "__main__":
    code, line = verdict_of(sys.argv[1], Path(sys.argv[2]))
    print(line, flush=True)
    sys.exit(code)
