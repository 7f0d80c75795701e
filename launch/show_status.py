"""``serried status``: the state of a run, from its run folder and Slurm's queue. Needs neither Slurm nor torch."""

import shlex
import time
from pathlib import Path
from typing import Any

from serried.configs.formats import duration
from serried.configs.plain_data import is_count, is_number, read_if_there, value_at
from serried.launch.slurm.queue import jobs_of, queued_jobs, url_of_jobs, was_submitted
from serried.launch.sweep.sweep_table import RECORD, read_summary, table
from serried.records.goodput import goodput_of
from serried.records.lock import is_locked
from serried.records.metrics import METRICS, last_of_each_kind
from serried.records.run_folder import place_of
from serried.records.status import STATUS, Status, read_status
from serried.runtime.process import host_name


def runs_in(folder: Path) -> list[Path]:
    """Return the folders of runs and sweeps in ``folder``."""
    try:
        return sorted(filter(is_listed, folder.iterdir()))
    except OSError:
        return []


def is_listed(folder: Path) -> bool:
    """Return whether ``folder`` is of a run or a sweep: it has a status or a table, or was submitted to Slurm."""
    return (folder / STATUS).exists() or (folder / RECORD).exists() or was_submitted(folder)


def describe_run(run_dir: Path) -> str:
    """Return the state, job, step, loss and remaining time of a run, one per line; for a sweep, the table of its
    runs."""
    keys, outcomes = read_summary(run_dir)
    if outcomes:
        done = sum(outcome.is_finished for outcome in outcomes)
        return f"sweep  {run_dir}: {done} of {len(outcomes)} runs finished\n{table(keys, outcomes)}"
    lines = [("run", place_of(run_dir))]
    queued = queued_jobs()
    jobs = jobs_of(run_dir, queued or [])
    lines += [("job", job.describe()) for job in jobs]
    if not jobs and was_submitted(run_dir):
        lines.append(("job", "none in the queue" if queued is not None else "squeue does not answer here"))
    status = read_status(run_dir)
    if status is None and (url := url_of_jobs(run_dir)) is not None:
        lines.append(("state", f"in the bucket: serried status {shlex.quote(url)}"))
    elif status is None:
        lines.append(("state", "not started"))
    else:
        ended = "" if status.exit_code is None else f", exit code {status.exit_code}"
        reason = f": {status.reason}" if status.reason else ""
        is_running = status.state == "running"
        if is_running and _is_killed(run_dir, status):
            is_running, ended = False, ", but its process is gone; run the same command to resume"
        lines.append(("state", f"{status.state}{reason}{ended}"))
        lines.append(("step", _step(run_dir, status, is_running=is_running)))
        goodput = goodput_of(run_dir, now=time.time() if is_running else None)
        if goodput.starts:
            lines.append(("goodput", goodput.line()))
    if jobs and jobs[0].state != "PENDING":
        number = jobs[0].name
        lines.append(("watch", f"tail -F {shlex.quote(str(run_dir / 'slurm' / f'{number}-node-0.log'))}"))
    return "\n".join(f"{name:<7} {text}" for name, text in lines)


def run_values(run_dir: Path) -> dict[str, Any]:
    """Return the state of a run for other programs; values that are not known are None.

    Keys: ``run``, ``state`` (``not started``, ``running``, ``killed``, ``stopped``, ``failed`` or ``finished``),
    ``reason``, ``exit_code``, ``step``, ``steps``, ``loss``, ``eta_seconds``, ``last_line_seconds`` (age of the newest
    record), ``jobs`` (Slurm's job numbers), ``replicas``, ``total_replicas`` and ``generation`` (with
    ``recover.mode=memory``), ``goodput`` (productive share of the wall-clock time) and ``goodput_seconds`` (its parts).
    """
    status, last = read_status(run_dir), last_of_each_kind(run_dir / METRICS)
    step, now = last.get("step", {}), time.time()
    state = status.state if status else "not started"
    state = "killed" if status is not None and state == "running" and _is_killed(run_dir, status) else state
    goodput = goodput_of(run_dir, now=now if state == "running" else None)
    newest = max((event["time"] for event in last.values() if is_number(event.get("time"))), default=None)
    steps = value_at("trainer.steps", read_if_there(run_dir / "config.yaml"))
    return {
        "run": place_of(run_dir),
        "state": state,
        "reason": status and status.reason,
        "exit_code": status and status.exit_code,
        "step": status and status.step,
        "steps": steps if is_count(steps) else None,
        "loss": step.get("loss"),
        "eta_seconds": step.get("eta_seconds") if state == "running" else None,
        "last_line_seconds": None if newest is None else max(0.0, now - newest),
        "jobs": [job.name for job in jobs_of(run_dir, queued_jobs() or [])],
        **_members(status),
        "goodput": goodput.productive_share if goodput.starts else None,
        "goodput_seconds": goodput.seconds if goodput.starts else None,
    }


def _members(status: Status | None) -> dict[str, int | None]:
    """Return the replicas of a run that continues after losses, by key of ``run_values``."""
    members = status.members if status is not None else None
    return {name: getattr(members, name, None) for name in ("replicas", "total_replicas", "generation")}


def _is_killed(run_dir: Path, status: Status) -> bool:
    """Return whether the process of a ``running`` run is certainly gone: rank 0 ran on this host, its lock is free, and
    it has not recorded its end in the meantime."""
    if place_of(run_dir) != str(run_dir):  # a copy, which no process locks
        return False
    hosts = last_of_each_kind(run_dir / METRICS).get("start", {}).get("hosts")
    is_here = isinstance(hosts, list) and hosts[:1] == [host_name()]
    return is_here and is_locked(run_dir) is False and read_status(run_dir) == status


def _step(run_dir: Path, status: Status, *, is_running: bool) -> str:
    step = status.step
    last = last_of_each_kind(run_dir / METRICS).get("step", {})
    loss = last.get("loss")
    eta = last.get("eta_seconds")
    written = last.get("time")
    steps = value_at("trainer.steps", read_if_there(run_dir / "config.yaml"))
    parts = [f"{step}/{steps}" if is_count(steps) and steps else str(step)]
    members = status.members
    if members is not None and members.replicas < members.total_replicas:
        parts.append(str(members))
    if is_number(loss):
        parts.append(f"loss {loss:.4f}" + ("" if last.get("step") == step else f" at step {last.get('step')}"))
    if is_running and is_number(written):
        since = max(0.0, time.time() - written)
        if is_number(eta):
            parts.append(f"eta {duration(max(0.0, eta - since))}")
        parts.append(f"last line {duration(since)} ago")
    return ", ".join(parts)
