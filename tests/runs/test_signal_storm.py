"""A short storm of signals; ``python -m benchmarks.signal_storm`` runs long ones."""

from pathlib import Path

import pytest

from benchmarks.signal_storm import Signals


@pytest.mark.slow
@pytest.mark.parametrize(("launch", "seed"), [("torchrun", 5), ("local", 6)])
def test_stopped_and_resumed_run_equals_uninterrupted_run(launch: str, seed: int, tmp_path: Path) -> None:
    storm = Signals(tmp_path / "storm", 1, launch=launch, seed=seed)
    storm.blow()
    assert not storm.violations, "\n".join(storm.violations)
    assert storm.done == 1
