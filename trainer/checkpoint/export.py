"""Export of a committed checkpoint, or of the mean of several, as a plain Hugging Face model folder.

The weights may be converted to another dtype and split into files of another size. Training state is left out.

A checkpoint of adapters becomes a PEFT folder, or a model folder if the adapters are merged into their base model.

The export is streamed, so it also works on a machine whose memory cannot hold the model.
"""

import json
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from serried.configs.errors import UserError
from serried.configs.formats import size
from serried.configs.hugging_face.adapter_folder import ADAPTER_CONFIG, PREFIX
from serried.configs.hugging_face.model_folder import CONFIG, GENERATION
from serried.configs.hugging_face.text_part import text_part
from serried.configs.plain_data import read_json
from serried.records.safetensors_files import TensorFolder, TensorSpec, header, index_json, tensor_bytes
from serried.trainer.checkpoint.file_assignment import file_names
from serried.trainer.checkpoint.manifest import MANIFEST, Damaged, FileRecord, check_files, fsync_folder
from serried.trainer.checkpoint.merge_tensors import Built, Mean, Merged, Resized, has_rows, trained_tokens
from serried.trainer.checkpoint.retention import ADAPTER, MODEL, OPTIMIZER
from serried.trainer.checkpoint.saved_state import STATE

_INDEX = "model.safetensors.index.json"
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_PIECE_BYTES = 64 * 2**20
_MERGED_SHARD_BYTES = 5 * 10**9
_CONFIG_SUFFIXES = (".json", ".jinja", ".model", ".txt")
"""Suffixes of the configs and the tokenizer of a model."""
_SPARE_BYTES = 2**20  # headers, the index, the configs


def export(
    checkpoint: Path,
    out: Path,
    *,
    dtype: torch.dtype | None,
    shard_bytes: int,
    base: TensorFolder | Built | None = None,
    averaged_with: Sequence[Path] = (),
    factors: Mapping[Path, float] = MappingProxyType({}),
) -> list[Path]:
    """Write the model of a committed ``checkpoint`` to the folder ``out``. Returns the files there.

    The weights are the mean over ``checkpoint`` and the checkpoints of the same run in ``averaged_with``.

    For a checkpoint of adapters, only the adapters are written, in PEFT's format. If ``base`` is given, the base model
    with the adapters merged into it is written instead. ``factors`` maps ``checkpoint`` and further folders of adapters
    to the factors with which they are merged.

    Floating-point weights are converted to ``dtype`` (None: unchanged, or bf16 if ``base`` is quantized). A file
    contains at most ``shard_bytes`` of weights, or one larger tensor: ``model.safetensors`` if all weights fit into one
    file, else ``model-00001-of-0000N.safetensors`` with an index. ``dtype`` is written to config.json,
    generation_config.json is derived from it if missing, and the other files of the model (tokenizer) are copied. All
    files are verified first. The export is atomic: ``out`` is complete or is not created.

    Peak memory is a few times 64 MiB for any model size, plus one matrix in fp32 if ``base`` is given.

    Raises:
        UserError: the checkpoint is damaged, ``out`` is in use, the disk is too full or fails, or a weight is too
            large for ``dtype``.
        ValueError: ``dtype`` is not float32, bfloat16 or float16, or ``shard_bytes`` is not positive.
    """
    if dtype not in (None, *_DTYPES) or shard_bytes < 1:
        raise ValueError(f"cannot export as {dtype} in files of {shard_bytes} bytes")
    out = out.resolve()
    _refuse_unless_free(out, checkpoint)
    records = _verified(checkpoint)
    is_adapter = ADAPTER_CONFIG in records
    saved = TensorFolder(checkpoint, ADAPTER if is_adapter else MODEL)
    if unlisted := set(saved.files) - set(records):
        raise UserError(f"{checkpoint / min(unlisted)} is not in {MANIFEST}; {_ANOTHER}")
    weights: TensorFolder | Merged | Mean = saved
    if averaged_with and is_adapter:
        raise UserError(
            f"{checkpoint} has adapters, and a mean of adapters is not a mean of models; merge each with its base "
            "model: serried export ... merge=true"
        )
    if averaged_with:
        for other in averaged_with:
            _verified(other)
        weights = Mean([*(TensorFolder(other) for other in averaged_with), saved])
    left_out = {ADAPTER_CONFIG} if base is not None else {CONFIG, GENERATION} if is_adapter else set()
    if base is not None:
        weights = _with_adapters(base, checkpoint, {checkpoint: 1.0} | dict(factors))
        if dtype is None and isinstance(base, TensorFolder) and base.is_dequantized:
            dtype = torch.bfloat16  # as transformers dequantizes it
    of_weights = (".safetensors", ".safetensors.index.json")
    others = [name for name in sorted(records) if name not in left_out and not name.endswith(of_weights)]
    specs = [_converted(spec, dtype) for spec in weights.specs.values()]
    _check_space(out, sum(spec.nbytes for spec in specs) + sum(records[name].size for name in others))

    is_model = not is_adapter or base is not None
    files = _shards(specs, shard_bytes) if is_model else {f"{ADAPTER}.safetensors": specs}
    _write_folder(out, weights, files, [checkpoint / name for name in others], is_model=is_model)
    return sorted(out.iterdir())


def write_merged(adapters: Path, base: TensorFolder | Built, out: Path) -> None:
    """Write the model folder ``out``: ``base`` with ``adapters`` merged into it, whose matrices are in fp32.

    The other files are copied from the checkpoint ``adapters``, or from ``base`` if ``adapters`` was saved by PEFT. An
    earlier folder ``out`` is replaced. Its ``config.json`` describes only the text part of ``base``, whose weights are
    written, and the rows of the vocabulary after the merge. Raises ``UserError`` if the adapters do not fit ``base``,
    or if the disk is too full or fails.
    """
    weights = _with_adapters(base, adapters, {adapters: 1.0})
    merged = weights.adapted
    specs = [replace(spec, dtype=torch.float32) if spec.name in merged else spec for spec in weights.specs.values()]
    folder = adapters if (adapters / CONFIG).is_file() or isinstance(base, Built) else base.folder
    others = [path for path in sorted(folder.iterdir()) if path.suffix in _CONFIG_SUFFIXES]
    others = [path for path in others if path.name not in (ADAPTER_CONFIG, MANIFEST, STATE)]
    others = [path for path in others if not path.name.endswith(".safetensors.index.json")]
    _check_space(out.absolute(), sum(spec.nbytes for spec in specs))
    shutil.rmtree(out, ignore_errors=True)
    rows = _rows_of_vocabulary(base, adapters)[1]
    _write_folder(out, weights, _shards(specs, _MERGED_SHARD_BYTES), others, is_model=True, rows=rows)


def _write_folder(
    out: Path, weights: TensorFolder | Merged | Mean, files: Mapping[str, list[TensorSpec]], others: Sequence[Path],
    *, is_model: bool, rows: int = 0,
) -> None:  # fmt: skip
    """Write ``weights`` to ``files`` in the folder ``out``, with copies of the files ``others``. This is atomic.

    ``rows``: see ``_write_configs``.
    """
    specs = [spec for part in files.values() for spec in part]
    temporary = out.with_name(f".{out.name}.partial")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(temporary, ignore_errors=True)  # left over from a killed export
        temporary.mkdir()
        for name, part in files.items():
            _write_weights(temporary / name, weights, part)
        if len(files) > 1:
            (temporary / _INDEX).write_text(index_json(files), "utf-8")
        for path in others:
            shutil.copyfile(path, temporary / path.name)
        if is_model and (temporary / CONFIG).is_file():
            _write_configs(temporary, specs, rows)
        _commit(temporary, out)
    except OSError as error:
        raise UserError(
            f"cannot write {out}: {error.strerror}; no incomplete files are left; use out=FOLDER to write to another "
            "folder"
        ) from None
    finally:
        shutil.rmtree(temporary, ignore_errors=True)  # exists only if something failed


def _with_adapters(base: TensorFolder | Built, checkpoint: Path, factors: Mapping[Path, float]) -> Merged:
    """Return ``base`` with the adapters in the folders ``factors``, multiplied by their factors."""
    configs = {folder: read_json(folder / ADAPTER_CONFIG) for folder in factors}
    for folder, config in configs.items() if len(factors) > 1 or {*factors.values()} != {1.0} else ():
        if config.get("use_dora"):
            raise UserError(
                f"{folder} has adapters of DoRA, but these scale the weights and cannot be added; merge this folder "
                "alone"
            )
    first, *others = factors
    rows, new_rows = _rows_of_vocabulary(base, checkpoint)
    resized = Resized(base, rows, new_rows) if isinstance(base, TensorFolder) and new_rows > rows else base
    weights = Merged(resized, TensorFolder(first, ADAPTER), configs[first], factors[first])
    for folder in others:
        weights = Merged(weights, TensorFolder(folder, ADAPTER), configs[folder], factors[folder])
    return weights


def _rows_of_vocabulary(base: TensorFolder | Built, adapters: Path) -> tuple[int, int]:
    """Return the number of rows of the vocabulary in ``base``, and of the model that ``adapters`` were trained with.

    Both are 0 if ``base`` has no config with a vocabulary.
    """
    rows = 0 if isinstance(base, Built) else _vocab_size(base.folder)
    if isinstance(base, Built) or not rows:
        return 0, 0
    # PEFT and exports of adapters leave out config.json, so added tokens appear only in the adapters themselves.
    tokens = trained_tokens(read_json(adapters / ADAPTER_CONFIG))
    found = [rows, _vocab_size(adapters), *(token + 1 for token in tokens)]
    for name, spec in TensorFolder(adapters, ADAPTER).specs.items():
        module = name.removeprefix(PREFIX)
        before = base.specs.get(module) or base.specs.get(module.partition(".")[2])
        if before is not None and has_rows(before, rows) and spec.shape[1:] == before.shape[1:]:
            found.append(spec.shape[0])
    return rows, max(found)


def _vocab_size(folder: Path) -> int:
    """Return the number of rows of the vocabulary in ``config.json``; 0 if it is unknown."""
    if not (folder / CONFIG).is_file():
        return 0
    rows = text_part(read_json(folder / CONFIG)).get("vocab_size")
    return rows if isinstance(rows, int) else 0


_ANOTHER = "export another checkpoint with checkpoint=STEP"


def _refuse_unless_free(out: Path, checkpoint: Path) -> None:
    if out.is_relative_to(checkpoint.resolve()):
        raise UserError(f"out={out} is inside the checkpoint; use another folder")
    try:
        in_use = any(out.iterdir())
    except FileNotFoundError:
        return
    except OSError as error:
        raise UserError(f"out={out} cannot be used: {error.strerror}; use another folder") from None
    if in_use:
        raise UserError(f"out={out} is not empty; use another folder, or remove this folder first")


def _verified(checkpoint: Path) -> dict[str, FileRecord]:
    """Verify the model's files, and return their records by name. Training state is skipped.

    Raises ``UserError`` if a file is damaged.
    """
    try:
        records = check_files(checkpoint, lambda name: name != STATE and not name.startswith(OPTIMIZER))
    except Damaged as damaged:
        raise UserError(f"{damaged}; {_ANOTHER}") from None
    if not {"config.json", ADAPTER_CONFIG} & records.keys():
        raise UserError(f"{checkpoint} has no config.json; {_ANOTHER}")
    return records


def _check_space(out: Path, needed: int) -> None:
    there = next(folder for folder in out.parents if folder.exists())
    free = shutil.disk_usage(there).free
    if free < needed + _SPARE_BYTES:
        raise UserError(
            f"out={out} needs {size(needed + _SPARE_BYTES)}, but {there} has only {size(free)} free; use another disk, "
            "or dtype=bf16 for two bytes per weight"
        )


def _converted(spec: TensorSpec, dtype: torch.dtype | None) -> TensorSpec:
    # One-byte values are meaningless without the scales stored next to them, so both stay unchanged.
    converts = dtype is not None and spec.dtype.is_floating_point and spec.dtype.itemsize > 1
    return TensorSpec(spec.name, dtype, spec.shape) if dtype is not None and converts else spec


def _shards(specs: list[TensorSpec], shard_bytes: int) -> dict[str, list[TensorSpec]]:
    """Assign tensors to files in the given order. Returns the tensors by file name."""
    shards: list[list[TensorSpec]] = [[]]
    filled = 0
    for spec in specs:
        if shards[-1] and filled + spec.nbytes > shard_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(spec)
        filled += spec.nbytes
    return dict(zip(file_names(MODEL, len(shards)), shards, strict=True))


def _write_weights(path: Path, weights: TensorFolder | Merged | Mean, specs: list[TensorSpec]) -> None:
    with path.open("wb") as file:
        file.write(header(specs))
        for spec in specs:
            # Read by elements, not by rows: a single row of a matrix may be large, too.
            step = _PIECE_BYTES // max(spec.dtype.itemsize, weights.specs[spec.name].dtype.itemsize)
            for first in range(0, spec.numel, step):
                values = weights.read_elements(spec.name, first, min(step, spec.numel - first))
                file.write(tensor_bytes(_convert(values, spec)))


def _convert(values: Tensor, spec: TensorSpec) -> Tensor:
    converted = values.to(spec.dtype)
    if converted is not values and bool(converted.isinf().any()):
        too_large = values[converted.isinf() & values.isfinite()]
        if too_large.numel():
            raise UserError(
                f"{spec.name} contains {too_large[0].item():g}, but the largest {_name(spec.dtype)} value is "
                f"{torch.finfo(spec.dtype).max:g}; use dtype=fp32" + (", or bf16" if spec.dtype.itemsize == 2 else "")
            )
    return converted


def _write_configs(folder: Path, specs: list[TensorSpec], rows: int) -> None:
    """Make the configs in ``folder`` describe the weights ``specs``.

    ``rows``: number of rows of the vocabulary, if the weights are of a text model; 0 to keep what ``config.json`` says.
    """
    config = read_json(folder / CONFIG)
    if rows:
        config = text_part(config) | {"vocab_size": rows}
    config.pop("quantization_config", None)  # weights are written dequantized
    floating = [spec for spec in specs if spec.dtype.is_floating_point]
    if floating:
        largest = max(floating, key=lambda spec: spec.nbytes)
        # transformers 5 reads "dtype", transformers 4 "torch_dtype".
        config["dtype"] = config["torch_dtype"] = _name(largest.dtype)
    _write_json(folder / CONFIG, config)
    if not (folder / GENERATION).exists():
        tokens = {key: config[key] for key in ("bos_token_id", "eos_token_id") if config.get(key) is not None}
        _write_json(folder / GENERATION, {"_from_model_config": True, **tokens})


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _commit(temporary: Path, out: Path) -> None:
    """Flush all files to the disk, then rename the folder to ``out``, which may be an existing empty folder."""
    for path in temporary.iterdir():
        with path.open("rb") as file:
            os.fsync(file.fileno())
    fsync_folder(temporary)
    temporary.rename(out)
    fsync_folder(out.parent)
