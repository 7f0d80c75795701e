"""``serried export`` and ``serried merge``: checkpoints in the formats of other software."""

import logging
import math
import re
import shutil
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from serried.configs.bucket_paths import output_path, with_urls
from serried.configs.errors import UserError
from serried.configs.formats import size
from serried.configs.hugging_face.adapter_folder import ADAPTER_CONFIG
from serried.configs.hugging_face.model_folder import architecture_of
from serried.configs.messages.suggestions import nearest
from serried.configs.plain_data import read_json
from serried.configs.schema.fields import parse_count
from serried.configs.schema.sections import RunConfig
from serried.configs.subcommand_arguments import pairs
from serried.runtime.process import say
from serried.saved import (
    Saved,
    as_saved,
    checkpoints_of,
    choose_checkpoint,
    config_of_model,
    find_run,
    find_saved,
    open_run,
    task_of_text,
    task_that_trained,
)

if TYPE_CHECKING:
    from torch import Tensor, nn

    from serried.recipes.exports.export_formats import Format, Source
    from serried.records.safetensors_files import TensorFolder
    from serried.trainer.checkpoint.merge_tensors import Built

_TAKES = ("run.dir", "run.name", "out", "checkpoint", "dtype", "shard_size")
_HUGGING_FACE = "hf"
_PROMPT = (2, 13)
"""Numbers of sequences and of tokens per sequence on which the exported model is compared."""
_SPARE_BYTES = 4 * 2**20  # graphs, tokenizers, headers


def export(words: list[str]) -> int:
    """Write a checkpoint in a format that other software opens.

    format       hf (default): a model folder for transformers, or an adapter folder for PEFT; gguf: for llama.cpp;
                 onnx; torch_export; executorch; torchao: a folder of quantized weights for transformers. All formats
                 except hf are run to compare their logits with the checkpoint
    out          folder to write with format=hf, otherwise the file to write
    dtype        weight dtype. hf: fp32, bf16 or fp16, by default as saved; gguf: fp16 (default), fp32, bf16, q8_0 or
                 q4_0; onnx: fp32 (default) or int8; torch_export: fp32 (default) or bf16; torchao: int8_dynamic_int4 or
                 int4_weight_only, by default the one the model was trained for
    shard_size   largest file with format=hf: 500MB, 5GB (default); a larger tensor gets its own file
    merge        true: merge adapters (LoRA) into their base model before writing; formats other than hf always do
    """
    from serried.recipes.exports.export_formats import FORMATS
    from serried.trainer.checkpoint.manifest import MANIFEST
    from serried.trainer.checkpoint.read_while_training import reading, with_chosen

    given, _ = pairs(words, "export", (*_TAKES, "merge", "format"))
    name = given.get("format", _HUGGING_FACE)
    if name not in (_HUGGING_FACE, *FORMATS):
        close = nearest(name, [_HUGGING_FACE, *FORMATS])
        hint = f"did you mean format={close[0]}?" if close else f"use one of {', '.join([_HUGGING_FACE, *FORMATS])}"
        raise UserError(f"format={name} is not supported by serried export; {hint}")
    run = find_saved(given, "export").run

    def exported(folder: Path) -> int:
        saved = Saved(folder, run)
        with reading(folder):
            if name != _HUGGING_FACE:
                return _export_file(given, saved, name, FORMATS[name])
            if run is None and not (folder / MANIFEST).is_file():
                is_adapters = (folder / ADAPTER_CONFIG).is_file()
                holds = "contains adapters without a run" if is_adapters else "is already a plain model folder"
                raise UserError(f"{folder} {holds}; export a run or one of its checkpoints")
            return _write_model(given, folder, base=_base_to_merge(given, saved))

    return with_chosen(lambda: find_saved(given, "export").folder, exported)


def merge(words: list[str]) -> int:
    """Write the mean of several checkpoints of a run, or a base model with several adapters, as a plain model folder.

    RUN          run folder; run.dir=RUN and run.name=NAME do the same
    checkpoint   steps to average: checkpoint=200,250,300; with adapters=, the step of RUN's adapters, by default the
                 newest
    adapters     adapters to add to those of RUN: runs, or folders in PEFT's format, adapters=runs/b,FOLDER
    weights      factors of the adapters of RUN and of adapters=: weights=0.7,0.3; by default 1 for all
    out          folder to write; dtype and shard_size as in serried export
    """
    given, _ = pairs(words, "merge", (*_TAKES, "adapters", "weights"))
    steps = [word for word in given.get("checkpoint", "").split(",") if word]
    run = find_run(given, "merge")
    saved = checkpoints_of(run)
    *others, last = dict.fromkeys(choose_checkpoint(saved, {"checkpoint": step}) for step in steps or [str(max(saved))])
    if "adapters" in given:
        if others:
            raise UserError(f"checkpoint={given['checkpoint']} cannot be used with adapters=; give a single step")
        return _merge_adapters(given, Saved(last, run))
    if "weights" in given:
        raise UserError(f"weights={given['weights']} has no effect without adapters=FOLDERS; leave it out")
    if not others:
        raise UserError(
            "serried merge needs at least two checkpoints, such as checkpoint=200,300, or further adapters, such as "
            "adapters=FOLDER; for one use serried export"
        )
    return _write_model(given, last, averaged_with=others)


def _merge_adapters(given: Mapping[str, str], saved: Saved) -> int:
    """Write the base model with the adapters ``saved`` and those that ``given`` names, multiplied by their weights."""
    from serried.configs.hugging_face.adapter_folder import described_adapters
    from serried.configs.hugging_face.adapter_settings import adapters_in
    from serried.records.safetensors_files import TensorFolder
    from serried.trainer.adapter_base_model import check_same_base

    base = _base_to_merge({"merge": "true"}, saved)
    names = [name for name in given["adapters"].split(",") if name]
    folders = [saved.folder, *(adapters_in(name, "adapters") for name in names)]
    for folder in folders[1:]:
        described_adapters(folder, TensorFolder(folder, "adapter_model").specs)
        check_same_base(folder, saved.folder)
    if twice := [folder for folder in folders if folders.count(folder) > 1]:
        raise UserError(
            f"adapters={given['adapters']}: {twice[0]} is given twice; set its weight with weights= instead"
        )
    weights = given.get("weights", ",".join("1" * len(folders)))
    numbers: list[float] = []
    with suppress(ValueError):
        numbers = [float(word) for word in weights.split(",")]
    if len(numbers) != len(folders) or not all(map(math.isfinite, numbers)):
        raise UserError(
            f"weights={weights} must be {len(folders)} numbers, one for RUN and one for each folder of adapters=; "
            f"e.g. weights={','.join(['0.5'] * len(folders))}"
        )
    return _write_model(given, saved.folder, base=base, factors=dict(zip(folders, numbers, strict=True)))


# format=hf ------------------------------------------------------------------------------------------------------------


def _write_model(
    given: Mapping[str, str], checkpoint: Path, *, base: "TensorFolder | Built | None" = None,
    averaged_with: Sequence[Path] = (), factors: Mapping[Path, float] = MappingProxyType({}),
) -> int:  # fmt: skip
    """Export ``checkpoint`` with the options in ``given``, and print a summary."""
    import torch

    from serried.trainer.checkpoint.export import export as write

    dtypes = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
    dtype = given.get("dtype")
    if dtype is not None and dtype not in dtypes:
        raise UserError(f"dtype={dtype} is not one of {', '.join(dtypes)}; use dtype=bf16")
    if "out" not in given:
        raise UserError("out=FOLDER, the folder to write, is missing; e.g. out=my-model")
    text = given.get("shard_size", "5GB")
    shard_bytes = parse_count(re.sub("[Bb]$", "", text.strip()))
    if not isinstance(shard_bytes, int) or shard_bytes < 1:
        raise UserError(f"shard_size={text} is not a size; e.g. shard_size=5GB or shard_size=500MB")
    with output_path(given["out"]) as out:
        files = write(
            checkpoint, out, dtype=dtypes[dtype] if dtype else None, shard_bytes=shard_bytes, base=base,
            averaged_with=averaged_with, factors=factors,
        )  # fmt: skip
        written = f"{with_urls(str(out))}: {len(files)} files, {size(sum(f.stat().st_size for f in files))}"
    what = ", ".join(map(str, factors or (*averaged_with, checkpoint)))
    return say(f"exported   {what} to {written}")


def _base_to_merge(given: Mapping[str, str], saved: Saved) -> "TensorFolder | Built | None":
    """Return the base model to which ``merge=true`` adds the adapters of the checkpoint; None with ``merge=false``."""
    from serried.records.safetensors_files import TensorFolder
    from serried.trainer.adapter_base_model import check_base

    checkpoint, merge = saved.folder, given.get("merge", "false")
    if merge not in ("true", "false"):
        raise UserError(f"merge={merge} is not true or false; use merge=true")
    if merge == "false":
        return None
    if not (checkpoint / ADAPTER_CONFIG).is_file():
        raise UserError(f"merge=true has no effect: {checkpoint} contains a full model, not adapters; leave it out")
    base = check_base(checkpoint)
    if base is not None:
        return TensorFolder(base)
    if saved.run is None:
        raise UserError(
            f"merge=true builds the base model from the run folder, but {checkpoint} is not in a run folder; move it "
            "back"
        )
    return _built_base(saved.run, checkpoint)


def _built_base(run: Path, checkpoint: Path) -> "Built":
    """Return the base model that the task of ``run`` builds.

    Raises:
        UserError: ``checkpoint`` adapts a different base model.
    """
    import torch

    from serried.trainer.adapter_base_model import base_of
    from serried.trainer.checkpoint.merge_tensors import Built
    from serried.trainer.model import build_model

    config, _, new_task = open_run(run, task_that_trained(run, "export merge=true"))
    task = new_task(config)
    task.open_saved(checkpoint)

    def built(config: RunConfig) -> "nn.Module":
        torch.manual_seed(config.trainer.seed)
        return build_model(config, task).module

    base_of(checkpoint, built(config))  # raises if the base model differs
    plain = config.adapter.model_copy(update={"method": "none", "quantize": "none"})
    return Built(built(config.model_copy(update={"adapter": plain})), task.exported)


# other formats --------------------------------------------------------------------------------------------------------


def _export_file(given: Mapping[str, str], saved: Saved, name: str, kind: "Format") -> int:
    """Write the file of a format other than ``hf``, run it to compare its logits, and move it to ``out``."""
    trained_for = str(_section_of(saved.folder, "precision").get("quantize_aware"))
    dtype = given.get("dtype") or (trained_for if trained_for in kind.bounds else next(iter(kind.bounds)))
    if dtype not in kind.bounds:
        raise UserError(f"dtype={dtype} is not supported by format={name}; use dtype={' or dtype='.join(kind.bounds)}")
    for key in ("shard_size", "merge"):
        if key in given:
            raise UserError(f"{key}={given[key]} has no effect with format={name}; leave it out")
    if missing := [library for library in kind.libraries if find_spec(library) is None]:
        raise UserError(f"format={name} needs {', '.join(missing)}; use: pip install {' '.join(missing)}")
    if "out" not in given:
        raise UserError(f"out=FILE, the file to write, is missing; e.g. out=my-model.{kind.suffix}")
    with output_path(given["out"]) as out:
        if out.exists():
            raise UserError(f"out={out} exists already; use another file{', or remove it' if out.is_file() else ''}")
        if saved.run is not None:
            task_of_text(saved.run, f"export format={name}")
        partial = out.with_name(f".{out.name}.partial")
        try:
            shutil.rmtree(partial, ignore_errors=True)  # left by an export that was killed
            written = partial / "written"
            written.mkdir(parents=True)
            difference = _write_and_compare(saved, written / out.name, name, kind, dtype)
            total = sum(path.stat().st_size for path in written.rglob("*") if path.is_file())
            _move_all(written, out.parent)
        except OSError as error:
            raise UserError(
                f"cannot write out={out}: {error.strerror or error}; the incomplete files were removed; use out=FILE"
            ) from None
        finally:
            shutil.rmtree(partial, ignore_errors=True)
        where = with_urls(str(out))
    return say(
        f"exported   {saved.folder} to {where}: {name}, {dtype}, {size(total)}; largest difference of its logits from "
        f"the model's: {difference:.1e} of the largest logit (limit {kind.bounds[dtype]:g})"
    )


def _move_all(written: Path, folder: Path) -> None:
    """Move the files in ``written`` to ``folder``. Raises ``UserError`` if a file of the same name exists."""
    files = sorted(written.iterdir(), reverse=True)  # move the file that refers to the others last
    for file in files:
        if (folder / file.name).exists():
            raise UserError(
                f"out= would also write {folder / file.name}, which already exists; use another out=FILE, or remove "
                "that file"
            )
    for file in files:
        file.rename(folder / file.name)


def _write_and_compare(saved: Saved, file: Path, name: str, kind: "Format", dtype: str) -> float:
    """Write ``file``. Return the difference between its logits and the model's logits.

    Raises:
        UserError: The difference is too large, or the format cannot express the model.
    """
    import torch

    quantized = dtype if name == "torchao" else "none"  # compared with the quantized model
    partial = file.parent.parent
    source = _source(saved, partial, quantized)
    _check_space(source.folder, partial)
    rows = read_json(source.folder / "config.json")["vocab_size"]
    tokens = torch.arange(_PROMPT[0] * _PROMPT[1]).mul(7).remainder(rows).view(_PROMPT)
    with torch.no_grad(), _quiet():
        expected = source.opened(source.folder)(tokens)
        try:
            exporter = kind.load()
            exporter.write(source, file, dtype)
            found = exporter.run(source, file, tokens)
        except (UserError, OSError, MemoryError):
            raise
        except Exception as error:  # graph exporters raise exceptions of many types
            reason = " ".join(str(error).split())[:200]
            raise UserError(f"format={name} does not support {saved.folder}: {reason}; use format=hf") from None
    return _difference(found, expected, f"format={name} dtype={dtype}", kind.bounds[dtype])


def _check_space(folder: Path, partial: Path) -> None:
    """Raise ``UserError`` if there is no space for the file and an fp32 copy.

    Some libraries abort the process if the disk is full.
    """
    from serried.records.safetensors_files import TensorFolder

    numbers = sum(spec.numel for spec in TensorFolder(folder).specs.values())
    needed, free = 8 * numbers + _SPARE_BYTES, shutil.disk_usage(partial).free
    if free < needed:
        raise UserError(
            f"the export needs {size(needed)} in {partial.parent}, but only {size(free)} are free; use out=FILE on "
            "another disk"
        )


def _difference(found: "Tensor", expected: "Tensor", what: str, bound: float) -> float:
    difference = float((found.float() - expected).abs().max() / expected.abs().max())
    if not difference <= bound:  # also true for NaN
        raise UserError(
            f"{what}: the logits of the exported model differ from the checkpoint's by up to {difference:.1e} of the "
            f"largest logit, more than the limit of {bound:g}; the file was removed; use another dtype, or format=hf"
        )
    return difference


def _section_of(checkpoint: Path, name: str) -> Mapping[str, Any]:
    """Return a section of the config of the run that wrote ``checkpoint``; {} if it is unknown."""
    from serried.trainer.checkpoint.saved_state import STATE, read_state

    section = read_state(checkpoint)["config"].get(name) if (checkpoint / STATE).is_file() else None
    return section if isinstance(section, dict) else {}


def _source(saved: Saved, partial: Path, quantized: str) -> "Source":
    """Return the model to export, with fake quantization if ``quantized``.

    Adapters are first merged with their base model, in a folder in ``partial``.
    """
    import torch

    from serried.parallel.layout.mesh import Layout
    from serried.recipes.exports.export_formats import Source
    from serried.recipes.text.causal_lm import CausalLM
    from serried.trainer.checkpoint.export import export as write
    from serried.trainer.evaluation.evaluate import check_weights, load_model
    from serried.trainer.optim.parameter_groups import freeze

    folder = saved.folder
    if (folder / ADAPTER_CONFIG).is_file():
        if saved.run is None:
            raise UserError(f"{folder} contains adapters without a run; merge them with PEFT, and export the result")
        base = _base_to_merge({"merge": "true"}, saved)
        write(folder, folder := partial / "merged", dtype=None, shard_bytes=2**40, base=base)
    else:
        check_weights(folder)
    architecture = architecture_of(read_json(folder / "config.json"))
    if "CausalLM" not in architecture and "LMHead" not in architecture:
        raise UserError(
            f"{saved.folder} is a {architecture or 'custom model'}, which returns no logits of tokens; use format=hf"
        )
    config = as_saved(config_of_model(folder, []), folder, world_size=1, is_resharded=True, is_other_data=True)
    precision, optim = config.precision.model_copy(update={"quantize_aware": quantized}), config.optim
    if _section_of(saved.folder, "precision").get("quantize_aware") == quantized != "none":
        # Training did not round frozen layers, and this section says which layers were frozen.
        optim = type(optim).model_validate(_section_of(saved.folder, "optim"))
    config = config.model_copy(update={"precision": precision, "optim": optim})
    task = CausalLM(config)
    module = task.build_model()
    freeze(module, optim)
    fragments = (
        task.exported(name, parameter.shape)
        for name, parameter in module.named_parameters()
        if not parameter.requires_grad
    )
    frozen = {fragment.name for group in fragments for fragment in group}

    def opened(of: Path) -> "nn.Module":
        return load_model(config, task, Layout("single"), torch.device("cpu"), of).module

    return Source(folder, config.model, opened, frozen)


@contextmanager
def _quiet() -> Iterator[None]:
    """Context manager that suppresses logging and warnings, since exporters print pages of them."""
    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(logging.NOTSET)
