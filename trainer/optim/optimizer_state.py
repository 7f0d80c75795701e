"""Optimizer state: its content in a checkpoint and its size in bytes.

A checkpoint stores tensors in its optimizer files as ``<parameter>.<key>``, and numbers and text in ``state.json``.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import cache, partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from serried.configs.errors import UserError
from serried.configs.schema.sections import OptimSection
from serried.parallel.layout.local_shards import is_sharded
from serried.parallel.optim.matrix_exchange import Matrices, matrix_names
from serried.trainer.optim.optimizer import build_optimizer, create_state, parameters_of

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

_FP32_BYTES = 4
_PROBE_ROWS = 64
_SET_BY_THE_RUN = ("params", "name", "lr", "lr_scale")
"""Keys of a parameter group that are not saved, because each step or each start sets them."""

GroupValues = dict[str, dict[str, Any]]


def tensor_state(optimizer: torch.optim.Optimizer, parameter: Tensor) -> dict[str, Tensor]:
    """Return the tensors that the optimizer keeps for ``parameter``, by name.

    Raises:
        UserError: the parameter is sharded, and a state tensor is neither sharded like it nor listed in
            ``whole_state``.
    """
    tensors = {key: value for key, value in optimizer.state.get(parameter, {}).items() if isinstance(value, Tensor)}
    if not is_sharded(parameter):
        return tensors
    for key, value in tensors.items():
        if value.ndim and key not in _whole_state(optimizer) and not _is_sharded_like(parameter, value):
            raise UserError(
                f"{type(optimizer).__name__} keeps {key} of shape {list(value.shape)} for a sharded parameter of shape "
                f"{list(parameter.shape)}, so no other layout could resume from it; use parallel=ddp, or another "
                "optimizer (optim=...)"
            )
    return tensors


def _whole_state(optimizer: torch.optim.Optimizer) -> Collection[str]:
    """Return the names of unsharded state, which every rank holds in full."""
    return getattr(optimizer, "whole_state", ())


def _is_sharded_like(parameter: "DTensor", value: Tensor) -> bool:
    """Return whether ``value`` is sharded like ``parameter``. The last dim may differ in size if it is not sharded."""
    is_alike = is_sharded(value) and value.placements == parameter.placements
    if not is_alike or any(placement.is_shard(parameter.ndim - 1) for placement in parameter.placements):
        return is_alike and value.shape == parameter.shape
    return value.shape[:-1] == parameter.shape[:-1]


def ensure_state(optimizer: torch.optim.Optimizer, has_state: Callable[[Tensor], bool]) -> None:
    """Create state for exactly the parameters that satisfy ``has_state``, before a checkpoint is loaded into it.

    This may overwrite the parameters: load them too.
    """
    parameters = parameters_of(optimizer)
    if any(has_state(parameter) and not optimizer.state.get(parameter) for parameter in parameters):
        create_state(optimizer)
    for parameter in parameters:
        if not has_state(parameter):
            optimizer.state.pop(parameter, None)


def group_values(optimizer: torch.optim.Optimizer) -> GroupValues:
    """Return the plain values of each parameter group, by group name. Some optimizers keep counters there.

    Raises:
        UserError: a group contains a tensor, or a key of ``optimizer.state`` is not a parameter. Checkpoints cannot
            store them.
    """
    kind, known = type(optimizer).__name__, {id(parameter) for parameter in parameters_of(optimizer)}
    groups = [(key, value) for group in optimizer.param_groups for key, value in group.items()]
    lost = [
        f"{key} of a parameter group"
        for key, value in groups
        if key not in _SET_BY_THE_RUN and isinstance(value, Tensor)
    ]
    lost += [f"state of {key!r}" for key in optimizer.state if id(key) not in known]
    if lost:
        raise UserError(
            f"{kind} keeps {lost[0]}, but checkpoints do not store it; keep tensors in optimizer.state[parameter], and "
            "numbers there or in the group"
        )
    return {
        group["name"]: {key: value for key, value in group.items() if key not in _SET_BY_THE_RUN and _is_plain(value)}
        for group in optimizer.param_groups
    }


def plain_state(
    optimizer: torch.optim.Optimizer, named: Iterable[tuple[str, Tensor]], configured: GroupValues
) -> dict[str, Any]:
    """Return the optimizer state other than tensors as JSON data.

    The result contains the state of the parameters ``named``, and the group values that differ from ``configured``, the
    result of ``group_values`` at the start.

    Raises:
        UserError: a value is neither a tensor nor JSON data.
    """
    states: dict[str, dict[str, Any]] = {}
    for name, parameter in named:
        for key, value in optimizer.state.get(parameter, {}).items():
            if not isinstance(value, Tensor):
                states.setdefault(name, {})[key] = value
                if not _is_plain(value):
                    raise UserError(
                        f"{type(optimizer).__name__} keeps a {type(value).__name__} ({key} of {name}), but checkpoints "
                        "can store only tensors, numbers and text; use another optimizer (optim=...)"
                    )
    groups = {
        name: {key: value for key, value in values.items() if value != configured[name].get(key)}
        for name, values in group_values(optimizer).items()
    }
    return {"parameters": states, "groups": {name: values for name, values in groups.items() if values}}


def load_plain_state(
    optimizer: torch.optim.Optimizer,
    named: Iterable[tuple[str, Tensor]],
    configured: GroupValues,
    state: Mapping[str, Any],
) -> None:
    """Load ``state``, a result of ``plain_state``, into the parameters ``named``.

    Entries for other parameters, such as parameters of other pipeline stages, are ignored.
    """
    for name, parameter in named:
        if name in state["parameters"]:
            optimizer.state[parameter].update(state["parameters"][name])
    for group in optimizer.param_groups:
        group.update(configured[group["name"]] | state["groups"].get(group["name"], {}))


def _is_plain(value: Any) -> bool:
    return value is None or isinstance(value, bool | int | float | str)


class StateBytes(NamedTuple):
    """Size in bytes of the optimizer state of one parameter."""

    per_element: float
    """Bytes per element of state that is sharded like the parameter."""
    whole: int = 0
    """Bytes of state that every rank holds in full."""


def state_bytes(section: OptimSection, *, is_in_block: bool = True, ndim: int = 2) -> StateBytes:
    """Return the size of the optimizer state of a parameter, measured on a small tensor with ``ndim`` dims.

    ``is_in_block``: whether the parameter is a matrix of a block. The size for Adam is a constant: a measurement would
    import torch._dynamo, as torch's optimizers do, which takes as long as a plan.
    """
    if section.name in ("adamw", "adam"):
        return StateBytes(2 * _FP32_BYTES)
    return _measured(section, torch.zeros((_PROBE_ROWS,) * ndim), is_in_block=is_in_block)


def _measured(section: OptimSection, values: Tensor, *, is_in_block: bool) -> StateBytes:
    parameter = nn.Parameter(values)
    try:
        parts = {"matrices": partial(Matrices.whole, [parameter] * is_in_block)}
        optimizer = build_optimizer([("", parameter)], section.model_copy(update={"groups": {}}), parts)
        create_state(optimizer)
    except Exception:  # the optimizer may not support the CPU: assume AdamW's size
        return StateBytes(2 * _FP32_BYTES)
    bytes_of = {key: value.nbytes for key, value in tensor_state(optimizer, parameter).items() if value.ndim}
    whole = sum(bytes_of.pop(key, 0) for key in _whole_state(optimizer))
    return StateBytes(sum(bytes_of.values()) / parameter.numel(), whole)


def state_bytes_by_name(
    section: OptimSection, shapes: Mapping[str, Sequence[int]], blocks: Collection[str]
) -> dict[str, StateBytes]:
    """Return the size of the optimizer state of each parameter. ``blocks``: names of the model's blocks."""

    @cache
    def of(shape: tuple[int, ...], is_in_block: bool) -> StateBytes:
        small = state_bytes(section, is_in_block=is_in_block, ndim=min(len(shape), 2))
        if not small.whole:
            return small
        return _measured(section, torch.empty(shape, device="meta"), is_in_block=is_in_block)

    matrices = matrix_names(shapes, blocks)
    return {name: of(tuple(shape), name in matrices) for name, shape in shapes.items()}
