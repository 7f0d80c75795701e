"""Process groups for the axes of a layout, and exchange of JSON data between ranks."""

import json
from collections.abc import Collection
from datetime import timedelta
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from serried.parallel.layout.mesh import AXES, Layout
from serried.parallel.layout.shard_specs import expert_sharding_dim

_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64)
_HEADER_NUMBERS = 8


class Groups:
    """Process groups of this rank.

    All ranks create them together: with ``make``, or each group when it is first used.

    An axis of size 1 has no group, because torch would create one for every rank.
    """

    def __init__(self, layout: Layout, device_type: str, timeout: timedelta | None = None) -> None:
        """``timeout`` applies to the collectives until ``Session.first_step_done``. None means torch's default."""
        self.layout, self._device_type, self._timeout = layout, device_type, timeout
        self._is_complete = False

    def make(self, *, ties_ends: bool) -> None:
        """Create and connect every group that training needs, before the first step. This is a collective call.

        The order is the same on all ranks. A group first used inside a step would be connected during a collective of
        another group, and NCCL may then hang
        (https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/usage/communicators.html). All groups of an axis are
        connected at once, since each rank belongs to exactly one of them. Repeated calls do nothing.

        Args:
            ties_ends: Whether the first and the last stage share a tied parameter.
        """
        if self._is_complete or not dist.is_initialized():
            return
        layout = self.layout
        self._connect(dist.group.WORLD)
        if layout.is_sharded:
            self._connect(*self.fsdp.get_all_groups())
        if layout.expert > 1:
            self._connect(*self.expert_fsdp.get_all_groups())
        self._connect(self.tensor)
        self._connect(self.context)
        self._connect(self.pipeline)
        self._connect(self.expert)
        self._connect(self.stage)
        if ties_ends:
            self._connect(self.ends)
        self._is_complete = True

    def _connect(self, *groups: dist.ProcessGroup | None) -> None:
        """Create the communicators of ``groups``. Gloo connects groups when they are created."""
        for group in groups if self._has_own_backend else ():
            if group is not None:
                dist.all_reduce(torch.zeros(1, device=self._device_type), group=group)

    @cached_property
    def fsdp(self) -> DeviceMesh:
        """Mesh for FSDP2: (replicate, fsdp), or only (fsdp) without replicas; fsdp is shard x context.

        Context ranks see different tokens of the same samples. They reduce gradients like shard ranks, so parameters
        are sharded over them too.
        """
        layout = self.layout
        return self._mesh(
            pipeline=layout.pipeline, replicate=layout.replicate, fsdp=layout.shard * layout.context,
            tensor=layout.tensor,
        )  # fmt: skip

    @cached_property
    def expert_fsdp(self) -> DeviceMesh:
        """FSDP2 mesh for experts, which are first sharded over ``expert``."""
        layout = self.layout
        return self._mesh(
            pipeline=layout.pipeline, replicate=layout.replicate, fsdp=layout.expert_shard, expert=layout.expert
        )

    def expert_shard_dim(self, parameter: nn.Parameter) -> int:
        """Return the dim along which ``expert_fsdp`` shards ``parameter``, the stacked experts of this rank."""
        return expert_sharding_dim(len(parameter) * self.layout.expert, self.layout)

    @property
    def _has_own_backend(self) -> bool:
        """Whether device and host tensors use different backends. The "fake" backend of plans serves both."""
        return self._device_type != "cpu" and dist.get_backend() != "fake"

    def _mesh(self, **degrees: int) -> DeviceMesh:
        """Return the mesh of ranks that differ from this one only in ``replicate`` and ``fsdp``.

        ``degrees`` are the degrees of all axes, outermost first.

        The groups are created here, because on GPUs ``init_device_mesh`` would split the world group including its
        backend for host tensors. torch 2.11 and 2.13 pass NCCL options to that backend, which causes a warning on every
        rank and a crash in the second run of a process (https://github.com/pytorch/pytorch/pull/192106).
        """
        ranks = torch.arange(self.layout.world).view(*degrees.values())
        names = tuple(axis for axis in ("replicate", "fsdp") if degrees[axis] > 1 or axis == "fsdp")
        groups = []
        for dim, (axis, degree) in enumerate(degrees.items()):
            if axis in names:
                peers = ranks.movedim(dim, -1).reshape(-1, degree).tolist()
                group = self._made(peers) if len(peers) > 1 else dist.group.WORLD
                assert group is not None
                groups.append(group)
        if len(names) == 1:
            return DeviceMesh.from_group(groups[0], self._device_type, mesh_dim_names=names)
        place = (ranks == dist.get_rank()).nonzero()[0].tolist()
        here = tuple(slice(None) if axis in names else at for axis, at in zip(degrees, place, strict=True))
        return DeviceMesh.from_group(groups, self._device_type, ranks[here], mesh_dim_names=names)

    # These are separate groups even if they span the world: point-to-point messages, and all-reduces that overlap with
    # the backward, must not share a communicator with them.

    @cached_property
    def tensor(self) -> dist.ProcessGroup | None:
        """Ranks that shard the matrices (tensor parallelism)."""
        return self._group(self.layout.peers(("tensor",)))

    @cached_property
    def context(self) -> dist.ProcessGroup | None:
        """Ranks that shard the sequences (context parallelism)."""
        return self._group(self.layout.peers(("context",)))

    @cached_property
    def pipeline(self) -> dist.ProcessGroup | None:
        """Ranks that hold the pipeline stages, in order."""
        return self._group(self.layout.peers(("pipeline",)))

    @cached_property
    def expert(self) -> dist.ProcessGroup | None:
        """Ranks that shard the experts (expert parallelism)."""
        layout = self.layout
        firsts = range(0, layout.world, layout.expert)  # contiguous: ``expert`` is the innermost axis of a block
        return self._group([list(range(first, first + layout.expert)) for first in firsts])

    @cached_property
    def stage(self) -> dist.ProcessGroup | None:
        """Ranks that hold the same stages. None means all ranks."""
        axes = [axis for axis in AXES if axis != "pipeline"]
        return self._group(self.layout.peers(axes)) if self.layout.pipeline > 1 else None

    @cached_property
    def ends(self) -> dist.ProcessGroup | None:
        """Ranks of the first and the last stage of a replica, which share tied parameters. None on other ranks."""
        layout = self.layout
        last = layout.pipeline_of(layout.stages - 1)
        return self._group([[ranks[0], ranks[last]] for ranks in layout.peers(("pipeline",))] if last else [])

    def send_form(self, tensor: Tensor, to: int) -> None:
        """Send the shape and dtype of ``tensor`` to pipeline coordinate ``to``."""
        dist.send(torch.tensor(_header(tensor), device=self._device_type), group=self.pipeline, group_dst=to)

    def receive_form(self, source: int) -> Tensor:
        """Receive a shape and dtype from pipeline coordinate ``source``, as an empty tensor on meta."""
        header = torch.empty(_HEADER_NUMBERS, dtype=torch.int64, device=self._device_type)
        dist.recv(header, group=self.pipeline, group_src=source)
        return _described(header)

    def share_form(self, tensor: Tensor | None, source: int) -> Tensor:
        """Return an empty tensor on meta with the shape and dtype of ``tensor``. This is a collective call on all ranks
        of the pipeline.

        ``tensor`` is needed only at pipeline coordinate ``source``.
        """
        header = torch.tensor([0] * _HEADER_NUMBERS if tensor is None else _header(tensor), device=self._device_type)
        dist.broadcast(header, group=self.pipeline, group_src=source)
        return _described(header)

    def gather(self, value: Any) -> list[Any]:
        """Return the ``value`` (JSON data) of every rank, in rank order. This is a collective call on the host."""
        return gather_plain(value)

    def names(self) -> dict[str, str]:
        """Return a mapping from the name of each created group to its axis."""
        made = {
            axis: getattr(self, axis) for axis in ("tensor", "context", "pipeline", "expert", "stage", "ends")
            if axis in self.__dict__ and getattr(self, axis) is not None
        }  # fmt: skip
        for kind, mesh in (("", self.__dict__.get("fsdp")), ("expert ", self.__dict__.get("expert_fsdp"))):
            made |= {kind + dim: mesh.get_group(dim) for dim in mesh.mesh_dim_names} if mesh is not None else {}
        return {group.group_name: axis for axis, group in made.items()}

    def _group(self, peers: Collection[list[int]]) -> dist.ProcessGroup | None:
        return self._made([ranks for ranks in peers if len(ranks) > 1])

    def _made(self, peers: Collection[list[int]]) -> dist.ProcessGroup | None:
        """Create a group for each list of ranks in ``peers``. Return this rank's group; None if it is in none."""
        if not peers:  # a single process has no world group either
            return None
        assert not self._is_complete, "a group that make() leaves out is made in a step"
        # The world group also has a backend for host tensors, with a socket to each peer. These groups only need the
        # device backend.
        backend = dist.get_default_backend_for_device(self._device_type) if self._has_own_backend else None
        mine = None
        for ranks in peers:
            group = dist.new_group(ranks, timeout=self._timeout, backend=backend)  # a collective of all ranks
            if dist.get_rank() in ranks:
                mine = group
        return mine


def _header(tensor: Tensor) -> list[int]:
    """Encode the shape and dtype of ``tensor`` as a list of integers of fixed length."""
    numbers = [_DTYPES.index(tensor.dtype), tensor.ndim, *tensor.shape]
    return numbers + [0] * (_HEADER_NUMBERS - len(numbers))


def _described(header: Tensor) -> Tensor:
    """Return an empty tensor on meta with the shape and dtype in ``header``."""
    dtype, dims, *sizes = header.tolist()
    return torch.empty(sizes[:dims], dtype=_DTYPES[dtype], device="meta")


def gather_plain(value: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """Return the ``value`` (JSON data) of every rank of ``group``, or of all ranks, in rank order. This is a collective
    call on the host.

    It does not use the store of ``Session.gather``, which ends with the launcher and belongs to the training thread.
    After the first step ranks exchange values only with this function, so that a run whose launcher was killed can
    still save.
    """
    if not dist.is_initialized():
        return [value]
    mine = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
    lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(dist.get_world_size(group))]
    dist.all_gather(lengths, torch.tensor([len(mine)]), group=group)
    longest = max(int(length) for length in lengths)
    texts = [torch.zeros(longest, dtype=torch.uint8) for _ in lengths]
    dist.all_gather(texts, nn.functional.pad(mine, (0, longest - len(mine))), group=group)
    return [json.loads(text[: int(length)].numpy().tobytes()) for text, length in zip(texts, lengths, strict=True)]
