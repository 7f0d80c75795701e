"""Files of a model folder other than its weights: configs, tokenizer and chat template."""

import json
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from serried.configs.errors import UserError
from serried.configs.hugging_face.model_folder import CONFIG, GENERATION
from serried.configs.plain_data import NotPlainData, read_json
from serried.configs.schema.data import DataSection
from serried.recipes.data.chat.conversations import ask, chat_template, template_to_export
from serried.recipes.data.tokenizers.hugging_face_tokenizer import HuggingFaceTokenizer
from serried.recipes.data.tokenizers.tokenizer import Tokenizer, hugging_face_files

Settings = Mapping[str, dict[str, Any]]
"""Content of ``config.json`` and ``generation_config.json``; empty for a file that does not exist."""
NO_SETTINGS: Settings = {CONFIG: {}, GENERATION: {}}


def settings_in(folder: Path) -> Settings:
    """Return the settings in a model folder; empty for a file that cannot be read."""
    found: dict[str, dict[str, Any]] = {CONFIG: {}, GENERATION: {}}
    for name in found:
        with suppress(OSError, NotPlainData):
            found[name] = read_json(folder / name)
    return found


def end_ids(settings: Settings) -> list[int]:
    """Return the token ids at which transformers stops generation with these settings."""
    ends = (_as_list(settings[name].get("eos_token_id")) for name in (GENERATION, CONFIG))
    return next(filter(None, ends), [])


def special_ids(tokenizer: Tokenizer, base: Mapping[str, Any]) -> dict[str, Any]:
    """Return the special token ids for ``config.json``. They come from ``base``, the config of the base model, or from
    the tokenizer if ``base`` is empty."""
    if not base:
        return {"bos_token_id": tokenizer.start_ids[0]} if tokenizer.start_ids else {}
    ids = {key: base[key] for key in ("bos_token_id", "pad_token_id") if key in base}
    ends = base.get("eos_token_id")  # a single id, or a list
    is_known = tokenizer.end_id in _as_list(ends)
    return {"bos_token_id": None} | ids | ({"eos_token_id": ends} if is_known else {})


def write_model_files(
    folder: Path, config: Mapping[str, Any], generation: Mapping[str, Any], data: DataSection, tokenizer: Tokenizer
) -> None:
    """Write the configs, the tokenizer and the chat template. The token that ends a reply is added to
    ``eos_token_id`` in ``config`` and ``generation``."""
    settings = {CONFIG: dict(config), GENERATION: dict(generation)}
    for name, found in settings.items():
        ends, end_of_turn = _as_list(found.get("eos_token_id")), _end_of_turn(data, tokenizer)
        if end_of_turn is not None and found and end_of_turn not in ends:
            settings[name] = found | {"eos_token_id": [*(ends or [tokenizer.end_id]), end_of_turn]}
    files = {name: json.dumps(found, indent=2) + "\n" for name, found in settings.items() if found}
    for name, content in (files | hugging_face_files(tokenizer)).items():
        (folder / name).write_text(content, "utf-8")
    if data.has_template:
        (folder / "chat_template.jinja").write_text(template_to_export(data, tokenizer), "utf-8")


def _end_of_turn(data: DataSection, tokenizer: Tokenizer) -> int | None:
    """Return the id of the special token that ends a reply; None if replies end with several tokens, or with text."""
    if not data.has_template or not isinstance(tokenizer, HuggingFaceTokenizer):
        return None
    try:
        _, ids = ask(chat_template(data, tokenizer)[0], tokenizer, ["?"], data.chat_template_kwargs)
    except UserError:  # the template rejects a single user message
        return None
    return ids[0] if len(ids) == 1 and ids[0] in tokenizer.added_ids else None


def _as_list(ids: Any) -> list[int]:
    """Return ``eos_token_id`` (an id or a list) as a list; empty if it is neither."""
    several = ids if isinstance(ids, list) else [ids]
    return several if all(isinstance(token, int) for token in several) else []
