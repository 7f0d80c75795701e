"""The benchmarks still run: their figures can be made again."""

from pathlib import Path

import pytest

from benchmarks.compare_checkouts import compare
from benchmarks.step_overhead import MODELS
from testing.rank_pool import Cluster
from testing.runs import overrides, run_here, tiny_overrides


@pytest.mark.parametrize(
    ("layout", "processes"),
    [("ddp", 2), *(pytest.param(*each, marks=pytest.mark.slow) for each in (("single", 1), ("fsdp", 2)))],
)
def test_trainer_races_hand_written_loop(
    layout: str, processes: int, cluster: Cluster, text: Path, tmp_path: Path
) -> None:
    argv = overrides(text, tmp_path / "run", f"parallel={layout}", "trainer.steps=1000", *MODELS["almost no compute"])
    answer = cluster.run(
        processes, "benchmarks.step_overhead:race", argv=[*argv, "checkpoint.every=0"], turns=2, steps_in_a_turn=2
    )
    seconds = answer[0].value
    assert all(len(seconds[name]) == 2 and min(seconds[name]) > 0 for name in ("trainer", "hand-written"))


@pytest.mark.slow
def test_the_trainer_races_itself_with_other_attention(text: Path, tmp_path: Path, cluster: Cluster) -> None:
    argv = overrides(text, tmp_path / "run", "trainer.steps=1000", *MODELS["almost no compute"], "checkpoint.every=0")
    answer = cluster.run(2, "benchmarks.step_overhead:race", argv=argv, turns=2, steps_in_a_turn=2, against="sdpa")
    seconds = answer[0].value
    assert all(len(seconds[name]) == 2 and min(seconds[name]) > 0 for name in ("trainer", "sdpa"))


@pytest.mark.slow
def test_metrics_take_a_measured_share_of_a_step(text: Path, tmp_path: Path, cluster: Cluster) -> None:
    argv = overrides(text, tmp_path / "run", "parallel=ddp", "trainer.steps=1000", *MODELS["almost no compute"])
    answers = cluster.run(
        2, "benchmarks.step_overhead:share_of_numbers", argv=[*argv, "checkpoint.every=0"], steps_profiled=20
    )
    for answer in answers:
        whole, numbers = answer.value
        assert 0 < numbers < whole


def test_comparison_of_checkouts_names_what_another_seed_changes(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folders = {name: tmp_path / name for name in ("one", "same", "other")}
    for name, folder in folders.items():
        folder.mkdir()
        monkeypatch.chdir(folder)  # the run folder has the same path in all of them
        seed = f"trainer.seed={2 if name == 'other' else 1}"
        assert run_here(tiny_overrides(text, Path("run"), "trainer.deterministic=true", seed)).code == 0
    figures, is_equal = compare(folders["one"] / "run", folders["same"] / "run")
    assert is_equal
    assert figures.startswith("6 of 6 lines, 4 of 4 tensor files, ")
    figures, is_equal = compare(folders["one"] / "run", folders["other"] / "run")
    assert not is_equal
    assert figures.startswith("0 of 6 lines, 0 of 4 tensor files, ")
    assert "; different: progress.first_loss, " in figures
