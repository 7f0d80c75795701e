"""Runs that start from the weights of a folder or of another run, with a fresh optimizer: ``checkpoint.resume``."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import serried
from serried.configs.compose import compose
from serried.configs.errors import UserError
from serried.parallel.plan import Inputs, LossTerms, ParallelPlan
from serried.program import main
from testing import runs
from testing.rank_pool import Cluster
from tests.support.own_task import Points


class InBlocks(Points):
    """Points with a model that a pipeline can run: two layers and a head."""

    loss = serried.Task.loss

    def build_model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 3))

    def parallel_plan(self, model: nn.Module) -> ParallelPlan:
        del model
        return ParallelPlan(blocks=("*",))

    def inputs(self, batch: Any) -> Inputs:
        return Inputs(batch["x"])

    def terms(self, output: Any, batch: Any) -> LossTerms:
        terms: LossTerms = Points.loss(self, lambda _: output, batch)  # type: ignore[arg-type]
        return terms


class NewHead(InBlocks):
    """The same layers and another layer at the end."""

    def build_model(self) -> nn.Module:
        return nn.Sequential(*super().build_model(), nn.Tanh(), nn.Linear(3, 3))


class WiderHead(InBlocks):
    """The same layers with a head of another shape."""

    def build_model(self) -> nn.Module:
        return nn.Sequential(*super().build_model()[:-1], nn.Linear(4, 5))


def words(run_dir: Path, *more: str) -> list[str]:
    given = dict(word.split("=", 1) for word in (f"run.dir={run_dir}", "trainer.steps=2", *more))
    return [f"{key}={value}" for key, value in given.items()]


def fit(argv: list[str], name: str = "NewHead") -> str:
    return serried.fit(globals()[name](), argv).state


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of ``InBlocks``."""
    run_dir = tmp_path_factory.mktemp("trained") / "run"
    assert fit(words(run_dir), "InBlocks") == "finished"
    return run_dir


def plain_folder(run_dir: Path, folder: Path) -> Path:
    """Return ``folder`` with the weights of a run alone."""
    folder.mkdir()
    shutil.copy(runs.checkpoint(run_dir) / "model.safetensors", folder)
    return folder


@pytest.mark.parametrize("source", ["run", "checkpoint", "folder"])
def test_task_with_another_name_starts_from_the_weights_of_a_run(
    trained: Path, tmp_path: Path, source: str, capsys: pytest.CaptureFixture[str]
) -> None:
    class Renamed(InBlocks):
        pass

    folders = {"run": trained, "checkpoint": runs.checkpoint(trained)}
    given = folders.get(source) or plain_folder(trained, tmp_path / "weights")
    more = [f"checkpoint.resume={given}", "optim.lr=0", "optim=sgd", "trainer.steps=3"]
    assert serried.fit(Renamed(), words(tmp_path / "run", *more)).step == 3
    printed = capsys.readouterr().out
    assert "step 0 with the weights of" in printed
    assert ("was trained by task.name=in_blocks: only its weights are used, from step 0" in printed) == (
        source != "folder"
    )
    before, after = runs.weights(trained), runs.weights(tmp_path / "run")
    assert before.keys() == after.keys()
    assert all(after[name].equal(tensor) for name, tensor in before.items())


def test_weights_only_starts_the_same_task_again_with_a_fresh_optimizer(trained: Path, tmp_path: Path) -> None:
    resume = [f"checkpoint.resume={trained}", "trainer.seed=5"]
    with pytest.raises(UserError, match=r"use its weights alone: checkpoint.resume=\S+ checkpoint.weights_only=true"):
        fit(words(tmp_path / "run", *resume), "InBlocks")
    argv = words(tmp_path / "run", *resume, "checkpoint.weights_only=true")
    assert fit([*argv, "trainer.stop_at=1"], "InBlocks") == "stopped"
    state = json.loads((runs.checkpoint(tmp_path / "run") / "state.json").read_text())
    assert (state["step"], state["samples"]) == (1, 12)
    assert fit(argv, "InBlocks") == "finished", "the same command resumes the run that it began"
    assert [line["resumed_from"] for line in runs.metrics(tmp_path / "run", "start")] == [None, 1]


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("NewHead", "2 tensors of the model are missing (6.weight, 6.bias)"),
        (
            "WiderHead",
            "2 tensors have other shapes (4.weight has shape [3, 4], not [5, 4], 4.bias has shape [3], not [5])",
        ),
    ],
)
def test_weights_that_do_not_fit_are_listed_and_refused_unless_strict_is_false(
    trained: Path, tmp_path: Path, name: str, told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = words(tmp_path / "run", f"checkpoint.resume={trained}", "optim.lr=0")
    with pytest.raises(UserError) as refused:
        fit(argv, name)
    (line,) = str(refused.value).splitlines()
    assert told in line
    assert line.endswith(", or checkpoint.strict=false to load what fits")
    assert not (tmp_path / "run/checkpoints").exists()
    assert fit([*argv, "checkpoint.strict=false"], name) == "finished"
    (warning,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("WARNING    ")]
    assert f"{told}" in warning
    before, after = runs.weights(trained), runs.weights(tmp_path / "run")
    task = globals()[name]()
    task.config = task.Config()
    torch.manual_seed(1)  # trainer.seed
    initial = task.build_model().state_dict()
    for key, tensor in after.items():
        fits = key in before and before[key].shape == tensor.shape
        assert tensor.equal(before[key] if fits else initial[key]), key


def test_tensors_that_the_model_lacks_are_listed_and_left_out(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = plain_folder(trained, tmp_path / "weights")
    tensors = load_file(folder / "model.safetensors")
    more = {f"more.{number}": torch.zeros(1) for number in range(9)}
    save_file(tensors | more, folder / "model.safetensors")
    argv = words(tmp_path / "run", f"checkpoint.resume={folder}", "checkpoint.strict=false")
    assert fit(argv, "InBlocks") == "finished"
    warning = "6 of the model's 6 tensors are loaded: 9 tensors are not in the model (more.0, more.1, more.2, ...)"
    assert f"WARNING    {folder}: {warning}\n" in capsys.readouterr().out
    save_file(more, folder / "model.safetensors")
    with pytest.raises(UserError, match="has no tensor that fits the model: 6 tensors of the model are missing"):
        fit(words(tmp_path / "none", *argv[2:]), "InBlocks")


LAYOUTS = {
    "ddp": ["parallel=ddp"],
    "fsdp": ["parallel=fsdp"],
    "pipeline": ["parallel=fsdp", "parallel.pipeline=2", "parallel.pipeline_schedule=gpipe"],
}


@pytest.mark.parametrize(
    "layout", ["fsdp", *(pytest.param(name, marks=pytest.mark.slow) for name in ("ddp", "pipeline"))]
)
def test_weights_that_fit_in_part_start_the_same_run_on_two_ranks(
    cluster: Cluster, trained: Path, tmp_path: Path, layout: str
) -> None:
    more = [f"checkpoint.resume={trained}", "checkpoint.strict=false"]
    assert fit(words(tmp_path / "one", *more)) == "finished"
    argv = words(tmp_path / "two", *more, *LAYOUTS[layout])
    answers = cluster.run(2, "tests.runs.test_start_from_weights:fit", argv=argv)
    assert {answer.value for answer in answers} == {"finished"}
    assert runs.losses(tmp_path / "two") == pytest.approx(runs.losses(tmp_path / "one"), rel=1e-5)


def test_language_model_takes_the_architecture_of_a_run_of_another_task(tmp_path: Path) -> None:
    text = runs.write_text(tmp_path / "text")
    argv = runs.tiny_overrides(text, tmp_path / "run", "trainer.stop_at=1")
    assert runs.run_here(argv).code == 75
    pairs = tmp_path / "pairs.jsonl"
    row = {"chosen": " ipsum dolor", "rejected": " sit amet"}
    pairs.write_text("".join(json.dumps({"prompt": f"lorem {number}", **row}) + "\n" for number in range(40)))
    more = [
        "recipe=dpo", f"data.path={pairs}", f"data.cache_dir={tmp_path / 'cache'}", "data.sequence_length=128",
        f"checkpoint.resume={tmp_path / 'run'}", f"run.dir={tmp_path / 'dpo'}", "trainer.steps=2",
        "trainer.global_batch=4", "trainer.micro_batch=2", "trainer.eval_every=0", "precision=fp32",
    ]  # fmt: skip
    saved = runs.checkpoint(tmp_path / "run")
    config = compose(more)
    assert (config.model.path, config.model.dim, config.model.layers) == (str(saved), 16, 1)
    assert main(more) == 0
    assert runs.losses(tmp_path / "dpo")[0] == pytest.approx(0.6931472, abs=1e-5)  # its own reference: log 2
    assert compose([word for word in more if "resume" not in word]).model.path is None
    again = compose([*runs.tiny_overrides(text, tmp_path / "again"), more[4], "checkpoint.weights_only=true"])
    assert again.model.path == str(saved)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["checkpoint.weights_only=true"], "name the run or folder whose weights to start from"),
        (["checkpoint.weights_only=true", "checkpoint.resume={run}"], "is a checkpoint of this run, but a start"),
        (["checkpoint.resume={run}/none"], "is not auto, never, must or an existing folder"),
    ],
)
def test_folder_that_cannot_be_started_from_is_refused_in_one_line(
    trained: Path, tmp_path: Path, more: list[str], message: str
) -> None:
    shutil.copytree(trained, tmp_path / "run")
    argv = words(tmp_path / "run", *(word.format(run=tmp_path / "run") for word in more))
    with pytest.raises(UserError) as refused:
        fit(argv, "InBlocks")
    (line,) = str(refused.value).splitlines()
    assert message in line
    assert runs.checkpoint(tmp_path / "run").exists()
