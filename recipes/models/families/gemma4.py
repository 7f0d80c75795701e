"""Text models of Gemma 4: Gemma 3 with wider heads in the blocks without a window.

Norms are scaled by their weight, not by 1 + weight, values are normalized too, and attention scores are not scaled.
Blocks without a window have their own width and number of heads, may use the keys as values, and rotate only the first
pairs of each head. The output of a block is multiplied by a constant of the checkpoint.

E2B and E4B: the last blocks attend to the keys and values of an earlier block, and each block has its own input,
computed from the tokens. 26B-A4B: each block has routed experts in addition to its feed-forward.

Shapes: B batch, S sequence, D dim, L blocks, P width of the input of a block, T tokens, k experts per token, E experts.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from serried.parallel.checkpoint_mapping import Fragment
from serried.parallel.plan import Context, ParallelPlan
from serried.recipes.models.families.gemma import GemmaBlock, GemmaFeedForward, GemmaTransformer
from serried.recipes.models.families.gemma4_config import Gemma4Section
from serried.recipes.models.families.llama import Attention, Embedding, Linear, Llama, RMSNorm
from serried.recipes.models.families.moe import (
    Experts,
    MixtureOfExperts,
    Router,
    as_gathered,
    fused_experts,
)
from serried.recipes.models.layers.attention import attend, attend_with_logsumexp
from serried.recipes.models.layers.kv_cache import LayerCache
from serried.recipes.models.layers.rope import rotate

KeysAndValues = tuple[Tensor, Tensor]


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
        self.q_norm: nn.Module = RMSNorm(self.head_dim, config.norm_eps)
        self.k_proj, self.k_norm, self.v_proj = None, None, None  # type: ignore[assignment]
        if not config.reuses_keys(layer):
            self.k_proj = Linear(config.dim, kv_heads * self.head_dim, bias=False)
            self.k_norm = RMSNorm(self.head_dim, config.norm_eps)
            if not (config.keys_are_values and config.is_global(layer)):
                self.v_proj = Linear(config.dim, kv_heads * self.head_dim, bias=False)
        self.o_proj = Linear(config.heads * self.head_dim, config.dim, bias=False)

    def forward(  # type: ignore[override]
        self, x: Tensor, cos: Tensor, sin: Tensor, mask: Any, past: LayerCache | None = None,
        shared: KeysAndValues | None = None,
    ) -> tuple[Tensor, KeysAndValues]:  # fmt: skip
        """Return the output [B, S, D], and the keys and values. ``shared``: keys and values of another block to use."""
        q = rotate(self.q_norm(self._heads(self.q_proj, x)).transpose(1, 2), cos, sin)
        k, v = shared or self._keys_and_values(x, cos, sin, past)
        return self.o_proj(self.context.attend(q, k, v, mask).transpose(1, 2).flatten(2)), (k, v)

    def _heads(self, projection: nn.Module, x: Tensor) -> Tensor:
        heads: Tensor = projection(x).unflatten(-1, (-1, self.head_dim))
        return heads

    def _keys_and_values(self, x: Tensor, cos: Tensor, sin: Tensor, past: LayerCache | None) -> KeysAndValues:
        assert self.k_norm is not None
        k = self._heads(self.k_proj, x)
        v = k if self.v_proj is None else self._heads(self.v_proj, x)
        v = F.rms_norm(v.float(), (self.head_dim,), None, self.eps).to(v.dtype).transpose(1, 2)
        k = rotate(self.k_norm(k).transpose(1, 2), cos, sin)
        return (k, v) if past is None else past.extend(k, v)


class Gemma4Router(Router):
    """``Router`` of normalized tokens, with a learned factor for each expert."""

    def __init__(self, config: Gemma4Section) -> None:
        super().__init__(config)  # type: ignore[arg-type]  # has the keys that a router reads
        self.eps = config.norm_eps
        self.scale_weight = nn.Parameter(torch.empty(config.dim))
        self.expert_scale = nn.Parameter(torch.empty(config.experts))

    def forward(self, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        with torch.autocast(rows.device.type, enabled=False):
            normed = F.rms_norm(rows.float(), rows.shape[1:], as_gathered(self.scale_weight, rows), self.eps)
            chosen, weights, counts = super().forward((normed * rows.shape[1] ** -0.5).to(rows.dtype))
            # The backward of gather adds no two numbers, so that its order of additions is fixed on a GPU too.
            factors = as_gathered(self.expert_scale, rows).expand(len(rows), -1).gather(1, chosen)
            return chosen, weights * factors, counts


class Gemma4Experts(Experts):
    """GeGLU feed-forwards."""

    def _products(self, rows: Tensor, counts: Tensor) -> Tensor:
        multiply = self.product(rows, counts)
        hidden = F.gelu(multiply(rows, "gate_proj"), approximate="tanh") * multiply(rows, "up_proj")
        return multiply(hidden, "down_proj")


class Gemma4Mixture(MixtureOfExperts):
    """``MixtureOfExperts`` whose router sees the residual stream, and whose experts see it normalized."""

    def __init__(self, config: Gemma4Section) -> None:
        experts = Gemma4Experts(config)  # type: ignore[arg-type]  # has the keys that experts read
        super().__init__(config, Gemma4Router(config), experts)  # type: ignore[arg-type]

    def forward(self, stream: Tensor, normed: Tensor) -> Tensor:  # type: ignore[override]
        return self._routed(normed.flatten(0, 1), stream.flatten(0, 1)).view(stream.shape)


class Gemma4Block(GemmaBlock):
    """``GemmaBlock`` with routed experts, an input of its own, or both, whose output is multiplied by a constant."""

    norm = RMSNorm
    layer_scalar: Tensor

    def __init__(self, config: Gemma4Section, attention: nn.Module, feed_forward: nn.Module, *, returns_keys: bool):
        """``returns_keys``: return the keys and values too, for later blocks."""
        super().__init__(config, attention, feed_forward)
        self.returns_keys = returns_keys
        self.mixture = Gemma4Mixture(config) if config.experts else None
        if config.experts:
            self.post_feedforward_layernorm_1 = self.norm(config.dim, config.norm_eps)
            self.pre_feedforward_layernorm_2 = self.norm(config.dim, config.norm_eps)
            self.post_feedforward_layernorm_2 = self.norm(config.dim, config.norm_eps)
        if width := config.block_input_dim:
            self.per_layer_input_gate = Linear(config.dim, width, bias=False)
            self.per_layer_projection = Linear(width, config.dim, bias=False)
            self.post_per_layer_input_norm = self.norm(config.dim, config.norm_eps)
        # Created on the CPU with its value, even if parameters are on meta.
        self.register_buffer("layer_scalar", torch.ones(1, device="cpu"))

    def forward(  # type: ignore[override]
        self, x: Tensor, cos: Tensor, sin: Tensor, mask: Any, past: LayerCache | None = None,
        own_input: Tensor | None = None, shared: KeysAndValues | None = None,
    ) -> Tensor | tuple[Tensor, KeysAndValues]:  # fmt: skip
        """Map the residual stream [B, S, D] to the next one. ``own_input``: [B, S, P]; ``shared``: keys and values of
        another block to attend to."""
        mixed, pair = self.self_attn(self.input_layernorm(x), cos, sin, mask, past, shared)
        x = x + self.post_attention_layernorm(mixed)
        hidden = self.mlp(self.pre_feedforward_layernorm(x))
        if self.mixture is not None:
            routed = self.mixture(x, self.pre_feedforward_layernorm_2(x))
            hidden = self.post_feedforward_layernorm_1(hidden) + self.post_feedforward_layernorm_2(routed)
        x = x + self.post_feedforward_layernorm(hidden)
        if own_input is not None:
            gated = F.gelu(self.per_layer_input_gate(x), approximate="tanh") * own_input
            x = x + self.post_per_layer_input_norm(self.per_layer_projection(gated))
        x = (x * self.layer_scalar).to(x.dtype)
        return (x, pair) if self.returns_keys else x


class Gemma4Transformer(GemmaTransformer):
    """``Transformer`` of ``Gemma4Block``."""

    config: Gemma4Section  # type: ignore[assignment]
    norm_type = RMSNorm

    def __init__(self, config: Gemma4Section, vocab_size: int) -> None:
        super().__init__(config, vocab_size)  # type: ignore[arg-type]
        if width := config.block_input_dim:
            self.embed_tokens_per_layer = Embedding(vocab_size, config.layers * width, config.padding_token)
            self.per_layer_model_projection = Linear(config.dim, config.layers * width, bias=False)
            self.per_layer_projection_norm = RMSNorm(width, config.norm_eps)
        # Published checkpoints have keys and values for all blocks. The name is the one of transformers.
        unread = rf"layers\.({'|'.join(map(str, filter(config.reuses_keys, range(config.layers))))})\.self_attn\.[kv]_"
        self._keys_to_ignore_on_load_unexpected = [unread] if config.kv_shared_layers else []

    def block(self, number: int) -> Gemma4Block:
        returns_keys = self.config.shares_keys(number)
        return Gemma4Block(self.config, self.attention(number), self.feed_forward(number), returns_keys=returns_keys)

    def attention(self, number: int) -> Gemma4Attention:
        return Gemma4Attention(self.config, number)

    def feed_forward(self, number: int) -> GemmaFeedForward:
        return GemmaFeedForward(self.config.dim, self.config.feed_forward_width(number))

    def through_blocks(self, x: Tensor, tokens: Tensor, settings: Sequence[tuple[Any, ...]]) -> Tensor:
        model = self.config
        inputs = self._inputs_of_blocks(tokens, x) if model.block_input_dim else [None] * model.layers
        pairs: dict[bool, KeysAndValues] = {}
        """Shared keys and values of blocks without a window (True) and with one."""
        for number, (block, own) in enumerate(zip(self.layers, settings, strict=False)):
            further: dict[str, Any] = {} if inputs[number] is None else {"own_input": inputs[number]}
            if model.reuses_keys(number):
                further["shared"] = pairs[model.is_global(number)]
            x = block(x, *own, **further)
            if model.shares_keys(number):
                x, pairs[model.is_global(number)] = x
        return x

    def _inputs_of_blocks(self, tokens: Tensor, x: Tensor) -> Sequence[Tensor]:
        """Return the input of each block, [B, S, P], for ``tokens`` [B, S] and their embeddings ``x`` [B, S, D]."""
        width = self.config.block_input_dim
        # Factors are rounded to the dtype of the residual stream, as in ``embedded``.
        looked_up = self.embed_tokens_per_layer(tokens).to(x.dtype) * float(torch.tensor(width**0.5).to(x.dtype))
        computed = (self.per_layer_model_projection(x) * self.config.dim**-0.5).unflatten(-1, (-1, width))
        both = (self.per_layer_projection_norm(computed) + looked_up.unflatten(-1, (-1, width))) * 2**-0.5
        return both.unbind(2)

    def parallel_plan(self) -> ParallelPlan:
        plan, model = super().parallel_plan(), self.config
        if model.block_input_dim:
            units = (("embed_tokens_per_layer",), *plan.units)
            plan = replace(plan, units=units, roles={**plan.roles, "embed_tokens_per_layer": "vocabulary"})
        return replace(plan, mixtures=tuple(f"{name}.mixture" for name in plan.blocks) if model.experts else ())


class Gemma4(Llama):
    """Family ``gemma4_text``."""

    section: Gemma4Section
    transformer = Gemma4Transformer

    def initial_std(self, name: str) -> float | None:
        return None if "layernorm_" in name or name.endswith("_scale") else super().initial_std(name)

    def describe(self) -> str:
        model = self.section
        of_experts = f"; {model.experts} experts of {model.expert_hidden_dim}, {model.experts_per_token} per token"
        of_keys = f"; keys and values of the last {model.kv_shared_layers} layers shared"
        of_inputs = f"; an input of {model.block_input_dim} for each layer"
        return (
            f"{super().describe()}{of_experts if model.experts else ''}"
            f"{of_keys if model.kv_shared_layers else ''}{of_inputs if model.block_input_dim else ''}"
        )

    def flops_per_token(self, parameters: int, sequence_length: int) -> float:
        model = self.section
        more = sum(model.sizes(layer)[0] - model.attention_head_dim for layer in range(model.layers))
        idle = 3 * model.dim * model.expert_hidden_dim * (model.experts - model.experts_per_token)
        looked_up = self.vocab_size * model.block_input_dim
        used = parameters - model.layers * (idle + looked_up)
        return super().flops_per_token(used, sequence_length) + 12 * model.heads * more * sequence_length

    def exported(self, name: str, shape: Sequence[int]) -> tuple[Fragment, ...]:
        for ours, theirs in _NAMES.items():
            name = name.replace(ours, theirs)
        fused = fused_experts(self.export_name(name), shape)
        return super().exported(name, shape) if fused is None else (fused,)

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
            "vocab_size_per_layer_input": self.vocab_size,
            "enable_moe_block": bool(model.experts),
            "num_experts": model.experts or None,
            "top_k_experts": model.experts_per_token or None,
            "moe_intermediate_size": model.expert_hidden_dim or None,
            "rope_parameters": {
                "full_attention": full | {"partial_rotary_factor": model.global_rotary_fraction},
                "sliding_attention": {"rope_type": "default", "rope_theta": model.local_rope_theta},
            },
        }


_NAMES = {
    ".mixture.gate.weight": ".router.proj.weight",
    ".mixture.gate.scale_weight": ".router.scale",
    ".mixture.gate.expert_scale": ".router.per_expert_scale",
    ".mixture.experts": ".experts",
}
"""Parts of names that differ in a checkpoint."""
