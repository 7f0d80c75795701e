"""Hugging Face tokenizers: the ids that ``transformers`` gives, the marks of a document, what a model takes along."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from tokenizers import Tokenizer as Library
from tokenizers import processors

from serried.configs.compose import compose
from serried.configs.errors import UserError
from serried.recipes.data.chat.conversations import CHATML
from serried.recipes.data.prepared.prepare import prepare
from serried.recipes.data.tokenizers.hugging_face_tokenizer import (
    HuggingFaceTokenizer,
    find_tokenizer,
    tokenizer_from_spec,
    train_tokenizer,
)
from serried.recipes.data.tokenizers.tokenizer import hugging_face_files
from serried.recipes.text.causal_lm import CausalLM
from testing.rank_pool import ROOT
from tests.support.continuing import on_one_process
from tests.support.texts import documents, everything, many_files, section, write

WORDS = "the tokenizer learns pairs of bytes from this text, naïve as it is 漢字 "


@pytest.fixture(scope="module")
def files() -> dict[str, str]:
    """A tokenizer of 300 ids whose documents begin with a mark, as Llama's do, with a chat template."""
    trained = hugging_face_files(train_tokenizer(iter([WORDS * 20]), 300))
    library = Library.from_str(trained["tokenizer.json"])
    library.add_special_tokens(["<|begin|>"])
    begin = library.token_to_id("<|begin|>")
    library.post_processor = processors.TemplateProcessing(
        single="<|begin|> $A", pair="<|begin|> $A <|begin|> $B", special_tokens=[("<|begin|>", begin)]
    )
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|end|>", "bos_token": "<|begin|>"}
    config |= {"chat_template": "{{ messages[0].content }}", "clean_up_tokenization_spaces": False}
    return {"tokenizer.json": library.to_str(pretty=True), "tokenizer_config.json": json.dumps(config)}


@pytest.fixture(scope="module")
def folder(files: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("tokenizer"), dict(files))


def test_tokenizer_gives_the_ids_of_transformers(folder: Path) -> None:
    ours, theirs = find_tokenizer(str(folder)), transformers.AutoTokenizer.from_pretrained(folder)
    for text in (WORDS, "", " two  spaces\n\n\ttab", "🜁 é"):
        ids = [*ours.start_ids, *ours.encode(text).tolist()]
        assert ids == theirs(text)["input_ids"]
        assert ours.decode(ids) == text
    assert (ours.end, ours.end_id) == ("<|end|>", theirs.eos_token_id)
    assert ours.start_ids == (theirs.bos_token_id,)
    assert ours.vocab_size == len(theirs)
    assert ours.chat_template == "{{ messages[0].content }}"


def test_a_file_and_its_folder_are_the_same_tokenizer(folder: Path) -> None:
    whole = find_tokenizer(str(folder))
    assert find_tokenizer(str(folder / "tokenizer.json")).spec() == whole.spec()
    again = tokenizer_from_spec(json.loads(json.dumps(whole.spec())))
    assert again.spec() == whole.spec()
    assert np.array_equal(again.encode(WORDS), whole.encode(WORDS))


def test_text_of_a_special_token_is_encoded_as_text(folder: Path) -> None:
    tokenizer = find_tokenizer(str(folder))
    text = "before <|end|> after <|begin|>"
    assert not {tokenizer.end_id, *tokenizer.start_ids} & set(tokenizer.encode(text).tolist())
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.end_id in tokenizer.encode_marked(text)[0].tolist()


def test_decode_takes_any_id(folder: Path) -> None:
    tokenizer = find_tokenizer(str(folder))
    (known,) = tokenizer.encode("a").tolist()
    assert tokenizer.decode([known, -1, 99999, tokenizer.end_id, known]) == "a\ufffd\ufffda"


def test_documents_begin_and_end_with_the_special_tokens_of_the_tokenizer(folder: Path, tmp_path: Path) -> None:
    source = write(
        tmp_path / "rows", {"a.jsonl": "".join(json.dumps({"text": f"{WORDS}{i}"}) + "\n" for i in range(60))}
    )
    prepared = prepare(section(source, tmp_path / "cache", tokenizer=str(folder)))
    tokenizer, tokens = prepared.tokenizer, everything(prepared, "train")
    starts = prepared.stream("train").all_document_starts()
    assert set(tokens[starts].tolist()) == set(tokenizer.start_ids)
    assert set(tokens[starts[1:] - 1].tolist()) == {tokenizer.end_id}
    assert int(tokens[-1]) == tokenizer.end_id
    assert tokens.dtype == np.uint16
    assert documents(prepared, "train")[0].startswith(WORDS)


@pytest.mark.slow
def test_long_documents_decode_to_the_same_text(folder: Path, tmp_path: Path) -> None:
    text = "".join(f"word {i} " for i in range(120_000))
    source = write(tmp_path / "text", {"a.txt": text})
    prepared = prepare(section(source, tmp_path / "cache", tokenizer=str(folder)))
    assert "".join(documents(prepared, "train") + documents(prepared, "validation")) == text


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"eos_token": "<|begin|>"}, "<|begin|>"),
        ({"eos_token": {"content": "<|begin|>", "__type": "AddedToken"}}, "<|begin|>"),
        ({}, "<|end|>"),  # nothing says so: a usual name
    ],
)
def test_end_token_is_read_from_the_tokenizer_files(
    files: dict[str, str], config: dict[str, Any], expected: str
) -> None:
    tokenizer = HuggingFaceTokenizer({**files, "tokenizer_config.json": json.dumps(config)})
    assert tokenizer.end == expected


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"tokenizer.json": "{}"}, "not a tokenizer"),
        ({"tokenizer.json": b"\xff\xfe"}, "is not a tokenizer.json"),
        ({"tokenizer_config.json": '{"eos_token": "<|no|>"}'}, "eos_token '<|no|>' of tokenizer_config.json is not in"),
        ({"tokenizer.json": "[" * 100_000}, "not a tokenizer"),
        ({"tokenizer_config.json": "[]"}, "tokenizer_config.json is not a mapping"),
        ({"tokenizer_config.json": "[" * 100_000}, "tokenizer_config.json: nested deeper than 64 levels"),
        ({"tokenizer_config.json": '{"eos_token": ["a"]}'}, "eos_token ['a'] of tokenizer_config.json is not in"),
        ({"special_tokens_map.json": "3"}, "special_tokens_map.json is not a mapping"),
    ],
)
def test_folders_without_a_tokenizer_are_refused(
    files: dict[str, str], tmp_path: Path, change: dict[str, Any], expected: str
) -> None:
    write(tmp_path / "tokenizer", {**files, **change})
    with pytest.raises(UserError) as caught:
        prepare(section(many_files(tmp_path / "text"), tmp_path / "cache", tokenizer=str(tmp_path / "tokenizer")))
    assert expected in str(caught.value)
    assert "\n" not in str(caught.value)


def test_pipe_as_a_tokenizer_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "tokenizer.json")
    with pytest.raises(UserError, match=r"tokenizer\.json is not a regular file"):
        find_tokenizer(str(tmp_path))


def test_unavailable_tokenizers_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    for name, parts in (
        ("some-owner/some-name", ("not on this machine", "serried prepare", "data.tokenizer=FOLDER")),
        ("a/b/c", ("nor a valid name on the Hugging Face Hub",)),
        (str(write(tmp_path / "empty", {"x": ""})), ("has no tokenizer.json",)),
    ):
        with pytest.raises(UserError) as caught:
            find_tokenizer(name)
        assert all(part in str(caught.value) for part in parts), caught.value


# training -------------------------------------------------------------------------------------------------------------


def test_training_gives_the_same_bytes_each_time(tmp_path: Path) -> None:
    """In processes of their own, with different hash seeds and numbers of threads."""
    many_files(tmp_path / "text", 60)
    write(tmp_path / "text", {f"w{i}.txt": WORDS * i for i in range(40)})
    script = """
import sys
from serried.recipes.data.prepared.prepare import prepare
from tests.support.texts import section
prepared = prepare(section("text", sys.argv[1], tokenizer="train", vocab_size=400))
print((prepared.folder / "tokenizer.json").read_text())
"""
    printed = {
        subprocess.run(
            [sys.executable, "-c", script, str(tmp_path / f"cache{seed}")], cwd=tmp_path, capture_output=True,
            text=True, timeout=120, check=True, env={"PYTHONPATH": str(ROOT), "PYTHONHASHSEED": seed,
            "RAYON_NUM_THREADS": seed},
        ).stdout
        for seed in ("1", "3")
    }  # fmt: skip
    assert len(printed) == 1


def test_tokenizer_is_trained_only_on_training_text(tmp_path: Path) -> None:
    rare = [f"only{i:03d}" * 40 for i in range(60)]
    source = write(tmp_path / "rows", {"a.jsonl": "".join(json.dumps({"text": text}) + "\n" for text in rare)})
    prepared = prepare(section(source, tmp_path / "cache", tokenizer="train", vocab_size=4000, validation_fraction=0.3))
    pieces = {split: prepared.splits[split].tokens / prepared.splits[split].documents for split in prepared.splits}
    assert pieces["validation"] > 1.3 * pieces["train"]  # its numbers were not seen, and take a token a digit


def test_vocabulary_smaller_than_all_bytes_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"data\.vocab_size=100 is below 257"):
        prepare(section(many_files(tmp_path / "text"), tmp_path / "cache", tokenizer="train", vocab_size=100))


# the model ------------------------------------------------------------------------------------------------------------


def recipe(folder: Path, tmp_path: Path, *more: str) -> CausalLM:
    text = many_files(tmp_path / "text")
    argv = ["data=text", f"data.path={text}", f"data.cache_dir={tmp_path / 'cache'}", f"data.tokenizer={folder}", *more]
    made = CausalLM(compose(argv))
    made.open_data(made.prepare())
    return made


def test_padded_vocabulary_is_reported(folder: Path, tmp_path: Path) -> None:
    padded = recipe(folder, tmp_path, "model.vocab_multiple=128")
    assert padded.vocab_size() == 384
    assert "vocabulary 301 padded to 384" in padded.describe_model()
    assert recipe(folder, tmp_path).vocab_size() == 301
    with pytest.raises(UserError, match=r"model\.vocab_size=300 but data\.tokenizer=.* has 301 ids"):
        recipe(folder, tmp_path, "model.vocab_size=300").vocab_size()


def test_a_padded_id_is_never_generated(folder: Path, tmp_path: Path) -> None:
    made = recipe(folder, tmp_path, "model.vocab_multiple=128")

    class OnlyPadding(torch.nn.Module):
        def forward(self, tokens: torch.Tensor, cache: object) -> torch.Tensor:
            del cache
            logits = torch.full((*tokens.shape, 384), -5.0)
            logits[..., 301:] = 50.0
            return logits

    assert len(made.sample(on_one_process(OnlyPadding()), 40, 1)) > 10


def test_tokenizer_files_are_copied_unchanged_with_the_model(
    folder: Path, files: dict[str, str], tmp_path: Path
) -> None:
    out = tmp_path / "model"
    out.mkdir()
    recipe(folder, tmp_path, "model.vocab_multiple=128").export_files(out)
    for name, content in files.items():
        assert (out / name).read_text("utf-8") == content
    config = json.loads((out / "config.json").read_text())
    assert config["vocab_size"] == 384
    tokenizer = find_tokenizer(str(folder))
    assert ((config["bos_token_id"],), config["eos_token_id"]) == (tokenizer.start_ids, tokenizer.end_id)
    assert not (out / "generation_config.json").exists()


def test_special_ids_and_generation_settings_equal_the_base_model(folder: Path, tmp_path: Path) -> None:
    end = find_tokenizer(str(folder)).end_id
    base = shutil.copytree(folder, tmp_path / "base")
    made = transformers.LlamaConfig(vocab_size=320).to_dict() | {
        "bos_token_id": 2,
        "pad_token_id": 0,
        "eos_token_id": [7, end],
    }
    (base / "config.json").write_text(json.dumps(made))
    (base / "generation_config.json").write_text(json.dumps({"bos_token_id": 2, "temperature": 0.5}))
    out = tmp_path / "model"
    out.mkdir()
    recipe(folder, tmp_path, "model=auto", f"model.path={base}").export_files(out)
    config = json.loads((out / "config.json").read_text())
    assert [config[key] for key in ("bos_token_id", "pad_token_id", "eos_token_id")] == [2, 0, [7, end]]
    assert json.loads((out / "generation_config.json").read_text()) == {"bos_token_id": 2, "temperature": 0.5}


WITHOUT_MARKS = (
    "{% for each in messages %}{{ each.role + ': ' + each.content + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
WITH_A_SYSTEM = "{% if messages[0].role != 'system' %}{{ raise_exception('no') }}{% endif %}" + CHATML


@pytest.mark.parametrize(
    ("template", "ends"),
    [(CHATML, [7, 0, "<|im_end|>"]), (WITHOUT_MARKS, [7, 0]), (WITH_A_SYSTEM, [7, 0])],
)
@pytest.mark.parametrize("has_settings", [True, False])
def test_a_model_trained_on_conversations_ends_where_its_template_does(
    files: dict[str, str], tmp_path: Path, template: str, ends: list[Any], has_settings: bool
) -> None:
    library = Library.from_str(files["tokenizer.json"])
    library.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    settings = json.loads(files["tokenizer_config.json"]) | {"chat_template": template}
    made = {"tokenizer.json": library.to_str(), "tokenizer_config.json": json.dumps(settings)}
    end = find_tokenizer(str(write(tmp_path / "base", dict(made)))).end_id
    ids = [{0: end}.get(each, each) if isinstance(each, int) else library.token_to_id(each) for each in ends]
    config = transformers.LlamaConfig(vocab_size=330).to_dict() | {"eos_token_id": [7, end]}
    (tmp_path / "base/config.json").write_text(json.dumps(config))
    if has_settings:
        (tmp_path / "base/generation_config.json").write_text(json.dumps({"eos_token_id": [7, end]}))
    roles = ("system", "user", "assistant")
    rows = [[{"role": role, "content": f"{role} {number}"} for role in roles] for number in range(30)]
    lines = "".join(json.dumps({"messages": messages}) + "\n" for messages in rows)
    chats = write(tmp_path / "chats", {"a.jsonl": lines})
    out = tmp_path / "model"
    out.mkdir()
    recipe(
        tmp_path / "base", tmp_path, "model=auto", f"model.path={tmp_path / 'base'}", "data.format=chat",
        f"data.path={chats}", "data.validation_fraction=0.2",
    ).export_files(out)  # fmt: skip
    assert json.loads((out / "config.json").read_text())["eos_token_id"] == ids
    assert (out / "generation_config.json").exists() == has_settings
    if has_settings:
        assert json.loads((out / "generation_config.json").read_text())["eos_token_id"] == ids


def test_a_dry_run_needs_no_tokenizer_where_the_model_knows_its_size(tmp_path: Path) -> None:
    known = CausalLM(compose(["recipe=llama1b"]))
    assert known.vocab_size() == 128256
    assert "HuggingFaceFW/fineweb-edu sample-100BT, tokenizer meta-llama/Llama-3.1-8B" in known.describe_data()
    learned = CausalLM(compose(["data.tokenizer=train", "data.vocab_size=1000", f"data.cache_dir={tmp_path}"]))
    assert learned.vocab_size() == 1000
    assert not list(tmp_path.iterdir())


# what transformers does otherwise -------------------------------------------------------------------------------------


NEW = {"content": "<new>", "special": True, "lstrip": False, "rstrip": False, "normalized": False, "single_word": False}


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({}, None),
        ({"tokenizer_class": "GPT2Tokenizer"}, r"transformers has the tokens '<\|endoftext\|>'"),
        ({"tokenizer_class": "GPT2Tokenizer", "add_prefix_space": True}, "' a' is|'a' is"),
        ({"tokenizer_class": "LlamaTokenizer", "byte_level": False}, None),
        ({"added_tokens_decoder": {"300": NEW}}, "transformers has the tokens '<new>'"),
        ({"pad_token": "<pad>"}, "transformers has the tokens '<pad>'"),
    ],
)
def test_ids_that_differ_from_transformers_are_reported(
    files: dict[str, str], tmp_path: Path, settings: dict[str, Any], said: str | None
) -> None:
    config = json.loads(files["tokenizer_config.json"]) | settings
    mine = write(tmp_path / "mine", dict(files) | {"tokenizer_config.json": json.dumps(config)})
    ours, theirs = find_tokenizer(str(mine)), transformers.AutoTokenizer.from_pretrained(mine)
    assert isinstance(ours, HuggingFaceTokenizer)
    is_same = len(theirs) == ours.vocab_size and theirs("one two")["input_ids"] == [
        *ours.start_ids, *ours.encode("one two").tolist()
    ]  # fmt: skip
    assert is_same == (said is None)
    notes = recipe(mine, tmp_path).notes(starts_from_scratch=True)
    assert len(notes) == (said is not None)
    if said is None:
        return
    assert re.search(said, notes[0])
    command = re.search(r"python -c '(.*?)'", notes[0])
    assert command
    exec(command[1].replace("FOLDER", str(tmp_path / "theirs")))
    assert not recipe(tmp_path / "theirs", tmp_path).notes(starts_from_scratch=True)
    other = find_tokenizer(str(tmp_path / "theirs"))
    assert [*other.start_ids, *other.encode("one two").tolist()] == theirs("one two")["input_ids"]
