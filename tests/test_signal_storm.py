"""A short storm of signals; ``python -m benchmarks.signal_storm`` runs long ones."""

from pathlib import Path

import pytest

from benchmarks.signal_storm import storm


@pytest.mark.slow
def test_a_run_that_is_asked_to_stop_again_and_again_is_the_run_that_was_not(tmp_path: Path) -> None:
    result = storm(tmp_path / "storm", signals=4, processes=2, layout="fsdp", seed=5)
    assert not result.violations, "\n".join([*result.violations, result.summary()])
    assert result.signals == 4
