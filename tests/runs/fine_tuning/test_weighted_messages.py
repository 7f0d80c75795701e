"""Weights of messages and rows: each multiplies the loss of its tokens, on any layout."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from serried.configs.compose import compose
from serried.configs.errors import UserError
from serried.program import main
from serried.recipes.text.causal_lm import CausalLM
from testing import runs
from testing.rank_pool import Cluster
from tests.support import trl_losses


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("inputs")
    trl_losses.write_inputs(folder)
    rows = []
    for n in range(24):
        first, second = ({"role": "assistant", "content": f"{n}{mark * (1 + n % 5)}"} for mark in "!?")
        asks = [{"role": "user", "content": f"Say {n + more}."} for more in (0, 1)]
        rows.append({"messages": [asks[0], {**first, "weight": (0, 0.25, 1)[n % 3]}, asks[1], second]})
        rows[-1] |= {"weight": 3} if n % 4 == 0 else {}
    (folder / "chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def arguments(inputs: Path, *more: str) -> list[str]:
    own = [word for word in trl_losses.arguments(inputs, "ipo") if not word.startswith(("recipe=", "task."))]
    given = [
        "recipe=sft", *own, f"data.path={inputs / 'chats.jsonl'}", "trainer.steps=2", "trainer.global_batch=12",
        "trainer.micro_batch=12", "data.sequence_length=256", "data.packing=none", "data.isolate_documents=false",
        "optim.eps=0.001", "trainer.sample_tokens=0", *more,
    ]  # fmt: skip
    return [f"{key}={value}" for key, value in dict(word.split("=", 1) for word in given).items()]


def train(argv: list[str]) -> None:
    assert main(argv) == 0


def assert_equal_runs(found: Path, want: Path) -> None:
    for line, other in zip(runs.metrics(found), runs.metrics(want), strict=True):
        names = ("loss", "grad_norm", "tokens")
        assert [line[name] for name in names] == pytest.approx([other[name] for name in names], rel=1e-5)


def test_loss_of_weighted_messages_is_the_weighted_mean_on_any_number_of_ranks(
    cluster: Cluster, inputs: Path, tmp_path: Path
) -> None:
    import transformers

    argv = arguments(inputs, "trainer.global_batch=24", "trainer.micro_batch=24", f"run.dir={tmp_path / 'whole'}")
    task = CausalLM(compose(argv))
    task.open_data(task.prepare())
    dataset = task.dataset("train")
    batch: Any = task.collate_numbered([dataset[n] for n in range(24)], np.arange(24))
    is_target = batch.targets >= 0
    assert set(batch.weights[is_target].tolist()) == {0.25, 0.75, 1, 3}, "the products of both weights"
    text = task._text.tokenizer.decode(batch.targets[1][is_target[1] & (batch.weights[1] == 0.25)].tolist())
    assert "!" in text
    assert "?" not in text
    model = transformers.AutoModelForCausalLM.from_pretrained(inputs / "llama")
    with torch.no_grad():
        logs = model(batch.tokens).logits.double().log_softmax(-1)
    losses = -logs.gather(2, batch.targets.clamp(min=0).unsqueeze(2)).squeeze(2)
    weights = batch.weights.double() * is_target
    train(argv)
    whole = runs.metrics(tmp_path / "whole")
    assert whole[0]["loss"] == pytest.approx(((losses * weights).sum() / weights.sum()).item(), abs=1e-5)
    assert whole[0]["tokens"] == int(weights.sum())
    argv = [*argv, "parallel=ddp", "trainer.micro_batch=4", f"run.dir={tmp_path / 'ranks'}"]
    argv = [f"{key}={value}" for key, value in dict(word.split("=", 1) for word in argv).items()]
    cluster.run(3, "tests.runs.fine_tuning.test_weighted_messages:train", argv=argv)
    assert_equal_runs(tmp_path / "ranks", tmp_path / "whole")


def test_loss_of_weighted_messages_with_a_model_of_transformers_is_that_of_the_built_in_family(
    inputs: Path, tmp_path: Path
) -> None:
    for family in ("auto", "hf"):
        train(arguments(inputs, f"model={family}", f"run.dir={tmp_path / family}"))
    assert_equal_runs(tmp_path / "hf", tmp_path / "auto")


def test_sum_of_losses_with_weighted_messages_is_refused(inputs: Path) -> None:
    task = CausalLM(compose(arguments(inputs)))
    task.open_data(task.prepare())
    batch = task.collate_numbered([task.dataset("train")[0]], np.arange(1))
    with pytest.raises(UserError, match=r"model\.family=llama returns a loss of shape \(\), but the data has weights"):
        task.terms(torch.tensor(5.0), batch)


@pytest.mark.slow
@pytest.mark.parametrize("axis", ["reshard_after_forward=true", "tensor=2", "context=2", "pipeline=2"])
def test_loss_of_weighted_messages_is_the_same_on_other_axes(
    cluster: Cluster, inputs: Path, tmp_path: Path, axis: str
) -> None:
    packed = ["data.packing=best_fit", "data.isolate_documents=true", "trainer.global_batch=4", "trainer.micro_batch=2"]
    train(arguments(inputs, *packed, f"run.dir={tmp_path / 'whole'}"))
    argv = arguments(inputs, *packed, "parallel=fsdp", f"parallel.{axis}", f"run.dir={tmp_path / 'other'}")
    cluster.run(2, "tests.runs.fine_tuning.test_weighted_messages:train", argv=argv)
    assert_equal_runs(tmp_path / "other", tmp_path / "whole")


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["task.z_loss=0.1"], "task.z_loss=0.1 is not supported with data whose messages or rows have weights other"),
        (
            ["data.train_on=all", "data.columns.weight=null"],
            "a weight other than 0 and 1, but data.train_on=all",
        ),
    ],
)
def test_weights_that_cannot_be_applied_are_refused(inputs: Path, more: list[str], said: str) -> None:
    with pytest.raises(UserError) as refused:
        task = CausalLM(compose(arguments(inputs, *more)))
        task.open_data(task.prepare())
        task.build_model()
    assert said in str(refused.value)
