"""The tensors that a checkpoint holds, by name: weights as they are exported, the optimizer's as <weight>.<state>."""

from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from serried.configs.errors import UserError
from serried.parallel.held import HeldTensor, persistent_buffers, tied_names
from serried.parallel.model import DistributedModel
from serried.records.tensors import TensorFolder, TensorSpec
from serried.trainer.checkpoint.plan import Part
from serried.trainer.checkpoint.retention import MODEL, OPTIMIZER
from serried.trainer.optimizer_state import ensure_state, tensor_state

_NAMES_SHOWN = 3
_PIECE_BYTES = 16 * 2**20
"""Read at a time: what loading holds beyond the model."""
_UNUSED = ("lm_head.weight", ".rotary_emb.inv_freq")
"""Endings of names that a folder may hold beyond the model's: what follows from the rest."""


def state_parts(
    parallel: DistributedModel, optimizer: torch.optim.Optimizer, export_name: Callable[[str], str]
) -> Iterator[tuple[str, Part]]:
    """Everything that training changes, each with the stem of its files; in the same order always."""
    for held in (*parallel.parameters, *parallel.buffers):
        yield MODEL, _part(export_name(held.name), held)
    for name, held in _optimizer_state(parallel, optimizer, export_name).items():
        yield OPTIMIZER, _part(name, held)


def _part(name: str, held: HeldTensor) -> Part:
    return Part(TensorSpec(name, held.tensor.dtype, held.spec.shape), held.local, held.spec)


def _weights(parallel: DistributedModel, export_name: Callable[[str], str]) -> dict[str, HeldTensor]:
    return {export_name(held.name): held for held in (*parallel.parameters, *parallel.buffers)}


def _optimizer_state(
    parallel: DistributedModel, optimizer: torch.optim.Optimizer, export_name: Callable[[str], str]
) -> dict[str, HeldTensor]:
    """By name in the checkpoint."""
    return {
        f"{export_name(held.name)}.{key}": parallel.held_like(held, value)
        for held in parallel.parameters
        for key, value in tensor_state(optimizer, held.tensor).items()
    }


@torch.no_grad()
def load_state(
    checkpoint: Path,
    parallel: DistributedModel,
    optimizer: torch.optim.Optimizer,
    export_name: Callable[[str], str],
) -> None:
    """Fill weights and optimizer state from a checkpoint; each rank reads its rows alone.

    Raises:
        UserError: the checkpoint is of another model.
    """
    folder = TensorFolder(checkpoint, OPTIMIZER) if any(checkpoint.glob(f"{OPTIMIZER}*")) else None
    saved = folder.specs.keys() if folder is not None else set()  # SGD without momentum has no state
    tensors = {export_name(held.name): held.tensor for held in parallel.parameters}
    with_state = {id(tensors.get(name.rpartition(".")[0])) for name in saved}
    ensure_state(optimizer, lambda parameter: id(parameter) in with_state)
    load_weights(checkpoint, parallel, export_name)
    states = _optimizer_state(parallel, optimizer, export_name)
    if states.keys() != saved:
        differing = _some(sorted(states.keys() ^ saved))
        raise UserError(
            f"{checkpoint} holds the state of another optimizer ({differing}); "
            "use the optim it was trained with, or its weights alone: serried export, then checkpoint.resume=FOLDER"
        )
    if folder is not None:
        _fill(folder, states)


@torch.no_grad()
def load_weights(folder: Path, parallel: DistributedModel, export_name: Callable[[str], str]) -> None:
    """Fill weights from a model folder in any float dtype; each rank reads its rows alone.

    Raises:
        UserError: the folder holds another model.
    """
    _fill(TensorFolder(folder, MODEL), _weights(parallel, export_name), _aliases(parallel.module, export_name))


def check_names(folder: Path, module: nn.Module, export_name: Callable[[str], str]) -> None:
    """Compare names and shapes of ``folder`` with those of ``module``, which may be on meta; nothing is read.

    Raises:
        UserError: the folder holds another model.
    """
    named: dict[str, Tensor] = {export_name(name): parameter for name, parameter in module.named_parameters()}
    named |= {export_name(name): module.get_buffer(name) for name in persistent_buffers(module)}
    _check(TensorFolder(folder, MODEL), named, _aliases(module, export_name))


def _aliases(module: nn.Module, export_name: Callable[[str], str]) -> set[str]:
    """Further names of shared parameters, under which a folder may hold them once more."""
    return {export_name(name) for name in tied_names(module)}


def _check(folder: TensorFolder, named: Mapping[str, Tensor], aliases: Collection[str] = ()) -> None:
    missing = [name for name in named if name not in folder.specs]
    extra = [name for name in folder.specs if name not in named and name not in aliases and not name.endswith(_UNUSED)]
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
    for name, tensor in named.items():
        if tensor.is_floating_point() and not folder.specs[name].dtype.is_floating_point:
            raise UserError(f"{folder.folder}: {name} is {folder.specs[name].dtype}; only float weights can be trained")


def _fill(folder: TensorFolder, named: Mapping[str, HeldTensor], aliases: Collection[str] = ()) -> None:
    _check(folder, {name: held.tensor for name, held in named.items()}, aliases)
    for name, held in named.items():
        local, box = held.local, held.box
        if local.ndim == 0:
            local.copy_(folder.read(name))
            continue
        rows = max(1, _PIECE_BYTES // max(1, folder.specs[name].nbytes // max(1, held.spec.shape[0])))
        for begin in range(0, local.shape[0], rows):
            part = local[begin : begin + rows]
            part.copy_(folder.read(name, box.starts[0] + begin, part.shape[0])[(slice(None), *box.columns())])


def _some(names: list[str]) -> str:
    return ", ".join(names[:_NAMES_SHOWN]) + (", ..." if len(names) > _NAMES_SHOWN else "")
