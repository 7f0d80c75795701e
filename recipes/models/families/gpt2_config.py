"""Config section of GPT-2."""

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator

from serried.configs.divisors import nearest_divisors
from serried.configs.schema.fields import Count, DerivedSize, Number, Size, parse_count
from serried.configs.schema.models import ModelSection, completed, keys_named, refuse_unless, use_nearest
from serried.configs.schema.registry import models


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
    """Term added to the variance in LayerNorm for numerical stability."""
    initializer_std: Number = Field(default=0.02, gt=0)
    """Standard deviation of the initial weights; divided by sqrt(2 x layers) for projections into the residual
    stream."""
    attention: Literal["auto", "sdpa", "flex", "varlen"] = "auto"
    """Attention kernel. ``auto`` chooses by device and batch; ``sdpa`` is torch's, with a mask for documents and
    windows; ``flex`` and ``varlen`` need a GPU, but no mask."""
    max_sequence_length: Annotated[Count, Field(ge=1, le=10**7)] = 1024
    """Longest sequence: the number of learned positions. ``data.sequence_length`` must not exceed it."""

    def divisible(self) -> Mapping[str, Mapping[str, int]]:
        return {"tensor": {"model.heads": self.heads, "model.hidden_dim": self.hidden_dim}}

    @classmethod
    def keys_from(cls, found: Mapping[str, Any]) -> dict[str, Any]:
        found = completed(found, cls)
        refuse_unless(
            found, activation_function="gelu_new", scale_attn_by_inverse_layer_idx=False, add_cross_attention=False
        )
        if not found["scale_attn_weights"]:
            raise ValueError("has scale_attn_weights False; only True is supported")
        inner = 4 * found["n_embd"] if found["n_inner"] is None else found["n_inner"]
        return keys_named(cls.names, {**found, "n_inner": inner})

    @model_validator(mode="before")
    @classmethod
    def _derived(cls, values: Any) -> Any:
        dim = parse_count(values.get("dim")) if isinstance(values, dict) else None
        if isinstance(dim, int) and values.get("hidden_dim", 0) is None:
            return {**values, "hidden_dim": 4 * dim}
        return values

    def _mistakes(self) -> Iterator[str]:
        if self.dim % self.heads:
            nearest = use_nearest("model.heads", nearest_divisors(self.dim, self.heads))
            yield f"model.heads={self.heads} does not divide model.dim={self.dim}; {nearest}"


models.register("gpt2", GPT2Section, "serried.recipes.models.families.gpt2:GPT2")
