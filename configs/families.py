"""Sections of the families that are close to Llama, and how the ``config.json`` of a checkpoint maps to them.

What a family computes differently is in ``recipes/models/`` under its name.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import Field
from pydantic.json_schema import SkipJsonSchema

from serried.configs.schema import LlamaSection, ModelSection, Number, Size, refuse_unless


class MistralSection(LlamaSection):
    """Architecture of Mistral: Llama with sliding-window attention."""

    sliding_window: Size | None = None
    """Tokens, itself included, that a token attends to; null: all before it."""

    def window(self, layer: int) -> int | None:
        del layer
        return self.sliding_window

    @classmethod
    def keys_from(cls, found: Mapping[str, Any]) -> dict[str, Any]:
        return super().keys_from(found) | {"sliding_window": found.get("sliding_window")}


class Qwen2Section(LlamaSection):
    """Architecture of Qwen 2 and 2.5: Llama with biases on queries, keys and values."""

    @classmethod
    def keys_from(cls, found: Mapping[str, Any]) -> dict[str, Any]:
        refuse_unless(found, use_sliding_window=False)
        return super().keys_from(found)


class Qwen3Section(LlamaSection):
    """Architecture of Qwen 3: Llama with normalized queries and keys."""

    @classmethod
    def keys_from(cls, found: Mapping[str, Any]) -> dict[str, Any]:
        refuse_unless(found, use_sliding_window=False)
        return super().keys_from({"head_dim": 128, **found})


class Olmo2Section(LlamaSection):
    """Architecture of OLMo 2: Llama with norms after attention and feed-forward, and normalized queries and keys."""

    @classmethod
    def keys_from(cls, found: Mapping[str, Any]) -> dict[str, Any]:
        return super().keys_from({"rms_norm_eps": 1e-5, **found})


class Phi3Section(MistralSection):
    """Architecture of Phi-3 and Phi-4: Llama, optionally with a sliding window."""

    @classmethod
    def keys_from(cls, found: Mapping[str, Any]) -> dict[str, Any]:
        for each in (found, found.get("rope_parameters") or {}):
            refuse_unless(each, partial_rotary_factor=1.0)
        return super().keys_from({"rms_norm_eps": 1e-5, **found})


class GemmaSection(MistralSection):
    """Architecture of Gemma 2 and the text model of Gemma 3."""

    global_every: Size = 2
    """Each so many-th block attends to all tokens, the others to ``sliding_window``."""
    local_rope_theta: Number | None = Field(default=None, gt=0)
    """Base of the rotary frequencies in blocks with a window, for Gemma 3; ``rope_theta`` when null."""
    query_pre_attention_scalar: Size | None = None
    """Scores are divided by its square root; ``head_dim`` when null."""
    score_soft_cap: Number | None = Field(default=None, gt=0)
    """A score x becomes c tanh(x / c), for Gemma 2; null: it stays."""
    logit_soft_cap: Number | None = Field(default=None, gt=0)
    """A logit x becomes c tanh(x / c); null: it stays."""

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
        refuse_unless(found, hidden_activation="gelu_pytorch_tanh", use_bidirectional_attention=False)
        is_third = found["model_type"] == "gemma3_text"
        if is_third:
            refuse_unless(found, attn_logit_softcapping=None)
        defaults = {"head_dim": 256, "rms_norm_eps": 1e-6, "tie_word_embeddings": True}
        rope, window = found.get("rope_parameters") or {}, found.get("sliding_window", 4096)
        both = {kind: rope.get(f"{kind}_attention") or {} for kind in ("full", "sliding")}
        if is_third:
            refuse_unless(both["sliding"], rope_type="default")
            local = both["sliding"].get("rope_theta") or found.get("rope_local_base_freq") or 10000.0
            rope = {"rope_theta": found.get("rope_theta") or 1e6} | (found.get("rope_scaling") or {}) | both["full"]
        keys = super().keys_from({**defaults, **found, "hidden_act": "silu", "rope_parameters": rope})
        if keys["rope_scaling"]:
            raise ValueError("has rope_type llama3; only default can be taken over")
        return keys | {
            "sliding_window": window,
            "global_every": _global_every(found, keys["layers"], 6 if is_third else 2),
            "local_rope_theta": float(local) if is_third else None,
            "query_pre_attention_scalar": found.get("query_pre_attn_scalar") or 256,
            "score_soft_cap": None if is_third else found.get("attn_logit_softcapping", 50.0),
            "logit_soft_cap": found.get("final_logit_softcapping", None if is_third else 30.0),
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
                f"is of model_type {found.get('model_type')} and names no vocab_size, so it is no language model of "
                f"text{part}; use the folder of a model that transformers' AutoModelForCausalLM opens"
            )
        longest = _longest(found)
        own = {"architecture": dict(found), "vocab_size": found["vocab_size"]}
        return own | ({"max_sequence_length": longest} if longest else {})


def _longest(found: Mapping[str, Any]) -> int | None:
    """Return the longest sequence that the model of a ``config.json`` takes; None: it has no limit."""
    named = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length")
    return next((int(found[key]) for key in named if found.get(key)), None)


def _global_every(found: Mapping[str, Any], layers: int, default: int) -> int:
    """Return n if each n-th layer attends to all tokens."""
    kinds = found.get("layer_types")
    every = found.get("sliding_window_pattern") or default
    if kinds is None:
        return int(every)
    first = kinds.index("full_attention") + 1 if "full_attention" in kinds else max(every, layers + 1)
    expected = ["sliding_attention" if (layer + 1) % first else "full_attention" for layer in range(layers)]
    if kinds != expected:
        raise ValueError("has layer_types of which not each n-th is full_attention; only that can be taken over")
    return int(first)
