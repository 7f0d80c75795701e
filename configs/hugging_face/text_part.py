"""Text part of a model that also reads images: its settings and the names of its tensors."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from serried.configs.plain_data import read_json

_FAMILIES = {"gemma3": "gemma3_text"}
"""``model_type`` of a model with images -> that of its text part."""
_PREFIXES = {
    "language_model.model.": "model.",
    "language_model.lm_head.": "lm_head.",
    "model.language_model.": "model.",
}
"""Beginnings of names in the whole model, as published and as named in transformers 5 -> those of the text part."""
_HEAD = "lm_head."


def text_part(found: Mapping[str, Any]) -> dict[str, Any]:
    """Return the ``config.json`` of the text part of the model with the ``config.json`` ``found``; ``found`` itself if
    the model has only text."""
    inner = found.get("text_config")
    if found.get("model_type") not in _FAMILIES or not isinstance(inner, Mapping):
        return dict(found)
    shared = {key: found[key] for key in ("tie_word_embeddings", "quantization_config") if key in found}
    return {**shared, **inner, "model_type": _FAMILIES[found["model_type"]]}


def has_other_parts(folder: Path) -> bool:
    """Return whether the model in ``folder`` has a text part and others."""
    try:
        return read_json(folder / "config.json").get("model_type") in _FAMILIES
    except (OSError, ValueError):
        return False


def name_in_text_part(name: str) -> str | None:
    """Return the name of the tensor ``name`` in a model with only text; None if it is not in the text part."""
    for prefix, instead in _PREFIXES.items():
        if name.startswith(prefix):
            return instead + name.removeprefix(prefix)
    return name if name.startswith(_HEAD) else None
