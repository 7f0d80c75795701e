"""``serried status``: how a run stands, from its run folder and from Slurm's queue. Needs neither Slurm nor torch."""

import json
import shlex
import time
from pathlib import Path
from typing import Any

import yaml

from serried.configs.announce import duration
from serried.launch.queue import jobs_of, queued_jobs, was_submitted
from serried.launch.summary import RECORD, read_summary, table
from serried.records.status import read_status


def runs_in(folder: Path) -> list[Path]:
    """Run folders in ``folder``: those that have a status, or were submitted; and the folders of sweeps."""

    def is_one(path: Path) -> bool:
        return (path / "status.json").exists() or (path / RECORD).exists() or was_submitted(path)

    try:
        return sorted(filter(is_one, folder.iterdir()))
    except OSError:
        return []


def describe_run(run_dir: Path) -> str:
    """State, job, step, loss and time left of one run, a line each; of a sweep a line for each of its runs."""
    keys, outcomes = read_summary(run_dir)
    if outcomes:
        done = sum(each.is_finished for each in outcomes)
        return f"sweep  {run_dir}: {done} of {len(outcomes)} runs finished\n{table(keys, outcomes)}"
    lines = [("run", str(run_dir))]
    queued = queued_jobs()
    jobs = jobs_of(run_dir, queued or [])
    lines += [("job", job.describe()) for job in jobs]
    if not jobs and was_submitted(run_dir):
        lines.append(("job", "none in the queue" if queued is not None else "squeue does not answer here"))
    status = read_status(run_dir)
    if status is None:
        lines.append(("state", "not started"))
    else:
        ended = "" if status.exit_code is None else f", exit code {status.exit_code}"
        reason = f": {status.reason}" if status.reason else ""
        lines.append(("state", f"{status.state}{reason}{ended}"))
        lines.append(("step", _step(run_dir, status.step, is_running=status.state == "running")))
    if jobs and jobs[0].state != "PENDING":
        number = jobs[0].name
        lines.append(("watch", f"tail -F {shlex.quote(str(run_dir / 'slurm' / f'{number}-node-0.log'))}"))
    return "\n".join(f"{name:<6} {text}" for name, text in lines)


def _step(run_dir: Path, step: int, *, is_running: bool) -> str:
    last = _last_step(run_dir)
    steps = _steps(run_dir)
    parts = [f"{step}" + (f"/{steps}" if steps else "")]
    if last.get("loss") is not None:
        parts.append(f"loss {last['loss']:.4f}" + ("" if last["step"] == step else f" at step {last['step']}"))
    if is_running and "time" in last:
        since = max(0.0, time.time() - last["time"])
        if last.get("eta_seconds") is not None:
            parts.append(f"eta {duration(max(0.0, last['eta_seconds'] - since))}")
        parts.append(f"last line {duration(since)} ago")
    return ", ".join(parts)


def _last_step(run_dir: Path) -> dict[str, Any]:
    """The last line of ``metrics.jsonl`` about a step; empty where there is none."""
    try:
        lines = (run_dir / "metrics.jsonl").read_text().splitlines()
    except OSError:
        return {}
    for line in reversed(lines):
        try:
            values = json.loads(line)
        except ValueError:  # being written
            continue
        if values.get("event") == "step":
            return dict(values)
    return {}


def _steps(run_dir: Path) -> int | None:
    try:
        return int(yaml.safe_load((run_dir / "config.yaml").read_text())["trainer"]["steps"])
    except (OSError, ValueError, KeyError, TypeError, yaml.YAMLError):
        return None
