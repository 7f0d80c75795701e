"""Tracking of the storages of fake tensors, from their creation to their release."""

import weakref
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass

from serried.parallel.layout.local_shards import local
from serried.parallel.step_phases import OPTIMIZER

_DEVICE = torch.ops.prim.device.default


class Block:
    """Record of a storage, from its creation to its release."""

    def __init__(self, kind: str) -> None:
        self.kind, self.size = kind, 0
        self.freed = ""
        """Phase in which the storage was freed; empty while it exists."""


class LiveStorages(TorchDispatchMode):
    """Dispatch mode that counts the bytes of all operation outputs that still exist.

    If the host reads a flag from a tensor, it gets the value for a regular step: no check fails, no mask hides
    everything, and no step is rejected.
    """

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0
        """Bytes of all existing storages."""
        self.phase = ""
        """Kind that is recorded for newly created storages."""
        self._flags: tuple[torch.dtype, ...] = (torch.bool,)
        """dtypes that count as flags."""
        self._live: dict[int, tuple[Block, Any]] = {}
        """Existing storages by address, with a weak reference whose callback records the release."""

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if operation is _DEVICE:  # torch queries the device of a fake tensor more often than it computes
            device = getattr(args[0], "fake_device", None)
            return operation(*args) if device is None else device
        name = operation.overloadpacket.__name__ if hasattr(operation, "overloadpacket") else str(operation)
        if name == "equal" or (name == "_local_scalar_dense" and args[0].dtype in self._flags):
            return self.phase != OPTIMIZER
        result = operation(*args, **(kwargs or {}))
        outputs = tensors_in(result)
        for tensor in with_memory(outputs):
            storage = tensor.untyped_storage()
            if storage._cdata not in self._live:
                self.record(storage, storage.size())
        self.computed(operation, name, args, kwargs, outputs)
        return result

    def computed(self, operation: Any, name: str, args: Any, kwargs: Any, outputs: list[Tensor]) -> None:
        """Hook that is called after each operation. Its ``outputs`` are already recorded."""

    def record(self, storage: torch.UntypedStorage, size: int) -> None:
        """Record that ``storage`` has ``size`` bytes now."""
        key = storage._cdata
        if key not in self._live:
            self._live[key] = Block(self.phase), weakref.ref(storage, lambda _: self._end(key))
        block, _ = self._live[key]
        if size != block.size:
            self.resize(block, size)

    def resize(self, block: Block, size: int) -> None:
        """Record that ``block`` has ``size`` bytes now."""
        self.bytes += size - block.size
        block.size, block.freed = size, "" if size else self.phase

    def _end(self, key: int) -> None:
        block, _ = self._live.pop(key)
        self.resize(block, 0)


def tensors_in(tree: Any) -> list[Tensor]:
    """Return the tensors in nested sequences and dictionaries. Faster than torch's ``tree_leaves``."""
    if isinstance(tree, Tensor):
        return [local(tree)]
    if isinstance(tree, dict):
        tree = tree.values()
    elif not isinstance(tree, tuple | list):
        return []
    return [tensor for branch in tree for tensor in tensors_in(branch)]


def with_memory(tensors: Iterable[Tensor]) -> Iterator[Tensor]:
    """Yield the tensors that store the values of ``tensors``.

    For a tensor subclass, such as torchao's float8, these are its inner tensors.
    """
    for tensor in tensors:
        if is_traceable_wrapper_subclass(tensor):
            names, _ = tensor.__tensor_flatten__()
            yield from (getattr(tensor, name) for name in names)
        else:
            yield tensor
