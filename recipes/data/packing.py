"""Packing of whole documents into sequences.

Best-fit decreasing: the longest document first, each into the sequence with the least room that holds it. "Fewer
Truncations Improve Language Modeling" (https://arxiv.org/abs/2404.10830) trains so. The result is a pure function of
the lengths: every process computes it for itself, and it does not depend on how many there are.
"""

from typing import NamedTuple

import numpy as np

from serried.recipes.data.shards import TokenStream


class Pieces(NamedTuple):
    """What is packed: whole documents, and parts of those that are longer than a sequence."""

    starts: np.ndarray
    """[pieces], int64: position of the first token in the stream"""
    lengths: np.ndarray
    """[pieces], int64: tokens, at least 2 and at most one more than a sequence"""
    cut_documents: int
    """Documents that are longer than a sequence."""


class Packing(NamedTuple):
    """Pieces by sequence."""

    order: np.ndarray
    """[pieces], int64: numbers of pieces, those of one sequence side by side and ascending"""
    bounds: np.ndarray
    """[sequences + 1], int64: sequence i has ``order[bounds[i] : bounds[i + 1]]``"""


def find_pieces(stream: TokenStream, sequence_length: int, *, truncate: bool) -> Pieces:
    """Documents of ``stream``, none longer than ``sequence_length`` + 1 tokens, the last of which is a target only.

    A longer one is taken apart: its pieces share their border token, the last target of one and the first input of the
    next, as windows do. With ``truncate`` only the first piece is kept. A document of one token teaches nothing and is
    left out.
    """
    starts = stream.all_document_starts()
    if not len(starts) or starts[0]:
        starts = np.concatenate(([0], starts))  # flat files of tokens do not say where documents begin
    lengths = np.diff(starts, append=stream.tokens)
    counts = np.maximum(-((1 - lengths) // sequence_length), 0)
    cut_documents = int((counts > 1).sum())
    if truncate:
        counts = np.minimum(counts, 1)
    within = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    offsets = within * sequence_length
    left = np.repeat(lengths, counts) - offsets
    return Pieces(np.repeat(starts, counts) + offsets, np.minimum(left, sequence_length + 1), cut_documents)


def best_fit(lengths: np.ndarray, capacity: int) -> Packing:
    """Pack pieces of ``lengths`` [pieces], each from 1 to ``capacity``, into sequences of at most ``capacity`` tokens.

    Sequences come in the order of their first pieces, so that the first of them are no special ones. Pieces of one
    length are dealt with at once, and sequences with the same room too: a million documents take 1.3 seconds.
    """
    longest_first = np.argsort(-lengths, kind="stable")
    sequence_of = np.empty(len(lengths), np.int64)
    rooms = _Rooms(capacity)
    distinct, counts = np.unique(lengths, return_counts=True)
    done = 0
    for length, count in zip(distinct[::-1].tolist(), counts[::-1].tolist(), strict=True):
        end = done + count
        while done < end:
            room, sequences = rooms.take_least(length, end - done)
            each = room // length
            taken = np.repeat(sequences, each)[: end - done]
            sequence_of[longest_first[done : done + len(taken)]] = taken
            filled, rest = divmod(len(taken), each)
            rooms.give_back(room - each * length, sequences[:filled])
            if rest:
                rooms.give_back(room - rest * length, sequences[filled:])
            done += len(taken)
    by_sequence = np.argsort(sequence_of, kind="stable")
    bounds = np.searchsorted(sequence_of[by_sequence], np.arange(rooms.sequences + 1))
    by_first_piece = np.argsort(by_sequence[bounds[:-1]])
    place = np.empty(rooms.sequences, np.int64)
    place[by_first_piece] = np.arange(rooms.sequences)
    order = np.argsort(place[sequence_of], kind="stable")
    return Packing(order, np.concatenate(([0], np.cumsum(np.diff(bounds)[by_first_piece]))))


class _Rooms:
    """Sequences by the tokens they still have room for."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._by_room: list[list[np.ndarray]] = [[] for _ in range(capacity + 1)]
        self._is_there = 0
        """Bit r is set where there are sequences with room for r tokens."""
        self.sequences = 0

    def take_least(self, length: int, pieces: int) -> tuple[int, np.ndarray]:
        """The least room that holds ``length``, and sequences that have it: no more than ``pieces`` of it fill."""
        large_enough = self._is_there >> length
        if not large_enough:
            needed = -(-pieces // (self._capacity // length))
            self.sequences += needed
            return self._capacity, np.arange(self.sequences - needed, self.sequences)
        room = length + (large_enough & -large_enough).bit_length() - 1
        sequences = np.concatenate(self._by_room[room])
        self._by_room[room] = []
        self._is_there &= ~(1 << room)
        needed = -(-pieces // (room // length))
        self.give_back(room, sequences[needed:])
        return room, sequences[:needed]

    def give_back(self, room: int, sequences: np.ndarray) -> None:
        if room and len(sequences):
            self._by_room[room].append(sequences)
            self._is_there |= 1 << room
