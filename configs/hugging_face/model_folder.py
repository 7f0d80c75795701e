"""Settings taken from a Hugging Face model: ``model.path=FOLDER_OR_NAME``, or ``checkpoint.resume=FOLDER``."""

import re
from collections.abc import Collection, Mapping
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

from pydantic import TypeAdapter, ValidationError

from serried.configs.addresses import is_address, not_a_path
from serried.configs.bucket_paths import local_path
from serried.configs.bucket_urls import is_bucket_url
from serried.configs.context_extension import with_extended_context
from serried.configs.errors import UserError
from serried.configs.hugging_face.adapter_folder import ADAPTER_CONFIG, base_of_adapters
from serried.configs.hugging_face.quantization import quantization_of
from serried.configs.hugging_face.text_part import text_part
from serried.configs.hugging_face.weight_files import HEAD, has_head_of_its_own
from serried.configs.messages.invalid_values import shown
from serried.configs.plain_data import expanded, read_if_there, read_json, value_at
from serried.configs.schema.fields import Size, parse_count
from serried.configs.schema.models import READ_EARLIER
from serried.configs.schema.registry import models
from serried.configs.schema.sections import TaskSection
from serried.configs.similar_names import nearest

CONFIG = "config.json"
GENERATION = "generation_config.json"
ANY_FAMILY = "hf"
"""Family that runs any other model with transformers' own code."""
_NAMES_CODE = ("auto_map", "attn_implementation", "experts_implementation")
"""Keys of ``config.json`` that may name code to download. Keys that begin with an underscore may too."""
_NAMES_MODELS = ("architecture", "model_args", "backbone", "use_timm_backbone", "use_pretrained_backbone")
"""Keys that may name another model, which a library would download, or a file, which timm would unpickle."""
_COUNTS = {
    "(layers?|blocks|depths?|stages)$": 1000,
    "experts$": 10_000,
    "labels$": 10**6,
    "(_size|_dim|n_embd|d_model)$": 10**7,
}
"""Largest accepted value of config keys that count modules, class labels or weight rows, by pattern of the key."""
_NOT_A_MODEL = ("MANIFEST.json", "state.json", "checkpoints")
"""Files of a checkpoint or run folder, which is resumed with its full state."""
_SHOWN = 4
_SHOWN_CHARACTERS = 60
_MODEL, _TEACHER = "model.path", "task.teacher"
"""Keys that name a model."""
_ANY_OTHER = f"; model={ANY_FAMILY} trains it with transformers' own code"
_FREE = ("name", "path", "max_sequence_length")
"""Keys of ``model`` that may differ from the config of the weights."""
_TYPED = ("padding_token", "tie_embeddings", "rope_scaling")
"""Keys of ``model`` whose values the user may override: to extend the context, or because weights that do not fit are
refused when they are loaded."""


def _check_counts(found: Mapping[str, Any]) -> None:
    """Raise ``UserError`` if a size in the ``config.json`` ``found`` is far larger than in any real model.

    A library would build such a model, which takes time and memory even without values.
    """
    for name, value in found.items():
        values = value if isinstance(value, list) else [value]
        numbers = [number for number in values if isinstance(number, int | float)]
        for kind, most in _COUNTS.items():
            if re.search(kind, name) and max(numbers, default=0) > most:
                raise UserError(
                    f"the {CONFIG} of the model has {name}: {shown(value)}, more than the supported maximum of {most}; "
                    "use another model"
                )


def without_code(found: Mapping[str, Any]) -> dict[str, Any]:
    """Return the content of an untrusted ``config.json`` without keys that name code, including nested ones. Raises
    ``UserError`` if it names another model, or has an implausible size."""
    _check_counts(found)
    if named := next((key for key in _NAMES_MODELS if found.get(key)), None):
        raise UserError(
            f"the {CONFIG} of the model has {named}: {shown(found[named])}, which would make a library build or "
            "download another model, or read a file; use a model without this key (from timm: task.library=timm "
            "task.model=NAME)"
        )
    return {
        key: without_code(value) if isinstance(value, dict) else value
        for key, value in found.items()
        if key not in _NAMES_CODE and not key.startswith("_")
    }


def architecture_of(found: Mapping[str, Any]) -> str:
    """Return the first transformers class that a ``config.json`` names; empty if it names none."""
    named = found.get("architectures")
    return str(named[0]) if isinstance(named, list) and named else ""


def embedded_tokens(folder: Path) -> int:
    """Return the number of tokens in the embedding of the saved model in ``folder``. Raises ``UserError`` if its
    ``config.json`` does not have it."""
    file = folder / CONFIG
    try:
        return TypeAdapter[int](Size).validate_python(read_json(file)["vocab_size"], strict=True)
    except ValidationError as error:
        (first, *_) = error.errors()
        given = f"{first['input']!r}"[:_SHOWN_CHARACTERS]
        raise UserError(f"{file}: vocab_size {given}: {first['msg']}; use another checkpoint") from None
    except (OSError, ValueError, KeyError) as error:
        raise UserError(f"{file} cannot be read: {error}; use another checkpoint") from None


def with_model_folder(
    plain: Mapping[str, Any], given: Collection[str], preset: Mapping[str, Any] = MappingProxyType({})
) -> dict[str, Any]:
    """Return the composed config ``plain`` with the architecture and tokenizer of the model that it names, if any.

    ``given``: keys that the user set. They take precedence, or are refused if they do not fit the weights. ``preset``:
    the section ``model`` without the keys in ``given``.

    Raises ``UserError`` if the model cannot be read, or ``given`` contradicts it.
    """
    model, data = plain.get("model"), plain.get("data")
    if not isinstance(model, dict) or not isinstance(data, dict):
        return dict(plain)
    path = model.get("path") or _resumed_folder(plain)
    kept_family = ANY_FAMILY if model.get("family") == ANY_FAMILY else None
    if path is None:
        if model.get("name") in ("auto", ANY_FAMILY):
            raise UserError(f"model={model['name']} needs a Hugging Face model: model.path=FOLDER_OR_NAME")
        return {**plain, "model": with_extended_context(model, preset, given)}
    path, own = str(path), {key.split(".")[1] for key in given if key.startswith("model.")}
    found = _described(path, plain, kept_family)
    # All keys of a chosen preset are compared too.
    named = {*model} if "model" in given and model["name"] != "auto" else own
    began = _began_with(path, plain)  # possibly with the defaults of an earlier version
    free = {*_FREE, *(key for key in own if key in _TYPED or (key in began and _is_same(model[key], began[key])))}
    wrong = [key for key in found if key in named and key not in free and not _is_same(model.get(key), found[key])]
    if wrong:
        there = ", ".join(f"model.{key}={shown(found[key])}" for key in wrong[:_SHOWN])
        if len(wrong) > _SHOWN:
            there += ", ..."
        extra = " ".join(f"model.{key}={shown(model[key])}" for key in wrong if key in own) or f"model={model['name']}"
        raise UserError(f"model.path={path} has {there}, so the weights do not fit {extra}; leave {extra} out")
    # Null means the value of the model, except for keys for which null is a valid value here.
    nulls = {"padding_token", *(key for key in began if began[key] is None)} - {*_FREE}
    kept = {key: model[key] for key in own if key in model and (model[key] is not None or key in nulls)}
    named_after = {"name": Path(path).name, "path": path}
    tokenizer = {} if "data.tokenizer" in given else {"tokenizer": path}
    extended = with_extended_context(named_after | found | kept, found, given)
    return {**plain, "model": extended, "data": data | tokenizer}


@lru_cache(maxsize=1)  # a search calls this for each layout
def teacher_section(name: str) -> Any:
    """Return the section that describes the teacher ``name``, a folder or a name on the Hub. Raises ``UserError`` if it
    cannot be read, or no built-in family supports it."""
    keys = keys_of_model(name, key=_TEACHER)
    try:
        return models.get(keys["family"]).section.model_validate({"name": name, "path": name, **keys})
    except ValidationError as error:
        first = error.errors()[0]
        place = "".join(f"{part}: " for part in first["loc"])
        raise UserError(f"{_TEACHER}={name}: {place}{first['msg'].removeprefix('Value error, ')}") from None


def keys_of_teacher(name: str, *, is_read_earlier: bool = False) -> dict[str, Any]:
    """Return the keys that determine the output of the teacher ``name``, as plain data.

    ``is_read_earlier``: fill in missing keys of its ``config.json`` with the defaults of earlier versions of serried.

    Raises:
        UserError: The folder cannot be read.
    """
    section = teacher_section(name)
    keys: dict[str, Any] = section.model_dump(mode="json", exclude={*section.free, *_FREE, "padding_token"})
    if is_read_earlier:
        found = text_part(read_json(model_folder(name, CONFIG, key=_TEACHER) / CONFIG))
        earlier = type(section).keys_from({**READ_EARLIER.get(section.family, {}), **found})
        keys |= {key: value for key, value in earlier.items() if key in keys and key != "tie_embeddings"}
    return keys


def keys_of_model(name: str, family: str | None = None, key: str = _MODEL) -> dict[str, Any]:
    """Return the keys of the section ``model`` that describe the model ``name``, a folder or a name on the Hub.

    ``family``: family to use; None: the family that its ``config.json`` names. ``key``: config key that names the
    model, for messages. Raises ``UserError`` if the model cannot be read, or no family supports it.
    """
    file = model_folder(name, CONFIG, key=key) / CONFIG
    any_other = _ANY_OTHER if key == _MODEL else ""
    try:
        found = read_json(file)
        if family != ANY_FAMILY:
            found = text_part(found)
        # As in transformers 5: tied weights have equal values.
        if found.get("tie_word_embeddings", True) and has_head_of_its_own(_with_weights(name, file.parent, key)):
            found["tie_word_embeddings"] = False
        family = family or found.get("model_type")
        if family not in models.names():
            near = _nearest_family(str(family)) + any_other
            raise ValueError(f"has model_type {family}, which no model family supports; {near}")
        section: Any = models.get(family).section
        if family == ANY_FAMILY:
            without_code(found)  # raises for unsafe keys
        quantization_of(found)  # raises for a format that is not read
        try:
            return {"family": family, **section.keys_from(found)}
        except ValueError as error:
            raise ValueError(f"{error}{'' if family == ANY_FAMILY else any_other}") from None
    except OSError as error:
        of_a_run: list[Path] = []
        with suppress(OSError):  # not a valid file name
            of_a_run = sorted(Path(name).glob(f"checkpoints/step-*/{CONFIG}"))
        if of_a_run:
            raise UserError(f"{key}={name} is a run; use one of its checkpoints: {key}={of_a_run[-1].parent}") from None
        refuse_adapters(name, file.parent, key)
        raise UserError(
            f"{key}={name}: cannot read {file}: {error.strerror}; use the folder of a Hugging Face model, with "
            f"{CONFIG} and weights, or a name on the Hub, such as {key}=Qwen/Qwen3-0.6B"
        ) from None
    except (ValueError, KeyError, TypeError, AttributeError, ArithmeticError) as error:
        reason = f"lacks {error}" if isinstance(error, KeyError) else str(error).removeprefix(f"{file} ")
        raise UserError(("" if key == _MODEL else f"{key}={name}: ") + f"{file} {reason}") from None


def _with_weights(name: str, folder: Path, key: str) -> Path:
    """Return the folder of the model ``name``. For a name on the Hub or a URL whose weights include an output
    projection, download the weights, to compare it with the embedding."""
    if is_bucket_url(name):
        folder = model_folder(name, "*.json", key=key)
        index = read_if_there(folder / "model.safetensors.index.json")
        is_here = bool(index) and HEAD not in (index.get("weight_map") or {})
    else:
        is_here = path_exists(expanded(name)) or not _names_a_head(name)
    return folder if is_here else model_folder(name, "*.safetensors", "*.json", key=key)


@lru_cache
def _names_a_head(name: str) -> bool:
    """Return whether the headers of the weights of ``name`` on the Hub list an output projection.

    False if the headers cannot be read: then the files on this machine are used.
    """
    try:
        from huggingface_hub import HfApi

        return HEAD in HfApi().get_safetensors_metadata(name).weight_map
    except Exception:  # network errors, of many classes
        return False


def refuse_adapters(name: str, folder: Path, key: str = _MODEL) -> None:
    """Raise ``UserError`` if ``folder``, which the user named as a model, holds adapters instead."""
    if not path_exists(folder / ADAPTER_CONFIG):
        return
    base = base_of_adapters(folder)
    start = f", with adapter=lora checkpoint.resume={name} to start from these adapters" if key == _MODEL else ""
    raise UserError(
        f"{key}={name} contains adapters ({ADAPTER_CONFIG}), not a model; use their base model, {key}={base}"
        f"{start}; or merge them with PEFT, merge_and_unload().save_pretrained(FOLDER), and use {key}=FOLDER"
    )


def family_of_any(name: str) -> str | None:
    """Return ``ANY_FAMILY`` if no family here supports the ``model_type`` of the model ``name``; else None."""
    try:
        kind = text_part(read_json(model_folder(name, CONFIG) / CONFIG)).get("model_type")
    except (OSError, ValueError):
        return None  # keys_of_model reports it
    return None if kind in models.names() else ANY_FAMILY


def _nearest_family(model_type: str) -> str:
    names = [name for name in models.names() if name != ANY_FAMILY]
    near = [name for name in names if name.startswith(model_type)] or nearest(model_type, names)
    return (f"the nearest is {near[0]}; " if near else "") + f"supported: {', '.join(names)}"


def model_folder(name: str, *patterns: str, key: str = _MODEL) -> Path:
    """Return the folder ``name``. If it is a name on the Hub or a URL, download the files that match ``patterns``.
    Raises ``UserError`` if the folder neither exists nor can be downloaded."""
    if is_bucket_url(name):
        return Path(local_path(name, key, *patterns))
    if is_address(name):
        raise UserError(not_a_path(key, name))
    folder = expanded(name)
    if path_exists(folder) or name.count("/") != 1 or name.startswith(("/", ".", "~")):
        return folder
    try:
        from huggingface_hub import snapshot_download
        from huggingface_hub.utils import disable_progress_bars

        disable_progress_bars()
        return Path(snapshot_download(name, allow_patterns=list(patterns)))
    except (ImportError, OSError, ValueError) as error:  # errors of the Hub are OSError and ValueError
        raise UserError(
            f"{key}={name} is not a local folder, and cannot be downloaded ({type(error).__name__}); on a machine with "
            f"access to the Hugging Face Hub, run: hf download {name} --local-dir FOLDER, then use {key}=FOLDER"
        ) from None


def path_exists(path: Path) -> bool:
    """Return whether ``path`` exists; False if its name is too long for a file."""
    with suppress(OSError):
        return path.exists()
    return False


def _resumed_folder(plain: Mapping[str, Any]) -> str | None:
    """Return the model folder whose weights ``checkpoint.resume`` starts from; None if it resumes a run."""
    path = expanded(str((plain.get("checkpoint") or {}).get("resume")))
    is_model = path_exists(path / CONFIG) and not any((path / name).exists() for name in _NOT_A_MODEL)
    return str(path) if is_model or _recorded(str(path), plain) else _checkpoint_for_weights(path, plain)


def adapters_alone(given: Any) -> str:
    """Return the error message for ``checkpoint.resume`` with a run of adapters, if only its weights are to be used."""
    return (
        f"checkpoint.resume={given} is a run of adapters, not of a whole model; use adapter.path={given} to continue "
        "them, and adapter.merge=true to merge them first"
    )


def _checkpoint_for_weights(path: Path, plain: Mapping[str, Any]) -> str | None:
    """Return the checkpoint in the run or checkpoint ``path`` if only its weights are read, as for another task."""
    if value_at("checkpoint.resume", plain) in ("auto", "must", "never"):
        return None
    began = read_if_there(Path(str(value_at("run.dir", plain))) / "config.yaml")
    model = value_at("model.path", began)
    if value_at("checkpoint.resume", began) == value_at("checkpoint.resume", plain) and isinstance(model, str):
        return model  # the run may have newer checkpoints since
    found: list[Path] = []
    with suppress(OSError):  # not a valid file name
        found = [path, *sorted([*path.glob("checkpoints/step-*"), *path.glob("step-*")], reverse=True)]
    for folder in found:
        if path_exists(folder / "state.json") and path_exists(folder / CONFIG):
            of_task = value_at("config.task.name", read_if_there(folder / "state.json"))
            here = value_at("task.name", plain) or TaskSection.model_fields["name"].default
            is_asked = str(value_at("checkpoint.weights_only", plain)).lower() == "true"
            if not is_asked and of_task in (None, here):
                return None
            if path_exists(folder / ADAPTER_CONFIG):
                raise UserError(adapters_alone(value_at("checkpoint.resume", plain)))
            return str(folder)
    return None


def _described(path: str, plain: Mapping[str, Any], family: str | None) -> dict[str, Any]:
    """Return the keys of the model in ``path``. If it no longer exists, use the record of the run that started from
    it."""
    recorded = {} if path_exists(Path(path)) else _recorded(path, plain)
    return {key: recorded[key] for key in recorded if key not in ("name", "path")} or keys_of_model(path, family)


def _recorded(path: str, plain: Mapping[str, Any]) -> dict[str, Any]:
    """Return the section ``model`` of the run in the run folder if it started from the model ``path``; else empty."""
    model = value_at("model", read_if_there(Path(str(value_at("run.dir", plain))) / "config.yaml"))
    return model if value_at("path", model) == path else {}


def _began_with(path: str, plain: Mapping[str, Any]) -> dict[str, Any]:
    """Return the section ``model`` of the resumed run if it started from the model ``path``; else see ``_recorded``."""
    resumed = expanded(str(value_at("checkpoint.resume", plain)))
    for run in (resumed, resumed.parent.parent):
        model = value_at("model", read_if_there(run / "config.yaml"))
        if value_at("path", model) == path:
            return dict(model)
    return _recorded(path, plain)


def _is_same(given: Any, found: Any) -> bool:
    given = given if isinstance(given, bool) else parse_count(given)
    if isinstance(given, str) and not isinstance(found, str | bool):
        try:
            given = float(given)
        except ValueError:
            return False
    return given is None or given == found
