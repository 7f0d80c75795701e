"""A run folder and prepared data kept from serried 0.1.0 work with every command of this version.

``tests/support/run_0_1_0`` was written by commit c93af24 in 8 steps, with checkpoints of steps 4 and 8, by the command
``RUN`` on one thread. Do not make it again with a later version.
"""

import re
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from serried import program
from serried.cli import main
from serried.configs.compose import compose_saved
from testing.runs import different_tensors, losses, metrics, status, tree

KEPT = Path(__file__).parents[1] / "support" / "run_0_1_0"
RUN = [
    "recipe=tiny", "data=text", "data.path=words.txt", "data.sequence_length=32", "data.cache_dir=cache",
    "model.dim=16", "model.layers=2", "model.heads=2", "model.hidden_dim=32", "trainer.steps=8",
    "trainer.global_batch=8", "trainer.micro_batch=4", "checkpoint.every=4", "checkpoint.keep=2",
    "trainer.eval_every=4", "trainer.log_every=1", "trainer.sample_tokens=0", "trainer.deterministic=true",
    "launch.device=cpu", "run.name=kept",
    "trainer.early_stopping_patience=3", "data.workers=1",
]  # fmt: skip
"""The command of the run; the last two keys were ``trainer.patience=3 trainer.workers=1``."""
STEP_4, STEP_8 = "checkpoints/step-00000004", "checkpoints/step-00000008"


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    shutil.copytree(KEPT, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    return tmp_path / "runs/kept"


def test_config_of_0_1_0_is_read_with_its_keys(run: Path) -> None:
    saved = compose_saved(run / "config.yaml", [], ())
    assert saved.trainer.early_stopping_patience == 3
    assert saved.data.workers == 1


def computes_as_then() -> bool:
    """Whether this machine computes the bits of the machine on which the run was made."""
    processors = re.findall(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())
    return torch.__version__.startswith("2.13.0") and processors[:1] == ["Intel(R) Xeon(R) Processor"]


def test_run_of_0_1_0_resumes_and_ends_as_it_did(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.rmtree(run / STEP_8)
    prepared = tree(run.parents[1] / "cache")
    assert program.main(RUN) == 0, capsys.readouterr().err
    printed = capsys.readouterr().out
    assert "step 5/8" in printed
    assert "step 4/8" not in printed
    assert {**prepared, **tree(run.parents[1] / "cache")} == tree(run.parents[1] / "cache")
    assert len([*Path("cache").glob("*/summary.json")]) == 1  # not prepared again
    kept = KEPT / "runs/kept"
    assert [start["resumed_from"] is None for start in metrics(run, "start")] == [True, False]
    assert len({start["tracker_run_id"] for start in metrics(run, "start")}) == 1
    assert losses(run) == pytest.approx(losses(kept), rel=1e-6)
    for stem in ("model", "optimizer"):
        now, then = (load_file(folder / STEP_8 / f"{stem}.safetensors") for folder in (run, kept))
        torch.testing.assert_close(now, then, rtol=1e-4, atol=1e-6)
    if computes_as_then():
        assert losses(run) == losses(kept)
        assert different_tensors(run, kept) == []


def test_finished_run_of_0_1_0_is_not_trained_again(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = tree(run / "checkpoints")
    assert program.main(RUN) == 0
    assert "step 1/8" not in capsys.readouterr().out
    assert tree(run / "checkpoints") == before
    assert status(run)["state"] == "finished"


@pytest.mark.parametrize(
    ("command", "printed"),
    [
        (["status", "runs/kept"], "finished"),
        (["report", "runs/kept"], "report.html"),
        (["evaluate", "run.dir=runs/kept", "launch.device=cpu"], "loss"),
        (["generate", "run.dir=runs/kept", "prompt=the ", "tokens=3", "launch.device=cpu"], "the "),
        (["export", "runs/kept", "out=exported", "checkpoint=4"], "step-00000004"),
        (["merge", "runs/kept", "checkpoint=4,8", "out=merged"], "merged"),
        (["plan", "runs/kept", "plan.mode=formula"], "memory"),
        pytest.param(["plan", "compare", "runs/kept"], "memory", marks=pytest.mark.slow),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_commands_read_a_run_of_0_1_0(
    command: list[str], printed: str, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = tree(run / "checkpoints")
    assert main(command) == 0, capsys.readouterr().err
    assert printed in capsys.readouterr().out
    assert tree(run / "checkpoints") == before
