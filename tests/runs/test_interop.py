"""Checkpoints are Hugging Face models, and Hugging Face models are where fine-tuning starts."""

import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any, ClassVar
from unittest.mock import patch

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from serried.configs.compose import compose
from serried.configs.errors import UserError
from serried.configs.schema.declaration import BUILT_IN, declaring
from serried.recipes.classification.text_classification_config import TextClassSection
from serried.recipes.data.tokenizers.hugging_face_tokenizer import train_tokenizer
from serried.recipes.models.hugging_face.classifier import build_classifier
from serried.recipes.text.causal_lm import CausalLM
from serried.trainer.trainer import Trainer
from testing.rank_pool import Cluster
from testing.runs import checkpoint, metrics, run_here, tiny_overrides, train_reported, weights
from tests.support.texts import write

LAYOUTS = {"single": (1, "parallel=single"), "fsdp x2": (2, "parallel=fsdp")}
TOKENS = torch.randint(257, (2, 30), generator=torch.Generator().manual_seed(5))


def train_and_look(argv: list[str], out: str) -> int:
    """Train; what the model answers to ``TOKENS`` before the first step and after the last is written to ``out``."""
    steps = Trainer.steps

    def answer(trainer: Trainer) -> Tensor:
        with torch.no_grad():
            logits: Tensor = trainer.state.parallel.model(TOKENS)
        trainer.state.parallel.reshard()
        return logits.contiguous()

    def watched(self: Trainer) -> Iterator[int]:
        first = answer(self)
        yield from steps(self)
        last = answer(self)
        if self.context.session.is_main:
            save_file({"first": first, "last": last}, out)

    with patch.object(Trainer, "steps", watched):
        return train_reported(argv)


def tuning(text: Path, run_dir: Path, *more: str) -> list[str]:
    """A run whose model is that of a folder."""
    fixed = ("model.", "data.tokenizer=bytes", *(word.partition("=")[0] for word in more))
    return [word for word in tiny_overrides(text, run_dir) if not word.startswith(fixed)] + [
        "data.tokenizer=bytes",
        *more,
    ]


def train(cluster: Cluster, layout: str, argv: list[str], run_dir: Path) -> dict[str, Tensor]:
    """The logits before and after."""
    ranks, how = LAYOUTS[layout]
    out = str(run_dir.with_suffix(".logits"))
    for answer in cluster.run(ranks, "tests.runs.test_interop:train_and_look", argv=[*argv, how], out=out):
        assert answer.value == 0, answer.printed
    return load_file(out)


def opened(folder: Path, **keywords: Any) -> Any:
    import transformers

    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **keywords).eval()


def answer(model: Any) -> Tensor:
    with torch.no_grad():
        logits: Tensor = model(TOKENS).logits
    assert logits.std() > 0.01, "a flat output would compare equal to anything"
    return logits


# from here to transformers --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("layout", "tied"), [("single", "false"), ("fsdp x2", "true")])
def test_transformers_opens_a_checkpoint_unchanged(
    layout: str, tied: str, cluster: Cluster, text: Path, tmp_path: Path
) -> None:
    how = [f"model.tie_embeddings={tied}", "model.layers=2", "optim.lr=0.03", "schedule=constant"]
    logits = train(cluster, layout, tiny_overrides(text, tmp_path / "run", *how), tmp_path / "run")
    assert not logits["first"].allclose(logits["last"], atol=1e-2)
    files = list(checkpoint(tmp_path / "run").glob("model*.safetensors"))
    assert len(files) == LAYOUTS[layout][0]
    model = opened(checkpoint(tmp_path / "run"))
    torch.testing.assert_close(answer(model), logits["last"], rtol=0, atol=1e-5)


# from transformers to here --------------------------------------------------------------------------------------------

LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 20000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 1048576 // 2**16,
}  # fmt: skip
MODELS = {
    "float32 in files": (torch.float32, "20KB", {}),
    "bfloat16 tied in one file": (torch.bfloat16, "1GB", {"tie_word_embeddings": True}),
    "float16 tied in files with llama3": (
        torch.float16, "20KB", {"tie_word_embeddings": True, "rope_parameters": LLAMA3, "rms_norm_eps": 1e-6},
    ),
    "bfloat16 in files with other heads": (torch.bfloat16, "30KB", {"head_dim": 16, "num_key_value_heads": 1}),
}  # fmt: skip


def make(folder: Path, name: str) -> Path:
    """A random model, saved by transformers."""
    import transformers

    dtype, size, changes = MODELS[name]
    values: dict[str, Any] = {
        "vocab_size": 300, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "intermediate_size": 56, "max_position_embeddings": 256, "initializer_range": 0.2,
    }  # fmt: skip
    torch.manual_seed(3)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**values | changes)).to(dtype)
    model.save_pretrained(folder, max_shard_size=size)
    assert (len(list(folder.glob("*.safetensors"))) > 1) == (size != "1GB")
    return folder


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(tmp_path_factory.mktemp("plain") / "model", "float32 in files")


def refusal(text: Path, run_dir: Path, *more: str) -> str:
    """The one line that refuses the command; what the run folder holds stays."""
    before = {path: path.stat().st_mtime_ns for path in run_dir.rglob("*") if path.is_file() and path.name != ".lock"}
    line = run_here(tuning(text, run_dir, *more)).error
    after = {path: path.stat().st_mtime_ns for path in run_dir.rglob("*") if path.is_file() and path.name != ".lock"}
    assert after == before
    return line


@pytest.mark.parametrize(
    ("name", "layout", "key"),
    [
        ("float32 in files", "single", "checkpoint.resume"),
        ("bfloat16 tied in one file", "fsdp x2", "model.path"),
        ("float16 tied in files with llama3", "single", "model.path"),
        ("bfloat16 in files with other heads", "fsdp x2", "checkpoint.resume"),
    ],
)
def test_fine_tuning_starts_from_what_transformers_saved(
    name: str, layout: str, key: str, cluster: Cluster, text: Path, tmp_path: Path
) -> None:
    theirs = make(tmp_path / "model", name)
    argv = tuning(text, tmp_path / "run", f"{key}={theirs}", "trainer.steps=2", "optim.lr=0")
    logits = train(cluster, layout, argv, tmp_path / "run")
    model = opened(theirs)
    expected = answer(model)
    torch.testing.assert_close(logits["first"], expected, rtol=0, atol=1e-5)
    assert torch.equal(logits["last"], logits["first"])
    assert metrics(tmp_path / "run", "start")[0]["resumed_from"] is None
    back = opened(checkpoint(tmp_path / "run"))
    assert torch.equal(answer(back), expected)
    there, here = model.state_dict(), back.state_dict()
    assert there.keys() == here.keys()
    assert all(here[name].equal(there[name]) for name in there)


@pytest.mark.parametrize("key", ["model.path", "checkpoint.resume"])
def test_a_fine_tuning_run_resumes_from_its_own_checkpoints(key: str, plain: Path, text: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(plain, tmp_path / "model")
    argv = tuning(text, tmp_path / "run", f"{key}={folder}")
    assert run_here([*argv, "trainer.stop_at=2"]).code == 75
    assert run_here([*argv, "trainer.stop_at=4"]).code == 75
    shutil.rmtree(folder)  # the model that the run began with may be gone by then
    assert run_here(argv).code == 0
    assert [line["resumed_from"] for line in metrics(tmp_path / "run", "start")] == [None, 2, 4]


def changed(folder: Path, to: Path, **changes: Any) -> Path:
    """A copy with another config.json; None: without that key."""
    shutil.copytree(folder, to)
    config = json.loads((to / "config.json").read_text()) | changes
    text = json.dumps({key: value for key, value in config.items() if value is not None})
    (to / "config.json").write_text(text.replace('"null"', "null"))
    return to


@pytest.mark.parametrize(
    ("changes", "key", "value"),
    [
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 12345.678}}, "rope_theta", 12345.678),
        ({"rope_parameters": None, "rope_theta": 5e6}, "rope_theta", 5e6),
        ({"num_attention_heads": 8, "head_dim": 8}, "heads", 8),
        ({"num_key_value_heads": None}, "kv_heads", 4),
        ({"rms_norm_eps": 1.5e-7}, "norm_eps", 1.5e-7),
        ({"num_hidden_layers": 3}, "layers", 3),
        (
            {"rope_parameters": LLAMA3 | {"factor": 8.123456789, "original_max_position_embeddings": 1048576}},
            "rope_scaling",
            {
                "factor": 8.123456789,
                "low_freq_factor": 1,
                "high_freq_factor": 4,
                "original_max_sequence_length": 1048576,
            },
        ),
        (
            {"rope_parameters": None, "rope_theta": 1e4, "rope_scaling": {**LLAMA3, "factor": 32}},
            "rope_scaling",
            {"factor": 32, "low_freq_factor": 1, "high_freq_factor": 4, "original_max_sequence_length": 16},
        ),
    ],
)
def test_architecture_is_read_from_config_json(
    changes: dict[str, Any], key: str, value: Any, plain: Path, tmp_path: Path
) -> None:
    folder = changed(plain, tmp_path / "model", **changes)
    config = compose(["recipe=sft", f"model.path={folder}", "data.path=chats.jsonl", "data.sequence_length=256"])
    assert config.model.model_dump()[key] == value
    assert (config.model.name, config.data.tokenizer) == ("model", str(folder))
    resumed = compose(["recipe=sft", f"checkpoint.resume={folder}", "data.path=x", "data.sequence_length=256"])
    assert resumed.model == config.model


def test_only_keys_that_contradict_the_folder_are_refused(plain: Path) -> None:
    path, length = f"model.path={plain}", "data.sequence_length=256"
    fitting = [
        "model=auto", "model.dim=32", "model.tie_embeddings=false", "model.rope_theta=1e4", "model.kv_heads=null",
        "model.max_sequence_length=1k",
    ]  # fmt: skip
    assert compose([path, "data.sequence_length=512", *fitting]).model.max_sequence_length == 1000
    with pytest.raises(UserError) as caught:
        compose([path, length, "model.dim=64", "model.layers=2", "model.heads=8"])
    assert f"model.path={plain} has model.dim=32, model.heads=4, so the weights do not fit" in str(caught.value)
    assert str(caught.value).endswith("leave model.dim=64 model.heads=8 out")
    with pytest.raises(UserError, match=r"model\.dim=32, model\.layers=2, .*leave model=llama1b out"):
        compose([path, length, "model=llama1b"])
    with pytest.raises(UserError, match=r"model=auto needs .*model\.path=FOLDER_OR_NAME"):
        compose(["model=auto"])


def test_the_tokenizer_of_the_folder_is_used_unless_another_is_named(plain: Path) -> None:
    path, length = f"model.path={plain}", "data.sequence_length=256"
    assert compose(["recipe=llama1b", path, length]).data.tokenizer == str(plain), "not that of the recipe"
    assert compose([path, length, "data.tokenizer=bytes"]).data.tokenizer == "bytes"
    with pytest.raises(UserError, match=r"the folder has no tokenizer\.json"):
        CausalLM(compose([path, length])).prepare()


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"model_type": "mistral3"}, "mistral3, which no model family supports; the nearest is mistral; supp"),
        ({"model_type": "bert"}, "model_type bert, which no model family supports; supported: llama"),
        ({"attention_bias": True}, "config.json has attention_bias True; only False is supported"),
        ({"mlp_bias": True}, "config.json has mlp_bias True"),
        ({"hidden_act": "gelu"}, "config.json has hidden_act gelu; only silu"),
        ({"rope_parameters": {"rope_type": "mrope", "factor": 2.0}}, "config.json has rope_type mrope"),
        ({"rope_parameters": {"rope_type": "llama3", "factor": 2.0}}, "has rope_type llama3 without low_freq"),
        (
            {"hidden_size": None},
            "tensors have other shapes (model.embed_tokens.weight has shape [300, 32], not [300, 4096]",
        ),
        ({"rms_norm_eps": "null"}, "config.json has rms_norm_eps null, but transformers"),
        ({"pad_token_id": "<pad>"}, 'config.json has pad_token_id "<pad>"; use a number'),
        ({"pad_token_id": [0]}, "config.json has pad_token_id [0]; use a number"),
        ({"rope_parameters": {"rope_theta": "1e4"}}, 'config.json has rope_parameters.rope_theta "1e4"; use a number'),
        ({"pad_token_id": 300}, "model.padding_token=300 (pad_token_id of the config.json in model.path="),
    ],
)
def test_model_that_no_override_can_fix_is_refused(
    changes: dict[str, Any], told: str, plain: Path, text: Path, tmp_path: Path
) -> None:
    folder = changed(plain, tmp_path / "model", **changes)
    assert told in refusal(text, tmp_path / "run", f"model.path={folder}")


def test_folders_without_a_model_are_refused_and_nothing_is_moved(plain: Path, text: Path, tmp_path: Path) -> None:
    run_dir, folder = tmp_path / "run", tmp_path / "model"
    path = f"model.path={folder}"
    assert run_here(tiny_overrides(text, run_dir, "trainer.stop_at=1")).code == 75
    shutil.copytree(plain, folder)
    first = min(folder.glob("*.safetensors"))
    content = first.read_bytes()
    resume = f"checkpoint.resume={folder}"
    first.write_bytes(content[:-5])
    assert f"{first} cannot be used" in refusal(text, run_dir, resume)
    first.unlink()
    assert "which does not exist; copy that file too" in refusal(text, run_dir, resume)
    for file in folder.glob("*.safetensors*"):
        file.unlink()
    (folder / "pytorch_model.bin").write_bytes(b"PK\x03\x04")
    assert "'pytorch_model.bin' is a pickle, which is never loaded; if you" in refusal(text, run_dir, resume)
    config = (folder / "config.json").read_text()
    for text_ in ("[]", "{", "null"):
        (folder / "config.json").write_text(text_)
        assert f"{folder / 'config.json'} " in refusal(text, run_dir, path)
    (folder / "config.json").write_text(config.replace(": 32", ": []", 1))
    assert "has hidden_size []; use a number" in refusal(text, run_dir, path)
    (folder / "config.json").unlink()
    assert f"cannot read {folder / 'config.json'}: No such file" in refusal(text, run_dir, path)
    for step in ("step-00000005", "step-00000010"):
        (folder / "checkpoints" / step).mkdir(parents=True)
        (folder / "checkpoints" / step / "config.json").touch()
    saved = folder / "checkpoints" / "step-00000010"
    assert f"{path} is a run; use one of its checkpoints: model.path={saved}" in refusal(text, run_dir, path)
    shutil.rmtree(folder / "checkpoints")
    assert f"{folder / 'config.json'} does not exist" in refusal(text, run_dir, resume, "model.max_sequence_length=8k")


def test_other_tensors_than_the_config_says_are_refused_and_nothing_is_moved(
    plain: Path, text: Path, tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    assert run_here(tiny_overrides(text, run_dir, "trainer.stop_at=1")).code == 75
    folder = changed(plain, tmp_path / "model", num_hidden_layers=3)
    line = refusal(text, run_dir, f"checkpoint.resume={folder}")
    assert "9 tensors of the model are missing (model.layers.2.input_layernorm.weight" in line


def test_a_run_with_another_default_resumes_by_the_override_that_is_offered(
    plain: Path, text: Path, tmp_path: Path
) -> None:
    """As one that began when the default of the key was another."""
    rope = {"rope_type": "default", "rope_theta": 500.0}
    scaled = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    folder = changed(
        plain, tmp_path / "model", model_type="mistral", sliding_window="null", rope_parameters=rope, rope_scaling=None
    )
    argv = tuning(text, tmp_path / "run", f"model.path={folder}")
    assert run_here([*argv, "trainer.stop_at=2"]).code == 75
    shutil.rmtree(folder)
    changed(plain, folder, model_type="mistral", rope_parameters=None, rope_scaling=scaled, pad_token_id=101)
    line = refusal(text, tmp_path / "run", f"model.path={folder}")
    assert "would change the run: model.padding_token null -> 101; model.rope_scaling.factor null -> 8.0; " in line
    assert "model.rope_theta 500.0 -> 10000.0; model.sliding_window null -> 4096; use" in line
    offered = "model.padding_token=null model.rope_scaling=null model.rope_theta=500.0 model.sliding_window=null"
    assert f"{offered} to resume as it began" in line
    assert run_here([*argv, *offered.split()]).code == 0
    assert [line["resumed_from"] for line in metrics(tmp_path / "run", "start")] == [None, 2]
    assert compose([*argv, *offered.split()]).model.rope_theta == 500.0
    other = [f"run.dir={tmp_path / 'other'}", f"checkpoint.resume={tmp_path / 'run'}"]
    elsewhere = compose([*argv, *other, *offered.split()]).model
    assert (elsewhere.rope_theta, elsewhere.rope_scaling, elsewhere.sliding_window) == (500.0, None, None)


@pytest.mark.parametrize("choice", ["auto", "hf"])
def test_the_row_of_the_padding_token_starts_at_zero_and_stays_there(
    choice: str, plain: Path, text: Path, tmp_path: Path
) -> None:
    """As in transformers, whose embedding has a ``padding_idx``."""
    folder, space = changed(plain, tmp_path / "model", pad_token_id=ord(" ")), ord(" ")
    more = [f"model={choice}", f"model.path={folder}", "model.pretrained=false", "trainer.steps=2"]
    assert run_here(tuning(text, tmp_path / "run", *more)).code == 0
    rows = weights(tmp_path / "run")["model.embed_tokens.weight"]
    assert not rows[space].any()
    assert rows[space + 1].any()
    assert opened(checkpoint(tmp_path / "run")).get_input_embeddings().padding_idx == space


def retied(folder: Path, to: Path, *, twice: bool) -> Path:
    """A copy of the tied model in ``folder`` whose file has another head too, or a head alone."""
    changed(folder, to, tie_word_embeddings=True)
    tensors = load_file(to / "model.safetensors")
    embedding = next(name for name in tensors if name.endswith(("embed_tokens.weight", "wte.weight")))
    other = torch.randn(tensors[embedding].shape, generator=torch.Generator().manual_seed(1))
    tensors["lm_head.weight"] = other if twice else tensors.pop(embedding)
    save_file(tensors, to / "model.safetensors", {"format": "pt"})
    return to


def make_gpt2(folder: Path) -> None:
    import transformers

    config = transformers.GPT2Config(vocab_size=300, n_embd=32, n_layer=1, n_head=2, n_positions=64)
    transformers.GPT2LMHeadModel(config).save_pretrained(folder)


@pytest.mark.parametrize("twice", [True, False])
@pytest.mark.parametrize("choice", ["llama", "gpt2", "hf"])
def test_a_tied_model_with_a_head_in_its_file_is_that_of_transformers(
    choice: str, twice: bool, text: Path, tmp_path: Path
) -> None:
    if choice == "gpt2":
        make_gpt2(tmp_path / "model")
    else:
        make(tmp_path / "model", "bfloat16 tied in one file")
    folder = retied(tmp_path / "model", tmp_path / "retied", twice=twice)
    argv = tuning(
        text, tmp_path / "run", f"model.path={folder}", "trainer.steps=1", "optim.lr=0", "optim.weight_decay=0"
    )
    argv += ["model=hf"] if choice == "hf" else []
    out = str(tmp_path / "logits")
    assert train_and_look(argv, out) == 0
    torch.testing.assert_close(load_file(out)["first"], answer(opened(folder)), rtol=0, atol=1e-5)
    torch.testing.assert_close(answer(opened(checkpoint(tmp_path / "run"))), answer(opened(folder)), rtol=0, atol=1e-5)


def test_a_head_that_differs_from_the_embedding_it_is_tied_to_is_refused(text: Path, tmp_path: Path) -> None:
    """If the user ties it."""
    folder = retied(make(tmp_path / "model", "bfloat16 tied in one file"), tmp_path / "retied", twice=True)
    line = refusal(text, tmp_path / "run", f"model.path={folder}", "model.tie_embeddings=true")
    assert "has different values for model.embed_tokens.weight and lm_head.weight" in line
    assert "use model.tie_embeddings=false" in line
    tensors = load_file(folder / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    assert compose(tuning(text, tmp_path / "run", f"model.path={folder}")).model.tie_embeddings
    assert run_here(tuning(text, tmp_path / "run", f"model.path={folder}", "trainer.steps=1")).code == 0


def test_sequences_are_no_longer_than_the_model_takes_unless_the_length_is_typed(plain: Path, tmp_path: Path) -> None:
    for recipe in ("lora", "dpo"):
        argv = [f"recipe={recipe}", f"model.path={plain}", "data.path=rows.jsonl"]
        assert compose(argv).data.sequence_length == 256, "that of the model"
        assert compose([*argv, "data.sequence_length=100"]).data.sequence_length == 100
        with pytest.raises(UserError, match=r"data\.sequence_length=257 exceeds model\.max_sequence_length=256"):
            compose([*argv, "data.sequence_length=257"])
    assert compose(["recipe=llama1b", "model=gpt2"]).data.sequence_length == 1024
    (tmp_path / "recipe").mkdir()
    own = "# @package _global_\ndefaults: [sft, _self_]\ndata: {sequence_length: 257}\n"
    (tmp_path / "recipe/own.yaml").write_text(own)
    with declaring(BUILT_IN._replace(config_dirs=(tmp_path,))):
        argv = ["recipe=own", f"model.path={plain}", "data.path=rows.jsonl"]
        with pytest.raises(UserError, match=r"data\.sequence_length=257"):
            compose(argv)
        (tmp_path / "recipe/own.yaml").write_text(f"\ufeff{own}")
        with pytest.raises(
            UserError, match=r"own\.yaml begins with a byte order mark, .*; save the file as UTF-8 without"
        ):
            compose(argv)


def test_a_folder_of_adapters_as_a_model_is_answered_with_the_model_that_they_adapt(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text('{"base_model_name_or_path": "owner/base"}')
    told = r"contains adapters .*; use their base model, model\.path=owner/base, with adapter=lora"
    with pytest.raises(UserError, match=told):
        compose(["recipe=sft", f"model.path={tmp_path}", "data.path=rows.jsonl"])


def test_a_tokenizer_with_more_ids_than_the_model_has_rows_is_answered_with_what_helps(
    plain: Path, text: Path, tmp_path: Path
) -> None:
    folder = changed(plain, tmp_path / "model", vocab_size=256)
    line = refusal(text, tmp_path / "run", f"model.path={folder}")
    assert f"data.tokenizer=bytes has 257 ids, but the embedding of model.path={folder} has only 256 rows" in line
    assert "use a tokenizer without the last 1 ids" in line


@pytest.mark.parametrize(
    "changes",
    [
        {"num_hidden_layers": 10_000_000},
        {"hidden_size": 10**9},
        {"num_labels": 10**9},
        {"vision_config": {"depths": [2, 5000]}},
    ],
)
def test_a_model_of_a_size_that_none_has_is_refused_before_it_is_built(
    changes: dict[str, Any], plain: Path, tmp_path: Path
) -> None:
    folder = changed(plain, tmp_path / "model", **changes)
    with pytest.raises(UserError, match=r"more than the supported maximum of \d+; use another model"):
        compose(["model=hf", f"model.path={folder}", "data.sequence_length=256"])
    section = TextClassSection(model=str(folder), path=str(tmp_path))
    with pytest.raises(UserError, match=r"more than the supported maximum of \d+"):
        build_classifier(section, ["one", "two"], "SequenceClassification", {})


def test_a_value_of_the_models_folder_is_not_said_to_be_of_a_preset(plain: Path, tmp_path: Path) -> None:
    folder = changed(plain, tmp_path / "model", num_hidden_layers=10_000_000)
    with pytest.raises(UserError) as caught:
        compose([f"model.path={folder}", "data.sequence_length=256"])
    assert str(caught.value).startswith(f"model.layers=10000000 (config.json of {folder}) is out of range: ")


# from the Hub ---------------------------------------------------------------------------------------------------------


class Hub(BaseHTTPRequestHandler):
    """What huggingface_hub asks of the Hub to download a model; the class attribute ``folder`` is the model."""

    folder: Path
    asked: ClassVar[list[str]] = []
    protocol_version = "HTTP/1.1"

    def do_HEAD(self) -> None:
        self._answer(has_body=False)

    def do_GET(self) -> None:
        self._answer(has_body=True)

    def _answer(self, *, has_body: bool) -> None:
        file = self.folder / self.path.rpartition("/resolve/")[2].partition("/")[2]
        self.asked.append(str(file.relative_to(self.folder)))
        if self.path.startswith("/api/models/owner/name"):
            files = [
                {
                    "rfilename": path.name,
                    "path": path.name,
                    "type": "file",
                    "size": path.stat().st_size,
                    "oid": "0" * 40,
                }
                for path in self.folder.iterdir()
            ]
            model = {"id": "owner/name", "sha": "0" * 40, "siblings": files}
            status, content = 200, json.dumps(files if "/tree/" in self.path else model).encode()
        elif self.path.startswith("/owner/name/resolve/") and file.is_file():
            status, content = 200, file.read_bytes()
        else:
            status, content = 404, b""
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.send_header("ETag", f'"{hashlib.sha1(content).hexdigest()}"')
        self.send_header("X-Repo-Commit", "0" * 40)
        if status == 404:
            self.send_header("X-Error-Code", "EntryNotFound" if "owner/name" in self.path else "RepoNotFound")
        self.end_headers()
        self.wfile.write(content if has_body else b"")

    def log_message(self, *_: object) -> None:
        pass


@pytest.mark.slow
def test_a_model_of_the_hub_is_downloaded_and_trained(text: Path, tmp_path: Path) -> None:
    assert run_here(tiny_overrides(text, tmp_path / "made", "trainer.steps=1")).code == 0
    Hub.folder = retied(checkpoint(tmp_path / "made"), tmp_path / "retied", twice=True)
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    Thread(target=server.serve_forever, daemon=True).start()
    try:
        argv = [word for word in tuning(text, tmp_path / "run", "model.path=owner/name") if "tokenizer" not in word]
        surroundings = {
            "HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}", "HF_HOME": str(tmp_path / "home"),
            "HF_HUB_DISABLE_XET": "1", "HF_HUB_OFFLINE": "0",
        }  # fmt: skip
        command = [
            sys.executable,
            "train.py",
            *argv,
            "trainer.steps=2",
            "optim.lr=0",
        ]  # the Hub's library reads them once
        environment = os.environ | surroundings
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    finally:
        server.shutdown()
        server.server_close()
    assert done.returncode == 0, done.stdout + done.stderr
    there, tuned = load_file(Hub.folder / "model.safetensors"), weights(tmp_path / "run")
    assert tuned.keys() == there.keys(), "a head that is tied in config.json, with values of its own"
    assert all(tuned[name].equal(tensor) for name, tensor in there.items())


@pytest.mark.parametrize("has_template", [True, False])
def test_cached_tokenizer_without_its_template_for_tools_is_completed_once(tmp_path: Path, has_template: bool) -> None:
    own = train_tokenizer(iter(["some text " * 20]), 260).spec()["files"]
    file = "additional_chat_templates/tool_use.jinja"
    Hub.folder = write(tmp_path / "tokenizer", own | ({file: "{{ tools }}"} if has_template else {}))
    Hub.asked.clear()
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    Thread(target=server.serve_forever, daemon=True).start()
    script = f"""
from huggingface_hub import hf_hub_download
for name in {[*own]}:
    hf_hub_download("owner/name", name)
from serried.recipes.data.tokenizers.hugging_face_tokenizer import find_tokenizer
for _ in range(2):
    print(find_tokenizer("owner/name").chat_templates)
"""
    environment = {
        "HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}", "HF_HOME": str(tmp_path / "home"),
        "HF_HUB_DISABLE_XET": "1", "HF_HUB_OFFLINE": "0",
    }  # fmt: skip
    try:
        done = subprocess.run(
            [sys.executable, "-c", script], env=os.environ | environment, capture_output=True, text=True, timeout=120,
            check=False,
        )  # fmt: skip
    finally:
        server.shutdown()
        server.server_close()
    found = {"tool_use": "{{ tools }}"} if has_template else {}
    assert done.stdout.splitlines() == [str(found)] * 2, done.stderr
    assert Hub.asked.count(file) == (2 if has_template else 1)  # its header, and its content


def test_a_name_that_cannot_be_downloaded_is_answered_with_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(UserError) as caught:
        compose(["recipe=sft", "model.path=owner/name", f"data.path={tmp_path}"])
    assert "hf download owner/name --local-dir FOLDER, then use model.path=FOLDER" in str(caught.value)
