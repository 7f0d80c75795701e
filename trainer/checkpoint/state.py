"""The tensors that a checkpoint holds, by name: weights as they are exported, the optimizer's as <weight>.<state>."""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from serried.configs.errors import UserError
from serried.parallel.shards import local_rows
from serried.trainer.checkpoint.plan import Part
from serried.trainer.checkpoint.retention import MODEL, OPTIMIZER
from serried.trainer.checkpoint.tensors import TensorFolder, TensorSpec

_NAMES_SHOWN = 3
_PIECE_BYTES = 16 * 2**20
"""Read at a time: what loading holds beyond the model."""
_UNUSED = ("lm_head.weight", ".rotary_emb.inv_freq")
"""Endings of names that a folder may hold beyond the model's: what follows from the rest."""


def state_parts(
    module: nn.Module, optimizer: torch.optim.Optimizer, export_name: Callable[[str], str]
) -> Iterator[tuple[str, Part]]:
    """Everything that training changes, each with the stem of its files; in the same order always."""
    named = [(export_name(name), parameter) for name, parameter in module.named_parameters()]
    for name, parameter in named:
        yield MODEL, _part(name, parameter)
    for name, parameter in named:
        for key, value in optimizer.state[parameter].items():
            yield OPTIMIZER, _part(f"{name}.{key}", value)


def _part(name: str, tensor: Tensor) -> Part:
    local, _ = local_rows(tensor)
    return Part(TensorSpec(name, tensor.dtype, tuple(tensor.shape)), local, isinstance(tensor, DTensor))


@torch.no_grad()
def load_state(
    checkpoint: Path, module: nn.Module, optimizer: torch.optim.Optimizer, export_name: Callable[[str], str]
) -> None:
    """Fill weights and optimizer state from a checkpoint; each rank reads its rows alone.

    Raises:
        UserError: the checkpoint is of another model.
    """
    named = {export_name(name): parameter for name, parameter in module.named_parameters()}
    _fill(TensorFolder(checkpoint, MODEL), named)
    states = {f"{name}.{key}": value for name, p in named.items() for key, value in optimizer.state[p].items()}
    _fill(TensorFolder(checkpoint, OPTIMIZER), states)


@torch.no_grad()
def load_weights(folder: Path, module: nn.Module, export_name: Callable[[str], str]) -> None:
    """Fill weights from a model folder in any float dtype; each rank reads its rows alone.

    Raises:
        UserError: the folder holds another model.
    """
    named = {export_name(name): parameter for name, parameter in module.named_parameters()}
    _fill(TensorFolder(folder, MODEL), named)


def check_names(folder: Path, module: nn.Module, export_name: Callable[[str], str]) -> None:
    """Compare names and shapes of ``folder`` with those of ``module``, which may be on meta; nothing is read.

    Raises:
        UserError: the folder holds another model.
    """
    named = {export_name(name): parameter for name, parameter in module.named_parameters()}
    _check(TensorFolder(folder, MODEL), named)


def _check(folder: TensorFolder, named: Mapping[str, Tensor]) -> None:
    missing = [name for name in named if name not in folder.specs]
    extra = [name for name in folder.specs if name not in named and not name.endswith(_UNUSED)]
    shaped = [
        f"{name} is {list(folder.specs[name].shape)} there and {list(tensor.shape)} here"
        for name, tensor in named.items()
        if name in folder.specs and folder.specs[name].shape != tuple(tensor.shape)
    ]
    if missing or extra or shaped:
        problems = [
            *([f"{len(missing)} tensors are not in it ({_some(missing)})"] if missing else []),
            *([f"{len(extra)} are not in the model ({_some(extra)})"] if extra else []),
            *([f"{len(shaped)} of other shape ({_some(shaped)})"] if shaped else []),
        ]
        raise UserError(
            f"{folder.folder} holds another model than this command describes: {'; '.join(problems)}; "
            "use the model.* keys it was trained with (see its config.json), or run.name=OTHER for a new run"
        )
    for name in named:
        if not folder.specs[name].dtype.is_floating_point:
            raise UserError(f"{folder.folder}: {name} is {folder.specs[name].dtype}; only float weights can be trained")


def _fill(folder: TensorFolder, named: Mapping[str, Tensor]) -> None:
    _check(folder, named)
    for name, tensor in named.items():
        local, first = local_rows(tensor)
        if local.ndim == 0:
            local.copy_(folder.read(name))
            continue
        rows = max(1, _PIECE_BYTES // max(1, folder.specs[name].nbytes // max(1, tensor.shape[0])))
        for begin in range(0, local.shape[0], rows):
            part = local[begin : begin + rows]
            part.copy_(folder.read(name, first + begin, part.shape[0]))


def _some(names: list[str]) -> str:
    return ", ".join(names[:_NAMES_SHOWN]) + (", ..." if len(names) > _NAMES_SHOWN else "")
