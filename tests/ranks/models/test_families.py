"""Families that transformers has too: the same weights bit for bit, the same logits, the same losses."""

import itertools
import json
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from benchmarks.parity import CUTS, EXPERT_CUTS, TOLERANCES, compare, run
from serried.configs.compose import FOLDER, compose
from serried.configs.errors import UserError
from serried.configs.hugging_face.text_part import text_part
from serried.configs.schema.registry import models
from serried.configs.schema.sections import ParallelSection
from serried.parallel.distributed_model import DistributedModel
from serried.parallel.layout.mesh import Layout
from serried.parallel.parallelize import parallelize
from serried.recipes.exports.export_formats import Source
from serried.recipes.exports.traced import traced
from serried.recipes.models.family import ModelFamily, family_of
from serried.recipes.models.layers.kv_cache import Cache
from serried.recipes.text.causal_lm import CausalLM
from serried.records.safetensors_files import TensorFolder
from serried.trainer.checkpoint.tensors import check_names, load_weights
from testing.rank_pool import ROOT, Cluster
from tests.support.continuing import TOKENS, continued
from tools.key_tables import families

WINDOW, LENGTH, ROWS, PADDING = 8, 30, 131, 7
BORDERS = (0, 4, 21, LENGTH)
"""Where documents begin in a sequence, and its end: one is shorter than the window."""
SIZES = {
    "vocab_size": ROWS, "hidden_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 80, "max_position_embeddings": 64, "rms_norm_eps": 1e-5, "pad_token_id": PADDING,
    "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
}  # fmt: skip
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 24, "head_dim": 16}
LATENT = {
    "num_experts_per_tok": 2, "moe_intermediate_size": 24, "n_routed_experts": 8, "n_group": 4, "topk_group": 2,
    "n_shared_experts": 2, "first_k_dense_replace": 1, "num_key_value_heads": 4, "kv_lora_rank": 12,
    "qk_nope_head_dim": 10, "qk_rope_head_dim": 8, "v_head_dim": 14,
}  # fmt: skip
GPT2 = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "bos_token_id": 0, "eos_token_id": 0}
LINEAR = {
    "head_dim": 16, "linear_key_head_dim": 8, "linear_value_head_dim": 12, "linear_num_key_heads": 2,
    "linear_num_value_heads": 4, "full_attention_interval": 3,
    "rope_parameters": {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.5},
}  # fmt: skip
GEMMA4 = {
    "head_dim": 16, "global_head_dim": 24, "sliding_window": WINDOW, "hidden_size_per_layer_input": 0,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "rope_parameters": {
        "full_attention": {"rope_type": "proportional", "rope_theta": 700.0, "partial_rotary_factor": 0.25},
        "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
    },
}  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "gpt2": GPT2,
    "gpt2, untied": GPT2 | {"tie_word_embeddings": False},
    "mixtral": EXPERTS | {"num_local_experts": 4},
    "qwen3_moe": EXPERTS | {"num_experts": 4},
    "qwen3_moe, biased": EXPERTS | {"num_experts": 4, "attention_bias": True},
    "qwen3_moe, plain": EXPERTS | {"num_experts": 4, "mlp_only_layers": [0], "norm_topk_prob": False},
    "glm4_moe": EXPERTS | {"n_routed_experts": 4, "use_qk_norm": True},
    "glm4_moe, more": EXPERTS
    | {
        "n_routed_experts": 4,
        "n_shared_experts": 2,
        "first_k_dense_replace": 0,
        "norm_topk_prob": False,
        "attention_bias": True,
        "partial_rotary_factor": 0.5,
        "routed_scaling_factor": 1.5,
    },
    "gpt_oss": {
        "num_experts_per_tok": 2,
        "num_local_experts": 4,
        "intermediate_size": 24,
        "head_dim": 16,
        "sliding_window": WINDOW,
        "swiglu_limit": 0.5,
        "attention_bias": True,
    },
    "deepseek_v3": LATENT
    | {
        "q_lora_rank": 20,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 500.0,
            "factor": 4.0,
            "original_max_position_embeddings": 16,
            "mscale": 0.7,
            "mscale_all_dim": 1.3,
        },
    },
    "deepseek_v3, direct queries": LATENT | {"q_lora_rank": None, "rope_interleave": False, "attention_bias": True},
    "qwen3_5_text": LINEAR,
    "qwen3_next": LINEAR | EXPERTS | {"num_experts": 4, "shared_expert_intermediate_size": 24, "mlp_only_layers": [0]},
    "qwen3_5_moe_text": LINEAR | EXPERTS | {"num_experts": 4, "shared_expert_intermediate_size": 48},
    "mistral": {"sliding_window": WINDOW},
    "qwen2": {"tie_word_embeddings": True},
    "qwen3": {"head_dim": 16},
    "olmo2": {},
    "phi3": {"sliding_window": WINDOW},
    "gemma2": {
        "head_dim": 16,
        "sliding_window": WINDOW,
        "query_pre_attn_scalar": 24,
        "attn_logit_softcapping": 2.0,
        "final_logit_softcapping": 3.0,
    },
    "gemma4_text": GEMMA4,
    "gemma4_text, experts": GEMMA4
    | {
        "num_hidden_layers": 2,
        "layer_types": ["sliding_attention", "full_attention"],
        "attention_k_eq_v": True,
        "num_global_key_value_heads": 1,
        "final_logit_softcapping": 3.0,
        "enable_moe_block": True,
        "num_experts": 4,
        "top_k_experts": 2,
        "moe_intermediate_size": 24,
    },
    "gemma4_text, inputs of blocks": GEMMA4
    | {
        "num_hidden_layers": 6,
        "layer_types": ["sliding_attention", "full_attention"] * 3,
        "hidden_size_per_layer_input": 12,
        "vocab_size_per_layer_input": ROWS,
        "num_kv_shared_layers": 2,
        "use_double_wide_mlp": True,
    },
    "gemma3_text": {
        "head_dim": 16,
        "sliding_window": WINDOW,
        "query_pre_attn_scalar": 24,
        "sliding_window_pattern": 3,
        "rope_parameters": {
            "full_attention": {"rope_type": "default", "rope_theta": 700.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
        },
    },
}


def saved(name: str, folder: Path, **changes: Any) -> Any:
    """A random model of transformers, saved in ``folder``; norms, biases and buffers are random too."""
    import transformers

    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(name.partition(",")[0], **deepcopy(SIZES | FAMILIES[name] | changes))
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager")
    with torch.no_grad():
        loaded = ("correction_bias", "layer_scalar")
        corrections = (each for name, each in model.named_buffers() if name.endswith(loaded))
        for tensor in (*model.parameters(), *corrections):
            tensor += 0.1 * torch.randn_like(tensor)
    model.save_pretrained(folder)
    return model.eval()


def opened(folder: Path, choice: str = "auto") -> tuple[ModelFamily, nn.Module]:
    """What ``model=auto model.path=folder`` trains."""
    family, parallel = opened_on(Layout("single"), folder, choice)
    return family, parallel.module


def opened_on(layout: Layout, folder: Path, choice: str = "auto") -> tuple[ModelFamily, DistributedModel]:
    section = compose([f"model={choice}", f"model.path={folder}", f"data.sequence_length={LENGTH}"]).model
    family = family_of(models.get(section.family).load(), section, section.vocab_size)
    model = family.build()
    parallel = parallelize(
        model, family.parallel_plan(model), None, seed=0, layout=layout,
        section=ParallelSection(strategy=layout.strategy), low_dtype=None, device=torch.device("cpu"),
    )  # fmt: skip
    load_weights(folder, parallel, family.exported_in(TensorFolder(folder).specs, family.exported))
    return family, parallel


def written(family: ModelFamily, model: nn.Module, folder: Path) -> dict[str, Tensor]:
    """The tensors of a checkpoint in ``folder`` of ``model``."""
    state: dict[str, Tensor] = {}
    kept = model.state_dict()
    for name, _ in (*model.named_parameters(), *model.named_buffers()):  # which names tied ones once
        if (tensor := kept.get(name)) is None:
            continue
        for fragment in family.exported(name, tensor.shape):
            whole = state.setdefault(fragment.name, torch.full(fragment.shape, float("nan")))
            whole[fragment.theirs.indices()] = tensor[fragment.ours.indices()]
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(family.export_config(0)))
    save_file(state, folder / "model.safetensors", {"format": "pt"})
    return state


def documents(row: Tensor) -> list[Tensor]:
    return [row[start:stop] for start, stop in itertools.pairwise(BORDERS)]


POSITIONS = torch.cat([torch.arange(stop - start) for start, stop in itertools.pairwise(BORDERS)])


SLOW = ("gemma4_text", "qwen3_5_moe_text", "qwen3_5_text")
"""Families whose code a test of another family runs too."""


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW)) for name in FAMILIES])
def test_family_computes_the_same_as_transformers(name: str, tmp_path: Path) -> None:
    import transformers

    theirs = saved(name, tmp_path / "theirs")
    family, ours = opened(tmp_path / "theirs")
    assert family.section.family == name.partition(",")[0]
    batches = torch.randint(ROWS, (3, 2, LENGTH), generator=torch.Generator().manual_seed(1))
    batches[..., ::5] = PADDING  # whose row of the embedding has no gradient, but that of a tied head

    # Logits, and the same bits back.
    with torch.no_grad():
        expected = theirs(batches[0]).logits
        assert expected.std() > 0.1, "a flat output would compare equal to anything"
        torch.testing.assert_close(ours(batches[0]), expected, rtol=0, atol=1e-5)
    there, back = load_file(tmp_path / "theirs/model.safetensors"), written(family, ours, tmp_path / "back")
    assert back.keys() == there.keys()
    assert all(back[key].equal(there[key]) for key in there)

    # Three steps on packed documents, which transformers sees one by one.
    mine, other = (torch.optim.AdamW(model.parameters(), lr=1e-3) for model in (ours, theirs))
    for batch in batches:
        targets = batch.roll(-1, 1)
        targets[:, [border - 1 for border in BORDERS[1:]]] = -100
        loss = ours(batch, targets, POSITIONS.expand(2, -1)) / (targets >= 0).sum()
        logits = [theirs(document[None]).logits[0, :-1] for row in batch for document in documents(row)]
        labels = [document[1:] for row in batch for document in documents(row)]
        reference = F.cross_entropy(torch.cat(logits), torch.cat(labels))
        torch.testing.assert_close(loss, reference, rtol=1e-5, atol=0)
        for optimizer, each in ((mine, loss), (other, reference)):
            optimizer.zero_grad()
            each.backward()
            optimizer.step()

    # Transformers opens the result, and a cache changes nothing.
    written(family, ours, tmp_path / "trained")
    again, loaded = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "trained", attn_implementation="eager", output_loading_info=True
    )
    assert not any(loaded[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys")), loaded
    assert type(again) is type(theirs)
    with torch.no_grad():
        whole, cache = ours(batches[0]), Cache(family.cached_layers, LENGTH)
        torch.testing.assert_close(again.eval()(batches[0]).logits, whole, rtol=0, atol=1e-5)
        pieces = [ours(piece, cache=cache) for piece in batches[0].split([13, 2, *[1] * (LENGTH - 15)], 1)]
        torch.testing.assert_close(torch.cat(pieces, 1), whole[:, [12, *range(14, LENGTH)]], rtol=0, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [name for name in FAMILIES if "gemma4" in name or name in ("qwen3_next", "qwen3_5_moe_text")]
)
def test_greedy_text_equals_that_of_transformers(name: str, tmp_path: Path) -> None:
    """Generate with the cache, past the window."""
    prompt = 9
    theirs = saved(name, tmp_path, tie_word_embeddings=False)
    family, ours = opened_on(Layout("single"), tmp_path)
    tokens = torch.randint(ROWS, (1, prompt), generator=torch.Generator().manual_seed(1))
    settings = {"attention_mask": torch.ones_like(tokens), "do_sample": False, "max_new_tokens": TOKENS}
    expected = theirs.generate(tokens, eos_token_id=-1, pad_token_id=0, **settings)[0, prompt:].tolist()
    assert continued(ours, family, tokens.tolist()) == [expected]
    assert len({*expected}) > 1, "a model that repeats itself would compare equal to much"


IMAGES: dict[str, dict[str, Any]] = {
    "qwen3_5": {
        "depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 48, "patch_size": 4,
        "num_position_embeddings": 16,
    },
    "gemma4": {
        "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
        "num_key_value_heads": 2, "head_dim": 8, "position_embedding_size": 16,
    },
}  # fmt: skip
IMAGES["qwen3_5_moe"] = IMAGES["qwen3_5"]


@pytest.mark.slow
@pytest.mark.parametrize("kind", IMAGES)
def test_text_part_of_model_with_images_is_read(kind: str, tmp_path: Path) -> None:
    import transformers

    torch.manual_seed(0)
    text = deepcopy(SIZES | FAMILIES[f"{kind}_text"])
    if kind == "gemma4":  # as in published models: tokens of an image attend to each other, those of a text do not
        text["use_bidirectional_attention"] = "vision"
    config = transformers.AutoConfig.for_model(kind, text_config=text, vision_config=IMAGES[kind])
    whole = transformers.AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
    whole.save_pretrained(tmp_path)
    tokens = torch.arange(LENGTH).expand(2, -1)
    with torch.no_grad():
        expected = whole.eval()(input_ids=tokens).logits
        torch.testing.assert_close(opened(tmp_path)[1](tokens), expected, rtol=0, atol=1e-5)


def test_layer_of_glm_for_speculative_decoding_is_left_out(tmp_path: Path) -> None:
    theirs, file = saved("glm4_moe", tmp_path), tmp_path / "model.safetensors"
    drafts = {f"model.layers.4.{each}.weight": torch.ones(2) for each in ("eh_proj", "input_layernorm")}
    save_file(load_file(file) | drafts, file, {"format": "pt"})
    tokens = torch.arange(LENGTH).expand(2, -1)
    with torch.no_grad():
        torch.testing.assert_close(opened(tmp_path)[1](tokens), theirs(tokens).logits, rtol=0, atol=1e-5)


def test_keys_of_blocks_that_use_those_of_others_are_left_out(tmp_path: Path) -> None:
    """Published checkpoints of Gemma 4 E2B and E4B have them."""
    theirs, file = saved("gemma4_text, inputs of blocks", tmp_path), tmp_path / "model.safetensors"
    unused = {f"model.layers.5.self_attn.{name}.weight": torch.ones(2) for name in ("k_proj", "v_proj", "k_norm")}
    save_file(load_file(file) | unused, file, {"format": "pt"})
    tokens = torch.arange(LENGTH).expand(2, -1)
    with torch.no_grad():
        torch.testing.assert_close(opened(tmp_path)[1](tokens), theirs(tokens).logits, rtol=0, atol=1e-5)


def test_experts_stacked_as_on_the_hub_are_read(tmp_path: Path) -> None:
    import transformers

    theirs, file = saved("qwen3_5_moe_text", tmp_path, vocab_size=257), tmp_path / "model.safetensors"
    stacked = theirs.state_dict()
    save_file(stacked, file, {"format": "pt"})
    assert "model.layers.0.mlp.experts.gate_up_proj" in load_file(file)
    task = CausalLM(compose(["model=auto", f"model.path={tmp_path}", "data.tokenizer=bytes"]))
    check_names(tmp_path, task.build_model(), task.exported_from(tmp_path))  # as before training
    family, ours = opened(tmp_path)
    written(family, ours, tmp_path / "back")
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "back").state_dict()
    assert again.keys() == stacked.keys()
    assert all(again[name].equal(stacked[name]) for name in stacked)


VISION = 416_866_032
"""Parameters of Gemma 3's vision tower, which is followed by a projection into the text model."""


@pytest.mark.parametrize(
    ("preset", "count"),
    [
        ("mistral7b", 7_241_732_096),
        ("qwen25_7b", 7_615_616_512),
        ("qwen3_8b", 8_190_735_360),
        ("qwen3_600m", 596_049_920),
        ("olmo2_7b", 7_298_617_344),
        ("phi3_mini", 3_821_079_552),
        ("gemma2_9b", 9_241_705_984),
        ("gemma3_1b", 999_885_952),
        ("gemma3_4b", 4_300_079_472 - VISION - 1152 * (2560 + 1)),
        ("gemma3_12b", 12_187_325_040 - VISION - 1152 * (3840 + 1)),
        ("gemma3_27b", 27_432_406_640 - VISION - 1152 * (5376 + 1)),
        ("phi4_mini", 3_836_021_760),
        ("gpt_oss_20b", 20_914_757_184),
        ("deepseek_v3", 671_026_419_200 - 58 * 256),
        ("kimi_k2", 1_026_408_232_448 - 60 * 384),
        ("gpt_oss_120b", 116_829_156_672),
        ("gemma4_31b", 30_697_345_280),
        ("gemma4_e2b", 4_628_569_344),
        ("gemma4_e4b", 7_463_013_376),
        ("gemma4_26b_a4b", 25_233_141_760),
        ("qwen3_next_80b", 79_674_391_296),
        ("qwen35_35b_a3b", 34_660_610_688),
        ("qwen35_27b", 26_895_998_464),
        ("qwen35_800m", 752_393_024),
    ],
)
def test_presets_have_their_published_number_of_parameters(preset: str, count: int) -> None:
    section = compose([f"model={preset}", "data.tokenizer=bytes"]).model
    family = family_of(models.get(section.family).load(), section, section.vocab_size)
    assert sum(parameter.numel() for parameter in family.build().parameters()) == count
    assert ("with a window of" in family.describe()) == (section.window(0) is not None)
    assert f"{count:,}" in (FOLDER / "model" / f"{preset}.yaml").read_text(encoding="utf-8")


YARN = {
    "beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0, "original_max_position_embeddings": 4096, "rope_type": "yarn",
}  # fmt: skip
GPT_OSS = {
    "model_type": "gpt_oss", "attention_bias": True, "attention_dropout": 0.0, "experts_per_token": 4, "head_dim": 64,
    "hidden_act": "silu", "hidden_size": 2880, "initial_context_length": 4096, "intermediate_size": 2880,
    "max_position_embeddings": 131072, "num_attention_heads": 64, "num_experts_per_tok": 4, "num_key_value_heads": 8,
    "pad_token_id": 199999, "rms_norm_eps": 1e-5, "rope_scaling": YARN | {"truncate": False}, "rope_theta": 150000,
    "sliding_window": 128, "swiglu_limit": 7.0, "tie_word_embeddings": False, "vocab_size": 201088,
}  # fmt: skip
DEEPSEEK = {
    "model_type": "deepseek_v3", "attention_bias": False, "ep_size": 1, "first_k_dense_replace": 3,
    "hidden_act": "silu", "hidden_size": 7168, "intermediate_size": 18432, "kv_lora_rank": 512,
    "max_position_embeddings": 163840, "moe_intermediate_size": 2048, "moe_layer_freq": 1, "n_group": 8,
    "n_routed_experts": 256, "n_shared_experts": 1, "norm_topk_prob": True, "num_attention_heads": 128,
    "num_experts_per_tok": 8, "num_hidden_layers": 61, "num_key_value_heads": 128, "num_nextn_predict_layers": 1,
    "q_lora_rank": 1536, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "rms_norm_eps": 1e-6,
    "rope_scaling": {
        "beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096, "type": "yarn",
    },
    "rope_theta": 10000, "routed_scaling_factor": 2.5, "scoring_func": "sigmoid", "seq_aux": True,
    "tie_word_embeddings": False, "topk_group": 4, "topk_method": "noaux_tc", "v_head_dim": 128, "vocab_size": 129280,
}  # fmt: skip
LINEAR_35 = {
    "model_type": "qwen3_5_text", "attn_output_gate": True, "full_attention_interval": 4, "head_dim": 256,
    "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128, "linear_num_key_heads": 16, "linear_value_head_dim": 128,
    "max_position_embeddings": 262144, "mtp_num_hidden_layers": 1, "rms_norm_eps": 1e-6, "tie_word_embeddings": False,
    "rope_parameters": {
        "mrope_interleaved": True, "mrope_section": [11, 11, 10], "rope_type": "default", "rope_theta": 10000000,
        "partial_rotary_factor": 0.25,
    },
    "vocab_size": 248320,
}  # fmt: skip
GEMMA4_31B = {
    "attention_bias": False, "attention_k_eq_v": True, "enable_moe_block": False, "final_logit_softcapping": 30.0,
    "global_head_dim": 512, "head_dim": 256, "hidden_activation": "gelu_pytorch_tanh", "hidden_size": 5376,
    "hidden_size_per_layer_input": 0, "intermediate_size": 21504,
    "layer_types": (["sliding_attention"] * 5 + ["full_attention"]) * 10, "max_position_embeddings": 262144,
    "model_type": "gemma4_text", "num_attention_heads": 32, "num_global_key_value_heads": 4, "num_hidden_layers": 60,
    "num_key_value_heads": 16, "num_kv_shared_layers": 0, "rms_norm_eps": 1e-6,
    "rope_parameters": {
        "full_attention": {"partial_rotary_factor": 0.25, "rope_theta": 1000000.0, "rope_type": "proportional"},
        "sliding_attention": {"rope_theta": 10000.0, "rope_type": "default"},
    },
    "sliding_window": 1024, "tie_word_embeddings": True, "use_double_wide_mlp": False, "vocab_size": 262144,
    "vocab_size_per_layer_input": 262144,
}  # fmt: skip
GEMMA4_E4B = GEMMA4_31B | {
    "attention_k_eq_v": False, "hidden_size": 2560, "hidden_size_per_layer_input": 256, "intermediate_size": 10240,
    "layer_types": (["sliding_attention"] * 5 + ["full_attention"]) * 7, "max_position_embeddings": 131072,
    "num_attention_heads": 8, "num_global_key_value_heads": None, "num_hidden_layers": 42, "num_key_value_heads": 2,
    "num_kv_shared_layers": 18, "sliding_window": 512,
}  # fmt: skip
PUBLISHED: dict[str, dict[str, Any]] = {
    "deepseek_v3": DEEPSEEK,
    "kimi_k2": DEEPSEEK | {
        "model_type": "kimi_k2", "first_k_dense_replace": 1, "max_position_embeddings": 131072, "n_group": 1,
        "n_routed_experts": 384, "num_attention_heads": 64, "num_key_value_heads": 64, "num_nextn_predict_layers": 0,
        "rope_scaling": DEEPSEEK["rope_scaling"] | {"beta_fast": 1.0, "beta_slow": 1.0, "factor": 32.0},
        "rope_theta": 50000.0, "routed_scaling_factor": 2.827, "topk_group": 1, "vocab_size": 163840,
    },
    "gpt_oss_20b": GPT_OSS | {
        "num_hidden_layers": 24, "num_local_experts": 32, "layer_types": ["sliding_attention", "full_attention"] * 12,
    },
    "gpt_oss_120b": GPT_OSS | {
        "num_hidden_layers": 36, "num_local_experts": 128, "layer_types": ["sliding_attention", "full_attention"] * 18,
    },
    "mistral7b": {
        "model_type": "mistral", "hidden_size": 4096, "intermediate_size": 14336, "max_position_embeddings": 32768,
        "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 8, "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0, "sliding_window": 4096, "tie_word_embeddings": False, "vocab_size": 32000,
    },
    "qwen25_7b": {
        "model_type": "qwen2", "hidden_size": 3584, "intermediate_size": 18944, "max_position_embeddings": 131072,
        "max_window_layers": 28, "num_attention_heads": 28, "num_hidden_layers": 28, "num_key_value_heads": 4,
        "rms_norm_eps": 1e-6, "rope_theta": 1000000.0, "sliding_window": 131072, "use_sliding_window": False,
        "tie_word_embeddings": False, "vocab_size": 152064,
    },
    "qwen3_600m": {
        "model_type": "qwen3", "attention_bias": False, "head_dim": 128, "hidden_size": 1024,
        "intermediate_size": 3072, "max_position_embeddings": 40960, "num_attention_heads": 16,
        "num_hidden_layers": 28, "num_key_value_heads": 8, "rms_norm_eps": 1e-6, "rope_scaling": None,
        "rope_theta": 1000000, "sliding_window": None, "tie_word_embeddings": True, "use_sliding_window": False,
        "vocab_size": 151936,
    },
    "phi3_mini": {
        "model_type": "phi3", "hidden_size": 3072, "intermediate_size": 8192, "max_position_embeddings": 4096,
        "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 32, "rms_norm_eps": 1e-5,
        "original_max_position_embeddings": 4096, "rope_scaling": None, "rope_theta": 10000.0,
        "sliding_window": 2047, "tie_word_embeddings": False, "vocab_size": 32064,
    },
    "gemma2_9b": {
        "model_type": "gemma2", "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0, "head_dim": 256,
        "hidden_act": "gelu_pytorch_tanh", "hidden_activation": "gelu_pytorch_tanh", "hidden_size": 3584,
        "intermediate_size": 14336, "max_position_embeddings": 8192, "num_attention_heads": 16,
        "num_hidden_layers": 42, "num_key_value_heads": 8, "query_pre_attn_scalar": 256, "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0, "sliding_window": 4096, "sliding_window_size": 4096, "vocab_size": 256000,
    },
    "gemma3_1b": {
        "model_type": "gemma3_text", "attn_logit_softcapping": None, "final_logit_softcapping": None,
        "head_dim": 256, "hidden_activation": "gelu_pytorch_tanh", "hidden_size": 1152, "intermediate_size": 6912,
        "max_position_embeddings": 32768, "num_attention_heads": 4, "num_hidden_layers": 26,
        "num_key_value_heads": 1, "query_pre_attn_scalar": 256, "rms_norm_eps": 1e-6,
        "rope_local_base_freq": 10000, "rope_scaling": None, "rope_theta": 1000000, "sliding_window": 512,
        "sliding_window_pattern": 6, "vocab_size": 262144,
    },
    "gemma3_4b": {
        "model_type": "gemma3",
        "text_config": {
            "hidden_size": 2560, "intermediate_size": 10240, "model_type": "gemma3_text", "num_hidden_layers": 34,
            "rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "sliding_window": 1024,
        },
    },
    "gemma3_12b": {
        "model_type": "gemma3",
        "text_config": {
            "hidden_size": 3840, "intermediate_size": 15360, "model_type": "gemma3_text", "num_attention_heads": 16,
            "num_hidden_layers": 48, "num_key_value_heads": 8, "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
            "sliding_window": 1024,
        },
    },
    "gemma3_27b": {
        "model_type": "gemma3",
        "text_config": {
            "head_dim": 128, "hidden_size": 5376, "intermediate_size": 21504, "model_type": "gemma3_text",
            "num_attention_heads": 32, "num_hidden_layers": 62, "num_key_value_heads": 16,
            "query_pre_attn_scalar": 168, "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
            "sliding_window": 1024,
        },
    },
    "phi4_mini": {
        "model_type": "phi3", "hidden_size": 3072, "intermediate_size": 8192, "max_position_embeddings": 131072,
        "num_attention_heads": 24, "num_hidden_layers": 32, "num_key_value_heads": 8, "rms_norm_eps": 1e-5,
        "original_max_position_embeddings": 4096, "partial_rotary_factor": 0.75, "rope_theta": 10000.0,
        "rope_scaling": {
            "type": "longrope", "short_factor": [1.0] * 48,
            "long_factor": [
                1, 1.118320672, 1.250641126, 1.398617824, 1.564103225, 1.74916897, 1.956131817, 2.187582649,
                2.446418898, 2.735880826, 3.059592084, 3.421605075, 3.826451687, 4.279200023, 4.785517845, 5.351743533,
                5.984965424, 6.693110555, 7.485043894, 8.370679318, 9.36110372, 10.4687158, 11.70738129, 13.09260651,
                14.64173252, 16.37415215, 18.31155283, 20.47818807, 22.90118105, 25.61086418, 28.64115884, 32.03, 32.1,
                32.13, 32.23, 32.6, 32.61, 32.64, 32.66, 32.7, 32.71, 32.93, 32.97, 33.28, 33.49, 33.5, 44.16, 47.77,
            ],
        },
        "sliding_window": 262144, "tie_word_embeddings": True, "vocab_size": 200064,
    },
    "gemma4_31b": {"model_type": "gemma4", "text_config": GEMMA4_31B},
    "gemma4_26b_a4b": {
        "model_type": "gemma4",
        "text_config": GEMMA4_31B | {
            "enable_moe_block": True, "hidden_size": 2816, "intermediate_size": 2112,
            "layer_types": (["sliding_attention"] * 5 + ["full_attention"]) * 5, "moe_intermediate_size": 704,
            "num_attention_heads": 16, "num_experts": 128, "num_global_key_value_heads": 2, "num_hidden_layers": 30,
            "num_key_value_heads": 8, "top_k_experts": 8,
        },
    },
    "gemma4_e4b": {"model_type": "gemma4", "text_config": GEMMA4_E4B},
    "gemma4_e2b": {
        "model_type": "gemma4",
        "text_config": GEMMA4_E4B | {
            "hidden_size": 1536, "intermediate_size": 6144,
            "layer_types": (["sliding_attention"] * 4 + ["full_attention"]) * 7, "num_hidden_layers": 35,
            "num_key_value_heads": 1, "num_kv_shared_layers": 20, "use_double_wide_mlp": True,
        },
    },
    "qwen3_next_80b": {
        "model_type": "qwen3_next", "attention_bias": False, "decoder_sparse_step": 1, "full_attention_interval": 4,
        "head_dim": 256, "hidden_act": "silu", "hidden_size": 2048, "intermediate_size": 5120,
        "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128, "linear_num_key_heads": 16,
        "linear_num_value_heads": 32, "linear_value_head_dim": 128, "max_position_embeddings": 262144,
        "mlp_only_layers": [], "moe_intermediate_size": 512, "norm_topk_prob": True, "num_attention_heads": 16,
        "num_experts": 512, "num_experts_per_tok": 10, "num_hidden_layers": 48, "num_key_value_heads": 2,
        "partial_rotary_factor": 0.25, "rms_norm_eps": 1e-6, "rope_scaling": None, "rope_theta": 10000000,
        "shared_expert_intermediate_size": 512, "tie_word_embeddings": False, "use_sliding_window": False,
        "vocab_size": 151936,
    },
    "qwen35_35b_a3b": {
        "model_type": "qwen3_5_moe",
        "text_config": LINEAR_35 | {
            "hidden_size": 2048, "linear_num_value_heads": 32, "model_type": "qwen3_5_moe_text",
            "moe_intermediate_size": 512, "num_attention_heads": 16, "num_experts": 256, "num_experts_per_tok": 8,
            "num_hidden_layers": 40, "num_key_value_heads": 2, "shared_expert_intermediate_size": 512,
        },
    },
    "qwen35_27b": {
        "model_type": "qwen3_5",
        "text_config": LINEAR_35 | {
            "hidden_size": 5120, "intermediate_size": 17408, "linear_num_value_heads": 48, "num_attention_heads": 24,
            "num_hidden_layers": 64, "num_key_value_heads": 4,
        },
    },
    "qwen35_800m": {
        "model_type": "qwen3_5", "tie_word_embeddings": True,
        "text_config": LINEAR_35 | {
            "hidden_size": 1024, "intermediate_size": 3584, "linear_num_value_heads": 16, "num_attention_heads": 8,
            "num_hidden_layers": 24, "num_key_value_heads": 2, "tie_word_embeddings": True,
        },
    },
}  # fmt: skip
"""What the ``config.json`` of published models says, as transformers 4 wrote it."""


@pytest.mark.parametrize("preset", PUBLISHED)
def test_presets_match_published_models(preset: str) -> None:
    section = compose([f"model={preset}", "data.tokenizer=bytes"]).model
    found = type(section).keys_from(text_part(PUBLISHED[preset]))
    assert found.pop("head_dim") == section.attention_head_dim
    found.pop("padding_token")  # of their own tokenizer
    ours = section.model_dump(mode="json")
    assert {key: ours[key] for key in found} == found


SHRUNK = {
    "hidden_size": 48, "intermediate_size": 80, "max_position_embeddings": 4096, "moe_intermediate_size": 24,
    "n_routed_experts": 16, "num_attention_heads": 4, "num_hidden_layers": 4, "num_local_experts": 6,
    "vocab_size": ROWS, "q_lora_rank": 20, "kv_lora_rank": 12, "qk_nope_head_dim": 10, "qk_rope_head_dim": 8,
    "v_head_dim": 14, "pad_token_id": PADDING, "head_dim": 16, "sliding_window": WINDOW,
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("preset", ["gpt_oss_20b", "deepseek_v3", "kimi_k2"])
def test_small_model_with_published_keys_opens_here_and_in_transformers(preset: str, tmp_path: Path) -> None:
    import transformers

    published = PUBLISHED[preset]
    small = {key: SHRUNK.get(key, value) for key, value in published.items()}
    small |= {"num_key_value_heads": 2 if preset == "gpt_oss_20b" else 4}
    small |= {"layer_types": published["layer_types"][:4]} if "layer_types" in published else {}
    (tmp_path / "config.json").write_text(json.dumps(small))
    kind = "deepseek_v3" if preset == "kimi_k2" else published["model_type"]  # transformers has no kimi_k2
    config = transformers.AutoConfig.for_model(kind, **{key: small[key] for key in small if key != "model_type"})
    torch.manual_seed(0)
    theirs = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    theirs.save_pretrained(tmp_path / "weights")
    (tmp_path / "weights/model.safetensors").rename(tmp_path / "model.safetensors")
    family, ours = opened(tmp_path)
    written(family, ours, tmp_path / "back")
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "back", attn_implementation="eager").eval()
    tokens = torch.randint(ROWS, (2, LENGTH), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = theirs(tokens).logits
        torch.testing.assert_close(ours(tokens), expected, rtol=0, atol=1e-5)
        torch.testing.assert_close(again(tokens).logits, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("preset", "changes", "reason"),
    [
        ("qwen25_7b", {"use_sliding_window": True}, "has use_sliding_window True; only False is supported"),
        ("gemma2_9b", {"layer_types": ["full_attention"] * 2}, "has 2 layer_types but num_hidden_layers 42"),
        (
            "gemma2_9b",
            {"layer_types": ["full_attention", *["sliding_attention"] * 41]},
            "has layer_types where not every n-th layer is full",
        ),
        ("deepseek_v3", {"scoring_func": "softmax"}, "has scoring_func softmax; only sigmoid is supported"),
        ("gpt_oss_20b", {"swiglu_alpha": 2.0}, "has swiglu_alpha 2.0; only 1.702 is supported"),
        (
            "gemma4_e4b",
            {"text_config": GEMMA4_E4B | {"vocab_size_per_layer_input": 128}},
            "has vocab_size_per_layer_input 128; only 262144 is supported",
        ),
        (
            "gemma4_e4b",
            {"text_config": GEMMA4_E4B | {"num_kv_shared_layers": 38}},
            r"model.kv_shared_layers=38 leaves 4 of model.layers=42 with own keys .*; use model.kv_shared_layers=36",
        ),
        (
            "qwen3_next_80b",
            {"layer_types": ["full_attention"] * 47 + ["linear_attention"]},
            "has layer_types where not every n-th layer is full_attention and the others linear_attention",
        ),
        ("qwen3_next_80b", {"layer_types": ["linear_attention"] * 48}, "has layer_types without full_attention"),
        (
            "qwen3_next_80b",
            {"shared_expert_intermediate_size": 700},
            "has shared_expert_intermediate_size 700; only multiples of moe_intermediate_size 512 are supported",
        ),
        ("gemma3_1b", {"attn_logit_softcapping": 50.0}, "has attn_logit_softcapping 50.0; only None is supported"),
        (
            "gemma3_1b",
            {"rope_parameters": {"sliding_attention": {"rope_type": "linear", "factor": 8.0}}},
            "has rope_type linear; only default",
        ),
    ],
)
def test_model_that_a_family_would_compute_differently_is_refused(
    preset: str, changes: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED[preset] | changes))
    with pytest.raises(UserError, match=reason):
        compose(["model=auto", f"model.path={tmp_path}"])


@pytest.mark.parametrize("preset", ["gpt_oss_20b", pytest.param("gemma2_9b", marks=pytest.mark.slow)])
def test_model_without_windows_opens_in_transformers(preset: str, tmp_path: Path) -> None:
    """Transformers makes the mask of a window even if no block has one."""
    import transformers

    sizes = {"dim": 48, "layers": 2, "heads": 4, "kv_heads": 2, "head_dim": 16, "hidden_dim": 24, "vocab_multiple": 1}
    sizes |= {"experts": 4, "expert_hidden_dim": 24} if preset == "gpt_oss_20b" else {}
    words = [f"model.{key}={value}" for key, value in sizes.items()]
    own = ["model.vocab_size=null", "model.max_sequence_length=64", "model.sliding_window=null"]
    section = compose([f"model={preset}", *words, *own, "data.tokenizer=bytes"]).model
    family = family_of(models.get(section.family).load(), section, ROWS)
    (tmp_path / "config.json").write_text(json.dumps(family.export_config(0)))
    config = transformers.AutoConfig.from_pretrained(tmp_path)
    theirs = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager")
    theirs.save_pretrained(tmp_path)
    _, ours = opened(tmp_path)
    tokens = torch.randint(ROWS, (2, LENGTH), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        torch.testing.assert_close(ours(tokens), theirs.eval()(tokens).logits, rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", ["qwen3_next", pytest.param("gemma4_text, experts", marks=pytest.mark.slow)])
def test_weights_gathered_in_bf16_give_the_bits_of_fp32_weights_under_autocast(name: str, tmp_path: Path) -> None:
    """FSDP gathers weights in bf16, DDP has them in fp32. Weights of norms, used in fp32 by DDP, are rounded before."""
    saved(name, tmp_path)
    _, model = opened(tmp_path)
    tokens = torch.randint(ROWS, (2, LENGTH), generator=torch.Generator().manual_seed(1))
    results = []
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        for rounded in ("norm", ""):
            for key, parameter in model.named_parameters():
                if rounded in key:
                    parameter.copy_(parameter.bfloat16())
            results.append(model(tokens))
    assert results[0].std() > 0.1
    assert results[0].equal(results[1])


@pytest.mark.slow
def test_graph_of_model_with_windows_takes_any_batch_and_length(tmp_path: Path) -> None:
    saved("gemma2", tmp_path)
    family, model = opened(tmp_path)
    graph = traced(Source(tmp_path, family.section, lambda _: model), torch.float32).module()
    tokens = torch.randint(ROWS, (3, WINDOW), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        for some in (tokens, tokens[:1, :5]):
            torch.testing.assert_close(graph(some), model(some), rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("preset", "why"),
    [
        ("qwen35_800m", "the number of steps of linear attention depends on the length"),
        ("gpt_oss_20b", "the number of tokens of each expert varies"),
    ],
)
def test_model_that_a_graph_cannot_express_is_refused(preset: str, why: str, tmp_path: Path) -> None:
    section = compose([f"model={preset}", "data.tokenizer=bytes"]).model
    with pytest.raises(UserError, match=f"^model.family={section.family} cannot be exported as a graph, because {why}"):
        traced(Source(tmp_path, section, lambda _: nn.Identity()), torch.float32)


def test_model_of_linear_attention_alone_is_refused() -> None:
    with pytest.raises(
        UserError, match=r"^model\.full_every=5 with model\.layers=4 leaves no block with attention, .*=4$"
    ):
        compose(["model=qwen35_800m", "model.layers=4", "model.full_every=5", "data.tokenizer=bytes"])


def test_context_axis_with_linear_attention_is_refused() -> None:
    degrees = {"pipeline": 2, "context": 2, "tensor": 2, "expert": 1}
    section = compose(["model=qwen35_27b", "data.tokenizer=bytes"]).model
    assert list(section.layout_mistakes(degrees, sequence=True)) == [
        "parallel.context=2 is not supported with model.family=qwen3_5_text, whose linear attention passes a state "
        "from token to token; use parallel.context=1"
    ]
    assert not list(section.layout_mistakes(degrees | {"context": 1}, sequence=True))


def test_pipeline_of_blocks_that_need_more_than_the_stream_is_refused() -> None:
    degrees = {"pipeline": 2, "context": 2, "tensor": 2, "expert": 1}
    section = compose(["model=gemma4_e4b", "data.tokenizer=bytes"]).model
    assert list(section.layout_mistakes(degrees, sequence=True)) == [
        "parallel.pipeline=2 is not supported with model.block_input_dim=256, because stages pass only the residual "
        "stream to each other; use parallel.pipeline=1"
    ]
    assert not list(section.layout_mistakes(degrees | {"pipeline": 1}, sequence=True))


def test_the_table_of_families_is_up_to_date() -> None:
    page = (ROOT / "docs/reference/families.md").read_text()
    committed = page.partition("<!-- python -m tools.key_tables families -->\n")[2].partition("\n<!-- end -->")[0]
    assert committed == families(), (
        "put the output of `python -m tools.key_tables families` into docs/reference/families.md"
    )


SMALL = {
    "model.vocab_size": "null", "model.vocab_multiple": "1", "model.head_dim": "null",
    "model.max_sequence_length": "64", "data.isolate_documents": "true", "model.padding_token": f"{ord('e')}",
}  # fmt: skip
CAPPED = {"model.query_pre_attention_scalar": "3", "model.global_every": "2", "model.logit_soft_cap": "3"}
ON_LAYOUTS = {
    "mistral7b": {"model.sliding_window": "6"},
    "qwen25_7b": {"model.tie_embeddings": "true"},
    "qwen3_8b": {},
    "olmo2_7b": {},
    "phi3_mini": {"model.sliding_window": "6"},
    "gemma2_9b": CAPPED | {"model.sliding_window": "6", "model.score_soft_cap": "0.5"},
    "gemma3_1b": CAPPED | {"model.sliding_window": "6", "model.tie_embeddings": "true"},
}
"""Of 24 tokens, what differs from one block or document to the next is seen."""
OF_EXPERTS = {
    "model": "moe_tiny", "model.shared_experts": "0", "model.dense_layers": "0", "model.rotary_fraction": "1",
    "model.expert_hidden_dim": "24",
}  # fmt: skip
ON_LAYOUTS["mixtral"] = OF_EXPERTS | {"model.family": "mixtral"}
ON_LAYOUTS["qwen3_moe"] = OF_EXPERTS | {
    "model.family": "qwen3_moe",
    "model.qk_norm": "true",
    "model.attention_bias": "true",
}
ON_LAYOUTS["gpt_oss"] = OF_EXPERTS | {
    "model.family": "gpt_oss",
    "model.attention_bias": "true",
    "model.sliding_window": "6",
    "model.swiglu_limit": "0.05",
}
LAYOUTS = ("tensor x2", "pipeline x2, 1f1b", "context x2", "context x2, ring")
"""The last two where attention differs from that of llama, which test_parity.py trains on all."""
ON_LAYOUTS["deepseek_v3"] = {
    "model.layers": "3", "model.dim": "48", "model.hidden_dim": "80", "model.heads": "4", "model.kv_heads": "4",
    "model.query_rank": "20", "model.key_value_rank": "12", "model.plain_head_dim": "10",
    "model.rotary_head_dim": "8", "model.value_head_dim": "14", "model.experts": "8", "model.expert_groups": "4",
    "model.groups_per_token": "2", "model.experts_per_token": "2", "model.expert_hidden_dim": "24",
    "model.dense_layers": "1",
}  # fmt: skip
OF_MIXTURES = ("pipeline x2, 1f1b", "context x2", "context x2, ring", "hsdp 2x2", "expert x2 x tensor x2")
"""Every axis once: HSDP shards as FSDP does, and experts are combined with the tensor axis."""
OF_DENSE = ("tensor x2", *OF_MIXTURES[:-1])
NAMED = {cut.name: cut for cut in (*EXPERT_CUTS, *CUTS)}
HYBRID = {
    "model.full_every": "2", "model.rotary_fraction": "0.5", "model.linear_key_heads": "2",
    "model.linear_value_heads": "4", "model.linear_key_dim": "8", "model.linear_value_dim": "12",
}  # fmt: skip
GEMMA4_SIZES = {
    "model.layers": "4", "model.global_every": "2", "model.global_head_dim": "12", "model.sliding_window": "6",
    "model.logit_soft_cap": "3", "model.tie_embeddings": "true",
}  # fmt: skip
ON_LAYOUTS["gemma4_26b_a4b"] = GEMMA4_SIZES | {
    "model.global_kv_heads": "2", "model.experts": "4", "model.experts_per_token": "2", "model.expert_hidden_dim": "24",
}  # fmt: skip
"""Gemma 4 31B is the same without experts."""
ON_LAYOUTS["gemma4_e4b"] = GEMMA4_SIZES | {
    "model.layers": "6", "model.kv_shared_layers": "2", "model.block_input_dim": "12",
    "model.doubles_hidden_dim": "true",
}  # fmt: skip
ON_LAYOUTS["qwen35_800m"] = HYBRID
ON_LAYOUTS["qwen3_next_80b"] = HYBRID | {
    "model.experts": "4", "model.experts_per_token": "2", "model.expert_hidden_dim": "24", "model.shared_experts": "2",
    "model.dense_layers": "1",
}  # fmt: skip
"""Qwen 3.5 with experts is made of the same blocks."""


def layouts_of(changes: dict[str, str]) -> tuple[str, ...]:
    if "model.kv_shared_layers" in changes:  # the pipeline passes no keys and values from stage to stage
        return ("context x2 x tensor x2", "context x2, ring", "hsdp 2x2")
    if "model.global_head_dim" in changes:
        return OF_MIXTURES
    if "model.full_every" in changes:  # linear attention has no context axis
        axes = OF_MIXTURES if "model.dense_layers" in changes else OF_DENSE
        return tuple(axis for axis in axes if "context" not in axis)
    return LAYOUTS if "model.sliding_window" in changes else LAYOUTS[:2]


SELECTIVE = {"olmo2_7b": ("tensor x2",), "gemma2_9b": ("context x2, ring",)}
WHOLLY = {"gpt_oss": "selective", "deepseek_v3": "none"}
"""Families that are tested on all layouts, with the activation checkpointing to use."""
DAILY = ("olmo2_7b",)


@pytest.mark.parametrize(
    ("preset", "layouts", "checkpointing"),
    [
        *(
            pytest.param(preset, layouts, "selective", marks=[pytest.mark.slow] * (preset not in DAILY))
            for preset, layouts in SELECTIVE.items()
        ),
        *(
            pytest.param(preset, layouts_of(changes), "none", marks=pytest.mark.slow)
            for preset, changes in ON_LAYOUTS.items()
            if preset not in WHOLLY
        ),
        *(
            pytest.param(preset, OF_MIXTURES, checkpointing, marks=pytest.mark.slow)
            for preset, checkpointing in WHOLLY.items()
        ),
    ],
)
def test_a_family_trains_alike_on_every_layout(
    preset: str, layouts: tuple[str, ...], checkpointing: str, cluster: Cluster, text: Path, tmp_path: Path
) -> None:
    changes = [f"{key}={value}" for key, value in {"model": preset, **SMALL, **ON_LAYOUTS[preset]}.items()]
    reference = run(cluster, CUTS[0], 1, "fp32", text, tmp_path / "single", *changes, steps=3)
    changes.append(f"trainer.activation_checkpoint={checkpointing}")
    for number, cut in enumerate(NAMED[name] for name in layouts):
        curve = run(cluster, cut, cut.accumulations[-1], "fp32", text, tmp_path / str(number), *changes, steps=3)
        difference = compare(curve, reference)
        assert difference.same_samples, cut
        assert difference.loss < TOLERANCES["fp32"], cut
        assert difference.grad_norm < TOLERANCES["fp32"], cut


@pytest.mark.slow
def test_linear_attention_in_bf16_trains_alike_with_ddp_and_fsdp(cluster: Cluster, text: Path, tmp_path: Path) -> None:
    sizes = {"model": "qwen35_800m", **SMALL, **ON_LAYOUTS["qwen35_800m"]}
    changes = [f"{key}={value}" for key, value in sizes.items()]
    replicated, sharded = (
        run(cluster, NAMED[name], 1, "bf16", text, tmp_path / name, *changes, steps=3)
        for name in ("ddp x2", "fsdp x2 (ZeRO-3)")
    )
    difference = compare(sharded, replicated)
    assert difference.same_samples
    assert difference.loss < TOLERANCES["bf16"]
    assert difference.grad_norm < TOLERANCES["bf16"]
