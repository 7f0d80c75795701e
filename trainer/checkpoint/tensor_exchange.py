"""Exchange of tensor pieces: owners receive one bucket at a time, while they write the previous bucket."""

from collections.abc import Iterable, Sequence
from itertools import accumulate, chain

import torch
import torch.distributed as dist
from torch import Tensor

from serried.parallel.checkpoint_mapping import in_order
from serried.trainer.checkpoint.file_assignment import Piece, Plan, Window, aligned


class Exchange:
    """The exchange rounds of a plan within a block. Each round transfers at most one bucket to every owner."""

    def __init__(
        self, plan: Plan, staged: dict[str, Tensor], rank: int, ranks: int, group: "dist.ProcessGroup | None"
    ) -> None:
        """``rank``: index of this rank among the ``ranks`` of the block. ``group``: the block's process group."""
        self._group = group
        self._rank = rank
        self._staged = staged
        self._under_way: dist.Work | None = None
        # Indexed by [round][rank within the block]: pieces to send, and pieces to receive.
        self._sends = [[[] if to == rank else send for to, send in enumerate(sends)] for sends in plan.sends]
        self._writes, self._is_alone = plan.writes, ranks == 1
        self._receives: list[list[list[Piece]]] = [[[] for _ in range(ranks)] for _ in plan.writes]
        for windows, receives in zip(plan.writes, self._receives, strict=True):
            for piece in chain.from_iterable(window.pieces for window in windows):
                if piece.source != rank:
                    receives[piece.source].append(piece)
        self._outgoing = _buffer(_room(chain(*sends)) for sends in self._sends)
        most = max((_room(chain(*receives)) for receives in self._receives), default=0)
        # Two buffers: one is written to disk while the next bucket arrives.
        self._incoming = [_buffer([most]), _buffer([most])]
        self._placed = _buffer(sum(aligned(w.nbytes) for w in windows if not w.is_in_order) for windows in plan.writes)

    def begin(self, number: int) -> None:
        """Start to send and receive round ``number``, if it exists."""
        if self._is_alone or number >= len(self._sends):
            return
        position = 0
        for piece in chain(*self._sends[number]):
            own = self._own(piece)
            _view(self._outgoing, position, piece.dtype, own.shape).copy_(own)
            position += aligned(piece.nbytes)
        out, into = ([_room(pieces) for pieces in side[number]] for side in (self._sends, self._receives))
        self._under_way = dist.all_to_all_single(
            self._incoming[number % 2][: sum(into)], self._outgoing[: sum(out)], into, out,
            group=self._group, async_op=True,
        )  # fmt: skip

    def end(self, number: int) -> list[list[Tensor]]:
        """Wait for round ``number``, and return the contents of each window that this rank writes in it, in order.

        They are valid until the next round.
        """
        if self._under_way is not None:
            self._under_way.wait()
        incoming = self._incoming[number % 2]
        begins = [0, *accumulate(_room(pieces) for pieces in self._receives[number])]
        placed, contents = 0, []
        for window in self._writes[number]:
            found = []
            for piece in window.pieces:
                if piece.source == self._rank:
                    found.append(self._own(piece))
                    continue
                found.append(_view(incoming, begins[piece.source], piece.dtype, piece.place.sizes))
                begins[piece.source] += aligned(piece.nbytes)
            if not window.is_in_order:
                whole = _view(self._placed, placed, window.spec.dtype, window.sizes)
                placed += aligned(window.nbytes)
                found = [put_into_place(whole, window, found)]
            contents.append(found)
        return contents

    def _own(self, piece: Piece) -> Tensor:
        return in_order(self._staged[piece.part][piece.box.indices()], piece.order)


def put_into_place(whole: Tensor, window: Window, contents: list[Tensor]) -> Tensor:
    """Fill ``whole``, a tensor of the window's sizes, with the contents of the window's pieces."""
    for piece, content in zip(window.pieces, contents, strict=True):
        whole[piece.place.indices()] = content.view(piece.place.sizes)
    return whole


def _view(buffer: Tensor, position: int, dtype: torch.dtype, sizes: Sequence[int]) -> Tensor:
    """Return a slice of a byte buffer as a tensor."""
    nbytes = dtype.itemsize * torch.Size(sizes).numel()
    return buffer[position : position + nbytes].view(dtype).view(sizes)


def _buffer(nbytes: Iterable[int]) -> Tensor:
    return torch.empty(max(nbytes, default=0), dtype=torch.uint8)


def _room(pieces: Iterable[Piece]) -> int:
    return sum(aligned(piece.nbytes) for piece in pieces)
