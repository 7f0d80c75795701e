"""Dataset of prepared preference pairs, and batches of them."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from serried.configs.errors import UserError
from serried.recipes.data.chat.preference_pairs import LEARNED, REJECTED
from serried.recipes.data.prepared.prepare import Prepared
from serried.recipes.data.samples.token_dataset import removed
from serried.recipes.models.layers.lm_head import IGNORE

_WIDTH_MULTIPLE = 32
"""Batches are padded to a multiple of this length, for fewer distinct shapes and aligned rows."""


class Pair(NamedTuple):
    """A pair: the chosen and the rejected answer, each after the prompt and without padding."""

    tokens: tuple[np.ndarray, np.ndarray]
    """Each [tokens], int64"""
    targets: tuple[np.ndarray, np.ndarray]
    """Following tokens; ``IGNORE`` outside the answer"""
    reference: np.ndarray
    """[2], fp64: log-probabilities of both answers under the reference model; NaN if unknown"""


class PairBatch(NamedTuple):
    """Pairs of one forward pass: alternately chosen and rejected answers."""

    tokens: Tensor
    """[2 x batch, sequence], int64"""
    targets: Tensor
    """[2 x batch, sequence], int64; ``IGNORE`` where there is no target"""
    sample_ids: Tensor
    """[batch], int64; negative for padding, which has zero weight"""
    reference: Tensor
    """[batch, 2], fp64: log-probabilities under the reference model"""
    positions: None = None
    """Always None, since each answer has its own sequence."""


class PairDataset:
    """Split of prepared pairs. ``dataset[i]`` is a pure function of i and may be called from any number of threads."""

    def __init__(self, prepared: Prepared, split: str, sequence_length: int) -> None:
        """Open a split. Longer answers are truncated. Raises ``UserError`` if there are no pairs in ``split``."""
        self._stream, self._length = prepared.stream(split), sequence_length
        starts = self._stream.all_document_starts()
        if not len(starts):
            raise UserError(f"the {split} split has no pairs of answers; give more rows in data.path")
        sides = self._stream.supervised(0, self._stream.tokens) & REJECTED
        seconds = np.flatnonzero((sides[1:] != 0) & (sides[:-1] == 0)) + 1
        self._bounds = np.stack((starts, seconds, np.append(starts[1:], self._stream.tokens)), axis=1)
        lengths = np.diff(self._bounds, axis=1)
        self.truncated = int((lengths > sequence_length + 1).sum())
        """Number of truncated answers."""
        self._longest, self._kept = int(lengths.max()), np.minimum(lengths, sequence_length + 1).sum() / lengths.sum()
        self.mean_length = float(np.minimum(lengths - 1, sequence_length).mean())
        """Mean length of a sequence in tokens."""
        self.fingerprint = f"{prepared.key}-{split}-{sequence_length}-pairs"
        """Identity of the samples, equal on every machine for equal samples."""
        self.reference: np.ndarray | None = None
        """[pairs, 2], fp64: log-probabilities under the reference model, if known."""

    def __len__(self) -> int:
        return len(self._bounds)

    def __getitem__(self, index: int) -> Pair:
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        first, second, stop = self._bounds[index].tolist()
        chosen, rejected = self._side(first, second), self._side(second, stop)
        reference = np.full(2, np.nan) if self.reference is None else self.reference[index]
        return Pair((chosen[0], rejected[0]), (chosen[1], rejected[1]), reference)

    def _side(self, start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
        stop = min(stop, start + self._length + 1)
        window = self._stream.read(start, stop).astype(np.int64)
        is_target = self._stream.supervised(start + 1, stop) & LEARNED != 0
        return window[:-1], np.where(is_target, window[1:], IGNORE)

    def describe(self) -> str:
        """Describe how many answers are truncated, for the printed plan. Empty if none are."""
        return f"{self.truncated:,} of {2 * len(self):,} answers truncated" if self.truncated else ""

    def truncation(self) -> str:
        """Return a warning if truncation removes most tokens; empty if not."""
        if self._kept >= 0.5:
            return ""
        return removed(f"{self.truncated:,} answers", 1 - float(self._kept), self._length, self._longest)


def collate_pairs(pairs: Sequence[Pair], ids: np.ndarray, sequence_length: int, *, whole: bool) -> PairBatch:
    """Stack pairs into a batch, padded at the end to about the longest answer, or to ``sequence_length`` if ``whole``.

    ``ids`` [batch]: sample numbers. Targets of a pair with a negative id are replaced with ``IGNORE``.
    """
    sides = [(pair.tokens[side], pair.targets[side]) for pair in pairs for side in (0, 1)]
    longest = max(len(tokens) for tokens, _ in sides)
    width = sequence_length if whole else min(-(-longest // _WIDTH_MULTIPLE) * _WIDTH_MULTIPLE, sequence_length)
    tokens = np.zeros((len(sides), width), np.int64)
    targets = np.full((len(sides), width), IGNORE, np.int64)
    for row, (its_tokens, its_targets) in enumerate(sides):
        tokens[row, : len(its_tokens)], targets[row, : len(its_targets)] = its_tokens, its_targets
    targets[np.repeat(ids < 0, 2)] = IGNORE
    reference = torch.from_numpy(np.stack([pair.reference for pair in pairs]).astype(np.float64))
    return PairBatch(
        torch.from_numpy(tokens), torch.from_numpy(targets), torch.from_numpy(ids.astype(np.int64)), reference
    )
