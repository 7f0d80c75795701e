"""Gemma 2 (https://arxiv.org/abs/2408.00118) and the text model of Gemma 3 (https://arxiv.org/abs/2503.19786).

Differences from Llama: norms before and after attention and feed-forward, scaled by 1 + weight; GELU instead of
SiLU; an embedding multiplied by sqrt(dim); sliding windows in some blocks. Gemma 2 soft-caps scores and logits.
Gemma 3 normalizes queries and keys instead, and blocks with a window have their own rotary frequencies.
"""

import math
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from serried.parallel.plan import Context
from serried.recipes.models.families.gemma_config import GemmaSection
from serried.recipes.models.families.llama import Attention, FeedForward, Llama, RMSNorm, Transformer
from serried.recipes.models.families.llama_config import LlamaSection
from serried.recipes.models.layers.attention import attend, attend_with_logsumexp
from serried.recipes.models.layers.kv_cache import LayerCache
from serried.recipes.models.layers.lm_head import LanguageModelHead


class GemmaNorm(RMSNorm):
    """``RMSNorm`` scaled by 1 + weight."""

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x.float(), self.weight.shape, 1 + self.weight.float(), self.eps).to(x.dtype)


class GemmaAttention(Attention):
    """``Attention`` with a different scale and capped scores, or with normalized queries and keys."""

    def __init__(self, config: GemmaSection) -> None:
        super().__init__(config)
        scale, cap = (config.query_pre_attention_scalar or self.head_dim) ** -0.5, config.score_soft_cap
        self.context = Context(
            partial(attend, scale=scale, soft_cap=cap, kernel=config.attention),
            partial(attend_with_logsumexp, scale=scale, soft_cap=cap),
        )
        if config.family == "gemma3_text":
            self.q_norm, self.k_norm = (GemmaNorm(self.head_dim, config.norm_eps) for _ in range(2))


class GemmaFeedForward(FeedForward):
    """GeGLU feed-forward."""

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.gelu(self.gate_proj(x), approximate="tanh") * self.up_proj(x))


class GemmaBlock(nn.Module):
    """Attention and feed-forward, each between two norms and added to the residual stream."""

    norm: type[RMSNorm] = GemmaNorm
    """Class of the norms."""

    def __init__(self, config: LlamaSection, attention: nn.Module, feed_forward: nn.Module) -> None:
        super().__init__()
        self.input_layernorm = self.norm(config.dim, config.norm_eps)
        self.self_attn = attention
        self.post_attention_layernorm = self.norm(config.dim, config.norm_eps)
        self.pre_feedforward_layernorm = self.norm(config.dim, config.norm_eps)
        self.mlp = feed_forward
        self.post_feedforward_layernorm = self.norm(config.dim, config.norm_eps)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Any, past: LayerCache | None = None) -> Tensor:
        x = x + self.post_attention_layernorm(self.self_attn(self.input_layernorm(x), cos, sin, mask, past))
        return x + self.post_feedforward_layernorm(self.mlp(self.pre_feedforward_layernorm(x)))


class GemmaTransformer(Transformer):
    """``Transformer`` of ``GemmaBlock``."""

    config: GemmaSection
    norm_type: type[RMSNorm] = GemmaNorm
    """Class of the last norm."""

    def __init__(self, config: GemmaSection, vocab_size: int) -> None:
        super().__init__(config, vocab_size)
        self.norm = self.norm_type(config.dim, config.norm_eps)
        self.lm_head = LanguageModelHead(config.dim, vocab_size, config.tie_embeddings, config.logit_soft_cap)

    def block(self, number: int) -> GemmaBlock:
        return GemmaBlock(self.config, self.attention(number), self.feed_forward(number))

    def attention(self, number: int) -> nn.Module:
        del number  # blocks differ only in the arguments of forward
        return GemmaAttention(self.config)

    def feed_forward(self, number: int) -> nn.Module:
        del number
        return GemmaFeedForward(self.config.dim, self.config.hidden_dim)

    def embedded(self, tokens: Tensor) -> Tensor:
        x = super().embedded(tokens)
        if tokens.is_floating_point():
            return x
        # The factor is rounded to the dtype of the residual stream, as when the published models were trained.
        return x * float(torch.tensor(math.sqrt(self.config.dim)).to(x.dtype))


class Gemma(Llama):
    """Families ``gemma2`` and ``gemma3_text``."""

    section: GemmaSection
    transformer = GemmaTransformer

    def initial_std(self, name: str) -> float | None:
        return 0.0 if name.endswith("norm.weight") else super().initial_std(name)

    def export_config(self, end_token: int | None) -> dict[str, Any]:
        model, plain = self.section, super().export_config(end_token)
        windows = [model.window(layer) for layer in range(model.layers)]
        plain |= {
            "model_type": model.family,
            "query_pre_attn_scalar": model.query_pre_attention_scalar or model.attention_head_dim,
            "layer_types": ["sliding_attention" if window else "full_attention" for window in windows],
            "attn_logit_softcapping": model.score_soft_cap,
            "final_logit_softcapping": model.logit_soft_cap,
        }
        if model.family == "gemma2":
            return plain
        local = model.local_rope_theta or model.rope_theta
        rope = plain["rope_parameters"]
        return plain | {
            "architectures": ["Gemma3ForCausalLM"],
            "sliding_window_pattern": model.global_every,
            "rope_parameters": {
                "full_attention": rope,
                "sliding_attention": {"rope_type": "default", "rope_theta": local},
            },
            "rope_local_base_freq": local,  # for transformers 4
        }
