"""How long a run takes to stop, from what its steps and saves take: for runs, and for plans of them."""

_SAVED_BYTES_PER_SECOND = 0.2e9
"""Of a rank, before a save has been timed: that of a slow disk."""


def estimated_save_seconds(nbytes: int, ranks: int) -> float:
    """Return how long ``ranks`` ranks may take for a first checkpoint of ``nbytes``."""
    return nbytes / (ranks * _SAVED_BYTES_PER_SECOND)


def seconds_to_stop(
    step_seconds: float, save_seconds: float, every: int = 0, *, is_delayed: bool = False, is_behind: bool = False
) -> float:
    """Return the longest time from a vote until the run is saved, if this vote is to go on and the next one is to stop.

    Until this step and the next have ended; if the votes of a step are read a step later (``is_delayed``), also the one
    after; if the device is still at the step before this one (``is_behind``), also that one. Then comes the save. A
    save waits for the one before it, which began ``every`` steps earlier, or before the last save a step earlier.
    """
    waits = max(0.0, save_seconds - every * step_seconds) if every else 0.0
    steps = 2 + is_delayed + is_behind
    return steps * (step_seconds + waits) + max(0.0, save_seconds - step_seconds) + save_seconds
