"""From somebody's own data to a model, as it is typed: prepare, train, and what the model takes along."""

import json
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import torch
import transformers

from serried import cli
from serried.recipes.data.prepared.prepare import open_prepared
from serried.recipes.data.tokenizers.hugging_face_tokenizer import train_tokenizer
from serried.recipes.data.tokenizers.tokenizer import hugging_face_files
from testing.forked_runs import typed_on
from tests.support.texts import many_files, write

WORDS = ["lorem", "ipsum", "dolor", "sit", "amet", "consectetur", "adipiscing", "elit"]


def dataset(folder: Path) -> Path:
    random = np.random.default_rng(3)
    texts = [" ".join(random.choice(WORDS, random.integers(5, 200))) for _ in range(300)]
    folder.mkdir()
    for part in range(2):
        table = pyarrow.table({"text": texts[part::2], "url": ["x"] * 150})
        pyarrow.parquet.write_table(table, folder / f"train-0000{part}-of-00002.parquet", row_group_size=40)
    return folder


@pytest.mark.slow
def test_the_llama_recipe_on_a_small_local_dataset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What ``recipe=llama1b`` does, with a folder for FineWeb-Edu, a tokenizer made here and a tiny model."""
    files = hugging_face_files(train_tokenizer(iter([" ".join(WORDS) * 50]), 290))
    argv = [
        "recipe=llama1b", f"data.path={dataset(tmp_path / 'set')}", "data.subset=null",
        f"data.tokenizer={write(tmp_path / 'tokenizer', dict(files))}", f"data.cache_dir={tmp_path / 'cache'}",
        "model=tiny", "model.vocab_multiple=128", "data.sequence_length=64", "trainer.steps=3",
        "trainer.global_batch=8", "trainer.log_every=1", "trainer.sample_tokens=5", f"run.dir={tmp_path / 'run'}",
        "launch.device=cpu",
    ]  # fmt: skip
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    done, _ = typed_on(2, "train.py", *argv)
    assert done.returncode == 0, done.stderr
    (saved,) = (tmp_path / "run/checkpoints").glob("step-*")
    for name, content in files.items():
        assert (saved / name).read_text("utf-8") == content
    size = len(transformers.AutoTokenizer.from_pretrained(saved))
    assert f"vocabulary {size} padded to 384" in done.stdout
    model = transformers.AutoModelForCausalLM.from_pretrained(saved)
    assert torch.isfinite(model(torch.tensor([[1, 2, 3]])).logits).all()
    assert model.config.vocab_size == 384


def prepared_by(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    assert cli.main(["prepare", *arguments]) == 0
    return capsys.readouterr().out


def test_prepare_reports_its_result(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    texts = [f"number {i} " * (1 + i % 40) for i in range(200)] + [""] * 7
    write(tmp_path / "rows", {"a.jsonl": "".join(json.dumps({"body": text}) + "\n" for text in texts)})
    arguments = ["data=text", f"data.path={tmp_path / 'rows'}", "data.text_column=body", "data.workers=2"]
    arguments += ["data.tokenizer=train", "data.vocab_size=280", f"data.cache_dir={tmp_path / 'cache'}"]
    out = prepared_by(arguments, capsys)
    (folder,) = (path for path in (tmp_path / "cache").iterdir() if path.name != "memos")
    train, validation = (open_prepared(folder).splits[split] for split in ("train", "validation"))
    assert str(folder) in out
    assert f"train {train.documents:,}, validation {validation.documents:,}; left out: 7 empty" in out
    assert train.documents + validation.documents == 200
    assert f"train {train.tokens:,}, validation {validation.tokens:,}" in out
    assert "280 ids; a document ends with 0 (<|end|>)" in out
    assert "  | number " in out
    rows = [line.rsplit(maxsplit=1)[-1] for line in out.splitlines() if " to " in line and "#" in line]
    assert sum(map(int, rows)) == train.documents
    again = prepared_by(arguments, capsys)
    assert again.startswith("folder ")
    assert out.endswith(again)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["data.workers=0"], "data.workers=0 leaves no thread"),
        (["data=text", "data.path=nowhere"], "data.path=nowhere does not exist"),
        (["data.tokenzier=bytes"], "did you mean data.tokenizer=bytes?"),
        (["model.vocab_size=100"], "model.vocab_size=100 but data.tokenizer=bytes has 257 ids"),
    ],
)
def test_mistakes_are_refused_in_one_line(
    tmp_path: Path, arguments: list[str], expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    text = [] if "data=text" in arguments else ["data=text", f"data.path={many_files(tmp_path / 'text')}"]
    assert cli.main(["prepare", f"data.cache_dir={tmp_path / 'cache'}", *text, *arguments]) == 78
    captured = capsys.readouterr()
    assert captured.err.startswith("error: ")
    assert len(captured.err.splitlines()) == 1
    assert expected in captured.err
    assert not captured.out


def test_interrupted_prepare_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("serried.recipes.data.prepared.prepare.write_shards", interrupt)
    text = many_files(tmp_path / "text")
    assert cli.main(["prepare", "data=text", f"data.path={text}", f"data.cache_dir={tmp_path / 'cache'}"]) == 75
    assert capsys.readouterr().err == "interrupted; run the same command to continue\n"
