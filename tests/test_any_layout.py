"""The promise: a checkpoint of any layout is read on any other, with the same bits, and training continues alike."""

import math
from pathlib import Path
from typing import Any

import pytest

from tests.cluster import Cluster
from tests.runs import metrics, overrides, weights

LAYOUTS: dict[str, tuple[int, list[str]]] = {
    "single": (1, ["parallel=single"]),
    "fsdp x3": (3, ["parallel=fsdp"]),
    "tensor x2": (2, ["parallel=fsdp", "parallel.tensor=2"]),
    "tensor x2 x fsdp x3": (6, ["parallel=fsdp", "parallel.tensor=2"]),
    "tensor x2 x replicate x2": (4, ["parallel=hsdp", "parallel.replicate=2", "parallel.tensor=2"]),
    "pipeline x3": (3, ["parallel=fsdp", "parallel.pipeline=3"]),
    "pipeline x2, zbv": (2, ["parallel=fsdp", "parallel.pipeline=2", "parallel.schedule=zbv"]),
    "pipeline x2, interleaved x fsdp x2": (
        4, ["parallel=fsdp", "parallel.pipeline=2", "parallel.schedule=interleaved"],
    ),
    "pipeline x2 x tensor x2": (4, ["parallel=fsdp", "parallel.pipeline=2", "parallel.tensor=2"]),
    "pipeline x2 x tensor x2 x fsdp x2": (8, ["parallel=fsdp", "parallel.pipeline=2", "parallel.tensor=2"]),
}  # fmt: skip
SAVED = "pipeline x2 x tensor x2"
QUICK = ("fsdp x3", "tensor x2 x replicate x2", "pipeline x2, zbv")


def argv_of(layout: str, text: Path, run_dir: Path, *more: str) -> list[str]:
    shape = ["model.layers=4", "model.tie_embeddings=true", "trainer.steps=4", "trainer.micro_batch=3"]
    return overrides(text, run_dir, *shape, "trainer.deterministic=true", *LAYOUTS[layout][1], *more)


def train(cluster: Cluster, layout: str, text: Path, run_dir: Path, *more: str, code: int = 0) -> None:
    argv = argv_of(layout, text, run_dir, *more)
    answers = cluster.run(LAYOUTS[layout][0], "tests.runs:train_small", argv=argv)
    assert {answer.value["code"] for answer in answers} == {code}, answers[0].printed


@pytest.fixture(scope="module")
def saved(cluster: Cluster, text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was stopped after two of four steps."""
    run_dir = tmp_path_factory.mktemp("saved") / "run"
    train(cluster, SAVED, text, run_dir, "trainer.stop_at=2", code=75)
    return run_dir


@pytest.fixture(scope="module")
def whole(cluster: Cluster, text: Path, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Steps of a run of one process that was not stopped."""
    run_dir = tmp_path_factory.mktemp("whole") / "run"
    train(cluster, "single", text, run_dir)
    return metrics(run_dir)


@pytest.mark.parametrize(
    "layout", [pytest.param(name, marks=[pytest.mark.slow] if name not in QUICK else []) for name in LAYOUTS]
)
def test_a_checkpoint_is_read_with_the_same_bits_and_training_continues_alike(
    layout: str, saved: Path, whole: list[dict[str, Any]], cluster: Cluster, text: Path, tmp_path: Path
) -> None:
    argv = argv_of(layout, text, saved)
    cluster.run(LAYOUTS[layout][0], "tests.runs:save_again", argv=argv, run_dir=str(tmp_path / "again"))
    for stem in ("model", "optimizer"):
        expected, found = weights(saved, stem), weights(tmp_path / "again", stem)
        assert expected.keys() == found.keys()
        assert [name for name in expected if not expected[name].equal(found[name])] == []
    train(cluster, layout, text, tmp_path / "run", f"checkpoint.resume={tmp_path / 'again'}")
    steps = metrics(tmp_path / "run")
    assert [line["step"] for line in steps] == [3, 4]
    for line, other in zip(steps, whole[2:], strict=True):
        assert line["samples"] == other["samples"]
        assert math.isclose(line["loss"], other["loss"], rel_tol=1e-5)
        assert math.isclose(line["grad_norm"], other["grad_norm"], rel_tol=1e-5)
