"""DeepSeek V3 (https://arxiv.org/abs/2412.19437) and Kimi K2 (https://arxiv.org/abs/2507.20534).

Differences from ``moe``: keys and values of all heads are computed from one narrow latent vector per token, and queries
from another (https://arxiv.org/abs/2405.04434); a part of each query and key is rotated, which all heads of the keys
share; routers choose groups of experts first.

Shapes: B batch, S sequence, D dim, H heads, E width of a query or key.
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from serried.parallel.plan import Context, ParallelPlan
from serried.recipes.models.families.deepseek_v3_config import DeepSeekV3Section
from serried.recipes.models.families.llama import Linear, RMSNorm
from serried.recipes.models.families.moe import MoE, MoETransformer
from serried.recipes.models.layers.attention import attend, attend_with_logsumexp
from serried.recipes.models.layers.kv_cache import LayerCache
from serried.recipes.models.layers.rope import rotate

_EPS = 1e-6
"""Epsilon of the norms of latent vectors, in all models of the family."""


class LatentAttention(nn.Module):
    """Causal self-attention with keys and values from a latent vector."""

    def __init__(self, config: DeepSeekV3Section) -> None:
        super().__init__()
        self.config = config
        queries, bias = config.heads * config.attention_head_dim, config.attention_bias
        scaling = config.rope_scaling
        scale = config.attention_head_dim**-0.5 * (scaling.of_all_dims**2 if scaling else 1.0)
        self.context = Context(
            partial(attend, scale=scale, kernel=config.attention), partial(attend_with_logsumexp, scale=scale)
        )
        if config.query_rank is None:
            self.q_proj = Linear(config.dim, queries, bias=False)
        else:
            self.q_a_proj = Linear(config.dim, config.query_rank, bias=bias)
            self.q_a_layernorm = RMSNorm(config.query_rank, _EPS)
            self.q_b_proj = Linear(config.query_rank, queries, bias=False)
        self.kv_a_proj_with_mqa = Linear(config.dim, config.key_value_rank + config.rotary_head_dim, bias=bias)
        self.kv_a_layernorm = RMSNorm(config.key_value_rank, _EPS)
        expanded = config.heads * (config.plain_head_dim + config.value_head_dim)
        self.kv_b_proj = Linear(config.key_value_rank, expanded, bias=False)
        self.o_proj = Linear(config.heads * config.value_head_dim, config.dim, bias=bias)

    def forward(  # [B, S, D] -> [B, S, D]
        self, x: Tensor, cos: Tensor, sin: Tensor, mask: Any, past: LayerCache | None = None
    ) -> Tensor:
        config = self.config
        is_direct = config.query_rank is None
        q = self.q_proj(x) if is_direct else self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x)))
        q = q.unflatten(-1, (-1, config.attention_head_dim)).transpose(1, 2)  # [B, H, S, E]
        plain_q, turned_q = q.split([config.plain_head_dim, config.rotary_head_dim], dim=-1)
        latent, turned = self.kv_a_proj_with_mqa(x).split([config.key_value_rank, config.rotary_head_dim], dim=-1)
        latent, turned = self.kv_a_layernorm(latent).unsqueeze(1), turned.unsqueeze(1)  # [B, 1, S, ...]
        turned_q, turned = (rotate(self._by_halves(part), cos, sin) for part in (turned_q, turned))
        if past is not None:
            latent, turned = past.extend(latent, turned)
        expanded = self.kv_b_proj(latent.squeeze(1)).unflatten(-1, (-1, config.plain_head_dim + config.value_head_dim))
        plain_k, v = expanded.transpose(1, 2).split([config.plain_head_dim, config.value_head_dim], dim=-1)
        q = torch.cat((plain_q, turned_q), dim=-1)
        k = torch.cat((plain_k, turned.expand(-1, plain_k.shape[1], -1, -1)), dim=-1)
        # Values are padded to the width of keys, as most kernels and the exchanges of a context need.
        v = F.pad(v, (0, config.attention_head_dim - config.value_head_dim))
        mixed = self.context.attend(q, k, v, mask)[..., : config.value_head_dim]
        return self.o_proj(mixed.transpose(1, 2).flatten(2))

    def _by_halves(self, x: Tensor) -> Tensor:
        """Move the first elements of rotary pairs to the front, if pairs are neighbours."""
        return x.unflatten(-1, (-1, 2)).transpose(-2, -1).flatten(-2) if self.config.rope_interleave else x


class DeepSeekV3Transformer(MoETransformer):
    """``MoETransformer`` with latent attention."""

    config: DeepSeekV3Section

    def attention(self, number: int) -> LatentAttention:
        del number
        return LatentAttention(self.config)

    def parallel_plan(self) -> ParallelPlan:
        plan = super().parallel_plan()
        expanding = dict.fromkeys(("layers.*.self_attn.q_b_proj", "layers.*.self_attn.kv_b_proj"), "column")
        return replace(plan, roles={**plan.roles, **expanding})


class DeepSeekV3(MoE):
    """Family ``deepseek_v3``."""

    section: DeepSeekV3Section
    transformer = DeepSeekV3Transformer

    def describe(self) -> str:
        model = self.section
        queries = "" if model.query_rank is None else f", queries of {model.query_rank:,}"
        return f"{super().describe()}; keys and values from latent vectors of {model.key_value_rank:,}{queries}"

    def flops_per_token(self, parameters: int, sequence_length: int) -> float:
        model = self.section
        narrower = model.attention_head_dim - model.value_head_dim
        return super().flops_per_token(parameters, sequence_length) - (
            6 * model.layers * model.heads * narrower * sequence_length
        )

    def own_entries(self, plain: Mapping[str, Any]) -> dict[str, Any]:
        del plain
        return {"head_dim": self.section.rotary_head_dim, "num_nextn_predict_layers": 0}
