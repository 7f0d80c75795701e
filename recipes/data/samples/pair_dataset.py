"""Datasets of prepared answers, and batches of them: pairs of answers, or single answers with a label.

A sample has one pair, or with ``data.packing=best_fit`` several. Its two sequences are the chosen answers and the
rejected answers of all its pairs. For single answers, the second sequence is the same prompt followed by
the answer of another row. From these mismatched pairs, KTO estimates the KL divergence of the model from the reference.
"""

from collections.abc import Sequence
from typing import ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor

from serried.configs.errors import UserError
from serried.recipes.data.chat.preference_pairs import LEARNED, REJECTED
from serried.recipes.data.prepared.prepare import Prepared
from serried.recipes.data.samples.packing import best_fit, unpacked
from serried.recipes.data.samples.token_dataset import positions_in_documents, removed
from serried.recipes.models.layers.lm_head import IGNORE

_WIDTH_MULTIPLE = 32
"""Batches are padded to a multiple of this length, for fewer distinct shapes and aligned rows."""

_TO_OTHER_ROW = 0.382
"""Distance to the row with the other answer, as a fraction of all rows. Neighboring rows, or rows half a file apart,
may have the same prompt."""


class Pair(NamedTuple):
    """A pair: the chosen and the rejected answer, each after the prompt and without padding.

    For single answers, the second side has the answer of another row.
    """

    tokens: tuple[np.ndarray, np.ndarray]
    """Each [tokens], int64"""
    targets: tuple[np.ndarray, np.ndarray]
    """Following tokens; ``IGNORE`` outside the answer"""
    reference: np.ndarray
    """[2], fp64: log-probabilities of both answers under the reference model; NaN if unknown"""
    weight: float = 1.0
    """Weight of the pair in the loss."""
    is_desired: bool = True
    """Label of a single answer."""


class PairBatch(NamedTuple):
    """Pairs of one forward pass. Sequences are alternately chosen and rejected answers.

    P is the largest number of pairs in a sample.
    """

    tokens: Tensor
    """[2 x batch, sequence], int64"""
    targets: Tensor
    """[2 x batch, sequence], int64; ``IGNORE`` where there is no target"""
    sample_ids: Tensor
    """[batch], int64; negative for padding, which has zero weight"""
    reference: Tensor
    """[batch, P, 2], fp64: log-probabilities under the reference model"""
    weights: Tensor
    """[batch, P], fp64: weight of each pair; 0 where there is none"""
    positions: Tensor | None = None
    """[2 x batch, sequence], int64, position in the answer with its prompt; None if each sequence has one answer and
    the model does not depend on its length"""
    pairs: Tensor | None = None
    """[2 x batch, sequence], int64: index of each token's pair, up to P - 1; None if each sequence has one pair"""
    is_desired: Tensor | None = None
    """[batch, P], bool: labels of single answers; None for pairs"""
    divergence: Tensor | None = None
    """Estimated divergence from the reference in the global batch, a scalar. If it is given, the batch of single
    answers has only their own sequences, [batch, sequence]."""

    def side(self, side: int) -> "PairBatch":
        """Return only the first (0) or the second (1) sequence of each sample."""
        rows = (self.tokens, self.targets, self.positions, self.pairs)
        tokens, targets, positions, pairs = (None if row is None else row[side::2].contiguous() for row in rows)
        assert tokens is not None and targets is not None
        reference = self.reference[:, :, side : side + 1]
        return self._replace(tokens=tokens, targets=targets, positions=positions, pairs=pairs, reference=reference)

    def sums(self, values: Tensor) -> Tensor:
        """Return the sums of ``values`` [sequences, sequence] over the tokens of each answer, [batch x P, sides]."""
        samples, most = self.weights.shape
        if self.pairs is None:
            sums = values.sum(1, keepdim=True)
        else:
            numbers = torch.arange(most, device=values.device).view(1, most, 1)
            sums = values.unsqueeze(1).where(self.pairs.unsqueeze(1) == numbers, 0).sum(2)
        return sums.view(samples, -1, most).transpose(1, 2).flatten(0, 1)


class PairDataset:
    """Split of prepared pairs. ``dataset[i]`` is a pure function of i and may be called from any number of threads."""

    kind: ClassVar[str] = "pairs"

    def __init__(self, prepared: Prepared, split: str, sequence_length: int, *, packs: bool = False) -> None:
        """Open a split. Longer answers are truncated. Raises ``UserError`` if there are no pairs in ``split``.

        ``packs``: put several pairs into a sample.
        """
        self._stream, self._length = prepared.stream(split), sequence_length
        starts = self._stream.all_document_starts()
        if not len(starts):
            raise UserError(f"the {split} split has no {self.kind}; add rows to data.path")
        supervised = self._stream.supervised(0, self._stream.tokens)
        self._bounds = np.stack((starts, self._middles(starts, supervised), np.append(starts[1:], len(supervised))), 1)
        self._check_labels(split, supervised[starts] & REJECTED != 0)
        self._lengths = self._lengths_of_sides()
        room = self._lengths.max(1).clip(1, sequence_length)
        self._packing = best_fit(room, sequence_length) if packs else unpacked(len(room))
        self.most_pairs = int(np.diff(self._packing.bounds).max())
        """Largest number of pairs in a sample."""
        kept = np.minimum(self._lengths - 1, sequence_length)
        self.mean_length = float(kept.max(1).sum() / len(self) if packs else kept.mean())
        """Mean length of a sequence in tokens."""
        self.fingerprint = f"{prepared.key}-{split}-{sequence_length}-{self.kind}{'-best_fit' if packs else ''}"
        """Identity of the samples, equal on every machine for equal samples."""
        self.reference: np.ndarray | None = None
        """[samples, 2 x most_pairs or more], fp64: log-probabilities under the reference model, if known."""

    def _middles(self, starts: np.ndarray, supervised: np.ndarray) -> np.ndarray:
        """Return the start of each rejected answer, [pairs]. ``supervised``: bits ``LEARNED`` and ``REJECTED`` of each
        token."""
        del starts
        sides = supervised & REJECTED
        return np.flatnonzero((sides[1:] != 0) & (sides[:-1] == 0)) + 1

    def _check_labels(self, split: str, is_rejected: np.ndarray) -> None:
        """Raise ``UserError`` if all labels in ``split`` are equal. ``is_rejected`` [rows]: whether each label is
        false."""

    def _lengths_of_sides(self) -> np.ndarray:
        """Return the number of tokens of both sequences of each pair, [pairs, 2]."""
        return np.diff(self._bounds, axis=1)

    def __len__(self) -> int:
        return len(self._packing.bounds) - 1

    def __getitem__(self, index: int) -> tuple[Pair, ...]:
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        first, last = self._packing.bounds[index : index + 2].tolist()
        known = np.full((last - first, 2), np.nan)
        if self.reference is not None:
            known = self.reference[index, : 2 * (last - first)].reshape(-1, 2)
        return tuple(
            self._pair(pair)._replace(reference=reference)
            for pair, reference in zip(self._packing.order[first:last].tolist(), known, strict=True)
        )

    def _pair(self, pair: int) -> Pair:
        start, second, stop = self._bounds[pair].tolist()
        chosen, rejected = self._side((start, second)), self._side((second, stop))
        return Pair((chosen[0], rejected[0]), (chosen[1], rejected[1]), np.empty(0), self._weight(start))

    def _weight(self, start: int) -> float:
        """Return the weight of the row that starts at ``start``."""
        return float(self._stream.weights(start, start + 1)[0])

    def _side(self, *ranges: tuple[int, int]) -> tuple[np.ndarray, np.ndarray]:
        """Return the tokens and targets of a sequence made of ``ranges`` of the stream, truncated."""
        window = np.concatenate([self._stream.read(*part) for part in ranges])[: self._length + 1].astype(np.int64)
        supervised = np.concatenate([self._stream.supervised(*part) for part in ranges])[: self._length + 1]
        return window[:-1], np.where(supervised[1:] & LEARNED != 0, window[1:], IGNORE)

    @property
    def truncated(self) -> int:
        """Number of truncated answers."""
        return int((self._own_lengths > self._length + 1).sum())

    @property
    def _own_lengths(self) -> np.ndarray:
        """Number of tokens of each answer with its prompt, [answers]."""
        return self._lengths.ravel()

    def describe(self) -> str:
        """Describe how answers are truncated and packed, for the printed plan. Empty if they are not."""
        said = [f"{self.truncated:,} of {self._own_lengths.size:,} answers truncated"] if self.truncated else []
        if self.most_pairs > 1:
            said.append(f"packed into {len(self):,} samples of up to {self.most_pairs} {self.kind}")
        return ", ".join(said)

    def truncation(self) -> str:
        """Return a warning if truncation removes most tokens; empty if not."""
        lengths = self._own_lengths
        kept = float(np.minimum(lengths, self._length + 1).sum() / lengths.sum())
        return "" if kept >= 0.5 else removed(f"{self.truncated:,} answers", 1 - kept, self._length, int(lengths.max()))


class UnpairedDataset(PairDataset):
    """Split of prepared single answers, each with a label."""

    kind = "answers"

    def _middles(self, starts: np.ndarray, supervised: np.ndarray) -> np.ndarray:
        """Return the start of each answer, after its prompt, [answers]."""
        learned = np.flatnonzero(supervised & LEARNED)
        return learned[np.searchsorted(learned, starts)]

    def _check_labels(self, split: str, is_rejected: np.ndarray) -> None:
        if split == "train" and is_rejected.all() == is_rejected.any():
            label = "false" if is_rejected[0] else "true"
            raise UserError(
                f"all {len(is_rejected):,} answers of the {split} split have the label {label}, and KTO compares good "
                f"answers with bad ones; add rows with the label {'true' if is_rejected[0] else 'false'}"
            )

    def _other(self, row: int) -> int:
        """Return the row whose answer is used as the other answer to the prompt of ``row``."""
        return (row + max(1, round(_TO_OTHER_ROW * len(self._bounds)))) % len(self._bounds)

    def _lengths_of_sides(self) -> np.ndarray:
        starts, middles, stops = self._bounds.T
        return np.stack((stops - starts, middles - starts + np.roll(stops - middles, -self._other(0))), 1)

    @property
    def _own_lengths(self) -> np.ndarray:
        return self._lengths[:, 0]

    def _pair(self, pair: int) -> Pair:
        (start, middle, stop), (_, other, end) = self._bounds[[pair, self._other(pair)]].tolist()
        own, mixed = self._side((start, stop)), self._side((start, middle), (other, end))
        is_desired = not int(self._stream.supervised(start, start + 1)[0]) & REJECTED
        return Pair((own[0], mixed[0]), (own[1], mixed[1]), np.empty(0), self._weight(start), is_desired)


def collate_pairs(
    samples: Sequence[Sequence[Pair]],
    ids: np.ndarray,
    sequence_length: int,
    *,
    whole: bool,
    packed: bool = False,
    labelled: bool = False,
    isolated: bool = False,
) -> PairBatch:
    """Stack samples into a batch, padded at the end to about the longest one, or to ``sequence_length`` if ``whole``.

    Args:
        samples: Pairs of each sample.
        ids: Sample numbers, [batch]. A sample with a negative number has no targets and no weight.
        whole: Whether to pad to ``sequence_length``.
        packed: Whether samples may have several pairs, which must not see each other.
        labelled: Whether these are single answers with labels.
        isolated: Whether positions are needed even if a sample has one pair, to separate it from its padding.
    """
    sequences = [[pair.tokens[side] for pair in sample] for sample in samples for side in (0, 1)]
    longest, most = max(sum(map(len, parts)) for parts in sequences), max(map(len, samples))
    width = sequence_length if whole else min(-(-longest // _WIDTH_MULTIPLE) * _WIDTH_MULTIPLE, sequence_length)
    shape = (len(sequences), width)
    tokens, targets = np.zeros(shape, np.int64), np.full(shape, IGNORE, np.int64)
    positions, pairs = np.empty(shape, np.int64), np.zeros(shape, np.int64)
    for row, parts in enumerate(sequences):
        ends = np.cumsum([len(part) for part in parts])
        tokens[row, : ends[-1]] = np.concatenate(parts)
        targets[row, : ends[-1]] = np.concatenate([pair.targets[row % 2] for pair in samples[row // 2]])
        positions[row] = positions_in_documents(ends, width)  # the padding counts as one more document
        pairs[row, : ends[-1]] = np.repeat(np.arange(len(parts)), np.diff(ends, prepend=0))
    targets[np.repeat(ids < 0, 2)] = IGNORE
    reference, weights = np.zeros((len(samples), most, 2)), np.zeros((len(samples), most))
    desired = np.zeros((len(samples), most), bool)
    for number, sample in enumerate(samples):
        for place, pair in enumerate(sample):
            reference[number, place], desired[number, place] = pair.reference, pair.is_desired
            weights[number, place] = pair.weight if ids[number] >= 0 else 0.0
    return PairBatch(
        torch.from_numpy(tokens),
        torch.from_numpy(targets),
        torch.from_numpy(ids.astype(np.int64)),
        torch.from_numpy(reference),
        torch.from_numpy(weights),
        torch.from_numpy(positions) if packed or isolated else None,
        torch.from_numpy(pairs) if packed else None,
        torch.from_numpy(desired) if labelled else None,
    )
