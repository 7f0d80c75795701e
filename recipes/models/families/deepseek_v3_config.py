"""Config section of DeepSeek V3 and Kimi K2."""

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

from serried.configs.schema.fields import Size
from serried.configs.schema.models import completed, refuse_unless
from serried.configs.schema.registry import models
from serried.recipes.models.families.moe_config import MoESection


class DeepSeekV3Section(MoESection):
    """Architecture of DeepSeek V3 and Kimi K2: latent attention, experts in groups, and shared experts."""

    names: ClassVar[Mapping[str, str]] = {
        **MoESection.names,
        "query_rank": "q_lora_rank",
        "key_value_rank": "kv_lora_rank",
        "plain_head_dim": "qk_nope_head_dim",
        "rotary_head_dim": "qk_rope_head_dim",
        "value_head_dim": "v_head_dim",
        "rope_interleave": "rope_interleave",
    }
    opens_as = ("deepseek_v3", "DeepseekV3ForCausalLM")

    query_rank: Size | None = None
    """Width of the latent vector that queries are computed from; null: they are computed from the residual stream."""
    key_value_rank: Size
    """Width of the latent vector that keys and values of all heads are computed from."""
    plain_head_dim: Size
    """Width of the part of a query or key that is not rotated."""
    rotary_head_dim: Size
    """Width of the part of a query or key that is rotated. Keys share it."""
    value_head_dim: Size
    """Width of the values of one head."""
    rope_interleave: bool = True
    """Whether rotary pairs are neighbours in the weights."""

    @property
    def attention_head_dim(self) -> int:
        return self.plain_head_dim + self.rotary_head_dim

    @property
    def rotary_dim(self) -> int:
        return self.rotary_head_dim

    @property
    def projections(self) -> int:
        """Number of parameters in the matrices of one attention."""
        queries = self.heads * self.attention_head_dim
        inputs = self.dim * queries if self.query_rank is None else self.query_rank * (self.dim + queries)
        latent = self.dim * (self.key_value_rank + self.rotary_head_dim)
        expanded = self.key_value_rank * self.heads * (self.plain_head_dim + self.value_head_dim)
        return inputs + latent + expanded + self.heads * self.value_head_dim * self.dim

    @classmethod
    def keys_from(cls, found: Mapping[str, Any]) -> dict[str, Any]:
        found = completed(found, cls)
        refuse_unless(found, scoring_func="sigmoid", topk_method="noaux_tc", moe_layer_freq=1)
        return super().keys_from(found) | {"head_dim": found["qk_nope_head_dim"] + found["qk_rope_head_dim"]}

    def _mistakes(self) -> Iterator[str]:
        yield from super()._mistakes()
        if self.kv_heads != self.heads:
            yield (
                f"model.kv_heads={self.kv_heads} with model.family={self.family}, where each of model.heads="
                f"{self.heads} has its own keys and values; use model.kv_heads={self.heads}"
            )
        if self.head_dim not in (None, self.attention_head_dim):
            yield (
                f"model.head_dim={self.head_dim} is not the sum of model.plain_head_dim={self.plain_head_dim} and "
                f"model.rotary_head_dim={self.rotary_head_dim}; use model.head_dim=null"
            )
        if self.value_head_dim > self.attention_head_dim:
            yield (
                f"model.value_head_dim={self.value_head_dim} exceeds the width of keys, {self.attention_head_dim}; use "
                f"model.value_head_dim={self.attention_head_dim}"
            )


models.register("deepseek_v3", DeepSeekV3Section, "serried.recipes.models.families.deepseek_v3:DeepSeekV3")
