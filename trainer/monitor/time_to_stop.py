"""Time that a run takes to stop, estimated from the times of its steps and saves, for runs and for plans."""

_SAVED_BYTES_PER_SECOND = 0.2e9
"""Assumed write rate of a rank until a save has been timed. This is the rate of a slow disk."""
_LONG_STEP_SECONDS = 2.0
_LOOK_SECONDS = 1.0
"""Time between two checks for a request to stop within a long step, unless a micro-batch takes longer."""


def estimated_save_seconds(nbytes: int, ranks: int) -> float:
    """Return an estimate of the seconds that ``ranks`` ranks need for a first checkpoint of ``nbytes``."""
    return nbytes / (ranks * _SAVED_BYTES_PER_SECOND)


def micro_batches_per_look(step_seconds: float | None, micro_batches: int) -> int | None:
    """Return the number of micro-batches of a step between two checks for a request to stop.

    The first check is before the first micro-batch. The result is None if the step is short, so that the run stops only
    after it. ``step_seconds``: None if not known.
    """
    if step_seconds is None:
        return 1
    if step_seconds < _LONG_STEP_SECONDS:
        return None
    return max(1, int(micro_batches * _LOOK_SECONDS / step_seconds))


def seconds_to_stop(
    step_seconds: float, save_seconds: float, every: int = 0, *, look_seconds: float | None = None,
    is_delayed: bool = False, is_behind: bool = False,
) -> float:  # fmt: skip
    """Return the longest time in seconds from a vote to continue until the run is saved, if the next vote is to stop.

    This step and the next one must end. If the votes of a step are read one step later (``is_delayed``), one more step
    must end. If the device is still at the previous step (``is_behind``), that step must end too. Then the save begins.
    A save waits for the previous save, which began ``every`` steps earlier, or one step earlier for the last save.

    If ranks check for a request to stop within steps, the work between two checks, ``look_seconds``, takes the place of
    a step. The device is at most one check behind (``is_delayed``).
    """
    waits = max(0.0, save_seconds - every * step_seconds) if every else 0.0
    work, count = (step_seconds, 2 + is_delayed + is_behind) if look_seconds is None else (look_seconds, 2 + is_delayed)
    return count * (work + waits) + max(0.0, save_seconds - step_seconds) + save_seconds
