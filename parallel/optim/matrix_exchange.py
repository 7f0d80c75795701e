"""The matrices of a model's blocks, for an optimizer that needs whole ones: one rank computes each for all others.

Which parts are where follows from the shard specs. The matrices of a pipeline stage are dealt to all ranks that hold
parts or copies of them, so that replicas do not compute the same. In a round every rank sends its parts to the owners,
and gets its parts of the results back.
"""

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from math import prod
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from serried.parallel.distributed_model import DistributedModel
from serried.parallel.layout.local_shards import HeldTensor
from serried.parallel.layout.mesh import Layout
from serried.parallel.layout.shard_specs import Box, ShardSpec

_ROUND_ELEMENTS = 2**25
"""Most bytes of whole matrices that a rank owns in a round, unless one matrix is larger."""
_EXPERTS = "experts"

Place = tuple[slice, ...]


class Dealt(NamedTuple):
    """One matrix, and the rank that computes it. Ranks are numbered within a pipeline stage."""

    parameter: int
    """Number of the parameter."""
    whole: Box
    """Box of the matrix in the parameter: all of it, or an entry of a stack."""
    parts: tuple[tuple[Box, tuple[int, ...]], ...]
    """Boxes of the parameter, which make up the matrix, with the ranks that hold each."""
    owner: int
    round: int


class _Round(NamedTuple):
    """Messages of this rank in a round: (number of a parameter or an owned matrix, place in it) for each peer."""

    shapes: list[tuple[int, ...]]
    """Shapes of the matrices that this rank owns."""
    sent: list[list[tuple[int, Place]]]
    received: list[list[tuple[int, Place]]]
    returned: list[list[tuple[int, Place]]]
    results: list[list[tuple[int, Place]]]


class Matrices:
    """The trained matrices in the blocks of a model: parameters of two dims, and entries of stacked experts.

    Embeddings, the head, norms, biases and kernels of convolutions are none of them.
    """

    def __init__(
        self, held: Sequence[HeldTensor], layout: Layout, rank: int, group: dist.ProcessGroup | None,
        dtype: torch.dtype, transposed: Collection[str] = (),
    ) -> None:  # fmt: skip
        """``held``: parameters that are such matrices, the same on all ranks of ``group``. ``group``: the ranks of the
        pipeline stage of ``rank``; None: all ranks. ``dtype``: of whole matrices. ``transposed``: names of parameters
        that are [inputs, outputs]."""
        self.dtype = dtype
        self._parameters = [shard.tensor for shard in held]
        self._shapes = {shard.tensor: shard.spec.shape[-2:][:: -1 if shard.name in transposed else 1] for shard in held}
        self._ranks, self._group = layout.world // layout.pipeline, group
        pipeline, me = divmod(rank, self._ranks)
        dealt = deal([shard.spec for shard in held], layout, pipeline)
        self._rounds = _rounds(dealt, [shard.box for shard in held], me, self._ranks, layout.block)

    @classmethod
    def of(cls, model: DistributedModel, blocks: Collection[str], low_dtype: torch.dtype | None) -> "Matrices":
        """Return the matrices of ``model`` in its ``blocks``. A collective of all ranks.

        They are formed in bf16 if the model computes in a ``low_dtype``, and else in fp32. There must be one at least.
        """
        names = matrix_names({name: spec.shape for name, spec in model.specs.items()}, blocks)
        held = [shard for shard in model.parameters if shard.tensor.requires_grad and shard.name in names]
        rank = dist.get_rank() if dist.is_initialized() else 0
        dtype = torch.float32 if low_dtype is None else torch.bfloat16  # fp16 has too few exponents for gradients
        return cls(held, model.layout, rank, model.groups.stage, dtype, _transposed(model.modules))

    @classmethod
    def whole(cls, parameters: Iterable[Tensor], dtype: torch.dtype = torch.float32) -> "Matrices":
        """Return the matrices among ``parameters``, in one process: the trained ones of two dims."""
        matrices = (parameter for parameter in parameters if parameter.ndim == 2 and parameter.requires_grad)
        held = [HeldTensor.whole("", matrix) for matrix in matrices]
        return cls(held, Layout("single"), 0, None, dtype)

    def __contains__(self, parameter: Tensor) -> bool:
        """Whether ``parameter`` is a matrix, or a stack of them."""
        return parameter in self._shapes

    def shape(self, parameter: Tensor) -> tuple[int, int]:
        """Return outputs and inputs of the whole matrix: rows and columns, but for a ``Conv1D``."""
        outputs, inputs = self._shapes[parameter]
        return outputs, inputs

    @torch.no_grad()
    def replace(self, parts: Mapping[Tensor, Tensor], function: Callable[[Tensor], Tensor]) -> None:
        """Replace matrices by ``function`` of them, in place. ``parts`` holds this rank's parts.

        ``parts``: of each parameter a plain tensor with the shape that is here. ``function`` gets [matrices, rows,
        columns] of ``self.dtype`` and returns as many. All ranks must call this together, with all parameters.
        """
        ours = [parts[parameter] for parameter in self._parameters]
        for messages in self._rounds:
            whole = [ours[0].new_empty(shape, dtype=self.dtype) for shape in messages.shapes]
            self._exchange(_at(ours, messages.sent), _at(whole, messages.received))
            whole = _by_shape(whole, function)
            self._exchange(_at(whole, messages.returned), _at(ours, messages.results))

    def _exchange(self, sent: list[list[Tensor]], received: list[list[Tensor]]) -> None:
        parts = [part.to(self.dtype).reshape(-1) for peer in sent for part in peer]
        views = [view for peer in received for view in peer]
        empty = torch.empty(0, dtype=self.dtype, device=self._parameters[0].device)
        outgoing = torch.cat([empty, *parts])
        arrived = outgoing
        if self._ranks > 1:
            taken, given = ([sum(part.numel() for part in peer) for peer in peers] for peers in (received, sent))
            arrived = outgoing.new_empty(sum(taken))
            dist.all_to_all_single(arrived, outgoing, taken, given, group=self._group)
        for view, values in zip(views, arrived.split([view.numel() for view in views]), strict=True):
            view.copy_(values.view(view.shape))


def matrix_names(shapes: Mapping[str, Sequence[int]], blocks: Collection[str]) -> set[str]:
    """Return the names of the matrices, and of the stacked experts, among parameters of these ``shapes``."""
    prefixes = tuple(f"{block}." for block in blocks)
    return {
        name
        for name, shape in shapes.items()
        if name.startswith(prefixes) and (len(shape) == 2 or (len(shape) == 3 and _EXPERTS in name.split(".")))
    }


def _transposed(modules: Iterable[nn.Module]) -> set[str]:
    """Return the names of the weights of ``Conv1D`` layers, which FSDP2 may have wrapped."""
    named = (pair for module in modules for pair in module.named_modules())
    return {f"{name}.weight" for name, module in named if "Conv1D" in (kind.__name__ for kind in type(module).__mro__)}


def deal(specs: Sequence[ShardSpec], layout: Layout, pipeline: int) -> list[Dealt]:
    """Deal the matrices of the parameters of these ``specs``, in the stages at a coordinate of the pipeline.

    Each goes to one of the ranks that hold most of it, the one with least to do; the largest are dealt first.
    """
    matrices = [
        (number, whole, parts)
        for number, spec in enumerate(specs)
        for whole, parts in _parts(replace(spec, name=""), layout, pipeline)
    ]
    matrices.sort(key=lambda matrix: -_work(matrix[1]))
    work, owned = (dict.fromkeys(range(layout.world // layout.pipeline), 0) for _ in range(2))
    dealt = []
    for number, whole, parts in matrices:
        most = max(box.numel for box, _ in parts)
        owner = min((rank for box, ranks in parts if box.numel == most for rank in ranks), key=work.__getitem__)
        dealt.append(Dealt(number, whole, parts, owner, owned[owner] // _ROUND_ELEMENTS))
        work[owner] += _work(whole)
        owned[owner] += whole.numel
    return dealt


@cache  # many parameters have the same shape
def _parts(spec: ShardSpec, layout: Layout, pipeline: int) -> list[tuple[Box, tuple[tuple[Box, tuple[int, ...]], ...]]]:
    """Return the matrices of a parameter, each with the boxes it is made of and the ranks that hold them."""
    ranks = layout.world // layout.pipeline
    holders: dict[Box, list[int]] = defaultdict(list)
    for rank in range(ranks):
        holders[spec.box(layout, layout.coordinates(pipeline * ranks + rank))].append(rank)
    rows, columns = spec.shape[-2:]
    stacked = spec.shape[0] if len(spec.shape) == 3 else 1
    found = []
    for entry in range(stacked):
        whole = Box((entry, 0, 0), (1, rows, columns)) if len(spec.shape) == 3 else Box((0, 0), (rows, columns))
        parts = ((box.overlap(whole), tuple(on)) for box, on in holders.items())
        found.append((whole, tuple((box, on) for box, on in parts if box.numel)))
    return found


def _work(matrix: Box) -> int:
    return prod(matrix.sizes) * min(matrix.sizes[-2:])


def _rounds(dealt: Sequence[Dealt], boxes: Sequence[Box], me: int, ranks: int, block: int) -> list[_Round]:
    """Return the messages of rank ``me`` of ``ranks`` in each round.

    Args:
        boxes: The part of each parameter that the rank holds.
        block: Number of ranks that together hold one copy.
    """
    peers = range(ranks)
    rounds = [
        _Round([], [[] for _ in peers], [[] for _ in peers], [[] for _ in peers], [[] for _ in peers])
        for _ in range(max((matrix.round for matrix in dealt), default=-1) + 1)
    ]
    for number, whole, parts, owner, which in dealt:
        messages, is_mine = rounds[which], owner == me
        for box, holders in parts:
            source = _source(holders, owner, block)
            ours = (number, box.seen_from(boxes[number]).indices())
            within = (len(messages.shapes), box.seen_from(whole).indices()[-2:])
            if source == me:
                messages.sent[owner].append(ours)
            if me in holders:
                messages.results[owner].append(ours)
            if is_mine:
                messages.received[source].append(within)
                for rank in holders:
                    messages.returned[rank].append(within)
        if is_mine:
            messages.shapes.append(whole.sizes[-2:])
    return rounds


def _source(holders: Sequence[int], owner: int, block: int) -> int:
    """Return the rank that sends a shard to ``owner``: itself if it holds the shard, else a holder in its replica."""
    near = [rank for rank in holders if rank // block == owner // block]
    return owner if owner in near else near[0]


def sent_elements(specs: Sequence[ShardSpec], layout: Layout, pipeline: int) -> tuple[int, int]:
    """Return how many elements of the matrices of ``specs`` the first rank of a stage sends in a step, and in how many
    exchanges."""
    dealt = deal(specs, layout, pipeline)
    sent = 0
    for _, _, parts, owner, _ in dealt:
        for box, holders in parts:
            if owner == 0:
                sent += box.numel * len([rank for rank in holders if rank != 0])
            elif _source(holders, owner, layout.block) == 0:
                sent += box.numel
    return sent, 2 * (max((matrix.round for matrix in dealt), default=-1) + 1)


def _at(tensors: Sequence[Tensor], peers: Sequence[Sequence[tuple[int, Place]]]) -> list[list[Tensor]]:
    return [[tensors[number][place] for number, place in peer] for peer in peers]


def _by_shape(matrices: Sequence[Tensor], function: Callable[[Tensor], Tensor]) -> list[Tensor]:
    """Return ``function`` of the matrices, which is called once for all of one shape."""
    numbers: dict[torch.Size, list[int]] = defaultdict(list)
    for number, matrix in enumerate(matrices):
        numbers[matrix.shape].append(number)
    results = {
        number: result
        for those in numbers.values()
        for number, result in zip(those, function(torch.stack([matrices[index] for index in those])), strict=True)
    }
    return [results[number] for number in range(len(matrices))]
