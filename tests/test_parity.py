"""The promise: loss, gradient norm and samples of a run do not depend on how it was cut."""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks.parity import BORDER, CUTS, EXPERT_CUTS, MIXTURE, TIED_NAMES, TOLERANCES, Curve, Cut, compare, run
from harness import runs
from harness.cluster import Cluster

TIED_SCHEDULES = ("pipeline x2, interleaved", "pipeline x2, dualpipev", "pipeline x4", "pipeline x2, zbv x tensor x2")
"""Of which each has the two ends of the model elsewhere."""
TIED_DAILY = ("tensor x2", "pipeline x2, zbv")
TIED = "model.tie_embeddings=true"
GENERATED = ("fsdp x2, compiled, selective", "tensor x2, compiled")
"""Compiled blocks that run as generated code; test_compile.py has the graphs of all layouts."""
SMOOTHED = ("task.label_smoothing=0.1", "task.z_loss=1e-3")
TIED_TWICE = "context x2 x tensor x2 x fsdp x2"  # its parts are rows of their own


def cuts(*names: str, is_slow: bool = False) -> list[Any]:
    """Parameters: the cuts of these names."""
    marks = [pytest.mark.slow] if is_slow else []
    return [pytest.param(cut, id=cut.name, marks=marks) for cut in CUTS if cut.name in names]


@pytest.fixture(scope="session")
def reference(cluster: Cluster, text: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Curve]:
    """The single process of a precision, which trains when a test first asks for it."""
    folder = tmp_path_factory.mktemp("references")
    return functools.cache(lambda precision: run(cluster, CUTS[0], 1, precision, text, folder / precision))


@pytest.mark.parametrize(
    ("cut", "accumulation"),
    [
        pytest.param(
            cut, accumulation, id=f"{cut.name}, {accumulation}",
            marks=[pytest.mark.slow] if cut.is_slow or accumulation == 1 else [],
        )
        for cut in CUTS
        if "compiled" not in cut.name or cut.name in GENERATED
        for accumulation in cut.accumulations
        if accumulation > 1 or cut.name in ("ddp x2", "fsdp x2 (ZeRO-3)", "tensor x2")
    ],
)  # fmt: skip
def test_fp32_equals_the_single_process(
    cut: Cut, accumulation: int, reference: Callable[[str], Curve], cluster: Cluster, text: Path, tmp_path: Path
) -> None:
    curve = run(cluster, cut, accumulation, "fp32", text, tmp_path / "run")
    difference = compare(curve, reference("fp32"))
    assert difference.same_samples
    assert difference.loss < TOLERANCES["fp32"]
    assert difference.grad_norm < TOLERANCES["fp32"]
    assert curve.losses[-1] < 0.9 * curve.losses[0], "a run that learns nothing would agree with anything"


@pytest.fixture(scope="session")
def mixture_reference(cluster: Cluster, text: Path, tmp_path_factory: pytest.TempPathFactory) -> Curve:
    return run(cluster, CUTS[0], 1, "fp32", text, tmp_path_factory.mktemp("mixture") / "run", *MIXTURE)


@pytest.mark.parametrize(
    "cut",
    [pytest.param(cut, id=cut.name, marks=[pytest.mark.slow] if cut.is_slow else []) for cut in EXPERT_CUTS[1:]],
)
def test_a_mixture_of_experts_equals_the_single_process_and_sends_as_many_tokens_to_each_expert(
    cut: Cut, mixture_reference: Curve, cluster: Cluster, text: Path, tmp_path: Path
) -> None:
    curve = run(cluster, cut, cut.accumulations[0], "fp32", text, tmp_path / "run", *MIXTURE)
    difference = compare(curve, mixture_reference)
    assert difference.same_samples
    assert difference.loss < TOLERANCES["fp32"]
    assert difference.grad_norm < TOLERANCES["fp32"]
    assert any(fewest == 0 for layers in curve.expert_tokens for fewest, _, _ in layers), "an expert without a token"


@pytest.fixture(scope="session")
def tied_reference(cluster: Cluster, text: Path, tmp_path_factory: pytest.TempPathFactory) -> Curve:
    return run(cluster, CUTS[0], 1, "fp32", text, tmp_path_factory.mktemp("tied") / "run", TIED, steps=5)


@pytest.mark.parametrize(
    "cut",
    [
        *cuts(*TIED_DAILY),
        *cuts(*TIED_SCHEDULES, *(n for n in TIED_NAMES if n not in (*TIED_DAILY, TIED_TWICE)), is_slow=True),
    ],
)
def test_tied_embeddings_equal_the_single_process(
    cut: Cut, tied_reference: Curve, cluster: Cluster, text: Path, tmp_path: Path
) -> None:
    """A table that is used at both ends gets the gradient of both, and belongs to no unit of its own when sharded."""
    curve = run(cluster, cut, cut.accumulations[-1], "fp32", text, tmp_path / "run", TIED, steps=5)
    difference = compare(curve, tied_reference)
    assert difference.same_samples
    assert difference.loss < TOLERANCES["fp32"]
    assert difference.grad_norm < TOLERANCES["fp32"]
    assert not {name for name in runs.weights(tmp_path / "run") if "lm_head" in name}


@pytest.fixture(scope="session")
def smoothed_reference(cluster: Cluster, text: Path, tmp_path_factory: pytest.TempPathFactory) -> Curve:
    return run(cluster, CUTS[0], 1, "fp32", text, tmp_path_factory.mktemp("smoothed") / "run", *SMOOTHED)


@pytest.mark.parametrize(
    "cut",
    [
        *cuts("tensor x2"),
        *cuts("context x2 x tensor x2", "pipeline x2 x tensor x2", is_slow=True),
    ],
)
def test_label_smoothing_and_z_loss_equal_the_single_process(
    cut: Cut, reference: Callable[[str], Curve], smoothed_reference: Curve, cluster: Cluster, text: Path, tmp_path: Path
) -> None:
    curve = run(cluster, cut, cut.accumulations[-1], "fp32", text, tmp_path / "run", *SMOOTHED)
    difference = compare(curve, smoothed_reference)
    assert difference.same_samples
    assert difference.loss < TOLERANCES["fp32"]
    assert difference.grad_norm < TOLERANCES["fp32"]
    assert compare(curve, reference("fp32")).loss > 0.01


@pytest.mark.parametrize("precision", ["bf16", pytest.param("fp16", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "cut",
    [
        *cuts("fsdp x2 (ZeRO-3)"),
        *cuts("tensor x2", "pipeline x2, zbv", is_slow=True),
    ],
)
def test_low_precision_stays_within_its_rounding(
    cut: Cut, precision: str, reference: Callable[[str], Curve], cluster: Cluster, text: Path, tmp_path: Path
) -> None:
    curve = run(cluster, cut, cut.accumulations[-1], precision, text, tmp_path / "run")
    difference = compare(curve, reference(precision))
    assert difference.same_samples
    assert difference.loss < TOLERANCES[precision]
    assert difference.grad_norm < TOLERANCES[precision]
    against_fp32 = compare(reference(precision), reference("fp32"))
    assert 0 < against_fp32.loss < 3e-2, "the low type was really used, and does no harm"


@pytest.fixture(scope="session")
def border_reference(cluster: Cluster, text: Path, tmp_path_factory: pytest.TempPathFactory) -> Curve:
    return run(cluster, CUTS[0], 1, "fp16", text, tmp_path_factory.mktemp("border") / "run", *BORDER, steps=10)


@pytest.mark.slow
@pytest.mark.parametrize("cut", cuts("single", "ddp x2", "fsdp x2 (ZeRO-3)"))
def test_fp16_overflows_in_the_same_steps(
    cut: Cut, border_reference: Curve, cluster: Cluster, text: Path, tmp_path: Path
) -> None:
    """Three micro-batches, or two ranks, sum a weight's gradient over fewer tokens at a time than one pass does."""
    curve = run(cluster, cut, 3, "fp16", text, tmp_path / "run", *BORDER, steps=10)
    assert len(border_reference.skipped) >= 3
    assert curve.skipped == border_reference.skipped
    assert compare(curve, border_reference).loss < TOLERANCES["fp16"]


@pytest.mark.parametrize(
    "cut",
    [
        *cuts("ddp x2"),  # test_resume.py compares more bits, of runs that were stopped too
        *cuts("fsdp x2 (ZeRO-3)", "tensor x2 x fsdp x2", is_slow=True),
    ],
)
def test_the_same_command_twice_gives_the_same_bits(cut: Cut, cluster: Cluster, text: Path, tmp_path: Path) -> None:
    first, second = (
        run(cluster, cut, cut.accumulations[-1], "fp32", text, tmp_path / name, "trainer.deterministic=true")
        for name in ("a", "b")
    )
    assert first == second
    weights = [runs.weights(tmp_path / name) for name in ("a", "b")]
    assert weights[0].keys() == weights[1].keys()
    assert all(weights[0][name].equal(weights[1][name]) for name in weights[0])


@pytest.mark.parametrize("cut", [*cuts("ddp x2"), *cuts("fsdp x2 (ZeRO-3)", is_slow=True)])
def test_a_lost_gradient_would_be_seen(
    cut: Cut, reference: Callable[[str], Curve], cluster: Cluster, text: Path, tmp_path: Path
) -> None:
    """The comparison can fail: in 6 steps, one rank loses the gradient of one micro-batch, and both bounds tell."""
    fault = {"rank": cut.processes - 1, "forwards": [5], "value": 0}  # the second micro-batch of step 2
    difference = compare(run(cluster, cut, 3, "fp32", text, tmp_path / "run", fault=fault), reference("fp32"))
    assert difference.same_samples
    assert difference.loss > 5 * TOLERANCES["fp32"]
    assert difference.grad_norm > 100 * TOLERANCES["fp32"]
