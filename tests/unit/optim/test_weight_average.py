"""``trainer.ema_decay``: an average of the weights is evaluated and saved, on every layout."""

import json
import math
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.utils._python_dispatch import TorchDispatchMode

from serried.cli import main as serried
from serried.program import main
from serried.trainer.optim.weight_average import WeightAverage
from testing.rank_pool import Cluster
from testing.runs import different_tensors, losses, metrics, overrides, run_here, tiny_overrides, weights
from tests.cli.test_evaluate import evaluated

AVERAGED = "trainer.ema_decay=0.5"


def model_of(run_dir: Path, step: int) -> dict[str, torch.Tensor]:
    files = (run_dir / "checkpoints" / f"step-{step:08d}").glob("model*.safetensors")
    return {name: tensor for file in files for name, tensor in load_file(file).items()}


@pytest.fixture(scope="module")
def runs(text: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The same run without and with an average, with a checkpoint of each of six steps."""
    folder = tmp_path_factory.mktemp("averaged")
    how = ("checkpoint.every=1", "checkpoint.keep=9", "trainer.eval_every=6", "trainer.eval_batches=1")
    for name, *more in (("plain",), ("averaged", AVERAGED)):
        ended = run_here(tiny_overrides(text, folder / name, "parallel=single", *how, *more))
        assert ended.code == 0, ended.printed
    return folder / "plain", folder / "averaged"


def test_average_follows_the_weights_without_changing_training(runs: tuple[Path, Path]) -> None:
    plain, averaged = runs
    assert losses(plain) == losses(averaged)
    trained = weights(averaged, "optimizer")
    assert all(value.equal(trained[f"{name}.trained"]) for name, value in weights(plain).items())
    for step in range(2, 7):
        kept = min(0.5, (1 + step) / (10 + step))
        before, now, target = model_of(averaged, step - 1), model_of(averaged, step), model_of(plain, step)
        for name, value in now.items():
            torch.testing.assert_close(value, kept * before[name] + (1 - kept) * target[name])
    assert not model_of(averaged, 6)["lm_head.weight"].equal(model_of(plain, 6)["lm_head.weight"])


class Conversions(TorchDispatchMode):
    """Counts copies to another type or device."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += operation is torch.ops.aten._to_copy.default
        return operation(*args, **(kwargs or {}))


def test_an_update_converts_its_factor_once_for_all_parameters() -> None:
    """On a GPU, with averages in host memory, each conversion would wait for the device."""
    held: list[Any] = [SimpleNamespace(tensor=torch.nn.Parameter(torch.zeros(2))) for _ in range(5)]
    average = WeightAverage(0.5, held, torch.device("cpu"))
    for each in held:
        each.tensor.data.fill_(1)
    with Conversions() as conversions:
        average.update(torch.ones((), dtype=torch.float64))
    assert conversions.count == 1
    assert all(torch.allclose(each, torch.full((2,), 1 - 2 / 11)) for each in average.of.values())


def test_evaluation_uses_the_average(runs: tuple[Path, Path], cluster: Cluster) -> None:
    plain, averaged = runs
    (theirs,), (ours,) = metrics(plain, "eval"), metrics(averaged, "eval")
    assert abs(ours["loss"] - theirs["loss"]) > 1e-5
    (found,) = evaluated(cluster, 1, f"run.dir={averaged}")
    assert math.isclose(found["loss"], ours["loss"], rel_tol=1e-6)


@pytest.mark.slow
def test_the_average_is_the_same_on_other_layouts_and_after_a_resume(
    cluster: Cluster, text: Path, tmp_path: Path
) -> None:
    def train(name: str, ranks: int, *more: str) -> None:
        argv = overrides(
            text, tmp_path / name, AVERAGED, "model.tie_embeddings=true", "trainer.steps=4",
            "trainer.micro_batch=9", "trainer.deterministic=true", "trainer.eval_every=2", "trainer.eval_batches=1",
            *more,
        )  # fmt: skip
        cluster.run(ranks, "testing.runs:train_small", argv=argv)

    train("single", 1, "parallel=single")
    train("straight", 2, "parallel=fsdp")
    train("again", 2, "parallel=fsdp", "trainer.stop_at=2")
    shutil.copytree(tmp_path / "again", tmp_path / "elsewhere")
    train("again", 2, "parallel=fsdp")
    train("elsewhere", 2, "parallel=fsdp", "parallel.pipeline=2")
    assert not different_tensors(tmp_path / "again", tmp_path / "straight")
    expected = weights(tmp_path / "single")
    for name in ("straight", "elsewhere"):
        for key, value in weights(tmp_path / name).items():
            torch.testing.assert_close(value, expected[key], rtol=1e-4, atol=1e-6)
        assert losses(tmp_path / name, "eval") == pytest.approx(losses(tmp_path / "single", "eval"), rel=1e-5)


@pytest.mark.slow
def test_a_stage_without_trained_weights_resumes(cluster: Cluster, text: Path, tmp_path: Path) -> None:
    groups = {"embedding": "*embed*", "first": "*layers.0.*"}
    frozen = [f"optim.groups.{name}.frozen=true" for name in groups]
    frozen += [f"optim.groups.{name}.parameters={pattern}" for name, pattern in groups.items()]
    for stop in (2, 4):
        argv = overrides(
            text, tmp_path, AVERAGED, "parallel=fsdp", "parallel.pipeline=2", "parallel.layers_of_stages=[1,2]",
            *frozen, "trainer.steps=4", "trainer.micro_batch=9", f"trainer.stop_at={stop}",
        )  # fmt: skip
        cluster.run(2, "testing.runs:train_small", argv=argv)
    assert [line["step"] for line in metrics(tmp_path)] == [1, 2, 3, 4]


def test_rejected_step_does_not_change_the_average(cluster: Cluster, text: Path, tmp_path: Path) -> None:
    argv = tiny_overrides(text, tmp_path, AVERAGED, "parallel=fsdp", "trainer.steps=2", "checkpoint.every=1")
    cluster.run(2, "testing.runs:train_small", argv=argv, fault={"rank": 1, "forwards": [2], "value": math.nan})
    assert [line["skipped"] for line in metrics(tmp_path)] == [0, 1]
    before, after = model_of(tmp_path, 1), model_of(tmp_path, 2)
    assert all(value.equal(before[name]) for name, value in after.items())
    state = json.loads((tmp_path / "checkpoints" / "step-00000002" / "state.json").read_text())
    assert state["step_state"]["average"] == {"accepted": 1}


@pytest.mark.parametrize(("first", "then"), [("0", "0.999"), ("0.999", "0")])
def test_checkpoint_without_the_average_is_refused(
    first: str, then: str, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = tiny_overrides(text, tmp_path, "parallel=single", "checkpoint.allow_changes=true")
    assert run_here([*argv, f"trainer.ema_decay={first}", "trainer.stop_at=2"]).code == 75
    assert main([*argv, f"trainer.ema_decay={then}"]) == 78
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error:")]
    expected = "no averaged weights; use trainer.ema_decay=0" if first == "0" else "use the trainer.ema_decay that it"
    assert expected in line


def test_merge_writes_the_mean_of_checkpoints(runs: tuple[Path, Path], tmp_path: Path) -> None:
    run_dir, out = runs[0], tmp_path / "merged"
    assert serried(["merge", f"run.dir={run_dir}", "checkpoint=2,4,6", f"out={out}"]) == 0
    models = [model_of(run_dir, step) for step in (2, 4, 6)]
    for name, value in load_file(out / "model.safetensors").items():
        torch.testing.assert_close(value, sum(model[name] for model in models) / 3)
    assert (out / "config.json").is_file()


@pytest.mark.parametrize("steps", ["6", "6,06", "6,7"])
def test_merge_without_two_checkpoints_is_refused_in_one_line(
    steps: str, runs: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert serried(["merge", f"run.dir={runs[0]}", f"checkpoint={steps}", f"out={tmp_path / 'merged'}"]) == 78
    (line,) = capsys.readouterr().err.splitlines()
    assert ("no checkpoint of step 7; use checkpoint=" if "7" in steps else "at least two checkpoints") in line
