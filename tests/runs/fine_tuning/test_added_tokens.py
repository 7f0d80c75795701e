"""Added tokens: embedding and head get rows for them on any layout, and other software opens the result."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from serried.commands import export_models
from serried.configs.errors import UserError
from serried.configs.schema.sections import AdapterSection
from serried.parallel.layout.mesh import Layout
from serried.recipes.data.tokenizers.hugging_face_tokenizer import (
    HuggingFaceTokenizer,
    find_tokenizer,
    named_tokenizer,
    train_tokenizer,
)
from serried.recipes.data.tokenizers.tokenizer import hugging_face_files
from serried.recipes.text.causal_lm import CausalLM
from serried.recipes.text.vocabulary import notes_of_added_tokens
from serried.saved import as_saved, config_of_model
from serried.trainer.evaluation.evaluate import load_model
from testing import runs
from testing.rank_pool import Cluster
from tests.support.texts import section

SIZES = {
    "hidden_size": 32, "num_hidden_layers": 2, "intermediate_size": 48, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 256,
}  # fmt: skip
TOOL, END = "<tool>", "<|end_of_tool|>"
ADDED = [f"data.add_tokens=[{TOOL}]", f"data.add_special_tokens=[{END}]"]
LAYOUTS = {
    "fsdp": ["parallel=fsdp"],
    "tensor": ["parallel=fsdp", "parallel.tensor=2"],
    "pipeline": ["parallel=fsdp", "parallel.pipeline=2", "trainer.micro_batch=1"],
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Model folders as transformers writes them, with and without tied embeddings, and conversations."""
    import transformers

    folder = tmp_path_factory.mktemp("models")
    calls = [{"role": "user", "content": f"{number} + 1?"} for number in range(40)]
    replies = [{"role": "assistant", "content": f"{TOOL}add({number}, 1)"} for number in range(40)]
    rows = [{"messages": list(turns)} for turns in zip(calls, replies, strict=True)]
    (folder / "chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    tokenizer = train_tokenizer(iter([json.dumps(rows)]), 300)
    for name, is_tied in (("untied", False), ("tied", True)):
        torch.manual_seed(3)
        config = transformers.LlamaConfig(
            vocab_size=tokenizer.vocab_size, tie_word_embeddings=is_tied, bos_token_id=0, eos_token_id=0, **SIZES
        )
        transformers.LlamaForCausalLM(config).save_pretrained(folder / name)
        for file, content in tokenizer.spec()["files"].items():
            (folder / name / file).write_text(content)
    return folder


def tuned(models: Path, run_dir: Path, *more: str, model: str = "untied") -> list[str]:
    given = [
        "recipe=sft", f"model.path={models / model}", f"data.path={models / 'chats.jsonl'}",
        f"data.cache_dir={models / 'cache'}", f"run.dir={run_dir}", "precision=fp32", "data.sequence_length=64",
        "data.isolate_documents=false", "trainer.steps=3", "trainer.global_batch=4", "trainer.micro_batch=2",
        "trainer.eval_every=0", "trainer.log_every=1", "data.workers=0", "optim.lr=0.01", "schedule=constant",
        "schedule.warmup_steps=0", "adapter.rank=4", "adapter.alpha=8", *ADDED, *more,
    ]  # fmt: skip
    if not any(word.startswith("adapter=") or word == "recipe=lora" for word in more):
        given = [word for word in given if not word.startswith("adapter.")]
    return [f"{key}={value}" for key, value in dict(word.split("=", 1) for word in given).items()]


def trained(cluster: Cluster, argv: list[str], run_dir: Path, ranks: int = 2) -> list[float]:
    answers = cluster.run(ranks, "testing.runs:train_reported", argv=argv)
    assert {answer.value for answer in answers} == {0}, answers[0].printed
    return runs.losses(run_dir)


def rows_in(folder: Path) -> int:
    return int(json.loads((folder / "config.json").read_text())["vocab_size"])


def opened(folder: Path) -> Any:
    import transformers

    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def single(models: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[float]]:
    run_dir = tmp_path_factory.mktemp("single") / "run"
    ended = runs.run_here(tuned(models, run_dir))
    assert ended.code == 0, ended.printed
    before = rows_in(models / "untied")
    assert f"vocabulary {before}, resized to {before + 2}" in ended.printed
    return run_dir, runs.losses(run_dir)


def expected_rows(weight: Tensor, rows: int) -> Tensor:
    mean = weight.double().mean(dim=0, keepdim=True).float()
    return torch.cat((weight, mean.expand(rows - len(weight), -1)))


def start(models: Path, run_dir: Path, *more: str, model: str) -> list[str]:
    return tuned(models, run_dir, "optim.lr=0", "trainer.steps=1", "model.vocab_multiple=8", *more, model=model)


SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in ("fsdp", "pipeline")]


@pytest.mark.parametrize("model", ["untied", "tied"])
@pytest.mark.parametrize("layout", ["one process", "tensor", *SLOW])
def test_added_rows_of_any_layout_start_at_the_mean_of_the_others(
    cluster: Cluster, models: Path, tmp_path: Path, layout: str, model: str
) -> None:
    argv = start(models, tmp_path / "run", *LAYOUTS.get(layout, []), model=model)
    trained(cluster, argv, tmp_path / "run", 2 if layout in LAYOUTS else 1)
    before, after = load_file(models / model / "model.safetensors"), runs.weights(tmp_path / "run")
    rows = -(-(rows_in(models / model) + 2) // 8) * 8
    assert after.keys() == before.keys()
    for name, weight in before.items():
        is_resized = name in ("model.embed_tokens.weight", "lm_head.weight")
        assert after[name].equal(expected_rows(weight, rows) if is_resized else weight), name


@pytest.mark.slow
@pytest.mark.parametrize("layout", [*LAYOUTS])
def test_losses_with_added_tokens_of_two_ranks_equal_those_of_one(
    cluster: Cluster, models: Path, tmp_path: Path, single: tuple[Path, list[float]], layout: str
) -> None:
    argv = tuned(models, tmp_path / "run", *LAYOUTS[layout])
    assert trained(cluster, argv, tmp_path / "run") == pytest.approx(single[1], abs=1e-5)


def test_transformers_opens_the_tokenizer_and_the_model_with_added_tokens(
    models: Path, tmp_path: Path, single: tuple[Path, list[float]]
) -> None:
    import transformers

    import serried

    run_dir, found = single
    assert found[-1] < found[0]
    assert export_models.export([f"run.dir={run_dir}", f"out={tmp_path / 'out'}"]) == 0
    before, tokenizer = rows_in(models / "untied"), transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    theirs = transformers.AutoTokenizer.from_pretrained(models / "untied")
    theirs.add_tokens([TOOL])
    theirs.add_special_tokens({"additional_special_tokens": [END]})
    text = f"1 + {TOOL}2{END}"
    ids = tokenizer(text)["input_ids"]
    assert ids == theirs(text)["input_ids"]
    assert ids[-1] == before + 1
    assert END in tokenizer.all_special_tokens
    assert tokenizer.decode(ids, skip_special_tokens=True) == text.removesuffix(END)
    tokens = torch.tensor([ids])
    with torch.no_grad():
        ours = serried.load_model(run_dir)(tokens)
        torch.testing.assert_close(opened(tmp_path / "out")(tokens).logits, ours, atol=2e-5, rtol=0)
    assert ours.shape[-1] == rows_in(tmp_path / "out") == before + 2


def test_stopped_run_with_added_tokens_resumes_on_other_ranks(
    cluster: Cluster, models: Path, tmp_path: Path, single: tuple[Path, list[float]]
) -> None:
    assert runs.run_here(tuned(models, tmp_path / "run", "trainer.stop_at=1")).code == 75
    argv = tuned(models, tmp_path / "run", *LAYOUTS["tensor"])
    assert trained(cluster, argv, tmp_path / "run") == pytest.approx(single[1], abs=1e-5)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["data.add_tokens=<tool>"], "data.add_tokens"),
        (["data.tokenizer=bytes"], "data.add_tokens needs the tokenizer of a model, and data.tokenizer=bytes cannot"),
        (["data.add_tokens=[<a>,<b>,<a>]"], "data.add_tokens names '<a>' more than once; name it once"),
        ([f"data.add_special_tokens=[{TOOL}]"], "'<tool>' is in both data.add_tokens and data.add_special_tokens"),
    ],
)
def test_added_tokens_that_cannot_be_added_are_refused(
    models: Path, tmp_path: Path, more: list[str], message: str
) -> None:
    ended = runs.run_here(tuned(models, tmp_path / "run", *more))
    assert message in ended.error
    assert "\n" not in ended.error.strip()


def test_resuming_with_other_added_tokens_is_refused(models: Path, tmp_path: Path) -> None:
    assert runs.run_here(tuned(models, tmp_path / "run", "trainer.stop_at=1")).code == 75
    other = tuned(models, tmp_path / "run", "data.add_tokens=[<other>]")
    error = runs.run_here(other).error
    assert "resuming from" in error
    assert "data.add_tokens [<tool>] -> [<other>]" in error
    allowed = [*other, "checkpoint.allow_changes=[data.add_tokens,data.path]"]
    assert "'<tool>' had id" in runs.run_here(allowed).error


def test_tokens_that_exist_are_skipped_and_listed(models: Path, tmp_path: Path) -> None:
    argv = start(models, tmp_path / "run", "data.add_tokens=[a,b]", "data.add_special_tokens=[]", model="untied")
    ended = runs.run_here(argv)
    assert ended.code == 0, ended.printed
    assert "the vocabulary has these tokens already, with their ids: 'a' (" in ended.printed
    assert rows_in(runs.checkpoint(tmp_path / "run")) == rows_in(models / "untied")


def test_added_token_that_is_listed_as_special_becomes_special(models: Path, tmp_path: Path) -> None:
    import transformers

    ordinary = find_tokenizer(str(models / "untied"))
    assert isinstance(ordinary, HuggingFaceTokenizer)
    ordinary = ordinary.with_tokens([TOOL], [])
    special = ordinary.with_tokens([], [TOOL])
    assert special.with_tokens([], [TOOL]) is special
    for name, content in hugging_face_files(special).items():
        (tmp_path / name).write_text(content)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert theirs.decode(theirs(f"a{TOOL}b")["input_ids"], skip_special_tokens=True) == "ab"
    assert special.added_tokens == ordinary.added_tokens


@pytest.mark.parametrize(("merge", "kept"), [(False, "at their initial values"), (True, "as they are in the merged")])
def test_note_of_untrained_rows_names_the_values_that_they_keep(models: Path, merge: bool, kept: str) -> None:
    data: Any = section("x", tokenizer=str(models / "untied"), add_tokens=[TOOL])
    adapter = AdapterSection(method="lora", path="adapters", merge=merge)
    tokenizer = named_tokenizer(data)
    assert tokenizer is not None
    (note,) = notes_of_added_tokens(data, tokenizer, adapter, ["model.embed_tokens"])
    assert f"the rows of new tokens are not trained and stay {kept}" in note


# beside adapters ------------------------------------------------------------------------------------------------------

SAVED = {
    "untied": ["recipe=lora", "adapter.modules_to_save=[embed_tokens,lm_head]"],
    "tied": ["recipe=lora", "adapter.modules_to_save=[embed_tokens]"],
}
TOKENS = torch.arange(120, 280).view(2, -1) % 270


@pytest.fixture(scope="module", params=[pytest.param("untied", marks=pytest.mark.slow), "tied"])
def adapted(models: Path, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> tuple[str, Path]:
    run_dir = tmp_path_factory.mktemp("adapted") / "run"
    ended = runs.run_here(tuned(models, run_dir, *SAVED[request.param], model=request.param))
    assert ended.code == 0, ended.printed
    assert f"in 14 layers, and {', '.join(SAVED[request.param][1][25:-1].split(','))} in full" in ended.printed
    assert "are not trained" not in ended.printed
    return request.param, run_dir


def test_peft_and_transformers_open_modules_saved_beside_adapters(
    models: Path, tmp_path: Path, adapted: tuple[str, Path]
) -> None:
    import peft

    import serried

    model, run_dir = adapted
    for folder, how in (("adapters", "false"), ("merged", "true")):
        assert export_models.export([f"run.dir={run_dir}", f"out={tmp_path / folder}", f"merge={how}"]) == 0
    rows = rows_in(tmp_path / "merged")
    before = opened(models / model)
    before.resize_token_embeddings(rows, mean_resizing=False)
    with torch.no_grad():
        ours = serried.load_model(run_dir)(TOKENS)
        untrained = opened(models / model)(TOKENS).logits
        assert (ours[..., : untrained.shape[-1]] - untrained).abs().max() > 1e-3
        torch.testing.assert_close(
            peft.PeftModel.from_pretrained(before, tmp_path / "adapters").eval()(TOKENS).logits, ours, atol=2e-5, rtol=0
        )
        torch.testing.assert_close(opened(tmp_path / "merged")(TOKENS).logits, ours, atol=2e-5, rtol=0)
        again = config_of_model(tmp_path / "adapters", ["precision=fp32"])
        again = as_saved(again, tmp_path / "adapters", world_size=1, is_resharded=True, is_other_data=True)
        module = load_model(again, CausalLM(again), Layout("single"), torch.device("cpu"), tmp_path / "adapters").module
        torch.testing.assert_close(module(TOKENS), ours, atol=2e-5, rtol=0)


@pytest.mark.parametrize("layout", ["tensor", *SLOW])
def test_losses_with_saved_modules_of_two_ranks_equal_those_of_one(
    cluster: Cluster, models: Path, tmp_path: Path, adapted: tuple[str, Path], layout: str
) -> None:
    model, run_dir = adapted
    argv = tuned(models, tmp_path / "run", *SAVED[model], *LAYOUTS[layout], model=model)
    assert trained(cluster, argv, tmp_path / "run") == pytest.approx(runs.losses(run_dir), abs=1e-5)


def test_rows_that_adapters_leave_untrained_are_warned_about_and_merged_at_their_mean(
    models: Path, tmp_path: Path
) -> None:
    ended = runs.run_here(tuned(models, tmp_path / "run", "recipe=lora", "model.vocab_multiple=8"))
    assert ended.code == 0, ended.printed
    before = rows_in(models / "untied")
    assert f"to train them: 'adapter.trainable_token_indices=[{before},{before + 1}]'" in ended.printed
    assert "or all rows: 'adapter.modules_to_save=[embed_tokens,lm_head]'" in ended.printed
    assert export_models.export([f"run.dir={tmp_path / 'run'}", f"out={tmp_path / 'merged'}", "merge=true"]) == 0
    merged, base = (load_file(folder / "model.safetensors") for folder in (tmp_path / "merged", models / "untied"))
    rows = rows_in(tmp_path / "merged")
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        assert merged[name].equal(expected_rows(base[name], rows)), name


@pytest.mark.parametrize(
    ("model", "value", "message"),
    [
        (
            "tied",
            "[embed_tokens,lm_head]",
            "lm_head and embed_tokens share a weight, and training embed_tokens covers both",
        ),
        ("untied", "[embed_token]", "matches no module that can be trained in full; similar names: embed_tokens"),
    ],
)
def test_modules_that_cannot_be_saved_are_refused(
    models: Path, tmp_path: Path, model: str, value: str, message: str
) -> None:
    argv = tuned(models, tmp_path / "run", "recipe=lora", f"adapter.modules_to_save={value}", model=model)
    error = runs.run_here(argv).error
    assert message in error
    assert (
        "use 'adapter.modules_to_save=[embed_tokens]'" in error or "e.g. 'adapter.modules_to_save=[embed_tok" in error
    )


def test_saved_modules_of_peft_are_computed_as_by_peft(models: Path, tmp_path: Path) -> None:
    import peft

    options = {"r": 4, "target_modules": ["q_proj"], "modules_to_save": ["lm_head"], "task_type": "CAUSAL_LM"}
    theirs = peft.get_peft_model(opened(models / "untied"), peft.LoraConfig(**options))
    for parameter in theirs.parameters():
        if parameter.requires_grad:
            torch.nn.init.normal_(parameter, std=0.2)
    theirs.save_pretrained(tmp_path / "adapters")
    config = config_of_model(tmp_path / "adapters", ["data.tokenizer=bytes", "precision=fp32"])
    module = load_model(config, CausalLM(config), Layout("single"), torch.device("cpu"), tmp_path / "adapters").module
    with torch.no_grad():
        torch.testing.assert_close(module(TOKENS), theirs(TOKENS).logits, atol=2e-5, rtol=0)


# several adapters -----------------------------------------------------------------------------------------------------


def test_weighted_sum_of_adapters_is_merged_as_by_peft(models: Path, tmp_path: Path) -> None:
    import peft

    none = ["data.add_tokens=[]", "data.add_special_tokens=[]", "trainer.stop_at=2"]
    others = {"a": ["adapter.rank=4"], "b": ["adapter.rank=2", "adapter.modules=[q_proj,up_proj]", "trainer.seed=5"]}
    for name, more in others.items():
        assert runs.run_here(tuned(models, tmp_path / name, "recipe=lora", *none, *more)).code == 75
        assert export_models.export([f"run.dir={tmp_path / name}", f"out={tmp_path / f'peft-{name}'}"]) == 0
    theirs = peft.PeftModel.from_pretrained(opened(models / "untied"), tmp_path / "peft-a", adapter_name="a")
    theirs.load_adapter(tmp_path / "peft-b", adapter_name="b")
    theirs.add_weighted_adapter(["a", "b"], [0.7, 2.0], "both", combination_type="cat")
    theirs.set_adapter("both")
    with torch.no_grad():
        want = theirs.eval()(TOKENS).logits
        for other in ("b", "peft-b"):
            words = [f"run.dir={tmp_path / 'a'}", f"adapters={tmp_path / other}", "weights=0.7,2"]
            assert export_models.merge([*words, f"out={tmp_path / f'merged-{other}'}"]) == 0
            found = opened(tmp_path / f"merged-{other}")(TOKENS).logits
            torch.testing.assert_close(found, want, atol=2e-5, rtol=0)

    def refused(*words: str) -> str:
        with pytest.raises(UserError) as error:
            export_models.merge([f"run.dir={tmp_path / 'a'}", f"out={tmp_path / 'none'}", *words])
        return str(error.value)

    shutil.copytree(tmp_path / "peft-b", tmp_path / "resized")
    file, config = tmp_path / "resized/adapter_model.safetensors", tmp_path / "resized/adapter_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"modules_to_save": ["lm_head"]}))
    head = torch.zeros(rows_in(models / "untied") + 2, SIZES["hidden_size"])
    save_file(load_file(file) | {"base_model.model.lm_head.weight": head}, file)
    assert f"contains lm_head.weight of shape {list(head.shape)}, but" in refused(f"adapters={tmp_path / 'resized'}")
    assert "weights=1 must be 2 numbers" in refused(f"adapters={tmp_path / 'b'}", "weights=1")
    assert "is given twice" in refused(f"adapters={tmp_path / 'a'}")
    assert "contains a full model, not adapters" in refused(f"adapters={models / 'tied'}")
    assert "has no effect without adapters=FOLDERS" in refused("weights=1")


def test_adapters_that_save_the_same_module_are_not_added(tmp_path: Path, adapted: tuple[str, Path]) -> None:
    """Nor are trained rows of such a module. Other adapters in between make no difference."""
    _, run_dir = adapted
    for name in ("adapters", "rows", "plain"):
        assert export_models.export([f"run.dir={run_dir}", f"out={tmp_path / name}"]) == 0

    def replace_modules(folder: Path, tokens: list[int], rows: dict[str, Tensor]) -> None:
        file, config = folder / "adapter_model.safetensors", json.loads((folder / "adapter_config.json").read_text())
        config |= {"modules_to_save": None, "ensure_weight_tying": False, "trainable_token_indices": tokens}
        (folder / "adapter_config.json").write_text(json.dumps(config))
        save_file({name: tensor for name, tensor in load_file(file).items() if ".lora_" in name} | rows, file)

    stored = "base_model.model.model.embed_tokens.token_adapter.trainable_tokens_delta"
    replace_modules(tmp_path / "plain", [], {})
    replace_modules(tmp_path / "rows", [70], {stored: torch.ones(1, SIZES["hidden_size"])})
    for others, message in (
        (["adapters"], r"both contain .*\.weight in full, and weights saved in full"),
        (["plain", "adapters"], r"both contain .*\.weight in full, and weights saved in full"),
        (["plain", "rows"], r"both contain .*embed_tokens\.weight, one of them in full and one only the rows"),
    ):
        folders = ",".join(str(tmp_path / name) for name in others)
        with pytest.raises(UserError, match=message):
            export_models.merge([f"run.dir={run_dir}", f"adapters={folders}", f"out={tmp_path / 'out'}"])


@pytest.fixture(scope="module")
def resized(models: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """Adapters that PEFT saved with a resized embedding and head, which it stores three times, and their model."""
    import peft

    base = opened(models / "untied")
    base.resize_token_embeddings(rows_in(models / "untied") + 2, mean_resizing=False)
    saved = ["embed_tokens", "lm_head"]
    options = peft.LoraConfig(r=4, target_modules=["q_proj"], modules_to_save=saved, task_type="CAUSAL_LM")
    theirs = peft.get_peft_model(base, options)
    for parameter in theirs.parameters():
        if parameter.requires_grad:
            torch.nn.init.normal_(parameter, std=0.05)
    folder = tmp_path_factory.mktemp("resized")
    with pytest.warns(UserWarning, match="the embedding layer has been resized"):
        theirs.save_pretrained(str(folder))
    config = json.loads((folder / "adapter_config.json").read_text())
    config["base_model_name_or_path"] = str(models / "untied")
    (folder / "adapter_config.json").write_text(json.dumps(config))
    names = load_file(folder / "adapter_model.safetensors").keys()
    assert any(".original_module." in name for name in names)
    assert any(".modules_to_save." in name for name in names)
    return folder, theirs.eval()


def from_resized(models: Path, run_dir: Path, adapters: Path, *more: str) -> list[str]:
    words = [word for word in tuned(models, run_dir, "recipe=lora", *more) if not word.startswith("adapter.")]
    merge = [word for word in more if word.startswith("adapter.")]
    return [*words, f"adapter.path={adapters}", *merge, "trainer.steps=1", "optim.lr=0"]


@pytest.mark.parametrize("more", [[], ["adapter.merge=true", "recipe=sft"]])
def test_resized_embeddings_that_peft_saved_three_times_are_read(
    models: Path, tmp_path: Path, resized: tuple[Path, Any], more: list[str]
) -> None:
    import serried

    adapters, theirs = resized
    ended = runs.run_here(from_resized(models, tmp_path / "run", adapters, *more))
    assert ended.code == 0, ended.printed + ended.error
    with torch.no_grad():
        torch.testing.assert_close(serried.load_model(tmp_path / "run")(TOKENS), theirs(TOKENS).logits)


@pytest.mark.parametrize("more", [[], ["adapter.merge=true"]])
def test_resized_embeddings_without_the_added_tokens_are_refused_with_the_key(
    models: Path, tmp_path: Path, resized: tuple[Path, Any], more: list[str]
) -> None:
    words = from_resized(models, tmp_path / "run", resized[0], *more)
    error = runs.run_here([word for word in words if not word.startswith("data.add_")]).error
    rows = rows_in(models / "untied")
    assert f"have {rows + 2} rows in " in error
    assert f"has {rows}; name the tokens that were added: 'data.add_tokens=[TOKEN,...]'" in error


def test_different_values_of_a_module_that_is_stored_twice_are_refused(
    models: Path, tmp_path: Path, resized: tuple[Path, Any]
) -> None:
    adapters = shutil.copytree(resized[0], tmp_path / "adapters")
    tensors = load_file(adapters / "adapter_model.safetensors")
    name = "base_model.model.lm_head.modules_to_save.weight"
    save_file({**tensors, name: tensors[name] + 1}, adapters / "adapter_model.safetensors")
    ended = runs.run_here(from_resized(models, tmp_path / "run", adapters))
    assert f"{name} and base_model.model.lm_head.weight have different values" in ended.error


# rows of some tokens --------------------------------------------------------------------------------------------------


def rows_argv(models: Path, run_dir: Path, model: str, *more: str) -> list[str]:
    """A run that trains the rows of a token of the base model and of both added tokens."""
    before = rows_in(models / model)
    tokens = f"adapter.trainable_token_indices=[{before + 1},70,{before}]"
    return tuned(models, run_dir, "recipe=lora", "adapter.modules=[q_proj]", tokens, *more, model=model)


@pytest.fixture(scope="module", params=["untied", "tied"])
def with_rows(models: Path, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Any:
    run_dir = tmp_path_factory.mktemp("rows") / "run"
    ended = runs.run_here(rows_argv(models, run_dir, request.param))
    assert ended.code == 0, ended.printed
    assert "in 2 layers, and the embedding rows of 3 tokens" in ended.printed
    assert "are not trained" not in ended.printed
    return request.param, run_dir


def test_trained_rows_change_alone_and_peft_and_transformers_open_them(
    models: Path, tmp_path: Path, with_rows: tuple[str, Path]
) -> None:
    import peft

    import serried

    model, run_dir = with_rows
    for folder, how in (("adapters", "false"), ("merged", "true")):
        assert export_models.export([f"run.dir={run_dir}", f"out={tmp_path / folder}", f"merge={how}"]) == 0
    merged, base = (load_file(folder / "model.safetensors") for folder in (tmp_path / "merged", models / model))
    rows, before = rows_in(tmp_path / "merged"), rows_in(models / model)
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        if name in base:
            changed = (merged[name] != expected_rows(base[name], rows)).any(dim=1).nonzero().flatten().tolist()
            # Only the first added token is in the data, and the head changes the probability of every token.
            is_looked_up = model == "untied" and name != "lm_head.weight"
            assert changed == ([before] if is_looked_up else [70, before, before + 1]), name
    resized = opened(models / model)
    resized.resize_token_embeddings(rows, mean_resizing=False)
    tokens = torch.cat((TOKENS, torch.tensor([[70, before, before + 1, 3]] * 2)), dim=1)
    with torch.no_grad():
        ours = serried.load_model(run_dir)(tokens)
        theirs = peft.PeftModel.from_pretrained(resized, tmp_path / "adapters").eval()
        torch.testing.assert_close(theirs(tokens).logits, ours, atol=2e-5, rtol=0)
        torch.testing.assert_close(opened(tmp_path / "merged")(tokens).logits, ours, atol=2e-5, rtol=0)
        again = config_of_model(tmp_path / "adapters", ["precision=fp32"])
        again = as_saved(again, tmp_path / "adapters", world_size=1, is_resharded=True, is_other_data=True)
        module = load_model(again, CausalLM(again), Layout("single"), torch.device("cpu"), tmp_path / "adapters").module
        torch.testing.assert_close(module(tokens), ours, atol=2e-5, rtol=0)


@pytest.mark.parametrize("source", ["run", "export"])
def test_merged_start_keeps_the_trained_rows_of_added_tokens(
    models: Path, tmp_path: Path, with_rows: tuple[str, Path], source: str
) -> None:
    model, folder = with_rows
    if source == "export":
        assert export_models.export([f"run.dir={folder}", f"out={tmp_path / 'adapters'}"]) == 0
        folder = tmp_path / "adapters"
    assert export_models.export([f"run.dir={with_rows[1]}", f"out={tmp_path / 'merged'}", "merge=true"]) == 0
    argv = merged_start(models, tmp_path / "run", folder, model, *ADDED)
    ended = runs.run_here(argv)
    assert ended.code == 0, ended.printed
    want, found = load_file(tmp_path / "merged/model.safetensors"), opened(tmp_path / "run/base").state_dict()
    assert all(found[name].equal(tensor) for name, tensor in want.items())
    assert all(tensor.equal(want[name]) for name, tensor in runs.weights(tmp_path / "run").items())


def merged_start(models: Path, run_dir: Path, adapters: Path, model: str, *more: str) -> list[str]:
    """A run that starts from ``adapters``, merged into the base model, and does not change the weights."""
    argv = [word for word in tuned(models, run_dir, "optim.lr=0", "trainer.steps=1", model=model) if word not in ADDED]
    return [*argv, f"adapter.path={adapters}", "adapter.merge=true", *more]


def test_merged_start_from_a_resized_embedding_saved_by_peft_opens_in_transformers(
    models: Path, tmp_path: Path
) -> None:
    adapters, rows = resized_by_peft(models, tmp_path / "adapters"), rows_in(models / "untied") + 2
    config = json.loads((adapters / "adapter_config.json").read_text())
    del config["fan_in_fan_out"]  # PEFT reads folders without this key
    (adapters / "adapter_config.json").write_text(json.dumps(config))
    ended = runs.run_here(merged_start(models, tmp_path / "run", adapters, "untied", *ADDED))
    assert ended.code == 0, ended.printed
    saved, base = load_file(adapters / "adapter_model.safetensors"), opened(tmp_path / "run/base").state_dict()
    assert rows_in(tmp_path / "run/base") == rows
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        assert base[name].equal(saved[f"base_model.model.{name}"]), name


def resized_by_peft(models: Path, folder: Path) -> Path:
    """Adapters that PEFT saves with an embedding and a head with two new rows."""
    import peft

    base = opened(models / "untied")
    base.resize_token_embeddings(base.config.vocab_size + 2, mean_resizing=False)
    options = {"r": 4, "target_modules": ["q_proj"], "modules_to_save": ["embed_tokens", "lm_head"]}
    model = peft.get_peft_model(base, peft.LoraConfig(**options, task_type="CAUSAL_LM"))
    for parameter in model.parameters():
        if parameter.requires_grad:
            torch.nn.init.normal_(parameter, std=0.05)
    model.save_pretrained(folder)
    file = folder / "adapter_model.safetensors"
    # Modules are saved a second time under other names, which are refused.
    whole = {name: tensor for name, tensor in load_file(file).items() if "modules_to_save" not in name}
    save_file({name: tensor for name, tensor in whole.items() if "original_module" not in name}, file)
    return folder


def test_base_model_that_also_reads_images_is_merged_as_its_text_part(models: Path, tmp_path: Path) -> None:
    """By an export of the run, and at the start of a run from the exported adapters. The vocabulary has new rows."""
    import transformers

    rows = rows_in(models / "untied")
    text = {**SIZES, "head_dim": 8, "num_hidden_layers": 1, "vocab_size": rows, "sliding_window": 16}
    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.Gemma3Config(
        text_config=text, vision_config=vision | {"image_size": 28, "patch_size": 14}, mm_tokens_per_image=4
    )
    transformers.Gemma3ForConditionalGeneration(config).save_pretrained(tmp_path / "gemma")
    for file in (models / "untied").glob("token*"):
        shutil.copy(file, tmp_path / "gemma")

    def of_gemma(argv: list[str]) -> list[str]:
        return [word.replace(str(models / "untied"), str(tmp_path / "gemma")) for word in argv]

    argv = rows_argv(models, tmp_path / "run", "untied")
    assert runs.run_here(of_gemma(argv)).code == 0
    for folder, how in (("adapters", "false"), ("merged", "true")):
        assert export_models.export([f"run.dir={tmp_path / 'run'}", f"out={tmp_path / folder}", f"merge={how}"]) == 0
    argv = merged_start(models, tmp_path / "again", tmp_path / "adapters", "untied", *ADDED)
    ended = runs.run_here(of_gemma(argv))
    assert ended.code == 0, ended.printed
    want = load_file(tmp_path / "merged/model.safetensors")
    for folder in (tmp_path / "merged", tmp_path / "again/base"):
        model = opened(folder)
        assert type(model) is transformers.Gemma3ForCausalLM
        assert rows_in(folder) == rows + 2
        found = model.state_dict()
        assert all(found[name].equal(tensor) for name, tensor in want.items())


def test_trained_rows_that_cannot_be_added_are_refused(
    models: Path, tmp_path: Path, with_rows: tuple[str, Path]
) -> None:
    """Rows of the same token, rows outside the vocabulary, and too few rows."""
    model, run_dir = with_rows
    before = rows_in(models / model)

    def refused(tokens: list[int]) -> str:
        folder, out = tmp_path / "adapters", tmp_path / "out"
        shutil.rmtree(folder, ignore_errors=True)
        assert export_models.export([f"run.dir={run_dir}", f"out={folder}"]) == 0
        config = json.loads((folder / "adapter_config.json").read_text())
        named = config["trainable_token_indices"]
        config["trainable_token_indices"] = dict.fromkeys(named, tokens) if isinstance(named, dict) else tokens
        (folder / "adapter_config.json").write_text(json.dumps(config))
        with pytest.raises(UserError) as error:
            export_models.merge([f"run.dir={run_dir}", f"adapters={folder}", f"out={out}"])
        assert not out.exists()
        (line,) = str(error.value).splitlines()
        return line

    assert "both contain a trained row of token 70, and trained rows cannot be added" in refused([5, 70, 6])
    beyond = refused([5, before + 2, 6])
    assert f"has a trained row of token {before + 2}, but " in beyond
    assert f"has only {before + 2} rows here; merge only adapters with the same added tokens" in beyond
    assert "trainable_token_indices names 2 tokens; copy the files" in refused([5, 6])


@pytest.mark.parametrize("layout", ["tensor", *SLOW, pytest.param("sequence", marks=pytest.mark.slow)])
def test_losses_with_trained_rows_of_two_ranks_equal_those_of_one(
    cluster: Cluster, models: Path, tmp_path: Path, with_rows: tuple[str, Path], layout: str
) -> None:
    model, run_dir = with_rows
    how = LAYOUTS["tensor"] + ["parallel.sequence=true"] if layout == "sequence" else LAYOUTS[layout]
    argv = rows_argv(models, tmp_path / "run", model, *how)
    if layout == "pipeline" and model == "tied":
        answers = cluster.run(2, "testing.runs:train_reported", argv=argv)
        assert any("the first and the last stage would train the same rows" in answer.printed for answer in answers)
        return
    assert trained(cluster, argv, tmp_path / "run") == pytest.approx(runs.losses(run_dir), abs=1e-5)
    ours, theirs = (runs.weights(folder, "adapter_model") for folder in (tmp_path / "run", run_dir))
    for name, tensor in theirs.items():
        torch.testing.assert_close(ours[name], tensor, atol=1e-5, rtol=0, msg=name)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["adapter.trainable_token_indices=[1,1]"], "names a token twice"),
        (["adapter.trainable_token_indices=[1000]"], "and none for token 1000; leave this token out"),
        (["adapter.modules_to_save=[lm_head]"], "all rows of lm_head are trained with adapter.modules_to_save"),
        (["model=hf"], "needs a model of a built-in family, with one embedding and one head"),
    ],
)
def test_rows_that_cannot_be_trained_are_refused(models: Path, tmp_path: Path, more: list[str], message: str) -> None:
    error = runs.run_here(rows_argv(models, tmp_path / "run", "untied", *more)).error
    assert message in error


def test_rows_that_peft_trains_in_the_embedding_alone_are_refused(models: Path, tmp_path: Path) -> None:
    import peft

    options = {"r": 4, "target_modules": ["q_proj"], "trainable_token_indices": [5, 3], "task_type": "CAUSAL_LM"}
    folder = tmp_path / "adapters"
    peft.get_peft_model(opened(models / "untied"), peft.LoraConfig(**options)).save_pretrained(folder)
    config = config_of_model(folder, ["data.tokenizer=bytes", "precision=fp32"])
    assert config.adapter.trainable_token_indices == (5, 3)
    with pytest.raises(UserError, match="for the embedding only, but this run also trains rows of the head; merge"):
        load_model(config, CausalLM(config), Layout("single"), torch.device("cpu"), folder)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["rows", "modules"])
def test_stopped_run_with_trained_embeddings_beside_adapters_resumes_on_other_ranks(
    cluster: Cluster, models: Path, tmp_path: Path, kind: str
) -> None:
    def argv(name: str, *more: str) -> list[str]:
        if kind == "rows":
            return rows_argv(models, tmp_path / name, "tied", *more)
        return tuned(models, tmp_path / name, *SAVED["tied"], *more, model="tied")

    assert runs.run_here(argv("whole")).code == 0
    assert runs.run_here(argv("stopped", "trainer.stop_at=1")).code == 75
    resumed = trained(cluster, argv("stopped", *LAYOUTS["tensor"]), tmp_path / "stopped")
    assert resumed == pytest.approx(runs.losses(tmp_path / "whole"), abs=1e-5)
