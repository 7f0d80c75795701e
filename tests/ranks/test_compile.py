"""trainer.compile: a step has the bits of one that is not compiled, with the compiler's graphs run as they are."""

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import clear_compilation_metrics, get_compilation_metrics
from torch._inductor import config as inductor
from torch._inductor.runtime import cache_dir_utils

from serried.configs import requirements
from serried.configs.compose import compose
from serried.configs.errors import EXIT_STOPPED, UserError
from serried.parallel.activation_checkpoint import checkpoint_blocks
from serried.parallel.compile import check_blocks, compile_blocks
from serried.parallel.layout.mesh import resolve_layout
from serried.parallel.lora import Adapter, attach
from serried.parallel.nf4 import quantize
from serried.parallel.plan import ParallelPlan
from serried.recipes.models.layers.attention import has_flex
from serried.recipes.text.causal_lm import CausalLM
from serried.records.status import Status, read_status
from serried.runtime.console import Console
from serried.trainer import compilation
from serried.trainer.compilation import Compilation, check_compiler, explained, is_of_a_network
from serried.trainer.model import with_compile
from testing.rank_pool import Cluster
from testing.runs import losses, run_here, tiny_overrides
from tests.ranks.test_activations import EXPERTS, MODEL, step

LAYOUTS: dict[str, tuple[int, list[str], list[str]]] = {
    "single": (1, ["parallel=single"], ["full"]),
    "ddp": (2, ["parallel=ddp"], ["none"]),
    "fsdp": (2, ["parallel=fsdp"], ["selective"]),
    "tensor": (2, ["parallel=fsdp", "parallel.tensor=2"], ["none"]),
    "context": (2, ["parallel=fsdp", "parallel.context=2"], ["none"]),
    "1f1b": (2, ["parallel=fsdp", "parallel.pipeline=2"], ["none"]),
    "expert": (2, ["parallel=fsdp", "parallel.expert=2"], ["none"]),
}
OF_THE_LOSS = ("measure", "derive")
"""Graphs on the rank that has the head."""


@pytest.fixture(autouse=True)
def _without_code(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """Graphs are made and run, but no program is generated, which takes half a minute."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "compiled"))
    torch._dynamo.reset()
    with torch.compiler.set_stance("default", force_backend="aot_eager"):
        yield
    torch._dynamo.reset()


def differing(argv: list[str], modes: list[str]) -> dict[str, Any]:
    """What of a compiled step has other bits, and the number of graphs of blocks, by what these keep."""
    expected, found = step(argv, "none"), {}
    for mode in modes:
        torch._dynamo.reset()
        clear_compilation_metrics()
        with torch.compiler.set_stance("default", force_backend="aot_eager"):
            ours = step(argv, mode, compiled=True)
        graphs = [each for each in get_compilation_metrics() if each.co_name not in (None, *OF_THE_LOSS)]
        other = [name for name, tensor in expected.items() if not tensor.equal(ours[name])]
        found[mode] = [other, len(graphs)]
    torch._dynamo.reset()
    return found


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.slow] * (name != "single")) for name in LAYOUTS],
)
def test_a_compiled_step_has_the_same_bits_and_one_graph_for_all_blocks(name: str, cluster: Cluster) -> None:
    ranks, how, modes = LAYOUTS[name]
    model, graphs = (
        (EXPERTS, 4) if name == "expert" else (MODEL, 1)
    )  # a dense block; parts around experts and their dropout
    answers = cluster.run(ranks, "tests.ranks.test_compile:differing", argv=[*how, *model], modes=modes)
    assert [answer.value for answer in answers] == [{mode: [[], graphs] for mode in modes}] * ranks


class InPlace(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        h.relu_()
        h = self.second(h).mul_(2.0)
        h.sigmoid_()
        return h + x


def adapted() -> nn.Module:
    """A block in 4 bits with an adapter that drops inputs."""
    block = nn.Sequential(nn.Linear(64, 64), nn.Tanh()).requires_grad_(False)
    attach(block[0], 4, Adapter(scale=2.0, dropout=0.2, is_conv1d=False), is_dora=False, shared=None)
    quantize(block[0])
    for parameter in block.parameters():
        if parameter.requires_grad:
            nn.init.normal_(parameter)
    return block


@pytest.mark.parametrize("make", [InPlace, adapted])
def test_own_blocks_have_the_same_bits_with_selective_checkpointing_too(
    make: Callable[[], nn.Module], capfd: pytest.CaptureFixture[str]
) -> None:
    found, plan = [], ParallelPlan(blocks=("0", "1"))
    for compiles in (False, True):
        torch.manual_seed(1)
        model, x = nn.Sequential(make(), make()), torch.randn(4, 64, requires_grad=True)
        checkpoint_blocks(model, plan, "selective" if compiles else "none")
        if compiles:
            compile_blocks(model, plan)
        torch.manual_seed(2)
        model(x).square().sum().backward()
        found.append([x.grad, *(each.grad for each in model.parameters() if each.requires_grad)])
    assert all(ours.equal(theirs) for ours, theirs in zip(*found, strict=True))
    assert not capfd.readouterr().err


@pytest.mark.slow
def test_resumed_run_may_switch_to_compiled_blocks(text: Path, tmp_path: Path) -> None:
    more = ["model.layers=2", "trainer.eval_every=2", "trainer.sample_tokens=6"]
    plain = run_here(tiny_overrides(text, tmp_path / "plain", *more))
    run_here(tiny_overrides(text, tmp_path / "run", *more, "trainer.stop_at=2"))
    resumed = run_here(tiny_overrides(text, tmp_path / "run", *more, "trainer.compile=true"))
    assert plain.code == resumed.code == 0, resumed.printed
    assert losses(tmp_path / "run") == losses(tmp_path / "plain")
    assert "changed since the checkpoint: trainer.compile false -> true" in resumed.printed
    assert "compiling  2 blocks in the first step" in resumed.printed
    assert re.search(r"^compiled   2 blocks in [\d.]+ s: 3 graphs$", resumed.printed, re.MULTILINE), resumed.printed
    assert "WARNING" not in resumed.printed
    assert "precision  fp32; blocks compiled" in resumed.printed


@pytest.mark.parametrize("chosen", ["/tmp/mine", None])
def test_compiled_code_is_cached_in_the_given_or_default_folder(
    chosen: str | None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", chosen or cache_dir_utils.default_cache_dir())
    Compilation(Console(True, 0)).announce()
    assert f"cached in {chosen or tmp_path / 'serried' / 'compiled' / torch.__version__}" in capsys.readouterr().out


@pytest.mark.parametrize("why", ["several nodes", "a home on a network"])
def test_compiled_code_is_cached_on_a_local_disk_instead_of_a_network_disk(
    why: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    home, temporary = tmp_path / "home of all", tmp_path / "tmp"
    temporary.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    monkeypatch.setenv("XDG_CACHE_HOME", str(home))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", cache_dir_utils.default_cache_dir())
    mounts = tmp_path / "mountinfo"
    kind = "nfs4" if why == "a home on a network" else "ext4"
    shared = str(home).replace(" ", r"\040")
    mounts.write_text(
        f"22 1 8:1 / / rw - ext4 /dev/sda1 rw\n30 22 0:40 / {shared} rw,relatime shared:9 - {kind} server:/home rw\n"
    )
    monkeypatch.setattr(compilation, "_MOUNTS", mounts)
    assert is_of_a_network(home / "a") == (kind == "nfs4")
    assert not is_of_a_network(temporary)
    Compilation(Console(True, 0), is_on_one_node=why != "several nodes").announce()
    own = temporary / f"serried-{os.geteuid()}"
    assert f"cached in {own / 'compiled' / torch.__version__}" in capsys.readouterr().out
    assert own.stat().st_mode & 0o777 == 0o700
    own.chmod(0o777)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", cache_dir_utils.default_cache_dir())
    with pytest.raises(
        UserError, match=r"is not a folder that only this user can access .*; remove it, or use TORCHINDUCTOR_"
    ):
        Compilation(Console(True, 0), is_on_one_node=why != "several nodes")


def test_ranks_of_a_node_share_its_cores_to_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCHINDUCTOR_COMPILE_THREADS", raising=False)
    monkeypatch.setattr(inductor, "compile_threads", 32)
    monkeypatch.setattr(compilation, "usable_cores", lambda: 64)
    Compilation(Console(True, 0))
    assert inductor.compile_threads == 32, "torch's own rule"
    Compilation(Console(True, 0), 8)
    assert inductor.compile_threads == 4
    Compilation(Console(True, 0), 64)
    assert inductor.compile_threads == 1
    monkeypatch.setenv("TORCHINDUCTOR_COMPILE_THREADS", "7")
    Compilation(Console(True, 0), 8)
    assert inductor.compile_threads == 1, "the user's choice is not ours to change"


def test_new_shape_is_recompiled_with_a_warning(capsys: pytest.CaptureFixture[str]) -> None:
    model = nn.Sequential(nn.Sequential(nn.Linear(4, 4), nn.ReLU()), nn.Sequential(nn.Linear(4, 4), nn.ReLU()))
    compilation = Compilation(Console(True, 0))
    compilation.blocks = compile_blocks(model, ParallelPlan(blocks=("0", "1")))
    for number, rows in enumerate((8, 8, 6), start=1):
        model(torch.randn(rows, 4, requires_grad=True)).sum().backward()
        with torch.no_grad():
            model(torch.randn(rows + 7, 4))
        compilation.report(number)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2, lines
    assert lines[0].startswith("compiled   2 blocks in")
    assert lines[1].startswith("WARNING    step 3 recompiled a block, recompilation 1 (")
    assert "size mismatch at index 0. expected 8, actual 6" in lines[1]


def test_compilation_in_an_evaluation_is_not_reported(capsys: pytest.CaptureFixture[str]) -> None:
    compilation, compiled = Compilation(Console(True, 0)), torch.compile(torch.relu, dynamic=False)
    compiled(torch.ones(3))
    compilation.report(1)
    with compilation.unreported():
        compiled(torch.ones(4))
    compilation.report(2)
    compiled(torch.ones(5))
    compilation.report(3)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["compiled", "WARNING"]
    assert "step 3 recompiled a block, recompilation 1" in lines[1]


@pytest.mark.parametrize(
    ("more", "told"),
    [
        ("trainer.activation_checkpoint=offload", "use trainer.activation_checkpoint=selective, or"),
        (
            "launch.processes=2 parallel=fsdp parallel.pipeline=2 parallel.pipeline_schedule=zbv trainer.micro_batch=1",
            "trainer.compile=true with parallel.pipeline_schedule=zbv: the schedule runs the backward of a block",
        ),
        (
            "launch.processes=2 parallel=fsdp parallel.context=2 parallel.context_method=ring "
            "trainer.activation_checkpoint=full",
            "use parallel.context_method=gather, trainer.activation_checkpoint=none, or trainer.compile=false",
        ),
        ("model=moe_tiny trainer.activation_checkpoint=selective", "and a mixture of experts: recomputation needs"),
    ],
)
def test_settings_that_cannot_be_compiled_are_refused_in_one_line(
    more: str, told: str, text: Path, tmp_path: Path
) -> None:
    argv = tiny_overrides(text, tmp_path / "run", "trainer.compile=true", "model.layers=4", "dry_run=true")
    assert told in run_here([*argv, *more.split()]).error


def test_model_without_blocks_is_refused_in_one_line() -> None:
    with pytest.raises(UserError, match=r"trainer\.compile=true: the model has no repeated blocks to compile"):
        check_blocks(nn.Linear(2, 2), ParallelPlan())


def test_blocks_with_buffers_are_not_both_compiled_and_recomputed() -> None:
    model = nn.Sequential(nn.BatchNorm1d(4))
    with pytest.raises(UserError, match=r"blocks with buffers \(0\.running_mean\): recomputation"):
        check_blocks(model, ParallelPlan(blocks=("0",)), ("trainer.activation_checkpoint=full", "none"))


def test_missing_compiler_is_refused_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(UserError, match=r"needs a C\+\+ compiler, but no-such-compiler was not found; install one"):
        check_compiler(torch.device("cpu"))


def test_a_gpu_needs_a_c_compiler_of_any_name_and_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr(requirements, "find_spec", lambda _: None)
    monkeypatch.setattr(shutil, "which", lambda name: name if name == "clang" else None)
    with pytest.raises(UserError, match=r"needs Triton on a GPU; pip install triton, or use trainer\.compile=false"):
        check_compiler(torch.device("cuda"))
    monkeypatch.setattr(shutil, "which", lambda _: None)
    with pytest.raises(UserError, match=r"needs a C compiler, but gcc was not found; install one, .* \(CC=gcc"):
        check_compiler(torch.device("cuda"))
    assert not has_flex(torch.device("cuda", 0))  # whose kernels Triton makes too


def test_failing_compiler_is_reported_in_one_line() -> None:
    def backend(*_: Any) -> Any:
        raise RuntimeError("ld: cannot find -lgomp")

    compiled = torch._dynamo.optimize(backend)(torch.sin)
    with torch.compiler.set_stance("default"), pytest.raises(Exception, match="lgomp") as caught:
        compiled(torch.ones(2))
    told = str(explained(caught.value, None))
    assert told.startswith("torch could not compile a block (BackendCompilerFailed: ")
    assert "use trainer.compile=false" in told
    assert explained(ValueError("x"), None).args == ("x",)


@pytest.mark.slow  # generates a program
def test_signal_that_also_ends_the_compiler_stops_the_run(text: Path, tmp_path: Path) -> None:
    compiler = tmp_path / "compiler"
    compiler.write_text('#!/bin/sh\ncase "$*" in *.cpp*) kill -TERM $PPID $$;; esac\nexec g++ "$@"\n')
    compiler.chmod(0o755)
    argv = tiny_overrides(text, tmp_path / "run", "trainer.compile=true")
    more = {"CXX": str(compiler), "TORCHINDUCTOR_COMPILE_THREADS": "1"}  # in this process, its parent
    command = [sys.executable, "train.py", *argv]  # torch reads CXX when it is imported
    ended = subprocess.run(command, env=os.environ | more, capture_output=True, text=True, timeout=300, check=False)
    assert ended.returncode == EXIT_STOPPED, ended.stdout + ended.stderr
    assert "stopped: SIGTERM before the first step; run the same command to resume" in ended.stderr
    assert read_status(tmp_path / "run") == Status("stopped", 0, "SIGTERM before the first step", EXIT_STOPPED)


def automatic(*more: str, device: str, ranks: int = 1) -> tuple[bool, str]:
    """Whether ``trainer.compile=auto`` compiles, and the reason if it does not on a GPU."""
    tiny = ["trainer.compile=auto", "data.tokenizer=bytes", "model.layers=4"]
    config = compose([*tiny, *more])
    config, why_not = with_compile(config, CausalLM(config), resolve_layout(config.parallel, ranks), device)
    assert config.trainer.compile in (True, False)
    return config.trainer.compiles, why_not


@pytest.mark.parametrize(
    ("more", "why_not"),
    [
        ([], None),
        (["parallel=fsdp", "parallel.pipeline=2", "parallel.pipeline_schedule=zbv"], "parallel.pipeline_schedule=zbv"),
        (["trainer.activation_checkpoint=offload"], "trainer.activation_checkpoint=offload"),
        (["model=moe_tiny", "trainer.activation_checkpoint=full"], "trainer.activation_checkpoint=full and a mixture"),
    ],
)
def test_automatic_compilation_is_for_gpus_where_blocks_can_be_compiled(more: list[str], why_not: str | None) -> None:
    assert automatic(*more, device="cpu", ranks=2) == (False, "")
    compiles, reason = automatic(*more, device="cuda", ranks=2)
    assert compiles == (why_not is None)
    assert reason.startswith(why_not or "")
    assert bool(reason) == bool(why_not)


@pytest.mark.parametrize("recipe", ["llama1b", "llama3b", "llama8b", "llama70b", "llama8b_131k", "llama405b"])
def test_recipes_compile_on_gpus_if_it_was_measured(recipe: str) -> None:
    assert compose([f"recipe={recipe}"]).trainer.compile == ("auto" if recipe[5:] in ("1b", "3b", "8b") else False)


def test_automatic_compilation_on_a_cpu_is_off_and_resumes_silently(text: Path, tmp_path: Path) -> None:
    argv = tiny_overrides(text, tmp_path / "run", "model.layers=2")
    run_here([*argv, "trainer.stop_at=2"])
    resumed = run_here([*argv, "trainer.compile=auto"])
    assert resumed.code == 0, resumed.printed
    assert "changed since the checkpoint" not in resumed.printed
    assert "compile: false" in (tmp_path / "run" / "config.yaml").read_text()
    run_here(tiny_overrides(text, tmp_path / "plain", "model.layers=2"))
    assert losses(tmp_path / "run") == losses(tmp_path / "plain")


@pytest.mark.slow
def test_run_that_compiles_automatically_says_so_when_it_resumes_one_that_did_not(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A CPU that is taken for a GPU in this decision alone."""
    argv = tiny_overrides(text, tmp_path / "run", "model.layers=2")
    run_here([*argv, "trainer.stop_at=2"])
    chosen = with_compile
    monkeypatch.setattr(
        "serried.trainer.run.with_compile", lambda config, task, layout, _: chosen(config, task, layout, "cuda")
    )
    resumed = run_here([*argv, "trainer.compile=auto"])
    assert resumed.code == 0, resumed.printed
    assert "changed since the checkpoint: trainer.compile false -> true" in resumed.printed
    assert "compiling  2 blocks in the first step" in resumed.printed


def test_mode_of_compilation_reaches_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    given = []
    monkeypatch.setattr(torch, "compile", lambda function, **options: given.append(options) or function)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    compile_blocks(model, ParallelPlan(blocks=("0", "1")), "max-autotune")
    assert given == [{"dynamic": False, "mode": "max-autotune"}] * 2
    with pytest.raises(
        UserError, match=r"trainer\.compile_mode=max-autotune has no effect with trainer\.compile=false"
    ):
        compose(["trainer.compile_mode=max-autotune"])
    assert compose(["trainer.compile=true", "trainer.compile_mode=max-autotune"]).trainer.compile_mode == "max-autotune"
