"""Tensors of a checkpoint: weights by exported name, optimizer state as ``<weight>.<state>``."""

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from math import prod
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from serried.configs.errors import UserError
from serried.configs.hugging_face.model_folder import CONFIG
from serried.configs.plain_data import read_json
from serried.parallel.checkpoint_mapping import Fragment, in_order
from serried.parallel.distributed_model import DistributedModel
from serried.parallel.layout.local_shards import HeldTensor, persistent_buffers, tied_names
from serried.parallel.layout.shard_specs import Box
from serried.records.safetensors_files import TensorFolder, TensorSpec
from serried.trainer.checkpoint.file_assignment import Part, windows_of
from serried.trainer.checkpoint.retention import MODEL, OPTIMIZER, weights_alone
from serried.trainer.optim.optimizer_state import ensure_state, tensor_state

_NAMES_SHOWN = 3
_PIECE_BYTES = 16 * 2**20
"""Number of bytes read at a time. Loading needs this much memory in addition to the model."""
_UNUSED = ("lm_head.weight", ".rotary_emb.inv_freq", ".attn.bias", ".attn.masked_bias")
"""Suffixes of tensors that a folder may contain although the model lacks them: they can be derived from others."""
_OF_DRAFTS = "eh_proj.weight"
"""Suffix of a tensor that only layers for speculative decoding have."""


class Readable(Protocol):
    """Tensors of which any range of elements can be read, such as ``TensorFolder``."""

    @property
    def specs(self) -> Mapping[str, TensorSpec]:
        """Specs of the tensors, by name."""

    def read_elements(self, name: str, first: int, count: int) -> Tensor:
        """Return ``count`` elements of tensor ``name``, flattened, starting at ``first``."""


Exported = Callable[[str, Sequence[int]], tuple[Fragment, ...]]
"""Maps the name and shape of a parameter to the location of its elements in the tensors of a checkpoint."""
Averages = Mapping[int, Tensor]
"""Average of each parameter, by the parameter's ``id``."""
_NO_AVERAGES: Averages = {}
_TRAINED = "trained"
"""Key of the trained parameter in the optimizer state, if the checkpoint's model is the average."""


def state_parts(
    parallel: DistributedModel,
    optimizer: torch.optim.Optimizer,
    exported: Exported,
    stem: str = MODEL,
    averages: Averages = _NO_AVERAGES,
) -> Iterator[tuple[str, Part]]:
    """Yield all tensors that training changes, always in the same order, each with the stem of its files.

    ``stem``: stem of the weight files. If there are ``averages``, they are saved as the model, and the trained weights
    are saved with the optimizer state.
    """
    for part in _weights(parallel, exported, averages):
        yield stem, part
    for part in _optimizer_state(parallel, optimizer, exported, averages):
        yield OPTIMIZER, part


def _weights(parallel: DistributedModel, exported: Exported, averages: Averages = _NO_AVERAGES) -> list[Part]:
    parameters = (
        parameter._replace(tensor=averages.get(id(parameter.tensor), parameter.tensor))
        for parameter in parallel.parameters
    )
    held = (*parameters, *parallel.buffers.held())
    parts = [Part(tensor.name, tensor, exported(tensor.name, tensor.spec.shape)) for tensor in held]
    return [part for part in parts if part.fragments]  # checkpoints of adapters do not contain the base model


def _optimizer_state(
    parallel: DistributedModel, optimizer: torch.optim.Optimizer, exported: Exported, averages: Averages
) -> list[Part]:
    return [
        Part(f"{of.name}.{key}", held, _state_fragments(of, key, held.spec.shape, exported))
        for of in parallel.parameters
        for key, value in (
            *tensor_state(optimizer, of.tensor).items(),
            *([(_TRAINED, of.tensor)] if id(of.tensor) in averages else []),
        )
        for held in [parallel.held_like(of, value)]
    ]


def _state_fragments(of: HeldTensor, key: str, shape: tuple[int, ...], exported: Exported) -> tuple[Fragment, ...]:
    """Return the fragments of the state ``key`` of a parameter.

    State that has the shape of the parameter is sharded like the parameter.
    """
    parts = exported(of.name, of.spec.shape)
    fragments = tuple({part.ours: part for part in reversed(parts)}.values())[::-1]  # tied weights may be stored twice
    if shape == of.spec.shape:
        return tuple(fragment._replace(name=f"{fragment.name}.{key}") for fragment in fragments)
    if shape == ():
        return tuple(Fragment.whole(f"{fragment.name}.{key}", ()) for fragment in fragments)
    name = fragments[0].name if fragments[0].is_whole else of.name
    return (Fragment.whole(f"{name}.{key}", shape),)


@torch.no_grad()
def load_state(
    checkpoint: Path,
    parallel: DistributedModel,
    optimizer: torch.optim.Optimizer,
    exported: Exported,
    stem: str = MODEL,
    averages: Averages | None = None,
) -> None:
    """Load weights, optimizer state and ``averages`` from a checkpoint. Each rank reads only its own shards.

    ``averages``: None if the run keeps none. Empty on a pipeline stage without trained parameters.

    Raises ``UserError`` if the checkpoint belongs to another model.
    """
    folder = TensorFolder(checkpoint, OPTIMIZER) if any(checkpoint.glob(f"{OPTIMIZER}*")) else None
    saved = folder.specs.keys() if folder is not None else set()  # SGD without momentum has no state
    owners = {name.rpartition(".")[0] for name in saved if not name.endswith(f".{_TRAINED}")}
    names = {name: {name, *_names(exported(name, spec.shape))} for name, spec in parallel.specs.items()}
    with_state = {id(held.tensor) for held in parallel.parameters if owners & names[held.name]}
    ensure_state(optimizer, lambda parameter: id(parameter) in with_state)
    has_average = any(name.endswith(f".{_TRAINED}") for name in saved)
    if has_average != (averages is not None):
        raise UserError(
            f"{checkpoint} has averaged weights; use the trainer.ema_decay that it was trained with"
            if has_average
            else f"{checkpoint} has no averaged weights; use trainer.ema_decay=0"
        )
    averages = averages or _NO_AVERAGES
    load_weights(checkpoint, parallel, exported, stem, averages=averages)
    states = _optimizer_state(parallel, optimizer, exported, averages)
    of_others = set[str]().union(*names.values()) - set[str]().union(
        *(names[parameter.name] for parameter in parallel.parameters)
    )
    mine = {name for name in saved if name.rpartition(".")[0] not in of_others}
    if differing := mine ^ {fragment.name for part in states for fragment in part.fragments}:
        raise UserError(
            f"{checkpoint} has the state of a different optimizer ({_some(sorted(differing))}); use the optim that it "
            f"was trained with, or {weights_alone(checkpoint)}"
        )
    if folder is not None:
        fragments = {fragment.name: fragment for part in states for fragment in part.fragments}
        _check(folder, fragments, saved)  # saved contains tensors of other stages, too
        _fill(folder, states)


@torch.no_grad()
def load_weights(
    folder: Path,
    parallel: DistributedModel,
    exported: Exported,
    stem: str = MODEL,
    left_out: Collection[str] = (),
    averages: Averages = _NO_AVERAGES,
    *,
    allows_others: bool = False,
) -> None:
    """Load weights from the files ``stem`` of a folder, in any float dtype. Each rank reads only its own shards.

    Parameters in ``left_out`` are checked but not loaded. ``averages`` are loaded as well, if there are any. A folder
    that the run did not write must have passed ``check_names``, which compares tensors that are stored twice. With
    ``allows_others``, tensors that the model lacks are ignored.

    Raises ``UserError`` if the folder contains another model.
    """
    tensors, weights = TensorFolder(folder, stem), _weights(parallel, exported, averages)
    shapes = {name: spec.shape for name, spec in parallel.specs.items()}  # of all stages
    shapes |= {part.name: part.shards.shape for part in weights}
    further = _further_names(parallel.module, exported, shapes)
    known = {*further}
    for name in parallel.buffers.names:  # including other stages'
        known |= _names(exported(name, ()))
    floats = _names(fragment for part in weights if part.local.is_floating_point() for fragment in part.fragments)
    wanted = _fragments(shapes, exported)
    tensors = _named(tensors, wanted, further)
    known |= tensors.specs.keys() if allows_others else set()
    _check(tensors, wanted, known, floats, _unread(parallel.module))
    loaded = [part for part in weights if part.name not in left_out]
    _fill(tensors, loaded)
    _fill_added_rows(tensors, loaded)


def check_names(folder: Path, module: nn.Module, exported: Exported, stem: str = MODEL, otherwise: str = "") -> None:
    """Compare names and shapes in ``folder`` with the parameters of ``module``, which may be on the meta device.

    ``otherwise``: end of the message about another model. Values are read only to compare tensors that are stored
    twice. Raises ``UserError`` if the folder contains another model.
    """
    named = _named_tensors(module)
    shapes = {name: tuple(tensor.shape) for name, tensor in named.items()}
    floats = {name: shapes[name] for name, tensor in named.items() if tensor.is_floating_point()}
    wanted, further = _fragments(shapes, exported), _further_names(module, exported, shapes)
    tensors = _named(TensorFolder(folder, stem), wanted, further)
    _check(tensors, wanted, further, _fragments(floats, exported).keys(), _unread(module), otherwise)
    _refuse_differing(tensors, further)


def unfit_names(folder: Path, module: nn.Module, exported: Exported) -> tuple[frozenset[str], str]:
    """Return the parameters and buffers of ``module`` that ``folder`` has no fitting tensor for, and a description.

    The description lists all differences on one line; it is empty if there are none. Raises ``UserError`` if no tensor
    fits.
    """
    shapes = {name: tuple(tensor.shape) for name, tensor in _named_tensors(module).items()}
    wanted, further = _fragments(shapes, exported), _further_names(module, exported, shapes)
    tensors = _named(TensorFolder(folder), wanted, further)
    found = _differences(tensors, wanted, further, _unread(module))
    wrong = {*found.missing, *found.of_other_shape}
    if wrong >= wanted.keys():
        raise UserError(f"{folder} has no tensor that fits the model: {found}; use the folder of a similar model")
    unfit = {name for name, shape in shapes.items() if wrong & _names(exported(name, shape))}
    fitting = f"{len(wanted) - len(wrong)} of the model's {len(wanted)} tensors are loaded"
    return frozenset(unfit), f"{fitting}: {found}" if found.are_any else ""


def _named_tensors(module: nn.Module) -> dict[str, Tensor]:
    """Return the parameters and the persistent buffers of ``module`` by name."""
    named: dict[str, Tensor] = dict(module.named_parameters())
    return named | {name: module.get_buffer(name) for name in persistent_buffers(module)}


def _fragments(shapes: Mapping[str, tuple[int, ...]], exported: Exported) -> dict[str, Fragment]:
    """Return one fragment per tensor of a checkpoint, by name."""
    return {fragment.name: fragment for name, shape in shapes.items() for fragment in exported(name, shape)}


def _names(fragments: Iterable[Fragment]) -> set[str]:
    return {fragment.name for fragment in fragments}


def _unread(module: nn.Module) -> Collection[str]:
    """Return regular expressions for names of tensors that the transformers model ignores."""
    return getattr(module, "_keys_to_ignore_on_load_unexpected", None) or ()


def tied_parameters(module: nn.Module) -> dict[str, str]:
    """Return the further names of shared parameters, mapped to their first names."""
    further = dict(tied_names(module))
    for path, each in module.named_modules():
        start = f"{path}." if path else ""
        further |= {f"{start}{name}": f"{start}{first}" for name, first in getattr(each, "further_names", {}).items()}
    return further


def _further_names(
    module: nn.Module, exported: Exported, shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, str]:  # fmt: skip
    """Return the alternative names of shared parameters in a folder, mapped to their first names."""
    return {
        theirs.name: ours.name
        for name, first in tied_parameters(module).items()
        if first in shapes
        for theirs, ours in zip(exported(name, shapes[first]), exported(first, shapes[first]), strict=False)
    }


def _named(folder: TensorFolder, wanted: Collection[str], further: Mapping[str, str]) -> TensorFolder:
    """Return ``folder`` with tensors renamed from alternative names in ``further`` to their ``wanted`` names."""
    folder.named_like(wanted)
    for name, first in further.items():
        if name in folder.specs and first not in folder.specs:
            folder.rename(name, first)
    return folder


def _refuse_differing(folder: TensorFolder, further: Mapping[str, str]) -> None:
    """Raise ``UserError`` if ``folder`` contains a shared parameter twice, with different values."""
    for name, first in further.items():
        if name in folder.specs and first in folder.specs and not _are_equal(folder, first, name):
            raise UserError(
                f"{folder.folder} has different values for {first} and {name}, but its config.json ties them to one "
                "parameter; use model.tie_embeddings=false if the model has this key, set "
                f'"tie_word_embeddings": false in config.json, or remove {name} from the weights'
            )


def _are_equal(folder: TensorFolder, name: str, other: str) -> bool:
    spec = folder.specs[name]
    if spec.shape != folder.specs[other].shape:
        return False
    for first in range(0, spec.numel, step := _PIECE_BYTES // spec.dtype.itemsize):
        count = min(step, spec.numel - first)
        if not torch.equal(*(folder.read_elements(stored, first, count).float() for stored in (name, other))):
            return False
    return True


class _Differences(NamedTuple):
    """Tensors that differ between a folder and a model."""

    missing: list[str]
    extra: list[str]
    of_other_shape: dict[str, str]
    """Description of both shapes, by name of the tensor."""

    @property
    def are_any(self) -> bool:
        """Whether there are differences."""
        return any(map(len, self))

    def __str__(self) -> str:
        shapes = [*self.of_other_shape.values()]
        problems = [
            f"{len(self.missing)} tensors of the model are missing ({_some(self.missing)})" if self.missing else "",
            f"{len(self.extra)} tensors are not in the model ({_some(self.extra)})" if self.extra else "",
            f"{len(shapes)} tensors have other shapes ({_some(shapes)})" if shapes else "",
        ]
        return "; ".join(filter(None, problems))


def _differences(
    folder: TensorFolder, wanted: Mapping[str, Fragment], aliases: Collection[str], unread: Collection[str]
) -> _Differences:
    missing = [name for name in wanted if name not in folder.specs]
    # Layers for speculative decoding (GLM-4.5, DeepSeek-V3) are not part of the model.
    drafts = tuple(name.removesuffix(_OF_DRAFTS) for name in folder.specs if name.endswith(_OF_DRAFTS))
    known = {*wanted, *aliases}
    extra = [name for name in folder.specs if name not in known and not name.endswith(_UNUSED)]
    extra = [name for name in extra if folder.specs[name].numel]  # ignore empty tensors, such as absent shared experts
    extra = [name for name in extra if not name.startswith(drafts) and not any(re.search(key, name) for key in unread)]
    shaped = {
        name: f"{name} has shape {list(folder.specs[name].shape)}, not {list(fragment.stored_shape)}"
        for name, fragment in wanted.items()
        if name in folder.specs and folder.specs[name].shape != fragment.stored_shape
    }
    return _Differences(missing, extra, shaped)


def _check(
    folder: TensorFolder,
    wanted: Mapping[str, Fragment],
    aliases: Collection[str] = (),
    floats: Collection[str] = (),
    unread: Collection[str] = (),
    otherwise: str = "",
) -> None:
    found = _differences(folder, wanted, aliases, unread)
    if found.are_any:
        is_described = (folder.folder / CONFIG).is_file()
        keys = f"the model.* keys that it was trained with (see its config.json{_class_in(folder.folder)})"
        raise UserError(
            f"{folder.folder} has a different model than this command describes: {found}; use the task and "
            f"{keys if is_described else 'the settings that it was trained with'}{otherwise}"
        )
    for name in floats:
        if not folder.specs[name].dtype.is_floating_point:
            raise UserError(
                f"{folder.folder}: {name} has dtype {folder.specs[name].dtype}; only floating-point weights can be "
                "trained"
            )


def _class_in(folder: Path) -> str:
    """Return a colon and the class that the ``config.json`` of ``folder`` names, such as ``: LlamaForCausalLM``; empty
    if it names none."""
    try:
        (name,) = read_json(folder / CONFIG)["architectures"]
    except (OSError, ValueError, KeyError, TypeError):
        return ""
    return f": {name}" if isinstance(name, str) else ""


def _fill(folder: TensorFolder, parts: Iterable[Part]) -> None:
    if folder.reads_at_once == 1:
        for part in parts:
            _fill_part(folder, part)
        return
    with ThreadPoolExecutor(folder.reads_at_once, "read") as pool:
        for _ in pool.map(partial(_fill_part, folder), parts):
            pass


@torch.no_grad()
def _fill_part(folder: TensorFolder, part: Part) -> None:
    local, box = part.local, part.held.box
    for fragment in part.fragments:
        ours = box.overlap(fragment.ours)
        if ours.numel:
            into = in_order(local[ours.seen_from(box).indices()], fragment.order)
            theirs = fragment.there(ours)
            _read(folder, fragment, theirs, into.view(theirs.sizes))


def _fill_added_rows(folder: TensorFolder, parts: Iterable[Part]) -> None:
    """Fill the rows that embeddings have in addition to those in ``folder``, for added tokens."""
    for part in parts:
        fragment, shape, box = part.fragments[0], part.shards.shape, part.held.box
        if len(part.fragments) > 1 or fragment.ours.sizes[1:] != shape[1:] or fragment.ours.sizes[:1] == shape[:1]:
            continue
        (first, *rest), (rows, *_) = fragment.ours.sizes, shape
        added = box.overlap(Box((first, *(0,) * len(rest)), (rows - first, *rest)))
        if added.numel:
            mean = mean_of_rows(folder, fragment.name)
            part.local[added.seen_from(box).indices()] = mean[added.columns()].to(part.local)


def mean_of_rows(folder: Readable, name: str) -> Tensor:
    """Return the mean of the rows of a tensor, in fp32: the initial value of a row that is added to it.

    It is summed in fp64 in the order of the rows, so it is bitwise the same on every layout.
    """
    rows, *rest = folder.specs[name].shape
    total, width = np.zeros(prod(rest)), prod(rest)
    for first in range(0, rows, step := max(1, _PIECE_BYTES // 8 // width)):
        count = min(step, rows - first)
        values = folder.read_elements(name, first * width, count * width)
        total += values.double().view(count, width).numpy().sum(axis=0)
    return torch.from_numpy(total / rows).float().view(rest)


def _read(folder: TensorFolder, fragment: Fragment, box: Box, into: Tensor) -> None:
    """Read ``box`` of a tensor into ``into``: read full rows from the file, then select the columns."""
    shape = fragment.shape
    for window in windows_of(shape, _PIECE_BYTES // folder.specs[fragment.name].dtype.itemsize, box):
        first = sum(start * prod(shape[dim + 1 :]) for dim, start in enumerate(window.starts))
        values = folder.read_elements(fragment.name, first, window.numel).view(window.sizes)
        shared = window.overlap(box)
        into[shared.seen_from(box).indices()] = values[shared.seen_from(window).indices()]


def _some(names: list[str]) -> str:
    return ", ".join(names[:_NAMES_SHOWN]) + (", ..." if len(names) > _NAMES_SHOWN else "")
