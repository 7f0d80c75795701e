"""The dense text model of Gemma 4: Gemma 3 with wider heads in the blocks without a window.

Norms are scaled by their weight, not by 1 + weight, values are normalized too, and attention scores are not scaled.
Blocks without a window have their own width and number of heads, may use the keys as values, and rotate only the first
pairs of each head. The output of a block is multiplied by a constant of the checkpoint.
"""

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from serried.parallel.plan import Context
from serried.recipes.models.families.gemma import GemmaBlock, GemmaTransformer
from serried.recipes.models.families.gemma4_config import Gemma4Section
from serried.recipes.models.families.llama import Attention, Linear, Llama, RMSNorm
from serried.recipes.models.layers.attention import attend, attend_with_logsumexp
from serried.recipes.models.layers.kv_cache import LayerCache
from serried.recipes.models.layers.rope import rotate


class Gemma4Attention(Attention):
    """``Attention`` with normalized values, in the sizes of its block."""

    def __init__(self, config: Gemma4Section, layer: int) -> None:
        super().__init__(config)
        self.eps = config.norm_eps
        self.head_dim, kv_heads = config.sizes(layer)
        self.context = Context(
            partial(attend, scale=1.0, kernel=config.attention), partial(attend_with_logsumexp, scale=1.0)
        )
        self.q_proj = Linear(config.dim, config.heads * self.head_dim, bias=False)
        self.k_proj = Linear(config.dim, kv_heads * self.head_dim, bias=False)
        self.v_proj: nn.Module | None = None  # type: ignore[assignment]
        if not (config.keys_are_values and config.is_global(layer)):
            self.v_proj = Linear(config.dim, kv_heads * self.head_dim, bias=False)
        self.o_proj = Linear(config.heads * self.head_dim, config.dim, bias=False)
        self.q_norm: nn.Module = RMSNorm(self.head_dim, config.norm_eps)
        self.k_norm: nn.Module = RMSNorm(self.head_dim, config.norm_eps)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Any, past: LayerCache | None = None) -> Tensor:
        q, k = (projection(x).unflatten(-1, (-1, self.head_dim)) for projection in (self.q_proj, self.k_proj))
        v = k if self.v_proj is None else self.v_proj(x).unflatten(-1, (-1, self.head_dim))
        v = F.rms_norm(v.float(), (self.head_dim,), None, self.eps).to(v.dtype)
        q, k, v = (heads.transpose(1, 2) for heads in (self.q_norm(q), self.k_norm(k), v))
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        if past is not None:
            k, v = past.extend(k, v)
        return self.o_proj(self.context.attend(q, k, v, mask).transpose(1, 2).flatten(2))


class Gemma4Block(GemmaBlock):
    """``GemmaBlock`` whose output is multiplied by a constant."""

    norm = RMSNorm
    layer_scalar: Tensor

    def __init__(self, config: Gemma4Section, attention: nn.Module) -> None:
        super().__init__(config, attention)
        # Created on the CPU with its value, even if parameters are on meta.
        self.register_buffer("layer_scalar", torch.ones(1, device="cpu"))

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Any, past: LayerCache | None = None) -> Tensor:
        return (super().forward(x, cos, sin, mask, past) * self.layer_scalar).to(x.dtype)


class Gemma4Transformer(GemmaTransformer):
    """``Transformer`` of ``Gemma4Block``."""

    config: Gemma4Section  # type: ignore[assignment]
    norm_type = RMSNorm

    def block(self, number: int) -> Gemma4Block:
        return Gemma4Block(self.config, self.attention(number))

    def attention(self, number: int) -> Gemma4Attention:
        return Gemma4Attention(self.config, number)


class Gemma4(Llama):
    """Family ``gemma4_text``."""

    section: Gemma4Section
    transformer = Gemma4Transformer

    def flops_per_token(self, parameters: int, sequence_length: int) -> float:
        model = self.section
        more = sum(model.sizes(layer)[0] - model.attention_head_dim for layer in range(model.layers))
        return super().flops_per_token(parameters, sequence_length) + 12 * model.heads * more * sequence_length

    def export_config(self, end_token: int | None) -> dict[str, Any]:
        model, plain = self.section, super().export_config(end_token)
        full = {"rope_type": "proportional", "rope_theta": model.rope_theta}
        del plain["rope_scaling"], plain["rope_theta"]  # transformers 4 has no Gemma 4
        return plain | {
            "layer_types": [
                "full_attention" if model.is_global(layer) else "sliding_attention" for layer in range(model.layers)
            ],
            "global_head_dim": model.global_head_dim,
            "num_global_key_value_heads": model.global_kv_heads,
            "hidden_size_per_layer_input": 0,
            "num_kv_shared_layers": 0,
            "enable_moe_block": False,
            "rope_parameters": {
                "full_attention": full | {"partial_rotary_factor": model.global_rotary_fraction},
                "sliding_attention": {"rope_type": "default", "rope_theta": model.local_rope_theta},
            },
        }
