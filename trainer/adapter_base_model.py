"""Record the base model of adapters in a checkpoint, and check that it has not changed when the checkpoint is read."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from serried.configs.bucket_paths import with_urls
from serried.configs.bucket_urls import is_bucket_url
from serried.configs.errors import UserError
from serried.configs.hugging_face.adapter_folder import PREFIX, adapter_config, base_of_adapters
from serried.configs.hugging_face.adapter_settings import adapters_in
from serried.configs.hugging_face.model_folder import CONFIG, keys_of_teacher, model_folder, teacher_section
from serried.configs.messages.invalid_values import shown
from serried.configs.schema.sections import RunConfig
from serried.records.safetensors_files import TensorFolder
from serried.runtime.session import Session
from serried.trainer.checkpoint.export import write_merged
from serried.trainer.checkpoint.manifest import MANIFEST, Damaged, check_files, record_of
from serried.trainer.checkpoint.merge_tensors import Built
from serried.trainer.checkpoint.resume import Start
from serried.trainer.checkpoint.retention import ADAPTER, OPTIMIZER
from serried.trainer.checkpoint.saved_state import STATE, read_state
from serried.trainer.replica_check import digest
from serried.trainer.run_context import Context
from serried.trainer.task import RunTask

_MOVED = "if the folder was moved, use train.py ... model.path=FOLDER, or put a link in its place"


_MERGED = "base"
"""Name of the folder in a run folder with the merged model that the run starts from."""


@dataclass(frozen=True)
class Base:
    """A base model."""

    folder: Path | None
    """Folder of the base model. None if its weights come from ``build_model()``."""
    record: dict[str, Any]
    """Record of the base model in a checkpoint: ``path``, and ``files`` with sizes and checksums, or a ``digest``."""
    adapters: Path | None = None
    """Folder of the adapters that a new run starts from. None if the adapters are initialized to add zero."""


def find_base(folder: Path | None, module: nn.Module, checkpoint: Path | None, session: Session) -> Base:
    """Return the base model in ``folder``, or the initial weights of ``module`` if ``folder`` is None.

    If ``checkpoint`` is given, the base model must be the one that the checkpoint was trained on. This is a collective
    call: the ranks share the reading. Raises ``UserError`` if the base model is missing or differs.
    """
    if folder is None:
        base = Base(None, {"path": None, "digest": _digest(module)})
    else:
        base = Base(folder, {"path": with_urls(str(folder.absolute())), "files": files_of(folder, checkpoint, session)})
    if checkpoint is not None:
        _compare(base.record, checkpoint)
    return base


def initial_weights(config: RunConfig, task: RunTask, *, is_new: bool = False) -> Path | None:
    """Return the folder of the weights that a new run starts from, or None if the task builds them.

    It is the task's folder, or with ``adapter.merge`` the folder ``base`` of the run, in which the adapters are merged.
    ``is_new``: write that folder again. Called on one rank. Raises ``UserError`` if the adapters cannot be merged.
    """
    folder = task.pretrained()
    if not config.adapter.merge:
        return folder
    assert config.adapter.path is not None
    merged = config.run.dir / _MERGED
    if is_new or not merged.is_dir():
        adapters = adapters_in(config.adapter.path)
        base: TensorFolder | Built
        record: dict[str, Any] | None
        if folder is None:
            torch.manual_seed(config.trainer.seed)
            module = task.build_model().requires_grad_(False)
            base, record = Built(module, task.exported), {"path": None, "digest": _digest(module)}
            if adapter_config(adapters).get("modules_to_save"):
                record = None  # the recorded digest excludes these modules
        else:
            base = TensorFolder(folder)
            record = {"path": str(folder), "files": _checksums(folder, _weight_files(folder, None))}
            check_rows(adapters, folder, config)
        check_adapters(adapters, record)
        write_merged(adapters, base, merged)
    return merged


def check_rows(adapters: Path, base: Path, config: RunConfig) -> None:
    """Raise ``UserError`` if ``adapters`` contain an embedding or a head with more rows than in the model in the folder
    ``base``, but the run adds no tokens."""
    if getattr(getattr(config, "data", None), "added_tokens", ()):
        return
    rows = getattr(getattr(config, "model", None), "vocab_size", None)
    specs = TensorFolder(adapters, ADAPTER).specs
    saved = {name.removeprefix(PREFIX): spec.shape for name, spec in specs.items()}
    for name, spec in TensorFolder(base).named_like([*saved]).specs.items():
        there = saved.get(name, spec.shape)
        if spec.shape[:1] == (rows,) and there[1:] == spec.shape[1:] and there[0] > spec.shape[0]:
            raise UserError(
                f"the adapters in {adapters} have {there[0]} rows in {name}, but the model in {base} has {rows}; name "
                "the tokens that were added: 'data.add_tokens=[TOKEN,...]'"
            )


def files_of(folder: Path, checkpoint: Path | None, session: Session) -> dict[str, list[int]]:
    """Return the size and checksum of each weight file in ``folder``, by file name.

    This is a collective call: the ranks share the reading.
    """
    names = session.once(lambda: _weight_files(folder, checkpoint))
    found = session.gather(_checksums(folder, names[session.rank :: session.world_size]))
    return dict(sorted((name, record) for of_rank in found for name, record in of_rank.items()))


def same_files(kind: str, folder: Path, start: Start, context: Context) -> dict[str, list[int]]:
    """Return the weight files in ``folder``, after comparing them with the checkpoint's record.

    ``kind``: "teacher" or "reference", the key of the record. This is a collective call. Raises ``UserError`` if they
    differ.
    """
    files = files_of(folder, None, context.session)
    if files != (before := start.state.get(kind) or files):
        changed = sorted(name for name in {*files, *before} if files.get(name) != before.get(name))
        raise UserError(
            f"the {kind} {folder} has changed since {context.config.run.shown(start.checkpoint)}: {changed[0]} has "
            f"different content; restore the original files, or use {context.config.another_run} for a separate run"
        )
    return files


def teacher_keys(start: Start, context: Context) -> dict[str, Any] | None:
    """Return the config keys that describe the run's teacher, or None if the run does not load a teacher by name.

    Prints a warning if keys differ from the checkpoint's.
    """
    config = context.config
    name = getattr(config.task, "teacher", None) if config.task.has_teacher else None
    if name is None:
        return None
    keys = keys_of_teacher(name)
    if start.checkpoint is None:
        return keys
    before = start.state.get("teacher_keys") or keys_of_teacher(name, is_read_earlier=True)
    if changed := [key for key in keys if before.get(key, keys[key]) != keys[key]]:
        told = ", ".join(f"{key} {shown(before[key])} -> {shown(keys[key])}" for key in changed)
        names = teacher_section(name).names
        there = ", ".join(f'"{names.get(key, key)}": {json.dumps(before[key])}' for key in changed)
        context.console.say(
            f"WARNING    task.teacher={name} has changed since {config.run.shown(start.checkpoint)}: {told}; keys that "
            f"its {CONFIG} leaves out now have the defaults of transformers; to keep the earlier values, set {there} "
            f"in {CONFIG}"
        )
    return keys


def base_of(checkpoint: Path, module: nn.Module) -> Path | None:
    """Return the folder of the base model that ``checkpoint`` adapts.

    None if the base weights come from ``build_model()``. Raises ``UserError`` if ``module`` was built with other
    weights.
    """
    if not (checkpoint / STATE).exists():  # exported by serried or saved by PEFT
        return model_folder(base_of_adapters(checkpoint), "*.safetensors", "*.json")
    path = _recorded(checkpoint)["path"]
    if path is None:
        _compare({"path": None, "digest": _digest(module)}, checkpoint)
    return None if path is None else _local(path)


def check_base(checkpoint: Path) -> Path | None:
    """Return the folder of the base model that ``checkpoint`` adapts, after verifying the checksums of its files.

    None if the base weights come from ``build_model()``. Raises ``UserError`` if the base model is missing or has
    changed.
    """
    path = _recorded(checkpoint)["path"]
    if path is None:
        return None
    folder = _local(path)
    _compare({"path": path, "files": _checksums(folder, _weight_files(folder, checkpoint))}, checkpoint)
    return folder


def _local(path: str) -> Path:
    """Return the folder of a recorded base model, after downloading it if it is in a bucket."""
    return model_folder(path, "*.safetensors", "*.json") if is_bucket_url(path) else Path(path)


def check_same_base(adapters: Path, checkpoint: Path) -> None:
    """Raise ``UserError`` if ``adapters`` is damaged, or adapts another model than ``checkpoint``; see
    ``check_adapters``."""
    check_adapters(adapters, _recorded(checkpoint))


def check_adapters(folder: Path, base: dict[str, Any] | None) -> None:
    """Raise ``UserError`` if ``folder`` is a checkpoint of adapters that is damaged, or that adapts another model than
    the one with the record ``base``. Folders written by PEFT or an export have no checksums."""
    if not (folder / MANIFEST).exists():
        return
    try:
        check_files(folder, lambda name: not name.startswith(OPTIMIZER))
    except Damaged as error:
        raise UserError(f"{error}; use another checkpoint") from None
    if base is not None:
        _compare(base, folder)


def _recorded(checkpoint: Path) -> dict[str, Any]:
    base = read_state(checkpoint).get("base")
    if not isinstance(base, dict) or not isinstance(base.get("path"), str | None):
        raise UserError(f"{checkpoint / STATE} does not name the base model of its adapters; use another checkpoint")
    return {"path": None, **base}


def _compare(found: dict[str, Any], checkpoint: Path) -> None:
    recorded = _recorded(checkpoint)
    if found["path"] is None or recorded["path"] is None:
        if found != recorded:
            raise UserError(
                f"{checkpoint} has adapters for a different base model than build_model() returns now; use the task, "
                "the seed and the model.path that it was trained with"
            )
        return
    before, now = recorded.get("files") or {}, found["files"]
    for name in sorted({*before, *now}):
        if before.get(name) != now.get(name):
            raise UserError(
                f"{found['path']} is not the base model of {checkpoint} ({recorded['path']}): {name} has different "
                "content; set the base model with model.path=FOLDER"
            )


def _digest(module: nn.Module) -> str:
    frozen = [parameter.detach() for parameter in module.parameters() if not parameter.requires_grad]
    return f"{int(digest(frozen)):x}"


def _weight_files(folder: Path, checkpoint: Path | None) -> list[str]:
    if not folder.is_dir():
        if checkpoint is None:
            raise UserError(f"the model folder {folder} does not exist; give its new path")
        raise UserError(f"the base model {folder} of {checkpoint} does not exist; {_MOVED}")
    return [name for name in TensorFolder(folder).files if name.endswith(".safetensors")]


def _checksums(folder: Path, names: Sequence[str]) -> dict[str, list[int]]:
    try:
        records = {name: record_of(folder / name) for name in names}
    except OSError as error:
        raise UserError(f"cannot read {error.filename or folder}: {error.strerror}") from None
    return {name: [record.size, record.crc32] for name, record in records.items()}
