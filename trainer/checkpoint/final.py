"""The trained model on disk, as a folder that ``transformers`` opens. safetensors only: nothing here can run code."""

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.tensor import DTensor

from parallel.data import Single
from trainer.recipe import Recipe

_SHARD_BYTES = 5 * 10**9


def save_model(folder: Path, parallel: Single, recipe: Recipe, *, writes: bool) -> None:
    """Write the whole model to ``folder``, under its exported names, in files of at most 5 GB.

    A collective: every rank brings its part of each parameter, the one that ``writes`` holds a file's worth at a time.
    The folder appears complete or not at all.
    """
    parallel.reshard()
    temporary = folder.with_name(f".{folder.name}.tmp")
    if writes:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
    shards: list[list[str]] = []
    pending: dict[str, Tensor] = {}
    total_bytes = 0

    def flush() -> None:
        if writes and pending:
            save_file(pending, temporary / f"{len(shards)}.safetensors", metadata={"format": "pt"})
            shards.append(list(pending))
            pending.clear()

    for name, parameter in parallel.module.named_parameters():
        whole = _whole(parameter)
        if not writes:
            continue
        if pending and sum(tensor.nbytes for tensor in pending.values()) + whole.nbytes > _SHARD_BYTES:
            flush()
        pending[recipe.export_name(name)] = whole.cpu().contiguous()
        total_bytes += whole.nbytes
    if not writes:
        return
    flush()
    if len(shards) == 1:
        (temporary / "0.safetensors").rename(temporary / "model.safetensors")
    else:
        index: dict[str, str] = {}
        for number, names in enumerate(shards):
            file = f"model-{number + 1:05d}-of-{len(shards):05d}.safetensors"
            (temporary / f"{number}.safetensors").rename(temporary / file)
            index |= dict.fromkeys(names, file)
        text = json.dumps({"metadata": {"total_size": total_bytes}, "weight_map": index}, indent=2)
        (temporary / "model.safetensors.index.json").write_text(text + "\n")
    recipe.export_files(temporary)
    temporary.rename(folder)


@torch.no_grad()
def _whole(parameter: Tensor) -> Tensor:
    return parameter.full_tensor() if isinstance(parameter, DTensor) else parameter.detach()
