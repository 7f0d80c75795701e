"""At the end of a Slurm job: how did the run end, and is another start worth it?

``python -m launch.requeue RUN START`` prints a line about it, and exits with the run's exit code.
"""

import json
import re
import sys
from pathlib import Path
from typing import Any

from configs.errors import EXIT_FAILED, EXIT_STOPPED
from launch.status import read_status

ENDS = "ends.jsonl"
"""In ``run.dir/slurm``: how each start of the run under Slurm ended, one line of JSON each."""

_ASKED_FOR = ("SIGTERM", "SIGINT", "SIGHUP", "control")  # preemption, or a person: no fault of the run's


def verdict(run_dir: Path, start: Path) -> tuple[int, str]:
    """The exit code of the job, 75 where another start is worth it, and a line that says why.

    ``start`` is a file made when this start of the job began: an older ``status.json`` is an earlier start's. A run
    that is still ``running`` was killed, and goes on from its checkpoint. Twice the same end at the same step is not
    worth a third: that is a crash loop.
    """
    status = read_status(run_dir)
    if status is None or status.time < start.stat().st_mtime:
        if start.with_suffix(".stopped").exists():  # made by a rank
            return EXIT_STOPPED, "stopped before training began"
        return EXIT_FAILED, f"failed before training began: see the logs of the nodes beside {start}"
    reason = status.reason if status.state != "running" else "killed without a word"
    # Numbers aside: ranks, seconds and hours differ from one time to the next.
    alike = re.sub(r"\d+", "N", reason or "")
    known = {"state": status.state, "step": status.step, "reason": alike}
    before = _last_end(run_dir)
    with (run_dir / "slurm" / ENDS).open("a") as file:
        file.write(json.dumps(known) + "\n")
    if status.state in ("finished", "failed"):
        return status.exit_code or 0, f"{status.state} at step {status.step}: {reason}"
    if before == known and not alike.startswith(_ASKED_FOR):
        return (
            EXIT_FAILED,
            f"crash loop: two starts in a row have ended at step {status.step} ({reason}). Not queued again; mend "
            "that, and submit the same command",
        )
    return EXIT_STOPPED, f"stopped at step {status.step}: {reason}"


def _last_end(run_dir: Path) -> Any:
    try:
        return json.loads((run_dir / "slurm" / ENDS).read_text().splitlines()[-1])
    except (OSError, ValueError, IndexError):
        return None


if __name__ == "__main__":
    code, line = verdict(Path(sys.argv[1]), Path(sys.argv[2]))
    print(line, flush=True)
    sys.exit(code)
