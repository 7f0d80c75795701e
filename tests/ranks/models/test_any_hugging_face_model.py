"""``model=hf``: models of transformers without a family here, computed by their own code."""

import json
import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore

from serried.commands import export_models, generate_text
from serried.configs.compose import compose
from serried.configs.errors import UserError
from serried.parallel.axes.tensor_trial import difference_of_shards
from serried.parallel.distributed_model import DistributedModel
from serried.parallel.layout.checks import check_layout
from serried.parallel.layout.mesh import gradient_accumulation, resolve_layout
from serried.parallel.parallelize import check_plan, parallelize
from serried.parallel.plan import ParallelPlan
from serried.planner.memory_formula import Sizes, planned_flows
from serried.program import main
from serried.recipes.models.hugging_face.any_causal_lm import HuggingFaceModel
from serried.recipes.text.causal_lm import CausalLM
from serried.trainer.checkpoint.tensors import load_weights
from testing import runs
from testing.rank_pool import Cluster
from testing.runs import losses
from testing.wire_bytes import Wire
from tests.ranks import test_activations, test_compile
from tests.ranks.models.test_families import BORDERS, LENGTH, POSITIONS, documents, opened, written
from tests.runs.fine_tuning.test_sft import write_chats

ROWS = 257
SIZES = {
    "vocab_size": ROWS, "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 80, "max_position_embeddings": 256, "pad_token_id": None, "bos_token_id": 0, "eos_token_id": 0,
}  # fmt: skip
WINDOWS = {
    "sliding_window": 8,
    "head_dim": 16,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
}
MODELS: dict[str, dict[str, Any]] = {
    "gpt_neox": {},  # its head has another name in files
    "phi": {},  # its head has a bias
    "opt": {"ffn_dim": 80, "word_embed_proj_dim": 64, "dropout": 0.0},  # tied, positions in a table, no packing
    "falcon": {},  # a linear layer of its own
    "bloom": {"n_layer": 3, "n_head": 4},  # cannot keep documents apart
    "granite": {"logits_scaling": 4.0},
    "olmoe": {"num_experts": 4, "num_experts_per_tok": 2},  # stacked experts, which files hold one by one
    "deepseek_v3": {
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "n_routed_experts": 4,
        "n_group": 2,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "num_key_value_heads": 4,
        "kv_lora_rank": 12,
        "q_lora_rank": 20,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 16,
        "v_head_dim": 12,
    },  # values narrower than keys
    "gemma3_text": WINDOWS | {"query_pre_attn_scalar": 24},  # documents longer than the window
}
GIVES_LOSS = {"gpt_neox", "opt", "falcon", "bloom", "olmoe", "gemma3_text", "deepseek_v3"}
SLOW = {"granite", "deepseek_v3"}
OWN_ATTENTION = {"falcon", "bloom"}


def saved(name: str, folder: Path, **changes: Any) -> Any:
    """A random model of transformers, saved in ``folder``; norms and biases are random too."""
    import transformers

    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(name, **SIZES | MODELS.get(name, {}) | changes)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    model.save_pretrained(folder)
    return model


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW)) for name in MODELS])
def test_a_model_trains_as_transformers_trains_it(name: str, tmp_path: Path) -> None:
    import transformers

    theirs = saved(name, tmp_path / "theirs")
    family, ours = opened(tmp_path / "theirs", "hf")
    batches = torch.randint(ROWS, (3, 2, LENGTH), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = theirs(batches[0]).logits
        assert expected.std() > 0.1, "a flat output would compare equal to anything"
        torch.testing.assert_close(ours(batches[0]), expected, rtol=0, atol=1e-5)
    there, back = load_file(tmp_path / "theirs/model.safetensors"), written(family, ours, tmp_path / "back")
    assert back.keys() == there.keys()
    assert all(back[key].equal(there[key]) for key in there)

    # Three steps on packed documents, which transformers sees one by one.
    borders, positions = (BORDERS, POSITIONS.expand(2, -1)) if name != "bloom" else ((0, LENGTH), None)
    mine, other = (torch.optim.AdamW(model.parameters(), lr=1e-3) for model in (ours, theirs))
    for batch in batches:
        targets = batch.roll(-1, 1)
        targets[:, [border - 1 for border in borders[1:]]] = -100
        loss = ours(batch, targets, positions) / (targets >= 0).sum()
        pieces = [each for row in batch for each in (documents(row) if positions is not None else [row])]
        logits = torch.cat([theirs(piece[None]).logits[0, :-1] for piece in pieces])
        reference = F.cross_entropy(logits, torch.cat([piece[1:] for piece in pieces]))
        torch.testing.assert_close(loss, reference, rtol=1e-5, atol=0)
        for optimizer, each in ((mine, loss), (other, reference)):
            optimizer.zero_grad()
            each.backward()
            optimizer.step()
    checks = ours.forward._checks
    assert (ours.forward._head.is_product and checks.returns_head_output) is (name in GIVES_LOSS)
    assert (ours.config._attn_implementation == "serried") is (name not in OWN_ATTENTION)
    assert checks.computes_in_bf16

    written(family, ours, tmp_path / "trained")
    again, loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "trained", output_loading_info=True)
    assert not any(loaded[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys")), loaded
    with torch.no_grad():
        torch.testing.assert_close(again.eval()(batches[0]).logits, ours.eval()(batches[0]), rtol=0, atol=1e-5)


@pytest.mark.parametrize(("name", "choice"), [("bloom", "hf"), ("gpt2", "auto")])
def test_folder_that_was_saved_without_a_head_is_read(name: str, choice: str, tmp_path: Path) -> None:
    """As GPT-2 and Bloom are on the Hub: names lack ``transformer.``, and there are masks."""
    theirs = saved(name, tmp_path, n_embd=64, n_layer=2, n_head=4)
    tensors = load_file(tmp_path / "model.safetensors")
    bare = {key.removeprefix("transformer."): tensor for key, tensor in tensors.items()}
    save_file(bare | {"h.0.attn.bias": torch.ones(4, 4)} if name == "gpt2" else bare, tmp_path / "model.safetensors")
    ours, tokens = opened(tmp_path, choice)[1], torch.arange(LENGTH).expand(2, -1)
    with torch.no_grad():
        torch.testing.assert_close(ours(tokens), theirs.eval()(tokens).logits, rtol=0, atol=1e-5)


def test_documents_that_would_see_each_other_are_refused(tmp_path: Path) -> None:
    saved("bloom", tmp_path)
    model = opened(tmp_path, "hf")[1]
    tokens = torch.arange(LENGTH).expand(2, -1)
    with pytest.raises(UserError, match=r"BloomForCausalLM cannot isolate .*; use data.packing=none or "):
        model(tokens, tokens, POSITIONS.expand(2, -1))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose embeddings are tied, and conversations."""
    folder = tmp_path_factory.mktemp("models")
    saved("opt", folder / "opt")
    write_chats(folder / "chats.jsonl", 60)
    return folder


def sft(folder: Path, run_dir: Path, *more: str) -> list[str]:
    given = [
        "recipe=sft", "model=hf", f"model.path={folder / 'opt'}", f"data.path={folder / 'chats.jsonl'}",
        "data.tokenizer=bytes", f"data.cache_dir={folder / 'cache'}", f"run.dir={run_dir}",
        "data.sequence_length=128", "trainer.steps=4", "trainer.global_batch=6", "trainer.micro_batch=3",
        "trainer.eval_every=0", "trainer.log_every=1", "data.workers=0", "optim.lr=0.001", "schedule=constant",
        "schedule.warmup_steps=0", "checkpoint.every=2", *more,
    ]  # fmt: skip
    return [f"{key}={value}" for key, value in dict(word.split("=", 1) for word in given).items()]


def test_runs_agree_on_every_layout_and_resume_on_another(cluster: Cluster, folder: Path, tmp_path: Path) -> None:
    ended = runs.run_here(sft(folder, tmp_path / "single"))
    assert ended.code == 0, ended.printed
    assert ended.printed.count("WARNING    model=hf runs transformers' own code") == 1
    wanted = losses(tmp_path / "single")
    assert wanted[-1] < wanted[0] - 0.1

    sharded = ("parallel=fsdp", "parallel.reshard_after_forward=true", "trainer.activation_memory_budget=0.6")
    for code, more in ((75, ("parallel=ddp", "trainer.stop_at=2")), (0, sharded)):
        argv = sft(folder, tmp_path / "run", *more)
        answers = cluster.run(2, "testing.runs:train_reported", argv=argv)
        assert {answer.value for answer in answers} == {code}, answers[0].printed
    assert losses(tmp_path / "run") == pytest.approx(wanted, rel=1e-5)

    import transformers

    export_models.export([f"run.dir={tmp_path / 'run'}", f"out={tmp_path / 'model'}"])
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert model.lm_head.weight is model.get_input_embeddings().weight
    generate_text.generate([str(tmp_path / "model"), "prompt=Hello", "tokens=2"])


@pytest.mark.slow
def test_adapters_of_linear_layers_train_sharded_and_merge(cluster: Cluster, folder: Path, tmp_path: Path) -> None:
    import transformers

    more = ["recipe=lora", "precision=fp32", "adapter.modules=[q_proj,fc1]", "adapter.rank=4", "optim.lr=0.01"]
    assert runs.run_here(sft(folder, tmp_path / "single", *more)).code == 0
    cluster.run(2, "testing.runs:train_reported", argv=sft(folder, tmp_path / "fsdp", *more, "parallel=fsdp"))
    assert losses(tmp_path / "fsdp") == pytest.approx(losses(tmp_path / "single"), rel=1e-5)
    adapters = runs.weights(tmp_path / "fsdp", "adapter_model")
    assert "base_model.model.model.decoder.layers.0.self_attn.q_proj.lora_B.weight" in adapters
    assert len(adapters) == 2 * 2 * 3
    export_models.export([f"run.dir={tmp_path / 'fsdp'}", f"out={tmp_path / 'model'}", "merge=true"])
    transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model")


def test_random_weights_are_drawn_as_transformers_draws_them(folder: Path) -> None:
    config = compose(sft(folder, folder / "run", "model.pretrained=false"))
    task = CausalLM(config)
    assert task.pretrained() is None
    model = task.build_model()
    assert all(parameter.is_meta for parameter in model.parameters() if parameter.ndim > 1)
    drawn = {name: task.initial_std(name) for name, _ in model.named_parameters()}
    kinds = [nn.Embedding, nn.Linear, nn.LayerNorm]
    for name, module in model.named_modules():
        if isinstance(module, tuple(kinds)) and f"{name}.weight" in drawn:
            assert drawn[f"{name}.weight"] == (None if isinstance(module, nn.LayerNorm) else 0.02)
            assert drawn.get(f"{name}.bias", 0.0) == 0.0


def test_plan_needs_neither_weights_nor_memory(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    saved("phi", tmp_path)
    (tmp_path / "model.safetensors").unlink()
    wide = json.loads((tmp_path / "config.json").read_text()) | {"hidden_size": 8192, "intermediate_size": 32768}
    (tmp_path / "config.json").write_text(json.dumps(wide))
    words = ["model=hf", f"model.path={tmp_path}", "data.tokenizer=bytes", "data.sequence_length=128"]
    assert main([*words, "parallel=fsdp", "launch.processes=2", "dry_run=true"]) == 0
    plan = capsys.readouterr().out
    assert "PhiForCausalLM of transformers" in plan
    assert "WARNING    model=hf runs transformers' own code" in plan


CHANGES: dict[str, tuple[dict[str, Any], str]] = {
    "encoder-decoder": ({"model_type": "t5", "is_encoder_decoder": True}, "describes an encoder-decoder model; only"),
    "quantized": ({"quantization_config": {"bits": 4}}, "has a quantization_config with no quant_method, but"),
    "of its own code": (
        {"model_type": "new", "auto_map": {"AutoModelForCausalLM": "new.New"}},
        "no such model, a newer version may; code in the folder of a model is never run",
    ),
    "for masks": (
        {"model_type": "bert", "architectures": ["BertForMaskedLM"]},
        "has a BertForMaskedLM, but model=hf .* use task=masked_lm task.model=",
    ),
    "of images": ({"model_type": "vit", "vocab_size": ...}, "has model_type vit and no vocab_size, so it is no"),
    "of a kind that is no text": (
        {"model_type": []},
        "has model_type .., which no model family supports|no such model",
    ),
    "malformed": ({"num_attention_heads": "four"}, "num_attention_heads"),
}


@pytest.mark.parametrize("kind", CHANGES)
def test_folder_of_another_kind_of_model_is_refused(kind: str, tmp_path: Path) -> None:
    changes, message = CHANGES[kind]
    config = {"model_type": "phi", **SIZES, **changes}
    (tmp_path / "config.json").write_text(json.dumps({key: each for key, each in config.items() if each is not ...}))
    with pytest.raises(UserError, match=message) as error:
        CausalLM(compose(["model=hf", f"model.path={tmp_path}", "data.tokenizer=bytes"])).build_model()
    assert "\n" not in str(error.value)


def test_architectures_that_are_not_a_list_are_ignored(tmp_path: Path) -> None:
    config = {"model_type": "phi", **SIZES, "architectures": 5}
    (tmp_path / "config.json").write_text(json.dumps(config))
    task = CausalLM(compose(["model=hf", f"model.path={tmp_path}", "data.tokenizer=bytes"]))
    with torch.device("meta"):
        assert type(task.build_model()).__name__ == "PhiForCausalLM"


def test_folder_without_a_model_is_refused(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"model=hf needs .*model\.path=FOLDER_OR_NAME"):
        compose(["model=hf"])
    with pytest.raises(UserError, match=r"cannot read .*config\.json"):
        compose(["model=hf", f"model.path={tmp_path}"])
    (tmp_path / "config.json").write_bytes((folder / "opt/config.json").read_bytes())
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    ended = runs.run_here(sft(folder, tmp_path / "run", f"model.path={tmp_path}"))
    assert ended.code == 78
    assert "'pytorch_model.bin' is a pickle, which is never loaded" in ended.printed.splitlines()[-1]
    with pytest.raises(UserError, match=r"opt, which no model family supports; .*; model=hf trains it"):
        compose([f"model.path={tmp_path}"])
    with pytest.raises(UserError, match=r"exceeds the 256 positions in config.json .* use data.sequence_length=256"):
        compose(["model=hf", f"model.path={tmp_path}", "model.max_sequence_length=300"])


LORA = ("recipe=lora", "adapter.modules=[q_proj,o_proj]", "adapter.rank=4", "optim.lr=0.01")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "changes", "of_run"),
    [("gpt_neox", {}, ()), ("granite", {}, LORA), ("gemma3_text", {}, ()), ("olmo2", {}, ())],
)
def test_tensor_ranks_shard_a_model_by_its_own_plan(
    name: str, changes: dict[str, Any], of_run: tuple[str, ...], cluster: Cluster, folder: Path, tmp_path: Path
) -> None:
    """Biases and fused queries, keys and values; adapters; norms of heads and windows; norms of the full width."""
    saved(name, tmp_path / "model", **changes)
    more = [f"model.path={tmp_path / 'model'}", "precision=fp32", "trainer.steps=3", *of_run]
    assert runs.run_here(sft(folder, tmp_path / "single", *more)).code == 0
    more += ["parallel=fsdp", "parallel.tensor=2", "parallel.sequence=false"]
    argv = sft(folder, tmp_path / "sharded", *more)
    answers = cluster.run(4 if name == "gpt_neox" else 2, "testing.runs:train_reported", argv=argv)
    assert {answer.value for answer in answers} == {0}, answers[0].printed
    assert losses(tmp_path / "sharded") == pytest.approx(losses(tmp_path / "single"), rel=1e-5)
    stem = "adapter_model" if of_run else "model"
    whole, sharded = (runs.weights(tmp_path / run, stem) for run in ("single", "sharded"))
    assert {key: value.shape for key, value in whole.items()} == {key: value.shape for key, value in sharded.items()}


def planned(path: Path, *more: str) -> tuple[CausalLM, nn.Module, ParallelPlan]:
    """Return a task, its model on the meta device and the plan."""
    task = CausalLM(compose(["model=hf", f"model.path={path}", "data.tokenizer=bytes", *more]))
    model = task.build_model()
    return task, model, task.parallel_plan(model)


def written_config(path: Path, name: str, **changes: Any) -> Path:
    config = {"model_type": name, **SIZES, **MODELS.get(name, {}), **changes}
    (path / "config.json").write_text(json.dumps(config))
    return path


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "cohere": ({"use_qk_norm": True}, "a small CohereForCausalLM sharded by the tensor plan .* differs from a whole"),
    "olmoe": ({}, "for OlmoeForCausalLM uses .*packed_colwise, which model=hf does not support"),
    "opt": ({}, "transformers has no tensor plan for OPTForCausalLM"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_tensor_plan_that_changes_the_model_is_refused(name: str, tmp_path: Path) -> None:
    """Plain columns and rows, in cohere, around code that needs the whole width."""
    changes, message = REFUSED[name]
    _, model, plan = planned(written_config(tmp_path, name, **changes))
    layout = resolve_layout(compose(["parallel=fsdp", "parallel.tensor=2", "parallel.sequence=false"]).parallel, 2)
    with pytest.raises(UserError, match=rf"^parallel\.tensor=2: .*{message}.*; use parallel\.tensor=1 with ") as error:
        check_plan(model, plan, layout)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", ["qwen3", pytest.param("olmo2", marks=pytest.mark.slow)])
def test_tensor_plan_that_does_not_change_the_model_is_used(name: str, tmp_path: Path) -> None:
    _, _, plan = planned(written_config(tmp_path, name))
    assert plan.refuse_roles is not None
    assert plan.refuse_roles() == ""
    shards_attention = any(glob.endswith("q_proj") for glob in plan.roles)
    assert shards_attention is (name != "olmo2"), "norms of the full width"


def test_gradient_that_the_roles_would_change_is_found() -> None:
    """A gate within the region, applied after the sum: outputs agree, but its gradient would be counted twice."""

    class Gated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down, self.gate = nn.Linear(4, 6), nn.Linear(6, 4), nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.down(self.up(x).relu()) * self.gate(x).sigmoid()

    torch.manual_seed(0)
    model, x = nn.ModuleDict({"mlp": Gated()}), torch.randn(1, 3, 4)
    roles = {"mlp": "region", "mlp.up": "column", "mlp.down": "row"}
    differing = difference_of_shards(model, ParallelPlan(roles=roles), lambda shard: shard["mlp"](x))
    assert differing == "the gradient of mlp.gate.weight"
    plain = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 4))
    roles = {"": "region", "0": "column", "1": "row"}
    assert difference_of_shards(plain, ParallelPlan(roles=roles), lambda shard: shard(x)) == ""


def refusal(path: Path, axis: str) -> str:
    config = compose(["model=hf", f"model.path={path}", "parallel=fsdp", f"parallel.{axis}=2"])
    layout = resolve_layout(config.parallel, 2)
    with pytest.raises(UserError) as error:
        check_layout(config, layout, gradient_accumulation(config.trainer, layout))
    return str(error.value)


@pytest.mark.parametrize("axis", ["context", "pipeline", "expert"])
def test_axes_that_divide_a_model_are_refused(axis: str, folder: Path, tmp_path: Path) -> None:
    assert refusal(folder / "opt", axis).endswith(f"use parallel.{axis}=1 with parallel=fsdp")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "vocab_size": ROWS}))
    assert "use model=auto, which reads llama natively" in refusal(tmp_path, axis)


def test_keys_that_name_code_are_not_followed(folder: Path) -> None:
    section = compose(["model=hf", f"model.path={folder / 'opt'}", "data.tokenizer=bytes"]).model
    harmful = {"auto_map": {"AutoModel": "x"}, "_attn_implementation": "someone/kernels", "attn_implementation": "a/b"}
    harmful["task_specific_params"] = dict(harmful)
    section = section.model_copy(update={"architecture": section.architecture | harmful})
    family = HuggingFaceModel(section, ROWS)
    assert family.build().config._attn_implementation == "serried"
    exported = family.export_config(None)
    assert harmful.keys() & exported.keys() == {"task_specific_params"}
    assert exported["task_specific_params"] == {}


def test_preferences_are_computed_from_logits(folder: Path, tmp_path: Path) -> None:
    pairs = [{"prompt": f"{number}?", "chosen": f"{number}.", "rejected": "No."} for number in range(40)]
    (tmp_path / "pairs.jsonl").write_text("\n".join(map(json.dumps, pairs)))
    words = ["recipe=dpo", "precision=fp32", f"data.path={tmp_path / 'pairs.jsonl'}", "trainer.steps=2"]
    assert main(sft(folder, tmp_path / "run", *words)) == 0
    first, second = losses(tmp_path / "run")
    assert first == pytest.approx(math.log(2)), "the model is the reference"
    assert second < first


FAKE_RANKS = 4
FSDP = ("parallel=fsdp", f"parallel.shard={FAKE_RANKS}", "parallel.reshard_after_forward=true", "precision=bf16")


@contextmanager
def fake_group() -> Iterator[None]:
    """A process group whose collectives send nothing."""
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=FAKE_RANKS)
    try:
        yield
    finally:
        dist.destroy_process_group()


def sharded(path: Path, low_dtype: torch.dtype | None) -> tuple[CausalLM, DistributedModel]:
    task, model, plan = planned(path, *FSDP)
    parallel = parallelize(
        model, plan, lambda _: 0.02, seed=1, layout=resolve_layout(task.run.parallel, FAKE_RANKS),
        section=task.run.parallel, low_dtype=low_dtype, device=torch.device("cpu"),
    )  # fmt: skip
    return task, parallel


def test_fsdp_gathers_blocks_in_bf16(tmp_path: Path) -> None:
    """Every unit is gathered twice, but the head, where the backward starts, and the last norm once."""
    written_config(tmp_path, "qwen3", vocab_size=260, head_dim=16)
    tokens = torch.zeros(1, 16, dtype=torch.int64)
    with fake_group():
        _, parallel = sharded(tmp_path, torch.bfloat16)
        with Wire() as wire:
            parallel.model(tokens, targets=tokens).backward()
    whole = sum(math.prod(spec.shape) for spec in parallel.specs.values())
    once = sum(math.prod(parallel.specs[name].shape) for name in ("lm_head.weight", "model.norm.weight"))
    sent = (FAKE_RANKS - 1) / FAKE_RANKS
    task, model, plan = planned(tmp_path, *FSDP)
    sizes = Sizes(task.run, resolve_layout(task.run.parallel, FAKE_RANKS), model, plan)
    flows = planned_flows(task.run, 1, sizes)
    assert sum(flow.bytes for flow in flows if flow.kind == "all_gather") == wire.bytes["allgather_base"]
    assert wire.bytes == {"allgather_base": (2 * whole - once) * 2 * sent, "reduce_scatter_base": whole * 4 * sent}


def test_rank_reads_only_the_bytes_of_its_shard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved("qwen3", tmp_path, vocab_size=260)
    counts, preadv = list[int](), os.preadv

    def counted(*arguments: Any) -> int:
        counts.append(preadv(*arguments))
        return counts[-1]

    there = load_file(tmp_path / "model.safetensors")
    with fake_group():
        task, parallel = sharded(tmp_path, None)
        monkeypatch.setattr(os, "preadv", counted)
        load_weights(tmp_path, parallel, task.exported)
    for held in parallel.parameters:
        assert held.local.equal(there[held.name].chunk(FAKE_RANKS)[1]), held.name
    of_headers = (tmp_path / "model.safetensors").stat().st_size - sum(each.nbytes for each in there.values())
    shard = sum(each.nbytes for each in there.values()) // FAKE_RANKS
    assert shard <= sum(counts) <= shard + of_headers


@pytest.mark.slow
def test_loss_in_bf16_is_that_of_the_built_in_family(cluster: Cluster, folder: Path, tmp_path: Path) -> None:
    """Both gather bf16 and compute without autocast."""
    saved("qwen3", tmp_path / "model")
    how = [
        f"model.path={tmp_path / 'model'}", "precision=bf16", "parallel=fsdp", "parallel.reshard_after_forward=true",
    ]  # fmt: skip
    for choice in ("hf", "auto"):
        argv = sft(folder, tmp_path / choice, *how, f"model={choice}")
        answers = cluster.run(2, "testing.runs:train_reported", argv=argv)
        assert {answer.value for answer in answers} == {0}, answers[0].printed
    ours, family = losses(tmp_path / "hf"), losses(tmp_path / "auto")
    assert ours == pytest.approx(family, rel=5e-3)
    assert ours[-1] < ours[0] - 0.1


@pytest.mark.slow
def test_compiled_and_recomputed_steps_have_the_same_bits(tmp_path: Path) -> None:
    written_config(tmp_path, "qwen3")
    argv = ["model=hf", f"model.path={tmp_path}", "data.tokenizer=bytes", "precision=fp32", "data.sequence_length=32"]
    again = test_activations.differing(argv, ["full", "selective", "offload"])
    assert again == {"full": [], "selective": [], "offload": []}
    assert test_compile.differing(argv, ["none", "selective"]) == {"none": [[], 1], "selective": [[], 1]}
