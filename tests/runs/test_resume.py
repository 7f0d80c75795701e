"""The promise: a run that was stopped and resumed, anywhere, is the run that was not."""

import math
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from testing.rank_pool import Cluster
from testing.runs import different_tensors, metrics, overrides, status, weights

LAYOUTS = {
    "single": (1, ["parallel=single"]),
    "ddp x2": (2, ["parallel=ddp"]),
    "ddp x3": (3, ["parallel=ddp"]),
    "ddp x4": (4, ["parallel=ddp"]),
    "fsdp x2": (2, ["parallel=fsdp"]),
    "fsdp x3": (3, ["parallel=fsdp"]),
    "fsdp x4": (4, ["parallel=fsdp"]),
    "hsdp 2x2": (4, ["parallel=hsdp", "parallel.replicate=2"]),
}
SAME_COMMAND = (
    ("fsdp x2", "fp32"),
    *(
        pytest.param(*each, marks=pytest.mark.slow)
        for each in (("ddp x2", "fp32"), ("single", "fp32"), ("hsdp 2x2", "fp32"), ("fsdp x2", "fp16"))
    ),
)


def run(
    cluster: Cluster, layout: str, text: Path, run_dir: Path, *more: str, code: int = 0, **keywords: Any
) -> list[list[int]]:
    """Train; returns the sample ids of each step, over all ranks and micro-batches."""
    processes, how = LAYOUTS[layout]
    micro_batch = 6 if processes == 3 else 9
    how = [*how, "trainer.deterministic=true", "checkpoint.every=5", f"trainer.micro_batch={micro_batch}"]
    argv = overrides(text, run_dir, *how, *more)
    answers = [answer.value for answer in cluster.run(processes, "testing.runs:train_small", argv=argv, **keywords)]
    assert {answer["code"] for answer in answers} == {code}
    return ids_by_step(answers, micro_batch)


def ids_by_step(answers: list[dict[str, Any]], micro_batch: int) -> list[list[int]]:
    accumulation = 36 // (micro_batch * len(answers))
    steps = len(answers[0]["sample_ids"]) // accumulation
    return [
        sorted(
            sample
            for answer in answers
            for micro_batch in answer["sample_ids"][step * accumulation : (step + 1) * accumulation]
            for sample in micro_batch
        )
        for step in range(steps)
    ]


def curve(run_dir: Path) -> list[tuple[int, float, float, int, float | None]]:
    return [(m["step"], m["loss"], m["grad_norm"], m["samples"], m["scale"]) for m in metrics(run_dir)]


@pytest.mark.parametrize(("layout", "precision"), SAME_COMMAND)
def test_stopped_or_killed_and_resumed_run_equals_uninterrupted_run_bitwise(
    layout: str, precision: str, cluster: Cluster, text: Path, tmp_path: Path
) -> None:
    # A growth interval of 4: the scale and its counter must travel too.
    how = [f"precision={precision}", "trainer.steps=7"]
    how += ["precision.initial_scale=256", "precision.growth_interval=4"] * (precision == "fp16")
    straight, pieces = tmp_path / "straight", tmp_path / "pieces"
    expected = run(cluster, layout, text, straight, *how)
    first = run(cluster, layout, text, pieces, *how, "trainer.stop_at=2", code=75)
    is_killed = precision == "fp32" and layout != "ddp x2"
    how_it_ends = {"how": "kill" if is_killed else "crash", "after_step": 5}
    if not is_killed:
        run(cluster, layout, text, pieces, *how, "checkpoint.every=2", end=how_it_ends, code=70)
    else:
        with pytest.raises(AssertionError, match="the process ended with -9"):
            run(cluster, layout, text, pieces, *how, "checkpoint.every=2", end=how_it_ends)
    at = sorted(int(path.name[5:]) for path in (pieces / "checkpoints").glob("step-*"))[-1]
    assert at in (2, 4), "what was being written when the rank died may be there or not, but no later one"
    last = run(cluster, layout, text, pieces, *how)
    assert first == expected[:2]
    assert last == expected[at:]
    assert curve(pieces) == curve(straight)
    assert not different_tensors(straight, pieces)
    starts = [line["resumed_from"] for line in metrics(pieces, "start")]
    assert starts == [None, 2, at]
    assert status(pieces)["state"] == "finished"


def test_every_change_of_layout_resumes_within_rounding(cluster: Cluster, text: Path, tmp_path: Path) -> None:
    straight, pieces = tmp_path / "straight", tmp_path / "pieces"
    expected = run(cluster, "single", text, straight, "trainer.steps=5")
    ids = []
    for layout, stop in (("fsdp x2", 1), ("fsdp x3", 2), ("ddp x2", 3), ("single", 4), ("hsdp 2x2", 5)):
        how = ("trainer.steps=5", f"trainer.stop_at={stop}")
        ids += run(cluster, layout, text, pieces, *how, code=0 if stop == 5 else 75)
    assert ids == expected
    for (step, loss, norm, samples, _), (step_, loss_, norm_, samples_, _) in zip(
        curve(pieces), curve(straight), strict=True
    ):
        assert (step, samples) == (step_, samples_)
        assert math.isclose(loss, loss_, rel_tol=1e-5)
        assert math.isclose(norm, norm_, rel_tol=1e-5)


@pytest.fixture(scope="module")
def saved(cluster: Cluster, text: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A run of two steps on a layout, trained once."""

    @cache
    def train(layout: str) -> Path:
        run_dir = tmp_path_factory.mktemp("saved") / "run"
        run(cluster, layout, text, run_dir, "trainer.steps=4", "trainer.stop_at=2", code=75)
        return run_dir

    return train


# What is read differs by the cut; which parts a rank reads of which files is decided in test_checkpoint_plan.py.
QUICK = (("single", "fsdp x3"), ("fsdp x3", "fsdp x4"))
SLOW = (
    ("fsdp x3", "single"), ("single", "hsdp 2x2"), ("fsdp x3", "ddp x2"), ("ddp x3", "fsdp x2"),
    ("fsdp x3", "hsdp 2x2"), ("hsdp 2x2", "ddp x4"), ("hsdp 2x2", "fsdp x3"),
)  # fmt: skip


@pytest.mark.parametrize(
    ("source", "target"), [*QUICK, *(pytest.param(*pair, marks=pytest.mark.slow) for pair in SLOW)]
)
def test_state_is_read_bit_by_bit_on_any_layout(
    source: str, target: str, saved: Callable[[str], Path], cluster: Cluster, text: Path, tmp_path: Path
) -> None:
    """Saved, resumed elsewhere and saved again at once: the same bits, whole tensors under the same names."""
    processes, how = LAYOUTS[target]
    argv = overrides(text, saved(source), *how, "trainer.steps=4")
    cluster.run(processes, "testing.runs:save_again", argv=argv, run_dir=str(tmp_path / "run"))
    assert not different_tensors(saved(source), tmp_path / "run")


@pytest.mark.slow
def test_more_ranks_than_rows_and_files_of_several_tensors(cluster: Cluster, text: Path, tmp_path: Path) -> None:
    """dim 6 over 4 ranks: shards of 2, 2, 2 and 0 rows."""
    how = ["model.dim=6", "model.heads=1", "model.kv_heads=1", "model.hidden_dim=5", "trainer.steps=4"]
    run(cluster, "single", text, tmp_path / "straight", *how)
    run(cluster, "fsdp x4", text, tmp_path / "pieces", *how, "trainer.stop_at=2", code=75)
    run(cluster, "fsdp x3", text, tmp_path / "pieces", *how)
    straight, pieces = weights(tmp_path / "straight"), weights(tmp_path / "pieces")
    for name, tensor in straight.items():
        torch.testing.assert_close(pieces[name], tensor, rtol=1e-4, atol=1e-6)
