"""A short storm of kills; ``python -m benchmarks.kill_storm`` runs long ones."""

from pathlib import Path

import pytest

from benchmarks.kill_storm import LAYOUTS, storm


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["fsdp", *LAYOUTS])
def test_a_run_that_is_killed_again_and_again_is_the_run_that_was_not(layout: str, tmp_path: Path) -> None:
    kills, processes = (2, 4) if layout in LAYOUTS else (3, 2)
    result = storm(tmp_path / "storm", kills=kills, processes=processes, layout=layout, seed=3)
    assert not result.violations, "\n".join([*result.violations, result.summary()])
    assert result.kills == kills
