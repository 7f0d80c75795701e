"""Assignment of a checkpoint's tensors to files and of files to ranks, and the transfers that fill them.

Every tensor is stored unsharded, by one owner rank, so each file is written sequentially by one process. All file
systems do this best, and any reader can open the result. A block is the group of ranks that together hold one
pipeline stage of one model replica. Its ranks send their shards to the owners, in rounds of one bucket per owner. The
tensors of a stage are distributed over the ranks that hold it.
"""

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from serried.parallel.checkpoint_mapping import Fragment
from serried.parallel.layout.local_shards import HeldTensor
from serried.parallel.layout.mesh import Layout
from serried.parallel.layout.shard_specs import Box, ShardSpec
from serried.records.safetensors_files import TensorSpec

BUCKET_BYTES = 16 * 2**20
"""Maximum number of bytes that an owner receives per round."""
_ALIGNMENT = 16  # bytes: a multiple of every element's size

_FILE_BYTES = 5 * 10**9


class Part(NamedTuple):
    """This rank's shard of one tensor of the state."""

    name: str
    """Name, unique within the state. A rank that holds a tied parameter twice has two parts of the same name."""
    held: HeldTensor
    fragments: tuple[Fragment, ...]
    """Location of its elements in the tensors of a checkpoint."""

    @property
    def local(self) -> Tensor:
        """This rank's shard as a plain tensor that shares its memory."""
        return self.held.local

    @property
    def shards(self) -> ShardSpec:
        """Sharding of the tensor over the ranks."""
        return self.held.spec


class Origin(NamedTuple):
    """A fragment of one part of the state."""

    part: str
    shards: ShardSpec
    fragment: Fragment


@dataclass
class Target:
    """One tensor of a checkpoint, and the parts of the state that provide its elements."""

    spec: TensorSpec
    origins: list[Origin]


class PlannedFile(NamedTuple):
    """A file, the rank that writes it, and its tensors in order."""

    name: str
    owner: int
    specs: tuple[TensorSpec, ...]


class Piece(NamedTuple):
    """A box of a rank's shard, sent to the rank that writes it."""

    part: str
    source: int
    """Rank within the block that sends the piece."""
    box: Box
    """Box within the sender's shard."""
    place: Box
    """Box within the window."""
    dtype: torch.dtype
    order: tuple[int, ...] = ()
    """Order of the dims of ``box`` in which the elements are sent; empty if it is their own."""

    @property
    def nbytes(self) -> int:
        return self.box.numel * self.dtype.itemsize


class Window(NamedTuple):
    """A box of a tensor, contiguous in the tensor's file."""

    file: int
    """Index of the file."""
    spec: TensorSpec
    sizes: tuple[int, ...]
    pieces: tuple[Piece, ...]
    is_in_order: bool
    """Whether the concatenated pieces are the window's bytes. Otherwise each piece must be copied into place."""

    @property
    def nbytes(self) -> int:
        return prod(self.sizes) * self.spec.dtype.itemsize


@dataclass(frozen=True)
class Plan:
    """All files, and the data that one rank sends and writes in each round."""

    files: list[PlannedFile]
    sends: list[list[list[Piece]]]
    """Pieces to send, indexed by [round][owner's rank within the block], in the order in which they are written."""
    writes: list[list[Window]]
    """Windows of this rank's own files, indexed by [round], in file order."""

    @property
    def total_bytes(self) -> int:
        """Size of all tensors in bytes."""
        return sum(spec.nbytes for file in self.files for spec in file.specs)


def targets_of(parts: Iterable[Part], stage: int) -> dict[str, Target]:
    """Return the tensors that pipeline stage ``stage`` saves, by name, except tensors that an earlier stage saves."""
    found: dict[str, Target] = {}
    seen: set[str] = set()
    for part in parts:
        if part.shards.holders[0] != stage or part.name in seen:
            continue
        seen.add(part.name)
        for fragment in part.fragments:
            spec = TensorSpec(fragment.name, part.held.tensor.dtype, fragment.stored_shape)
            target = found.setdefault(fragment.name, Target(spec, []))
            assert target.spec == spec, f"{part.name} is {spec} in a checkpoint, where others make it {target.spec}"
            if fragment.shape or not target.origins:  # parts may share a scalar, such as the optimizer's step
                target.origins.append(Origin(part.name, part.shards, fragment))
    return found


def deal_files(
    stages: Sequence[Sequence[TensorSpec]], stem: str, ranks: int, *, is_spread: bool = True
) -> list[PlannedFile]:
    """Distribute tensors, in order, over files of about equal size, and number the files over all stages.

    Each stage has one file per rank, or a single file unless ``is_spread``. It has more files if they would exceed
    5 GB. ``ranks``: number of ranks per stage. Ranks are numbered stage by stage.
    """
    filled: list[tuple[int, tuple[TensorSpec, ...]]] = []
    for stage, specs in enumerate(stages):
        files = _fill_files(specs, ranks if is_spread else 1)
        filled += [(stage * ranks + number * ranks // len(files), file) for number, file in enumerate(files)]
    names = file_names(stem, len(filled))
    return [PlannedFile(name, owner, specs) for name, (owner, specs) in zip(names, filled, strict=True)]


def file_names(stem: str, count: int) -> list[str]:
    """Return the names of ``count`` tensor files, in transformers' format."""
    if count == 1:
        return [f"{stem}.safetensors"]
    return [f"{stem}-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)]


def _fill_files(specs: Sequence[TensorSpec], ranks: int) -> list[tuple[TensorSpec, ...]]:
    total = max(1, sum(spec.nbytes for spec in specs))
    wanted = ranks * max(1, -(-total // (ranks * _FILE_BYTES)))
    bins: list[list[TensorSpec]] = [[] for _ in range(wanted)]
    before = 0
    for spec in specs:
        middle = before + spec.nbytes // 2
        bins[min(middle * wanted // total, wanted - 1)].append(spec)
        before += spec.nbytes
    return [tuple(specs) for specs in bins if specs]


def make_plan(
    files: list[PlannedFile], targets: Mapping[str, Target], layout: Layout, rank: int, bucket_bytes: int
) -> Plan:
    """Return the data that ``rank`` sends and writes.

    ``targets``: the tensors in the files of this rank's stage, by name.
    """
    block, me = divmod(rank, layout.block)
    sends: list[list[list[Piece]]] = []
    writes: list[list[Window]] = []
    owned: dict[int, list[tuple[int, PlannedFile]]] = defaultdict(list)
    for index, file in enumerate(files):
        owned[file.owner - block * layout.block].append((index, file))
    for owner in range(layout.block):
        sender = None if owner == me else me
        windows = (
            window
            for index, file in owned[owner]
            for spec in file.specs
            for window in _windows_of(index, targets[spec.name], layout, owner, bucket_bytes, sender)
        )
        for number, bucket in enumerate(_buckets(windows, bucket_bytes)):
            if number == len(sends):
                sends.append([[] for _ in range(layout.block)])
                writes.append([])
            sends[number][owner] = [piece for window in bucket for piece in window.pieces if piece.source == me]
            if owner == me:
                writes[number] = bucket
    return Plan(files, sends, writes)


def _windows_of(
    file: int, target: Target, layout: Layout, owner: int, limit: int, sender: int | None
) -> Iterator[Window]:
    """Yield the windows of a tensor that ``owner`` writes. If ``sender`` is given, include only its pieces."""
    spec, origins = target.spec, target.origins
    geometry = tuple((replace(origin.shards, name=""), origin.fragment._replace(name="")) for origin in origins)
    sources, windows = _geometry(origins[0].fragment.shape, geometry, layout, limit // spec.dtype.itemsize)
    place = layout.coordinates(owner)
    # The owner may already hold the data: a tensor may be replicated along some axes.
    own = [origin.shards.box(layout, place) for origin in origins]
    ranks = [owner if own[source.origin] == source.held else source.rank for source in sources]
    for window, pieces, is_in_order in windows:
        yield Window(
            file,
            spec,
            window.sizes,
            tuple(
                Piece(origin.part, ranks[index], box, to, spec.dtype, origin.fragment.order)
                for index, box, to in pieces
                for origin in [origins[sources[index].origin]]
                if sender in (None, ranks[index])
            ),
            is_in_order,
        )


class _Source(NamedTuple):
    """A shard that contains elements of a checkpoint's tensor."""

    origin: int
    """Index of the origin."""
    rank: int
    """First rank within the block that holds this shard."""
    held: Box
    """Shard of the part that the rank holds."""
    theirs: Box
    """Box of the checkpoint's tensor that the shard fills."""


_WindowPieces = tuple[Box, tuple[tuple[int, Box, Box], ...], bool]
"""A window of the tensor, its pieces, and whether the pieces are in order. A piece is (index of its source, box within
the source's shard, box within the window)."""


@cache  # many tensors have the same sharding
def _geometry(
    shape: tuple[int, ...], origins: tuple[tuple[ShardSpec, Fragment], ...], layout: Layout, limit: int
) -> tuple[list[_Source], list[_WindowPieces]]:
    sources = []
    for number, (shards, fragment) in enumerate(origins):
        for held, rank in shards.sources(layout):
            ours = held.overlap(fragment.ours)
            if ours.numel:
                sources.append(_Source(number, rank, held, fragment.there(ours)))
    sources.sort(key=lambda source: source.theirs.starts)
    windows: list[_WindowPieces] = []
    first = 0
    for window in windows_of(shape, limit):
        while first < len(sources) and shape and _end(sources[first].theirs) <= window.starts[0]:
            first += 1  # no later window overlaps it
        last = bisect_left(sources, _end(window), key=lambda source: source.theirs.starts[0]) if shape else len(sources)
        pieces = []
        for index in range(first, last):
            source = sources[index]
            shared = source.theirs.overlap(window)
            if shared.numel:
                here = origins[source.origin][1].here(shared).seen_from(source.held)
                pieces.append((index, here, shared.seen_from(window)))
        found = sum(to.numel for _, _, to in pieces)
        assert found == window.numel, f"{found} of {window.numel} elements of a tensor of {list(shape)} are held"
        pieces.sort(key=lambda piece: piece[2].starts)
        is_in_order = all(_is_interval(to.sizes, window.sizes) for _, _, to in pieces)
        windows.append((window, tuple(pieces), is_in_order))
    return sources, windows


def _end(box: Box) -> int:
    return box.starts[0] + box.sizes[0]


def windows_of(shape: Sequence[int], limit: int, within: Box | None = None) -> Iterator[Box]:
    """Yield boxes of at most ``limit`` elements, each contiguous in the tensor's memory, from front to back.

    They cover the tensor, or only its rows that overlap ``within``. An empty tensor has one empty box.
    """
    within = within or Box((0,) * len(shape), tuple(shape))
    if not shape or not within.numel:
        yield within
        return
    dim = next(dim for dim in range(len(shape)) if prod(shape[dim + 1 :]) <= max(1, limit))
    rest = tuple(shape[dim + 1 :])
    step = max(1, limit // prod(rest))
    begin, end = within.starts[dim], within.starts[dim] + within.sizes[dim]
    outer = [range(start, start + size) for start, size in zip(within.starts[:dim], within.sizes[:dim], strict=True)]
    for above in product(*outer):
        for start in range(begin, end, step):
            yield Box((*above, start, *(0 for _ in rest)), (*(1 for _ in above), min(step, end - start), *rest))


def _is_interval(sizes: Sequence[int], whole: Sequence[int]) -> bool:
    """Return whether a box of ``sizes`` is contiguous in the memory of a tensor of shape ``whole``."""
    first = next((dim for dim, size in enumerate(sizes) if size != 1), len(sizes))
    return tuple(sizes[first + 1 :]) == tuple(whole[first + 1 :])


def aligned(nbytes: int) -> int:
    """Return ``nbytes`` rounded up to the alignment, so that any dtype may follow in the buffer."""
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT


def _buckets(windows: Iterator[Window], limit: int) -> Iterator[list[Window]]:
    bucket: list[Window] = []
    room = limit
    for window in windows:
        if bucket and window.nbytes > room:
            yield bucket
            bucket, room = [], limit
        bucket.append(window)
        room -= window.nbytes
    if bucket:
        yield bucket
