"""The promise: loss, gradient norm and samples of a run do not depend on how it was cut."""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks.parity import BORDER, CUTS, EXPERT_CUTS, MIXTURE, TIED_NAMES, TOLERANCES, Curve, Cut, compare, run
from testing import runs
from testing.rank_pool import Cluster

TIED_SCHEDULES = ("pipeline x2, interleaved", "pipeline x2, dualpipev", "pipeline x4", "pipeline x2, zbv x tensor x2")
"""Of which each has the two ends of the model elsewhere."""
VARIANTS = ("fsdp x2 (ZeRO-2)", "fsdp x2, sync each micro-batch", "pipeline x2, zbv", "pipeline x2 x fsdp x2")
"""Of layouts that ``make test`` has; zbv it has with tied embeddings."""
STEPS = 3
"""A wrong gradient shows in the second, what an optimizer keeps in the third."""
TIED = "model.tie_embeddings=true"
GENERATED = ("fsdp x2, compiled, selective",)
"""Compiled blocks that run as generated code, which takes half a minute; test_compile.py has the graphs of all
layouts."""
SMOOTHED = ("task.label_smoothing=0.1", "task.z_loss=1e-3")
TIED_SLOW = [
    name for name in TIED_NAMES if name not in ("pipeline x2, zbv", "context x2 x tensor x2 x fsdp x2", "tensor x2")
]
"""The last two: its parts are rows of their own, and test_tensor.py has both ends of a tied model."""


def cuts(*names: str, is_slow: bool = False) -> list[Any]:
    """Parameters: the cuts of these names."""
    marks = [pytest.mark.slow] if is_slow else []
    return [pytest.param(cut, id=cut.name, marks=marks) for cut in CUTS if cut.name in names]


@pytest.fixture(scope="session")
def reference(cluster: Cluster, text: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Curve]:
    """The single process of a precision and of overrides, which trains when a test first asks for it."""

    def train(precision: str, *more: str, steps: int = STEPS) -> Curve:
        run_dir = tmp_path_factory.mktemp("reference") / "run"
        return run(cluster, CUTS[0], 1, precision, text, run_dir, *more, steps=steps)

    return functools.cache(train)


def check_same(curve: Curve, reference: Curve, precision: str = "fp32") -> None:
    difference = compare(curve, reference)
    assert difference.same_samples
    assert difference.loss < TOLERANCES[precision]
    assert difference.grad_norm < TOLERANCES[precision]


@pytest.mark.parametrize(
    ("cut", "accumulation"),
    [
        pytest.param(
            cut, accumulation, id=f"{cut.name}, {accumulation}",
            marks=[pytest.mark.slow] if cut.is_slow or cut.name in VARIANTS or accumulation == 1 else [],
        )
        for cut in CUTS
        if "compiled" not in cut.name or cut.name in GENERATED
        for accumulation in cut.accumulations
        if accumulation > 1 or cut.name in ("ddp x2", "fsdp x2 (ZeRO-3)", "tensor x2")
    ],
)  # fmt: skip
def test_fp32_equals_the_single_process(
    cut: Cut, accumulation: int, reference: Callable[..., Curve], cluster: Cluster, text: Path, tmp_path: Path
) -> None:
    curve = run(cluster, cut, accumulation, "fp32", text, tmp_path / "run", steps=STEPS)
    check_same(curve, reference("fp32"))


@pytest.mark.parametrize("more", [(), MIXTURE], ids=["dense", "mixture"])
def test_reference_learns(more: tuple[str, ...], reference: Callable[..., Curve]) -> None:
    """A run that learns nothing would agree with anything."""
    losses = reference("fp32", *more, steps=6).losses
    assert losses[-1] < 0.95 * losses[0]


@pytest.mark.parametrize(
    "cut",
    [
        pytest.param(cut, id=cut.name, marks=[pytest.mark.slow] if cut.is_slow else [])
        for cut in EXPERT_CUTS[1:]
        if "compiled" not in cut.name
    ],
)
def test_a_mixture_of_experts_equals_the_single_process_and_sends_as_many_tokens_to_each_expert(
    cut: Cut, reference: Callable[..., Curve], cluster: Cluster, text: Path, tmp_path: Path
) -> None:
    curve = run(cluster, cut, cut.accumulations[0], "fp32", text, tmp_path / "run", *MIXTURE, steps=5)
    check_same(curve, reference("fp32", *MIXTURE, steps=5))
    assert any(fewest == 0 for layers in curve.expert_tokens for fewest, _, _ in layers), "an expert without a token"


@pytest.mark.parametrize("cut", [*cuts("pipeline x2, zbv"), *cuts(*TIED_SCHEDULES, *TIED_SLOW, is_slow=True)])
def test_tied_embeddings_equal_the_single_process(
    cut: Cut, reference: Callable[..., Curve], cluster: Cluster, text: Path, tmp_path: Path
) -> None:
    """A table that is used at both ends gets the gradient of both, and belongs to no unit of its own when sharded."""
    curve = run(cluster, cut, cut.accumulations[-1], "fp32", text, tmp_path / "run", TIED, steps=STEPS)
    check_same(curve, reference("fp32", TIED))
    assert not {name for name in runs.weights(tmp_path / "run") if "lm_head" in name}


@pytest.mark.slow
@pytest.mark.parametrize("cut", cuts("context x2 x tensor x2", "pipeline x2 x tensor x2"))
def test_label_smoothing_and_z_loss_equal_the_single_process(
    cut: Cut, reference: Callable[..., Curve], cluster: Cluster, text: Path, tmp_path: Path
) -> None:
    curve = run(cluster, cut, cut.accumulations[-1], "fp32", text, tmp_path / "run", *SMOOTHED, steps=STEPS)
    check_same(curve, reference("fp32", *SMOOTHED))
    assert compare(curve, reference("fp32")).loss > 0.01


@pytest.mark.parametrize("precision", ["bf16", pytest.param("fp16", marks=pytest.mark.slow)])
@pytest.mark.parametrize("cut", [*cuts("fsdp x2 (ZeRO-3)"), *cuts("tensor x2", "pipeline x2, zbv", is_slow=True)])
def test_low_precision_stays_within_its_rounding(
    cut: Cut, precision: str, reference: Callable[..., Curve], cluster: Cluster, text: Path, tmp_path: Path
) -> None:
    curve = run(cluster, cut, cut.accumulations[-1], precision, text, tmp_path / "run", steps=STEPS)
    check_same(curve, reference(precision), precision)
    against_fp32 = compare(reference(precision), reference("fp32"))
    assert 0 < against_fp32.loss < 3e-2, "the low type was really used, and does no harm"


@pytest.mark.slow
@pytest.mark.parametrize("cut", cuts("single", "ddp x2", "fsdp x2 (ZeRO-3)"))
def test_fp16_overflows_in_the_same_steps(
    cut: Cut, reference: Callable[..., Curve], cluster: Cluster, text: Path, tmp_path: Path
) -> None:
    """Three micro-batches, or two ranks, sum a weight's gradient over fewer tokens at a time than one pass does."""
    expected = reference("fp16", *BORDER, steps=10)
    curve = run(cluster, cut, 3, "fp16", text, tmp_path / "run", *BORDER, steps=10)
    assert len(expected.skipped) >= 3
    assert curve.skipped == expected.skipped
    assert compare(curve, expected).loss < TOLERANCES["fp16"]


@pytest.mark.parametrize("cut", [*cuts("ddp x2"), *cuts("fsdp x2 (ZeRO-3)", is_slow=True)])
def test_lost_gradient_breaks_parity(
    cut: Cut, reference: Callable[..., Curve], cluster: Cluster, text: Path, tmp_path: Path
) -> None:
    """The comparison can fail: in 6 steps, one rank loses the gradient of one micro-batch, and both bounds tell."""
    fault = {"rank": cut.processes - 1, "forwards": [5], "value": 0}  # the second micro-batch of step 2
    difference = compare(
        run(cluster, cut, 3, "fp32", text, tmp_path / "run", fault=fault, steps=6), reference("fp32", steps=6)
    )
    assert difference.same_samples
    assert difference.loss > 5 * TOLERANCES["fp32"]
    assert difference.grad_norm > 100 * TOLERANCES["fp32"]
