"""Map-style datasets of token sequences: windows of a memory-mapped token stream, or packed whole documents."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from serried.configs.errors import UserError
from serried.configs.schema.data import DataSection
from serried.recipes.data.prepared.prepare import Prepared
from serried.recipes.data.prepared.token_shards import TokenStream
from serried.recipes.data.readers.source import SHOWN_ROWS, SPLITS
from serried.recipes.data.samples.packing import Pieces, best_fit, find_pieces, unpacked
from serried.recipes.models.layers.lm_head import IGNORE

_SHORTEST_USEFUL = 16
"""Minimum sequence length that an error about too little text suggests."""

_QUOTED_CHARACTERS = 60


class Sample(NamedTuple):
    """A sequence. ``targets[t]`` is the token that follows ``tokens[t]``."""

    tokens: np.ndarray
    """[sequence], int64"""
    targets: np.ndarray
    """[sequence], int64; ``IGNORE`` where there is no target"""
    positions: np.ndarray | None = None
    """[sequence], int64, position in the document, from 0; None if documents are not isolated from each other"""
    weights: np.ndarray | None = None
    """[sequence], fp32, weight of each target in the loss; None if all are 1"""


class Batch(NamedTuple):
    """Sequences of one forward pass."""

    tokens: Tensor
    """[batch, sequence], int64"""
    targets: Tensor
    """[batch, sequence], int64; ``IGNORE`` where there is no target"""
    sample_ids: Tensor
    """[batch], int64; negative for padding, which has no targets"""
    positions: Tensor | None = None
    """[batch, sequence], int64, position in the document, from 0; None if documents are not isolated from each other"""
    weights: Tensor | None = None
    """[batch, sequence], fp32, weight of each target in the loss; None if all are 1"""


class TokenDataset:
    """Fixed-length windows of a split of prepared text. Sample i has S input tokens from position i x S on; targets are
    shifted by one.

    Consecutive windows share only their boundary token: the last target of one is the first input of the next. The
    remaining tokens at the end, fewer than S + 1, are not used, unless the dataset is opened with ``to_end``. They then
    form a last window, filled with padding. ``dataset[i]`` is a pure function of i and may be called from any number of
    threads.
    """

    def __init__(
        self,
        prepared: Prepared,
        split: str,
        sequence_length: int,
        *,
        isolate_documents: bool = False,
        to_end: bool = False,
    ) -> None:
        """Open ``split``, ``train`` or ``validation``. Raises ``UserError`` if it has less than one window."""
        self._stream = prepared.stream(split)
        if self._stream.tokens <= (1 if to_end else sequence_length):
            raise _nothing_to_predict("data") if to_end else _too_short(prepared, split, sequence_length)
        self._length = (self._stream.tokens - 1) // sequence_length
        if to_end:
            self._length = -(-(self._stream.tokens - 1) // sequence_length)
        self._sequence_length = sequence_length
        self._isolate = isolate_documents
        self._all_learned = not self._stream.is_supervised
        self.fingerprint = f"{prepared.key}-{split}-{sequence_length}{'-isolated' if isolate_documents else ''}"
        """Identity of the samples, equal on every machine for equal samples."""

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> Sample:
        if not 0 <= index < self._length:
            raise IndexError(f"sample {index} of {self._length}")
        start = index * self._sequence_length
        stop = min(start + self._sequence_length + 1, self._stream.tokens)
        window = self._stream.read(start, stop).astype(np.int64)
        if missing := self._sequence_length + 1 - len(window):
            window = np.pad(window, (0, missing))
        tokens, targets = window[:-1], window[1:]
        if self._all_learned and not self._isolate and not missing:
            return Sample(tokens, targets)
        targets = targets.copy()
        targets[len(targets) - missing :] = IGNORE
        if not self._all_learned:
            targets[: stop - start - 1][self._stream.supervised(start + 1, stop) == 0] = IGNORE
        weights = None
        if self._stream.is_weighted:
            weights = np.pad(self._stream.weights(start + 1, stop), (0, missing), constant_values=1)
        if not self._isolate:
            return Sample(tokens, targets, weights=weights)
        begins = self._stream.document_starts(start + 1, stop) - start
        targets[begins - 1] = IGNORE
        return Sample(tokens, targets, positions_in_documents(begins, self._sequence_length), weights)

    def describe(self) -> str:
        """Describe how documents are arranged into sequences, for the printed plan. Empty for the default."""
        return "documents isolated" if self._isolate else ""


class PackedDataset:
    """Sequences of whole documents of a split of prepared text. A sequence has as many documents as fit, or one
    document, followed by padding.

    Documents that are longer than a sequence are split, but conversations, which are meaningless without their
    beginning, are truncated. All tokens of a document except the first are targets. ``dataset[i]`` is a pure function
    of i and may be called from any number of threads. Every process uses 24 bytes of memory per document.
    """

    def __init__(
        self,
        prepared: Prepared,
        split: str,
        sequence_length: int,
        *,
        isolate_documents: bool,
        skips: bool = False,
        packs: bool = True,
    ) -> None:
        """Open a split. Raises ``UserError`` if it has no targets.

        Args:
            split: ``train`` or ``validation``.
            isolate_documents: give samples positions, which restart in each document and in the padding.
            skips: leave out conversations without targets after truncation, instead of raising an error.
            packs: put several documents into a sequence.
        """
        self._stream = prepared.stream(split)
        self._sequence_length = sequence_length
        self._isolate = isolate_documents
        pieces = find_pieces(self._stream, sequence_length, truncate=self._stream.is_supervised)
        if not len(pieces.starts):
            raise _nothing_to_predict(f"{split} split")
        starts, lengths = pieces.starts, pieces.lengths
        self._cut_documents = 0
        self._longest = pieces.longest
        self._left_out = 0
        if self._stream.is_supervised and pieces.cut_documents:
            self._cut_documents = pieces.cut_documents
            is_empty = _without_targets(self._stream, pieces, sequence_length)
            if is_empty.all() or (is_empty.any() and not skips):
                raise _cut_off(prepared, sequence_length, may_skip=not skips)
            starts = starts[~is_empty]
            lengths = lengths[~is_empty]
            self._left_out = int(is_empty.sum())
        self._kept_share = float(lengths.sum() / self._stream.tokens)
        packing = best_fit(lengths, sequence_length + 1) if packs else unpacked(len(lengths))
        self._packs = packs
        self._starts, self._lengths = starts[packing.order], lengths[packing.order]
        self._bounds = packing.bounds
        isolated = "-isolated" if isolate_documents and packs else ""
        how = "best_fit" if packs else "padded"
        self.fingerprint = f"{prepared.key}-{split}-{sequence_length}-{how}{isolated}"
        """Identity of the samples, equal on every machine for equal samples."""

    def __len__(self) -> int:
        return len(self._bounds) - 1

    def __getitem__(self, index: int) -> Sample:
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        first, last = self._bounds[index], self._bounds[index + 1]
        window = np.zeros(self._sequence_length + 1, np.int64)
        is_target = np.zeros(self._sequence_length + 1, bool)
        weights = np.ones(self._sequence_length + 1, np.float32) if self._stream.is_weighted else None
        begins = np.empty(last - first + 1, np.int64)
        filled = 0
        for place, piece in enumerate(range(first, last)):
            start, length = int(self._starts[piece]), int(self._lengths[piece])
            begins[place] = filled
            window[filled : filled + length] = self._stream.read(start, start + length)
            # The first token is not a target, since it would be predicted from another document.
            is_target[filled + 1 : filled + length] = (
                self._stream.supervised(start + 1, start + length) if self._stream.is_supervised else True
            )
            if weights is not None:
                weights[filled : filled + length] = self._stream.weights(start, start + length)
            filled += length
        begins[-1] = filled  # the padding counts as a document without targets
        targets = np.where(is_target[1:], window[1:], IGNORE)
        weights = None if weights is None else weights[1:]
        if not self._isolate:
            return Sample(window[:-1], targets, weights=weights)
        positions = positions_in_documents(begins[1:], self._sequence_length)
        return Sample(window[:-1], targets, positions, weights)

    def describe(self) -> str:
        """Describe how documents are arranged into sequences, for the printed plan."""
        used = np.minimum(np.add.reduceat(self._lengths, self._bounds[:-1]), self._sequence_length).sum()
        share = used / (len(self) * self._sequence_length)
        held = "sequences of whole documents" if self._packs else "sequences of one document each"
        text = f"{len(self):,} {held}, {100 * share:.1f} % filled"
        text += ", isolated" if self._isolate and self._packs else ""
        if self._cut_documents:
            text += f"; {_count(self._cut_documents, 'conversation')} truncated to {self._sequence_length} tokens"
        if self._left_out:
            text += f", {self._left_out:,} of them left out as nothing to train on remains"
        return text

    def truncation(self, name: str = "data") -> str:
        """Return a warning if truncation removes most tokens; empty if not. ``name``: config key of the data."""
        if not self._cut_documents or self._kept_share >= 0.5:
            return ""
        return removed(
            f"{_count(self._cut_documents, 'conversation')} of {name}", 1 - self._kept_share, self._sequence_length,
            self._longest,
        )  # fmt: skip


def open_dataset(
    prepared: Prepared, split: str, section: DataSection, *, isolates: bool = False, to_end: bool = False
) -> TokenDataset | PackedDataset:
    """Open the split ``train`` or ``validation`` as a dataset, according to ``data.packing`` and
    ``data.isolate_documents``.

    Args:
        isolates: give samples positions even if ``section`` does not require them.
        to_end: without packing, use all tokens, with padding in the last sequence.
    """
    length, isolate = section.sequence_length, isolates or section.isolates
    if section.packing != "split":
        skips, packs = section.bad_rows == "skip", section.packing == "best_fit"
        return PackedDataset(prepared, split, length, isolate_documents=isolate, skips=skips, packs=packs)
    return TokenDataset(prepared, split, length, isolate_documents=isolate, to_end=to_end)


def positions_in_documents(begins: np.ndarray, length: int) -> np.ndarray:
    """Return positions [length], int64, that restart at each of ``begins`` (ascending). Entries at or past the end
    are ignored."""
    begins = np.concatenate(([0], begins[begins < length]))
    return np.arange(length) - np.repeat(begins, np.diff(begins, append=length))


def collate(samples: Sequence[Sample], ids: np.ndarray) -> Batch:
    """Stack samples into a batch. ``ids`` [batch]: sample numbers. All targets of a sample with a negative id are
    replaced with ``IGNORE``."""
    targets = np.stack([sample.targets for sample in samples])
    targets[ids < 0] = IGNORE
    tokens = np.stack([sample.tokens for sample in samples])
    rows = [sample.positions for sample in samples if sample.positions is not None]
    positions = torch.from_numpy(np.stack(rows)) if rows else None
    sample_ids = torch.from_numpy(ids.astype(np.int64))
    weights = None
    if any(sample.weights is not None for sample in samples):  # in a mixture, some sources may have no weights
        ones = np.ones(tokens.shape[1], np.float32)
        weights = torch.from_numpy(np.stack([ones if sample.weights is None else sample.weights for sample in samples]))
    return Batch(torch.from_numpy(tokens), torch.from_numpy(targets), sample_ids, positions, weights)


def _without_targets(stream: TokenStream, pieces: Pieces, sequence_length: int) -> np.ndarray:
    """Return a mask of the pieces without targets after truncation, [pieces], bool."""
    is_empty = np.zeros(len(pieces.starts), bool)
    for piece in np.flatnonzero(pieces.lengths > sequence_length).tolist():  # includes exact fits
        start = int(pieces.starts[piece])
        is_empty[piece] = not stream.supervised(start + 1, start + sequence_length + 1).any()
    return is_empty


def _cut_off(prepared: Prepared, sequence_length: int, *, may_skip: bool) -> UserError:
    """Return the error for conversations that have no targets after truncation, in either split."""
    shown = list[str]()
    count = 0
    longest = 0
    for split in (split for split in SPLITS if prepared.shards[split]):
        stream = prepared.stream(split)
        pieces, starts = find_pieces(stream, sequence_length, truncate=True), stream.all_document_starts()
        for start in pieces.starts[_without_targets(stream, pieces, sequence_length)].tolist():
            document = int(np.searchsorted(starts, start))
            stop = int(starts[document + 1]) if document + 1 < len(starts) else stream.tokens
            count, longest = count + 1, max(longest, stop - start)
            if len(shown) < SHOWN_ROWS:
                place = prepared.place(split, document)
                text = prepared.tokenizer.decode(stream.read(start, min(stop, start + sequence_length + 1)).tolist())
                quoted = f"the conversation that begins {' '.join(text.split())[:_QUOTED_CHARACTERS]!r}"
                shown.append(
                    f"{quoted if place is None else place} has {stop - start:,} tokens and nothing to train on in the "
                    f"first {sequence_length:,}"
                )
    cure = f"use data.sequence_length={longest - 1}"
    if may_skip:
        cure += f", or leave {'it' if count == 1 else 'them'} out with data.bad_rows=skip"
    why = f"data.sequence_length={sequence_length} truncates the replies of the assistant"
    if count == 1:
        return UserError(f"{shown[0]}: {why}; {cure}")
    more = [f"and {count - len(shown):,} more"] if count > len(shown) else []
    return UserError(*shown, *more, head=f"{count:,} conversations have nothing to train on: {why}; {cure}")


def removed(what: str, share: float, sequence_length: int, longest: int) -> str:
    """Return a warning that truncation removes most tokens."""
    return (
        f"data.sequence_length={sequence_length} truncates {what} and removes {100 * share:.0f} % of all tokens; to "
        f"keep all {longest:,} tokens of the longest: data.sequence_length={longest - 1}"
    )


def _nothing_to_predict(what: str) -> UserError:
    return UserError(
        f"the {what} has no document with at least two tokens, so there is nothing to predict; add text to data.path"
    )


def _too_short(prepared: Prepared, split: str, sequence_length: int) -> UserError:
    """Return the error for too little text. It suggests the longest sequence length that works, if that is long
    enough."""
    has = prepared.splits[split]
    what = "training" if split == "train" else "validation"
    message = (
        f"data.sequence_length={sequence_length} needs {sequence_length + 1} tokens, but the {what} text has "
        f"{has.tokens} ({_count(has.text_bytes, 'byte')} of {_count(has.documents, prepared.noun)})"
    )
    longest = min(split_counts.tokens for split_counts in prepared.splits.values()) - 1
    if longest < _SHORTEST_USEFUL:
        limit = f"only data.sequence_length={longest}, too short for training" if longest > 0 else "no length at all"
        return UserError(f"{message}; add text to data.path (this text allows {limit})")
    return UserError(f"{message}; add text to data.path, or use data.sequence_length={longest}")


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
