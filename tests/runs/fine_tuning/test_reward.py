"""Reward models: transformers' classifier with the loss of Bradley and Terry, on any layout."""

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor

import serried
from serried import cli
from serried.commands import evaluate_model
from serried.program import main
from serried.recipes.models.layers.lm_head import IGNORE
from serried.recipes.text.reward import Reward
from serried.recipes.text.reward_config import RewardSection
from serried.records.metrics import named_metrics
from testing import runs
from testing.rank_pool import Cluster
from tests.runs.fine_tuning.test_preference import dpo, model, train

__all__ = ["model"]  # a fixture


def reward(model: Path, run_dir: Path, *more: str) -> list[str]:
    return dpo(model, run_dir, "recipe=reward", "trainer.max_grad_norm=0", *more)


def test_training_equals_transformers_classifier_and_layouts_agree(
    cluster: Cluster, model: Path, tmp_path: Path
) -> None:
    from transformers import AutoModelForSequenceClassification

    train(reward(model, tmp_path / "first", "trainer.steps=1", "optim.lr=0"))
    first = runs.checkpoint(tmp_path / "first")
    argv = reward(model, tmp_path / "run", f"model.path={first}", "trainer.deterministic=true")
    with runs.kept_batches(Reward) as trained_on:
        assert main(argv) == 0
    ours = runs.metrics(tmp_path / "run")
    theirs = AutoModelForSequenceClassification.from_pretrained(first)
    assert (type(theirs).__name__, theirs.config.num_labels) == ("LlamaForSequenceClassification", 1)
    optimizer = torch.optim.AdamW(theirs.parameters(), lr=0.003, betas=(0.9, 0.95), weight_decay=0.0)

    def score(tokens: Tensor, targets: Tensor) -> Tensor:
        end = int((targets != IGNORE).nonzero())
        return theirs(tokens[: end + 1].unsqueeze(0)).logits[0, 0]

    for step, line in enumerate(ours):
        batches = trained_on[2 * step : 2 * step + 2]
        tokens, targets = (torch.cat([each[place] for each in batches]) for place in (0, 1))
        scores = torch.stack([score(*each) for each in zip(tokens, targets, strict=True)]).view(-1, 2)
        margins = scores[:, 0] - scores[:, 1]
        loss, accuracy = -F.logsigmoid(margins).mean(), (margins > 0).double().mean()
        assert named_metrics(line).keys() == {*RewardSection.metrics}, "what checkpoint.best_metric may be"
        assert (line["loss"], line["reward_accuracy"]) == pytest.approx((loss.item(), accuracy.item()), abs=1e-5)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert len(ours) == 4
    assert ours[-1]["loss"] < ours[0]["loss"]
    saved = AutoModelForSequenceClassification.from_pretrained(runs.checkpoint(tmp_path / "run"))
    some = torch.arange(30).unsqueeze(0)
    torch.testing.assert_close(saved(some).logits, theirs(some).logits, atol=1e-3, rtol=1e-3)
    argv = reward(model, tmp_path / "stopped", f"model.path={first}", "trainer.deterministic=true")
    train([*argv, "trainer.stop_at=2"], 75)
    train(argv)
    assert not runs.different_tensors(tmp_path / "run", tmp_path / "stopped")
    for name, *layout in (
        ("fsdp", "parallel=fsdp", "parallel.reshard_after_forward=true"),
        ("pipe", "parallel=fsdp", "parallel.pipeline=2"),
    ):
        argv = reward(model, tmp_path / name, f"model.path={first}", *layout)
        cluster.run(2, "tests.runs.fine_tuning.test_preference:train", argv=argv)
        assert runs.losses(tmp_path / name) == pytest.approx(runs.losses(tmp_path / "run"), abs=1e-5)


@pytest.mark.slow
def test_adapters_and_the_score_open_in_peft_and_merge(cluster: Cluster, model: Path, tmp_path: Path) -> None:
    """Begun on a pipeline, resumed on one process."""
    import peft
    from transformers import AutoModelForSequenceClassification

    argv = reward(model, tmp_path / "run", "adapter=lora", "adapter.rank=4")
    whole = reward(model, tmp_path / "whole", "adapter=lora", "adapter.rank=4")
    assert main(whole) == 0
    stopped = [*argv, "trainer.stop_at=2", "parallel=fsdp", "parallel.pipeline=2"]
    cluster.run(2, "tests.runs.fine_tuning.test_preference:train", argv=stopped, code=75)
    assert main(argv) == 0
    ours, found = (runs.losses(tmp_path / name) for name in ("whole", "run"))
    assert found == pytest.approx(ours, abs=1e-5)
    assert ours[-1] < ours[0]
    base = AutoModelForSequenceClassification.from_pretrained(model / "llama", num_labels=1)
    opened = peft.PeftModel.from_pretrained(base, runs.checkpoint(tmp_path / "run")).eval()
    assert cli.main(["export", str(tmp_path / "run"), f"out={tmp_path / 'merged'}", "merge=true"]) == 0
    assert not {"lm_head.weight"} & set(load_file(tmp_path / "merged" / "model.safetensors"))
    merged = AutoModelForSequenceClassification.from_pretrained(tmp_path / "merged")
    some = torch.arange(30).unsqueeze(0)
    with torch.no_grad():
        torch.testing.assert_close(opened(some).logits, merged(some).logits, atol=1e-5, rtol=0)
        scores = serried.load_model(tmp_path / "run")(some)
    torch.testing.assert_close(scores[:, -1:], merged(some).logits, atol=1e-5, rtol=0)
    assert evaluate_model.evaluate([str(tmp_path / "run"), "json=true"]) == 0
