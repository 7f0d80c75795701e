"""Read adapter folders in PEFT's format, from any source. A folder with an unsupported key is refused."""

import math
import re
from collections.abc import Collection, Iterable, Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError

from serried.configs.errors import UserError
from serried.configs.hugging_face.expert_names import layers_of
from serried.configs.messages.invalid_values import shown
from serried.configs.plain_data import read_json
from serried.configs.schema.sections import AdapterSection

ADAPTER_CONFIG = "adapter_config.json"
"""PEFT's file with the settings of adapters. Only folders of adapters have it."""
PREFIX = "base_model.model."
"""Prefix that PEFT writes before the name of a module of the base model."""
_A, *_OTHERS = ENDINGS = (".lora_A.weight", ".lora_B.weight", ".lora_magnitude_vector")
"""Suffixes of the tensor names of an adapter."""
ROWS_END = ".token_adapter.trainable_tokens_delta"
"""Suffix of the tensor with trained rows of an embedding or a head."""
_MERGE = "merge the adapters with PEFT's merge_and_unload()"
_FREE = {
    "base_model_name_or_path", "task_type", "auto_mapping", "peft_version", "inference_mode",  # origin of the adapters
    "lora_dropout",  # only for training
    "target_modules", "exclude_modules", "layers_to_transform", "layers_pattern",  # tensor names give the modules
    "fan_in_fan_out", "megatron_core", "qalora_group_size",  # no effect without other keys
}  # fmt: skip
"""Keys of PEFT 0.21 that may have any value."""
_TAKEN = {
    "peft_type": ("LORA",),
    "bias": ("none",),
    "revision": (None, "main"),
    "init_lora_weights": (True, False, "gaussian", "orthogonal"),  # others change the weights of the base model
    "use_dora": (False, True),
    "use_rslora": (False, True),
    "ensure_weight_tying": (False, True),
}
"""Supported values of keys, computed as in PEFT. All other keys must be unset, empty or false."""
_NAMES = ("modules_to_save", "target_parameters")
"""Keys whose values are lists of any names."""
_NUMBERS = {"r": "rank", "lora_alpha": "alpha"}
_PATTERNS = {"rank_pattern": "rank", "alpha_pattern": "alpha"}
_REPEATED = r"\)[*+?{]|([*+?{].*){4}"
"""Pattern of regular expressions that repeat a group or have many repetitions. They may take exponential time."""
_Value = TypeVar("_Value")


def described_adapters(folder: Path, tensors: Collection[str]) -> dict[str, Any]:
    """Return the values of the section ``adapter`` that describe the adapters in ``folder``.

    ``tensors``: names of the tensors in the folder. Raises ``UserError`` if the folder cannot be read, or if PEFT would
    compute different results with it.
    """
    file = folder / ADAPTER_CONFIG
    found = adapter_config(folder)
    for key, value in found.items():
        if key in _FREE or key in _NUMBERS or key in _PATTERNS:
            continue
        taken = _TAKEN.get(key, (value,) if not value else ())
        if key == "trainable_token_indices":
            continue
        if key in _NAMES and isinstance(value, list) and all(isinstance(name, str) for name in value):
            continue
        if not any(value is known or (value == known and isinstance(value, str)) for known in taken):
            instead = f", only {' or '.join(map(shown, _TAKEN[key]))}" if key in _TAKEN else ""
            raise UserError(f"{file} has {key} {shown(value)}; this value is not supported{instead}; {_MERGE}")
    rows = [name for name in tensors if name.endswith(ROWS_END)]
    tokens, tensors = _trained_tokens(file, found, rows), [name for name in tensors if name not in rows]
    listed, is_tied = tuple(found.get("modules_to_save") or ()), bool(found.get("ensure_weight_tying"))
    saved = {name: saved_module(name, listed) for name in tensors if not name.endswith(ENDINGS)}
    for name in tensors:
        if not name.startswith(PREFIX) or (saved.get(name) == "" and not is_tied):
            raise UserError(
                f"{folder} contains the tensor {name}, but only LoRA and DoRA adapters of linear layers are supported; "
                f"{_MERGE}"
            )
    names = adapted_layers(found, tensors)
    keys: dict[str, Any] = {
        "method": "dora" if found.get("use_dora") else "lora",
        "scale": "rslora" if found.get("use_rslora") else "standard",
        "modules": [*dict.fromkeys(names.values())],
    }
    if whole := {*filter(None, saved.values())}:  # a tied weight is stored a second time, without being listed
        keys["modules_to_save"] = sorted(whole)
    if tokens:
        keys["trainable_token_indices"] = tokens
    keys |= {ours: _number(file, key, ours, found.get(key)) for key, ours in _NUMBERS.items()}
    return keys | {key: named for key in _PATTERNS if (named := _by_layer(file, found, key, keys["modules"]))}


def adapted_layers(config: Mapping[str, Any], tensors: Iterable[str]) -> dict[str, str]:
    """Return the layers that have adapters, by the names of the adapters in ``tensors`` without prefix and ending.

    The two differ for experts; see ``expert_names``. ``config``: content of ``adapter_config.json``.
    """
    names = [name.removeprefix(PREFIX).removesuffix(_A) for name in tensors if name.endswith(_A)]
    return layers_of(names, config.get("target_parameters") or ())


def layer_value(patterns: Mapping[str, _Value], names: Collection[str], otherwise: _Value) -> _Value:
    """Return the value of the first of ``patterns`` that matches one of the ``names`` of a layer."""
    return next(
        (value for key, value in patterns.items() if any(matches_layer(name, key) for name in names)), otherwise
    )


def matches_layer(name: str, pattern: str) -> bool:
    """Return whether ``pattern`` equals ``name``, its last parts (as in PEFT), or matches either as a glob."""
    return fnmatchcase(name, pattern) or fnmatchcase(name, f"*.{pattern}")


def scales_in(folder: Path, modules: Collection[str]) -> dict[str, float]:
    """Return the factor of the product B A for each of the ``modules`` that has adapters in ``folder``.

    Raises ``UserError`` if ``adapter_config.json`` cannot be read.
    """
    file, found = folder / ADAPTER_CONFIG, adapter_config(folder)
    ranks, alphas = (_by_layer(file, found, key, modules) for key in _PATTERNS)
    rank, alpha = (_number(file, key, ours, found.get(key)) for key, ours in _NUMBERS.items())
    scale = "rslora" if found.get("use_rslora") else "standard"
    return {
        name: scale_of(layer_value(ranks, [name], rank), layer_value(alphas, [name], alpha), scale) for name in modules
    }


def scale_of(rank: int, alpha: float, scale: str) -> float:
    """Return the factor of the product B A. ``scale``: value of ``adapter.scale``."""
    return alpha / (math.sqrt(rank) if scale == "rslora" else rank)


def _trained_tokens(file: Path, found: Mapping[str, Any], rows: Collection[str]) -> tuple[int, ...]:
    """Return the token ids in ``trainable_token_indices``, which is a list, or the same list for several modules.

    ``rows``: names of the tensors with their rows.
    """
    value = found.get("trainable_token_indices") or []
    lists = [*value.values()] if isinstance(value, dict) else [value]
    tokens = lists[0] if lists else []
    is_list = isinstance(tokens, list) and all(type(token) is int and token >= 0 for token in tokens)
    if not is_list or any(other != tokens for other in lists) or bool(tokens) != bool(rows):
        raise UserError(f"{file} has trainable_token_indices {shown(value)}; this value is not supported; {_MERGE}")
    return tuple(tokens)


def saved_module(tensor: str, listed: tuple[str, ...]) -> str:
    """Return the name of the module that is saved in full and contains ``tensor``; empty if none does.

    ``listed``: value of ``modules_to_save``.
    """
    parts = tensor.removeprefix(PREFIX).split(".")
    names = (".".join(parts[:count]) for count in range(1, len(parts)))
    return next((name for name in names if name.endswith(listed)), "")


def base_of_adapters(folder: Path) -> str:
    """Return the folder or Hub name of the base model of the adapters in ``folder``. Raises ``UserError`` if it is not
    recorded there."""
    base = adapter_config(folder).get("base_model_name_or_path")
    if not isinstance(base, str) or not base:
        raise UserError(f"{folder / ADAPTER_CONFIG} does not name the base model; add base_model_name_or_path to it")
    return base


def adapter_config(folder: Path) -> dict[str, Any]:
    """Return the content of ``adapter_config.json``. Raises ``UserError`` if it cannot be read."""
    file = folder / ADAPTER_CONFIG
    try:
        return read_json(file)
    except OSError as error:
        raise UserError(f"{file} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise UserError(f"{file} cannot be used: {str(error).removeprefix(f'{file} ')}") from None


def _by_layer(file: Path, found: Mapping[str, Any], key: str, modules: Iterable[str]) -> dict[str, Any]:
    """Return ``rank_pattern`` or ``alpha_pattern`` without keys that match no module.

    Keys that are regular expressions are replaced with the names of the modules that they match.
    """
    given = found.get(key) or {}
    if not isinstance(given, dict):
        raise UserError(f"{file} has {key} {shown(given)}: must be a mapping of names to numbers")
    named: dict[str, Any] = {}
    for pattern, value in given.items():
        number = _number(file, f"{key}.{pattern}", _PATTERNS[key], value)
        try:
            if re.search(_REPEATED, pattern):
                raise re.error("too many or nested repetitions")
            expression = re.compile(rf"(.*\.)?({pattern})$")
        except re.error as error:
            raise UserError(f"{file} has {key} {shown(pattern)}, which cannot be read: {error}; {_MERGE}") from None
        if matching := [module for module in modules if expression.match(module)]:
            is_name = re.fullmatch(r"[\w.]+", pattern)
            named = named | dict.fromkeys([pattern] if is_name else matching, number) | named
    return named


def _number(file: Path, key: str, ours: str, value: Any) -> Any:
    try:
        if not isinstance(value, int | float):
            raise ValueError("must be a number")
        return getattr(AdapterSection.model_validate({ours: value, "method": "lora"}), ours)
    except ValidationError as error:
        why = error.errors()[0]["msg"]
    except ValueError as error:
        why = str(error)
    lacks = f"lacks {key}" if value is None else f"has {key} {shown(value)}"
    raise UserError(f"{file} {lacks}: {why[:1].lower()}{why[1:]}")
