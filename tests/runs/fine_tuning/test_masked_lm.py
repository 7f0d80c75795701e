"""Masked language modelling: transformers' own models and losses, on any layout."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from serried.commands import evaluate_model
from serried.program import main
from serried.recipes.classification.masked_lm import MaskedLM, Masking
from serried.recipes.data.labelled.labelled_texts import open_encoder
from serried.recipes.models.layers.lm_head import IGNORE
from testing.rank_pool import Cluster
from testing.runs import checkpoint, different_tensors, kept_batches, losses, metrics

WORDS = ("good", "fine", "bad", "poor", "film", "book", "the", "was", "a", "very")
SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Texts, and a BERT with a tokenizer of words."""
    import transformers
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    root = tmp_path_factory.mktemp("texts")
    words = Tokenizer(models.WordLevel({word: n for n, word in enumerate((*SPECIAL, *WORDS))}, "[UNK]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    words.add_special_tokens(list(SPECIAL))
    torch.manual_seed(3)
    bert = transformers.BertConfig(
        vocab_size=16, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32,
        max_position_embeddings=32, pad_token_id=0, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    transformers.BertForMaskedLM(bert).save_pretrained(root / "bert")
    words.save(str(root / "bert/tokenizer.json"))
    (root / "bert/tokenizer_config.json").write_text(json.dumps({"mask_token": {"content": "[MASK]"}}))
    (root / "data").mkdir()
    for name, count in (("train", 48), ("val", 12)):
        texts = ("the film was " * (1 + n % 4) + f"{WORDS[n % 4]} {WORDS[6 + n % 3]}" for n in range(count))
        (root / f"data/{name}.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return root


def masked(folder: Path, run_dir: Path, *more: str) -> list[str]:
    return [
        "task=masked_lm", f"task.path={folder / 'data'}", f"task.model={folder / 'bert'}", "task.sequence_length=16",
        f"run.dir={run_dir}", "trainer.steps=4", "trainer.global_batch=12", "trainer.micro_batch=3",
        "trainer.log_every=1", "trainer.eval_every=4", "schedule=constant", "schedule.warmup_steps=0",
        "precision=fp32", "optim.lr=0.003", "optim.weight_decay=0", "launch.device=cpu", "trainer.max_grad_norm=0",
        "trainer.deterministic=true", *more,
    ]  # fmt: skip


def train(argv: list[str], code: int = 0) -> None:
    """On this rank."""
    assert main(argv) == code


def test_training_equals_transformers_when_sharded_and_resumed(
    cluster: Cluster, folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    from transformers import AutoModelForMaskedLM

    with kept_batches(MaskedLM, "loss") as trained_on:
        train(masked(folder, tmp_path / "run"))
    theirs: Any = AutoModelForMaskedLM.from_pretrained(folder / "bert")
    optimizer = torch.optim.AdamW(theirs.parameters(), lr=0.003, betas=(0.9, 0.95), weight_decay=0.0)
    by_hand = []
    for step in range(4):
        parts = zip(*trained_on[4 * step : 4 * step + 4], strict=True)
        tokens, mask, targets = (
            torch.cat([F.pad(each, (0, 16 - each.shape[1]), value=fill) for each in part])
            for part, fill in zip(parts, (0, 0, IGNORE), strict=True)
        )
        loss = theirs(input_ids=tokens, attention_mask=mask, labels=targets).loss
        by_hand.append(loss.item())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert losses(tmp_path / "run") == pytest.approx(by_hand, abs=1e-5)
    saved: Any = AutoModelForMaskedLM.from_pretrained(checkpoint(tmp_path / "run"))
    for name, parameter in theirs.named_parameters():
        torch.testing.assert_close(saved.get_parameter(name), parameter, atol=1e-5, rtol=0)
    (evaluated,) = metrics(tmp_path / "run", "eval")
    capfd.readouterr()
    assert evaluate_model.evaluate([str(tmp_path / "run"), "json=true"]) == 0
    again = json.loads(capfd.readouterr().out.splitlines()[-1])
    assert (again["loss"], again["accuracy"]) == pytest.approx((evaluated["loss"], evaluated["accuracy"]), rel=1e-5)

    train(masked(folder, tmp_path / "stopped", "trainer.stop_at=2"), 75)
    train(masked(folder, tmp_path / "stopped"))
    assert not different_tensors(tmp_path / "run", tmp_path / "stopped")
    cluster.run(
        2, "tests.runs.fine_tuning.test_masked_lm:train", argv=masked(folder, tmp_path / "fsdp", "parallel=fsdp")
    )
    for kind in ("step", "eval"):
        assert losses(tmp_path / "fsdp", kind) == pytest.approx(losses(tmp_path / "run", kind), rel=1e-5)


def test_mask_shares_equal_bert(folder: Path) -> None:
    masking = Masking(open_encoder(folder / "bert", 16), "[MASK]", 0.15)
    tokens = np.array([2, *[7] * 100_000, 3])
    shown, targets = masking(tokens, 5)
    is_predicted = targets != IGNORE
    assert not is_predicted[[0, -1]].any()
    assert (shown[~is_predicted] == tokens[~is_predicted]).all()
    assert (targets[is_predicted] == 7).all()
    assert is_predicted.mean() == pytest.approx(0.15, abs=0.005)
    of_them = shown[is_predicted]
    others = 0.1 * (masking.ids - 2) / masking.ids  # a token may become itself, or the mask
    assert [(of_them == 4).mean(), ((of_them != 4) & (of_them != 7)).mean()] == pytest.approx(
        [0.8 + 0.1 / masking.ids, others], abs=0.01
    )
    assert (masking(tokens, 5).tokens == shown).all()
    assert (masking(tokens, 6).tokens != shown).any()


def test_mistakes_are_refused_in_one_line(folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "rows.jsonl").write_text('{"text": 5}')
    for name in ("none", "small", "gpt2", "roberta"):
        shutil.copytree(folder / "bert", tmp_path / name)
    tokenizer = (folder / "bert/tokenizer.json").read_text()
    (tmp_path / "none/tokenizer.json").write_text(tokenizer.replace("[MASK]", "[HIDDEN]"))
    (tmp_path / "none/tokenizer_config.json").write_text('{"mask_token": 5}')
    (tmp_path / "gpt2/config.json").write_text('{"model_type": "gpt2"}')
    config = json.loads((folder / "bert/config.json").read_text())
    (tmp_path / "roberta/config.json").write_text(json.dumps(config | {"model_type": "roberta", "pad_token_id": 1}))
    more = json.loads(tokenizer)
    more["model"]["vocab"] |= {f"word{n}": n for n in range(15, 40)}
    (tmp_path / "small/tokenizer.json").write_text(json.dumps(more))
    for words, told in (
        ([f"task.model={tmp_path / 'none'}"], "the tokenizer has no mask token"),
        (
            [f"task.model={tmp_path / 'small'}"],
            "the tokenizer has 40 tokens, but the embedding of the model has only 16 rows",
        ),
        ([f"task.model={tmp_path / 'gpt2'}"], "transformers has no AutoModelForMaskedLM for model_type gpt2"),
        (
            [f"task.model={tmp_path / 'roberta'}", "task.pretrained=false", "task.sequence_length=32"],
            f"exceeds the 30 tokens that task.model={tmp_path / 'roberta'} supports; use task.sequence_length=30",
        ),
        ([f"task.path={tmp_path / 'rows.jsonl'}"], "line 1: 'text' must be text; fix"),
        (
            ["task.text_column=body"],
            "has no column for task.text_column=body; its columns are text; use task.text_column=text",
        ),
        (["task.label_column=label"], "task.label_column"),
        (["task.mask_share=0"], "task.mask_share"),
        (["adapter=lora"], "the head of these models is tied to the embeddings"),
        (["trainer.sample_tokens=9"], "trainer.sample_tokens=9 but MaskedLM does not generate text; leave it out"),
        (["trainer.evaluate=[lm_eval:arc_easy]"], "trainer.evaluate needs a text model"),
        (["recipe=lora"], "the built-in recipes are for language models"),
    ):
        assert main(masked(folder, tmp_path / "run", "dry_run=true", *words)) == 78, words
        *_, line = capfd.readouterr().err.splitlines()
        assert line.startswith("error: ")
        assert told in line
    assert main(masked(folder, tmp_path / "run", "dry_run=true")) == 0
    assert "48 texts, 12 for evaluation, at most 16 tokens each, 15% of the tokens predicted" in capfd.readouterr().out
