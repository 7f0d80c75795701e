"""GPT-2: learned positions, LayerNorm, biases, GELU, with the parameters of transformers' ``GPT2LMHeadModel``.

Radford et al., "Language models are unsupervised multitask learners", 2019. Queries, keys and values are three
parameters here, so that tensor parallelism can shard each by heads; a checkpoint stores them concatenated
in ``c_attn``.

Shapes: B batch, S sequence, D dim, H heads, E head_dim, V vocabulary.
"""

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from serried.parallel.checkpoint_mapping import Fragment
from serried.parallel.plan import Context, ParallelPlan
from serried.recipes.models.families.gpt2_config import GPT2Section
from serried.recipes.models.families.llama import Embedding
from serried.recipes.models.family import PublishedFamily
from serried.recipes.models.layers.attention import attend, attend_with_logsumexp, causal_mask
from serried.recipes.models.layers.kv_cache import Cache, LayerCache
from serried.recipes.models.layers.lm_head import LanguageModelHead

_QUERY_KEY_VALUE = ("q_attn", "k_attn", "v_attn")
"""Projections in the order of ``c_attn``."""


class Conv1D(nn.Module):
    """A linear layer with a weight [inputs, outputs], named and saved as in transformers."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(inputs, outputs))
        self.bias = nn.Parameter(torch.empty(outputs))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.T, self.bias)


class LayerNorm(nn.Module):
    """(x - mean) / standard deviation * weight + bias over the last dim, computed in fp32, returned in x's dtype."""

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.empty(dim)), nn.Parameter(torch.empty(dim))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        weight, bias = self.weight.float(), self.bias.float()
        return F.layer_norm(x.float(), weight.shape, weight, bias, self.eps).to(x.dtype)


class Attention(nn.Module):
    """Causal self-attention."""

    def __init__(self, config: GPT2Section) -> None:
        super().__init__()
        self.head_dim = config.dim // config.heads
        self.context = Context(partial(attend, kernel=config.attention), attend_with_logsumexp)
        self.q_attn, self.k_attn, self.v_attn = (Conv1D(config.dim, config.dim) for _ in _QUERY_KEY_VALUE)
        self.c_proj = Conv1D(config.dim, config.dim)

    def forward(self, x: Tensor, mask: Any, past: LayerCache | None = None) -> Tensor:  # [B, S, D] -> [B, S, D]
        q, k, v = (
            projection(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)  # [B, H, S, E]
            for projection in (self.q_attn, self.k_attn, self.v_attn)
        )
        if past is not None:
            k, v = past.extend(k, v)
        return self.c_proj(self.context.attend(q, k, v, mask).transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    """Feed-forward of two layers with a GELU in between."""

    def __init__(self, config: GPT2Section) -> None:
        super().__init__()
        self.c_fc = Conv1D(config.dim, config.hidden_dim)
        self.c_proj = Conv1D(config.hidden_dim, config.dim)

    def forward(self, x: Tensor) -> Tensor:
        return self.c_proj(F.gelu(self.c_fc(x), approximate="tanh"))


class Block(nn.Module):
    """Attention and feed-forward, each after a norm and added to the residual stream."""

    def __init__(self, config: GPT2Section) -> None:
        super().__init__()
        self.ln_1 = LayerNorm(config.dim, config.norm_eps)
        self.attn = Attention(config)
        self.ln_2 = LayerNorm(config.dim, config.norm_eps)
        self.mlp = FeedForward(config)

    def forward(self, x: Tensor, mask: Any, past: LayerCache | None = None) -> Tensor:
        x = x + self.attn(self.ln_1(x), mask, past)
        return x + self.mlp(self.ln_2(x))


class GPT2Model(nn.Module):
    """GPT-2 with the interface of ``llama.Transformer``: maps tokens to logits, or to the summed loss if targets are
    given."""

    def __init__(self, config: GPT2Section, vocab_size: int) -> None:
        super().__init__()
        self.config = config
        self.wte = Embedding(vocab_size, config.dim)
        self.wpe = Embedding(config.max_sequence_length, config.dim)
        self.h = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.ln_f = LayerNorm(config.dim, config.norm_eps)
        self.lm_head = LanguageModelHead(config.dim, vocab_size, tied=config.tie_embeddings)
        self.further_names = {"lm_head.weight": "wte.weight"} if config.tie_embeddings else {}
        """Other names of parameters in checkpoints, like ``Transformer.further_names``."""
        self.context = Context(attend, attend_with_logsumexp)

    def forward(
        self, tokens: Tensor, targets: Tensor | None = None, positions: Tensor | None = None, cache: Cache | None = None
    ) -> Tensor:
        """Map ``tokens`` [B, S] to logits [B, S, V]; with ``targets`` [B, S] (-100: no target), to the loss sum,
        fp32 scalar.

        ``positions`` [B, S] of the full sequence restart from 0 with each document; attention is masked between
        documents. With a ``cache``, the tokens follow the cached ones, and only the logits of the last token are
        returned, [B, 1, V].
        """
        length = self.context.whole_length(tokens)
        make = partial(causal_mask, positions, length, tokens.device, None, self.config.attention)
        if positions is None:
            positions = torch.arange(length, device=tokens.device).unsqueeze(0)
            if cache is not None:
                positions = cache.positions(length, tokens.device)
            # A sequence sharded over ranks is padded at the end, perhaps beyond the table. Padding is never read.
            positions = positions.clamp(max=self.config.max_sequence_length - 1)
        x = self.wte(tokens)
        if not tokens.is_floating_point():  # in later pipeline stages, tokens are hidden states
            x = x + self.wpe(self.context.part(positions, 1))
        if torch.is_autocast_enabled(x.device.type):
            x = x.to(torch.get_autocast_dtype(x.device.type))  # as in llama.Transformer
        if cache is None:
            mask = self.context.mask(make, length, tokens.device)  # one mask for all blocks
            for block in self.h:
                x = block(x, mask)
        else:
            mask = cache.mask(tokens.shape[1], tokens.device)
            for block, past in zip(self.h, cache.layers, strict=True):
                x = block(x, mask, past)
            cache.length += tokens.shape[1]
            x = x[:, -1:]
        return self.lm_head(self.ln_f(x), targets, self.wte.weight if self.config.tie_embeddings else None)


class GPT2(PublishedFamily):
    """Family ``gpt2``."""

    section: GPT2Section

    def build(self) -> GPT2Model:
        with torch.device("meta"):
            return GPT2Model(self.section, self.vocab_size)

    def parallel_plan(self, model: nn.Module) -> ParallelPlan:
        """Return a plan whose FSDP units are the blocks and, unless they are tied, the embedding and the head."""
        del model
        names = tuple(f"h.{index}" for index in range(self.section.layers))
        blocks, tied = tuple((name,) for name in names), self.section.tie_embeddings
        return ParallelPlan(
            units=blocks if tied else (("wte", "wpe"), *blocks, ("ln_f", "lm_head")),
            blocks=names,
            tied=("wte.weight",) if tied else (),
            context=("", "h.*.attn"),
            roles={
                "wte": "vocabulary",
                "wpe": "source",
                "h.*.attn": "region",
                "h.*.attn.[qkv]_attn": "conv1d_column",
                "h.*.attn.c_proj": "conv1d_row",
                "h.*.mlp": "region",
                "h.*.mlp.c_fc": "conv1d_column",
                "h.*.mlp.c_proj": "conv1d_row",
                "lm_head": "head",
            },
        )

    def initial_std(self, name: str) -> float | None:
        if name.endswith(".bias"):
            return 0.0
        if "ln_" in name:
            return None
        std = self.section.initializer_std
        return std / math.sqrt(2 * self.section.layers) if name.endswith("c_proj.weight") else std

    def describe(self) -> str:
        model = self.section
        tied = ", embeddings tied" if model.tie_embeddings else ""
        return f"{model.layers} layers, dim {model.dim}, feed-forward {model.hidden_dim}, heads {model.heads}{tied}"

    def flops_per_token(self, parameters: int, sequence_length: int) -> float:
        """Return FLOPs per token, like ``Llama.flops_per_token``."""
        model = self.section
        looked_up = model.max_sequence_length + (0 if model.tie_embeddings else self.vocab_size)
        return 6.0 * (parameters - looked_up * model.dim) + 12 * model.layers * model.dim * sequence_length

    def exported(self, name: str, shape: Sequence[int]) -> tuple[Fragment, ...]:
        owner, _, last = name.rpartition(".")
        attention, _, part = owner.rpartition(".")
        if part not in _QUERY_KEY_VALUE:
            return (Fragment.whole(name if part == "lm_head" else f"transformer.{name}", shape),)
        fused = (*shape[:-1], 3 * shape[-1])
        start = _QUERY_KEY_VALUE.index(part) * shape[-1]
        return (Fragment.within(f"transformer.{attention}.c_attn.{last}", fused, len(shape) - 1, start, shape),)

    def export_config(self, end_token: int | None) -> dict[str, Any]:
        dropout = dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), 0.0)
        return super().export_config(end_token) | {"activation_function": "gelu_new", **dropout}
