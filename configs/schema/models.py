"""The configuration section of each model family, and how the ``config.json`` of a checkpoint maps to its keys.

What a family computes is in ``recipes/models/``: under its name, or in ``transformer.py`` if only its section differs.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator
from pydantic.json_schema import SkipJsonSchema

from serried.configs.divisors import nearest_divisors
from serried.configs.schema.sections import (
    Count,
    DerivedSize,
    Number,
    PathText,
    PositiveCount,
    Section,
    Size,
    parse_count,
)
from serried.configs.schema.transformers_defaults import ALIASES, DEFAULTS, NOT_NULL, VERSION


class RopeScaling(Section):
    """Llama 3.1's rescaling of rotary frequencies for long contexts (Hugging Face ``rope_type: llama3``)."""

    names: ClassVar[Mapping[str, str]] = {"original_max_sequence_length": "original_max_position_embeddings"}
    """Keys that have another name in a ``config.json``."""

    factor: Number = Field(gt=0)
    """Ratio of the context length to the context length of the original training."""
    low_freq_factor: Number = Field(gt=0)
    """Wavelengths above original length / this are scaled by the whole factor."""
    high_freq_factor: Number = Field(gt=0)
    """Wavelengths below original length / this are unchanged."""
    original_max_sequence_length: PositiveCount
    """Longest sequence of the original training, in tokens."""

    def _mistakes(self) -> Iterator[str]:
        if self.high_freq_factor <= self.low_freq_factor:
            yield (
                f"model.rope_scaling.high_freq_factor={self.high_freq_factor:g} must exceed "
                f"model.rope_scaling.low_freq_factor={self.low_freq_factor:g}; Llama 3.1 uses 4 and 1"
            )


def _nearest(key: str, values: Sequence[int]) -> str:
    """``use model.heads=4 (or one of [8, 2, 16])``; ``values`` come nearest first."""
    return f"use {key}={values[0]}" + (f" (or one of {list(values[1:4])})" if values[1:] else "")


def refuse_unless(found: Mapping[str, Any], **plain: Any) -> None:
    """Raise ``ValueError`` if a key of the ``config.json`` ``found`` is set to another value than ``plain``."""
    for key, value in plain.items():
        if (found.get(key) or value) != value:
            raise ValueError(f"has {key} {found[key]}; only {value} can be taken over")


def _named(names: Mapping[str, str], found: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys that ``names`` names in the ``config.json`` ``found``."""
    return {ours: found[theirs] for ours, theirs in names.items()}


def completed(found: Mapping[str, Any], section: type["ModelSection"]) -> dict[str, Any]:
    """Return the ``config.json`` ``found`` with what transformers takes for keys that it leaves out. A ``model_type``
    that transformers does not have is taken for that of ``section``, or of its nearest base class that it has.

    Raises ``ValueError`` if a key is null that transformers does not take without a value.
    """
    own = [each.opens_as[0] for each in section.__mro__ if issubclass(each, ModelSection)]
    kind = next((each for each in (str(found.get("model_type")), *own) if each in DEFAULTS), "")
    defaults, aliases = DEFAULTS.get(kind, {}), ALIASES.get(kind, {})
    named = [each for each in found if each not in aliases] + [each for each in found if each in aliases]
    values = {aliases.get(each, each): found[each] for each in named}  # transformers reads further names last
    for key in NOT_NULL.get(kind, ()):
        if key in values and values[key] is None:
            raise ValueError(
                f"has {key} null, and transformers {VERSION} needs a value; leave it out for {defaults[key]}, or set it"
            )
    return {**defaults, **values}


READ_EARLIER: Mapping[str, Mapping[str, Any]] = {
    "mistral": {"sliding_window": None},
    "glm4_moe": {"rms_norm_eps": 1e-6},
    "mixtral": {"rms_norm_eps": 1e-6, "rope_theta": 1e4},
}
"""What a version before the defaults of transformers took for keys that a ``config.json`` leaves out, where that
differs and counts for a frozen model."""


class ModelSection(Section):
    """Keys that all families of language models have; each adds its own."""

    free = ("name", "max_sequence_length", "vocab_size", "vocab_multiple", "head_dim", "initializer_std", "attention")
    # Sizes among them are compared by the shapes of tensors.
    names: ClassVar[Mapping[str, str]] = {}
    """Keys -> their names in a ``config.json``, for those that stand there as they are."""
    opens_as: ClassVar[tuple[str, str]] = ("", "")
    """``model_type`` of a checkpoint, and the class of transformers that opens it."""

    name: str
    """Name of the model config, for display."""
    family: str = "llama"
    """Name of the model family; a YAML file in ``model/`` sets it."""
    path: PathText | None = Field(default=None, min_length=1, max_length=4096)
    """Folder or Hub name of a Hugging Face model to start from: its architecture, weights and tokenizer are used."""
    pretrained: bool = True
    """Start from the weights in ``path``; false: from random ones."""
    vocab_size: Size | None = None
    """Rows of the embedding table, in tokens; the tokenizer's size when null."""
    vocab_multiple: Size = 1
    """Round the tokenizer's size up to a multiple of this (128 suits GPUs). ``vocab_size`` is not rounded."""
    max_sequence_length: Annotated[Count, Field(ge=1, le=10**8)] = 131072
    """Longest sequence that the model supports, in tokens; ``data.sequence_length`` must not exceed it."""

    def divisible(self) -> Mapping[str, Mapping[str, int]]:
        """Mesh axes -> the keys, with their values, that the degree of the axis must divide."""
        return {}

    def described(self) -> dict[str, Any]:
        """Return the keys of a ``config.json`` that ``names`` names."""
        return {theirs: getattr(self, ours) for ours, theirs in self.names.items()}

    @classmethod
    def keys_from(cls, found: Mapping[str, Any]) -> dict[str, Any]:
        """Return the keys of this section that describe the model of a Hugging Face ``config.json``.

        Raises:
            ValueError: no keys can; KeyError: it lacks something.
        """
        raise ValueError(f"is of model_type {found.get('model_type')}, which {cls.__name__} does not read")


class LlamaSection(ModelSection):
    """Architecture of a decoder-only transformer of the Llama 3 family."""

    names: ClassVar[Mapping[str, str]] = {
        "dim": "hidden_size",
        "layers": "num_hidden_layers",
        "heads": "num_attention_heads",
        "kv_heads": "num_key_value_heads",
        "hidden_dim": "intermediate_size",
        "tie_embeddings": "tie_word_embeddings",
        "norm_eps": "rms_norm_eps",
        "max_sequence_length": "max_position_embeddings",
        "vocab_size": "vocab_size",
        "padding_token": "pad_token_id",
    }
    opens_as = ("llama", "LlamaForCausalLM")
    plain: ClassVar[Mapping[str, Any]] = {"attention_bias": False, "mlp_bias": False, "hidden_act": "silu"}
    """Keys of ``config.json`` that have one value in all models of the family."""
    has_bias: ClassVar[bool] = False
    """Whether queries, keys and values have one."""
    normalizes_heads: ClassVar[bool] = False
    """Whether queries and keys are normalized."""

    dim: Size
    """Width of the residual stream."""
    layers: Annotated[Count, Field(ge=1, le=1000)]
    """Number of transformer blocks."""
    heads: Size
    """Number of query heads per block."""
    kv_heads: DerivedSize
    """Number of key/value heads per block; fewer than ``heads`` is grouped-query attention. When null, half of an even
    number of ``heads``."""
    head_dim: Size | None = None
    """Width of one head; ``dim / heads`` when null."""
    hidden_dim: DerivedSize
    """Inner width of the SwiGLU feed-forward; 8/3 of ``dim``, rounded up to a multiple of 128, when null."""
    tie_embeddings: bool = False
    """Use the embedding table as the output projection too."""
    norm_eps: Number = Field(default=1e-5, gt=0)
    """Added to the mean square inside RMSNorm."""
    rope_theta: Number = Field(default=500000.0, gt=0)
    """Base of the rotary frequencies."""
    rope_scaling: RopeScaling | None = None
    """Llama 3.1 frequency scaling; null for none."""
    padding_token: Annotated[Count, Field(ge=0, le=10**7)] | None = None
    """Token whose row of the embedding gets no gradient where it is read, as transformers' ``pad_token_id``; null:
    none."""
    initializer_std: Number = Field(default=0.02, gt=0)
    """Standard deviation of the initial weights; projections into the residual stream get this / sqrt(2 x layers)."""
    attention: Literal["auto", "sdpa", "flex", "varlen"] = "auto"
    """Attention kernel: ``auto`` chooses by device and batch; ``sdpa`` is torch's, with a mask for documents and
    windows; ``flex`` and ``varlen`` need no mask, on a GPU."""

    @property
    def attention_head_dim(self) -> int:
        """Width of one head, resolved."""
        return self.head_dim or self.dim // self.heads

    def divisible(self) -> Mapping[str, Mapping[str, int]]:
        sizes = {"model.heads": self.heads, "model.kv_heads": self.kv_heads, "model.hidden_dim": self.hidden_dim}
        return {"tensor": sizes}

    @classmethod
    def keys_from(cls, found: Mapping[str, Any]) -> dict[str, Any]:
        found = completed(found, cls)
        refuse_unless(found, **cls.plain)
        if found.get("quantization_config"):
            raise ValueError("has a quantization_config; only plain float weights can be taken over")
        rope = {"rope_theta": found["rope_theta"], **_rope(found)}
        if rope["rope_theta"] is None:
            raise ValueError("has rope_theta null; leave it out for the default of transformers, or set it")
        kind = rope.get("rope_type", rope.get("type", "default"))
        if kind not in ("default", "llama3"):
            raise ValueError(f"has rope_type {kind}; only default and llama3 can be taken over")
        scaled = RopeScaling.model_fields if kind == "llama3" else ()
        rope.setdefault("original_max_position_embeddings", found["max_position_embeddings"])
        heads, padding = found["num_attention_heads"], found["pad_token_id"]
        return {
            **_named(cls.names, found),
            "kv_heads": heads if found["num_key_value_heads"] is None else found["num_key_value_heads"],
            "head_dim": found.get("head_dim") or found["hidden_size"] // heads,
            "rope_theta": float(rope["rope_theta"]),
            "rope_scaling": {key: rope[RopeScaling.names.get(key, key)] for key in scaled} or None,
            # torch counts negative ones from the end.
            "padding_token": padding if padding is None or padding >= 0 else found["vocab_size"] + padding,
        }

    @property
    def rotary_dim(self) -> int:
        """Leading numbers of each head that rotary embeddings turn."""
        return self.attention_head_dim

    def window(self, layer: int) -> int | None:
        """Number of tokens, with itself, that a token attends to in block ``layer``; None: all up to itself."""
        del layer
        return None

    def rope_base(self, layer: int) -> float:
        """Base of the rotary frequencies in block ``layer``."""
        del layer
        return self.rope_theta

    @model_validator(mode="before")
    @classmethod
    def _derived(cls, values: Any) -> Any:
        """Fill in the sizes that follow from ``dim`` and ``heads``, so that a resized preset keeps its proportions."""
        if not isinstance(values, dict):
            return values
        values, dim, heads = {**values}, parse_count(values.get("dim")), parse_count(values.get("heads"))
        if "hidden_dim" in values and values["hidden_dim"] is None and isinstance(dim, int):
            values["hidden_dim"] = min(max(1, -(-dim * 8 // (3 * 128)) * 128), 10**7)
        if "kv_heads" in values and values["kv_heads"] is None and isinstance(heads, int):
            values["kv_heads"] = heads // 2 if heads % 2 == 0 and heads > 0 else heads
        return values

    def _mistakes(self) -> Iterator[str]:
        if self.head_dim is None and self.dim % self.heads:
            if self.dim % 2:  # rotary embeddings turn pairs, so no number of heads would do
                pairs = 2 * self.heads
                fix = f"use model.dim={max(pairs, (self.dim + self.heads) // pairs * pairs)}"
            else:
                fix = _nearest("model.heads", nearest_divisors(self.dim // 2, self.heads))
            yield f"model.heads={self.heads} does not divide model.dim={self.dim}; {fix}, or set model.head_dim"
        if self.heads % self.kv_heads:
            yield (
                f"model.kv_heads={self.kv_heads} does not divide model.heads={self.heads}; "
                + _nearest("model.kv_heads", nearest_divisors(self.heads, self.kv_heads))
            )
        width = self.attention_head_dim
        if width % 2:
            derived = "" if self.head_dim else f" (model.dim={self.dim} / model.heads={self.heads})"
            yield (
                f"model.head_dim={width}{derived} is odd, but rotary embeddings turn pairs; "
                f"use model.head_dim={width + 1}"
            )


def _rope(found: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return what a ``config.json`` says of rotary embeddings: transformers 5 has one dictionary, before it there were
    keys beside it. transformers reads the older one first."""
    rope: Mapping[str, Any] = found.get("rope_scaling") or found.get("rope_parameters") or {}
    return rope


_FORMS: Mapping[str, Mapping[str, Any]] = {
    "qwen3_moe": {"shared_experts": 0, "qk_norm": True, "rotary_fraction": 1.0, "routed_scale": 1.0},
    "mixtral": {
        "shared_experts": 0, "dense_layers": 0, "normalize_weights": True, "qk_norm": False, "attention_bias": False,
        "rotary_fraction": 1.0, "routed_scale": 1.0,
    },
}  # fmt: skip
"""What the checkpoints of a family cannot express otherwise."""
_EXPERTS: Mapping[str, Mapping[str, str]] = {
    "glm4_moe": {
        "experts": "n_routed_experts",
        "expert_hidden_dim": "moe_intermediate_size",
        "shared_experts": "n_shared_experts",
        "dense_layers": "first_k_dense_replace",
        "normalize_weights": "norm_topk_prob",
        "qk_norm": "use_qk_norm",
        "rotary_fraction": "partial_rotary_factor",
        "routed_scale": "routed_scaling_factor",
    },
    "qwen3_moe": {
        "experts": "num_experts",
        "expert_hidden_dim": "moe_intermediate_size",
        "normalize_weights": "norm_topk_prob",
    },
    "mixtral": {"experts": "num_local_experts", "expert_hidden_dim": "intermediate_size"},
}
"""Further ``names``, by family."""


def _names_of_experts(family: str) -> Mapping[str, str]:
    """Return our key -> the name in a ``config.json``; a family registered elsewhere uses those of GLM."""
    return _EXPERTS.get(family, _EXPERTS["glm4_moe"])


class MoESection(LlamaSection):
    """Architecture of a decoder-only transformer with a mixture of experts in place of most feed-forwards."""

    names: ClassVar[Mapping[str, str]] = {
        **LlamaSection.names,
        "experts_per_token": "num_experts_per_tok",
        "attention_bias": "attention_bias",
    }
    opens_as = ("glm4_moe", "Glm4MoeForCausalLM")
    plain: ClassVar[Mapping[str, Any]] = {"hidden_act": "silu"}

    experts: Size
    """Number of routed experts of a layer."""
    experts_per_token: Size
    """Number of routed experts that each token is sent to."""
    expert_hidden_dim: Size
    """Inner width of one expert."""
    shared_experts: Annotated[Count, Field(ge=0, le=1000)] = 0
    """Number of experts that every token passes through, implemented as one feed-forward of that many times
    ``expert_hidden_dim``."""
    dense_layers: Annotated[Count, Field(ge=0, le=1000)] = 0
    """Number of first layers with a feed-forward of ``hidden_dim`` instead of experts."""
    routed_scale: Number = Field(default=1.0, gt=0)
    """Factor on the output of the routed experts."""
    normalize_weights: bool = True
    """Divide the weights of a token's experts by their sum."""
    attention_bias: bool = False
    """Add a bias to queries, keys and values; with ``family=qwen3_moe`` to the output of attention too."""
    qk_norm: bool = False
    """Normalize queries and keys, per head."""
    rotary_fraction: Number = Field(default=1.0, gt=0, le=1)
    """Fraction of each head that rotary embeddings apply to."""
    balance_rate: Number = Field(default=0.001, ge=0)
    """Step by which the router's bias of an expert moves after each optimizer step, up if the expert got fewer tokens
    than the mean, else down (arXiv 2408.15664). Families with a softmax router have no such bias."""

    def described(self) -> dict[str, Any]:
        names = _names_of_experts(self.family)
        return super().described() | {theirs: getattr(self, ours) for ours, theirs in names.items()}

    @property
    def has_router_bias(self) -> bool:
        """Whether routers score by sigmoid and are balanced by a bias, else by softmax."""
        return self.family not in _FORMS

    @property
    def output_bias(self) -> bool:
        """Whether the output projection of attention has a bias."""
        return self.attention_bias and self.family == "qwen3_moe"

    @property
    def rotary_dim(self) -> int:
        """Leading numbers of each head that rotary embeddings turn."""
        return int(self.attention_head_dim * self.rotary_fraction)

    def divisible(self) -> Mapping[str, Mapping[str, int]]:
        sizes = {"model.heads": self.heads, "model.kv_heads": self.kv_heads}
        if self.dense_layers:
            sizes["model.hidden_dim"] = self.hidden_dim
        if self.shared_experts:
            width = self.shared_experts * self.expert_hidden_dim
            sizes[f"model.expert_hidden_dim x {self.shared_experts} shared"] = width
        widths = {"model.dim": self.dim, "model.expert_hidden_dim": self.expert_hidden_dim}
        return {"tensor": sizes, "expert": {"model.experts": self.experts}, "expert_shard": widths}

    @classmethod
    def keys_from(cls, found: Mapping[str, Any]) -> dict[str, Any]:
        found = completed(found, cls)
        family, dense = found["model_type"], found.get("mlp_only_layers") or []
        if family == "mixtral":
            refuse_unless(found, sliding_window=None)
            found["attention_bias"] = False
        elif family == "qwen3_moe":
            if dense != list(range(len(dense))):
                raise ValueError(f"has mlp_only_layers {dense}; only the first layers can be dense")
            refuse_unless(found, decoder_sparse_step=1, use_sliding_window=False)
        else:
            refuse_unless(found, n_group=1, topk_group=1)
            rotary = _rope(found).get("partial_rotary_factor", found["partial_rotary_factor"])
            found["partial_rotary_factor"] = 1.0 if rotary is None else rotary
        keys = super().keys_from(found) | {"dense_layers": len(dense)}
        return keys | dict(_FORMS.get(family, {})) | _named(_names_of_experts(family), found)

    def _mistakes(self) -> Iterator[str]:
        yield from super()._mistakes()
        if self.experts_per_token > self.experts:
            yield (
                f"model.experts_per_token={self.experts_per_token} exceeds model.experts={self.experts}; "
                f"use model.experts_per_token={self.experts}"
            )
        if self.dense_layers > self.layers:
            yield (
                f"model.dense_layers={self.dense_layers} exceeds model.layers={self.layers}; "
                f"use model.dense_layers={self.layers - 1}"
            )
        if self.rotary_dim % 2:
            yield (
                f"model.rotary_fraction={self.rotary_fraction:g} of model.head_dim={self.attention_head_dim} is "
                f"{self.rotary_dim}, which is odd, but rotary embeddings turn pairs; use model.rotary_fraction=1"
            )
        for key, value in _FORMS.get(self.family, {}).items():
            if getattr(self, key) != value:
                fixed = str(value).lower() if isinstance(value, bool) else value
                yield (
                    f"model.{key}={str(getattr(self, key)).lower()} with model.family={self.family}, whose checkpoints "
                    f"cannot express it; use model.{key}={fixed}, or model.family=glm4_moe"
                )


class GPT2Section(ModelSection):
    """Architecture of GPT-2."""

    names: ClassVar[Mapping[str, str]] = {
        "dim": "n_embd",
        "layers": "n_layer",
        "heads": "n_head",
        "hidden_dim": "n_inner",
        "tie_embeddings": "tie_word_embeddings",
        "norm_eps": "layer_norm_epsilon",
        "max_sequence_length": "n_positions",
        "vocab_size": "vocab_size",
    }
    opens_as = ("gpt2", "GPT2LMHeadModel")

    dim: Size
    """Width of the residual stream."""
    layers: Annotated[Count, Field(ge=1, le=1000)]
    """Number of transformer blocks."""
    heads: Size
    """Number of heads per block."""
    hidden_dim: DerivedSize
    """Inner width of the feed-forward; 4 times ``dim`` when null."""
    tie_embeddings: bool = True
    """Use the embedding table as the output projection too."""
    norm_eps: Number = Field(default=1e-5, gt=0)
    """Added to the variance inside LayerNorm."""
    initializer_std: Number = Field(default=0.02, gt=0)
    """Standard deviation of the initial weights; projections into the residual stream get this / sqrt(2 x layers)."""
    attention: Literal["auto", "sdpa", "flex", "varlen"] = "auto"
    """Attention kernel: ``auto`` chooses by device and batch; ``sdpa`` is torch's, with a mask for documents and
    windows; ``flex`` and ``varlen`` need no mask, on a GPU."""
    max_sequence_length: Annotated[Count, Field(ge=1, le=10**7)] = 1024
    """Rows of the table of positions: the longest sequence; ``data.sequence_length`` must not exceed it."""

    def divisible(self) -> Mapping[str, Mapping[str, int]]:
        return {"tensor": {"model.heads": self.heads, "model.hidden_dim": self.hidden_dim}}

    @classmethod
    def keys_from(cls, found: Mapping[str, Any]) -> dict[str, Any]:
        found = completed(found, cls)
        refuse_unless(
            found, activation_function="gelu_new", scale_attn_by_inverse_layer_idx=False, add_cross_attention=False
        )
        if not found["scale_attn_weights"]:
            raise ValueError("has scale_attn_weights False; only True can be taken over")
        inner = 4 * found["n_embd"] if found["n_inner"] is None else found["n_inner"]
        return _named(cls.names, {**found, "n_inner": inner})

    @model_validator(mode="before")
    @classmethod
    def _derived(cls, values: Any) -> Any:
        dim = parse_count(values.get("dim")) if isinstance(values, dict) else None
        if isinstance(dim, int) and values.get("hidden_dim", 0) is None:
            return {**values, "hidden_dim": 4 * dim}
        return values

    def _mistakes(self) -> Iterator[str]:
        if self.dim % self.heads:
            nearest = _nearest("model.heads", nearest_divisors(self.dim, self.heads))
            yield f"model.heads={self.heads} does not divide model.dim={self.dim}; {nearest}"


class MistralSection(LlamaSection):
    """Architecture of Mistral: Llama with sliding-window attention."""

    names: ClassVar[Mapping[str, str]] = {**LlamaSection.names, "sliding_window": "sliding_window"}
    opens_as = ("mistral", "MistralForCausalLM")

    sliding_window: Size | None = None
    """Number of last tokens, including itself, that a token attends to; null: all earlier tokens."""

    def window(self, layer: int) -> int | None:
        del layer
        return self.sliding_window


class Qwen2Section(LlamaSection):
    """Architecture of Qwen 2 and 2.5: Llama with biases on queries, keys and values."""

    opens_as = ("qwen2", "Qwen2ForCausalLM")
    plain: ClassVar[Mapping[str, Any]] = {**LlamaSection.plain, "use_sliding_window": False}
    has_bias = True


class Qwen3Section(LlamaSection):
    """Architecture of Qwen 3: Llama with normalized queries and keys."""

    opens_as = ("qwen3", "Qwen3ForCausalLM")
    plain: ClassVar[Mapping[str, Any]] = {**LlamaSection.plain, "use_sliding_window": False}
    normalizes_heads = True


class Olmo2Section(LlamaSection):
    """Architecture of OLMo 2: Llama with norms after attention and feed-forward, and normalized queries and keys."""

    opens_as = ("olmo2", "Olmo2ForCausalLM")
    normalizes_heads = True


class Phi3Section(MistralSection):
    """Architecture of Phi-3 and Phi-4: Llama, optionally with a sliding window."""

    opens_as = ("phi3", "Phi3ForCausalLM")

    @classmethod
    def keys_from(cls, found: Mapping[str, Any]) -> dict[str, Any]:
        for each in (found, _rope(found)):
            refuse_unless(each, partial_rotary_factor=1.0)
        keys = super().keys_from(found)
        if keys["rope_scaling"]:
            raise ValueError("has rope_type llama3; only default can be taken over")
        return keys

    def _mistakes(self) -> Iterator[str]:
        yield from super()._mistakes()
        if self.rope_scaling is not None:
            yield (
                f"model.rope_scaling is set with model.family={self.family}, which transformers does not compute; use "
                "model.rope_scaling=null, or model.family=llama"
            )


class GemmaSection(MistralSection):
    """Architecture of Gemma 2 and the text model of Gemma 3."""

    opens_as = ("gemma2", "Gemma2ForCausalLM")
    plain: ClassVar[Mapping[str, Any]] = {
        **LlamaSection.plain,
        **dict.fromkeys(("hidden_act", "hidden_activation"), "gelu_pytorch_tanh"),
    }

    global_every: Size = 2
    """Every n-th block attends to all tokens, the others to ``sliding_window``."""
    local_rope_theta: Number | None = Field(default=None, gt=0)
    """Base of the rotary frequencies in blocks with a window, for Gemma 3; ``rope_theta`` when null."""
    query_pre_attention_scalar: Size | None = None
    """Scores are divided by its square root; ``head_dim`` when null."""
    score_soft_cap: Number | None = Field(default=None, gt=0)
    """A score x becomes c tanh(x / c), for Gemma 2; null: no cap."""
    logit_soft_cap: Number | None = Field(default=None, gt=0)
    """A logit x becomes c tanh(x / c); null: no cap."""

    def window(self, layer: int) -> int | None:
        return None if (layer + 1) % self.global_every == 0 else self.sliding_window

    def rope_base(self, layer: int) -> float:
        return self.rope_theta if self.window(layer) is None else self.local_rope_theta or self.rope_theta

    def _mistakes(self) -> Iterator[str]:
        yield from super()._mistakes()
        other = {"gemma2": ("local_rope_theta", "gemma3_text"), "gemma3_text": ("score_soft_cap", "gemma2")}
        key, family = other.get(self.family, ("rope_scaling", "llama"))
        for each, instead in ((key, family), ("rope_scaling", "llama")):
            if getattr(self, each) is not None:
                yield (
                    f"model.{each} is set with model.family={self.family}, which does not compute it; use "
                    f"model.{each}=null, or model.family={instead}"
                )

    @classmethod
    def keys_from(cls, found: Mapping[str, Any]) -> dict[str, Any]:
        found = completed(found, cls)
        refuse_unless(found, use_bidirectional_attention=False)
        is_third, local = found["model_type"] == "gemma3_text", None
        if is_third:
            refuse_unless(found, attn_logit_softcapping=None)
            rope = found.get("rope_parameters") or {}
            both = {kind: rope.get(f"{kind}_attention") or {} for kind in ("full", "sliding")}
            refuse_unless(both["sliding"], rope_type="default")
            local = float(both["sliding"].get("rope_theta") or found["rope_local_base_freq"])
            found["rope_parameters"] = both["full"] | (found.get("rope_scaling") or {})
            found["rope_scaling"] = None
        keys = super().keys_from({**found, "hidden_act": cls.plain["hidden_act"]})
        if keys["rope_scaling"]:
            raise ValueError("has rope_type llama3; only default can be taken over")
        return keys | {
            "global_every": _global_every(found, keys["layers"], found["sliding_window_pattern"] if is_third else 2),
            "local_rope_theta": local,
            "query_pre_attention_scalar": found["query_pre_attn_scalar"],
            "score_soft_cap": None if is_third else found["attn_logit_softcapping"],
            "logit_soft_cap": found["final_logit_softcapping"],
        }


DIVIDED_MODELS = ("gpt_neox", "granite", "phi", "qwen3")
"""Kinds of models that tensor ranks divide with ``model=hf``: those that tests compare with one process. Code between
the layers may need the whole width, and transformers' plan does not say so."""


class HuggingFaceSection(ModelSection):
    """Any decoder-only language model of transformers."""

    architecture: SkipJsonSchema[dict[str, Any]] = Field(default_factory=dict)
    """Content of ``config.json``, from the model in ``path``: no key of its own."""

    def _mistakes(self) -> Iterator[str]:
        if not self.architecture:
            yield "model=hf needs a Hugging Face model: model.path=FOLDER_OR_NAME"
        longest = _longest(self.architecture)
        if longest and self.max_sequence_length > longest:
            yield (
                f"model.max_sequence_length={self.max_sequence_length} exceeds the {longest} positions that "
                f"config.json of model.path={self.path} names; leave it out, with "
                f"data.sequence_length={longest} or less, or change that file"
            )

    def divisible(self) -> Mapping[str, Mapping[str, int]]:
        named = ("num_attention_heads", "num_key_value_heads")
        sizes = {f"config.json's {key}": self.architecture.get(key) for key in named}
        return {"tensor": {key: size for key, size in sizes.items() if isinstance(size, int)}}

    @classmethod
    def keys_from(cls, found: Mapping[str, Any]) -> dict[str, Any]:
        if found.get("is_encoder_decoder"):
            raise ValueError("is of an encoder-decoder model; only decoder-only language models are trained")
        if found.get("quantization_config"):
            raise ValueError("has a quantization_config; only plain float weights can be taken over")
        if "vocab_size" not in found:
            part = "; its text model alone can be one: save that to a folder of its own" * ("text_config" in found)
            raise ValueError(
                f"is of model_type {found.get('model_type')} and names no vocab_size, so it is not a language model of "
                f"text{part}; use the folder of a model that transformers' AutoModelForCausalLM opens"
            )
        longest = _longest(found)
        own = {"architecture": dict(found), "vocab_size": found["vocab_size"]}
        return own | ({"max_sequence_length": longest} if longest else {})


def _longest(found: Mapping[str, Any]) -> int | None:
    """Return the longest sequence that the model of a ``config.json`` takes; None: it has no limit."""
    named = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length")
    return next((int(found[key]) for key in named if found.get(key)), None)


def _global_every(found: Mapping[str, Any], layers: int, every: int) -> int:
    """Return n if each n-th layer attends to all tokens: ``every``, unless ``layer_types`` says otherwise."""
    kinds = found.get("layer_types")
    if kinds is None:
        return int(every)
    first = kinds.index("full_attention") + 1 if "full_attention" in kinds else max(every, layers + 1)
    if len(kinds) != layers:
        raise ValueError(f"has {len(kinds)} layer_types and num_hidden_layers {layers}, which must be equal")
    expected = ["sliding_attention" if (layer + 1) % first else "full_attention" for layer in range(layers)]
    if kinds != expected:
        raise ValueError("has layer_types of which not each n-th is full_attention; only that can be taken over")
    return int(first)
