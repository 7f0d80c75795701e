"""Bytes sent by collectives."""

from collections import Counter
from typing import Any

import torch
from torch import Tensor
from torch.distributed.distributed_c10d import _resolve_process_group  # functional collectives name their group
from torch.utils._python_dispatch import TorchDispatchMode


class Wire(TorchDispatchMode):
    """Dispatch mode that counts the bytes this rank sends in ring algorithms.

    An all-gather or reduce-scatter sends (n - 1)/n of a tensor, an all-reduce twice as much.
    """

    def __init__(self) -> None:
        super().__init__()
        self.bytes: Counter[str] = Counter()
        """Bytes by name of the operation."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = function.overloadpacket.__name__.strip("_")
        if function.namespace == "c10d":
            self.bytes[name] += self._sent(name, args)
        elif function.namespace == "_c10d_functional" and name != "wait_tensor":
            name, size = self._functional(name, args)
            self.bytes[name] += size
        return function(*args, **(kwargs or {}))

    def _functional(self, name: str, args: Any) -> tuple[str, int]:
        """Return the name of the equivalent in-place operation, and the bytes."""
        whole = _size(args[0])
        if name == "all_gather_into_tensor":
            return "allgather_base", whole * (args[1] - 1)
        if name == "reduce_scatter_tensor":
            return "reduce_scatter_base", whole * (args[2] - 1) // args[2]
        if name == "all_reduce":
            ranks = _resolve_process_group(args[2]).size()
            return "allreduce", 2 * whole * (ranks - 1) // ranks
        if name == "all_to_all_single":
            own = args[2][_resolve_process_group(args[3]).rank()]
            return "alltoall_base", whole * (len(args[0]) - own) // max(1, len(args[0]))
        raise NotImplementedError(name)

    def _sent(self, name: str, args: Any) -> int:
        if name == "allgather_base":
            _, own, group = args[:3]
            return _size(own) * (_ranks(group) - 1)
        if name == "reduce_scatter_base":
            own, _, group = args[:3]
            return _size(own) * (_ranks(group) - 1)
        if name == "allreduce":
            (tensor,), group = args[:2]
            return 2 * _size(tensor) * (_ranks(group) - 1) // _ranks(group)
        if name == "alltoall_base":
            _, sent, group, _, counts = args[:5]
            own = counts[torch.distributed.get_rank()] if counts else len(sent) // _ranks(group)
            return _size(sent) * (len(sent) - own) // max(1, len(sent))
        raise NotImplementedError(name)


def _size(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _ranks(group: Any) -> int:
    return torch.distributed.ProcessGroup.unbox(group).size()
