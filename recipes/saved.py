"""Configuration for opening a run's saved model, and the checkpoints that a run resumes."""

import os
from pathlib import Path
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError

from serried.configs.errors import UserError
from serried.configs.hugging_face.adapter_folder import base_of_adapters, described_adapters
from serried.configs.plain_data import expanded, read_if_there, read_json
from serried.configs.schema.data import TextRunConfig
from serried.configs.schema.sections import ParallelSection, RunConfig, Size
from serried.records.tensors import TensorFolder

_Config = TypeVar("_Config", bound=RunConfig)
_SHOWN_CHARACTERS = 60


def keys_of_adapters(folder: Path) -> dict[str, dict[str, Any]]:
    """Return the config keys, by section, for a model with the PEFT adapters in ``folder``. Raises ``UserError`` if
    they cannot be read, or are of a kind that is not supported here."""
    base = base_of_adapters(folder)
    return {"model": {"path": base}, "adapter": described_adapters(folder, TensorFolder(folder, "adapter_model").specs)}


def embedded_tokens(folder: Path) -> int:
    """Return the number of token embeddings of the saved model in ``folder``. Raises ``UserError`` if its
    ``config.json`` does not contain it."""
    file = folder / "config.json"
    try:
        return TypeAdapter[int](Size).validate_python(read_json(file)["vocab_size"], strict=True)
    except ValidationError as error:
        (first, *_) = error.errors()
        shown = f"{first['input']!r}"[:_SHOWN_CHARACTERS]
        raise UserError(f"{file}: vocab_size {shown}: {first['msg']}; use another checkpoint") from None
    except (OSError, ValueError, KeyError) as error:
        raise UserError(f"{file} cannot be read: {error}; use another checkpoint") from None


def as_saved(config: _Config, checkpoint: Path, *, world_size: int, is_resharded: bool, is_other_data: bool) -> _Config:
    """Return ``config`` of a run, changed to open the model in ``checkpoint``: with its vocabulary, if it has one.

    Args:
        is_resharded: use the processes of this start.
        is_other_data: use other data than the run's, tokenized with the model's tokenizer, since the run's tokenizer
            may be learned from its data.

    Raises ``UserError`` if the checkpoint lacks its config.
    """
    if is_resharded:
        config = config.model_copy(update={"parallel": _for_processes(config.parallel, world_size)})
    if not isinstance(config, TextRunConfig):
        return config
    rows = config.model.vocab_size
    if (checkpoint / "config.json").exists() or not (checkpoint / "adapter_config.json").exists():
        rows = embedded_tokens(checkpoint)
    model, data = config.model.model_copy(update={"vocab_size": rows}), config.data
    if is_other_data:
        update: dict[str, Any] = {"validation_fraction": 0.0, "validation": {}}
        has_tokenizer = (checkpoint / "tokenizer.json").exists() or not (checkpoint / "adapter_config.json").exists()
        if data.tokenizer != "bytes" and not getattr(data, "is_prepared", False) and has_tokenizer:
            update["tokenizer"] = str(checkpoint.absolute())
        if (template := checkpoint / "chat_template.jinja").exists():
            text = template.read_text("utf-8")  # read now: the checkpoint may be deleted while its model generates text
            update["chat_template"] = text if "{" in text else str(template)
        data = data.model_copy(update=update)
    return config.model_copy(update={"model": model, "data": data})


def resumed_checkpoints(run: RunConfig) -> list[Path]:
    """Return the checkpoints of the run that ``checkpoint.resume`` continues, newest first; empty if it starts with
    weights only. Meant for files that a task reads in addition to weights: the trainer chooses the checkpoint and
    checks it for damage."""
    resume, own = run.checkpoint.resume, _checkpoints(run.run.dir / "checkpoints")
    if resume == "never":
        return []
    given = expanded(resume).absolute()
    if resume in ("auto", "must") or (
        own and read_if_there(own[0] / "state.json").get("origin") == os.path.normpath(given)
    ):
        return own
    is_checkpoint = (given / "MANIFEST.json").is_file()
    return [given] if is_checkpoint else _checkpoints(given / "checkpoints") or _checkpoints(given)


def _checkpoints(folder: Path) -> list[Path]:
    found = {int(path.name[5:]): path for path in folder.glob("step-*") if path.name[5:].isdigit()}
    return [found[step] for step in sorted(found, reverse=True)]


def _for_processes(before: ParallelSection, world_size: int) -> ParallelSection:
    strategy = "single" if world_size == 1 else "ddp" if before.strategy in ("single", "ddp") else "fsdp"
    degrees = {"replicate": -1 if strategy == "ddp" else 1, "shard": -1 if strategy == "fsdp" else 1}
    return ParallelSection.model_validate({"strategy": strategy, **degrees})
