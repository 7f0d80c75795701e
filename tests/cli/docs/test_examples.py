"""The examples, as they are typed: one curve on every layout, accuracy, a kill, and a checkpoint for transformers."""

import os
import shutil
import signal
import subprocess
import sys
import time
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

import serried
from testing import forked_runs as forks
from testing.rank_pool import ROOT, Cluster
from testing.runs import checkpoint, different_tensors, losses, metrics, steps_saved, weights

EXAMPLES = ROOT / "examples"


def fit(example: str, argv: list[str]) -> dict[str, Any]:
    """``serried.fit`` with the task of an example, on this rank."""
    module, _, task = example.partition(":")
    result = serried.fit(getattr(import_module(f"examples.{module}"), task), argv)
    return {"state": result.state, "metrics": result.metrics}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A user's project, whose own files have the names of ours."""
    for example in EXAMPLES.glob("*.py"):
        shutil.copy(example, tmp_path)
    (tmp_path / "configs").mkdir()
    for name in ("configs/__init__", "trainer", "parallel", "recipes", "records", "runtime", "launch"):
        (tmp_path / f"{name}.py").write_text("raise ImportError('this file is the user\\'s own')\n")
    return tmp_path


@pytest.mark.parametrize(("name", "most_lines"), [("digits", 60), ("hf_gpt2", 40)])
def test_examples_stay_short(name: str, most_lines: int) -> None:
    assert len((EXAMPLES / f"{name}.py").read_text().splitlines()) <= most_lines


def test_digits_have_one_curve_sharded_too(cluster: Cluster, tmp_path: Path) -> None:
    short = ["task.dim=32", "task.layers=1", "trainer.log_every=1", "trainer.stop_at=5", "trainer.eval_every=5"]
    for ranks, layout in ((1, "single"), (2, "fsdp")):
        argv = [f"run.dir={tmp_path / layout}", f"parallel={layout}", *short]
        answer, *_ = cluster.run(ranks, "tests.cli.docs.test_examples:fit", example="digits:Digits", argv=argv)
        assert losses(tmp_path / layout) == pytest.approx(losses(tmp_path / "single"), rel=1e-5)
        (evaluated,) = metrics(tmp_path / layout, "eval")
        assert answer.value["metrics"] == {"accuracy": evaluated["accuracy"]}
        assert f"accuracy {evaluated['accuracy']:.4g}" in answer.printed
        assert "accuracy" in (tmp_path / layout / "report.html").read_text()
    assert len(losses(tmp_path / "single")) == 5


@pytest.mark.slow
def test_digits_resume_bitwise_after_a_kill_beside_files_named_as_ours(folder: Path) -> None:
    few = ["task.dim=32", "task.layers=1", "trainer.steps=60", "checkpoint.every=5", "trainer.log_every=1"]
    process = subprocess.Popen(
        [sys.executable, "digits.py", "run.dir=killed", *few], cwd=folder, stdout=subprocess.DEVNULL,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    deadline = time.monotonic() + 120
    while not steps_saved(folder / "killed") and time.monotonic() < deadline:
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    assert 0 < len(metrics(folder / "killed")) < 60
    assert "resuming from" in forks.typed("digits.py", "run.dir=killed", *few, cwd=folder).stdout
    assert forks.typed("digits.py", "run.dir=whole", *few, cwd=folder).returncode == 0
    assert not different_tensors(folder / "killed", folder / "whole")


@pytest.mark.slow
def test_gpt2_of_transformers_has_one_curve_and_its_checkpoint_opens_there(cluster: Cluster, tmp_path: Path) -> None:
    few = ["trainer.steps=4", "trainer.log_every=1", "trainer.eval_every=0"]
    for ranks, layout in ((1, "single"), (3, "fsdp")):
        run_dir = tmp_path / f"{layout}{ranks}"
        argv = [f"run.dir={run_dir}", f"parallel={layout}", *few]
        cluster.run(ranks, "tests.cli.docs.test_examples:fit", example="hf_gpt2:GPT2", argv=argv)
        assert losses(run_dir) == pytest.approx(losses(tmp_path / "single1"), rel=1e-5)
        assert_opens_in_transformers(run_dir)


def assert_opens_in_transformers(run_dir: Path) -> None:
    """Equal logits, and tied parameters counted and saved once."""
    from transformers import GPT2LMHeadModel

    from examples.hf_gpt2 import CONFIG, GPT2

    result = serried.load_model(run_dir, task=GPT2)
    opened = GPT2LMHeadModel.from_pretrained(checkpoint(run_dir))
    tokens = torch.arange(24).view(2, 12)
    with torch.no_grad():
        assert opened.eval()(tokens).logits.equal(result(tokens).logits)
    count = sum(parameter.numel() for parameter in GPT2LMHeadModel(CONFIG).parameters())
    assert metrics(run_dir, "start")[0]["parameters"] == count
    assert sum(tensor.numel() for tensor in weights(run_dir).values()) == count


@pytest.mark.slow
def test_digits_as_typed_reach_97_percent_and_have_the_same_curve_sharded(folder: Path) -> None:
    printed = forks.typed("digits.py", "run.dir=single", "trainer.log_every=1", cwd=folder).stdout
    accuracy = metrics(folder / "single", "eval")[-1]["accuracy"]
    assert accuracy > 0.97
    assert f"accuracy {accuracy:.4g}" in printed
    short = ["run.dir=fsdp", "parallel=fsdp", "trainer.log_every=1", "trainer.stop_at=30"]
    main_rank, _ = forks.typed_on(2, "digits.py", *short, cwd=folder)
    assert "stopped    30 steps" in main_rank.stdout, main_rank.stdout[-2000:] + main_rank.stderr[-4000:]
    assert losses(folder / "fsdp") == pytest.approx(losses(folder / "single")[:30], rel=1e-5)
