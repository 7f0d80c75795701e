"""Runs that start from adapters made by PEFT or by an earlier run: ``adapter.path``."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F

import serried
from serried.commands import export_models
from serried.configs.compose import compose
from serried.configs.errors import UserError
from serried.program import main
from serried.recipes.text.causal_lm import CausalLM
from testing import runs
from testing.rank_pool import Cluster
from tests.runs.fine_tuning.test_lora import TOKENS, adapters_in, assert_close, lora, losses, models, opened_by_us
from tests.support.own_task import Points

__all__ = ["models"]

MADE_BY_PEFT = {
    "plain": {"target_modules": ["q_proj", "v_proj", "down_proj"], "lora_dropout": 0.0},
    "patterns": {
        "target_modules": r".*\.(self_attn\.[qv]_proj|1\.mlp\.down_proj)",
        "rank_pattern": {"down_proj": 2, r"layers\.1\..*q_proj": 5},
        "alpha_pattern": {"model.layers.0.self_attn.v_proj": 3},
        "use_rslora": True,
    },
}


def write_adapters(folder: Path, base: Path, options: dict[str, Any], task_type: str = "CAUSAL_LM") -> Path:
    """Save adapters with PEFT, with random values."""
    import peft
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=4, lora_alpha=8, task_type=task_type, **options))
    torch.manual_seed(11)
    for parameter in adapted.parameters():
        if parameter.requires_grad:
            torch.nn.init.normal_(parameter, std=0.1)
    adapted.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def made_by_peft(models: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("adapters")
    return {name: write_adapters(folder / name, models / "llama", options) for name, options in MADE_BY_PEFT.items()}


def continued(models: Path, run_dir: Path, adapters: Path, *more: str) -> list[str]:
    """Return a command that takes every setting of the adapters, and the base model, from their folder."""
    own = ("adapter.rank=", "adapter.alpha=", "model.path=")
    words = [word for word in lora(models, run_dir) if not word.startswith(own)]
    return [*words, f"adapter.path={adapters}", *more]


def loss_of_peft(base_folder: Path, adapters: Path, batches: list[Any]) -> float:
    import peft
    import transformers

    base = transformers.AutoModelForCausalLM.from_pretrained(base_folder, dtype=torch.float32)
    model = peft.PeftModel.from_pretrained(base, adapters)
    total, count = 0.0, 0
    for batch in batches:
        with torch.no_grad():
            logits = model(input_ids=batch.tokens).logits.flatten(0, 1)
        total += F.cross_entropy(logits, batch.targets.flatten(), reduction="sum").item()
        count += int((batch.targets != -100).sum())
    return total / count


@pytest.fixture(scope="module")
def single(
    models: Path, made_by_peft: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, list[float], float]:
    """A run of one process from the adapters with patterns: its folder, its losses, and PEFT's first loss."""
    run_dir = tmp_path_factory.mktemp("single") / "run"
    with runs.kept_batches(CausalLM) as batches:
        ended = runs.run_here(continued(models, run_dir, made_by_peft["patterns"]))
    assert ended.code == 0, ended.printed
    assert f"and the adapters of {made_by_peft['patterns']}" in ended.printed
    first = batches[: len(batches) // 4]
    return run_dir, runs.losses(run_dir), loss_of_peft(models / "llama", made_by_peft["patterns"], first)


def test_first_loss_equals_that_of_peft_and_training_lowers_it(single: tuple[Path, list[float], float]) -> None:
    _, found, want = single
    assert found[0] == pytest.approx(want, abs=1e-5)
    assert found[-1] < found[0] - 0.01


LAYOUTS = {
    "ddp": ["parallel=ddp"],
    "fsdp": ["parallel=fsdp"],
    "tensor": ["parallel=fsdp", "parallel.tensor=2"],
    "pipeline": ["parallel=fsdp", "parallel.pipeline=2", "trainer.micro_batch=1"],
}


@pytest.mark.parametrize(
    "layout", ["tensor", *(pytest.param(name, marks=pytest.mark.slow) for name in ("ddp", "fsdp", "pipeline"))]
)
def test_run_from_adapters_with_patterns_is_the_same_on_two_ranks(
    cluster: Cluster,
    models: Path,
    made_by_peft: dict[str, Path],
    tmp_path: Path,
    single: tuple[Path, list[float], float],
    layout: str,
) -> None:
    import peft
    import transformers

    argv = continued(models, tmp_path / "run", made_by_peft["patterns"], *LAYOUTS[layout])
    assert losses(cluster, 2, argv, tmp_path / "run") == pytest.approx(single[1], abs=1e-5)
    assert export_models.export([f"run.dir={tmp_path / 'run'}", f"out={tmp_path / 'adapters'}"]) == 0
    base = transformers.AutoModelForCausalLM.from_pretrained(models / "llama", dtype=torch.float32)
    with torch.no_grad():
        logits = peft.PeftModel.from_pretrained(base, tmp_path / "adapters")(TOKENS).logits
        assert_close(logits, serried.load_model(single[0])(TOKENS))


def test_export_of_a_continued_run_opens_in_peft_and_starts_another_run(
    models: Path, tmp_path: Path, single: tuple[Path, list[float], float]
) -> None:
    """Exported, merged, and opened by the run that continues from the run folder, the model is the same."""
    import peft
    import transformers

    run_dir = single[0]
    for name, more in (("adapters", []), ("merged", ["merge=true"])):
        assert export_models.export([f"run.dir={run_dir}", f"out={tmp_path / name}", *more]) == 0
    base = transformers.AutoModelForCausalLM.from_pretrained(models / "llama", dtype=torch.float32)
    with torch.no_grad():
        want = serried.load_model(run_dir)(TOKENS)
        assert_close(peft.PeftModel.from_pretrained(base, tmp_path / "adapters")(TOKENS).logits, want)
        merged = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32)
        assert_close(merged(TOKENS).logits, want)
    again = continued(models, tmp_path / "again", run_dir, "optim.lr=0", "trainer.steps=1")
    assert runs.run_here(again).code == 0
    saved, before = adapters_in(runs.checkpoint(tmp_path / "again")), adapters_in(runs.checkpoint(run_dir))
    assert saved.keys() == before.keys()
    assert all(saved[name].equal(tensor) for name, tensor in before.items())


def test_settings_are_those_of_the_adapters(models: Path, made_by_peft: dict[str, Path]) -> None:
    words = [f"adapter.path={made_by_peft['patterns']}", "data.tokenizer=bytes", "adapter.dropout=0.1"]
    config = compose(["recipe=sft", *words])
    assert config.adapter.model_dump(exclude={"path", "modules", "merge", "init"}) == {
        "method": "lora", "rank": 4, "alpha": 8, "dropout": 0.1, "scale": "rslora", "quantize": "none",
        "modules_to_save": (), "trainable_token_indices": (),
        "rank_pattern": {"down_proj": 2, "model.layers.1.self_attn.q_proj": 5},
        "alpha_pattern": {"model.layers.0.self_attn.v_proj": 3},
    }  # fmt: skip
    assert config.model.path == str(models / "llama")
    assert compose(["recipe=sft", f"adapter.path={made_by_peft['plain']}"]).adapter.modules == (
        "down_proj", "q_proj", "v_proj",
    )  # fmt: skip


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["adapter.rank=8"], "has adapter.rank=4, so its weights do not fit adapter.rank=8; leave adapter.rank=8 out"),
        (["adapter=dora"], "has adapter.method=lora, so its weights do not fit adapter.method=dora"),
        (["adapter=none"], "has adapter.method=lora, so its weights do not fit adapter.method=none"),
        (["adapter.rank_pattern.q_proj=8"], "so its weights do not fit adapter.rank_pattern={q_proj:8}"),
        (["adapter.init=orthogonal"], "adapter.init=orthogonal has no effect with adapter.path"),
    ],
)
def test_setting_that_the_adapters_contradict_is_refused(
    made_by_peft: dict[str, Path], more: list[str], message: str
) -> None:
    with pytest.raises(UserError) as refused:
        compose(["recipe=lora", f"adapter.path={made_by_peft['plain']}", "data.tokenizer=bytes", *more])
    assert message in str(refused.value)


def test_folder_without_usable_adapters_is_refused_with_what_it_is(
    models: Path, made_by_peft: dict[str, Path], tmp_path: Path
) -> None:
    def refused(folder: Path, *more: str) -> str:
        with pytest.raises(UserError) as error:
            compose(["recipe=lora", f"adapter.path={folder}", "data.tokenizer=bytes", *more])
        (line,) = str(error.value).splitlines()
        return line

    assert "does not exist; use a PEFT folder, or a run" in refused(tmp_path / "none")
    assert "contains a full model, not adapters; use model.path=" in refused(models / "llama")
    assert "has no adapter_config.json" in refused(tmp_path)
    config = json.loads((made_by_peft["plain"] / "adapter_config.json").read_text())
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    assert "has no adapter_model.safetensors; copy that file too" in refused(tmp_path)
    (tmp_path / "adapter_model.bin").write_bytes(b"\x80\x02")
    assert "adapter_model.bin is a pickle, which is never loaded" in refused(tmp_path)
    (tmp_path / "adapter_model.safetensors").write_bytes(b"12345678 not a header")
    assert "cannot be read: a header of" in refused(tmp_path)
    for key, value, message in (
        ("rank_pattern", {"(a+)+b": 4}, "cannot be read: too many or nested repetitions; merge"),
        ("rank_pattern", {"q_proj": "4"}, "has rank_pattern.q_proj 4: must be a number"),
        ("rank_pattern", [4], "has rank_pattern [4]: must be a mapping of names to numbers"),
        ("alpha_pattern", {"(": 4}, "has alpha_pattern (, which cannot be read"),
        ("base_model_name_or_path", None, "does not name the base model"),
    ):
        (tmp_path / "adapter_config.json").write_text(json.dumps(config | {key: value}))
        weights = made_by_peft["plain"] / "adapter_model.safetensors"
        (tmp_path / "adapter_model.safetensors").write_bytes(weights.read_bytes())
        assert message in refused(tmp_path)


def test_stopped_run_resumes_after_the_adapters_are_gone(
    models: Path, made_by_peft: dict[str, Path], tmp_path: Path, single: tuple[Path, list[float], float]
) -> None:
    shutil.copytree(made_by_peft["patterns"], tmp_path / "adapters")
    argv = continued(models, tmp_path / "run", tmp_path / "adapters")
    assert runs.run_here([*argv, "trainer.stop_at=2"]).code == 75
    (tmp_path / "adapters").rename(tmp_path / "elsewhere")
    ended = runs.run_here(argv)
    assert ended.code == 0, ended.printed
    assert runs.losses(tmp_path / "run") == pytest.approx(single[1], abs=1e-6)


def test_own_module_starts_from_adapters_of_peft(tmp_path: Path) -> None:
    import peft

    task = Points()
    task.config = Points.Config()
    torch.manual_seed(1)  # trainer.seed
    options = peft.LoraConfig(r=3, lora_alpha=6, target_modules=["0", "3"], rank_pattern={"3": 2})
    theirs = peft.get_peft_model(task.build_model(), options)
    for parameter in theirs.parameters():
        if parameter.requires_grad:
            torch.nn.init.normal_(parameter)
    theirs.save_pretrained(tmp_path / "adapters")
    words = [f"adapter.path={tmp_path / 'adapters'}", "optim.lr=0", "trainer.steps=1", f"run.dir={tmp_path / 'run'}"]
    assert serried.fit(Points, words).state == "finished"
    x = torch.randn(5, 4)
    assert_close(serried.load_model(tmp_path / "run", Points)(x), theirs.eval()(x))


def test_checkpoint_of_adapters_that_is_damaged_or_of_another_base_is_refused(
    models: Path, tmp_path: Path, single: tuple[Path, list[float], float]
) -> None:
    shutil.copytree(single[0], tmp_path / "run")
    shutil.copytree(models / "llama", tmp_path / "base")
    argv = continued(models, tmp_path / "new", tmp_path / "run", f"model.path={tmp_path / 'base'}")
    weights = tmp_path / "base/model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    assert "is not the base model of" in runs.run_here(argv).error
    adapters = runs.checkpoint(tmp_path / "run") / "adapter_model.safetensors"
    adapters.write_bytes(adapters.read_bytes()[:-4])
    assert "bytes instead of" in runs.run_here(argv).error


def test_plan_counts_the_adapters_of_the_folder(
    made_by_peft: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    assert (
        main(["recipe=lora", f"adapter.path={made_by_peft['patterns']}", "data.tokenizer=bytes", "dry_run=true"]) == 0
    )
    plan = capsys.readouterr().out
    trained = 2 * 4 * (32 + 16) + (4 + 5) * (32 + 32) + 2 * (48 + 32)  # v of two layers, q of rank 4 and 5, down
    assert f"of which {trained:,} " in plan
    assert "lora of ranks 2 to 5, alpha 8, in 5 layers" in plan


def test_weights_alone_of_a_run_of_adapters_are_refused_with_the_key_to_use(
    single: tuple[Path, list[float], float], tmp_path: Path
) -> None:
    words = [f"checkpoint.resume={single[0]}", "checkpoint.weights_only=true"]
    with pytest.raises(UserError) as refused:
        compose(["recipe=lora", "data.tokenizer=bytes", *words])
    assert f"use adapter.path={single[0]} to continue them" in str(refused.value)
    with pytest.raises(UserError) as refused:
        serried.fit(Points, [*words, "adapter=lora", f"run.dir={tmp_path / 'run'}"])
    assert f"use adapter.path={single[0]} to continue them" in str(refused.value)


def test_adapters_beside_another_model_to_resume_from_are_refused(
    models: Path, made_by_peft: dict[str, Path], tmp_path: Path
) -> None:
    other = shutil.copytree(models / "llama", tmp_path / "other")
    ended = runs.run_here(
        continued(models, tmp_path / "run", made_by_peft["plain"], f"checkpoint.resume={other}", "trainer.steps=1")
    )
    base = models / "llama"
    assert f"the base model of adapter.method=lora is model.path={base}; use model.path={other}" in ended.error


@pytest.mark.parametrize("key", ["checkpoint.resume={base}", "model.path={base}", "checkpoint.resume={adapters}"])
def test_run_line_names_the_base_model_and_the_adapters(
    models: Path, made_by_peft: dict[str, Path], tmp_path: Path, key: str
) -> None:
    base, adapters = models / "llama", made_by_peft["plain"]
    words = continued(models, tmp_path / "run", adapters, key.format(base=base, adapters=adapters), "trainer.steps=1")
    if "adapters" in key:
        words = [*(word for word in words if not word.startswith("adapter.path=")), f"model.path={base}"]
    ended = runs.run_here(words)
    assert ended.code == 0, ended.printed
    assert f"step 0 with the weights of {base} and the adapters of {adapters}\n" in ended.printed


# adapter.merge --------------------------------------------------------------------------------------------------------


def merged_by_peft(models: Path, adapters: Path) -> Any:
    import peft
    import transformers

    base = transformers.AutoModelForCausalLM.from_pretrained(models / "llama", dtype=torch.float32)
    return peft.PeftModel.from_pretrained(base, adapters).merge_and_unload()


def test_full_fine_tuning_starts_from_the_merged_model(
    models: Path, made_by_peft: dict[str, Path], tmp_path: Path
) -> None:
    argv = continued(models, tmp_path / "run", made_by_peft["patterns"], "adapter.merge=true", "optim.lr=0")
    argv = [word.replace("recipe=lora", "recipe=sft") for word in argv]
    ended = runs.run_here([*argv, "trainer.steps=1"])
    assert ended.code == 0, ended.printed
    assert f"step 0 with the weights of {tmp_path / 'run/base'}" in ended.printed
    want, found = merged_by_peft(models, made_by_peft["patterns"]).state_dict(), runs.weights(tmp_path / "run")
    for name, tensor in found.items():
        torch.testing.assert_close(tensor, want[name], atol=1e-6, rtol=0)


@pytest.fixture(scope="module")
def new_adapters(
    models: Path, made_by_peft: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, list[float]]:
    """A run of one process that trains new adapters of the merged model, stopped and resumed."""
    run_dir = tmp_path_factory.mktemp("merged") / "run"
    argv = continued(models, run_dir, made_by_peft["patterns"], *NEW)
    assert runs.run_here([*argv, "trainer.stop_at=2"]).code == 75
    ended = runs.run_here(argv)
    assert ended.code == 0, ended.printed
    assert "lora of rank 3, alpha 5" in ended.printed
    return run_dir, runs.losses(run_dir)


NEW = ["adapter.merge=true", "adapter.rank=3", "adapter.alpha=5"]


def test_new_adapters_of_the_merged_model_open_in_peft(
    models: Path, made_by_peft: dict[str, Path], new_adapters: tuple[Path, list[float]], single: Any, tmp_path: Path
) -> None:
    """The first loss is that of the old adapters, since new ones add zero."""
    import peft
    import transformers

    run_dir, found = new_adapters
    assert found[0] == pytest.approx(single[2], abs=1e-5)
    assert found[-1] < found[0] - 0.01
    assert export_models.export([f"run.dir={run_dir}", f"out={tmp_path / 'adapters'}"]) == 0
    assert export_models.export([f"run.dir={run_dir}", f"out={tmp_path / 'merged'}", "merge=true"]) == 0
    config = json.loads((tmp_path / "adapters/adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(run_dir / "base")
    base = transformers.AutoModelForCausalLM.from_pretrained(run_dir / "base", dtype=torch.float32)
    with torch.no_grad():
        assert_close(base(TOKENS).logits, merged_by_peft(models, made_by_peft["patterns"])(TOKENS).logits)
        want = serried.load_model(run_dir)(TOKENS)
        assert_close(peft.PeftModel.from_pretrained(base, tmp_path / "adapters")(TOKENS).logits, want)
        merged = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32)
        assert_close(merged(TOKENS).logits, want)


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_new_adapters_of_the_merged_model_are_the_same_on_two_ranks(
    cluster: Cluster,
    models: Path,
    made_by_peft: dict[str, Path],
    tmp_path: Path,
    new_adapters: tuple[Path, list[float]],
    layout: str,
) -> None:
    argv = continued(models, tmp_path / "run", made_by_peft["patterns"], *NEW, *LAYOUTS[layout])
    assert losses(cluster, 2, argv, tmp_path / "run") == pytest.approx(new_adapters[1], abs=1e-5)


@pytest.mark.slow
def test_run_that_starts_again_merges_the_adapters_that_are_named_now(
    models: Path, made_by_peft: dict[str, Path], tmp_path: Path
) -> None:
    words = ["trainer.steps=1", "optim.lr=0", *NEW]
    assert runs.run_here(continued(models, tmp_path / "run", made_by_peft["patterns"], *words)).code == 0
    before = runs.losses(tmp_path / "run")
    again = continued(models, tmp_path / "run", made_by_peft["plain"], *words, "checkpoint.resume=never")
    assert runs.run_here(again).code == 0
    assert abs(runs.losses(tmp_path / "run")[0] - before[0]) > 1e-3


def test_own_module_starts_from_its_merged_adapters(tmp_path: Path) -> None:
    trained = ["adapter=lora", "trainer.steps=2", f"run.dir={tmp_path / 'run'}"]
    assert serried.fit(Points, trained).state == "finished"
    merged = [f"adapter.path={tmp_path / 'run'}", "adapter.merge=true", "optim.lr=0", "trainer.steps=1"]
    assert serried.fit(Points, [*merged, f"run.dir={tmp_path / 'whole'}"]).state == "finished"
    x = torch.randn(5, 4)
    models = [serried.load_model(tmp_path / name, Points) for name in ("run", "whole")]
    assert not any("lora" in name for name, _ in models[1].named_parameters())
    assert_close(models[1](x), models[0](x))
    with pytest.raises(UserError, match=r"for a different base model than build_model\(\) returns now"):
        serried.fit(Points, [*merged, f"run.dir={tmp_path / 'other'}", "trainer.seed=2"])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["adapter.merge=true"], "names no adapters to merge; use adapter.path=FOLDER, or adapter.merge=false"),
        (["adapter.merge=true", "adapter.path={peft}", "checkpoint.resume=model"], "leave one of them out"),
    ],
)
def test_merging_without_adapters_or_with_another_start_is_refused(
    made_by_peft: dict[str, Path], words: list[str], message: str
) -> None:
    given = [word.format(peft=made_by_peft["plain"]) for word in words]
    with pytest.raises(UserError) as refused:
        compose(["recipe=lora", "data.tokenizer=bytes", *given])
    assert message in str(refused.value)


# other adapters of PEFT -----------------------------------------------------------------------------------------------

CONV1D = {"target_modules": ["c_attn", "c_fc"], "fan_in_fan_out": True}
OTHERS = {
    "gpt2": ("gpt2", CONV1D | {"rank_pattern": {"c_attn": 6}, "alpha_pattern": {"h.1.mlp.c_fc": 3}}),
    "phi3": ("phi3", {"target_modules": "all-linear", "rank_pattern": {"qkv_proj": 6}}),
    "dora": ("llama", {"target_modules": ["q_proj", "down_proj"], "use_dora": True, "rank_pattern": {"q_proj": 2}}),
    "one layer": ("llama", {"target_modules": ["q_proj", "down_proj"], "layers_to_transform": [1]}),
    "without": ("llama", {"target_modules": ["q_proj", "v_proj"], "exclude_modules": ["layers.0.self_attn.q_proj"]}),
    "saved in full": ("llama", {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]}),
}


@pytest.mark.slow
@pytest.mark.parametrize("merge", [False, True])
@pytest.mark.parametrize("name", OTHERS)
def test_first_loss_equals_that_of_peft_for_every_kind_of_adapters(
    models: Path, tmp_path: Path, name: str, merge: bool
) -> None:
    model, options = OTHERS[name]
    adapters = write_adapters(tmp_path / "adapters", models / model, options)
    more = ["trainer.steps=1", "optim.lr=0", f"adapter.merge={str(merge).lower()}"]
    with runs.kept_batches(CausalLM) as batches:
        ended = runs.run_here(continued(models, tmp_path / "run", adapters, *more))
    assert ended.code == 0, ended.printed
    assert runs.losses(tmp_path / "run")[0] == pytest.approx(loss_of_peft(models / model, adapters, batches), abs=1e-5)


def test_adapters_with_patterns_are_opened_as_by_peft(models: Path, made_by_peft: dict[str, Path]) -> None:
    with torch.no_grad():
        want = merged_by_peft(models, made_by_peft["patterns"])(TOKENS).logits
        assert_close(opened_by_us(made_by_peft["patterns"])(TOKENS), want)
