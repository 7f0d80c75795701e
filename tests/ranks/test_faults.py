"""A step is a transaction: one rank's bad number rejects it on all ranks, and nothing has changed."""

import math
from pathlib import Path
from typing import Any

import pytest

from testing.rank_pool import Cluster
from testing.runs import metrics, overrides, status

LAYOUTS = {
    "single": (1, ["parallel=single"]),
    "ddp x2": (2, ["parallel=ddp"]),
    "fsdp x2": (2, ["parallel=fsdp"]),
    "fsdp x2 ZeRO-2": (2, ["parallel=fsdp", "parallel.reshard_after_forward=false"]),
    "hsdp 2x2": (4, ["parallel=hsdp", "parallel.replicate=2"]),
}
ACCUMULATION = 3


def train(
    cluster: Cluster, layout: str, text: Path, run_dir: Path, *more: str, fault: dict[str, Any] | None = None
) -> list[dict[str, Any]]:
    processes, how = LAYOUTS[layout]
    argv = overrides(
        text, run_dir, *how, "trainer.global_batch=12", f"trainer.micro_batch={12 // processes // 3}", *more
    )
    cluster.run(processes, "testing.runs:train_small", argv=argv, fault=fault)
    return metrics(run_dir)


def at_step(step: int, rank: int, value: float) -> dict[str, Any]:
    """Poison the gradient of the second micro-batch of ``step`` on ``rank``."""
    return {"rank": rank, "forwards": [(step - 1) * ACCUMULATION + 2], "value": value}


@pytest.mark.parametrize(
    ("layout", "precision", "value"),
    [
        ("single", "fp32", math.inf),
        ("ddp x2", "fp16", math.nan),
        ("fsdp x2", "fp32", math.inf),
        *(
            pytest.param(*each, marks=pytest.mark.slow)
            for each in (
                ("fsdp x2 ZeRO-2", "fp16", math.nan),
                ("hsdp 2x2", "fp32", math.inf),
                ("ddp x2", "fp16", math.inf),
                ("ddp x2", "fp32", math.inf),
                ("fsdp x2", "fp16", math.nan),
                ("fsdp x2", "fp32", math.nan),
                ("hsdp 2x2", "fp16", math.nan),
            )
        ),
    ],
)
def test_a_bad_gradient_on_the_last_rank_skips_the_step_and_changes_no_bit_on_any_rank(
    layout: str, precision: str, value: float, cluster: Cluster, text: Path, tmp_path: Path
) -> None:
    processes, how = LAYOUTS[layout]
    scale = ["precision.initial_scale=256"] * (precision == "fp16")
    argv = overrides(
        text, tmp_path / "run", *how, f"precision={precision}", *scale,
        "trainer.global_batch=12", f"trainer.micro_batch={12 // processes // 3}", "trainer.steps=4",
    )  # fmt: skip
    fault = at_step(3, processes - 1, value)
    answers = cluster.run(processes, "testing.runs:changes_by_step", argv=argv, fault=fault)
    for rank, answer in enumerate(answers):
        changed = answer.value
        # Rows of bytes that do not occur have no gradient, so a good step need not change everything.
        assert [what == "nothing" for what in changed] == [False, False, True, False], f"rank {rank}: {changed}"
    steps = metrics(tmp_path / "run")
    assert [line["skipped"] for line in steps] == [False, False, True, False]
    assert (steps[2]["grad_norm"], steps[2]["nonfinite"]) == (None, True)


def test_fp16_halves_its_scale_on_overflow_and_continues(cluster: Cluster, text: Path, tmp_path: Path) -> None:
    steps = train(
        cluster, "ddp x2", text, tmp_path / "run", "precision=fp16", "trainer.steps=6", "precision.initial_scale=512",
        "precision.growth_interval=3", fault=at_step(2, 1, math.inf),
    )  # fmt: skip
    assert [line["skipped"] for line in steps] == [False, True, False, False, False, False]
    assert [line["scale"] for line in steps] == [512, 512, 256, 256, 256, 512]


def test_fp16_that_starts_far_too_high_finds_its_scale_instead_of_giving_up(
    cluster: Cluster, text: Path, tmp_path: Path
) -> None:
    steps = train(
        cluster,
        "single",
        text,
        tmp_path / "run",
        "precision=fp16",
        "trainer.steps=14",
        f"precision.initial_scale={2**28}",
    )
    skipped = [line["skipped"] for line in steps]
    assert sum(skipped) > 3
    assert skipped == sorted(skipped, reverse=True), "once found, the scale holds"


@pytest.mark.parametrize("layout", ["fsdp x2", pytest.param("single", marks=pytest.mark.slow)])
def test_three_bad_steps_in_a_row_end_the_run_with_one_clear_line(
    layout: str, cluster: Cluster, text: Path, tmp_path: Path
) -> None:
    processes, how = LAYOUTS[layout]
    run_dir = tmp_path / "run"
    argv = overrides(text, run_dir, *how, "trainer.global_batch=12", f"trainer.micro_batch={4 // processes}")
    forwards = [(step - 1) * ACCUMULATION + 1 for step in (3, 5, 6, 7)]  # 3 alone is forgiven
    answers = cluster.run(
        processes, "testing.runs:train_reported", argv=argv, fault={"rank": 0, "forwards": forwards, "value": math.nan}
    )
    printed = "".join(answer.printed for answer in answers)
    assert printed.count("failed: ") == 1
    assert "3 steps in a row" in printed
    assert "step 7" in printed
    assert "Traceback" not in printed
    assert {answer.value for answer in answers} == {70}
    assert [line["step"] for line in metrics(run_dir) if line["skipped"]] == [3, 5, 6, 7]
    assert metrics(run_dir)[-1]["step"] == 7
    now = status(run_dir)
    assert (now["state"], now["step"], now["exit_code"]) == ("failed", 7, 70)
