"""Samples by number: windows of a memory-mapped stream of tokens."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from configs.errors import UserError
from recipes.data.prepare import Prepared
from recipes.models.head import IGNORE

_SHORTEST_USEFUL = 16
"""Tokens. A shorter sequence is no remedy for a lack of text."""


class Sample(NamedTuple):
    """One sequence. ``targets[t]`` is the token that follows ``tokens[t]``."""

    tokens: np.ndarray
    """[sequence], int64"""
    targets: np.ndarray
    """[sequence], int64; ``IGNORE`` where there is none"""


class Batch(NamedTuple):
    """Sequences of one forward pass."""

    tokens: Tensor
    """[batch, sequence], int64"""
    targets: Tensor
    """[batch, sequence], int64; ``IGNORE`` where there is none"""
    sample_ids: Tensor
    """[batch], int64; below 0: padding, which has no targets"""


class TokenDataset:
    """Split of prepared text as windows: sample i is tokens [i x S, i x S + S], the targets shifted by one.

    Windows share their border token only, as the last target of one and the first input of the next. The tokens left
    over at the end, fewer than S + 1, are not used. ``dataset[i]`` is a pure function of i and may be called from any
    number of threads.
    """

    def __init__(self, prepared: Prepared, split: str, sequence_length: int) -> None:
        """``split`` is ``train`` or ``validation``; raises ``UserError`` where it has not one whole window."""
        self._stream = prepared.stream(split)
        if self._stream.tokens <= sequence_length:
            raise _too_short(prepared, split, sequence_length)
        self._length = (self._stream.tokens - 1) // sequence_length
        self._sequence_length = sequence_length
        self.fingerprint = f"{prepared.key}-{split}-{sequence_length}"
        """Equal for equal samples, on any machine."""

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> Sample:
        if not 0 <= index < self._length:
            raise IndexError(f"sample {index} of {self._length}")
        start = index * self._sequence_length
        window = self._stream.read(start, start + self._sequence_length + 1).astype(np.int64)
        return Sample(window[:-1], window[1:])


def collate(samples: Sequence[Sample], ids: np.ndarray) -> Batch:
    """Stack samples; ``ids`` [batch] are their numbers, and a row whose id is below 0 loses all its targets."""
    targets = np.stack([sample.targets for sample in samples])
    targets[ids < 0] = IGNORE
    tokens = np.stack([sample.tokens for sample in samples])
    return Batch(torch.from_numpy(tokens), torch.from_numpy(targets), torch.from_numpy(ids.astype(np.int64)))


def _too_short(prepared: Prepared, split: str, sequence_length: int) -> UserError:
    """Say how much there is, and the longest sequence that both splits have, where it is worth training on."""
    has = prepared.splits[split]
    what = "training" if split == "train" else "validation"
    message = (
        f"data.sequence_length={sequence_length} needs {sequence_length + 1} tokens, and the {what} text has "
        f"{has.tokens} ({_count(has.text_bytes, 'byte')} of {_count(has.documents, prepared.noun)})"
    )
    longest = min(each.tokens for each in prepared.splits.values()) - 1
    if longest < _SHORTEST_USEFUL:
        would_do = f"data.sequence_length={longest}, too short to learn from" if longest > 0 else "no length at all"
        return UserError(f"{message}; give more text in data.path: this is enough for {would_do}")
    return UserError(f"{message}; use more text, or at most data.sequence_length={longest}")


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
