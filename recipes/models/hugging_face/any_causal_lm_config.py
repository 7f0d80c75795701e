"""Config section of ``model=hf``: any causal language model of transformers, run with transformers' own code."""

from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import Field
from pydantic.json_schema import SkipJsonSchema

from serried.configs.hugging_face.quantization import without_quantization
from serried.configs.schema.models import ModelSection
from serried.configs.schema.registry import models


class HuggingFaceSection(ModelSection):
    """Any decoder-only language model of transformers."""

    architecture: SkipJsonSchema[dict[str, Any]] = Field(default_factory=dict)
    """Content of the ``config.json`` in ``path``. It cannot be set as a key."""

    def _mistakes(self) -> Iterator[str]:
        if not self.architecture:
            yield "model=hf needs a Hugging Face model: model.path=FOLDER_OR_NAME"
        longest = _longest(self.architecture)
        if longest and self.max_sequence_length > longest:
            yield (
                f"model.max_sequence_length={self.max_sequence_length} exceeds the {longest} positions in config.json "
                f"of model.path={self.path}; remove it and use data.sequence_length={longest} or less, or change "
                "config.json"
            )

    @property
    def native(self) -> str:
        """The built-in family for this kind of model, as the beginning of an alternative; empty if there is none."""
        kind = self.architecture["model_type"]
        return f"model=auto, which reads {kind} natively, or " if kind in models.names() else ""

    def divisible(self) -> Mapping[str, Mapping[str, int]]:
        named = ("num_attention_heads", "num_key_value_heads")
        sizes = {f"config.json's {key}": self.architecture.get(key) for key in named}
        return {"tensor": {key: size for key, size in sizes.items() if isinstance(size, int)}}

    def layout_mistakes(self, degrees: Mapping[str, int], *, sequence: bool) -> Iterator[str]:
        native = self.native
        for axis, degree in degrees.items():
            if degree > 1 and axis != "tensor":
                yield (
                    f"parallel.{axis}={degree} is not supported with model=hf, which only data axes and "
                    f"parallel.tensor can shard; use {native}parallel.{axis}=1 with parallel=fsdp"
                )
        if degrees["tensor"] > 1 and sequence:
            yield (
                "parallel.sequence=true is not supported with model=hf, whose code needs the full activations on each "
                f"rank; use {native}parallel.sequence=false"
            )

    @classmethod
    def keys_from(cls, found: Mapping[str, Any]) -> dict[str, Any]:
        if found.get("is_encoder_decoder"):
            raise ValueError("describes an encoder-decoder model; only decoder-only language models are supported")
        if "vocab_size" not in found:
            part = "; its text model may be one: save it to a separate folder" if "text_config" in found else ""
            raise ValueError(
                f"has model_type {found.get('model_type')} and no vocab_size, so it is not a text language "
                f"model{part}; use the folder of a model that transformers' AutoModelForCausalLM opens"
            )
        longest = _longest(found)
        own = {"architecture": without_quantization(found), "vocab_size": found["vocab_size"]}
        return own | ({"max_sequence_length": longest} if longest else {})


def _longest(found: Mapping[str, Any]) -> int | None:
    """Return the longest sequence that the model of a ``config.json`` supports; None if there is no limit."""
    named = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length")
    return next((int(found[key]) for key in named if found.get(key)), None)


models.register("hf", HuggingFaceSection, "serried.recipes.models.hugging_face.any_causal_lm:HuggingFaceModel")
