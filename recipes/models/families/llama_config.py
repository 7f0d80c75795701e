"""Config sections of Llama and of the families that share its code: Mistral, Qwen 2 and Qwen 3."""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator

from serried.configs.divisors import nearest_divisors
from serried.configs.plain_data import is_number
from serried.configs.schema.fields import Count, DerivedSize, Number, Size, parse_count
from serried.configs.schema.models import ModelSection, completed, keys_named, refuse_unless, use_nearest
from serried.configs.schema.registry import models
from serried.recipes.models.layers.rope_config import ROPE_TYPES, Rope, RopeScaling, rope_of, scaling_from


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
    """Keys of ``config.json`` that have the same value in all models of the family."""
    has_bias: ClassVar[bool] = False
    """Whether queries, keys and values have a bias."""
    normalizes_heads: ClassVar[bool] = False
    """Whether queries and keys are normalized."""
    rope_types: ClassVar[Sequence[str]] = ROPE_TYPES
    """Types of ``rope_scaling`` that transformers computes for the family."""

    dim: Size
    """Width of the residual stream."""
    layers: Annotated[Count, Field(ge=1, le=1000)]
    """Number of transformer blocks."""
    heads: Size
    """Number of query heads per block."""
    kv_heads: DerivedSize
    """Number of key/value heads per block; fewer than ``heads`` is grouped-query attention. Null: half of
    ``heads``, or ``heads`` if that is odd."""
    head_dim: Size | None = None
    """Width of one head; ``dim / heads`` when null."""
    hidden_dim: DerivedSize
    """Inner width of the SwiGLU feed-forward; 8/3 of ``dim``, rounded up to a multiple of 128, when null."""
    tie_embeddings: bool = False
    """Use the embedding table as the output projection too."""
    norm_eps: Number = Field(default=1e-5, gt=0)
    """Term added to the mean square in RMSNorm for numerical stability."""
    rope_theta: Number = Field(default=500000.0, gt=0)
    """Base of the rotary frequencies."""
    rope_scaling: RopeScaling | None = None
    """Scaling of rotary frequencies for long contexts; null for none."""
    padding_token: Annotated[Count, Field(ge=0, le=10**7)] | None = None
    """Padding token, whose embedding lookup gets no gradient, like transformers' ``pad_token_id``. Null for none."""
    initializer_std: Number = Field(default=0.02, gt=0)
    """Standard deviation of the initial weights; divided by sqrt(2 x layers) for projections into the residual
    stream."""
    attention: Literal["auto", "sdpa", "flex", "varlen"] = "auto"
    """Attention kernel. ``auto`` chooses by device and batch; ``sdpa`` is torch's, with a mask for documents and
    windows; ``flex`` and ``varlen`` need a GPU, but no mask."""

    @property
    def attention_head_dim(self) -> int:
        """Width of one head: ``head_dim``, or its default if null."""
        return self.head_dim or self.dim // self.heads

    def divisible(self) -> Mapping[str, Mapping[str, int]]:
        sizes = {"model.heads": self.heads, "model.kv_heads": self.kv_heads, "model.hidden_dim": self.hidden_dim}
        return {"tensor": sizes}

    @classmethod
    def keys_from(cls, found: Mapping[str, Any]) -> dict[str, Any]:
        found = completed(found, cls)
        refuse_unless(found, **cls.plain)
        rope = {"rope_theta": found["rope_theta"], **rope_of(found)}
        if rope["rope_theta"] is None:
            raise ValueError("has rope_theta null; leave it out for the default of transformers, or set it")
        scaling = scaling_from(found, cls.rope_types)
        if scaling and "rotary_fraction" not in cls.model_fields:
            for settings in (found, rope):
                refuse_unless(settings, partial_rotary_factor=1.0)
        heads, padding = found["num_attention_heads"], found["pad_token_id"]
        return {
            **keys_named(cls.names, found),
            "kv_heads": heads if found["num_key_value_heads"] is None else found["num_key_value_heads"],
            "head_dim": found.get("head_dim") or found["hidden_size"] // heads,
            "rope_theta": float(rope["rope_theta"]),
            "rope_scaling": scaling,
            **(_longest(scaling) if scaling and scaling.get("rope_type") == "dynamic" else {}),
            # torch counts negative ids from the end.
            "padding_token": padding if padding is None or padding >= 0 else found["vocab_size"] + padding,
        }

    @property
    def rotary_dim(self) -> int:
        """Number of leading dims of each head that rotary embeddings rotate."""
        return self.attention_head_dim

    def window(self, layer: int) -> int | None:
        """Return the number of most recent tokens, including itself, that a token attends to in block ``layer``; None
        for all earlier ones."""
        del layer
        return None

    @property
    def needs_mask(self) -> bool:
        """Whether attention needs a mask for plain causal attention too, as kernels other than SDPA do."""
        return False

    def rope(self, layer: int) -> Rope:
        """Return the rotary frequencies in block ``layer``."""
        del layer
        return Rope(self.rope_theta, self.rope_scaling)

    @model_validator(mode="before")
    @classmethod
    def _derived(cls, values: Any) -> Any:
        """Fill in the sizes that follow from ``dim`` and ``heads``, so that a resized preset keeps its proportions."""
        if not isinstance(values, dict):
            return values
        values = {**values}
        dim = parse_count(values.get("dim"))
        heads = parse_count(values.get("heads"))
        if "hidden_dim" in values and values["hidden_dim"] is None and isinstance(dim, int):
            values["hidden_dim"] = min(max(1, -(-dim * 8 // (3 * 128)) * 128), 10**7)
        if "kv_heads" in values and values["kv_heads"] is None and isinstance(heads, int):
            values["kv_heads"] = heads // 2 if heads % 2 == 0 and heads > 0 else heads
        return values

    def _mistakes(self) -> Iterator[str]:
        if self.head_dim is None and self.dim % self.heads:
            if self.dim % 2:  # rotary embeddings rotate pairs, so no number of heads would work
                pairs = 2 * self.heads
                fix = f"use model.dim={max(pairs, (self.dim + self.heads) // pairs * pairs)}"
            else:
                fix = use_nearest("model.heads", nearest_divisors(self.dim // 2, self.heads))
            yield f"model.heads={self.heads} does not divide model.dim={self.dim}; {fix}, or set model.head_dim"
        if self.heads % self.kv_heads:
            yield (
                f"model.kv_heads={self.kv_heads} does not divide model.heads={self.heads}; "
                + use_nearest("model.kv_heads", nearest_divisors(self.heads, self.kv_heads))
            )
        width = self.attention_head_dim
        if width % 2:
            derived = "" if self.head_dim else f" (model.dim={self.dim} / model.heads={self.heads})"
            yield (
                f"model.head_dim={width}{derived} is odd, but rotary embeddings rotate pairs; use "
                f"model.head_dim={width + 1}"
            )
        scaling = self.rope_scaling
        if scaling and scaling.rope_type not in self.rope_types:
            yield (
                f"model.rope_scaling.rope_type={scaling.rope_type} with model.family={self.family}, for which "
                f"transformers computes only {', '.join(self.rope_types) or 'its own'}; use model.rope_scaling=null"
            )
        elif scaling and (mistake := scaling.pairs_mistake(self.rotary_dim // 2)):
            yield mistake


def _longest(scaling: Mapping[str, Any]) -> dict[str, int]:
    """Return ``max_sequence_length`` of a model with ``dynamic`` scaling, as a dict; empty if it is not known."""
    factor, original = scaling["factor"], scaling["original_max_sequence_length"]
    is_known = is_number(factor) and is_number(original)
    return {"max_sequence_length": math.floor(factor * original)} if is_known else {}


class MistralSection(LlamaSection):
    """Architecture of Mistral: Llama with sliding-window attention."""

    names: ClassVar[Mapping[str, str]] = {**LlamaSection.names, "sliding_window": "sliding_window"}
    opens_as = ("mistral", "MistralForCausalLM")

    sliding_window: Size | None = None
    """Number of most recent tokens, including itself, that a token attends to. Null for all earlier tokens."""

    def window(self, layer: int) -> int | None:
        del layer
        return self.sliding_window


class AlternatingSection(MistralSection):
    """Architecture with sliding-window attention in some of the blocks."""

    global_every: Size = 2
    """Every n-th block attends to all tokens, the others only to the last ``sliding_window``."""

    def window(self, layer: int) -> int | None:
        return None if (layer + 1) % self.global_every == 0 else self.sliding_window

    def described(self) -> dict[str, Any]:
        # Transformers needs a number even if no block has a window.
        return super().described() | {"sliding_window": self.sliding_window or self.max_sequence_length}


def global_every(found: Mapping[str, Any], layers: int, every: int) -> int:
    """Return n such that every n-th layer attends to all tokens: ``every``, unless ``layer_types`` is given."""
    kinds = found.get("layer_types")
    if kinds is None:
        return int(every)
    first = kinds.index("full_attention") + 1 if "full_attention" in kinds else max(every, layers + 1)
    if len(kinds) != layers:
        raise ValueError(f"has {len(kinds)} layer_types but num_hidden_layers {layers}; both must be equal")
    expected = ["sliding_attention" if (layer + 1) % first else "full_attention" for layer in range(layers)]
    if kinds != expected:
        raise ValueError(
            "has layer_types where not every n-th layer is full_attention; other patterns are not supported"
        )
    return int(first)


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


for _name, _section in {
    "llama": LlamaSection, "mistral": MistralSection, "qwen2": Qwen2Section, "qwen3": Qwen3Section,
}.items():  # fmt: skip
    models.register(_name, _section, "serried.recipes.models.families.llama:Llama")
