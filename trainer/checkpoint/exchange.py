"""Rows on their way to the owners of their tensors: one bucket an owner at a time, the next while one is written."""

from collections.abc import Iterable
from itertools import chain

import torch
import torch.distributed as dist
from torch import Tensor

from serried.trainer.checkpoint.plan import Piece, Plan, aligned


class Exchange:
    """The rounds of a plan: each brings one bucket from the ranks of this block. One is under way at a time."""

    def __init__(
        self, plan: Plan, staged: dict[str, Tensor], rank: int, ranks: int, group: "dist.ProcessGroup | None"
    ) -> None:
        """``rank`` of the ``ranks`` of the block, whose ``group`` it is."""
        self._group = group
        self._staged = {name: tensor.view(-1).view(torch.uint8) for name, tensor in staged.items()}
        self._under_way: dist.Work | None = None
        # [round][rank of the block]: what goes there, and what comes from there.
        self._sends = [[[] if to == rank else send for to, send in enumerate(sends)] for sends in plan.sends]
        self._writes, self._is_alone = plan.writes, ranks == 1
        self._receives: list[list[list[Piece]]] = [[[] for _ in range(ranks)] for _ in plan.writes]
        for pieces, receives in zip(plan.writes, self._receives, strict=True):
            for piece in pieces:
                if piece.source != rank and not self._is_alone:
                    receives[piece.source].append(piece)
        self._outgoing = _buffer(self._sends)
        # Two: what has come is written while the next bucket comes.
        self._incoming = [_buffer(self._receives), _buffer(self._receives)]

    def begin(self, number: int) -> None:
        """Start to send and receive round ``number``, if there is one."""
        if self._is_alone or number >= len(self._sends):
            return
        position = 0
        for piece in chain(*self._sends[number]):
            self._outgoing[position : position + piece.nbytes].copy_(self._own(piece))
            position += aligned(piece.nbytes)
        out, into = ([_room(pieces) for pieces in side[number]] for side in (self._sends, self._receives))
        self._under_way = dist.all_to_all_single(
            self._incoming[number % 2][: sum(into)], self._outgoing[: sum(out)], into, out,
            group=self._group, async_op=True,
        )  # fmt: skip

    def end(self, number: int) -> list[Tensor]:
        """Bytes of what this rank writes in round ``number``, in order; they stay until the round after the next."""
        if self._under_way is not None:
            self._under_way.wait()
        position, received = 0, {}
        for piece in chain(*self._receives[number]):
            received[piece] = self._incoming[number % 2][position : position + piece.nbytes]
            position += aligned(piece.nbytes)
        return [received[piece] if piece in received else self._own(piece) for piece in self._writes[number]]

    def _own(self, piece: Piece) -> Tensor:
        return self._staged[piece.name][piece.start : piece.start + piece.nbytes]


def _buffer(rounds: list[list[list[Piece]]]) -> Tensor:
    return torch.empty(max((_room(chain(*pieces)) for pieces in rounds), default=0), dtype=torch.uint8)


def _room(pieces: Iterable[Piece]) -> int:
    return sum(aligned(piece.nbytes) for piece in pieces)
