"""Mistral (https://arxiv.org/abs/2310.06825): Llama, with attention to a sliding window.

The window is the section's ``sliding_window``, which ``Transformer`` asks for.
"""

from typing import Any

from serried.configs.families import MistralSection
from serried.recipes.models.transformer import Llama


class Mistral(Llama):
    """``model.family=mistral``."""

    section: MistralSection

    def export_config(self, end_token: int | None) -> dict[str, Any]:
        return super().export_config(end_token) | {
            "architectures": ["MistralForCausalLM"],
            "model_type": "mistral",
            "sliding_window": self.section.sliding_window,
        }
