"""A decoder-only transformer of the Llama 3 family, and its parallel plan.

Llama 3: https://arxiv.org/abs/2407.21783. RMSNorm: https://arxiv.org/abs/1910.07467. Rotary embeddings:
https://arxiv.org/abs/2104.09864. Grouped-query attention: https://arxiv.org/abs/2305.13245. SwiGLU:
https://arxiv.org/abs/2002.05202. Module names are Hugging Face's (without the leading ``model.``), and rotary pairs
are (i, i + head_dim/2) as there, so weights are exchanged with ``LlamaForCausalLM`` unchanged.

Shapes: B batch, S sequence, D dim, H query heads, K key/value heads, E head_dim, V vocabulary.
"""

import math
from collections.abc import Collection, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from serried.configs.hugging_face.model_folder import CONFIG, model_folder
from serried.configs.hugging_face.text_part import has_other_parts
from serried.parallel.plan import Context, ParallelPlan
from serried.recipes.models.families.llama_config import LlamaSection
from serried.recipes.models.family import PublishedFamily
from serried.recipes.models.layers.attention import attend, attend_with_logsumexp, causal_mask
from serried.recipes.models.layers.kv_cache import Cache, LayerCache
from serried.recipes.models.layers.lm_head import LanguageModelHead
from serried.recipes.models.layers.rope import RotaryEmbedding, document_lengths, rotate
from serried.recipes.models.layers.rope_config import Rope

_WIDEST = 2**31
"""Window that is longer than every sequence. Unlike the length of a sequence, it is a number in exported graphs too."""


class Linear(nn.Linear):
    """Linear layer without torch's initialization: values are initialized later, by name.

    On the meta device, torch's initialization would import all of ``torch._dynamo``.
    """

    def reset_parameters(self) -> None:
        """Do nothing."""


class Embedding(nn.Embedding):
    """Embedding without torch's initialization; see ``Linear``."""

    def reset_parameters(self) -> None:
        """Do nothing."""


class RMSNorm(nn.Module):
    """x / root-mean-square(x) * weight over the last dim, computed in fp32, returned in x's dtype."""

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(dim))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x.float(), self.weight.shape, self.weight.float(), self.eps).to(x.dtype)


class Sinks(nn.Module):
    """Learned score of an additional key per head, whose value is zero (https://arxiv.org/abs/2309.17453)."""

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(heads))


class Attention(nn.Module):
    """Causal grouped-query self-attention."""

    def __init__(
        self, config: LlamaSection, *, bias: bool = False, norm: bool = False, output_bias: bool = False,
        sinks: bool = False,
    ) -> None:  # fmt: skip
        """
        Args:
            bias: add biases to queries, keys and values.
            norm: normalize queries and keys of each head.
            output_bias: add a bias to the output.
            sinks: let each head attend to a key of value zero, with a learned score.
        """
        super().__init__()
        self.head_dim = config.attention_head_dim
        self.context = Context(partial(attend, kernel=config.attention), attend_with_logsumexp)
        self.q_proj = Linear(config.dim, config.heads * self.head_dim, bias=bias)
        self.k_proj = Linear(config.dim, config.kv_heads * self.head_dim, bias=bias)
        self.v_proj = Linear(config.dim, config.kv_heads * self.head_dim, bias=bias)
        self.q_norm: nn.Module | None = RMSNorm(self.head_dim, config.norm_eps) if norm else None
        self.k_norm: nn.Module | None = RMSNorm(self.head_dim, config.norm_eps) if norm else None
        self.sinks = Sinks(config.heads) if sinks else None
        self.o_proj = Linear(config.heads * self.head_dim, config.dim, bias=output_bias)

    def forward(  # [B, S, D] -> [B, S, D]
        self, x: Tensor, cos: Tensor, sin: Tensor, mask: Any, past: LayerCache | None = None
    ) -> Tensor:
        q, k, v = (
            projection(x).unflatten(-1, (-1, self.head_dim))  # [B, S, heads, E]
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k, v = (heads.transpose(1, 2) for heads in (q, k, v))
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        if past is not None:
            k, v = past.extend(k, v)
        mixed = self.context.attend(q, k, v, mask, None if self.sinks is None else self.sinks.weight)
        return self.o_proj(mixed.transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    """SwiGLU feed-forward."""

    def __init__(self, dim: int, hidden_dim: int) -> None:
        super().__init__()
        self.gate_proj = Linear(dim, hidden_dim, bias=False)
        self.up_proj = Linear(dim, hidden_dim, bias=False)
        self.down_proj = Linear(hidden_dim, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
    """Attention and feed-forward, each after a norm and added to the residual stream."""

    norm: type[RMSNorm] = RMSNorm
    """Class of both norms."""

    def __init__(
        self, config: LlamaSection, attention: nn.Module, feed_forward: nn.Module, mixer: str = "self_attn"
    ) -> None:
        """``mixer``: name of the child module ``attention``."""
        super().__init__()
        self.mixer = mixer
        self.input_layernorm = self.norm(config.dim, config.norm_eps)
        self.add_module(mixer, attention)
        self.post_attention_layernorm = self.norm(config.dim, config.norm_eps)
        self.mlp = feed_forward

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Any, past: LayerCache | None = None) -> Tensor:
        x = x + getattr(self, self.mixer)(self.input_layernorm(x), cos, sin, mask, past)
        return x + self.mlp(self.post_attention_layernorm(x))


ROLES = {
    "embed_tokens": "vocabulary",
    "layers.*.self_attn": "region",
    "layers.*.self_attn.[qkv]_proj": "column",
    "layers.*.self_attn.o_proj": "row",
    "layers.*.self_attn.sinks": "heads",
    "layers.*.mlp": "region",
    "layers.*.mlp.gate_proj": "column",
    "layers.*.mlp.up_proj": "column",
    "layers.*.mlp.down_proj": "row",
    "lm_head": "head",
}
"""Role of each module in tensor parallelism."""


class Transformer(nn.Module):
    """Decoder-only transformer: maps tokens to logits, or to the summed loss if targets are given.

    Build it under ``torch.device("meta")``, where it allocates nothing. A tied model has no head weight (it reads
    the embedding's), so that neither sharding nor moving can untie them.
    """

    def __init__(self, config: LlamaSection, vocab_size: int) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = Embedding(vocab_size, config.dim, config.padding_token)
        self.layers = nn.ModuleList(self.block(number) for number in range(config.layers))
        self.norm = RMSNorm(config.dim, config.norm_eps)
        self.lm_head = LanguageModelHead(config.dim, vocab_size, tied=config.tie_embeddings)
        self.further_names = {"lm_head.weight": "embed_tokens.weight"} if config.tie_embeddings else {}
        """Other names under which a checkpoint may store a parameter, mapped to its name."""
        self.context = Context(attend, attend_with_logsumexp)
        self.rotary = RotaryEmbedding(config.rotary_dim)

    def block(self, number: int) -> nn.Module:
        """Return block ``number``. A family with different blocks overrides this."""
        return Block(self.config, self.attention(number), self.feed_forward(number))

    def attention(self, number: int) -> nn.Module:
        """Return the attention of block ``number``. A family with a different attention overrides this."""
        del number
        return Attention(self.config, bias=self.config.has_bias, norm=self.config.normalizes_heads)

    def feed_forward(self, number: int) -> nn.Module:
        """Return the feed-forward of block ``number``. A family with a different feed-forward overrides this."""
        del number
        return FeedForward(self.config.dim, self.config.hidden_dim)

    def forward(
        self, tokens: Tensor, targets: Tensor | None = None, positions: Tensor | None = None, cache: Cache | None = None
    ) -> Tensor:
        """Map ``tokens`` [B, S] to logits [B, S, V]; with ``targets`` [B, S] (-100: no target), to the loss sum,
        fp32 scalar.

        ``positions`` [B, S] restart from 0 with each document; attention is masked between documents. Without
        positions, a sequence is one document. They are always the positions of the full sequence, even if
        ``tokens`` and ``targets`` are a shard of it, as with context parallelism.

        With a ``cache``, the tokens continue the cached ones and are added to it, and only the logits of the last
        token are returned, [B, 1, V]. Meant for generation: each sequence is a document, perhaps after padding.
        """
        length = self.context.whole_length(tokens) if cache is None else cache.capacity
        windows, ropes = self.reaches(length)
        if cache is not None:
            tokens = self._with_outdated(tokens, cache, {*ropes})
        rotations = {rope: self._rotation(rope, length, tokens, positions, cache) for rope in {*ropes}}
        masks = {window: self._mask(window, length, tokens, positions, cache) for window in {*windows}}
        settings: list[tuple[Any, ...]] = [
            (*rotations[rope], masks[window]) for rope, window in zip(ropes, windows, strict=True)
        ]
        if cache is not None:
            settings = [(*own, past) for own, past in zip(settings, cache.layers, strict=True)]
        x = self.through_blocks(self.embedded(tokens), tokens, settings)
        if cache is not None:
            cache.length += tokens.shape[1]
            x = x[:, -1:]
        shared = self.embed_tokens.weight if self.config.tie_embeddings else None
        return self.lm_head(self.norm(x), targets, shared)

    def through_blocks(self, x: Tensor, tokens: Tensor, settings: Sequence[tuple[Any, ...]]) -> Tensor:
        """Return the output of the last block for ``x``, the input of the first one. A family whose blocks need more
        than the residual stream overrides this.

        Args:
            tokens: the input of the model.
            settings: further arguments of each block.
        """
        del tokens
        for block, own in zip(self.layers, settings, strict=False):  # a plan traces only some of the blocks
            x = block(x, *own)
        return x

    def embedded(self, tokens: Tensor) -> Tensor:
        """Return the input of the first block. In later pipeline stages, ``tokens`` are already hidden states."""
        x: Tensor = self.embed_tokens(tokens)
        # Autocast leaves the embedding in fp32, while sharded mixed precision already has it in low precision. The
        # residual stream has the same dtype with both, so that results do not depend on the strategy.
        kind = x.device.type
        return x.to(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else x

    def reaches(self, length: int) -> tuple[list[int | None], list[Rope]]:
        """Return the attention window and the rotary frequencies of each block. A window that is not shorter than
        ``length`` is None, or ``_WIDEST`` if attention needs a mask."""
        numbers = range(self.config.layers)
        windows = [self.config.window(number) for number in numbers]
        widest = _WIDEST if self.config.needs_mask else None
        windows = [widest if window is None or window >= length else window for window in windows]
        return windows, [self.config.rope(number) for number in numbers]

    def _mask(
        self, window: int | None, length: int, tokens: Tensor, positions: Tensor | None, cache: Cache | None
    ) -> Any:
        if cache is not None:
            return cache.mask(tokens.shape[1], tokens.device, window)
        make = partial(causal_mask, positions, length, tokens.device, window, self.config.attention)
        return self.context.mask(make, length, tokens.device)

    def _with_outdated(self, tokens: Tensor, cache: Cache, ropes: Collection[Rope]) -> Tensor:
        """Return ``tokens``, preceded by the cached tokens if their rotations are outdated.

        With ``longrope``, the rotations of all tokens change when a sequence exceeds the original context. The cache is
        then emptied.
        """
        scalings = [rope.scaling for rope in ropes if rope.scaling and rope.scaling.rope_type == "longrope"]
        if any(cache.crosses(scaling.original, tokens.shape[1]) for scaling in scalings):
            tokens = torch.cat((*cache.inputs, tokens), dim=1)
            cache.clear()
        if scalings:
            cache.inputs.append(tokens)
        return tokens

    def _rotation(
        self, rope: Rope, length: int, tokens: Tensor, positions: Tensor | None, cache: Cache | None
    ) -> tuple[Tensor, Tensor]:
        device, scaling = tokens.device, rope.scaling
        so_far = length if cache is None else cache.length + tokens.shape[1]
        is_long = scaling is not None and scaling.depends_on_length and so_far > scaling.original
        if is_long:
            if cache is not None:
                places, lengths = (of(tokens.shape[1], device) for of in (cache.positions, cache.lengths))
            elif positions is None:
                lengths = torch.full((), so_far, device=device)
                places = self.context.part(torch.arange(length, device=device), 0)
            else:
                places = self.context.part(positions, 1)
                lengths = self.context.part(document_lengths(positions), 1)
            return self.rotary.of_long_documents(rope, places, lengths, length)
        cos, sin = self.rotary.table(rope, length, device)
        if cache is not None:
            mine = cache.positions(tokens.shape[1], device)
        elif positions is None:
            return self.context.part(cos, 0), self.context.part(sin, 0)
        else:
            mine = self.context.part(positions, 1)
        return cos[mine].unsqueeze(1), sin[mine].unsqueeze(1)

    def keep_rotations(self, length: int) -> None:
        """Compute the rotary tables for ``length`` tokens now, so that a traced graph contains them as constants."""
        for rope in {*self.reaches(length)[1]}:
            self.rotary.table(rope, length, self.norm.weight.device)

    def parallel_plan(self) -> ParallelPlan:
        """Return a plan whose FSDP units are the blocks and, unless they are tied, the embedding and the head."""
        names = tuple(f"layers.{index}" for index in range(self.config.layers))
        blocks, tied = tuple((name,) for name in names), self.config.tie_embeddings
        return ParallelPlan(
            units=blocks if tied else (("embed_tokens",), *blocks, ("norm", "lm_head")),
            blocks=names,
            tied=("embed_tokens.weight",) if tied else (),
            context=("", "layers.*.self_attn"),
            roles=ROLES,
        )


class Llama(PublishedFamily):
    """Families ``llama``, ``mistral``, ``qwen2`` and ``qwen3``, whose sections define their differences.

    Llama 2 and 3; Mistral (https://arxiv.org/abs/2310.06825); Qwen 2 and 2.5 (https://arxiv.org/abs/2412.15115);
    Qwen 3, dense (https://arxiv.org/abs/2505.09388).
    """

    transformer: type[Transformer] = Transformer
    """Module class that ``build`` creates."""

    def build(self) -> Transformer:
        with torch.device("meta"):
            return self.transformer(self.section, self.vocab_size)

    def parallel_plan(self, model: nn.Module) -> ParallelPlan:
        assert isinstance(model, Transformer)
        return model.parallel_plan()

    def initial_std(self, name: str) -> float | None:
        """Return the standard deviation of the initial values. Projections into the residual stream are scaled down by
        sqrt(2 x layers), so that its variance does not grow with depth (GPT-2, section 2.3)."""
        if name.endswith("norm.weight"):
            return None
        if name.endswith(".bias"):
            return 0.0
        std = self.section.initializer_std
        is_into_stream = name.endswith(("o_proj.weight", "down_proj.weight", "experts.down_proj"))
        return std / math.sqrt(2 * self.section.layers) if is_into_stream else std

    def describe(self) -> str:
        model = self.section
        windows = [window for layer in range(model.layers) if (window := model.window(layer))]
        which = "all" if len(windows) == model.layers else f"{len(windows)} of them"
        windowed = f", {which} with a window of {windows[0]:,}" if windows else ""
        scaling, longest = model.rope_scaling, model.max_sequence_length
        scaled = f", rope scaled by {scaling.rope_type} x{scaling.factor:g} to {longest:,} tokens" if scaling else ""
        return (
            f"{model.layers} layers{windowed}, dim {model.dim}, feed-forward {model.hidden_dim}, "
            f"heads {model.heads} (key/value {model.kv_heads}){', embeddings tied' if model.tie_embeddings else ''}"
            f"{scaled}"
        )

    def notes(self) -> list[str]:
        model = self.section
        if model.path is None or not model.pretrained or not has_other_parts(model_folder(model.path, CONFIG)):
            return []
        (saved_as,) = self.export_config(None)["architectures"]
        return [
            f"model.path={model.path} also reads images; only its text part (language_model) is trained, and saved as "
            f"{saved_as}; adapters do not fit the full model: export them with merge=true"
        ]

    def flops_per_token(self, parameters: int, sequence_length: int) -> float:
        """Return forward and backward FLOPs per token, by PaLM's formula (https://arxiv.org/abs/2204.02311, appendix
        B).

        It counts 6 per parameter in a matrix product, and 12 x layers x heads x head_dim x sequence for attention
        scores. The embedding lookup is not counted, unless the embedding is also the head. The few weights of norms are
        counted. Scores masked by causality count as computed, although a kernel may skip them. Scores outside a window
        do not count.
        """
        model = self.section
        lookup = 0 if model.tie_embeddings else self.vocab_size * model.dim
        seen = sum(min(sequence_length, model.window(layer) or sequence_length) for layer in range(model.layers))
        attention = 12 * model.heads * model.attention_head_dim * seen
        return 6.0 * (parameters - lookup) + attention

    def export_name(self, name: str) -> str:
        return name if name.startswith("lm_head.") else f"model.{name}"

    def export_config(self, end_token: int | None) -> dict[str, Any]:
        model = self.section
        scaling = model.rope_scaling
        rope = {"rope_theta": model.rope_theta, **(scaling.described() if scaling else {"rope_type": "default"})}
        # transformers uses this value as the original length of dynamic scaling.
        longest = scaling.original if scaling and scaling.rope_type == "dynamic" else model.max_sequence_length
        return super().export_config(end_token) | {
            **model.plain,
            "head_dim": model.attention_head_dim,
            "max_position_embeddings": longest,
            "rope_parameters": rope,  # for transformers >= 5
            "rope_theta": model.rope_theta,  # for transformers 4
            "rope_scaling": rope if scaling else None,
        }
