"""Config sections of Qwen3-Next and Qwen 3.5, dense and with a mixture of experts."""

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

from pydantic import Field

from serried.configs.schema.fields import Number, Size
from serried.configs.schema.models import completed
from serried.configs.schema.registry import models
from serried.recipes.models.families.llama_config import LlamaSection
from serried.recipes.models.families.moe_config import MoESection
from serried.recipes.models.layers.rope_config import rope_of


class Qwen35Section(LlamaSection):
    """Architecture of Qwen 3.5: linear attention in most blocks, gated attention in the others."""

    names: ClassVar[Mapping[str, str]] = {
        **LlamaSection.names,
        "linear_key_heads": "linear_num_key_heads",
        "linear_value_heads": "linear_num_value_heads",
        "linear_key_dim": "linear_key_head_dim",
        "linear_value_dim": "linear_value_head_dim",
        "convolution": "linear_conv_kernel_dim",
    }
    opens_as = ("qwen3_5_text", "Qwen3_5ForCausalLM")
    plain: ClassVar[Mapping[str, Any]] = {"attention_bias": False, "hidden_act": "silu"}
    normalizes_heads = True

    full_every: Size = 4
    """Every n-th block has attention, the others have linear attention."""
    linear_key_heads: Size = 16
    """Number of query and of key heads in linear attention."""
    linear_value_heads: Size = 32
    """Number of value heads in linear attention, a multiple of ``linear_key_heads``."""
    linear_key_dim: Size = 128
    """Width of a query or key in linear attention."""
    linear_value_dim: Size = 128
    """Width of a value in linear attention."""
    convolution: Size = 4
    """Number of tokens that the convolution before linear attention combines."""
    rotary_fraction: Number = Field(default=0.25, gt=0, le=1)
    """Fraction of each head that rotary embeddings apply to, in blocks with attention."""

    @property
    def rotary_dim(self) -> int:
        return int(self.attention_head_dim * self.rotary_fraction)

    def is_linear(self, layer: int) -> bool:
        """Return whether block ``layer`` has linear attention."""
        return (layer + 1) % self.full_every != 0

    def divisible(self) -> Mapping[str, Mapping[str, int]]:
        sizes = super().divisible()
        return {**sizes, "tensor": {**sizes["tensor"], "model.linear_key_heads": self.linear_key_heads}}

    def layout_mistakes(self, degrees: Mapping[str, int], *, sequence: bool) -> Iterator[str]:
        yield from super().layout_mistakes(degrees, sequence=sequence)
        if (context := degrees["context"]) != 1:
            yield (
                f"parallel.context={context} is not supported with model.family={self.family}, whose linear attention "
                "passes a state from token to token; use parallel.context=1"
            )

    @classmethod
    def keys_from(cls, found: Mapping[str, Any]) -> dict[str, Any]:
        found = completed(found, cls)
        rotary = rope_of(found).get("partial_rotary_factor", found["partial_rotary_factor"])
        if rotary is None:
            raise ValueError("has partial_rotary_factor null; leave it out for the default of transformers, or set it")
        keys = super().keys_from({**found, "partial_rotary_factor": rotary})
        return keys | {"rotary_fraction": rotary, "full_every": _full_every(found, keys["layers"])}

    def _mistakes(self) -> Iterator[str]:
        yield from super()._mistakes()
        if self.full_every > self.layers:
            yield (
                f"model.full_every={self.full_every} with model.layers={self.layers} leaves no block with attention, "
                f"which transformers cannot compute; use model.full_every={self.layers}"
            )
        if self.linear_value_heads % self.linear_key_heads:
            yield (
                f"model.linear_value_heads={self.linear_value_heads} is not a multiple of "
                f"model.linear_key_heads={self.linear_key_heads}; use model.linear_value_heads={self.linear_key_heads}"
            )
        if not isinstance(self, MoESection) and self.rotary_dim % 2:
            yield (
                f"model.rotary_fraction={self.rotary_fraction:g} of model.head_dim={self.attention_head_dim} is "
                f"{self.rotary_dim}, which is odd, but rotary embeddings rotate pairs; use model.rotary_fraction=1"
            )


class Qwen3NextSection(Qwen35Section, MoESection):
    """Architecture of Qwen3-Next and Qwen 3.5 with a mixture of experts: linear attention in most blocks."""

    names: ClassVar[Mapping[str, str]] = {**MoESection.names, **Qwen35Section.names}
    opens_as = ("qwen3_next", "Qwen3NextForCausalLM")
    plain = Qwen35Section.plain

    @classmethod
    def keys_from(cls, found: Mapping[str, Any]) -> dict[str, Any]:
        found = completed(found, cls)
        shared, expert = found["shared_expert_intermediate_size"], found["moe_intermediate_size"]
        if shared % expert:
            raise ValueError(
                f"has shared_expert_intermediate_size {shared}; only multiples of moe_intermediate_size {expert} are "
                "supported"
            )
        if found["model_type"] == "qwen3_5_moe_text":  # no dense feed-forwards
            found |= {"intermediate_size": found.get("intermediate_size") or expert, "norm_topk_prob": True}
        return super().keys_from(found) | {"shared_experts": shared // expert}

    def _mistakes(self) -> Iterator[str]:
        yield from super()._mistakes()
        if not self.shared_experts:
            yield (
                f"model.shared_experts=0 cannot be expressed in checkpoints of model.family={self.family}; use "
                "model.shared_experts=1"
            )

    def described(self) -> dict[str, Any]:
        return super().described() | {"shared_expert_intermediate_size": self.shared_experts * self.expert_hidden_dim}


def _full_every(found: Mapping[str, Any], layers: int) -> int:
    """Return n such that every n-th layer has attention."""
    kinds = found.get("layer_types")
    if kinds is None:
        return int(found.get("full_attention_interval") or 4)
    if "full_attention" not in kinds:
        raise ValueError("has layer_types without full_attention, which transformers cannot compute")
    every = kinds.index("full_attention") + 1
    if kinds != ["full_attention" if (layer + 1) % every == 0 else "linear_attention" for layer in range(layers)]:
        raise ValueError(
            "has layer_types where not every n-th layer is full_attention and the others linear_attention; other "
            "patterns are not supported"
        )
    return int(every)


models.register("qwen3_5_text", Qwen35Section, "serried.recipes.models.families.qwen3_next:Qwen35")
for _name in ("qwen3_next", "qwen3_5_moe_text"):
    models.register(_name, Qwen3NextSection, "serried.recipes.models.families.qwen3_next:Qwen3Next")
