"""``trainer.epochs`` in place of ``trainer.steps``."""

from fractions import Fraction
from pathlib import Path

import pytest
import yaml

from serried.configs.compose import compose
from serried.configs.errors import UserError
from serried.program import main
from serried.trainer.run_data import with_steps
from testing.runs import metrics, run_here, tiny_overrides


class Samples:
    """A data set of so many samples."""

    def __init__(self, count: int) -> None:
        self._count = count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> int:
        return index


@pytest.mark.parametrize(
    ("epochs", "samples", "steps"), [(1.0, 64, 2), (1.0, 65, 3), (3.0, 50, 5), (0.1, 640, 2), (0.001, 10, 1)]
)
def test_epochs_are_rounded_up_to_whole_steps(epochs: float, samples: int, steps: int) -> None:
    config = with_steps(compose([f"trainer.epochs={epochs}", "trainer.global_batch=32"]), Samples(samples))
    assert config.trainer.steps == steps == -(-Fraction(repr(epochs)) * samples // 32)


def test_epochs_of_a_stream_are_refused() -> None:
    class Endless(Samples):
        def state(self, samples: int) -> None: ...
        def load(self, state: object, samples: int) -> None: ...
        def rewind(self, samples: int) -> None: ...
        def close(self) -> None: ...

    with pytest.raises(UserError, match=r"trainer.epochs=2: the length of streamed data is unknown; use trainer.steps"):
        with_steps(compose(["trainer.epochs=2"]), Endless(3))


def test_a_run_is_as_long_as_its_epochs_and_says_so(text: Path, tmp_path: Path) -> None:
    argv = tiny_overrides(text, tmp_path / "run", "trainer.epochs=0.05")
    ended = run_here(argv)
    assert ended.code == 0, ended.printed
    steps = metrics(tmp_path / "run")[-1]["step"]
    saved = yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())["trainer"]
    assert saved["steps"] == steps != 6
    assert "Nothing to do" in run_here(argv).printed
    assert f"in {steps:,} steps" in run_here([*argv, "dry_run=true"]).printed


def test_key_beyond_the_steps_that_epochs_take_gets_a_note(
    text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    typed = ["trainer.epochs=0.05", "trainer.stop_at=500", "checkpoint.every=1", "trainer.log_every=400"]
    argv = tiny_overrides(text, tmp_path / "run", *typed, "launch.device=cpu")
    for more in (["dry_run=true"], []):
        assert main([*argv, *more]) == 0
        printed = capsys.readouterr()
        notes = sorted(line for line in printed.out.splitlines() if line.startswith("note "))
        assert [line.split()[1] for line in notes] == ["trainer.log_every=400", "trainer.stop_at=500"]
        assert "has no effect: the run ends at trainer.steps=" in notes[1]
        assert "stop_at" not in printed.err
