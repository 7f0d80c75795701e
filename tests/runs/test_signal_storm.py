"""A short storm of signals; ``python -m benchmarks.signal_storm`` runs long ones."""

from pathlib import Path

import pytest

from benchmarks.signal_storm import Signals


@pytest.mark.slow
@pytest.mark.parametrize(("launch", "seed"), [("torchrun", 5), ("local", 6)])
def test_a_run_that_is_asked_to_stop_and_resumes_is_the_run_that_was_not(
    launch: str, seed: int, tmp_path: Path
) -> None:
    storm = Signals(tmp_path / "storm", 1, launch=launch, seed=seed)
    storm.blow()
    assert not storm.violations, "\n".join(storm.violations)
    assert storm.done == 1
