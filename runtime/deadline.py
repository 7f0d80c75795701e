"""The time limit of this Slurm job."""

import os
import time
from dataclasses import dataclass

_SPARE_SECONDS = 60.0
_FAR_SECONDS = 3e8  # ten years: no limit


@dataclass(frozen=True)
class Deadline:
    """Time limit that cannot be extended."""

    at: float
    """Time in Unix seconds."""
    spare_seconds: float
    """Seconds before the limit at which the run must have stopped, for the work after the last save; fewer for a
    short job."""

    def __str__(self) -> str:
        return f"Slurm ends this job at {time.strftime('%H:%M', time.localtime(self.at))}"

    def left_seconds(self) -> float:
        """Return the seconds until the run must have stopped; negative after that."""
        return self.at - self.spare_seconds - time.time()

    def is_near(self, needed_seconds: float) -> bool:
        """Return whether the run must stop now if stopping takes ``needed_seconds``."""
        return self.left_seconds() <= needed_seconds


def deadline_of_job() -> Deadline | None:
    """Return the time limit of this Slurm job; None if there is none, or it belongs to a job that has ended."""
    try:
        at = float(os.environ["SLURM_JOB_END_TIME"])
    except (KeyError, ValueError):
        return None
    left = at - time.time()
    return Deadline(at, min(_SPARE_SECONDS, left / 4)) if 0 < left < _FAR_SECONDS else None
