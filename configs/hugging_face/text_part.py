"""Text part of a model that also reads images: its settings and the names of its tensors."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from serried.configs.plain_data import read_json

_FAMILIES = {
    "gemma3": "gemma3_text",
    "gemma4": "gemma4_text",
    "qwen3_5": "qwen3_5_text",
    "qwen3_5_moe": "qwen3_5_moe_text",
}
"""Maps the ``model_type`` of a model that also reads images to the ``model_type`` of its text part."""
_EQUAL = {"kimi_k2": "deepseek_v3"}
"""Maps a ``model_type`` that transformers lacks to the one with the same architecture."""
_PREFIXES = {
    "language_model.model.": "model.",
    "language_model.lm_head.": "lm_head.",
    "model.language_model.": "model.",
}
"""Maps prefixes of tensor names in the full model, as published and as in transformers 5, to prefixes in its text
part."""
_HEAD = "lm_head."


def text_part(found: Mapping[str, Any]) -> dict[str, Any]:
    """Return the ``config.json`` of the text part of a model. ``found``: ``config.json`` of the full model, which is
    returned unchanged if the model reads only text."""
    if found.get("model_type") in _EQUAL:
        return {**found, "model_type": _EQUAL[found["model_type"]]}
    inner = found.get("text_config")
    if found.get("model_type") not in _FAMILIES or not isinstance(inner, Mapping):
        return dict(found)
    shared = {key: found[key] for key in ("tie_word_embeddings", "quantization_config") if key in found}
    return {**shared, **inner, "model_type": _FAMILIES[found["model_type"]]}


def has_other_parts(folder: Path) -> bool:
    """Return whether the model in ``folder`` has other parts besides its text part."""
    try:
        return read_json(folder / "config.json").get("model_type") in _FAMILIES
    except (OSError, ValueError):
        return False


def name_in_text_part(name: str) -> str | None:
    """Return the name that the tensor ``name`` has in the text part; None if the text part does not contain it."""
    for prefix, instead in _PREFIXES.items():
        if name.startswith(prefix):
            return instead + name.removeprefix(prefix)
    return name if name.startswith(_HEAD) else None
