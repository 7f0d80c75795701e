"""The time at which Slurm ends this job."""

import os
import time
from dataclasses import dataclass

_SPARE_SECONDS = 60.0
_FAR_SECONDS = 3e8  # ten years: no limit


@dataclass(frozen=True)
class Deadline:
    """A time limit that cannot be extended."""

    at: float
    """In Unix seconds."""
    spare_seconds: float
    """How long before it the run must have stopped, for what comes after the last save; less for a short job."""

    def __str__(self) -> str:
        return f"Slurm ends this job at {time.strftime('%H:%M', time.localtime(self.at))}"

    def left_seconds(self) -> float:
        """Return the time until the run must have stopped; negative after that."""
        return self.at - self.spare_seconds - time.time()

    def is_near(self, needed_seconds: float) -> bool:
        """Return whether it is time to stop, if stopping takes ``needed_seconds``."""
        return self.left_seconds() <= needed_seconds


def deadline_of_job() -> Deadline | None:
    """Return the limit that Slurm set for this job; None: there is none, or it belongs to a job that has ended."""
    try:
        at = float(os.environ["SLURM_JOB_END_TIME"])
    except (KeyError, ValueError):
        return None
    left = at - time.time()
    return Deadline(at, min(_SPARE_SECONDS, left / 4)) if 0 < left < _FAR_SECONDS else None
