"""This rank's shards of the tensors of a model."""

import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from serried.parallel.layout.mesh import Layout
from serried.parallel.layout.shard_specs import Box, ShardSpec
from serried.parallel.nf4 import is_packed

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor
    from typing_extensions import TypeIs


class HeldTensor(NamedTuple):
    """A parameter or buffer together with its shard on this rank."""

    name: str
    tensor: Tensor
    """The module's tensor while nothing is gathered. Pass this tensor to optimizers."""
    spec: ShardSpec
    box: Box

    @classmethod
    def whole(cls, name: str, tensor: Tensor, holders: tuple[int, ...] = (0,)) -> "HeldTensor":
        """Return ``tensor`` as a ``HeldTensor`` replicated on all ranks with pipeline coordinates ``holders``."""
        shape = tuple(tensor.shape)
        return cls(name, tensor, ShardSpec(name, shape, (), holders), Box((0,) * len(shape), shape))

    @property
    def local(self) -> Tensor:
        """This rank's shard, as a plain tensor that shares its memory."""
        return local(self.tensor)


def is_sharded(tensor: Tensor) -> "TypeIs[DTensor]":
    """Return whether ``tensor`` is a DTensor.

    Importing ``torch.distributed.tensor`` is slow, so it is not imported here. Until it is imported, no DTensor exists.
    """
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def local(tensor: Tensor) -> Tensor:
    """Return this rank's shard, as a plain tensor that shares its memory."""
    return tensor.to_local() if is_sharded(tensor) else tensor


def held_parameters(
    modules: Iterable[nn.Module], specs: Mapping[str, ShardSpec], layout: Layout, rank: int = 0
) -> list[HeldTensor]:
    """Return every parameter of ``modules``, the stages on this rank, once, under the first of its names."""
    place = layout.coordinates(rank)
    found = [
        HeldTensor(name, parameter, specs[name], specs[name].box(layout, place))
        for module in modules
        for name, parameter in module.named_parameters()
    ]
    for shard in found:  # the specs must agree with the sharding by torch
        shape = tuple(shard.local.shape)
        assert shape == shard.box.sizes, f"{shard.name} is {list(shape)} here, expected {list(shard.box.sizes)}"
    expected = {name for name, spec in specs.items() if place.pipeline in spec.holders}
    names = {shard.name for shard in found}
    assert expected == names, f"this rank lacks {expected - names}"
    return found


def unshardable(module: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters that FSDP2 cannot shard and that stay replicated: scalars and integer tensors."""
    named = module.named_parameters()
    return {name: tensor for name, tensor in named if not tensor.ndim or not tensor.is_floating_point()}


def persistent_buffers(module: nn.Module) -> list[str]:
    """Return the names of the persistent buffers of ``module``. Call this before sharding."""
    names = [name for name, _ in module.named_buffers()]
    state = module.state_dict() if names else {}
    return [name for name in names if name in state]


def tied_names(module: nn.Module) -> dict[str, str]:
    """Return a mapping from each further name of a shared parameter to its first name."""
    first: dict[nn.Parameter, str] = {}
    return {
        name: first[parameter]
        for name, parameter in module.named_parameters(remove_duplicate=False)
        if first.setdefault(parameter, name) != name
    }


def tie(module: nn.Module, names: Mapping[str, str]) -> None:
    """Tie parameters again. ``names`` is the result of ``tied_names``."""
    for name, first in names.items():
        owner, _, last = name.rpartition(".")
        setattr(module.get_submodule(owner), last, module.get_parameter(first))


@torch.no_grad()
def set_types(module: nn.Module, trained: torch.dtype | None = None, frozen: torch.dtype | None = None) -> None:
    """Cast trained floating-point parameters to ``trained`` and the others to ``frozen``.

    With None, dtypes of less than 32 bits are cast to fp32, since training adds small updates.
    """
    for parameter in module.parameters():
        if is_packed(parameter) or not parameter.is_floating_point():
            continue  # packed weights are raw bytes
        wanted = trained if parameter.requires_grad else frozen
        if wanted is not None:
            parameter.data = parameter.data.to(wanted)
        elif parameter.element_size() < 4:
            parameter.data = parameter.data.float()


@contextmanager
def evaluating(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Context manager that puts modules in evaluation mode, and restores each module's mode afterwards."""
    training = [submodule for module in modules for submodule in module.modules() if submodule.training]
    for submodule in training:
        submodule.training = False
    try:
        yield
    finally:
        for submodule in training:
            submodule.training = True


def empty(module: nn.Module) -> None:
    """Replace the parameters and buffers of ``module`` by uninitialized tensors on the CPU."""
    made: dict[Tensor, Tensor] = {}
    for submodule in module.modules():
        holders: tuple[Any, ...] = (submodule._parameters, submodule._buffers)
        for kept in holders:  # setattr would refuse a plain tensor for a parameter
            for name, tensor in kept.items():
                if tensor is None:
                    continue
                if tensor not in made:
                    data = made[tensor] = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
                    if isinstance(tensor, nn.Parameter):
                        made[tensor] = nn.Parameter(data, tensor.requires_grad)
                kept[name] = made[tensor]
