"""When Slurm ends this job."""

import os
import time
from dataclasses import dataclass

_SPARE_SECONDS = 60.0
_FAR_SECONDS = 3e8  # ten years: an end that far is none


@dataclass(frozen=True)
class Deadline:
    """An end that nobody can put off."""

    at: float
    """In Unix seconds."""
    spare_seconds: float
    """How long before it to stop, at least: less where a job is short."""

    def __str__(self) -> str:
        return f"Slurm ends this job at {time.strftime('%H:%M', time.localtime(self.at))}"

    def left_seconds(self) -> float:
        """Until it is time to stop; negative from then on."""
        return self.at - self.spare_seconds - time.time()

    def is_near(self, needed_seconds: float) -> bool:
        """Whether it is time to stop, for who needs so long to."""
        return self.left_seconds() <= max(0.0, needed_seconds - self.spare_seconds)


def deadline_of_job() -> Deadline | None:
    """As Slurm said when the job began; None: it did not, never, or the job that this is left over from has ended."""
    try:
        at = float(os.environ["SLURM_JOB_END_TIME"])
    except (KeyError, ValueError):
        return None
    left = at - time.time()
    return Deadline(at, min(_SPARE_SECONDS, left / 4)) if 0 < left < _FAR_SECONDS else None
