"""Config section of Phi-3 and Phi-4."""

from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import Field

from serried.configs.schema.fields import Number
from serried.configs.schema.models import completed
from serried.configs.schema.registry import models
from serried.recipes.models.families.llama_config import MistralSection
from serried.recipes.models.layers.rope_config import rope_of, type_of


class Phi3Section(MistralSection):
    """Architecture of Phi-3 and Phi-4: Llama, optionally with a sliding window."""

    opens_as = ("phi3", "Phi3ForCausalLM")
    rope_types = ("longrope",)

    rotary_fraction: Number | None = Field(default=None, gt=0, le=1)
    """Fraction of each head that rotary embeddings apply to, for Phi-4-mini; null: the full head."""

    @property
    def rotary_dim(self) -> int:
        return int(self.attention_head_dim * (self.rotary_fraction or 1))

    @classmethod
    def keys_from(cls, found: Mapping[str, Any]) -> dict[str, Any]:
        found = completed(found, cls)
        rope = dict(rope_of(found))
        if type_of(rope) in ("su", "yarn"):  # names of longrope in early checkpoints
            rope["rope_type"] = "longrope"
        fraction = rope.get("partial_rotary_factor", found["partial_rotary_factor"])
        keys = super().keys_from({**found, "rope_scaling": rope})
        return keys | {"rotary_fraction": None if fraction == 1 else fraction}

    def _mistakes(self) -> Iterator[str]:
        yield from super()._mistakes()
        if self.rotary_dim % 2:
            yield (
                f"model.rotary_fraction={self.rotary_fraction:g} of model.head_dim={self.attention_head_dim} is "
                f"{self.rotary_dim}, which is odd, but rotary embeddings rotate pairs; use model.rotary_fraction=null"
            )


models.register("phi3", Phi3Section, "serried.recipes.models.families.phi3:Phi3")
