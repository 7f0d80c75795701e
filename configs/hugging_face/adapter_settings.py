"""Settings taken from adapters: ``adapter.path=FOLDER_OR_NAME``, or a PEFT folder in ``checkpoint.resume``."""

import re
from collections.abc import Collection, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from serried.configs.errors import UserError
from serried.configs.hugging_face.adapter_folder import (
    ADAPTER_CONFIG,
    adapter_config,
    base_of_adapters,
    described_adapters,
    matches_layer,
)
from serried.configs.hugging_face.model_folder import model_folder, path_exists
from serried.configs.hugging_face.weight_files import tensor_names
from serried.configs.messages.invalid_values import shown
from serried.configs.plain_data import expanded, read_if_there, value_at
from serried.configs.schema.sections import AdapterSection

KEY = "adapter.path"
_STEM = "adapter_model"
_TAKEN = (
    "method", "rank", "alpha", "dropout", "scale", "modules", "modules_to_save", "trainable_token_indices",
    "rank_pattern", "alpha_pattern",
)  # fmt: skip
"""Keys of ``adapter`` that are taken from the adapters."""
_FREE = ("dropout", "modules_to_save")
"""Keys that the user may set to another value, or to other names for the same modules."""


def with_adapters(plain: Mapping[str, Any], given: Collection[str]) -> dict[str, Any]:
    """Return the composed config ``plain`` with the settings and the base model of the adapters that it names, if any.

    ``given``: keys that the user set. They are refused if the adapters contradict them.

    Raises ``UserError`` if the adapters cannot be read, or cannot be used.
    """
    section = plain.get("adapter")
    if not isinstance(section, dict):
        return dict(plain)
    key, name = _named(plain, section)
    if name is None:
        return dict(plain)
    if recorded := _recorded(plain, key, name):
        return _with_base({**plain, "adapter": section | recorded["adapter"]}, value_at("model.path", recorded))
    folder = adapters_in(name, key)
    found = _settings(folder, key, name)
    has_base = value_at("model.path", plain) is not None or "model" not in plain
    base = None if has_base else base_of_adapters(folder)
    if str(section.get("merge")).lower() == "true":
        return _with_base(dict(plain), base)
    typed = {word.split(".")[1] for word in given if word.startswith("adapter.")}
    typed |= {"method"} if "adapter" in given else set()
    checked = typed & {*_TAKEN} - {*_FREE}
    if wrong := [own for own in _TAKEN if own in checked and not _is_same(own, section.get(own), found[own])]:
        there = ", ".join(f"adapter.{own}={shown(found[own])}" for own in wrong)
        extra = " ".join(f"adapter.{own}={shown(section.get(own))}" for own in wrong)
        raise UserError(f"{key}={name} has {there}, so its weights do not fit {extra}; leave {extra} out")
    found = {own: value for own, value in found.items() if own not in typed}
    return _with_base({**plain, "adapter": section | found}, base)


def adapters_in(name: str, key: str = KEY) -> Path:
    """Return the folder of the adapters ``name``: a PEFT folder, the newest checkpoint of a run, or a download from the
    Hub. Raises ``UserError`` if it holds no adapters."""
    folder = model_folder(name, ADAPTER_CONFIG, f"{_STEM}*", key=key)
    runs = [folder / "checkpoints", folder]
    checkpoints: list[Path] = []
    with suppress(OSError):  # not a valid file name
        checkpoints = next((found for run in runs if (found := sorted(run.glob("step-*")))), [])
    for holder in (folder, *reversed(checkpoints)):
        if path_exists(holder / ADAPTER_CONFIG):
            return holder
    if not path_exists(folder):
        raise UserError(f"{key}={name} does not exist; use a PEFT folder, or a run that trained adapters")
    if checkpoints or path_exists(folder / "config.json"):
        where = checkpoints[-1] if checkpoints else folder
        raise UserError(f"{key}={name} contains a full model, not adapters; use model.path={where}, or leave {key} out")
    raise UserError(f"{key}={name} has no {ADAPTER_CONFIG}; use a folder saved by PEFT, or a run that trained adapters")


def _named(plain: Mapping[str, Any], section: Mapping[str, Any]) -> tuple[str, str | None]:
    """Return the config key that can name adapters to start from, and its value; the value is None if it names none."""
    if section.get("path") is not None:
        return KEY, str(section["path"])
    resumed = str(value_at("checkpoint.resume", plain))
    folder = expanded(resumed)
    is_peft = section.get("method") != "none" and path_exists(folder / ADAPTER_CONFIG)
    is_checkpoint = any(path_exists(folder / name) for name in ("MANIFEST.json", "state.json"))
    return "checkpoint.resume", resumed if is_peft and not is_checkpoint else None


def _recorded(plain: Mapping[str, Any], key: str, name: str) -> dict[str, Any]:
    """Return the config of the existing run if it started from the adapters ``name`` and these no longer exist; else
    an empty dict."""
    if key != KEY or path_exists(expanded(name)):
        return {}
    saved = read_if_there(Path(str(value_at("run.dir", plain))) / "config.yaml")
    return saved if value_at("adapter.path", saved) == name else {}


def _settings(folder: Path, key: str, name: str) -> dict[str, Any]:
    """Return the values of the keys ``_TAKEN`` for the adapters in ``folder``."""
    try:
        tensors = tensor_names(folder, _STEM)
    except FileNotFoundError:
        fix = f"; {_STEM}.bin is a pickle, which is never loaded: save it with PEFT as safetensors"
        fix = fix if (folder / f"{_STEM}.bin").exists() else "; copy that file too"
        raise UserError(f"{key}={name}: {folder} has no {_STEM}.safetensors{fix}") from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"{key}={name}: the headers of {folder}/{_STEM}* cannot be read: {error}; copy the files again"
        ) from None
    config = adapter_config(folder)
    found = described_adapters(folder, tensors)
    dropout = config.get("lora_dropout")
    defaults = {field: AdapterSection.model_fields[field].get_default(call_default_factory=True) for field in _TAKEN}
    found["modules"] = _short(config, found["modules"])
    return defaults | found | ({"dropout": dropout} if isinstance(dropout, int | float) else {})


def _short(config: Mapping[str, Any], modules: list[str]) -> list[str]:
    """Return the plain names in ``target_modules`` and ``target_parameters`` if they select all ``modules``; else
    ``modules``."""
    targets, parameters = config.get("target_modules"), config.get("target_parameters") or []
    limits = ("exclude_modules", "layers_to_transform", "layers_pattern")
    if not isinstance(targets, list) or any(config.get(key) for key in limits):
        return modules
    targets = targets + [name.removesuffix(".weight") for name in parameters]
    plain = [target for target in targets if isinstance(target, str) and re.fullmatch(r"[\w.]+", target)]
    used = {target for target in plain for module in modules if matches_layer(module, target)}
    is_all = all(any(matches_layer(module, target) for target in used) for module in modules)
    return sorted(used) if is_all else modules


def _is_same(key: str, given: Any, found: Any) -> bool:
    """Return whether the user's value of ``key`` equals that of the adapters."""
    try:
        checked = AdapterSection.model_validate({"method": "lora", key: given})
    except ValueError:
        return True  # the schema reports it
    ours = getattr(checked, key)
    return (sorted(ours) if key == "modules" and ours is not None else ours) == found


def _with_base(plain: dict[str, Any], base: str | None) -> dict[str, Any]:
    """Return ``plain`` with ``model.path=base``, unless that is set or there is no section ``model``."""
    model = plain.get("model")
    if base is None or not isinstance(model, dict) or model.get("path") is not None:
        return plain
    return plain | {"model": model | {"path": base}}
