"""precision.quantize_aware: layers compute as torchao's after quantization, and the export does what was trained."""

import copy
import json
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from benchmarks.parity import CUTS, Curve, Cut, compare, run
from serried import cli
from serried.commands import evaluate_model
from serried.configs.errors import UserError
from serried.parallel.compile import compile_blocks
from serried.parallel.plan import ParallelPlan
from serried.parallel.precision.low_precision_linear import check_torchao, product_of_torchao, set_product
from serried.parallel.precision.quantize_aware import FakeQuantized, torchao_config
from testing import runs
from testing.rank_pool import Cluster
from testing.runs import metrics, run_here, tiny_overrides
from tests.ranks.precision.test_eight_bits import WIDE, block

HOW = ("int8_dynamic_int4", "int4_weight_only")
AWARE = (*WIDE, f"precision.quantize_aware={HOW[0]}")


def results(model: nn.Module) -> list[Tensor]:
    """What ``model`` returns, and the gradients."""
    x = torch.randn(3, 5, 32, generator=torch.Generator().manual_seed(1)).requires_grad_()
    output = model(x)
    output.square().sum().backward()
    found = [output.detach(), x.grad, *(each.grad for each in model.parameters())]
    return [each for each in found if each is not None]


@pytest.mark.parametrize("how", HOW)
def test_outputs_and_gradients_equal_torchao(how: str) -> None:
    torch.manual_seed(2)
    plain = nn.Sequential(block(64), block(64))
    ours, theirs = copy.deepcopy(plain), copy.deepcopy(plain)
    set_product(ours, ["0.0", "0.2", "1.0", "1.2"], FakeQuantized(how))
    from torchao.quantization import quantize_
    from torchao.quantization.qat import QATConfig

    quantize_(theirs, QATConfig(torchao_config(how), step="prepare"))
    expected = results(theirs)
    assert all(mine.equal(its) for mine, its in zip(results(ours), expected, strict=True))
    assert not any(mine.equal(its) for mine, its in zip(results(plain), expected, strict=True))


@pytest.mark.slow
def test_compiled_blocks_have_the_same_bits() -> None:
    found: list[list[Tensor]] = []
    torch._dynamo.reset()
    for compiles in (False, True):
        torch.manual_seed(2)
        model = nn.Sequential(block(), block())
        set_product(model, ["0.0", "0.2", "1.0", "1.2"], FakeQuantized(HOW[0]))
        with torch.compiler.set_stance("default", force_backend="aot_eager"):
            if compiles:
                compile_blocks(model, ParallelPlan(blocks=("0", "1")))
            found.append(results(model))
    torch._dynamo.reset()
    assert all(mine.equal(its) for mine, its in zip(*found, strict=True))


def test_a_run_resumes_with_the_same_bits(text: Path, tmp_path: Path) -> None:
    more = (*WIDE, "trainer.deterministic=true", f"precision.quantize_aware={HOW[0]}")
    ended = run_here(tiny_overrides(text, tmp_path / "whole", *more))
    assert ended.code == 0, ended.printed
    assert f"precision  fp32; rounded as by {HOW[0]} in 7 of 7 linear layers of the blocks" in ended.printed
    assert run_here(tiny_overrides(text, tmp_path / "parts", *more, "trainer.stop_at=3")).code == 75
    full = "trainer.activation_checkpoint=full"  # which changes no bits
    assert run_here(tiny_overrides(text, tmp_path / "parts", *more, full)).code == 0
    assert not runs.different_tensors(tmp_path / "whole", tmp_path / "parts")
    assert metrics(tmp_path / "parts")[-1]["loss"] == metrics(tmp_path / "whole")[-1]["loss"]


@pytest.mark.slow
@pytest.mark.parametrize("how", HOW)
def test_run_is_exported_quantized_and_plain(
    how: str, text: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    trained = tmp_path / "run"
    old = ("optim.groups.old.parameters=*.mlp.*", "optim.groups.old.frozen=true", "trainer.eval_every=6")
    assert run_here(tiny_overrides(text, trained, *WIDE, *old, f"precision.quantize_aware={how}")).code == 0
    assert evaluate_model.evaluate([str(trained), "json=true"]) == 0
    (found,) = (json.loads(line) for line in capfd.readouterr().out.splitlines() if line.startswith("{"))
    assert found["loss"] == pytest.approx(metrics(trained, "eval")[-1]["loss"], rel=1e-6)
    assert cli.main(["export", str(trained), "format=torchao", f"out={tmp_path / 'quantized'}"]) == 0
    printed = capfd.readouterr().out
    assert f"torchao, {how}, " in printed
    assert "largest difference of its logits from the model's: 0.0e+00" in printed
    assert (tmp_path / "quantized" / "tokenizer.json").is_file()
    kept = json.loads((tmp_path / "quantized" / "config.json").read_text())["quantization_config"]
    assert "model.layers.0.mlp.up_proj" in kept["modules_to_not_convert"]
    assert "model.layers.0.self_attn.q_proj" not in kept["modules_to_not_convert"]
    assert cli.main(["export", str(trained), f"out={tmp_path / 'plain'}"]) == 0
    exported, saved = runs.load_file(tmp_path / "plain" / "model.safetensors"), runs.weights(trained)
    assert all(exported[name].equal(saved[name]) for name in saved)


@pytest.fixture(scope="module")
def references(cluster: Cluster, text: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Curve]:
    folder = tmp_path_factory.mktemp("references")
    return {name: run(cluster, CUTS[0], 1, name, text, folder / name, *AWARE, steps=3) for name in ("fp32", "bf16")}


LAYOUTS = {"fp32": ("ddp x2", "fsdp x2 (ZeRO-3)", "context x2", "pipeline x2, zbv"), "bf16": ("fsdp x2 (ZeRO-3)",)}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("precision", "cut"),
    [
        pytest.param(precision, cut, id=f"{precision}-{cut.name}")
        for precision, names in LAYOUTS.items()
        for cut in CUTS
        if cut.name in names
    ],
)
def test_loss_on_every_layout_equals_one_process(
    precision: str, cut: Cut, references: dict[str, Curve], cluster: Cluster, text: Path, tmp_path: Path
) -> None:
    curve = run(cluster, cut, cut.accumulations[-1], precision, text, tmp_path / "run", *AWARE, steps=3)
    assert compare(curve, references[precision]).loss < 2e-3
    assert curve.grad_norms[0] == pytest.approx(references[precision].grad_norms[0], rel=1e-2)


@pytest.mark.parametrize(
    ("more", "told"),
    [
        ("precision=fp16", "with precision=fp16; use precision=bf16, or"),
        ("precision=float8", "with precision=float8; use precision=bf16, or"),
        ("adapter=lora", "with adapter.method=lora, which freezes the weights to quantize; use"),
        (
            "launch.processes=2 parallel=fsdp parallel.tensor=2",
            "with parallel.tensor=2, which would shard weights that share a scale; use parallel.tensor=1, or",
        ),
        ("model.dim=48", "applies to 0 of 7 linear layers of the blocks (not layers.0.self_attn.q_proj"),
    ],
)
def test_settings_that_cannot_be_quantized_are_refused_in_one_line(
    more: str, told: str, text: Path, tmp_path: Path
) -> None:
    argv = tiny_overrides(text, tmp_path / "run", "dry_run=true", f"precision.quantize_aware={HOW[1]}", *more.split())
    assert told in run_here(argv).error


def test_missing_library_is_refused_with_its_install_command() -> None:
    check_torchao("precision.quantize_aware=x", "precision.quantize_aware=none")
    with pytest.raises(UserError, match=r"pip install -e '\.\[lowbit\]', or precision=bf16"):
        check_torchao("precision=float8", "precision=bf16", library="no_such_library")


@pytest.mark.parametrize("lacks", ["import torchao.no_such_module", "torch.no_such_dtype"])
def test_incompatible_torchao_is_refused_in_one_line(lacks: str) -> None:
    with pytest.raises(UserError, match=r"^precision=float8 needs torchao>=0\.18, .* or precision=bf16$"):
        product_of_torchao("precision=float8", "precision=bf16", lambda: exec(lacks))
