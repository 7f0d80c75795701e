"""Config section of Phi-3 and Phi-4."""

from collections.abc import Iterator, Mapping
from typing import Any

from serried.configs.schema.models import completed, refuse_unless
from serried.configs.schema.registry import models
from serried.recipes.models.families.llama_config import MistralSection, rope_of


class Phi3Section(MistralSection):
    """Architecture of Phi-3 and Phi-4: Llama, optionally with a sliding window."""

    opens_as = ("phi3", "Phi3ForCausalLM")

    @classmethod
    def keys_from(cls, found: Mapping[str, Any]) -> dict[str, Any]:
        found = completed(found, cls)
        for settings in (found, rope_of(found)):
            refuse_unless(settings, partial_rotary_factor=1.0)
        keys = super().keys_from(found)
        if keys["rope_scaling"]:
            raise ValueError("has rope_type llama3; only default can be taken over")
        return keys

    def _mistakes(self) -> Iterator[str]:
        yield from super()._mistakes()
        if self.rope_scaling is not None:
            yield (
                f"model.rope_scaling is not supported with model.family={self.family} in transformers; use "
                "model.rope_scaling=null, or model.family=llama"
            )


models.register("phi3", Phi3Section, "serried.recipes.models.families.phi3:Phi3")
