"""Recorder of the memory, communication and work of one step, operation by operation."""

from collections import Counter
from collections.abc import Iterable, Sequence
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.distributed_c10d import _resolve_process_group  # functional collectives pass a group by name

from serried.parallel.layout.local_shards import local
from serried.parallel.step_phases import BACKWARD, FORWARD, OPTIMIZER, PIPELINE
from serried.planner.plan_terms import IN_HOST_MEMORY, Shape, Work
from serried.planner.trace.cuda_allocator import Phase, anonymous
from serried.trainer.memory.live_storages import Block, LiveStorages, tensors_in, with_memory

PARAMETERS = "parameters"
GRADIENTS = "gradients"
GATHERED = "gathered"
KEPT, WORKING = "kept for backward", "working memory"

_PRODUCTS = {"mm", "addmm", "addmm_", "bmm", "baddbmm"}
_COPY_THEIR_INPUT = {"logsumexp"}
"""Operations that allocate a copy of their input while they run. The copy is not among their outputs."""
_FREE = {
    "empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "detach", "alias", "record_stream",
    "wait_tensor", "_unsafe_view", "lift_fresh",
}  # fmt: skip
"""Operations other than views that move no bytes."""
_COLLECTIVES = {
    "_allgather_base_": "all_gather", "all_gather_into_tensor": "all_gather",
    "_reduce_scatter_base_": "reduce_scatter", "reduce_scatter_tensor": "reduce_scatter",
    "allreduce_": "all_reduce", "all_reduce": "all_reduce",
    "alltoall_base_": "all_to_all", "all_to_all_single": "all_to_all",
    "broadcast_": "broadcast", "send": "send",
}  # fmt: skip


class Collective(NamedTuple):
    """A collective operation."""

    kind: str
    group: str
    """Name of its process group."""
    ranks: int
    bytes: int
    """Bytes that this rank sends in a ring: (n - 1)/n of the full tensor to gather or scatter, twice that to sum."""


def known_workspace(name: str, inputs: Sequence[Tensor]) -> int:
    """Return the bytes that an operation allocates and frees while it runs."""
    if name == "index":  # converts int32 indices to int64
        return sum(2 * index.nbytes for index in inputs[1:] if index.dtype == torch.int32)
    return inputs[0].nbytes if name in _COPY_THEIR_INPUT else 0


def collective_of(operation: Any, args: Any) -> Collective | None:
    """Return the collective of ``operation``; None if it is another operation or sends nothing.

    Raises:
        NotImplementedError: the collective is unknown.
    """
    name, namespace = operation.overloadpacket.__name__, operation.namespace
    if namespace not in ("c10d", "_c10d_functional") or name in ("wait_tensor", "recv_", "barrier"):
        return None
    if name not in _COLLECTIVES:
        raise NotImplementedError(name)
    kind, is_functional = _COLLECTIVES[name], namespace == "_c10d_functional"
    if is_functional:
        group_name: Any = next(arg for arg in reversed(args) if isinstance(arg, str))
        group, whole = _resolve_process_group(group_name), args[0]
    else:
        boxed = [arg for arg in args if isinstance(arg, torch.ScriptObject)]
        group = next(ProcessGroup.unbox(box) for box in boxed if "ProcessGroup" in str(box._type()))
        whole = args[1] if kind in ("all_gather", "reduce_scatter", "all_to_all") else args[0][0]
    ranks, size = group.size(), whole.nbytes
    if kind == "all_gather":
        size *= ranks - 1
    elif kind == "reduce_scatter":
        size = size // ranks * (ranks - 1)
    elif kind == "all_reduce":
        size = 2 * size * (ranks - 1) // ranks
    elif kind == "broadcast":
        size = size if group.rank() == 0 else 0
    elif kind == "all_to_all":
        counts = args[2] if is_functional else args[4]
        own = counts[group.rank()] if counts else len(whole) // ranks
        size = size * (len(whole) - own) // max(1, len(whole))
    return Collective(kind, group.group_name, ranks, size)


def _shown(block: Block) -> str:
    """Return the kind of ``block`` in a plan."""
    if block.kind in (FORWARD, BACKWARD, PIPELINE, OPTIMIZER):
        return KEPT if block.kind == FORWARD and block.freed not in ("", FORWARD) else WORKING
    return block.kind


class Peak(NamedTuple):
    """Memory at the peak of a step."""

    phase: str
    parts: dict[str, int]
    by_phase: dict[str, int]


class StepTrace(LiveStorages):
    """Records storages, collectives and operations from ``begin`` on."""

    def __init__(self, *, is_pipeline: bool = False) -> None:
        """``is_pipeline``: whether there are pipeline stages. In the first step, their ranks read int32 flags that
        report whether shapes are known on all ranks."""
        super().__init__()
        if is_pipeline:
            self._flags = torch.bool, torch.int32
        self.phase = FORWARD
        self.forwards = 0
        self.exchanges: Counter[tuple[int, str, Collective]] = Counter()
        """Count of each collective by (number of forwards before it, phase, collective)."""
        self.work: dict[str, _Tally] = {}
        """Operations by phase."""
        self._events: list[tuple[Block, int, str]] = []
        """(Block, growth in bytes, phase) of each change of a storage."""
        self._phases: list[list[tuple[Block, int, torch.cpu.Stream]]] = [[]]
        """(Storage, size, FSDP2 stream that allocates it) of all requests, by phase."""
        self._resize = torch.UntypedStorage.resize_

    def begin(self) -> None:
        """Clear all recorded events. Live storages stay recorded."""
        for kind in (FORWARD, BACKWARD, PIPELINE, OPTIMIZER):
            self.label("other", [], kind)
        self._events = [(block, block.size, "") for block, _ in self._live.values()]
        self.forwards = 0
        self.exchanges.clear()
        self.work.clear()
        self._flags = (torch.bool,)

    def enter(self, phase: str) -> None:
        """Begin ``phase``. Storages that a backward leaves behind count as gradients."""
        if self.phase == BACKWARD != phase:
            self.label(GRADIENTS, [], BACKWARD)
        self.forwards += phase == FORWARD
        self.phase = phase
        self._phases.append([])

    def label(self, kind: str, tensors: Iterable[Tensor], instead_of: str | None = None) -> None:
        """Label ``tensors``, and all live storages labelled ``instead_of``, as ``kind``."""
        for tensor in tensors:
            storage = local(tensor).untyped_storage()
            self.record(storage, storage.size())
            self._live[storage._cdata][0].kind = kind
        for block, _ in self._live.values():
            if block.kind == instead_of:
                block.kind = kind

    def peak(self) -> Peak:
        """Return the peak since ``begin``."""
        now = 0
        most = -1
        at = 0
        host: Counter[str] = Counter()
        apart: Counter[str] = Counter()
        by_phase: Counter[str] = Counter()
        for number, (block, change, phase) in enumerate(self._events):
            is_apart = block.kind.endswith(IN_HOST_MEMORY)
            here = now + change * (not is_apart or phase == BACKWARD)  # gradients are on the device for a moment
            now += change * (not is_apart)
            by_phase[phase] = max(by_phase[phase], here)
            if here > most:
                most, at = here, number
            if is_apart:
                host[block.kind] += change
                apart |= host
        parts: Counter[str] = Counter()
        for block, change, _ in self._events[: at + 1]:
            parts[_shown(block)] += change
        parts |= apart
        parts[WORKING] += most - sum(size for kind, size in parts.items() if not kind.endswith(IN_HOST_MEMORY))
        by_phase.pop("", None)
        return Peak(self._events[at][2], {kind: size for kind, size in parts.items() if size}, dict(by_phase))

    def requests(self) -> list[Phase]:
        """Return all allocator requests so far, including the set-up."""
        streams: dict[torch.cpu.Stream, int] = {}
        return anonymous(
            [
                (block, size, streams.setdefault(stream, len(streams)))
                for block, size, stream in phase
                if not block.kind.endswith(IN_HOST_MEMORY)
            ]
            for phase in self._phases
        )

    def resize(self, block: Block, size: int) -> None:
        self._events.append((block, size - block.size, self.phase))
        stream = torch.cpu.current_stream()
        self._phases[-1] += [(block, held, stream) for held in (0,) * (block.size > 0) + (size,) * (size > 0)]
        super().resize(block, size)

    def __enter__(self) -> "StepTrace":
        # FSDP2 frees and allocates gathered parameters with this method, which dispatch modes do not see.
        def resize(storage: torch.UntypedStorage, size: int) -> Any:
            result = self._resize(storage, size)
            self.record(storage, size)
            self._live[storage._cdata][0].kind = GATHERED
            return result

        torch.UntypedStorage.resize_ = resize  # type: ignore[method-assign, assignment]
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        torch.UntypedStorage.resize_ = self._resize  # type: ignore[method-assign]
        super().__exit__(*error)

    def computed(self, operation: Any, name: str, args: Any, kwargs: Any, outputs: list[Tensor]) -> None:
        inputs = tensors_in((args, kwargs))
        if size := known_workspace(name, inputs) + self._fetched(operation, name, inputs):
            block = Block(WORKING)
            self.resize(block, size)
            self.resize(block, 0)
        if getattr(operation, "namespace", "") in ("c10d", "_c10d_functional"):
            if collective := collective_of(operation, args):
                self.exchanges[self.forwards, self.phase, collective] += 1
        elif not getattr(operation, "is_view", False) and name not in _FREE:
            self.work.setdefault(self.phase, _Tally()).add(name, inputs, outputs)

    def _fetched(self, operation: Any, name: str, inputs: Sequence[Tensor]) -> int:
        """Return the bytes of host-memory parameters that a device operation reads."""
        if self.phase == OPTIMIZER or name in _FREE or getattr(operation, "is_view", False):
            return 0
        blocks = ((self._live.get(x.untyped_storage()._cdata), x.nbytes) for x in with_memory(inputs))
        return sum(size for live, size in blocks if live and live[0].kind == PARAMETERS + IN_HOST_MEMORY)


class _Tally:
    """Operations of a phase."""

    def __init__(self) -> None:
        self._products: Counter[Shape] = Counter()
        self._attention_flops = self._moved_bytes = self._launches = 0

    def add(self, name: str, inputs: list[Tensor], outputs: list[Tensor]) -> None:
        self._launches += 1
        if name in _PRODUCTS:
            *_, a, b = inputs
            self._products[a.shape[-2], b.shape[-1], a.shape[-1]] += prod(a.shape[:-2])
        elif name == "_grouped_mm":
            self._add_grouped(*inputs[:2])
        elif "scaled_dot_product" in name:
            is_backward = "backward" in name
            query, key = inputs[is_backward], inputs[is_backward + 1]
            self._attention_flops += (10 if is_backward else 4) * query.numel() * key.shape[-2]
        else:
            self._moved_bytes += sum(tensor.nbytes for tensor in [*inputs, *outputs])

    def _add_grouped(self, a: Tensor, b: Tensor) -> None:
        """Count the products of groups of rows, or of columns, as if all groups had the same size."""
        if b.ndim == 3:
            self._products[a.shape[0] // len(b), b.shape[-1], a.shape[-1]] += len(b)
        else:
            self._products[a.shape[-2], b.shape[-1], a.shape[-1]] += 1

    def work(self) -> Work:
        return Work(self._products, self._attention_flops, self._moved_bytes, self._launches)
