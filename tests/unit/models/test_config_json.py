"""How a family reads the ``config.json`` of a model: as transformers does, also what the file leaves out."""

import json
from contextlib import suppress
from copy import deepcopy
from itertools import chain
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
import yaml
from pydantic import ValidationError

from serried.configs.compose import compose
from serried.configs.messages.invalid_values import shown
from serried.configs.schema import transformers_defaults as recorded
from serried.configs.schema.models import ModelSection, completed
from serried.configs.schema.registry import models
from serried.recipes.models.families.llama_config import LlamaSection, MistralSection
from serried.recipes.models.families.moe_config import _EXPERTS, _FORMS
from serried.recipes.models.family import family_of
from serried.recipes.models.hugging_face.any_causal_lm import fragments_of
from serried.recipes.models.layers.rope_config import scaling_from
from testing.rank_pool import ROOT
from tools.key_tables import defaults_of_transformers, transformers_defaults

KINDS = list(recorded.DEFAULTS)
OLDER = ("rope_theta", "rope_scaling", "partial_rotary_factor", "rope_local_base_freq", "sliding_window_pattern")
"""Keys that transformers reads, and does not write."""
SIZES: dict[str, Any] = {
    "vocab_size": 131, "hidden_size": 64, "num_hidden_layers": 6, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 80, "max_position_embeddings": 64, "rms_norm_eps": 1e-4, "pad_token_id": 3, "head_dim": 16,
    "tie_word_embeddings": True, "rope_theta": 77.0,
}  # fmt: skip
"""None of them a default."""
LINEAR = {
    "num_key_value_heads": 1, "linear_key_head_dim": 8, "linear_value_head_dim": 12, "linear_num_key_heads": 2,
    "linear_num_value_heads": 6, "linear_conv_kernel_dim": 3, "partial_rotary_factor": 0.5,
}  # fmt: skip
MIXTURE = {
    "num_experts": 4, "num_experts_per_tok": 3, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 1024,
}  # fmt: skip
OWN: dict[str, dict[str, Any]] = {
    "gpt2": {
        "vocab_size": 131, "n_embd": 48, "n_layer": 6, "n_head": 4, "n_inner": 80, "n_positions": 64,
        "layer_norm_epsilon": 1e-4, "tie_word_embeddings": False,
    },
    "mistral": {"sliding_window": 9},
    "phi3": {"sliding_window": 9, "partial_rotary_factor": 0.5},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 1},
    "deepseek_v3": {
        "n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24, "n_shared_experts": 2,
        "first_k_dense_replace": 2, "routed_scaling_factor": 1.5, "norm_topk_prob": False, "attention_bias": True,
        "n_group": 2, "topk_group": 1, "q_lora_rank": 20, "kv_lora_rank": 12, "qk_nope_head_dim": 10,
        "qk_rope_head_dim": 6, "v_head_dim": 14, "rope_interleave": False, "num_key_value_heads": 4,
    },
    "gpt_oss": {
        "num_local_experts": 4, "num_experts_per_tok": 3, "sliding_window": 9, "swiglu_limit": 2.5,
        "attention_bias": False,
        "rope_parameters": {"rope_type": "yarn", "factor": 3.0, "original_max_position_embeddings": 16},
    },
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 3, "moe_intermediate_size": 24, "mlp_only_layers": [0]},
    "glm4_moe": {
        "n_routed_experts": 4, "num_experts_per_tok": 3, "moe_intermediate_size": 24, "n_shared_experts": 2,
        "first_k_dense_replace": 2, "routed_scaling_factor": 1.5, "norm_topk_prob": False, "use_qk_norm": True,
        "partial_rotary_factor": 0.25, "attention_bias": True,
    },
    "gemma2": {
        "sliding_window": 9, "query_pre_attn_scalar": 24, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0,
        "tie_word_embeddings": False,
    },
    "gemma3_text": {
        "sliding_window": 9, "query_pre_attn_scalar": 24, "final_logit_softcapping": 3.0, "rope_local_base_freq": 55.0,
        "sliding_window_pattern": 3, "tie_word_embeddings": False,
    },
    "gemma4_text": {
        "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 131, "num_kv_shared_layers": 2,
        "use_double_wide_mlp": True, "enable_moe_block": True, "num_experts": 4, "top_k_experts": 3,
        "moe_intermediate_size": 24, "sliding_window": 9, "final_logit_softcapping": 3.0, "attention_k_eq_v": True,
        "tie_word_embeddings": False,
    },
    "qwen3_5_text": LINEAR,
    "qwen3_next": LINEAR | MIXTURE | {"norm_topk_prob": False, "mlp_only_layers": [0]},
    "qwen3_5_moe_text": LINEAR | MIXTURE,
}  # fmt: skip


def read_by_transformers(kind: str, found: dict[str, Any]) -> dict[str, Any]:
    """What ``found`` describes, by the keys of our section."""
    import transformers

    config = transformers.CONFIG_MAPPING[kind].from_dict(deepcopy(found))
    names = models.get(kind).section.names | _EXPERTS.get(kind, {})
    values = {ours: getattr(config, theirs, None) for ours, theirs in names.items()}
    if kind == "gpt2":
        return values | {"hidden_dim": values["hidden_dim"] or 4 * values["dim"]}
    rope = config.rope_parameters
    local = rope["sliding_attention"]["rope_theta"] if kind in ("gemma3_text", "gemma4_text") else None
    first = config.per_layer_config[0] if kind == "gemma4_text" else config
    values |= {
        "head_dim": getattr(first, "head_dim", None) or config.hidden_size // config.num_attention_heads,
        "rope_theta": float((rope["full_attention"] if local else rope)["rope_theta"]),  # raises for null
        "rope_scaling": None,
        "attention_bias": bool(values.get("attention_bias")),
        "dense_layers": getattr(config, "first_k_dense_replace", len(getattr(config, "mlp_only_layers", ()))),
    }
    if kind == "deepseek_v3":
        values["head_dim"] = config.qk_nope_head_dim + config.qk_rope_head_dim
    if kind == "gpt_oss":
        values |= {
            "global_every": config.layer_types.index("full_attention") + 1,
            "rope_scaling": scaling_from({**found, "rope_parameters": rope, "max_position_embeddings": 64}),
        }
    if kind == "glm4_moe":
        values["rotary_fraction"] = rope.get("partial_rotary_factor", 1.0)
    if kind == "phi3":
        int(rope["partial_rotary_factor"] * values["head_dim"])  # raises for null
        values["rotary_fraction"] = None if rope["partial_rotary_factor"] == 1 else rope["partial_rotary_factor"]
    if kind.startswith("qwen3_5") or kind == "qwen3_next":
        int(rope["partial_rotary_factor"] * values["head_dim"])  # raises for null
        values |= {
            "rotary_fraction": rope["partial_rotary_factor"],
            "full_every": config.layer_types.index("full_attention") + 1,
        }
        if kind != "qwen3_5_text":
            values["shared_experts"] = config.shared_expert_intermediate_size // config.moe_intermediate_size
            values["hidden_dim"] = values["hidden_dim"] or config.moe_intermediate_size
    elif kind == "gemma4_text":
        if config.hidden_size_per_layer_input and config.vocab_size_per_layer_input != config.vocab_size:
            raise NotImplementedError
        last = config.per_layer_config[config.num_hidden_layers - 1]
        values |= {
            "global_every": config.layer_types.index("full_attention") + 1,
            "global_head_dim": last.head_dim,
            "global_kv_heads": None,
            **dict.fromkeys(("experts", "experts_per_token", "expert_hidden_dim"), 0),
            "global_rotary_fraction": rope["full_attention"]["partial_rotary_factor"],
            "local_rope_theta": local,
        }
        if config.enable_moe_block:
            experts, width = config.num_experts * 1, config.moe_intermediate_size * 1  # raise for null
            values |= {"experts": experts, "experts_per_token": config.top_k_experts * 1, "expert_hidden_dim": width}
    elif kind.startswith("gemma"):
        values |= {
            "query_pre_attention_scalar": config.query_pre_attn_scalar,
            "score_soft_cap": config.attn_logit_softcapping,
            "logit_soft_cap": config.final_logit_softcapping,
            "global_every": config.layer_types.index("full_attention") + 1,
            "local_rope_theta": local,
        }
    return values


@pytest.mark.parametrize("kind", KINDS)
def test_missing_or_null_key_has_the_default_of_transformers(kind: str) -> None:
    """Every key: what the file then describes is the same, or both refuse it."""
    own = OWN.get(kind, {})
    whole = (own if kind == "gpt2" else SIZES | own) | {"model_type": kind}
    assert not {key: value for key, value in whole.items() if recorded.DEFAULTS[kind].get(key, "") == value}
    cases = [whole, {"model_type": kind}]
    for key in {*whole, *recorded.DEFAULTS[kind], *OLDER} - {"model_type"}:
        left_out = {name: value for name, value in whole.items() if name != key}
        cases += [left_out, left_out | {key: None}]
    for found in cases:
        expected = ours = None
        with suppress(Exception):  # of any kind: its own checks, or arithmetic with None
            expected = read_by_transformers(kind, found)
        with suppress(ValueError):
            ours = models.get(kind).section.keys_from(found)
        if ours is None or expected is None:
            assert ours is expected, found
        else:
            read = ours.keys() - _FORMS.get(kind, {}).keys()
            assert {key: ours[key] for key in read} == {key: expected[key] for key in read}, found


@pytest.mark.parametrize("kind", KINDS)
def test_value_of_the_wrong_kind_is_refused_by_the_name_of_its_key(kind: str) -> None:
    """Every key. A value that is no mistake for the reader is checked with our own key."""
    other = {"rope_scaling": {}, "rope_parameters": {}, "layer_types": [], "mlp_only_layers": []}
    defaults = recorded.DEFAULTS[kind] | other
    for key, default in defaults.items():
        for wrong in ("text", [1], {"full_attention": "text"}):
            if isinstance(wrong, type(default)):
                continue
            try:
                found = {"model_type": kind, key: wrong}
                keys = models.get(kind).section.keys_from(found)
            except (ValueError, TypeError) as error:
                assert key in str(error)
            else:
                unread = ["reorder_and_upcast_attn", "scale_attn_weights"]
                unread += ["num_experts", "top_k_experts", "moe_intermediate_size"] * (kind == "gemma4_text")
                assert wrong in keys.values() or key in unread, key


def test_recorded_defaults_equal_those_of_transformers() -> None:
    for name, table in defaults_of_transformers().items():
        assert getattr(recorded, name) == table, "python -m tools.key_tables transformers-defaults has others"
    version = transformers_defaults().partition("VERSION = ")[2].partition("\n")[0]
    if version == f'"{recorded.VERSION}"':
        assert (ROOT / "configs/schema/transformers_defaults.py").read_text() == transformers_defaults() + "\n"


def test_user_family_is_read_with_the_defaults_of_the_family_it_extends() -> None:
    class Own(LlamaSection):
        opens_as = ("own", "OwnForCausalLM")

    class OwnWithWindow(MistralSection):
        opens_as = ("own", "OwnForCausalLM")

    class OwnAlone(ModelSection):
        opens_as = ("own", "OwnForCausalLM")

    found = {"model_type": "own", "hidden_size": 64}
    assert Own.keys_from(found) == LlamaSection.keys_from({**found, "model_type": "llama"})
    assert OwnWithWindow.keys_from(found) == MistralSection.keys_from({**found, "model_type": "mistral"})
    assert completed(found, OwnAlone) == found


@pytest.mark.parametrize("kind", KINDS)
def test_run_started_with_another_value_keeps_it_if_the_key_is_typed(kind: str, tmp_path: Path) -> None:
    """Each key that may be null, and those of which the value for a key left out has changed."""
    folder, run = tmp_path / "model", tmp_path / "run"
    folder.mkdir()
    run.mkdir()
    section = models.get(kind).section
    heads = 32 if kind == "deepseek_v3" else 8  # one per query head, as the family requires
    found = {"model_type": kind, "head_dim": 16, "num_attention_heads": 32, "num_key_value_heads": heads}
    (folder / "config.json").write_text(json.dumps(found))
    now = section.keys_from(found)
    values: dict[str, Any] = {
        "rope_theta": 500.0, "norm_eps": 0.5, "kv_heads": 1 if heads == 8 else heads, "sliding_window": 9,
        "rotary_fraction": 0.25,
        "normalize_weights": not now.get("normalize_weights"), "attention_bias": not now.get("attention_bias"),
        "shared_experts": 3, "dense_layers": 2, "routed_scale": 2.5,
    }  # fmt: skip
    changed = {key: value for key, value in values.items() if key in now and key not in _FORMS.get(kind, {})}
    nullable = [key for key in now if type(None) in get_args(section.model_fields[key].annotation)]
    argv = [f"model.path={folder}", f"run.dir={run}", "data.tokenizer=bytes"]
    for before in (changed, {key: None for key in nullable if key != "vocab_size"}):
        began = {"name": "model", "path": str(folder), **now, **before}
        (run / "config.yaml").write_text(yaml.safe_dump({"model": began}))
        untyped, typed = compose(argv), compose([*argv, *(f"model.{key}={shown(before[key])}" for key in before)])
        assert {key: getattr(typed.model, key) for key in before} == before
        kept = untyped.model.model_dump(mode="json")
        assert {key: kept[key] for key in before} == {key: now[key] for key in before}


def test_null_in_a_preset_is_not_treated_as_an_override(tmp_path: Path) -> None:
    preset = compose(["model=tiny", "data.tokenizer=bytes"]).model  # its YAML file leaves kv_heads null: half
    further = {"model_type": "llama", "num_key_value_heads": preset.heads, "rope_theta": preset.rope_theta}
    found = preset.described() | further | {"vocab_size": 257}
    (tmp_path / "config.json").write_text(json.dumps(found))
    began = LlamaSection.keys_from(found) | {"path": str(tmp_path), "kv_heads": None}
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.yaml").write_text(yaml.safe_dump({"model": began}))
    argv = ["model=tiny", f"model.path={tmp_path}", f"run.dir={tmp_path / 'run'}", "data.tokenizer=bytes"]
    assert compose(argv).model.kv_heads == preset.heads


OPTIONS: dict[str, Any] = {
    "tie_embeddings": True, "attention_bias": True, "qk_norm": True, "shared_experts": 2, "dense_layers": 1,
    "query_rank": None, "expert_groups": 2,
    "head_dim": 20, "normalize_weights": False, "sliding_window": 9, "padding_token": 3, "logit_soft_cap": 3.0,
}  # fmt: skip
"""Values that differ from what ``sized`` has."""


def sized(kind: str, **changes: Any) -> Any:
    sizes: dict[str, Any] = {
        "name": "small", "family": kind, "vocab_size": 131, "dim": 32, "layers": 2, "heads": 4, "hidden_dim": 48,
        "tie_embeddings": False, "max_sequence_length": 64,
    }  # fmt: skip
    sizes |= {} if kind == "gpt2" else {"kv_heads": 2}
    if kind in _EXPERTS:
        sizes |= {
            "experts": 4,
            "experts_per_token": 2,
            "expert_hidden_dim": 24,
            "qk_norm": _FORMS.get(kind, {}).get("qk_norm", False),
        }
    if kind == "deepseek_v3":
        sizes |= {"kv_heads": 4, "query_rank": 20, "key_value_rank": 12, "plain_head_dim": 4, "rotary_head_dim": 4}
        sizes |= {"value_head_dim": 6}
    if kind in (
        "glm4_moe",
        "deepseek_v3",
        "qwen3_next",
        "qwen3_5_moe_text",
    ):  # without one, transformers has matrices without elements
        sizes["shared_experts"] = 1
    if kind in ("mixtral", "gpt_oss"):  # all of their layers have experts
        sizes["expert_hidden_dim"] = sizes["hidden_dim"]
    return models.get(kind).section.model_validate(sizes | changes)


@pytest.mark.parametrize("kind", KINDS)
def test_parameters_of_each_family_option_match_transformers(kind: str) -> None:
    """Names and shapes, of a model from scratch, as ``config.json`` describes it."""
    import transformers

    known = models.get(kind).section.model_fields
    for key, value in {"": None, **OPTIONS}.items():
        try:
            section = sized(kind, **({key: value} if key in known else {}))
        except ValidationError:
            continue  # the family's checkpoints cannot express it
        family = family_of(models.get(kind).load(), section, 131)
        ours = {
            part.name: part.shape
            for name, tensor in chain(family.build().named_parameters(), family.build().named_buffers())
            for part in family.exported(name, tensor.shape)
        }
        config = transformers.CONFIG_MAPPING[kind].from_dict(family.export_config(None))
        with torch.device("meta"):
            theirs = transformers.AutoModelForCausalLM.from_config(config)
        saved = {part.name: part.shape for parts in fragments_of(theirs).values() for part in parts}
        saved |= {name: tuple(each.shape) for name, each in theirs.named_buffers() if name in theirs.state_dict()}
        assert ours == saved, key
