"""Config section of Gemma 2 and Gemma 3."""

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

from pydantic import Field

from serried.configs.schema.fields import Number, Size
from serried.configs.schema.models import completed, refuse_unless
from serried.configs.schema.registry import models
from serried.recipes.models.families.llama_config import AlternatingSection, LlamaSection, global_every
from serried.recipes.models.layers.rope_config import Rope


class GemmaSection(AlternatingSection):
    """Architecture of Gemma 2 and the text model of Gemma 3."""

    opens_as = ("gemma2", "Gemma2ForCausalLM")
    plain: ClassVar[Mapping[str, Any]] = {
        **LlamaSection.plain,
        **dict.fromkeys(("hidden_act", "hidden_activation"), "gelu_pytorch_tanh"),
    }

    local_rope_theta: Number | None = Field(default=None, gt=0)
    """Base of the rotary frequencies in blocks with a window, for Gemma 3; ``rope_theta`` when null."""
    query_pre_attention_scalar: Size | None = None
    """Attention scores are divided by the square root of this value; ``head_dim`` when null."""
    score_soft_cap: Number | None = Field(default=None, gt=0)
    """Soft cap c of attention scores, for Gemma 2: a score x becomes ``c * tanh(x / c)``. Null for none."""
    logit_soft_cap: Number | None = Field(default=None, gt=0)
    """Soft cap c of logits: a logit x becomes ``c * tanh(x / c)``. Null for none."""

    @property
    def needs_mask(self) -> bool:
        return self.score_soft_cap is not None

    def rope(self, layer: int) -> Rope:
        if self.family == "gemma2" or self.window(layer) is None:
            return super().rope(layer)
        return Rope(self.local_rope_theta or self.rope_theta, None)

    def _mistakes(self) -> Iterator[str]:
        yield from super()._mistakes()
        other = {"gemma2": ("local_rope_theta", "gemma3_text"), "gemma3_text": ("score_soft_cap", "gemma2")}
        key, instead = other.get(self.family, ("", ""))
        if key and getattr(self, key) is not None:
            yield (
                f"model.{key} is not supported with model.family={self.family}; use model.{key}=null, or "
                f"model.family={instead}"
            )
        if self.family == "gemma3_text" and self.rope_scaling and not self.rope_scaling.truncate:
            yield (
                "model.rope_scaling.truncate=false is not supported with model.family=gemma3_text, where transformers "
                "ignores it; leave it out"
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
            rope = both["full"] | (found.get("rope_scaling") or {})
            found["rope_parameters"] = {key: rope[key] for key in rope if key != "truncate"}  # as in transformers
            found["rope_scaling"] = None
        keys = super().keys_from({**found, "hidden_act": cls.plain["hidden_act"]})
        return keys | {
            "global_every": global_every(found, keys["layers"], found["sliding_window_pattern"] if is_third else 2),
            "local_rope_theta": local,
            "query_pre_attention_scalar": found["query_pre_attn_scalar"],
            "score_soft_cap": None if is_third else found["attn_logit_softcapping"],
            "logit_soft_cap": found["final_logit_softcapping"],
        }


for _name in ("gemma2", "gemma3_text"):
    models.register(_name, GemmaSection, "serried.recipes.models.families.gemma:Gemma")
