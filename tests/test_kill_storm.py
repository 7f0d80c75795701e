"""A short storm of kills; ``python -m benchmarks.kill_storm`` runs long ones."""

from pathlib import Path

import pytest

from benchmarks.disturb import LAYOUTS
from benchmarks.kill_storm import Kills


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "launch", "kills"),
    [("fsdp", "torchrun", 2), *((layout, "local", 1) for layout in LAYOUTS)],
)
def test_a_run_that_is_killed_again_and_again_is_the_run_that_was_not(
    layout: str, launch: str, kills: int, tmp_path: Path
) -> None:
    storm = Kills(tmp_path / "storm", kills, 4 if layout in LAYOUTS else 2, layout, launch, seed=3)
    storm.blow()
    assert not storm.violations, "\n".join(storm.violations)
    assert storm.done == kills
