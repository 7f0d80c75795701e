"""At the end of a Slurm job: how did the run end, and is another start worth it?

``python -m launch.requeue RUN START`` prints a line about it, and exits with 75 where the job is to be queued again.
"""

import json
import re
import sys
from pathlib import Path
from typing import Any

from serried.configs.errors import EXIT_FAILED, EXIT_FINISHED, EXIT_STOPPED
from serried.configs.plain_data import parse_json, read_bytes
from serried.records.status import read_status

ENDS = "ends.jsonl"
"""In ``run.dir/slurm``: how each start of the run under Slurm ended, one line of JSON each."""

_WANTED = ("control", "trainer.stop_at")  # a person wants no more of it for now
_ASKED_FOR = ("SIGTERM", "SIGINT", "SIGHUP")  # preemption, mostly: no fault of the run's
_OUT_OF_TIME = ("SIGUSR1", "Slurm ends this job")
_CHECKPOINT = re.compile(r"step-([0-9]{8,})")
_FRUITLESS_STARTS = 2


def verdict(run_dir: Path, start: Path) -> tuple[int, str]:
    """The exit code of the job, 75 where another start is worth it, and a line that says why.

    ``start`` is a file named for the job and made when this start of it began: an older ``status.json`` is an earlier
    start's. A run that is still ``running`` was killed, and goes on from its checkpoint. Twice the same end at the same
    step is not worth a third start, and neither are two starts in a row that saved nothing: that is a crash loop.
    """
    status = read_status(run_dir)
    if status is not None and status.time >= start.stat().st_mtime:
        state, step, where = status.state, status.step, f"at step {status.step}"
        reason = "killed without a word" if state == "running" else status.reason or ""
        if state in ("finished", "failed"):
            _note(run_dir, start, state, step, reason)
            return status.exit_code or 0, f"{state} {where}: {reason}"
    elif _was_stopped(start):
        state, step, where = "stopped", -1, "before training began"
        reason = start.with_suffix(".stopped").read_text("utf-8", "replace").strip() or "a signal"
    else:
        return EXIT_FAILED, f"failed before training began: see the logs of the nodes beside {start}"
    is_same, fruitless = _note(run_dir, start, state, step, reason)
    if reason.startswith(_WANTED):
        return EXIT_FINISHED, f"stopped {where}: {reason}. Not queued again; the same command goes on"
    if not reason.startswith(_ASKED_FOR) and (is_same or fruitless >= _FRUITLESS_STARTS):
        what = f"have ended {where}" if is_same else f"have saved nothing, the last one has ended {where}"
        mend = "raise slurm.time_minutes, or lower checkpoint.every" if reason.startswith(_OUT_OF_TIME) else "mend that"
        return (
            EXIT_FAILED,
            f"crash loop: two starts in a row {what} ({reason}). Not queued again; {mend}, and submit the same command",
        )
    return EXIT_STOPPED, f"stopped {where}: {reason}"


def _was_stopped(start: Path) -> bool:
    """Whether a request ended the start before there was a status: a rank or a node's shell has left a file. Not where
    a node failed by itself, for which Slurm has sent SIGTERM to the others."""
    return start.with_suffix(".stopped").exists() and not start.with_suffix(".failed").exists()


def _note(run_dir: Path, start: Path, state: str, step: int, reason: str) -> tuple[bool, int]:
    """Write down how this start ended. Returns whether the one before, of the same job, ended alike, and how many in a
    row have saved nothing. Those that were asked to end are not among them: they may have had no time to."""
    before = _last_end(run_dir)
    # Numbers aside: ranks, seconds and hours differ from one time to the next.
    now = {"job": start.stem, "state": state, "step": step, "reason": re.sub(r"\d+", "N", reason)}
    is_same = all(before.get(key) == value for key, value in now.items())
    newest = _newest_checkpoint(run_dir)
    fruitless = before.get("fruitless", 0) if before.get("job") == start.stem else 0
    if newest != before.get("newest_checkpoint"):
        fruitless = 0
    elif not reason.startswith(_ASKED_FOR):
        fruitless += 1
    with (run_dir / "slurm" / ENDS).open("a", encoding="utf-8") as file:
        file.write(json.dumps({**now, "newest_checkpoint": newest, "fruitless": fruitless}) + "\n")
    return is_same, fruitless


def _newest_checkpoint(run_dir: Path) -> int | None:
    """Step of the newest checkpoint; None where there is none. A name without a dot is a whole one."""
    names = (_CHECKPOINT.fullmatch(path.name) for path in (run_dir / "checkpoints").glob("step-*"))
    return max((int(name[1]) for name in names if name is not None), default=None)


def _last_end(run_dir: Path) -> dict[str, Any]:
    try:
        return dict(parse_json(read_bytes(run_dir / "slurm" / ENDS).splitlines()[-1]))
    except (OSError, ValueError, IndexError, TypeError):
        return {}


if __name__ == "__main__":
    code, line = verdict(Path(sys.argv[1]), Path(sys.argv[2]))
    print(line, flush=True)
    sys.exit(code)
