"""Qwen3-Next and Qwen 3.5: linear attention (https://arxiv.org/abs/2412.06464) in most blocks.

Every n-th block has grouped-query attention, whose output is multiplied by a gate (https://arxiv.org/abs/2505.06708).
Norms are scaled by 1 + weight. Qwen3-Next and the larger models of Qwen 3.5 have a mixture of experts in each block,
with a shared expert that is multiplied by a gate too.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from serried.parallel.checkpoint_mapping import Fragment
from serried.parallel.plan import ParallelPlan
from serried.recipes.models.families.gemma import GemmaNorm
from serried.recipes.models.families.llama import Attention, Block, FeedForward, Linear, Llama, RMSNorm, Transformer
from serried.recipes.models.families.moe import MixtureOfExperts, MoE, MoETransformer, as_gathered
from serried.recipes.models.families.qwen3_next_config import Qwen3NextSection, Qwen35Section
from serried.recipes.models.layers.attention import numbered_documents
from serried.recipes.models.layers.delta_rule import gated_delta_rule, short_convolution
from serried.recipes.models.layers.kv_cache import Cache, LayerCache
from serried.recipes.models.layers.rope import rotate

_LINEAR = 0
"""Value in place of a window in ``Transformer.reaches``, for blocks with linear attention."""

_PROJECTIONS = ("q_proj", "k_proj", "v_proj", "in_proj_z", "in_proj_b", "in_proj_a")
"""Matrices of ``LinearAttention``."""


class GatedAttention(Attention):
    """``Attention`` whose output is multiplied by a gate. ``q_proj`` computes query and gate of each head."""

    def __init__(self, config: Qwen35Section) -> None:
        super().__init__(config)
        self.q_proj = Linear(config.dim, 2 * config.heads * self.head_dim, bias=False)
        self.q_norm: nn.Module = GemmaNorm(self.head_dim, config.norm_eps)
        self.k_norm: nn.Module = GemmaNorm(self.head_dim, config.norm_eps)

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, mask: Any, past: LayerCache | None = None
    ) -> Tensor:  # fmt: skip
        q, gate = self.q_proj(x).unflatten(-1, (-1, 2 * self.head_dim)).chunk(2, dim=-1)  # [B, S, H, E]
        k, v = (projection(x).unflatten(-1, (-1, self.head_dim)) for projection in (self.k_proj, self.v_proj))
        q, k, v = (heads.transpose(1, 2) for heads in (self.q_norm(q), self.k_norm(k), v))
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        if past is not None:
            k, v = past.extend(k, v)
        mixed = self.context.attend(q, k, v, mask).transpose(1, 2) * gate.sigmoid()
        return self.o_proj(mixed.flatten(2))


class Channels(nn.Module):
    """Weight of ``short_convolution``, [channels, 1, taps]."""

    def __init__(self, channels: int, taps: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(channels, 1, taps))


class Decay(nn.Module):
    """Logarithm of the decay of each head's state, at most 0. ``weight`` is the logarithm of its rate.

    Computed in fp32, from weights in the dtype of the input: the same on all parallel layouts and in transformers.
    """

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.empty(heads)), nn.Parameter(torch.empty(heads))

    def forward(self, x: Tensor) -> Tensor:
        return -as_gathered(self.weight, x).exp() * F.softplus(x.float() + as_gathered(self.bias, x))


class LinearAttention(nn.Module):
    """Gated delta rule. Several value heads share a query head and a key head.

    Each projection has its own matrix, so that tensor parallelism can shard its heads.
    """

    def __init__(self, config: Qwen35Section) -> None:
        super().__init__()
        self.key_dim, self.value_dim = config.linear_key_dim, config.linear_value_dim
        self.values_per_key = config.linear_value_heads // config.linear_key_heads
        keys, values = config.linear_key_heads * self.key_dim, config.linear_value_heads * self.value_dim
        self.add_projections(config.dim, keys, values, config.linear_value_heads)
        self.conv_q, self.conv_k, self.conv_v = (Channels(size, config.convolution) for size in (keys, keys, values))
        self.decay = Decay(config.linear_value_heads)
        self.norm = RMSNorm(self.value_dim, config.norm_eps)
        self.out_proj = Linear(values, config.dim, bias=False)

    def add_projections(self, dim: int, keys: int, values: int, heads: int) -> None:
        """Create the matrices for ``projections``."""
        for name, size in zip(_PROJECTIONS, (keys, keys, values, values, heads, heads), strict=True):
            self.add_module(name, Linear(dim, size, bias=False))

    def projections(self, x: Tensor) -> tuple[Tensor, ...]:
        """Return queries, keys, values, gates of the output, strengths and decays, [B, S, heads x width] each."""
        return tuple(getattr(self, name)(x) for name in _PROJECTIONS)

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor | None, past: LayerCache | None = None
    ) -> Tensor:
        """Map ``x`` [B, S, D] to [B, S, D]. ``positions`` [B, S] restart from 0 with each document."""
        del cos, sin
        q, k, v, gate, strength, rate = self.projections(x)
        earlier, state = (None, None) if past is None or past.state is None else past.state
        before = (None, None, None) if earlier is None else earlier.split([q.shape[2], k.shape[2], v.shape[2]], dim=2)
        if past is not None:
            taps = self.conv_q.weight.shape[2]
            seen = torch.cat((q, k, v), dim=2)
            padded = F.pad(seen, (0, 0, taps - 1, 0)) if earlier is None else torch.cat((earlier, seen), dim=1)
            earlier = padded[:, padded.shape[1] - taps + 1 :]
        weights = [as_gathered(convolution.weight, x) for convolution in (self.conv_q, self.conv_k, self.conv_v)]
        q, k, v = (
            F.silu(short_convolution(part, weight, positions, own)).to(x.dtype)
            for part, weight, own in zip((q, k, v), weights, before, strict=True)
        )
        q, k = (
            heads.unflatten(2, (-1, self.key_dim)).repeat_interleave(self.values_per_key, dim=2) for heads in (q, k)
        )
        v, gate = (heads.unflatten(2, (-1, self.value_dim)) for heads in (v, gate))
        documents = None if positions is None else numbered_documents(positions)
        mixed, state = gated_delta_rule(q, k, v, self.decay(rate), strength.sigmoid(), documents, state)
        if past is not None:
            past.state = (earlier, state)
        gated = self.norm(mixed.to(x.dtype)) * F.silu(gate.float())
        return self.out_proj(gated.to(x.dtype).flatten(2))


class FusedLinearAttention(LinearAttention):
    """``LinearAttention`` of Qwen3-Next, whose matrices have the rows of a key head next to each other."""

    def add_projections(self, dim: int, keys: int, values: int, heads: int) -> None:
        self.in_proj_qkvz = Linear(dim, 2 * (keys + values), bias=False)
        self.in_proj_ba = Linear(dim, 2 * heads, bias=False)

    def projections(self, x: Tensor) -> tuple[Tensor, ...]:
        values = self.values_per_key * self.value_dim
        sizes = [self.key_dim, self.key_dim, values, values]
        heads = self.in_proj_qkvz(x).unflatten(2, (-1, sum(sizes))).split(sizes, dim=3)
        rates = self.in_proj_ba(x).unflatten(2, (-1, 2 * self.values_per_key)).chunk(2, dim=3)
        return tuple(part.flatten(2) for part in (*heads, *rates))


class HybridBlock(Block):
    """``Block`` with norms scaled by 1 + weight."""

    norm = GemmaNorm


_SHARDED = (*_PROJECTIONS, "in_proj_qkvz", "in_proj_ba", "conv_q", "conv_k", "conv_v", "decay")
_ROLES = {
    "layers.*.linear_attn": "region",
    **{f"layers.*.linear_attn.{name}": "column" for name in _SHARDED},
    "layers.*.linear_attn.out_proj": "row",
}


class HybridTransformer(Transformer):
    """``Transformer`` with linear attention in most blocks."""

    config: Qwen35Section

    def __init__(self, config: Qwen35Section, vocab_size: int) -> None:
        super().__init__(config, vocab_size)
        self.norm = GemmaNorm(config.dim, config.norm_eps)

    def block(self, number: int) -> Block:
        mixer = "linear_attn" if self.config.is_linear(number) else "self_attn"
        return HybridBlock(self.config, self.attention(number), self.feed_forward(number), mixer)

    def attention(self, number: int) -> nn.Module:
        if not self.config.is_linear(number):
            return GatedAttention(self.config)
        return (FusedLinearAttention if self.config.family == "qwen3_next" else LinearAttention)(self.config)

    def reaches(self, length: int) -> tuple[list[int | None], list[Any]]:
        windows, ropes = super().reaches(length)
        return [_LINEAR if self.config.is_linear(number) else None for number in range(len(windows))], ropes

    def _mask(
        self, window: int | None, length: int, tokens: Tensor, positions: Tensor | None, cache: Cache | None
    ) -> Any:
        if window != _LINEAR:
            return super()._mask(window, length, tokens, positions, cache)
        return cache.positions(tokens.shape[1], tokens.device) if cache is not None and cache.padding else positions

    def parallel_plan(self) -> ParallelPlan:
        plan = super().parallel_plan()
        return replace(plan, roles={**plan.roles, **_ROLES}, context=())


class GatedMixture(MixtureOfExperts):
    """``MixtureOfExperts`` whose shared expert is multiplied by a gate."""

    def __init__(self, config: Qwen3NextSection) -> None:
        super().__init__(config)
        self.shared_gate = Linear(config.dim, 1, bias=False)
        self.experts.is_single_in_peft = config.family == "qwen3_next"  # PEFT 0.21 has no names for the other family

    def forward(self, x: Tensor) -> Tensor:
        assert self.shared_experts is not None
        routed = self._routed(x.flatten(0, 1)).view(x.shape)
        return routed + self.shared_gate(x).sigmoid() * self.shared_experts(x)


class HybridMoETransformer(HybridTransformer, MoETransformer):
    """``HybridTransformer`` with a mixture of experts in every block after the first ``dense_layers``."""

    config: Qwen3NextSection

    def feed_forward(self, number: int) -> nn.Module:
        config = self.config
        return FeedForward(config.dim, config.hidden_dim) if number < config.dense_layers else GatedMixture(config)


class Qwen35(Llama):
    """Family ``qwen3_5_text``."""

    section: Qwen35Section
    transformer: type[Transformer] = HybridTransformer

    def initial_std(self, name: str) -> float | None:
        if name.endswith("linear_attn.norm.weight") or name.endswith("decay.bias"):
            return None
        if name.endswith("norm.weight"):
            return 0.0
        if name.endswith("decay.weight"):
            return 1.0
        return super().initial_std(name.replace("linear_attn.out_proj", "self_attn.o_proj"))

    def describe(self) -> str:
        model = self.section
        linear = sum(model.is_linear(layer) for layer in range(model.layers))
        return f"{super().describe()}; linear attention in {linear} layers"

    def flops_per_token(self, parameters: int, sequence_length: int) -> float:
        """Return forward and backward FLOPs per token; see ``Llama``.

        In linear attention, a token reads the state twice and changes it once, 2 FLOPs per element of the state each.
        """
        model = self.section
        linear = sum(model.is_linear(layer) for layer in range(model.layers))
        scores = 12 * model.heads * model.attention_head_dim * sequence_length
        states = 18 * model.linear_value_heads * model.linear_key_dim * model.linear_value_dim
        return super().flops_per_token(parameters, sequence_length) + linear * (states - scores)

    def exported(self, name: str, shape: Sequence[int]) -> tuple[Fragment, ...]:
        owner, _, part = name.removesuffix(".weight").rpartition(".")
        if not owner.endswith(".linear_attn") or part not in _FUSED:
            return super().exported(_renamed(name), shape)
        model, fused = self.section, _FUSED[part]
        keys, values = model.linear_key_heads * model.linear_key_dim, model.linear_value_heads * model.linear_value_dim
        start = {"q": 0, "k": keys, "v": 2 * keys}[part.removeprefix("conv_")[0]]
        whole = (2 * keys + values, *shape[1:])
        return (Fragment.within(self.export_name(f"{owner}.{fused}.weight"), whole, 0, start, shape),)

    def export_config(self, end_token: int | None) -> dict[str, Any]:
        model, plain = self.section, super().export_config(end_token)
        kinds = ["linear_attention" if model.is_linear(layer) else "full_attention" for layer in range(model.layers)]
        rotary = {"partial_rotary_factor": model.rotary_fraction}
        return plain | rotary | {"layer_types": kinds, "rope_parameters": plain["rope_parameters"] | rotary}


_FUSED = {
    **dict.fromkeys(("q_proj", "k_proj", "v_proj"), "in_proj_qkv"),
    **dict.fromkeys(("conv_q", "conv_k", "conv_v"), "conv1d"),
}


def _renamed(name: str) -> str:
    """Return the name in a checkpoint of a parameter that has a different name here."""
    renamed = {".decay.weight": ".A_log", ".decay.bias": ".dt_bias"}
    for ours, theirs in renamed.items():
        name = name.replace(ours, theirs)
    return name.replace(".shared_experts.", ".shared_expert.").replace(".shared_gate.", ".shared_expert_gate.")


class Qwen3Next(Qwen35, MoE):
    """Families ``qwen3_next`` and ``qwen3_5_moe_text``."""

    section: Qwen3NextSection
    transformer: type[HybridMoETransformer] = HybridMoETransformer

    def export_config(self, end_token: int | None) -> dict[str, Any]:
        plain = super().export_config(end_token)
        if self.section.family == "qwen3_5_moe_text":
            return plain | {"architectures": ["Qwen3_5MoeForCausalLM"]}
        own = {"decoder_sparse_step": 1, "mlp_only_layers": list(range(self.section.dense_layers))}
        return plain | {"architectures": ["Qwen3NextForCausalLM"], **own}
