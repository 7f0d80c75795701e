"""What needs a GPU: kernels, precisions and copies that a CPU does not have. One GPU is enough.

TEST_DEVICE=cuda make test ARGS=tests/ranks/test_gpu.py
"""

import gc
import re
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import patch

import pytest
import torch

from serried.configs.schema.declaration import BUILT_IN
from serried.parallel.precision.float8_int8 import Int8
from serried.program import main
from serried.recipes.models.layers.lm_head import linear_cross_entropy_sum
from serried.trainer.trainer import Trainer
from testing.runs import losses, overrides, run_here, status, steps_saved, tree

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

DOCUMENTS = "data.isolate_documents=true"
COMPILED = "trainer.compile=true"


@pytest.fixture(autouse=True)
def _memory_is_given_back() -> Iterator[None]:
    yield
    gc.collect()
    torch.cuda.empty_cache()


SMALL = ["trainer.steps=10", "optim.lr=0.0003", "model.dim=64", "model.head_dim=16", "data.sequence_length=64"]
"""Small steps, so that rounding does not grow."""


def curve(text: Path, run_dir: Path, *more: str) -> list[float]:
    """Losses of 10 steps."""
    ended = run_here(overrides(text, run_dir, *SMALL, *more))
    assert ended.code == 0, ended.printed
    lines = [line for line in ended.printed.splitlines() if "WARNING" in line or "Warning" in line]
    assert lines == []
    return losses(run_dir)


def furthest(a: list[float], b: list[float]) -> float:
    """The largest difference between two curves."""
    return max(abs(x - y) for x, y in zip(a, b, strict=True))


@pytest.fixture(scope="module")
def on_cpu(text: Path, tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    return curve(text, tmp_path_factory.mktemp("cpu") / "run", "launch.device=cpu")


@pytest.mark.parametrize(
    ("more", "bound"),
    [
        ([], 1e-5), (["precision=bf16"], 2e-3), (["precision=fp16"], 1e-3), (["parallel=fsdp"], 1e-5),
        ([COMPILED], 1e-5), ([COMPILED, "precision=bf16"], 2e-3),
        ([COMPILED, "precision=fp16"], 1e-3),
        (["optim.offload=true"], 1e-5), (["trainer.deterministic=true"], 1e-5),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, list) else "",
)  # fmt: skip
def test_gpu_loss_curve_equals_cpu(
    more: list[str], bound: float, text: Path, tmp_path: Path, on_cpu: list[float]
) -> None:
    assert furthest(curve(text, tmp_path / "run", *more), on_cpu) < bound


@pytest.mark.parametrize(
    "more",
    [
        ["model.attention=flex"], ["model.attention=flex", COMPILED], ["model.attention=auto"],
        ["model.attention=sdpa", "precision=bf16"], ["model.attention=flex", "precision=bf16"],
        ["model.attention=flex", "precision=bf16", COMPILED, "trainer.eval_every=5"],
        ["model.attention=varlen", "model.kv_heads=4", "precision=bf16"],
        ["model.attention=varlen", "model.kv_heads=4", "precision=bf16", COMPILED],
        ["model.attention=flex", "data.sequence_length=96"],
    ],
    ids="-".join,
)  # fmt: skip
def test_each_kernel_isolates_documents_like_a_mask_on_a_cpu(more: list[str], text: Path, tmp_path: Path) -> None:
    same = [each for each in more if each.startswith(("model.kv_heads", "data."))]
    masked = curve(text, tmp_path / "cpu", DOCUMENTS, "launch.device=cpu", "model.attention=sdpa", *same)
    found = curve(text, tmp_path / "run", DOCUMENTS, *more)
    assert furthest(found, masked) < (2e-3 if "precision=bf16" in more else 1e-5)


@pytest.mark.parametrize("optimizer", ["adamw8bit", "adamw4bit", "muon", "lion", "adafactor", "sgd", "rmsprop"])
def test_an_optimizer_steps_as_on_a_cpu(optimizer: str, text: Path, tmp_path: Path) -> None:
    found = [curve(text, tmp_path / each, f"optim={optimizer}", f"launch.device={each}") for each in ("cpu", "cuda")]
    assert furthest(*found) < (5e-3 if "bit" in optimizer else 1e-4)


@pytest.mark.parametrize("more", [[], [COMPILED], ["precision=bf16"], ["precision=bf16", COMPILED]], ids="-".join)
def test_experts_learn_as_on_a_cpu(more: list[str], text: Path, tmp_path: Path) -> None:
    found = curve(text, tmp_path / "cuda", "model=moe_tiny", *more)
    assert furthest(found, curve(text, tmp_path / "cpu", "model=moe_tiny", "launch.device=cpu")) < (
        1e-2 if "precision=bf16" in more else 1e-4
    )


@pytest.mark.parametrize(
    "more",
    [
        [], [COMPILED], ["precision.scaling=tensorwise"], ["precision.scaling=tensorwise", COMPILED],
        ["precision.scaling=rowwise_with_gw_hp", COMPILED], ["precision.scaling=tensorwise", "parallel=fsdp"],
    ],
    ids="-".join,
)  # fmt: skip
def test_float8_learns_almost_as_bf16(more: list[str], text: Path, tmp_path: Path) -> None:
    big = ["model.dim=128", "model.head_dim=32", "model.hidden_dim=256"]
    found = curve(text, tmp_path / "run", "precision=float8", *more, *big, "trainer.sample_tokens=4")
    assert 0 < furthest(found, curve(text, tmp_path / "bf16", "precision=bf16", *big)) < 0.05


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_gradient_of_the_head_is_summed_in_fp32(dtype: torch.dtype) -> None:
    """Over 16 chunks: a sum that was rounded to ``dtype`` after each would be off by its precision."""
    hidden = (torch.randn(2**14, 64, device="cuda") / 8).to(dtype)
    weight, targets = torch.randn(2**14, 64, device="cuda") / 8, torch.randint(0, 2**14, (2**14,), device="cuda")
    weight.requires_grad_()
    linear_cross_entropy_sum(hidden, weight, targets).backward()
    low = weight.detach().to(dtype)
    logits = (hidden @ low.T).double()
    of_logits = logits.softmax(-1)
    of_logits[torch.arange(len(targets)), targets] -= 1
    expected = of_logits.to(dtype).double().T @ hidden.double()
    assert weight.grad is not None
    assert ((weight.grad - expected).norm() / expected.norm()) < 1e-4


def test_int8_multiplies_a_single_row() -> None:
    weight, rows = torch.randn(96, 64, device="cuda"), torch.randn(3, 64, device="cuda")
    assert torch.equal(Int8()(rows[:1].unsqueeze(0), weight)[0], Int8()(rows, weight)[:1])


MODES = ["trainer.activation_checkpoint=full", "trainer.activation_checkpoint=selective"]
MODES += ["trainer.activation_checkpoint=offload", "trainer.activation_memory_budget=0.5"]


def test_memory_saving_settings_change_no_bit(text: Path, tmp_path: Path) -> None:
    same = ["trainer.deterministic=true", "precision=bf16"]
    expected = curve(text, tmp_path / "run", *same)
    assert curve(text, tmp_path / "again", *same) == expected
    found = {mode: curve(text, tmp_path / mode.replace("=", "-"), *same, mode) for mode in MODES}
    assert found == dict.fromkeys(MODES, expected)


def test_a_resumed_run_has_the_bits_of_one_without_a_stop(text: Path, tmp_path: Path) -> None:
    same = ["trainer.deterministic=true", "precision=fp16", "checkpoint.every=2"]

    def stop(_: Trainer, step: int) -> None:
        if step == 5:
            raise KeyboardInterrupt

    whole = curve(text, tmp_path / "whole", *same)
    given = overrides(text, tmp_path / "run", *SMALL, *same)
    run_here(given, stop)
    assert steps_saved(tmp_path / "run")[-1] < 10
    assert run_here(given).code == 0
    assert status(tmp_path / "run")["state"] == "finished"
    assert losses(tmp_path / "run")[-4:] == whole[-4:]
    ends = [tree(tmp_path / each / "checkpoints" / "step-00000010") for each in ("whole", "run")]
    assert {name for name in ends[0] if name.endswith(".safetensors") and ends[0][name] != ends[1][name]} == set()


@pytest.mark.parametrize(
    "more",
    [
        [], ["precision=bf16"], ["precision=fp16"], ["parallel=fsdp"], [COMPILED, "precision=bf16"],
        ["model=moe_tiny", "precision=bf16"], ["optim=muon"], ["optim=adamw8bit"],
        [DOCUMENTS, "precision=bf16"], ["precision=float8"],
    ],
    ids="-".join,
)  # fmt: skip
def test_between_log_lines_the_host_does_not_wait_for_the_gpu(more: list[str], text: Path, tmp_path: Path) -> None:
    seen: list[int] = []
    steps = Trainer.steps

    def watched(self: Trainer) -> Iterator[int]:
        for step in steps(self):
            torch.cuda.set_sync_debug_mode("error" if 3 <= step < 8 else "default")
            seen.append(step)
            yield step

    big = ["model.dim=128", "model.head_dim=32", "model.hidden_dim=256", "data.sequence_length=64"]
    given = ["trainer.steps=10", "trainer.log_every=0", "checkpoint.every=0", *big, *more]
    try:
        with patch.object(Trainer, "steps", watched):
            assert main(overrides(text, tmp_path / "run", *given), BUILT_IN) == 0
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert seen == list(range(1, 11))


def test_out_of_memory_error_lists_what_holds_the_memory(text: Path, tmp_path: Path) -> None:
    huge = ["model.dim=1024", "model.hidden_dim=2048", "data.sequence_length=1024", "trainer.micro_batch=36"]
    torch.cuda.set_per_process_memory_fraction(2**31 / torch.cuda.get_device_properties(0).total_memory)
    try:
        ended = run_here(overrides(text, tmp_path / "run", *huge))
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert ended.code == 70, ended.printed
    assert re.search(r"failed: rank 0 on \S+ ran out of memory in forward of step 1", ended.printed)
    assert "trainer.micro_batch=" in ended.printed
