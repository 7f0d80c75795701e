"""Exchange of the matrices of a model's blocks, for optimizers that need unsharded matrices.

One rank, the owner, computes the update of each matrix. The matrices of a pipeline stage are distributed over all ranks
that hold shards or replicas, so that replicas do not repeat work. In a round every rank sends its shards to the owners
and receives its shards of the results. The messages follow from the shard specs.
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
"""Number of elements of unsharded matrices that a rank owns per round, at most one matrix more."""
_EXPERTS = "experts"

Place = tuple[slice, ...]


class Dealt(NamedTuple):
    """A matrix and its owner. Ranks are numbered within a pipeline stage."""

    parameter: int
    """Index of the parameter."""
    whole: Box
    """Box of the matrix in the parameter: the full parameter, or one entry of a stack."""
    parts: tuple[tuple[Box, tuple[int, ...]], ...]
    """Boxes of the parameter that make up the matrix, each with the ranks that hold it."""
    owner: int
    round: int


class _Round(NamedTuple):
    """Messages of this rank in a round: for each peer, (index of a parameter or an owned matrix, index in it)."""

    shapes: list[tuple[int, ...]]
    """Shapes of the matrices owned by this rank."""
    sent: list[list[tuple[int, Place]]]
    received: list[list[tuple[int, Place]]]
    returned: list[list[tuple[int, Place]]]
    results: list[list[tuple[int, Place]]]


class Matrices:
    """Trained matrices in the blocks of a model: two-dimensional parameters, and entries of stacked experts.

    Embeddings, the head, norms, biases and convolution kernels are excluded.
    """

    def __init__(
        self, held: Sequence[HeldTensor], layout: Layout, rank: int, group: dist.ProcessGroup | None,
        dtype: torch.dtype, transposed: Collection[str] = (),
    ) -> None:  # fmt: skip
        """
        Args:
            held: Parameters that are matrices or stacks of them, the same on all ranks of ``group``.
            layout: The parallel layout.
            rank: This rank.
            group: Ranks of the pipeline stage of ``rank``. None means all ranks.
            dtype: Dtype of the exchanged matrices.
            transposed: Names of the parameters with shape [inputs, outputs].
        """
        self.dtype = dtype
        self._parameters = [shard.tensor for shard in held]
        self._shapes = {shard.tensor: shard.spec.shape[-2:][:: -1 if shard.name in transposed else 1] for shard in held}
        self._ranks, self._group = layout.world // layout.pipeline, group
        pipeline, me = divmod(rank, self._ranks)
        dealt = deal([shard.spec for shard in held], layout, pipeline)
        self._rounds = _rounds(dealt, [shard.box for shard in held], me, self._ranks, layout.block)

    @classmethod
    def of(cls, model: DistributedModel, blocks: Collection[str], low_dtype: torch.dtype | None) -> "Matrices":
        """Return the matrices of ``model`` in its ``blocks``. This is a collective call on all ranks.

        They are exchanged in bf16 if the model has a ``low_dtype``, otherwise in fp32. There must be at least one.
        """
        names = matrix_names({name: spec.shape for name, spec in model.specs.items()}, blocks)
        held = [shard for shard in model.parameters if shard.tensor.requires_grad and shard.name in names]
        rank = dist.get_rank() if dist.is_initialized() else 0
        dtype = torch.float32 if low_dtype is None else torch.bfloat16  # the range of fp16 is too small for gradients
        return cls(held, model.layout, rank, model.groups.stage, dtype, _transposed(model.modules))

    @classmethod
    def whole(cls, parameters: Iterable[Tensor], dtype: torch.dtype = torch.float32) -> "Matrices":
        """Return the matrices among ``parameters`` in one process: the trained parameters with two dims."""
        matrices = (parameter for parameter in parameters if parameter.ndim == 2 and parameter.requires_grad)
        held = [HeldTensor.whole("", matrix) for matrix in matrices]
        return cls(held, Layout("single"), 0, None, dtype)

    def __contains__(self, parameter: Tensor) -> bool:
        """Return whether ``parameter`` is a matrix or a stack of matrices."""
        return parameter in self._shapes

    def shape(self, parameter: Tensor) -> tuple[int, int]:
        """Return the numbers of outputs and inputs of the full matrix, also for a ``Conv1D``."""
        outputs, inputs = self._shapes[parameter]
        return outputs, inputs

    @torch.no_grad()
    def replace(self, parts: Mapping[Tensor, Tensor], function: Callable[[Tensor], Tensor]) -> None:
        """Replace matrices in place by the result of ``function``. This is a collective call.

        Args:
            parts: This rank's shard of each parameter, as a plain tensor. All parameters must be given.
            function: Takes and returns [matrices, rows, columns] of ``self.dtype``.
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
    """Return the names of the matrices and stacked experts in ``blocks``. ``shapes`` are parameter shapes by name."""
    prefixes = tuple(f"{block}." for block in blocks)
    return {
        name
        for name, shape in shapes.items()
        if name.startswith(prefixes)
        and not name.endswith("bias")
        and (len(shape) == 2 or (len(shape) == 3 and _EXPERTS in name.split(".")))
    }


def _transposed(modules: Iterable[nn.Module]) -> set[str]:
    """Return the names of the weights of ``Conv1D`` layers, also if wrapped by FSDP2."""
    named = (pair for module in modules for pair in module.named_modules())
    return {f"{name}.weight" for name, module in named if "Conv1D" in (kind.__name__ for kind in type(module).__mro__)}


def deal(specs: Sequence[ShardSpec], layout: Layout, pipeline: int) -> list[Dealt]:
    """Assign an owner to each matrix of the parameters in ``specs``, for the stages at a pipeline coordinate.

    Matrices are assigned in descending order of work. Among the ranks with the largest shard, the owner is the rank
    with the least work.
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
    """Return the matrices of a parameter, each with its boxes and the ranks that hold them."""
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
        boxes: This rank's shard of each parameter.
        block: Number of ranks that together hold one replica.
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
    """Return the rank that sends a shard to ``owner``: the owner if it holds the shard, else a rank of its replica."""
    near = [rank for rank in holders if rank // block == owner // block]
    return owner if owner in near else near[0]


def sent_elements(specs: Sequence[ShardSpec], layout: Layout, pipeline: int) -> tuple[int, int]:
    """Return the number of matrix elements sent per step by the first rank of a stage, and the number of exchanges."""
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
    """Return the results of ``function``, called once for all matrices of the same shape."""
    numbers: dict[torch.Size, list[int]] = defaultdict(list)
    for number, matrix in enumerate(matrices):
        numbers[matrix.shape].append(number)
    results = {
        number: result
        for those in numbers.values()
        for number, result in zip(those, function(torch.stack([matrices[index] for index in those])), strict=True)
    }
    return [results[number] for number in range(len(matrices))]
