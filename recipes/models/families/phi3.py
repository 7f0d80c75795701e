"""Phi-3 and Phi-4 (https://arxiv.org/abs/2404.14219): Llama, optionally with a sliding window, in fused tensors.

A checkpoint has queries, keys and values in one tensor, and the two matrices into the feed-forward in another. They
are separate parameters here, so that tensor parallelism can shard each of them.
"""

from collections.abc import Sequence
from typing import Any

from serried.parallel.checkpoint_mapping import Fragment
from serried.recipes.models.families.llama import Llama
from serried.recipes.models.families.phi3_config import Phi3Section


class Phi3(Llama):
    """Family ``phi3``."""

    section: Phi3Section

    def exported(self, name: str, shape: Sequence[int]) -> tuple[Fragment, ...]:
        model, (owner, _, part) = self.section, name.removesuffix(".weight").rpartition(".")
        queries, keys = model.heads * model.attention_head_dim, model.kv_heads * model.attention_head_dim
        starts = {"gate_proj": 0, "up_proj": model.hidden_dim}
        fused = "gate_up_proj"
        rows = 2 * model.hidden_dim
        if owner.endswith("self_attn"):
            starts, fused = {"q_proj": 0, "k_proj": queries, "v_proj": queries + keys}, "qkv_proj"
            rows = queries + 2 * keys
        if part not in starts:
            return super().exported(name, shape)
        whole = (rows, *shape[1:])
        return (Fragment.within(f"model.{owner}.{fused}.weight", whole, 0, starts[part], shape),)

    def export_config(self, end_token: int | None) -> dict[str, Any]:
        model, plain, scaling = self.section, super().export_config(end_token), self.section.rope_scaling
        fraction = {"partial_rotary_factor": model.rotary_fraction or 1.0}
        plain |= fraction | {"rope_parameters": plain["rope_parameters"] | fraction}
        if scaling is None:
            return plain
        plain["original_max_position_embeddings"] = scaling.original
        if scaling.attention_factor is None and scaling.factor == model.max_sequence_length / scaling.original:
            # transformers 4 accepts no other keys. Versions 4 and 5 compute the factor from the two lengths.
            kept = {key: plain["rope_scaling"][key] for key in ("short_factor", "long_factor")}
            plain["rope_scaling"] = {"type": "longrope", **kept}
        return plain
