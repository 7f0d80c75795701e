"""A short sample of the storm on runs in a bucket. ``make storm`` runs all of it."""

import pytest

from testing.bucket_storm import storm

pytestmark = pytest.mark.cloud


def test_kills_paused_processes_and_races_leave_only_complete_checkpoints() -> None:
    counts = storm(kills=5, zombies=1, races=1, lanes=3, seed=2)
    assert counts["zombies, all refused"] == 1
    assert counts["faults"] > 5
    assert counts["commits reported"] >= 2  # by the zombie and by the process after it, however slow the machine is
    assert counts["checkpoints read back, byte-equal"] >= 2  # after the zombie's round, and at the end
