"""Config section of gpt-oss."""

from collections.abc import Mapping
from typing import Any, ClassVar

from pydantic import Field

from serried.configs.schema.fields import Number
from serried.configs.schema.models import completed
from serried.configs.schema.registry import models
from serried.recipes.models.families.llama_config import AlternatingSection, global_every
from serried.recipes.models.families.moe_config import MoESection


class GptOssSection(MoESection, AlternatingSection):
    """Architecture of gpt-oss: biased experts in all blocks, attention sinks, and sliding windows in some blocks."""

    names: ClassVar[Mapping[str, str]] = {
        **MoESection.names,
        "sliding_window": "sliding_window",
        "swiglu_limit": "swiglu_limit",
    }
    opens_as = ("gpt_oss", "GptOssForCausalLM")
    plain: ClassVar[Mapping[str, Any]] = {"hidden_act": "silu", "swiglu_alpha": 1.702}

    swiglu_limit: Number = Field(default=7.0, gt=0)
    """Bound on both inputs of an expert's SwiGLU: the gate from above, the other from both sides."""

    @property
    def needs_mask(self) -> bool:
        return True  # SDPA has no sinks

    @property
    def output_bias(self) -> bool:
        return self.attention_bias

    @classmethod
    def keys_from(cls, found: Mapping[str, Any]) -> dict[str, Any]:
        keys = super().keys_from(found)
        return keys | {"global_every": global_every(completed(found, cls), keys["layers"], 2)}


models.register("gpt_oss", GptOssSection, "serried.recipes.models.families.gpt_oss:GptOss")
