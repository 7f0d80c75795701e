"""Faults, and the same bits again, on layouts of several axes at once."""

import math
from pathlib import Path
from typing import Any

import pytest

from testing.rank_pool import Cluster
from testing.runs import different_tensors, metrics, overrides, tiny_overrides, weights

CUBE = ["parallel=fsdp", "parallel.pipeline=2", "parallel.tensor=2", "parallel.shard=2"]
"""On 8 processes."""
PLANE = ["parallel=fsdp", "parallel.pipeline=2", "parallel.tensor=2", "trainer.micro_batch=4"]
"""On 4 processes."""
EXPERTS = [
    "model=moe_tiny",
    "model.expert_hidden_dim=24",
    "parallel=fsdp",
    "parallel.expert=2",
    "trainer.micro_batch=1",
]
"""On 4 processes, sharded x2."""
SMALL = ["model.layers=2", "trainer.global_batch=8", "trainer.micro_batch=2", "schedule=constant"]


def train(
    cluster: Cluster,
    text: Path,
    run_dir: Path,
    *more: str,
    layout: list[str] = CUBE,
    fault: dict[str, Any] | None = None,
) -> list[dict[str, Any]]:
    argv = overrides(text, run_dir, *SMALL, "schedule.warmup_steps=0", *layout, *more)
    cluster.run(8 if layout is CUBE else 4, "testing.runs:train_small", argv=argv, fault=fault)
    return metrics(run_dir)


@pytest.mark.slow
@pytest.mark.parametrize(("layout", "ranks"), [(PLANE, [3]), (CUBE, [0, 6])], ids=["plane", "cube"])
def test_a_nan_on_any_rank_of_several_axes_skips_the_step_everywhere(
    layout: list[str], ranks: list[int], cluster: Cluster, text: Path, tmp_path: Path
) -> None:
    """The gradient of a block is bad on one rank, in the second of the two micro-batches of step 3."""
    good = train(cluster, text, tmp_path / "two", "trainer.steps=2", layout=layout)
    for rank in ranks:
        fault = {"rank": rank, "forwards": [6], "value": math.nan, "in_block": True}
        run_dir = tmp_path / str(rank)
        bad = train(cluster, text, run_dir, "trainer.steps=3", layout=layout, fault=fault)
        assert [line["skipped"] for line in bad] == [False, False, True]
        assert [line["loss"] for line in bad[:2]] == [line["loss"] for line in good]
        assert not different_tensors(tmp_path / "two", run_dir)


@pytest.mark.slow
def test_a_nan_on_one_rank_moves_no_expert_and_no_balance(cluster: Cluster, text: Path, tmp_path: Path) -> None:
    good = train(cluster, text, tmp_path / "two", "trainer.steps=2", layout=EXPERTS)
    fault = {"rank": 3, "forwards": [6], "value": math.nan}  # the second of two micro-batches of step 3
    bad = train(cluster, text, tmp_path / "three", "trainer.steps=3", layout=EXPERTS, fault=fault)
    assert [line["skipped"] for line in bad] == [False, False, True]
    assert [line["expert_tokens"] for line in bad[:2]] == [line["expert_tokens"] for line in good]
    assert not different_tensors(tmp_path / "two", tmp_path / "three")
    biases = [bias for name, bias in weights(tmp_path / "two").items() if name.endswith("e_score_correction_bias")]
    assert biases
    assert all(bias.any() for bias in biases), "accepted steps have moved them"


@pytest.mark.slow
def test_an_fp16_overflow_on_one_stage_halves_the_scale_everywhere(
    cluster: Cluster, text: Path, tmp_path: Path
) -> None:
    how = ["precision=fp16", "precision.initial_scale=256", "trainer.steps=4"]
    fault = {"rank": 1, "forwards": [4], "value": math.inf, "in_block": True}
    steps = train(cluster, text, tmp_path / "run", *how, fault=fault)
    assert [line["skipped"] for line in steps] == [False, True, False, False]
    assert [line["scale"] for line in steps] == [256, 256, 128, 128]


def test_fsdp_of_a_small_model_on_a_cpu_is_one_unit_with_the_bits_of_several(
    cluster: Cluster, text: Path, tmp_path: Path
) -> None:
    """Unless the user chooses; and a run resumes from one to the other."""
    for name, *more in (
        ("several", "parallel.reshard_after_forward=true"),
        ("one", "parallel.reshard_after_forward=null", "trainer.stop_at=4"),
        ("one", "parallel.reshard_after_forward=true"),
    ):
        argv = tiny_overrides(text, tmp_path / name, "parallel=fsdp", "model.layers=2", "precision=bf16", *more)
        answers = cluster.run(2, "testing.runs:train_reported", argv=argv)
        assert {answer.value for answer in answers} <= {0, 75}, answers[0].printed
        assert ("one unit" in answers[0].printed) == (more[0].endswith("null"))
    lines = ([(each["loss"], each["grad_norm"]) for each in metrics(tmp_path / name)] for name in ("several", "one"))
    several, one = lines
    assert one == several
    assert not different_tensors(tmp_path / "one", tmp_path / "several")
