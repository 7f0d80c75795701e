"""precision=float8 and int8: which layers, how far from bf16, the same on every layout, in the same checkpoints."""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.profiler import profile

from benchmarks.parity import CUTS, Curve, Cut, compare, run
from serried.commands.evaluate_model import evaluate
from serried.configs.errors import UserError
from serried.parallel.activation_checkpoint import checkpoint_blocks
from serried.parallel.compile import compile_blocks
from serried.parallel.layout.mesh import Layout
from serried.parallel.plan import ParallelPlan
from serried.parallel.precision.float8_int8 import Float8, Int8, refuse_old
from serried.parallel.precision.low_precision_linear import Product, choose_linear, set_product
from serried.trainer.precision import refuse_emulation
from testing import runs
from testing.rank_pool import Cluster
from testing.runs import metrics, overrides, run_here, tiny_overrides

WIDE = ("model.dim=64", "model.hidden_dim=96")
"""Of which each part that a tensor rank has is a multiple of 16."""


def block(hidden: int = 32) -> nn.Sequential:
    return nn.Sequential(nn.Linear(32, hidden), nn.Tanh(), nn.Linear(hidden, 32, bias=False))


def test_trained_linear_layers_with_divisible_sizes_are_selected() -> None:
    model = nn.ModuleDict({"blocks": nn.Sequential(block(), block(40)), "head": nn.Linear(32, 32)})
    model.blocks[0].add_module("gate", nn.Linear(32, 16))  # type: ignore[union-attr, operator, index]
    model.blocks[1].add_module("old", nn.Linear(32, 32).requires_grad_(False))  # type: ignore[union-attr, operator, index]
    plan = ParallelPlan(blocks=("blocks.0", "blocks.1"), roles={"blocks.*.0": "column", "blocks.*.2": "row"})
    whole = choose_linear(model, plan, Layout("single"), rows=16, columns=16)
    assert whole.names == ["blocks.0.0", "blocks.0.2"]
    assert whole.describe() == (
        "2 of 6 linear layers of the blocks (not blocks.0.gate: a router; blocks.1.0: 40 outputs, not a multiple of "
        "16; blocks.1.2: 40 inputs, not a multiple of 16; blocks.1.old: frozen)"
    )
    divided = choose_linear(model, plan, Layout("fsdp", tensor=4), rows=16, columns=16)
    assert not divided.names
    assert divided.others["8 inputs, not a multiple of 16"] == ["blocks.0.2"]


def test_encoder_layer_that_reads_weights_in_evaluation_is_not_converted() -> None:
    model = nn.ModuleDict({"blocks": nn.Sequential(*(nn.TransformerEncoderLayer(32, 2, 64) for _ in range(2)))})
    chosen = choose_linear(model, ParallelPlan(blocks=("blocks.0", "blocks.1")), Layout("single"), rows=16, columns=16)
    assert not chosen.names
    assert sum(map(len, chosen.others.values())) == 4


def products(product: Product, x: Tensor, weight: Tensor, gradient: Tensor) -> list[Tensor]:
    """The result and the gradients."""
    x, weight = x.clone().requires_grad_(), weight.clone().requires_grad_()
    output = product(x, weight)
    output.backward(gradient.to(output.dtype))
    assert x.grad is not None
    assert weight.grad is not None
    return [output.detach().float(), x.grad, weight.grad]


@pytest.mark.parametrize("recipe", ["rowwise", "tensorwise", "rowwise_with_gw_hp", "int8"])
def test_products_are_rounded_and_do_not_depend_on_how_tokens_are_grouped(recipe: str) -> None:
    torch.manual_seed(1)
    x, weight, gradient = torch.randn(40, 64), torch.randn(48, 64), torch.randn(40, 48)
    exact = [x @ weight.T, gradient @ weight, gradient.T @ x]
    product = Int8() if recipe == "int8" else Float8(recipe, emulates=True)
    whole = products(product, x, weight, gradient.T.contiguous().T)
    errors = [float((ours - theirs).norm() / theirs.norm()) for ours, theirs in zip(whole, exact, strict=True)]
    assert all(0.005 < error < (0.02 if recipe == "int8" else 0.06) for error in errors[:2]), errors  # bf16: 0.002
    assert (errors[2] < 0.005) == (recipe == "rowwise_with_gw_hp")
    # Another rank's tokens are ten times as large: 30 rows, which are not a multiple of 16, have the same bits.
    larger = torch.cat((x[:30], 10 * x[30:]))
    assert products(product, larger, weight, gradient)[0][:30].equal(whole[0][:30]) or recipe == "tensorwise"


def uses_torchs(profiled: profile) -> bool:
    return any(each.key == "aten::_scaled_mm" for each in profiled.key_averages())


def test_emulated_products_equal_torch_except_for_summation_order() -> None:
    torch.manual_seed(1)
    x, weight, gradient = torch.randn(16, 32), torch.randn(48, 32), torch.randn(16, 48)
    found = []
    for emulates in (True, False):
        with profile() as profiled:
            found.append(products(Float8("tensorwise", emulates=emulates), x, weight, gradient))
        assert uses_torchs(profiled) != emulates
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=2**-7, atol=1e-5)  # bf16 has 8 bits


def test_a_rowwise_run_learns_as_in_bf16_and_resumes_with_the_same_bits_from_the_same_files(
    text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    more = (*WIDE, "trainer.deterministic=true", "trainer.steps=4", "trainer.eval_every=4", "precision=float8")
    ended = run_here(tiny_overrides(text, tmp_path / "whole", *more))
    assert ended.code == 0, ended.printed
    assert (
        "precision  float8 products (rowwise, emulated on this CPU) in 7 of 7 linear layers of the blocks, bf16 "
        "products elsewhere; fp32 parameters"
    ) in ended.printed
    with profile() as profiled:
        assert run_here(tiny_overrides(text, tmp_path / "parts", *more, "trainer.stop_at=1")).code == 75
    assert not uses_torchs(profiled), "they take minutes on a CPU"
    # Which changes no bits.
    ended = run_here(tiny_overrides(text, tmp_path / "parts", *more, "trainer.activation_checkpoint=selective"))
    assert ended.code == 0, ended.printed
    assert metrics(tmp_path / "parts")[-1]["loss"] == metrics(tmp_path / "whole")[-1]["loss"]
    assert not runs.different_tensors(tmp_path / "whole", tmp_path / "parts", "model")
    whole = runs.weights(tmp_path / "whole")
    plain = run_here(tiny_overrides(text, tmp_path / "bf16", *more, "precision=bf16"))
    assert plain.code == 0, plain.printed
    theirs = runs.weights(tmp_path / "bf16")
    assert {name: (each.shape, each.dtype) for name, each in theirs.items()} == {
        name: (each.shape, each.dtype) for name, each in whole.items()
    }
    losses = [runs.losses(tmp_path / name) for name in ("whole", "bf16")]
    assert losses[0] == pytest.approx(losses[1], rel=5e-3)
    assert losses[0] != losses[1]
    changed = run_here(tiny_overrides(text, tmp_path / "whole", *more, "precision.scaling=tensorwise"))
    assert changed.code == 78
    assert "precision.scaling rowwise -> tensorwise" in changed.printed
    assert evaluate([str(tmp_path / "whole"), "json=true"]) == 0
    (found,) = (json.loads(line) for line in capsys.readouterr().out.splitlines() if line.startswith("{"))
    assert found["loss"] == pytest.approx(metrics(tmp_path / "whole", "eval")[-1]["loss"], rel=1e-6)


LAYOUTS = {
    "float8": ("ddp x2", "fsdp x2 (ZeRO-3)", "tensor x2", "context x2", "pipeline x2, zbv"),
    "int8": ("fsdp x2 (ZeRO-3)", "tensor x2"),
}


@pytest.fixture(scope="module")
def references(cluster: Cluster, text: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Curve]:
    folder = tmp_path_factory.mktemp("references")
    return {name: run(cluster, CUTS[0], 1, name, text, folder / name, *WIDE, steps=3) for name in LAYOUTS}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("precision", "cut"),
    [
        pytest.param(name, cut, id=f"{name}, {cut.name}")
        for name, cuts in LAYOUTS.items()
        for cut in CUTS
        if cut.name in cuts
    ],
)
def test_loss_on_every_layout_equals_one_process(
    precision: str, cut: Cut, references: dict[str, Curve], cluster: Cluster, text: Path, tmp_path: Path
) -> None:
    curve = run(cluster, cut, cut.accumulations[-1], precision, text, tmp_path / "run", *WIDE, steps=3)
    assert compare(curve, references[precision]).loss < 3e-3
    assert curve.grad_norms[0] == pytest.approx(references[precision].grad_norms[0], rel=1e-2)


@pytest.mark.slow
@pytest.mark.parametrize("product", [partial(Float8, "rowwise", emulates=True), Int8], ids=["float8", "int8"])
def test_compiled_blocks_have_the_bits_of_plain_ones_with_selective_checkpointing_too(
    product: Callable[[], Product],
) -> None:
    found, plan = [], ParallelPlan(blocks=("0", "1"))
    torch._dynamo.reset()
    for compiles in (False, True):
        torch.manual_seed(1)
        model, x = nn.Sequential(block(), block()), torch.randn(16, 32, requires_grad=True)
        set_product(model, ["0.0", "0.2", "1.0", "1.2"], product())
        with torch.compiler.set_stance("default", force_backend="aot_eager"):
            if compiles:
                checkpoint_blocks(model, plan, "selective")
                compile_blocks(model, plan)
            model(x).float().square().sum().backward()
        found.append([x.grad, *(each.grad for each in model.parameters())])
    torch._dynamo.reset()
    assert all(ours.equal(theirs) for ours, theirs in zip(*found, strict=True))


GATHERED = ("precision=float8", "precision.scaling=tensorwise", "precision.gather=float8")


@pytest.mark.slow
def test_gathering_in_float8_changes_no_bit_and_begins_and_ends_when_a_run_resumes(
    cluster: Cluster, text: Path, tmp_path: Path
) -> None:
    def train(name: str, gather: str, stop_at: int = 3) -> None:
        argv = overrides(
            text, tmp_path / name, *WIDE, "parallel=fsdp", *GATHERED[:2], f"precision.gather={gather}",
            "trainer.steps=3", "trainer.micro_batch=18", f"trainer.stop_at={stop_at}", "trainer.eval_every=3",
            "trainer.ema_decay=0.9",
        )  # fmt: skip
        codes = [answer.value["code"] for answer in cluster.run(2, "testing.runs:train_small", argv=argv)]
        assert codes == [0 if stop_at == 3 else 75] * 2

    train("whole", "bf16")
    train("parts", "float8", 1)
    train("parts", "bf16", 2)
    train("parts", "float8")
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    assert [(line["loss"], line["grad_norm"]) for line in metrics(parts)] == [
        (line["loss"], line["grad_norm"]) for line in metrics(whole)
    ]
    assert metrics(parts, "eval")[-1]["loss"] == metrics(whole, "eval")[-1]["loss"]  # of the average of the weights
    assert not runs.different_tensors(parts, whole)


@pytest.mark.parametrize(
    "cut",
    [
        pytest.param(cut, id=cut.name, marks=[] if cut.name == "fsdp x2 (ZeRO-2)" else pytest.mark.slow)
        for cut in CUTS
        if cut.name in (
            "fsdp x2 (ZeRO-2)", "fsdp x2, sync each micro-batch", "fsdp x3", "hsdp 2x2", "tensor x2 x fsdp x2",
            "context x2", "pipeline x2, zbv x fsdp x2",
        )
    ],
)  # fmt: skip
def test_gathering_in_float8_changes_no_bit_on_a_layout(cut: Cut, cluster: Cluster, text: Path, tmp_path: Path) -> None:
    """Of 3 ranks, those with 64 rows are gathered in bf16. Emulated products take long: few micro-batches."""
    gathers_again = "pipeline" in cut.name or cut.name in ("fsdp x2 (ZeRO-2)", "fsdp x2, sync each micro-batch")
    curves = [
        run(cluster, cut, cut.accumulations[-1] if gathers_again else 1, "float8", text, tmp_path / gather, *WIDE,
            *GATHERED[1:2], f"precision.gather={gather}", steps=2)
        for gather in ("bf16", "float8")
    ]  # fmt: skip
    assert curves[0] == curves[1]


def train_traced(argv: list[str]) -> None:
    torch._dynamo.reset()
    with torch.compiler.set_stance("default", force_backend="aot_eager"):
        runs.train_small(argv)
    torch._dynamo.reset()


@pytest.mark.slow
@pytest.mark.parametrize(
    "more",
    [
        ("trainer.compile=true", "trainer.activation_checkpoint=selective"),
        ("trainer.activation_checkpoint=offload",),
        ("optim=adamw_bf16", "trainer.activation_checkpoint=full"),
    ],
)
def test_gathering_in_float8_changes_no_bit_with_other_settings(
    more: tuple[str, ...], cluster: Cluster, text: Path, tmp_path: Path
) -> None:
    for gather in ("bf16", "float8"):
        argv = overrides(
            text, tmp_path / gather, *WIDE, "parallel=fsdp", *GATHERED[:2], f"precision.gather={gather}",
            "trainer.steps=2", "trainer.micro_batch=9", *more,
        )  # fmt: skip
        cluster.run(2, "tests.ranks.precision.test_eight_bits:train_traced", 600, argv=argv)
    assert runs.losses(tmp_path / "bf16") == runs.losses(tmp_path / "float8")


@pytest.mark.parametrize(
    ("more", "told", "cure"),
    [
        ("adapter=lora", "precision=float8 has no effect with adapter.method=lora: it applies", "precision=bf16"),
        (
            "model.dim=24 model.hidden_dim=24",
            "(not layers.0.self_attn.q_proj and 4 more: 24 outputs, not a multiple of 16",
            "precision=bf16",
        ),
        (
            "precision=bf16 precision.gather=float8",
            "precision.gather=float8 is not supported with precision=bf16: FSDP",
            "precision=float8 precision.scaling=tensorwise, or precision.gather=bf16",
        ),
        (
            "precision.gather=float8",
            "precision.gather=float8 is not supported with precision.scaling=rowwise: FSDP",
            "precision=float8 precision.scaling=tensorwise, or precision.gather=bf16",
        ),
        (
            "precision.scaling=tensorwise precision.gather=float8 parallel=ddp launch.processes=2",
            "precision.gather=float8 with parallel=ddp: no weights are gathered",
            "precision.gather=bf16, or parallel=fsdp",
        ),
    ],
)
def test_unsupported_float8_settings_are_refused_in_one_line(
    more: str, told: str, cure: str, text: Path, tmp_path: Path
) -> None:
    ended = run_here(tiny_overrides(text, tmp_path / "run", "dry_run=true", "precision=float8", *more.split()))
    assert told in ended.error
    assert f"use {cure}" in ended.error


def test_gpu_without_bf16_is_refused_with_its_compute_capability() -> None:
    refuse_emulation("NVIDIA A100", (8, 0))
    with pytest.raises(UserError, match=r"precision=bf16 needs .* but Tesla V100 has 7\.0; use precision=fp16"):
        refuse_emulation("Tesla V100", (7, 0))


def test_older_gpu_is_refused_with_the_required_compute_capability() -> None:
    refuse_old("float8", "NVIDIA H100", (9, 0))
    refuse_old("int8", "NVIDIA A100", (8, 0))
    with pytest.raises(UserError, match=r"capability 8\.9 .* A100.* has 8\.0; use precision=bf16"):
        refuse_old("float8", "NVIDIA A100", (8, 0))
