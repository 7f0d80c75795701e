"""Commands beside a run that keeps one checkpoint, and deletes it while they read it."""

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

import serried
from serried.cli import main
from serried.records.safetensors_files import TensorFolder
from serried.trainer.checkpoint import manifest
from serried.trainer.checkpoint.retention import prune
from testing.rank_pool import Cluster
from testing.runs import overrides, run_here, tiny_overrides


@pytest.fixture
def run(text: Path, tmp_path: Path) -> Path:
    """A run with a checkpoint of step 2; that of step 4 lies aside, until ``trains_on``."""
    assert run_here(tiny_overrides(text, tmp_path / "run", "trainer.steps=4", "trainer.eval_batches=1")).code == 0
    (tmp_path / "run/checkpoints/step-00000004").rename(tmp_path / "next")
    return tmp_path / "run"


def trains_on(run: Path) -> None:
    """Do what the run does meanwhile: commit the next checkpoint, and delete the one before."""
    if (run.parent / "next").exists():
        (run.parent / "next").rename(run / "checkpoints/step-00000004")
        prune(run / "checkpoints", keep=1, keep_every=0, best=None)


@contextmanager
def deleted(run: Path, when: str) -> Iterator[None]:
    """Inside this context the run trains on as soon as a file of its checkpoint is read: ``when`` checksums are
    compared, headers are read, or values."""
    owner, name = {
        "checksums": (manifest, "record_of"), "headers": (TensorFolder, "__init__"),
        "values": (TensorFolder, "read_elements"),
    }[when]  # fmt: skip
    original = getattr(owner, name)

    def meanwhile(*arguments: Any, **named: Any) -> Any:
        trains_on(run)
        return original(*arguments, **named)

    with patch.object(owner, name, meanwhile):
        yield


MOMENTS = ("checksums", "headers", "values")


@pytest.mark.parametrize("when", MOMENTS)
def test_checkpoint_deleted_while_it_is_read_is_replaced_by_the_newest(
    when: str, run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    newest = {name: tensor.clone() for name, tensor in weights_of(tmp_path / "next").items()}
    with deleted(run, when):
        assert main(["export", str(run), f"out={tmp_path / 'model'}"]) == 0
    assert "step-00000004 to " in capsys.readouterr().out
    exported = weights_of(tmp_path / "model")
    assert exported.keys() == newest.keys()
    assert all(torch.equal(exported[name], tensor) for name, tensor in newest.items())


@pytest.mark.parametrize(
    ("when", "command"), [("checksums", "generate"), ("headers", "evaluate"), ("values", "generate")]
)
def test_command_during_a_run_uses_the_remaining_checkpoint(
    when: str, command: str, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with deleted(run, when):
        assert main([command, str(run), *(["tokens=3"] if command == "generate" else [])]) == 0
    printed = "".join(capsys.readouterr())
    assert f"model      {run / 'checkpoints/step-00000004'}, fp32" in printed


def test_load_model_during_a_run_returns_the_remaining_checkpoint(run: Path, tmp_path: Path) -> None:
    newest = weights_of(tmp_path / "next")
    with deleted(run, "values"):
        model = serried.load_model(run)
    head = next(tensor for name, tensor in newest.items() if "embed" in name)
    assert any(each.shape == head.shape and torch.equal(each, head) for each in model.parameters())


def test_checkpoint_that_was_named_and_is_deleted_is_not_replaced(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with deleted(run, "values"):
        assert main(["export", str(run), "checkpoint=2", f"out={tmp_path / 'model'}"]) == 78
    assert "no checkpoint of step 2; use checkpoint=4" in capsys.readouterr().err
    assert not (tmp_path / "model").exists()


def evaluate_while_deleted(words: list[str], run: str, rank: int) -> int:
    """As the command does it; the checkpoint is deleted when ``rank`` reads values."""
    import os

    from serried.commands.evaluate_model import evaluate

    if int(os.environ.get("RANK", "0")) != rank:
        return evaluate(words)
    with deleted(Path(run), "values"):
        return evaluate(words)


def test_all_ranks_evaluate_the_checkpoint_that_is_left_if_one_finds_its_own_deleted(
    run: Path, cluster: Cluster
) -> None:
    words = [str(run), "json=true"]
    answers = cluster.run(
        2, "tests.cli.test_reading:evaluate_while_deleted", words=words, run=str(run), rank=1, timeout_seconds=60
    )
    assert [answer.value for answer in answers] == [0, 0]
    (found,) = (json.loads(line) for line in answers[0].printed.splitlines() if line.startswith("{"))
    again = cluster.run(2, "tests.cli.test_evaluate:evaluate_here", words=[str(run), "checkpoint=4", "json=true"])
    (expected,) = (json.loads(line) for line in again[0].printed.splitlines() if line.startswith("{"))
    assert found == expected


def test_chat_continues_after_its_checkpoint_was_deleted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    chats = tmp_path / "chats.jsonl"
    row = '{"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes %d"}]}\n'
    chats.write_text("".join(row % number for number in range(40)))
    argv = overrides(
        tmp_path, tmp_path / "run", "model.layers=1", "recipe=sft", f"data.path={chats}", "data.sequence_length=96",
        "trainer.steps=1", "data.validation_fraction=0.3",
    )  # fmt: skip
    assert run_here([word for word in argv if word != "data=text"]).code == 0
    messages = iter(["hi", "and?"])

    def typed(*_: Any) -> str:
        shutil.rmtree(tmp_path / "run/checkpoints", ignore_errors=True)
        try:
            return next(messages)
        except StopIteration:
            raise EOFError from None

    monkeypatch.setattr("builtins.input", typed)
    assert main(["chat", str(tmp_path / "run"), "tokens=3"]) == 0
    assert "error" not in capsys.readouterr().err


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return load_file(folder / "model.safetensors")
