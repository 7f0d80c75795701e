"""Time that a run takes to stop, estimated from the times of its steps and saves, for runs and for plans."""

_SAVED_BYTES_PER_SECOND = 0.2e9
"""Write rate of a rank before a save has been timed: the rate of a slow disk."""


def estimated_save_seconds(nbytes: int, ranks: int) -> float:
    """Return an estimate of the seconds that ``ranks`` ranks need for a first checkpoint of ``nbytes``."""
    return nbytes / (ranks * _SAVED_BYTES_PER_SECOND)


def seconds_to_stop(
    step_seconds: float, save_seconds: float, every: int = 0, *, is_delayed: bool = False, is_behind: bool = False
) -> float:
    """Return the longest time in seconds from a vote until the run is saved, if this vote is to continue and the
    next is to stop.

    This step and the next one must end. If the votes of a step are read one step later (``is_delayed``), so must the
    step after them; if the device is still at the previous step (``is_behind``), that one, too. Then comes the save.
    It waits for the previous save, which began ``every`` steps earlier, or before the last save one step earlier.
    """
    waits = max(0.0, save_seconds - every * step_seconds) if every else 0.0
    steps = 2 + is_delayed + is_behind
    return steps * (step_seconds + waits) + max(0.0, save_seconds - step_seconds) + save_seconds
