"""Time that a run takes to stop, estimated from the times of its steps and saves, for runs and for plans."""

_SAVED_BYTES_PER_SECOND = 0.2e9
"""Write rate of a rank before a save has been timed: the rate of a slow disk."""
_LONG_STEP_SECONDS = 2.0
_LOOK_SECONDS = 1.0
"""Time between two looks for a request to stop within a long step, unless a micro-batch takes longer."""


def estimated_save_seconds(nbytes: int, ranks: int) -> float:
    """Return an estimate of the seconds that ``ranks`` ranks need for a first checkpoint of ``nbytes``."""
    return nbytes / (ranks * _SAVED_BYTES_PER_SECOND)


def micro_batches_per_look(step_seconds: float | None, micro_batches: int) -> int | None:
    """Return after how many of a step's ``micro_batches`` all ranks look for a request to stop, the first time before
    the first one; None: the step is short, and ends first. ``step_seconds``: None if not known."""
    if step_seconds is None:
        return 1
    if step_seconds < _LONG_STEP_SECONDS:
        return None
    return max(1, int(micro_batches * _LOOK_SECONDS / step_seconds))


def seconds_to_stop(
    step_seconds: float, save_seconds: float, every: int = 0, *, look_seconds: float | None = None,
    is_delayed: bool = False, is_behind: bool = False,
) -> float:  # fmt: skip
    """Return the longest time in seconds from a vote until the run is saved, if this vote is to continue and the
    next is to stop.

    This step and the next one must end. If the votes of a step are read one step later (``is_delayed``), so must the
    step after them; if the device is still at the previous step (``is_behind``), that one, too. Then comes the save.
    It waits for the previous save, which began ``every`` steps earlier, or before the last save one step earlier.

    If ranks look for a request to stop within steps, the work between two looks, ``look_seconds``, takes the place of
    a step. The device is at most that much behind (``is_delayed``).
    """
    waits = max(0.0, save_seconds - every * step_seconds) if every else 0.0
    work, count = (step_seconds, 2 + is_delayed + is_behind) if look_seconds is None else (look_seconds, 2 + is_delayed)
    return count * (work + waits) + max(0.0, save_seconds - step_seconds) + save_seconds
