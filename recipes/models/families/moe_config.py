"""Config section of decoder-only transformers with a mixture of experts."""

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, ClassVar

from pydantic import Field

from serried.configs.schema.fields import Count, Number, Size
from serried.configs.schema.models import completed, keys_named, refuse_unless
from serried.configs.schema.registry import models
from serried.recipes.models.families.llama_config import LlamaSection
from serried.recipes.models.layers.rope_config import rope_of

_FORMS: Mapping[str, Mapping[str, Any]] = {
    "qwen3_moe": {
        "shared_experts": 0, "qk_norm": True, "rotary_fraction": 1.0, "routed_scale": 1.0, "expert_groups": 1,
        "groups_per_token": 1,
    },
    "mixtral": {
        "shared_experts": 0, "dense_layers": 0, "normalize_weights": True, "qk_norm": False, "attention_bias": False,
        "rotary_fraction": 1.0, "routed_scale": 1.0, "expert_groups": 1, "groups_per_token": 1,
    },
    "gpt_oss": {
        "shared_experts": 0, "dense_layers": 0, "normalize_weights": True, "qk_norm": False, "rotary_fraction": 1.0,
        "routed_scale": 1.0, "expert_groups": 1, "groups_per_token": 1,
    },
    "deepseek_v3": {"qk_norm": False, "rotary_fraction": 1.0},
    "qwen3_next": {
        "qk_norm": True, "attention_bias": False, "routed_scale": 1.0, "expert_groups": 1, "groups_per_token": 1,
    },
    "qwen3_5_moe_text": {
        "dense_layers": 0, "normalize_weights": True, "qk_norm": True, "attention_bias": False, "routed_scale": 1.0,
        "expert_groups": 1, "groups_per_token": 1,
    },
}  # fmt: skip
"""Fixed values of the keys that a family's checkpoints cannot express, by family."""


_SOFTMAX = ("qwen3_moe", "mixtral", "gpt_oss", "qwen3_next", "qwen3_5_moe_text")
"""Families whose router scores are a softmax, instead of sigmoids balanced by a bias."""
_DEEPSEEK = {
    "experts": "n_routed_experts",
    "expert_hidden_dim": "moe_intermediate_size",
    "shared_experts": "n_shared_experts",
    "dense_layers": "first_k_dense_replace",
    "normalize_weights": "norm_topk_prob",
    "routed_scale": "routed_scaling_factor",
    "expert_groups": "n_group",
    "groups_per_token": "topk_group",
}
_EXPERTS: Mapping[str, Mapping[str, str]] = {
    "deepseek_v3": _DEEPSEEK,
    "glm4_moe": _DEEPSEEK | {"qk_norm": "use_qk_norm", "rotary_fraction": "partial_rotary_factor"},
    "qwen3_moe": {
        "experts": "num_experts",
        "expert_hidden_dim": "moe_intermediate_size",
        "normalize_weights": "norm_topk_prob",
    },
    "mixtral": {"experts": "num_local_experts", "expert_hidden_dim": "intermediate_size"},
    "gpt_oss": {"experts": "num_local_experts", "expert_hidden_dim": "intermediate_size"},
    "qwen3_next": {
        "experts": "num_experts",
        "expert_hidden_dim": "moe_intermediate_size",
        "normalize_weights": "norm_topk_prob",
    },
    "qwen3_5_moe_text": {"experts": "num_experts", "expert_hidden_dim": "moe_intermediate_size"},
}
"""Additional entries of ``MoESection.names``, by family."""


def _names_of_experts(family: str) -> Mapping[str, str]:
    """Return the names of the experts' keys in a ``config.json``. A family registered elsewhere uses GLM's."""
    return _EXPERTS.get(family, _EXPERTS["glm4_moe"])


class MoESection(LlamaSection):
    """Architecture of a decoder-only transformer with a mixture of experts in place of most feed-forwards."""

    names: ClassVar[Mapping[str, str]] = {
        **LlamaSection.names,
        "experts_per_token": "num_experts_per_tok",
        "attention_bias": "attention_bias",
    }
    opens_as = ("glm4_moe", "Glm4MoeForCausalLM")
    plain: ClassVar[Mapping[str, Any]] = {"hidden_act": "silu"}

    experts: Size
    """Number of routed experts of a layer."""
    experts_per_token: Size
    """Number of routed experts that each token is sent to."""
    expert_hidden_dim: Size
    """Inner width of one expert."""
    shared_experts: Annotated[Count, Field(ge=0, le=1000)] = 0
    """Number of experts that every token passes through, stored as one feed-forward of width ``shared_experts *
    expert_hidden_dim``."""
    dense_layers: Annotated[Count, Field(ge=0, le=1000)] = 0
    """Number of initial layers with a dense feed-forward, of width ``hidden_dim``, instead of experts."""
    routed_scale: Number = Field(default=1.0, gt=0)
    """Factor on the output of the routed experts."""
    expert_groups: Size = 1
    """Number of groups of neighbouring experts."""
    groups_per_token: Size = 1
    """Number of groups that the experts of a token are chosen from: those with the largest sum of their two best
    scores."""
    normalize_weights: bool = True
    """Divide the weights of a token's experts by their sum."""
    attention_bias: bool = False
    """Add a bias to queries, keys and values; with ``family=qwen3_moe`` to the output of attention too."""
    qk_norm: bool = False
    """Normalize queries and keys, per head."""
    rotary_fraction: Number = Field(default=1.0, gt=0, le=1)
    """Fraction of each head that rotary embeddings apply to."""
    balance_rate: Number = Field(default=0.001, ge=0)
    """Change of an expert's router bias after each optimizer step: up if the expert got fewer tokens than the mean,
    else down (arXiv 2408.15664). Families with a softmax router have no such bias."""

    def described(self) -> dict[str, Any]:
        names = _names_of_experts(self.family)
        return super().described() | {theirs: getattr(self, ours) for ours, theirs in names.items()}

    @property
    def has_router_bias(self) -> bool:
        """Whether routers use sigmoid scores balanced by a bias, instead of softmax."""
        return self.family not in _SOFTMAX

    @property
    def output_bias(self) -> bool:
        """Whether the output projection of attention has a bias."""
        return self.attention_bias and self.family == "qwen3_moe"

    @property
    def rotary_dim(self) -> int:
        """Number of leading dims of each head that rotary embeddings rotate."""
        return int(self.attention_head_dim * self.rotary_fraction)

    def divisible(self) -> Mapping[str, Mapping[str, int]]:
        sizes = {"model.heads": self.heads, "model.kv_heads": self.kv_heads}
        if self.dense_layers:
            sizes["model.hidden_dim"] = self.hidden_dim
        if self.shared_experts:
            width = self.shared_experts * self.expert_hidden_dim
            sizes[f"model.expert_hidden_dim x {self.shared_experts} shared"] = width
        widths = {"model.dim": self.dim, "model.expert_hidden_dim": self.expert_hidden_dim}
        return {"tensor": sizes, "expert": {"model.experts": self.experts}, "expert_shard": widths}

    @classmethod
    def keys_from(cls, found: Mapping[str, Any]) -> dict[str, Any]:
        found = completed(found, cls)
        family, dense = found["model_type"], found.get("mlp_only_layers") or []
        if family == "mixtral":
            refuse_unless(found, sliding_window=None)
            found["attention_bias"] = False
        elif family in ("qwen3_moe", "qwen3_next"):
            if dense != list(range(len(dense))):
                raise ValueError(f"has mlp_only_layers {dense}; only the first layers can be dense")
            refuse_unless(found, decoder_sparse_step=1, use_sliding_window=False)
        elif family not in _FORMS:
            rotary = rope_of(found).get("partial_rotary_factor", found["partial_rotary_factor"])
            found["partial_rotary_factor"] = 1.0 if rotary is None else rotary
        keys = super().keys_from(found) | {"dense_layers": len(dense)}
        return keys | dict(_FORMS.get(family, {})) | keys_named(_names_of_experts(family), found)

    def _mistakes(self) -> Iterator[str]:
        yield from super()._mistakes()
        if self.experts_per_token > self.experts:
            yield (
                f"model.experts_per_token={self.experts_per_token} exceeds model.experts={self.experts}; "
                f"use model.experts_per_token={self.experts}"
            )
        if self.experts % self.expert_groups or self.experts < 2 * self.expert_groups > 2:
            yield (
                f"model.expert_groups={self.expert_groups} does not divide model.experts={self.experts} into groups of "
                "two or more; use model.expert_groups=1 model.groups_per_token=1"
            )
        chosen_from = self.experts // self.expert_groups * self.groups_per_token
        if self.groups_per_token > self.expert_groups or self.experts_per_token > chosen_from:
            yield (
                f"model.groups_per_token={self.groups_per_token} of model.expert_groups={self.expert_groups} does not "
                f"fit model.experts_per_token={self.experts_per_token}; use model.groups_per_token={self.expert_groups}"
            )
        if self.dense_layers > self.layers:
            yield (
                f"model.dense_layers={self.dense_layers} exceeds model.layers={self.layers}; "
                f"use model.dense_layers={self.layers - 1}"
            )
        if self.rotary_dim % 2:
            yield (
                f"model.rotary_fraction={self.rotary_fraction:g} of model.head_dim={self.attention_head_dim} is "
                f"{self.rotary_dim}, which is odd, but rotary embeddings rotate pairs; use model.rotary_fraction=1"
            )
        for key, value in _FORMS.get(self.family, {}).items():
            if getattr(self, key) != value:
                fixed = str(value).lower() if isinstance(value, bool) else value
                yield (
                    f"model.{key}={str(getattr(self, key)).lower()} cannot be expressed in checkpoints of "
                    f"model.family={self.family}; use model.{key}={fixed}, or model.family=glm4_moe"
                )


for _name in ("glm4_moe", "qwen3_moe", "mixtral"):
    models.register(_name, MoESection, "serried.recipes.models.families.moe:MoE")
