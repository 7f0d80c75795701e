"""A replica that is lost does not end training: the others continue from memory, on the same loss curve."""

from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

import pytest

from testing.recovery_storm import Death, Ended, faults, run, storm, words
from testing.runs import ObservedRecipe, losses, metrics, run_here

SHORT = ["trainer.steps=6", "trainer.eval_every=0", "checkpoint.every=3"]
Undisturbed = Callable[..., dict[int, float]]


@pytest.fixture(scope="module")
def undisturbed(text: Path, tmp_path_factory: pytest.TempPathFactory) -> Undisturbed:
    """Losses by step of a run that loses nothing."""

    @cache
    def trained(layout: str, *more: str) -> dict[int, float]:
        folder = tmp_path_factory.mktemp("undisturbed")
        ended = run(words(layout, text, folder / "run", *more), [], folder / "out")
        assert ended.code == 0, ended.printed
        return {line["step"]: line["loss"] for line in metrics(folder / "run")}

    return trained


def recovers(ended: Ended, run_dir: Path, expected: dict[int, float], deaths: Sequence[Death], every: int = 4) -> None:
    wrong, _ = faults(ended, run_dir, expected, len([death for death in deaths if death.kind]), every)
    assert not wrong, ended.printed


def test_run_whose_rank_0_is_killed_finishes_on_the_same_curve(text: Path, tmp_path: Path) -> None:
    """The other rank prints and records from then on, and has the only replica."""
    argv = words("ddp x2", text, tmp_path / "run", *SHORT)
    ended = run(argv, [Death(0, "vote", 3)], tmp_path / "out", ObservedRecipe)
    alone = [word for word in argv if not word.startswith(("launch", "recover", "parallel"))]
    assert run_here([*alone, f"run.dir={tmp_path / 'alone'}"]).code == 0
    recovers(ended, tmp_path / "run", dict(enumerate(losses(tmp_path / "alone"), start=1)), [Death(0, "vote", 3)], 0)
    assert "lost       " in ended.printed
    assert "(rank 0) in step 3: the process of rank 0 has ended; 1 of 2 replicas continues" in ended.printed
    assert "finished   6 steps" in ended.printed
    assert [line["ranks"] for line in metrics(tmp_path / "run", "lost")] == [[0]]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "deaths"),
    [
        ("ddp x3", [Death(1, "answer", 4), Death(0, "build", 2)]),
        ("hsdp 3x2", [Death(0, "commit", 2), Death(5, "form", 1)]),
    ],
)
def test_second_loss_while_the_others_recover(
    layout: str, deaths: list[Death], undisturbed: Undisturbed, text: Path, tmp_path: Path
) -> None:
    """A survivor that missed the result of the vote applies the update alone."""
    ended = run(words(layout, text, tmp_path / "run"), deaths, tmp_path / "out")
    recovers(ended, tmp_path / "run", undisturbed(layout), deaths)


@pytest.mark.slow
def test_storm_of_kills(tmp_path: Path) -> None:
    found = storm(4, 3, tmp_path, layouts=["ddp x3"])
    assert not found["wrong"], found
    assert found["kills"] >= 4
