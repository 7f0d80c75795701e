"""This user's jobs in Slurm's queue, from ``squeue``; Slurm is optional."""

import json
import subprocess
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from serried.configs.bucket_urls import is_bucket_url
from serried.configs.errors import UserError
from serried.configs.plain_data import parse_json, read_bytes, value_at
from serried.configs.schema.sections import RunSection

_JOBS = "jobs.jsonl"
_FORMAT = "%i|%T|%M|%L|%R|%P"
_PATIENCE_SECONDS = 30
_ENDING = ("COMPLETED", "CANCELLED", "FAILED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY", "BOOT_FAIL", "DEADLINE")


@dataclass(frozen=True)
class Job:
    """A job, or a task of an array job, in the queue."""

    name: str
    """Job number, followed by ``_TASK`` for a task of an array."""
    state: str
    """State in Slurm's terms, such as RUNNING, PENDING or COMPLETING."""
    elapsed: str
    left: str
    where: str
    """Nodes that the job runs on, or the reason why it is pending, in parentheses."""
    partition: str

    def describe(self) -> str:
        """Return a description such as ``17 running on node[0-1] for 3:12, 6:48 left (partition gpu)``."""
        place = self.where.strip("()")
        if self.state == "PENDING":
            return f"{self.name} pending: {place} (partition {self.partition})"
        left = "" if self.left in ("UNLIMITED", "INVALID", "NOT_SET") else f", {self.left} left"
        return f"{self.name} {self.state.lower()} on {place} for {self.elapsed}{left} (partition {self.partition})"


def job_folder(run: RunSection) -> Path:
    """Return the folder whose folder ``slurm`` has the scripts and logs of a run's jobs. It is on a disk that the nodes
    share: the run folder, or for a run in a bucket ``runs/NAME``."""
    return Path.cwd() / (run.dir if run.url is None else Path("runs") / run.name)


def note_job(folder: Path, job: str, task: int | None, url: str | None = None) -> None:
    """Record in the folder of a run's jobs that ``job`` (or task ``task`` of an array) trains it. ``url``: the run in a
    bucket."""
    with (folder / "slurm" / _JOBS).open("a", encoding="utf-8") as file:
        file.write(json.dumps({"job": job, "task": task} | ({"url": url} if url else {})) + "\n")


def url_of_jobs(folder: Path) -> str | None:
    """Return the URL of the run in a bucket whose jobs are noted in ``folder``; None if there is none."""
    with suppress(OSError, ValueError, IndexError):
        url = value_at("url", parse_json(read_bytes(folder / "slurm" / _JOBS).splitlines()[-1]))
        return url if is_bucket_url(url) else None
    return None


def was_submitted(run_dir: Path) -> bool:
    """Return whether a job has ever been submitted for the run in ``run_dir``."""
    return bool(_noted(run_dir))


def jobs_of(run_dir: Path, queued: Iterable[Job]) -> list[Job]:
    """Return the jobs in ``queued`` that were submitted for the run in ``run_dir``."""
    noted = set(_noted(run_dir))
    return [job for job in queued if job.name in noted]


def _noted(run_dir: Path) -> list[str]:
    """Return the names of the jobs that were submitted for the run in ``run_dir``, newest last."""
    names = []
    try:
        for line in read_bytes(run_dir / "slurm" / _JOBS).splitlines():
            entry = parse_json(line)
            names.append(str(entry["job"]) if entry["task"] is None else f"{entry['job']}_{entry['task']}")
    except (OSError, ValueError, KeyError, TypeError):
        pass
    return names


def queued_jobs() -> list[Job] | None:
    """Return this user's jobs that have not ended; None if Slurm is not installed or does not answer."""
    try:
        done = subprocess.run(
            ["squeue", "--me", "--array", "--noheader", f"--format={_FORMAT}"],
            capture_output=True, encoding="utf-8", errors="replace", timeout=_PATIENCE_SECONDS, check=True,
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError):
        return None
    jobs = [Job(*line.split("|")) for line in done.stdout.splitlines()]
    return [job for job in jobs if job.state not in _ENDING]


def queued_before_another(run_dirs: Sequence[Path]) -> list[Job]:
    """Return this user's jobs that have not ended, to be checked before jobs are submitted for ``run_dirs``. Raises
    ``UserError`` if squeue does not answer and an earlier job of one of ``run_dirs`` may still run."""
    queued = queued_jobs()
    if queued is not None:
        return queued
    for run_dir in run_dirs:
        if names := _noted(run_dir):
            raise UserError(
                f"squeue does not answer, so job {names[-1]} for {run_dir} may still be queued or running; check "
                "`squeue --me`, and run the same command again when squeue answers"
            )
    return []
