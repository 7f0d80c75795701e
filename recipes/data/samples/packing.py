"""Packing of whole documents into sequences.

Best-fit decreasing: from the longest document to the shortest, each is put into the sequence with the least remaining
room that fits it, as in "Fewer Truncations Improve Language Modeling" (https://arxiv.org/abs/2404.10830). The result is
a pure function of the lengths: every process computes the same one, for any number of processes.
"""

from typing import NamedTuple

import numpy as np

from serried.recipes.data.prepared.token_shards import TokenStream


class Pieces(NamedTuple):
    """Pieces to pack: whole documents, and parts of documents that are longer than a sequence."""

    starts: np.ndarray
    """[pieces], int64: position of the first token in the stream"""
    lengths: np.ndarray
    """[pieces], int64: number of tokens, from 2 to the sequence length + 1"""
    cut_documents: int
    """Number of documents that are longer than a sequence."""
    longest: int
    """Number of tokens of the longest document."""


class Packing(NamedTuple):
    """Assignment of pieces to sequences."""

    order: np.ndarray
    """[pieces], int64: indices of pieces, grouped by sequence and ascending within each"""
    bounds: np.ndarray
    """[sequences + 1], int64: sequence i has ``order[bounds[i] : bounds[i + 1]]``"""


def find_pieces(stream: TokenStream, sequence_length: int, *, truncate: bool) -> Pieces:
    """Split the documents of ``stream`` into pieces of at most ``sequence_length`` + 1 tokens. The last token of a
    piece is only a target.

    Consecutive pieces of a longer document share their boundary token: the last target of one is the first input of the
    next. With ``truncate``, only the first piece is kept. A document of one token has no target and is left out.
    """
    starts = stream.all_document_starts()
    if not len(starts) or starts[0]:
        starts = np.concatenate(([0], starts))  # flat token files do not record where documents begin
    lengths = np.diff(starts, append=stream.tokens)
    counts = np.maximum(-((1 - lengths) // sequence_length), 0)
    cut_documents = int((counts > 1).sum())
    if truncate:
        counts = np.minimum(counts, 1)
    within = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    offsets = within * sequence_length
    left = np.repeat(lengths, counts) - offsets
    return Pieces(
        np.repeat(starts, counts) + offsets, np.minimum(left, sequence_length + 1), cut_documents, int(lengths.max())
    )


def best_fit(lengths: np.ndarray, capacity: int) -> Packing:
    """Pack pieces of ``lengths`` [pieces], each from 1 to ``capacity``, into sequences of at most ``capacity`` tokens.

    Sequences are ordered by the index of their first piece, so that sequences with long documents do not come first.
    """
    sequence_of = np.empty(len(lengths), np.int64)
    by_room: list[list[int]] = [[] for _ in range(capacity + 1)]  # sequences by the number of tokens that still fit
    rooms = 0  # bit r is set if there are sequences with room for r tokens
    sequences = 0
    longest_first = np.argsort(-lengths, kind="stable")
    for piece, length in zip(longest_first.tolist(), lengths[longest_first].tolist(), strict=True):
        if large_enough := rooms >> length:
            room = length + (large_enough & -large_enough).bit_length() - 1
            sequence = by_room[room].pop()
            if not by_room[room]:
                rooms ^= 1 << room
        else:
            room, sequence = capacity, sequences
            sequences += 1
        sequence_of[piece] = sequence
        if room > length:
            by_room[room - length].append(sequence)
            rooms |= 1 << room - length
    first_pieces = np.unique(sequence_of, return_index=True)[1]
    place = np.argsort(np.argsort(first_pieces))
    order = np.argsort(place[sequence_of], kind="stable")
    return Packing(order, np.concatenate(([0], np.cumsum(np.bincount(place[sequence_of], minlength=sequences)))))


def unpacked(pieces: int) -> Packing:
    """Return the packing with one sequence per piece."""
    return Packing(np.arange(pieces), np.arange(pieces + 1))
