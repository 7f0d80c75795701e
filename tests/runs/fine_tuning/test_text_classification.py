"""Sequence classification: transformers' own models and losses, on any layout."""

import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import serried
from serried import cli
from serried.commands import evaluate_model
from serried.configs.errors import UserError
from serried.configs.hugging_face.model_folder import without_code
from serried.configs.schema.tasks import LabelledSection
from serried.program import main
from serried.recipes.classification.text_classification import TextClassification
from serried.recipes.classification.text_classification_config import TextClassSection
from serried.recipes.data.labelled.labelled_texts import open_encoder, open_texts
from serried.recipes.models.hugging_face.classifier import build_classifier
from testing.rank_pool import Cluster
from testing.runs import checkpoint, different_tensors, kept_batches, losses, metrics, weights

WORDS = ("good", "fine", "bad", "poor", "film", "book", "the", "was", "a", "very")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Texts of two classes, a BERT and a Llama, with a tokenizer of words."""
    import transformers
    from tokenizers import Tokenizer, models, pre_tokenizers

    root = tmp_path_factory.mktemp("texts")
    words = Tokenizer(
        models.WordLevel({"[PAD]": 0, "[UNK]": 1} | {word: n for n, word in enumerate(WORDS, 2)}, "[UNK]")
    )
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    sizes = {"vocab_size": 16, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "pad_token_id": 0}
    torch.manual_seed(3)
    bert = transformers.BertConfig(
        **sizes, intermediate_size=32, max_position_embeddings=32, hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    llama = transformers.LlamaConfig(**sizes, intermediate_size=32, max_position_embeddings=32)
    for name, model in (("bert", transformers.BertForMaskedLM(bert)), ("llama", transformers.LlamaForCausalLM(llama))):
        model.save_pretrained(root / name)
        words.save(str(root / name / "tokenizer.json"))
    rows = [
        {"text": f"{'the film was ' * (n % 4)}{WORDS[n % 4]} {WORDS[6 + n % 3]}", "label": ("pos", "neg")[n % 4 // 2]}
        for n in range(60)
    ]
    (root / "data").mkdir()
    (root / "data/train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows[:48]))
    lines = "".join(f"{row['text']},{row['label']}\n" for row in rows[48:])
    (root / "data/val.csv").write_text(f"text,label\n{lines}")
    return root


def texts(folder: Path, run_dir: Path, *more: str, model: str = "bert") -> list[str]:
    return [
        "task=text_classification", f"task.path={folder / 'data'}", f"task.model={folder / model}",
        "task.sequence_length=16", f"run.dir={run_dir}", "trainer.steps=4", "trainer.global_batch=12",
        "trainer.micro_batch=3", "trainer.log_every=1", "trainer.eval_every=4", "schedule=constant",
        "schedule.warmup_steps=0", "precision=fp32", "optim.lr=0.003", "optim.weight_decay=0", "launch.device=cpu",
        "trainer.max_grad_norm=0", *more,
    ]  # fmt: skip


def train(argv: list[str], code: int = 0) -> None:
    """On this rank."""
    assert main(argv) == code


@pytest.mark.parametrize("model", ["bert", pytest.param("llama", marks=pytest.mark.slow)])
def test_training_equals_transformers(folder: Path, tmp_path: Path, model: str) -> None:
    from transformers import AutoModelForSequenceClassification

    train(texts(folder, tmp_path / "first", "trainer.steps=1", "optim.lr=0", model=model))
    start = checkpoint(tmp_path / "first")
    theirs = AutoModelForSequenceClassification.from_pretrained(start)
    assert theirs.config.id2label == {0: "neg", 1: "pos"}
    with kept_batches(TextClassification, "loss") as trained_on:
        train(texts(folder, tmp_path / "run", f"task.model={start}", "trainer.seed=7"))
    optimizer = torch.optim.AdamW(theirs.parameters(), lr=0.003, betas=(0.9, 0.95), weight_decay=0.0)
    for step, line in enumerate(metrics(tmp_path / "run")):
        batches = trained_on[4 * step : 4 * step + 4]
        scores = torch.cat([theirs(input_ids=each.tokens, attention_mask=each.mask).logits for each in batches])
        labels = torch.cat([each.labels for each in batches])
        loss, accuracy = F.cross_entropy(scores, labels), (scores.argmax(1) == labels).double().mean()
        assert (line["loss"], line["accuracy"]) == pytest.approx((loss.item(), accuracy.item()), abs=1e-5)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert step == 3
    assert (checkpoint(tmp_path / "run") / "tokenizer.json").is_file()


def test_keys_that_name_code_are_not_followed(folder: Path, tmp_path: Path) -> None:
    found = json.loads((folder / "bert/config.json").read_text())
    harmful = {"attn_implementation": "someone/kernels", "_attn_implementation": "a/b", "experts_implementation": "c/d"}
    (tmp_path / "config.json").write_text(json.dumps(found | harmful))
    section = LabelledSection(path="unread", model=str(tmp_path))
    config = build_classifier(section, ["a", "b"], "SequenceClassification", {})[0].config
    assert config._attn_implementation == "sdpa"
    assert config._experts_implementation != "c/d"


def test_quantized_model_is_refused(folder: Path, tmp_path: Path) -> None:
    found = json.loads((folder / "bert/config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(found | {"quantization_config": {"quant_method": "fp8"}}))
    section = LabelledSection(path="unread", model=str(tmp_path))
    with pytest.raises(UserError, match=r"task\.model=.* has quantized weights .*; use the model before"):
        build_classifier(section, ["a", "b"], "SequenceClassification", {})


@pytest.mark.parametrize(
    "keys",
    [
        {"use_pretrained_backbone": True},
        {"backbone": "someone/weights"},
        {"model_type": "timm_wrapper", "architecture": "hf_hub:someone/weights"},
        {"model_type": "timm_wrapper", "model_args": {"checkpoint_path": "weights.pth"}},
        {"vision_config": {"model_type": "timm_wrapper", "architecture": "local-dir:weights"}},
    ],
)
def test_config_that_names_another_model_is_refused(keys: dict[str, Any]) -> None:
    """A library would download it, or unpickle it."""
    with pytest.raises(UserError, match="which would make a library build or download another model"):
        without_code({"model_type": "bert"} | keys)


@pytest.mark.slow
def test_shards_agree_and_a_stopped_run_resumes_bitwise(cluster: Cluster, folder: Path, tmp_path: Path) -> None:
    train(texts(folder, tmp_path / "whole", "trainer.deterministic=true"))
    argv = texts(folder, tmp_path / "stopped", "trainer.deterministic=true")
    train([*argv, "trainer.stop_at=2"], 75)
    train(argv)
    assert not different_tensors(tmp_path / "whole", tmp_path / "stopped")
    (evaluated,) = metrics(tmp_path / "whole", "eval")
    cluster.run(
        2,
        "tests.runs.fine_tuning.test_text_classification:train",
        argv=texts(folder, tmp_path / "fsdp", "parallel=fsdp"),
    )
    for kind in ("step", "eval"):
        assert losses(tmp_path / "fsdp", kind) == pytest.approx(losses(tmp_path / "whole", kind), rel=1e-5)
    assert evaluated["accuracy"] >= 0.5


@pytest.mark.slow
def test_adapters_and_the_head_of_a_run_start_another_one_merged_or_not(folder: Path, tmp_path: Path) -> None:
    train(texts(folder, tmp_path / "run", "adapter=lora", "adapter.rank=4", "adapter.alpha=8"))
    more = [f"adapter.path={tmp_path / 'run'}", "optim.lr=0", "trainer.steps=1"]
    train(texts(folder, tmp_path / "next", *more))
    train(texts(folder, tmp_path / "whole", *more, "adapter.merge=true"))
    before, after = (weights(tmp_path / name, "adapter_model") for name in ("run", "next"))
    assert before.keys() == after.keys()
    assert "base_model.model.classifier.weight" in after
    assert all(after[name].equal(tensor) for name, tensor in before.items())
    assert losses(tmp_path / "whole") == pytest.approx(losses(tmp_path / "next"), abs=1e-6)


def test_adapters_and_the_head_train_as_by_peft_and_are_merged(
    cluster: Cluster, folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The folder lacks the head and BERT's pooler: both are trained whole."""
    import peft
    from transformers import AutoModelForSequenceClassification

    def base() -> Any:
        return AutoModelForSequenceClassification.from_pretrained(folder / "bert", num_labels=2)

    own = ["adapter=lora", "adapter.rank=4", "adapter.alpha=8", "trainer.deterministic=true"]
    train(texts(folder, tmp_path / "first", *own, "trainer.steps=1", "optim.lr=0"))
    with kept_batches(TextClassification, "loss") as trained_on:
        train(texts(folder, tmp_path / "run", *own))
    assert ", and the new head" in capfd.readouterr().out
    theirs = peft.PeftModel.from_pretrained(base(), checkpoint(tmp_path / "first"), is_trainable=True)
    trained = [parameter for parameter in theirs.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=0.003, betas=(0.9, 0.95), weight_decay=0.0)
    for step, line in enumerate(metrics(tmp_path / "run")):
        batches = trained_on[4 * step : 4 * step + 4]
        scores = torch.cat([theirs(input_ids=each.tokens, attention_mask=each.mask).logits for each in batches])
        loss = F.cross_entropy(scores, torch.cat([each.labels for each in batches]))
        assert line["loss"] == pytest.approx(loss.item(), abs=1e-5)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert step == 3
    saved = checkpoint(tmp_path / "run")
    names = {name.replace(".default", "") for name in peft.get_peft_model_state_dict(theirs)}
    assert set(weights(tmp_path / "run", "adapter_model")) == names
    assert cli.main(["export", str(tmp_path / "run"), f"out={tmp_path / 'merged'}", "merge=true"]) == 0
    batch = {"input_ids": trained_on[0].tokens, "attention_mask": trained_on[0].mask}
    opened = [
        peft.PeftModel.from_pretrained(base(), saved),
        AutoModelForSequenceClassification.from_pretrained(tmp_path / "merged"),
        serried.load_model(tmp_path / "run"),
    ]
    with torch.no_grad():
        want = theirs.eval()(**batch).logits
        for model in opened:
            torch.testing.assert_close(model.eval()(**batch).logits, want, atol=1e-5, rtol=0)
    assert opened[1].config.id2label == {0: "neg", 1: "pos"}
    argv = texts(folder, tmp_path / "stopped", *own)
    cluster.run(
        2,
        "tests.runs.fine_tuning.test_text_classification:train",
        argv=[*argv, "trainer.stop_at=2", "parallel=fsdp"],
        code=75,
    )
    train(argv)
    assert losses(tmp_path / "stopped") == pytest.approx(losses(tmp_path / "run"), abs=1e-5)


def test_saved_classifier_is_evaluated_on_its_own_and_on_other_texts(
    folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(folder, tmp_path / "here")
    train(texts(tmp_path / "here", tmp_path / "run"))
    (evaluated,) = metrics(tmp_path / "run", "eval")
    shutil.rmtree(tmp_path / "here" / "bert")  # the checkpoint has all of the model
    capfd.readouterr()
    assert evaluate_model.evaluate([str(tmp_path / "run"), "json=true"]) == 0
    found = json.loads(capfd.readouterr().out.splitlines()[-1])
    assert (found["loss"], found["accuracy"]) == pytest.approx((evaluated["loss"], evaluated["accuracy"]), rel=1e-5)
    assert (found["texts"], found["all_texts"]) == (12, 12)
    other = tmp_path / "other.csv"
    other.write_text("text,label\ngood film,pos\nfine book,pos\n")
    assert evaluate_model.evaluate([str(tmp_path / "run"), f"task.path={other}"]) == 0
    assert "over 2 texts" in capfd.readouterr().out
    model = serried.load_model(tmp_path / "run").eval()
    with torch.no_grad():
        right = sum(int(model(input_ids=torch.tensor([ids])).logits.argmax()) for ids in ([2, 6], [3, 7]))
    assert evaluate_model.evaluate([str(tmp_path / "run"), f"task.path={other}", "json=true"]) == 0
    assert json.loads(capfd.readouterr().out.splitlines()[-1])["accuracy"] == right / 2
    other.write_text("text,label\ngood film,new\n")
    assert evaluate_model.evaluate([str(tmp_path / "run"), f"task.path={other}"]) == 78
    assert "has the class new, but the model has only the classes neg, pos" in capfd.readouterr().err


def test_other_classes_or_tokens_under_the_weights_are_refused_whatever_is_allowed(
    folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    here = tmp_path / "here"
    shutil.copytree(folder, here)
    argv = texts(here, tmp_path / "run")
    train([*argv, "trainer.stop_at=2"], 75)
    resumed, rows = [*argv, "checkpoint.allow_changes=true"], here / "data/train.jsonl"
    tokenizer = here / "bert/tokenizer.json"
    before = rows.read_text(), tokenizer.read_text()
    tokenizer.write_text(before[1].replace('"good": 2', '"good": 3').replace('"fine": 3', '"fine": 2'))
    train(resumed, 78)
    assert "different tokenizer than the one of task.model=" in (told := capfd.readouterr().err)
    assert "token 'good' had id 2 and now has id 3; use the model" in told
    tokenizer.write_text(before[1])
    for name, text in ((rows, before[0]), (here / "data/val.csv", (here / "data/val.csv").read_text())):
        name.write_text(text.replace("neg", "worse"))
    train(resumed, 78)
    assert "has now: class 0 was neg and is now pos; use samples of the same classes" in capfd.readouterr().err


def test_rows_hold_any_text_and_labels_of_both_kinds_of_files_are_compared_as_text(
    folder: Path, tmp_path: Path
) -> None:
    encoder, section = open_encoder(folder / "bert", 16), TextClassSection(path=str(tmp_path))
    rows = [{"text": "good\u2028\x85 film", "label": 1}, {"text": "bad film", "label": 0}]
    train = tmp_path / "train.jsonl"
    train.write_text("".join(json.dumps(row, ensure_ascii=False) + "\r\n" for row in rows), "utf-8")
    (tmp_path / "val.csv").write_text(f"text,label\n{'good ' * 30_000},1\n")
    found = open_texts(section, encoder)
    assert (found.classes, len(found.training)) == (["0", "1"], 2)
    assert found.validation is not None
    assert [found.training[0].label, found.validation[0].label] == [1, 1]
    (tmp_path / "val.csv").write_text('text,label\ngood,1\n"bad,0\ngood,1\n')
    with pytest.raises(UserError, match=r"cannot read .*val\.csv, row 2: unexpected end of data; fix or remove"):
        open_texts(section, encoder)
    (tmp_path / "val.csv").write_text("text,label,text\ngood,1,bad\n")
    with pytest.raises(UserError, match=r"val\.csv has 2 columns named 'text'; remove all but one"):
        open_texts(section, encoder)
    (tmp_path / "val.csv").unlink()
    os.mkfifo(tmp_path / "val.csv")
    with pytest.raises(UserError, match=r"cannot read .*val\.csv: .* is not a regular file"):
        open_texts(section, encoder)
    (tmp_path / "train.csv").write_text("text,label\ngood,1\n")
    with pytest.raises(UserError, match=r"has train\.csv and train\.jsonl; keep one file per split"):
        open_texts(section, encoder)


def test_bad_rows_are_all_named_or_left_out(folder: Path, tmp_path: Path) -> None:
    encoder, good = open_encoder(folder / "bert", 16), '{"text": "good film", "label": 1}'
    (tmp_path / "train.jsonl").write_text("\n".join([good, "{", '{"text": 5, "label": 1}', "", good, '{"text": "a"}']))
    (tmp_path / "val.csv").write_text("text,label\ngood,1\nbad\n")
    with pytest.raises(UserError) as refused:
        open_texts(TextClassSection(path=str(tmp_path)), encoder)
    head, *rows = str(refused.value).splitlines()
    assert head == "3 rows cannot be used; fix or remove them, or leave them out with task.bad_rows=skip:"
    starts = (
        "line 2 is not JSON: ",
        "line 3: 'text' must be text and",
        "line 6 has no column for task.label_column=label; its columns are text; use task.label_column=",
    )
    for row, start in zip(rows, starts, strict=True):
        assert row.strip().startswith(f"{tmp_path / 'train.jsonl'} {start}")
    found = open_texts(TextClassSection(path=str(tmp_path), bad_rows="skip"), encoder)
    assert found.validation is not None
    assert (len(found.training), len(found.validation), found.bad_rows) == (2, 1, 4)
    (tmp_path / "train.jsonl").write_text("1")
    with pytest.raises(UserError, match=r"train\.jsonl line 1 is a number \(1\), not an object"):
        open_texts(TextClassSection(path=str(tmp_path), bad_rows="skip"), encoder)


def test_mistakes_are_refused_in_one_line(folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    import datasets

    wrong = {
        "column": '{"text": "a", "kind": 1}',
        "text": '{"text": 5, "label": 1}',
        "json": "{",
        "blank": '{"text": "", "label": 1}\n{"text": "good", "label": 0}',
        "empty": "",
    }
    for name, row in wrong.items():
        (tmp_path / f"{name}.jsonl").write_text(row)
    for name, label in (("rows", "pos"), ("null", None)):
        rows = datasets.Dataset.from_dict({"text": ["good film"] * 6, "label": ["neg"] * 5 + [label]})
        rows.to_parquet(tmp_path / name / "train-00000-of-00001.parquet")
    (tmp_path / "one").mkdir()
    (tmp_path / "one" / "train.csv").write_text("text,label\ngood,pos\nfine,pos\n")
    (tmp_path / "classes").mkdir()
    for name, label in (("train", "a"), ("val", "b")):
        (tmp_path / "classes" / f"{name}.csv").write_text(f"text,label\ngood,{label}\nfine,c\n")
    for words, told in (
        (
            [f"task.path={tmp_path / 'column.jsonl'}"],
            "has no column for task.label_column=label; its columns are text, kind; use task.label_column=",
        ),
        ([f"task.path={tmp_path / 'text.jsonl'}"], "line 1: 'text' must be text"),
        ([f"task.path={tmp_path / 'json.jsonl'}"], "line 1 is not JSON"),
        ([f"task.path={tmp_path / 'empty.jsonl'}"], "has no rows"),
        ([f"task.path={tmp_path / 'blank.jsonl'}", "dry_run=false"], "the text of row 1 has no tokens"),
        ([f"task.path={tmp_path / 'none'}"], "is neither a file, a folder nor the name of a dataset"),
        (
            [f"task.path={tmp_path / 'one'}"],
            "have the same class, 'pos', but a classifier needs at least two; add samples",
        ),
        ([f"task.path={tmp_path / 'classes'}"], "has the class b, but the training data has only a, c"),
        ([f"task.path={tmp_path / 'null'}"], "has the unknown label None"),
        ([f"task.model={tmp_path / 'none'}"], "no tokenizer.json"),
        (["task.sequence_length=64"], "task.sequence_length=64 exceeds the 32 tokens that task.model="),
        (
            ["adapter=lora", "task.pretrained=false"],
            "only adapters are trained, so the model's weights would stay random",
        ),
        (["adapter=lora", "adapter.modules=[classifier]"], "matches none of the 12 linear layers"),
        (["parallel=fsdp", "parallel.tensor=2", "launch.processes=2"], "declares no roles"),
    ):
        assert main(texts(folder, tmp_path / "run", "dry_run=true", *words)) == 78, words
        *_, line = capfd.readouterr().err.splitlines()
        assert line.startswith("error: ")
        assert told in line
    train(texts(folder, tmp_path / "rows_run", f"task.path={tmp_path / 'rows'}", "trainer.steps=1"))
    assert "6 texts, none for evaluation" in capfd.readouterr().out
    assert main(texts(folder, tmp_path / "run", "dry_run=true")) == 0
    assert "48 texts, 12 for evaluation, at most 16 tokens each" in capfd.readouterr().out


# the tokenizer's settings ---------------------------------------------------------------------------------------------


def copied(folder: Path, tmp_path: Path, config: dict[str, Any], **settings: Any) -> Path:
    """The Llama of ``folder`` with other keys; a tokenizer with marks, whose ids 0 and 1 are words."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    copy = shutil.copytree(folder / "llama", tmp_path / "llama")
    found = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(found | config))
    words = Tokenizer(models.WordLevel({word: number for number, word in enumerate(WORDS)}, "good"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.add_special_tokens(["<s>", "</s>", "<end>"])
    words.save(str(copy / "tokenizer.json"))
    made = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "</s>", **settings}
    (copy / "tokenizer_config.json").write_text(json.dumps(made))
    return copy


def trained_on(folder: Path, model: Path, run_dir: Path, *more: str) -> tuple[list[Any], float]:
    argv = texts(folder, run_dir, f"task.model={model}", "trainer.steps=1", "trainer.micro_batch=12", "optim.lr=0")
    with kept_batches(TextClassification, "loss") as batches:
        train([*argv, "trainer.eval_every=0", *more])
    return batches, losses(run_dir)[0]


@pytest.mark.parametrize("ends", [[11, 12], None, 11])
def test_texts_that_end_with_the_token_of_id_0_are_read_to_their_end(folder: Path, tmp_path: Path, ends: Any) -> None:
    from transformers import AutoModelForSequenceClassification

    model = copied(folder, tmp_path, {"pad_token_id": None, "eos_token_id": ends})
    rows = [
        {"text": text, "label": n % 2} for n, text in enumerate(["the film good", "bad", "a very poor film good"] * 4)
    ]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (batch,), loss = trained_on(folder, model, tmp_path / "run", f"task.path={tmp_path / 'rows.jsonl'}")
    theirs = AutoModelForSequenceClassification.from_pretrained(checkpoint(tmp_path / "run"))
    theirs.config.pad_token_id = None
    each = [row[mask.bool()] for row, mask in zip(batch.tokens, batch.mask, strict=True)]
    assert sum(int(row[-1]) == 0 for row in each) == 8
    scores = torch.cat([theirs(input_ids=row[None]).logits for row in each])
    assert loss == pytest.approx(F.cross_entropy(scores, batch.labels).item(), abs=1e-5)


@pytest.mark.parametrize("padding", ["left", "right"])
@pytest.mark.parametrize("truncation", ["left", "right"])
def test_batches_equal_those_of_the_transformers_tokenizer(
    folder: Path, tmp_path: Path, padding: str, truncation: str
) -> None:
    from transformers import AutoTokenizer

    sides = {"padding_side": padding, "truncation_side": truncation, "pad_token": "<end>"}
    model = copied(folder, tmp_path, {"pad_token_id": 12}, **sides)
    (batch,), _ = trained_on(folder, model, tmp_path / "run", "task.sequence_length=6")
    rows = [json.loads(line)["text"] for line in (folder / "data/train.jsonl").read_text().splitlines()]
    theirs = AutoTokenizer.from_pretrained(model)(
        rows, padding="max_length", truncation=True, max_length=6, return_tensors="pt"
    )
    found = {
        (*row, *mask) for row, mask in zip(theirs["input_ids"].tolist(), theirs["attention_mask"].tolist(), strict=True)
    }
    assert {(*row, *mask) for row, mask in zip(batch.tokens.tolist(), batch.mask.tolist(), strict=True)} <= found
    kept = json.loads((checkpoint(tmp_path / "run") / "state.json").read_text())["data_fingerprint"]
    assert (f"padding on the {padding}" in kept, "truncation on" in kept) == (padding == "left", truncation == "left")


def test_other_ids_of_transformers_are_reported(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = copied(folder, tmp_path, {}, tokenizer_class="BertTokenizer")
    trained_on(folder, model, tmp_path / "run")
    line = next(line for line in capsys.readouterr().out.splitlines() if "transformers (BertTokenizer)" in line)
    assert re.search(r"'.*' is \[[0-9, .]*\] in transformers and \[[0-9, .]*\] here", line)
