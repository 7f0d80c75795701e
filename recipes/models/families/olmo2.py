"""OLMo 2 (https://arxiv.org/abs/2501.00656): Llama with different norms.

The norms come after attention and feed-forward instead of before them. Queries and keys are normalized over the
width of all heads.
"""

from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from serried.parallel.plan import ParallelPlan, Width
from serried.recipes.models.families.llama import Attention, FeedForward, Llama, RMSNorm, Transformer
from serried.recipes.models.families.llama_config import LlamaSection
from serried.recipes.models.layers.kv_cache import LayerCache


class WidthNorm(RMSNorm):
    """RMSNorm of [B, S, heads, E] over heads and E, computed in fp32. Tensor parallelism may shard the heads."""

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__(dim, eps)
        self.width = Width()

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        scale = (self.width.mean(wide.square().mean((2, 3), keepdim=True)) + self.eps).rsqrt()
        return (wide * scale * self.weight.float().view(x.shape[2:])).to(x.dtype)


class Olmo2Attention(Attention):
    """``Attention`` with ``WidthNorm`` of queries and keys."""

    def __init__(self, config: LlamaSection) -> None:
        super().__init__(config)
        self.q_norm = WidthNorm(config.heads * self.head_dim, config.norm_eps)
        self.k_norm = WidthNorm(config.kv_heads * self.head_dim, config.norm_eps)


class Olmo2Block(nn.Module):
    """Attention and feed-forward, whose outputs are normalized and added to the residual stream."""

    def __init__(self, config: LlamaSection) -> None:
        super().__init__()
        self.self_attn = Olmo2Attention(config)
        self.post_attention_layernorm = RMSNorm(config.dim, config.norm_eps)
        self.mlp = FeedForward(config.dim, config.hidden_dim)
        self.post_feedforward_layernorm = RMSNorm(config.dim, config.norm_eps)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Any, past: LayerCache | None = None) -> Tensor:
        x = x + self.post_attention_layernorm(self.self_attn(x, cos, sin, mask, past))
        return x + self.post_feedforward_layernorm(self.mlp(x))


class Olmo2Transformer(Transformer):
    """``Transformer`` of ``Olmo2Block``."""

    def block(self, number: int) -> Olmo2Block:
        del number  # all blocks are alike
        return Olmo2Block(self.config)

    def parallel_plan(self) -> ParallelPlan:
        plan = super().parallel_plan()
        return replace(plan, roles={**plan.roles, "layers.*.self_attn.[qk]_norm": "norm"})


class Olmo2(Llama):
    """Family ``olmo2``."""

    transformer = Olmo2Transformer
