"""Config section of the text models of Gemma 4."""

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, ClassVar

from pydantic import Field

from serried.configs.schema.fields import Count, Number, Size
from serried.configs.schema.models import completed, refuse_unless
from serried.configs.schema.registry import models
from serried.recipes.models.families.gemma_config import GemmaSection
from serried.recipes.models.families.llama_config import AlternatingSection, global_every
from serried.recipes.models.layers.rope_config import Rope

_WIDTHS = ("head_dim", "num_key_value_heads")
"""Keys of ``per_layer_config`` that may differ in blocks without a window."""
_OF_EXPERTS = {
    "experts": "num_experts",
    "experts_per_token": "top_k_experts",
    "expert_hidden_dim": "moe_intermediate_size",
}
_EVERY = 6
"""Default of transformers: one in this many blocks has no window."""
_ROPES: tuple[Mapping[str, Any], Mapping[str, Any]] = (
    {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
    {"rope_type": "default", "rope_theta": 1e4},
)
"""Defaults of transformers for blocks without and with a window."""


class Gemma4Section(AlternatingSection):
    """Architecture of the text models of Gemma 4."""

    names: ClassVar[Mapping[str, str]] = {
        **AlternatingSection.names,
        "keys_are_values": "attention_k_eq_v",
        "logit_soft_cap": "final_logit_softcapping",
        "block_input_dim": "hidden_size_per_layer_input",
        "kv_shared_layers": "num_kv_shared_layers",
        "doubles_hidden_dim": "use_double_wide_mlp",
    }
    opens_as = ("gemma4_text", "Gemma4ForCausalLM")
    plain = GemmaSection.plain
    normalizes_heads = True
    rope_types = ()
    # Keys of other mixtures of experts, with the values that Gemma 4 has.
    shared_experts: ClassVar[int] = 0
    routed_scale: ClassVar[float] = 1.0
    expert_groups: ClassVar[int] = 1
    groups_per_token: ClassVar[int] = 1
    normalize_weights: ClassVar[bool] = True
    balance_rate: ClassVar[float] = 0.0
    has_router_bias: ClassVar[bool] = False

    sliding_window: Size = 512
    """Number of most recent tokens, including itself, that a token attends to in blocks with a window."""
    global_head_dim: Size = 512
    """Width of one head in blocks without a window."""
    global_kv_heads: Size | None = None
    """Number of key/value heads in blocks without a window, if ``keys_are_values``; ``kv_heads`` when null."""
    keys_are_values: bool = False
    """Use the keys, before they are normalized, as values in blocks without a window."""
    global_rotary_fraction: Number = Field(default=0.25, gt=0, le=1)
    """Fraction of the rotary pairs that are rotated in blocks without a window."""
    local_rope_theta: Number = Field(default=10000.0, gt=0)
    """Base of the rotary frequencies in blocks with a window."""
    logit_soft_cap: Number | None = Field(default=None, gt=0)
    """Soft cap c of logits: a logit x becomes ``c * tanh(x / c)``. Null for none."""

    block_input_dim: Annotated[Count, Field(ge=0, le=10**6)] = 0
    """Width of the input that each block has in addition to the residual stream, computed from the tokens; 0 for
    none."""
    kv_shared_layers: Annotated[Count, Field(ge=0, le=1000)] = 0
    """Number of last blocks that attend to the keys and values of the last earlier block of their kind, with or without
    a window, instead of their own."""
    doubles_hidden_dim: bool = False
    """Use a feed-forward of twice ``hidden_dim`` in the last ``kv_shared_layers`` blocks."""
    experts: Annotated[Count, Field(ge=0, le=10**5)] = 0
    """Number of routed experts of a block, in addition to its feed-forward; 0 for none."""
    experts_per_token: Annotated[Count, Field(ge=0, le=10**5)] = 0
    """Number of routed experts that each token is sent to."""
    expert_hidden_dim: Annotated[Count, Field(ge=0, le=10**7)] = 0
    """Inner width of one expert."""

    def is_global(self, layer: int) -> bool:
        """Return whether block ``layer`` attends to all tokens, regardless of the window."""
        return (layer + 1) % self.global_every == 0

    def sizes(self, layer: int) -> tuple[int, int]:
        """Return the width of a head and the number of key/value heads in block ``layer``."""
        if self.is_global(layer):
            return self.global_head_dim, self.global_kv_heads or self.kv_heads
        return self.attention_head_dim, self.kv_heads

    def reuses_keys(self, layer: int) -> bool:
        """Return whether block ``layer`` attends to the keys and values of an earlier block."""
        return layer >= self.layers - self.kv_shared_layers

    def shares_keys(self, layer: int) -> bool:
        """Return whether later blocks attend to the keys and values of block ``layer``: it is the last one of its kind
        with own keys and values."""
        later = range(layer + 1, self.layers)
        same = [self.reuses_keys(other) for other in later if self.is_global(other) == self.is_global(layer)]
        return bool(same) and all(same) and not self.reuses_keys(layer)

    def feed_forward_width(self, layer: int) -> int:
        """Return the inner width of the feed-forward of block ``layer``."""
        return self.hidden_dim * (2 if self.doubles_hidden_dim and self.reuses_keys(layer) else 1)

    def rope(self, layer: int) -> Rope:
        if not self.is_global(layer):
            return Rope(self.local_rope_theta, None)
        return Rope(self.rope_theta, None, self.global_head_dim, self.global_rotary_fraction)

    def divisible(self) -> Mapping[str, Mapping[str, int]]:
        sizes = super().divisible()
        tensor = {**sizes["tensor"], "model.global_kv_heads": self.global_kv_heads or self.kv_heads}
        if not self.experts:
            return {"tensor": tensor}
        widths = {"model.dim": self.dim, "model.expert_hidden_dim": self.expert_hidden_dim}
        return {"tensor": tensor, "expert": {"model.experts": self.experts}, "expert_shard": widths}

    def layout_mistakes(self, degrees: Mapping[str, int], *, sequence: bool) -> Iterator[str]:
        yield from super().layout_mistakes(degrees, sequence=sequence)
        pipeline, keys = degrees["pipeline"], ("block_input_dim", "kv_shared_layers")
        if pipeline != 1 and (key := next((key for key in keys if getattr(self, key)), None)):
            yield (
                f"parallel.pipeline={pipeline} is not supported with model.{key}={getattr(self, key)}, because stages "
                "pass only the residual stream to each other; use parallel.pipeline=1"
            )

    @classmethod
    def keys_from(cls, found: Mapping[str, Any]) -> dict[str, Any]:
        found = completed(found, cls)
        if found["use_bidirectional_attention"] not in (None, "vision"):  # vision: only between tokens of an image
            refuse_unless(found, use_bidirectional_attention=None)
        if found["hidden_size_per_layer_input"]:
            refuse_unless(found, vocab_size_per_layer_input=found["vocab_size"])
        experts = {ours: found[theirs] for ours, theirs in _OF_EXPERTS.items()}
        if not found["enable_moe_block"]:
            experts = dict.fromkeys(experts, 0)
        elif None in experts.values():
            raise ValueError(
                f"has enable_moe_block {found['enable_moe_block']}, but no {' or '.join(_OF_EXPERTS.values())}"
            )
        full, sliding = _ropes(found)
        keys = super().keys_from(
            {**found, "hidden_act": cls.plain["hidden_act"], "rope_parameters": None, "rope_theta": full["rope_theta"]}
        )
        return keys | {
            "global_every": global_every(found, keys["layers"], _EVERY),
            "global_rotary_fraction": full.get("partial_rotary_factor", 1.0),
            "local_rope_theta": float(sliding["rope_theta"]),
            **experts,
            **_global_sizes(found),
        }

    def _mistakes(self) -> Iterator[str]:
        yield from super()._mistakes()
        if self.layers % self.global_every:
            yield (
                f"model.layers={self.layers} is not a multiple of model.global_every={self.global_every}, and "
                "transformers gives the last block of Gemma 4 no window; use "
                f"model.layers={-(-self.layers // self.global_every) * self.global_every}"
            )
        if (own := self.layers - self.kv_shared_layers) < self.global_every and self.kv_shared_layers:
            yield (
                f"model.kv_shared_layers={self.kv_shared_layers} leaves {max(0, own)} of model.layers={self.layers} "
                "with own keys and values, but layers with and without a window need one each "
                f"(model.global_every={self.global_every}); use "
                f"model.kv_shared_layers={max(0, self.layers - self.global_every)}"
            )
        if self.experts and not 1 <= self.experts_per_token <= self.experts:
            yield (
                f"model.experts_per_token={self.experts_per_token} is not between 1 and model.experts={self.experts}; "
                f"use model.experts_per_token={min(8, self.experts)}"
            )
        if self.experts and not self.expert_hidden_dim:
            yield (
                f"model.experts={self.experts} needs model.expert_hidden_dim; use "
                f"model.expert_hidden_dim={self.hidden_dim}, or model.experts=0"
            )
        if self.global_kv_heads and not self.keys_are_values:
            yield (
                f"model.global_kv_heads={self.global_kv_heads} needs model.keys_are_values=true; use "
                "model.global_kv_heads=null"
            )
        if self.global_kv_heads and self.heads % self.global_kv_heads:
            yield (
                f"model.global_kv_heads={self.global_kv_heads} does not divide model.heads={self.heads}; use "
                "model.global_kv_heads=null"
            )
        if self.global_head_dim % 2:
            yield (
                f"model.global_head_dim={self.global_head_dim} is odd, but rotary embeddings rotate pairs; use "
                f"model.global_head_dim={self.global_head_dim + 1}"
            )


def _ropes(found: Mapping[str, Any]) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """Return the rotary embeddings of blocks without and with a window."""
    if "rope_scaling" in found:
        raise ValueError("has rope_scaling; Gemma 4 has only rope_parameters of each kind of layer")
    if "rope_parameters" not in found or found["rope_parameters"] is None:
        return _ROPES
    ropes = found["rope_parameters"]
    for kind in ("full_attention", "sliding_attention"):
        if (ropes.get(kind) or {}).get("rope_theta") is None:
            raise ValueError(f"has rope_parameters without the rope_theta of {kind}")
    full, sliding = ropes["full_attention"], ropes["sliding_attention"]
    refuse_unless(sliding, rope_type="default")
    refuse_unless(full, rope_type="proportional", factor=1.0)
    return full, sliding


def _global_sizes(found: Mapping[str, Any]) -> dict[str, Any]:
    """Return the sizes of blocks without a window, from ``per_layer_config``, which transformers writes, or from the
    keys of published models.
    """
    by_layer = found.get("per_layer_config")
    if by_layer is None:
        heads = found.get("num_global_key_value_heads") if found["attention_k_eq_v"] else None
        return {"global_head_dim": found.get("global_head_dim") or 512, "global_kv_heads": heads}
    own = list(by_layer.values())
    if any(sizes != own[0] for sizes in own) or set(own[0] if own else ()) - {*_WIDTHS}:
        raise ValueError("has a per_layer_config with different sizes; only blocks without a window can differ")
    width, heads = (own[0].get(key) if own else None for key in _WIDTHS)
    return {"global_head_dim": width or found["head_dim"], "global_kv_heads": heads}


models.register("gemma4_text", Gemma4Section, "serried.recipes.models.families.gemma4:Gemma4")
