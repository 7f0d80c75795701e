"""Which rank writes which file of a checkpoint, and where the bytes of each come from.

Every tensor is stored whole, by one owner, so that each file is written from front to back by one process: what all
file systems do best, and what any reader opens as it lies. The ranks of a block, which together hold one copy of the
model, send their rows to the owners, in rounds of one bucket per owner.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from serried.parallel.mesh import Layout
from serried.parallel.shard_specs import ShardSpec
from serried.records.tensors import TensorSpec

BUCKET_BYTES = 16 * 2**20
"""What an owner receives at a time."""
_ALIGNMENT = 16  # bytes: a multiple of every element's size

_FILE_BYTES = 5 * 10**9


class Part(NamedTuple):
    """One tensor of the state, as this rank holds it."""

    spec: TensorSpec
    local: Tensor
    shards: ShardSpec
    """Which part of it every rank holds."""


class PlannedFile(NamedTuple):
    """One file, its owner's rank, and its tensors in order."""

    name: str
    owner: int
    specs: tuple[TensorSpec, ...]


class Piece(NamedTuple):
    """Bytes of one tensor that one rank holds."""

    file: int
    """Index of the file they belong to."""
    name: str
    source: int
    """Rank within the block."""
    start: int
    """First byte, within what that rank holds of the tensor."""
    nbytes: int


@dataclass(frozen=True)
class Plan:
    """All files, and what one rank sends and writes in each round."""

    files: list[PlannedFile]
    sends: list[list[list[Piece]]]
    """[round][owner's rank within the block]: pieces, in the owner's order."""
    writes: list[list[Piece]]
    """[round]: pieces of this rank's own files, in file order."""

    @property
    def total_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(spec.nbytes for file in self.files for spec in file.specs)


def deal_files(specs: Sequence[TensorSpec], stem: str, ranks: int) -> list[PlannedFile]:
    """Tensors, in their order, into files of about equal size: one per rank, more where they would exceed 5 GB."""
    total = max(1, sum(spec.nbytes for spec in specs))
    wanted = ranks * max(1, -(-total // (ranks * _FILE_BYTES)))
    bins: list[list[TensorSpec]] = [[] for _ in range(wanted)]
    before = 0
    for spec in specs:
        middle = before + spec.nbytes // 2
        bins[min(middle * wanted // total, wanted - 1)].append(spec)
        before += spec.nbytes
    filled = [tuple(specs) for specs in bins if specs]
    count = len(filled)
    return [
        PlannedFile(
            f"{stem}.safetensors" if count == 1 else f"{stem}-{number + 1:05d}-of-{count:05d}.safetensors",
            number * ranks // count,
            specs,
        )
        for number, specs in enumerate(filled)
    ]


def make_plan(
    files: list[PlannedFile], shards: Mapping[str, ShardSpec], layout: Layout, rank: int, bucket_bytes: int
) -> Plan:
    """Return what ``rank`` sends and writes. ``shards``: which rank holds which part of each tensor."""
    block, me = divmod(rank, layout.block)
    sends: list[list[list[Piece]]] = []
    writes: list[list[Piece]] = []
    for owner in range(layout.block):
        owned = [(index, file) for index, file in enumerate(files) if file.owner == block * layout.block + owner]
        stream = (piece for index, file in owned for piece in _pieces(index, file, shards, layout, owner))
        for number, bucket in enumerate(_buckets(stream, bucket_bytes)):
            if number == len(sends):
                sends.append([[] for _ in range(layout.block)])
                writes.append([])
            sends[number][owner] = [piece for piece in bucket if piece.source == me]
            if owner == me:
                writes[number] = bucket
    return Plan(files, sends, writes)


def _pieces(
    index: int, file: PlannedFile, shards: Mapping[str, ShardSpec], layout: Layout, owner: int
) -> Iterator[Piece]:
    for spec in file.specs:
        held = shards[spec.name]
        if layout.size(held.sliced_axes) == 1:
            yield Piece(index, spec.name, owner, 0, spec.nbytes)  # the owner holds all of it
            continue
        for box, source in held.sources(layout):
            # Whole rows have the same order in the file as in memory, one box after the other.
            assert box.sizes[1:] == spec.shape[1:], f"{spec.name} is divided along another dim than its first"
            yield Piece(index, spec.name, source, 0, box.numel * spec.dtype.itemsize)


def aligned(nbytes: int) -> int:
    """Room for ``nbytes``: of numbers of several sizes, one after the other, each begins where such a number may."""
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT


def _buckets(pieces: Iterator[Piece], limit: int) -> Iterator[list[Piece]]:
    bucket: list[Piece] = []
    room = limit
    for piece in pieces:
        rest = piece
        while rest.nbytes > room:
            now = room // _ALIGNMENT * _ALIGNMENT
            if now:
                bucket.append(rest._replace(nbytes=now))
                rest = rest._replace(start=rest.start + now, nbytes=rest.nbytes - now)
            yield bucket
            bucket, room = [], limit
        bucket.append(rest)
        room -= rest.nbytes
    if bucket:
        yield bucket
