"""A run whose memory is used up says where, what holds it and what would help; and the estimate of it is honest."""

import gc
import json
import math
import os
import resource
import subprocess
import sys
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

from serried.configs.compose import compose
from serried.configs.schema.launch_plan_track import LaunchSection
from serried.configs.schema.registry import models
from serried.parallel.activation_checkpoint import checkpoint_blocks
from serried.parallel.step_phases import BACKWARD, FORWARD, OPTIMIZER
from serried.planner.activations.families import FORMULAS
from serried.planner.activations.terms import Share
from serried.planner.advice import Planned
from serried.planner.advice import advice as plan_advice
from serried.planner.out_of_memory import _advice, _asked_bytes, _Usage, is_out_of_memory
from serried.recipes.models.families.gpt2 import GPT2Model
from serried.recipes.models.families.gpt2_config import GPT2Section
from serried.recipes.models.family import family_of
from serried.recipes.models.layers.lm_head import HeadTerms, LanguageModelHead, linear_cross_entropy_sum
from serried.recipes.text.causal_lm import CausalLM
from serried.runtime import process
from serried.trainer.monitor.heartbeat import SET_UP
from testing.forked_runs import typed_on
from testing.rank_pool import ROOT
from testing.runs import metrics, status, tiny_overrides
from tests.support.greedy import ABSURD, train_out_of_memory

_ADDRESS_SPACE_GIB = 3 if torch.version.cuda is None else 6
"""Of which torch takes 0.6 GiB, or 3.2 built for CUDA; what is left holds a small model, and none of 3.5 GiB."""


# estimate -----------------------------------------------------------------------------------------------------------

SHAPES = {
    "experts": ["model=moe_tiny", "model.expert_hidden_dim=128", "model.vocab_size=1000"],
    "small vocabulary": ["model.vocab_size=257"],
    "many sequences": ["model.vocab_size=257", "trainer.micro_batch=12"],
    "several chunks of logits": [
        "model.vocab_size=6000",
        "model.tie_embeddings=false",
        "trainer.micro_batch=24",
        "model.dim=64",
    ],
    "qwen3": ["model=qwen3_600m", "model.vocab_size=257", "model.head_dim=48", "model.kv_heads=4"],
    "olmo2": ["model=olmo2_7b", "model.vocab_size=257", "model.kv_heads=4"],
    "gemma3": ["model=gemma3_1b", "model.vocab_size=257", "model.head_dim=64"],
    "plain attention": ["model.vocab_size=257", "model.kv_heads=4", "model.head_dim=48"],
}


@pytest.mark.parametrize(
    "dtype", [pytest.param(torch.float32, id="fp32", marks=pytest.mark.slow), pytest.param(torch.bfloat16, id="bf16")]
)
@pytest.mark.parametrize("shape", SHAPES)
def test_activations_take_what_the_plan_says_to_a_twentieth(shape: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """Against the allocations of a forward and backward, summed up by torch's profiler."""
    sizes = ["model.layers=2", "model.dim=128", "model.heads=4", "model.kv_heads=2", "model.hidden_dim=320"]
    sizes.append("data.sequence_length=128")
    given = dict(argument.split("=") for argument in [*sizes, "trainer.micro_batch=4", *SHAPES[shape]])
    config = compose([f"{key}={value}" for key, value in given.items()])
    vocab_size = config.model.vocab_size
    assert vocab_size is not None
    family = family_of(models.get(config.model.family).load(), config.model, vocab_size)
    sequences, length = config.trainer.micro_batch, config.data.sequence_length
    tokens = torch.randint(0, vocab_size, (sequences, length))
    model = type(family.build())(config.model, vocab_size)  # not on meta
    taken = peak(model, tokens, dtype, tmp_path)
    formula, autocast = FORMULAS[config.model.family], dtype != torch.float32
    estimate = formula(config.model, vocab_size, sequences, length, dtype, autocast)
    assert 0.95 < estimate / taken < 1.05, f"{estimate:,} estimated, {taken:,} taken"


@pytest.mark.parametrize(
    ("name", "mode", "every", "dtype"),
    [
        pytest.param("tiny", "full", 1, torch.float32, marks=pytest.mark.slow),
        ("tiny", "full", 2, torch.bfloat16),
        ("tiny", "selective", 1, torch.bfloat16),
        pytest.param("moe_tiny", "full", 1, torch.bfloat16, marks=pytest.mark.slow),
        ("moe_tiny", "selective", 1, torch.float32),
        ("gpt2", "selective", 1, torch.float32),
        pytest.param("gpt2", "full", 1, torch.bfloat16, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_activations_that_are_computed_again_take_what_the_plan_says_to_a_seventh(
    mode: str, every: int, name: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    sizes = {"layers": 6, "dim": 128, "heads": 4, "hidden_dim": 320, "vocab_size": 257, "max_sequence_length": 128}
    sizes |= {"expert_hidden_dim": 128} if name == "moe_tiny" else {}
    sizes |= {"kv_heads": 2} if name != "gpt2" else {"dim": 256, "hidden_dim": 640}
    config = compose([f"model={name}", "data.sequence_length=128", *(f"model.{k}={v}" for k, v in sizes.items())])
    family = family_of(models.get(config.model.family).load(), config.model, 257)
    model = type(family.build())(config.model, 257)
    checkpoint_blocks(model, family.parallel_plan(model), mode, every)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)  # those of the last blocks would be there at the peak
    taken = peak(model, torch.randint(0, 257, (8, 128)), dtype, tmp_path)
    share = Share(checkpoint=mode, every=every)
    estimate = FORMULAS[config.model.family](config.model, 257, 8, 128, dtype, dtype != torch.float32, share)
    # The gradient of a matrix too, in both types: the formula counts it with those of the model.
    estimate += max(each.numel() for each in model.parameters()) * (4 + dtype.itemsize % 4)
    assert 0.86 < estimate / taken < 1.14, f"{estimate:,} estimated, {taken:,} taken"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_activations_of_gpt2_take_what_the_plan_says(dtype: torch.dtype, tmp_path: Path) -> None:
    section = GPT2Section(name="small", dim=256, layers=2, heads=4, hidden_dim=1024, max_sequence_length=128)
    taken = peak(GPT2Model(section, 257), torch.randint(0, 257, (8, 128)), dtype, tmp_path)
    estimate = FORMULAS["gpt2"](section, 257, 8, 128, dtype, dtype != torch.float32)
    assert 0.95 < estimate / taken < 1.05, f"{estimate:,} estimated, {taken:,} taken"


def peak(
    model: nn.Module, tokens: torch.Tensor, dtype: torch.dtype, tmp_path: Path, positions: torch.Tensor | None = None
) -> int:
    """Bytes that a forward and backward hold at most, beside the parameters."""
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    gc.collect()  # what earlier tests left would be freed in between, and counted
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        with torch.autocast("cpu", dtype) if dtype != torch.float32 else nullcontext():
            loss = model(tokens, tokens, positions)
        loss.backward()
    profiled.export_chrome_trace(str(tmp_path / "trace.json"))
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    changes = sorted((each["ts"], each["args"]) for each in events if each["name"] == "[memory]")
    before = changes[0][1]["Total Allocated"] - changes[0][1]["Bytes"]
    return max(each["Total Allocated"] for _, each in changes) - before


class _Loss(nn.Module):
    """A head on hidden states that are parameters."""

    def __init__(self, tokens: int, *, is_whole: bool) -> None:
        super().__init__()
        self.hidden, self.is_whole = nn.Parameter(torch.empty(tokens, 8)), is_whole
        self.head = LanguageModelHead(8, 128256, tied=False)
        terms = HeadTerms(label_smoothing=0.1, z_loss=1e-4)
        self.head.loss = partial(linear_cross_entropy_sum, terms=terms)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor, _: object = None) -> torch.Tensor:
        del tokens
        hidden = self.hidden.unsqueeze(0)
        if not self.is_whole:
            return self.head(hidden, targets)
        return nn.functional.cross_entropy(self.head(hidden)[0], targets[0], reduction="sum", label_smoothing=0.1)


@pytest.mark.slow
def test_loss_of_a_vocabulary_of_128k_takes_at_most_two_fifths_of_that_of_whole_logits(tmp_path: Path) -> None:
    """Of 2,048 tokens: whole logits take 3 GiB."""
    targets = torch.randint(128256, (1, 2048), generator=torch.Generator().manual_seed(1))
    chunked, whole = (
        peak(_Loss(2048, is_whole=is_whole), targets, torch.float32, tmp_path) for is_whole in (False, True)
    )
    assert chunked < 0.4 * whole, f"{chunked / whole:.2f}: {chunked:,} of {whole:,}"


# failure ------------------------------------------------------------------------------------------------------------


def check(printed: str, run_dir: Path, rank: int, strategy: str, stage: str) -> None:
    """That one rank told what happened, and that the records have it."""
    assert printed.count("failed: ") == 1, printed
    lines = printed[printed.index("failed: ") :].splitlines()
    end = next((number for number, line in enumerate(lines) if number and not line.startswith("  ")), len(lines))
    lines = lines[:end]
    assert len(lines) <= 10
    assert lines[0].startswith(f"failed: rank {rank} on ")
    assert f"ran out of memory in {stage} of step 2: could not allocate 4096.00TiB" in lines[0]
    assert lines[1].split()[0] == "holds"
    assert all(what in lines[1] for what in ("parameters", "optimizer state", "activations"))
    assert any("trainer.micro_batch=1" in line for line in lines) == (stage != OPTIMIZER)
    assert any("parallel=fsdp" in line for line in lines) == (strategy != "fsdp")
    now = status(run_dir)
    assert (now["state"], now["exit_code"]) == ("failed", 70)
    assert now["reason"] == lines[0].removeprefix("failed: ")
    assert metrics(run_dir, "stop")[-1]["reason"] == now["reason"]


@pytest.mark.parametrize("stage", [FORWARD, OPTIMIZER, "evaluation"])
def test_out_of_memory_error_reports_where_it_happened(
    stage: str, text: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    argv = tiny_overrides(text, tmp_path / "run", "trainer.eval_every=2")
    assert train_out_of_memory(argv, stage) == 70
    printed = capfd.readouterr().err
    assert "Traceback" not in printed
    check(printed, tmp_path / "run", 0, "single", stage)


def test_first_error_is_printed_if_the_device_cannot_be_queried(
    text: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with patch(
        "serried.planner.out_of_memory._measure", side_effect=RuntimeError("CUDA error: unspecified launch failure")
    ):
        assert train_out_of_memory(tiny_overrides(text, tmp_path / "run"), FORWARD) == 70
    assert "DefaultCPUAllocator: can't allocate memory" in capfd.readouterr().err
    assert status(tmp_path / "run")["state"] == "failed"


@pytest.mark.slow
def test_the_rank_that_runs_out_of_memory_says_so_and_the_other_ends_with_it(text: Path, tmp_path: Path) -> None:
    argv = tiny_overrides(text, tmp_path / "run", "parallel=ddp")
    ended = typed_on(2, "-m", "tests.support.greedy", BACKWARD, *argv)
    assert all(each.returncode for each in ended)
    check("".join(each.stderr for each in ended), tmp_path / "run", 1, "ddp", BACKWARD)


_LIMITED = f"""
import resource, runpy, sys
resource.setrlimit(resource.RLIMIT_AS, ({_ADDRESS_SPACE_GIB * 2**30}, -1))
sys.argv = ["train.py", *sys.argv[1:]]
runpy.run_path("train.py", run_name="__main__")
"""


def limited(argv: list[str]) -> subprocess.CompletedProcess[str]:
    """``python train.py`` in a small address space."""
    return subprocess.run(
        [sys.executable, "-c", _LIMITED, *argv], cwd=ROOT, capture_output=True, text=True, timeout=240, check=False,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip


@pytest.mark.slow
def test_micro_batch_that_does_not_fit_is_reported_with_advice(text: Path, tmp_path: Path) -> None:
    batch = ["trainer.global_batch=65536", "trainer.steps=1"]
    ended = limited(tiny_overrides(text, tmp_path / "run", *batch, "trainer.micro_batch=65536"))
    assert ended.returncode == 70, ended.stderr
    assert "ran out of memory in forward of step 1" in ended.stderr
    assert f"this process may have (ulimit -v) {_ADDRESS_SPACE_GIB}.0GiB" in ended.stderr
    assert "  try        trainer.micro_batch=" in ended.stderr


def test_model_that_does_not_fit_is_reported_with_advice(text: Path, tmp_path: Path) -> None:
    sizes = ["model.dim=4096", "model.heads=32", "model.layers=4", "model.hidden_dim=16384"]
    ended = limited(tiny_overrides(text, tmp_path / "run", *sizes))
    assert ended.returncode == 70, ended.stderr
    assert ended.stderr.count("failed:") == 1
    assert f"ran out of memory in {SET_UP}" in ended.stderr
    assert "needs      parameters 3.5GiB" in ended.stderr
    assert "more ranks and parallel=fsdp" in ended.stderr
    assert "trainer.micro_batch" not in ended.stderr
    assert "checkpoint.mode" not in ended.stderr, "nothing is saved yet"
    assert status(tmp_path / "run")["state"] == "failed"


# advice -------------------------------------------------------------------------------------------------------------

_ON_GPU = _Usage(allocated=60 * 2**30, reserved_free=8 * 2**30, others=2**30, capacity=78 * 2**30, free_text="")


def advice(argv: list[str], ranks: int, stage: str = BACKWARD, asked: int = 2**30) -> list[str]:
    config = compose([*argv, "model.vocab_size=128256", "data.sequence_length=4096"])
    return _advice(Planned(config, CausalLM(config), ranks), stage, _ON_GPU, asked)


def test_advice_is_what_applies_and_what_keeps_the_numbers_comes_first() -> None:
    found = advice(["recipe=llama1b", "parallel=ddp", "precision=fp32", "trainer.micro_batch=8"], 8)
    names = [line.split()[0].split("=")[0] for line in found]
    assert set(names[:4]) == {"trainer.activation_checkpoint", "trainer.micro_batch", "parallel", "optim.offload"}
    assert set(names[4:]) == {"precision", "optim"}, "other rounding"
    found = advice(["recipe=llama1b", "parallel=fsdp", "parallel.reshard_after_forward=false"], 8)
    assert any(line.startswith("parallel.reshard_after_forward=true") for line in found)
    assert not any(line.startswith("parallel=fsdp") for line in found)
    found = advice(["recipe=llama8b", "parallel=fsdp", "trainer.micro_batch=1"], 8)
    assert any(line.startswith("trainer.activation_checkpoint=full") for line in found), "more than its recipe's"
    found = advice(["recipe=llama8b", "parallel=fsdp", "trainer.activation_checkpoint=none"], 8)
    assert any(line.startswith("parallel.tensor=2 ") for line in found), found
    assert not any(line.startswith("parallel.context") for line in found), "the axis that saves most"


def test_offloaded_parameters_come_first_only_if_nothing_else_is_enough() -> None:
    argv = ["recipe=llama8b", "parallel=fsdp", "trainer.activation_checkpoint=full", "trainer.micro_batch=1"]
    config = compose([*argv, "data.tokenizer=bytes", "model.vocab_size=128256"])
    planned = Planned(config, CausalLM(config), 2, "cuda")
    less = {each.override: planned.memory.total - each.saved for each in plan_advice(planned, BACKWARD, math.inf)}
    offloaded = less.pop("parallel.offload=true")
    assert offloaded < min(less.values())
    first = [plan_advice(planned, BACKWARD, usable)[0].override for usable in (min(less.values()), offloaded)]
    assert [override == "parallel.offload=true" for override in first] == [False, True]
    on_cpu = plan_advice(Planned(config, CausalLM(config), 2, "cpu"), BACKWARD, offloaded)
    assert "parallel.offload=true" not in [each.override for each in on_cpu]


def test_expandable_segments_are_advised_only_if_they_help_and_are_off(monkeypatch: pytest.MonkeyPatch) -> None:
    argv = ["recipe=llama1b", "parallel=fsdp"]
    assert not any("expandable" in line for line in advice(argv, 8)), "runs have them"
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:128")
    assert advice(argv, 8)[0].startswith("PYTORCH_ALLOC_CONF=expandable_segments:True ")
    assert not any("expandable" in line for line in advice(argv, 8, asked=20 * 2**30))


def test_run_on_nvidia_gpus_has_expandable_segments_unless_the_user_configures_the_allocator(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(process, "_NVIDIA_GPUS", tmp_path)
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:128")
    process.expand_gpu_segments(LaunchSection())
    assert "PYTORCH_ALLOC_CONF" not in os.environ
    monkeypatch.delenv("PYTORCH_CUDA_ALLOC_CONF")
    process.expand_gpu_segments(LaunchSection(device="cpu"))
    assert "PYTORCH_ALLOC_CONF" not in os.environ
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "")  # so that it is as before after the test
    process.expand_gpu_segments(LaunchSection())
    assert os.environ["PYTORCH_ALLOC_CONF"] == "expandable_segments:True"
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "")
    monkeypatch.setattr(process, "_NVIDIA_GPUS", tmp_path / "none")
    process.expand_gpu_segments(LaunchSection())
    assert os.environ["PYTORCH_ALLOC_CONF"] == ""


def test_the_largest_micro_batch_that_fits_is_advised() -> None:
    argv = ["recipe=llama1b", "parallel=fsdp", "trainer.global_batch=512"]
    found = advice([*argv, "trainer.micro_batch=64"], 8)
    (chosen,) = (int(line.split()[0].partition("=")[2]) for line in found if line.startswith("trainer.micro_batch"))
    for size, fits in ((chosen, True), (2 * chosen, False)):
        config = compose([*argv, "model.vocab_size=128256", "data.sequence_length=4096", f"trainer.micro_batch={size}"])
        assert (Planned(config, CausalLM(config), 8).memory.total < 0.9 * _ON_GPU.capacity) == fits


def test_errors_that_count_as_out_of_memory() -> None:
    with pytest.raises(RuntimeError) as allocator:
        torch.empty(ABSURD)
    gpu = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has a total capacity of ...")
    wrapped = RuntimeError("sample 5 cannot be read")
    wrapped.__cause__ = MemoryError()
    nccl = (
        "NCCL error in: NCCLUtils.cpp:125, unhandled cuda error (run with NCCL_DEBUG=INFO for details), NCCL version "
        "2.28.9\nncclUnhandledCudaError: Call to CUDA function failed.\nLast error:\nCuda failure 2 'out of memory'"
    )
    beside = [RuntimeError(text) for text in ("CUDA error: out of memory", "CUDA driver error: out of memory", nccl)]
    for error in (allocator.value, gpu, MemoryError(), wrapped, *beside):
        assert is_out_of_memory(error)
    assert not is_out_of_memory(RuntimeError("Connection closed by peer"))
    no_thread, limit = RuntimeError("Resource temporarily unavailable"), resource.getrlimit(resource.RLIMIT_AS)
    assert not is_out_of_memory(no_thread), "there may be too many threads"
    resource.setrlimit(resource.RLIMIT_AS, (2**46, limit[1]))
    try:
        assert is_out_of_memory(no_thread)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limit)
    assert _asked_bytes(gpu) == 2.5 * 2**30
    assert _asked_bytes(allocator.value) == 4 * ABSURD
