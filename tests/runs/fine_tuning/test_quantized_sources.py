"""Fine-tuning starts from FP8 and MXFP4 weights: read by shards, trained, and exported as an ordinary model."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from serried.commands import export_models
from serried.configs.compose import compose
from serried.configs.errors import UserError
from serried.program import main
from testing import runs
from testing.rank_pool import Cluster
from tests.ranks.models.test_families import opened, written
from tests.runs.fine_tuning.test_sft import write_chats

BLOCK = 16
COMMON = {
    "vocab_size": 257, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": 256, "initializer_range": 0.2, "pad_token_id": None, "eos_token_id": 0,
    "bos_token_id": 0,
}  # fmt: skip
QWEN3 = COMMON | {"hidden_size": 48, "head_dim": 24, "intermediate_size": 80}
"""Half of any weight's rows or columns, the share of a rank, ends inside of a block."""
GPT_OSS = COMMON | {
    "hidden_size": 32, "head_dim": 16, "intermediate_size": 32, "num_local_experts": 3, "num_experts_per_tok": 2,
    "sliding_window": 16, "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}  # fmt: skip

DEEPSEEK = COMMON | {
    "num_key_value_heads": 4, "hidden_size": 32, "intermediate_size": 64, "moe_intermediate_size": 16,
    "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1,
    "q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 16,
}  # fmt: skip


def quantize_fp8(tensors: dict[str, Tensor]) -> dict[str, Any]:
    """Quantize linear layers in place. Returns the ``quantization_config``."""
    for name in [name for name in tensors if name.endswith("_proj.weight")]:
        rows, columns = tensors[name].shape
        blocks = tensors[name].float().view(rows // BLOCK, BLOCK, columns // BLOCK, BLOCK)
        scales = blocks.abs().amax((1, 3), keepdim=True) / 448
        tensors[name] = (blocks / scales).to(torch.float8_e4m3fn).view(rows, columns)
        tensors[f"{name}_scale_inv"] = scales[:, 0, :, 0].contiguous()
    return {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [BLOCK, BLOCK]}


def quantize_mxfp4(tensors: dict[str, Tensor]) -> dict[str, Any]:
    """Replace experts by random ones in MXFP4. Returns the ``quantization_config``."""
    generator = torch.Generator().manual_seed(1)
    for name in [name for name in tensors if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        experts, inputs, outputs = tensors.pop(name).shape
        shape = (experts, outputs, inputs // 32)
        tensors[f"{name}_blocks"] = torch.randint(256, (*shape, 16), generator=generator, dtype=torch.uint8)
        tensors[f"{name}_scales"] = torch.randint(120, 125, shape, generator=generator, dtype=torch.uint8)
    return {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}


def quantized_model(folder: Path, kind: str, sizes: dict[str, Any], quantize: Any) -> dict[str, Tensor]:
    """Save a random quantized model of ``kind``. Returns the weights that transformers opens it with, in bf16."""
    import transformers

    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(kind, **sizes)
    transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    found = json.loads((folder / "config.json").read_text()) | {"quantization_config": quantize(tensors)}
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(found))
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    return {name: value.detach().clone() for name, value in theirs.state_dict().items()}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Qwen 3 in FP8, its weights according to transformers, and conversations."""
    folder = tmp_path_factory.mktemp("quantized")
    save_file(quantized_model(folder / "fp8", "qwen3", QWEN3, quantize_fp8), folder / "reference.safetensors")
    write_chats(folder / "chats.jsonl", 60)
    return folder


def tuning(folder: Path, run_dir: Path, *more: str) -> list[str]:
    given = [
        "recipe=sft", f"model.path={folder / 'fp8'}", f"data.path={folder / 'chats.jsonl'}", "data.tokenizer=bytes",
        f"data.cache_dir={folder / 'cache'}", f"run.dir={run_dir}", "data.sequence_length=128", "trainer.steps=2",
        "trainer.global_batch=4", "trainer.micro_batch=2", "trainer.eval_every=0", "trainer.log_every=1",
        "data.workers=0", "optim.lr=0.01", "schedule=constant", "schedule.warmup_steps=0", "precision=fp32", *more,
    ]  # fmt: skip
    return [f"{key}={value}" for key, value in dict(word.split("=", 1) for word in given).items()]


def test_ranks_read_their_shares_of_fp8_blocks(cluster: Cluster, folder: Path, tmp_path: Path) -> None:
    reference = load_file(folder / "reference.safetensors")
    layouts = {"single": [], "fsdp": ["parallel=fsdp"], "tensor": ["parallel=fsdp", "parallel.tensor=2"]}
    for name, more in layouts.items():
        argv = tuning(folder, tmp_path / name, "optim.lr=0", "optim.weight_decay=0", *more)
        for answer in cluster.run(2 if more else 1, "testing.runs:train_reported", argv=argv):
            assert answer.value == 0, answer.printed
        trained = runs.weights(tmp_path / name)
        assert trained.keys() == reference.keys()
        assert all(torch.equal(trained[key].to(torch.bfloat16), value) for key, value in reference.items()), name
        assert runs.losses(tmp_path / name) == pytest.approx(runs.losses(tmp_path / "single"), rel=1e-5)


def test_trained_fp8_model_is_exported_as_an_ordinary_one(folder: Path, tmp_path: Path) -> None:
    import transformers

    ended = runs.run_here(tuning(folder, tmp_path / "run"))
    assert ended.code == 0, ended.printed
    assert f"step 0 with the weights of {folder / 'fp8'}, dequantized from fp8" in ended.printed
    losses = runs.losses(tmp_path / "run")
    assert losses[-1] < losses[0] - 0.1
    export_models.export([f"run.dir={tmp_path / 'run'}", f"out={tmp_path / 'model'}", "dtype=bf16"])
    assert "quantization_config" not in json.loads((tmp_path / "model/config.json").read_text())
    read: Any = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model", output_loading_info=True)
    model, loaded = read
    assert not any(loaded[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys")), loaded
    trained = runs.weights(tmp_path / "run")
    assert all(torch.equal(value, trained[name].to(torch.bfloat16)) for name, value in model.state_dict().items())


def test_adapters_of_an_fp8_model_are_merged_in_bf16(folder: Path, tmp_path: Path) -> None:
    more = ["recipe=lora", "adapter.rank=2", "optim.lr=0", "optim.weight_decay=0"]
    assert runs.run_here(tuning(folder, tmp_path / "run", *more)).code == 0
    export_models.export([f"run.dir={tmp_path / 'run'}", f"out={tmp_path / 'model'}", "merge=true"])
    merged, reference = load_file(tmp_path / "model/model.safetensors"), load_file(folder / "reference.safetensors")
    assert merged.keys() == reference.keys()
    assert all(torch.equal(merged[name], value) for name, value in reference.items()), "the adapters add zero"


def test_plan_of_quantized_weights_counts_them_dequantized(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = json.loads((folder / "fp8/config.json").read_text())
    del found["quantization_config"]
    (tmp_path / "fp8").mkdir()
    (tmp_path / "fp8/config.json").write_text(json.dumps(found))
    plans = []
    for source in (folder / "fp8", tmp_path / "fp8"):
        assert main([*tuning(folder, tmp_path / "run", f"model.path={source}"), "dry_run=true"]) == 0
        plans.append([line for line in capsys.readouterr().out.splitlines() if line.startswith(("model", "memory"))])
    assert plans[0] == plans[1]
    assert len(plans[0]) == 2


def test_gpt_oss_in_mxfp4_trains_with_the_weights_of_transformers(folder: Path, tmp_path: Path) -> None:
    reference = quantized_model(tmp_path / "mxfp4", "gpt_oss", GPT_OSS, quantize_mxfp4)
    _, model = opened(tmp_path / "mxfp4", "hf")
    ours = model.state_dict()
    assert ours.keys() == reference.keys()
    assert all(torch.equal(ours[name], value.float()) for name, value in reference.items())
    as_family = written(*opened(tmp_path / "mxfp4"), tmp_path / "back")
    assert as_family.keys() == reference.keys()
    assert all(torch.equal(as_family[name], value.float()) for name, value in reference.items())
    more = ["model=hf", f"model.path={tmp_path / 'mxfp4'}", "data.packing=none"]
    ended = runs.run_here(tuning(folder, tmp_path / "run", *more))
    assert ended.code == 0, ended.printed
    first, last = runs.losses(tmp_path / "run")
    assert last < first
    assert "quantization_config" not in json.loads((runs.checkpoint(tmp_path / "run") / "config.json").read_text())


@pytest.mark.slow
def test_deepseek_in_fp8_is_read_expert_by_expert(tmp_path: Path) -> None:
    import transformers

    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model("deepseek_v3", **DEEPSEEK)
    transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(tmp_path / "fp8")
    file = tmp_path / "fp8/model.safetensors"
    tensors = load_file(file)
    settings = {"quantization_config": quantize_fp8(tensors)}
    found = json.loads((tmp_path / "fp8/config.json").read_text()) | settings
    (tmp_path / "fp8/config.json").write_text(json.dumps(found))
    save_file(tensors, file)
    ours = written(*opened(tmp_path / "fp8"), tmp_path / "back")
    scales = {name.removesuffix("_scale_inv"): tensors.pop(name) for name in [*tensors] if name.endswith("_scale_inv")}
    assert any(".experts.2.down_proj" in name for name in scales)
    assert ours.keys() == tensors.keys()
    for name, value in tensors.items():
        expected = value.float()
        if name in scales:
            expected *= scales[name].repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
        assert torch.equal(ours[name], expected), name


@pytest.mark.parametrize("choice", ["auto", "hf"])
@pytest.mark.parametrize(
    "found",
    [
        {"quant_method": "gptq", "bits": 4},
        {"quant_method": "awq", "bits": 4},
        {"quant_method": "bitsandbytes", "load_in_4bit": True},
        {"quant_method": "compressed-tensors", "config_groups": {"a": {"weights": {"type": "int", "num_bits": 4}}}},
    ],
    ids=lambda found: found["quant_method"],
)
def test_weights_in_another_format_are_refused_in_one_line(
    found: dict[str, Any], choice: str, folder: Path, tmp_path: Path
) -> None:
    config = json.loads((folder / "fp8/config.json").read_text()) | {"quantization_config": found}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError) as error:
        compose([f"model={choice}", f"model.path={tmp_path}", "data.tokenizer=bytes"])
    assert str(error.value) == (
        f"{tmp_path / 'config.json'} has a quantization_config with quant_method {found['quant_method']}, but only "
        "fp8, mxfp4 and compressed-tensors of FP8 can be dequantized; use the unquantized model, "
        "with recipe=qlora to train it in 4 bits"
    )
