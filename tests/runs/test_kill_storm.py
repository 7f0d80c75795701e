"""A short storm of kills; ``python -m benchmarks.kill_storm`` runs long ones."""

from pathlib import Path

import pytest

from benchmarks.kill_storm import Kills


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "processes", "launch", "kills"), [("fsdp", 2, "torchrun", 2), ("pipeline x2 x tensor x2", 4, "local", 1)]
)
def test_killed_and_resumed_run_equals_uninterrupted_run(
    layout: str, processes: int, launch: str, kills: int, tmp_path: Path
) -> None:
    storm = Kills(tmp_path / "storm", kills, processes, layout, launch, seed=3)
    storm.blow()
    assert not storm.violations, "\n".join(storm.violations)
    assert storm.done == kills
