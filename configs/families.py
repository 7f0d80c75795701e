"""Sections of the families that share most of the Llama form, and how the ``config.json`` of a checkpoint maps to them.

What a family computes differently is in ``recipes/models/`` under its name.
"""

from collections.abc import Mapping
from typing import Any

from serried.configs.schema import LlamaSection, Size, refuse_unless


class MistralSection(LlamaSection):
    """Architecture of Mistral: the Llama form, with attention to a window of tokens."""

    sliding_window: Size | None = None
    """Tokens, itself included, that a token attends to; null: all before it."""

    def window(self, layer: int) -> int | None:
        del layer
        return self.sliding_window

    @classmethod
    def keys_from(cls, found: Mapping[str, Any]) -> dict[str, Any]:
        return super().keys_from(found) | {"sliding_window": found.get("sliding_window")}


class Qwen2Section(LlamaSection):
    """Architecture of Qwen 2 and 2.5: the Llama form, with a bias of queries, keys and values."""

    @classmethod
    def keys_from(cls, found: Mapping[str, Any]) -> dict[str, Any]:
        refuse_unless(found, use_sliding_window=False)
        return super().keys_from(found)


class Qwen3Section(LlamaSection):
    """Architecture of Qwen 3: the Llama form, with normalised queries and keys."""

    @classmethod
    def keys_from(cls, found: Mapping[str, Any]) -> dict[str, Any]:
        refuse_unless(found, use_sliding_window=False)
        return super().keys_from({"head_dim": 128, **found})
