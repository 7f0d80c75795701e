"""Rotary embeddings (https://arxiv.org/abs/2104.09864) and the scaling of their frequencies for long contexts.

The formulas are the same as in transformers. Two types of scaling depend on the length of a document: ``dynamic`` and
``longrope`` change the frequencies of documents that are longer than the original context. The length is the
length of the full document, regardless of packing and sharding; in generation, it is the number of tokens so far.

Shapes: B batch, S sequence, E rotated dims of a head, P = E / 2 rotary pairs.
"""

import math

import torch
from torch import Tensor

from serried.recipes.models.layers.rope_config import Rope, RopeScaling

Rotation = tuple[Tensor, Tensor]
"""Cosines and sines of the angles, [S, E], or [B, 1, S, E] if positions differ between sequences; fp32."""


def rope_frequencies(dim: int, rope: Rope, *, is_long: bool = False) -> Tensor:
    """Return the angle per position of each rotary pair, [P], fp32.

    ``is_long``: whether documents are longer than the original context, for ``longrope``. For ``dynamic``, the result
    is the unscaled frequencies, which apply to documents within the original context.
    """
    scaling = rope.scaling
    powers = rope.base ** (torch.arange(0, dim, 2, dtype=torch.int64).float() / dim)
    frequencies = 1.0 / powers
    if scaling is None or scaling.rope_type == "dynamic":
        frequencies[int(rope.fraction * dim // 2) :] = 0
        return frequencies
    if scaling.rope_type == "linear":
        return frequencies / scaling.factor
    if scaling.rope_type == "longrope":
        return 1.0 / (torch.tensor(scaling.long_factor if is_long else scaling.short_factor) * powers)
    if scaling.rope_type == "yarn":
        kept = 1 - _ramp_of_yarn(dim, rope.base, scaling)
        return 1.0 / (scaling.factor * powers) * (1 - kept) + frequencies * kept
    low, high = scaling.low_freq_factor or 0, scaling.high_freq_factor or 0
    turns = scaling.original * frequencies / (2 * math.pi)  # rotations over the original context
    blend = ((turns - low) / (high - low)).clamp(0, 1)
    return (1 - blend) * frequencies / scaling.factor + blend * frequencies


def _ramp_of_yarn(dim: int, base: float, scaling: RopeScaling) -> Tensor:
    """Return 0 for pairs with unchanged frequencies, 1 for pairs with fully divided frequencies, and a linear ramp in
    between, [P]."""

    def pair_with(turns: float) -> float:
        return dim * math.log(scaling.original / (turns * 2 * math.pi)) / (2 * math.log(base))

    first, last = pair_with(scaling.beta_fast or 32), pair_with(scaling.beta_slow or 1)
    if scaling.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, dim - 1)
    width = last - first if last != first else 0.001
    return ((torch.arange(dim // 2, dtype=torch.float32) - first) / width).clamp(0, 1)


def document_lengths(positions: Tensor) -> Tensor:
    """Return the length of the document of each token. ``positions`` [B, S] restart from 0 with each document."""
    length = positions.shape[1]
    index = torch.arange(length, device=positions.device)
    is_last = torch.ones_like(positions, dtype=torch.bool)
    is_last[:, :-1] = positions[:, 1:] == 0
    ends = torch.where(is_last, index, length).flip(1).cummin(1).values.flip(1)  # index of the document's last token
    return positions.gather(1, ends) + 1


class RotaryEmbedding:
    """Rotations of queries and keys, computed in fp32.

    The tables are not buffers. They are computed on the CPU at first use, so that neither meta construction nor mixed
    precision changes them. The longest table so far is used for all shorter lengths, since every length occurs during
    generation.
    """

    def __init__(self, dim: int) -> None:
        self._dim = dim
        self.tables: dict[tuple[torch.device, Rope, bool], Rotation] = {}

    def table(self, rope: Rope, length: int, device: torch.device, *, is_long: bool = False) -> Rotation:
        """Return the rotations of the positions up to ``length``; ``is_long`` as in ``rope_frequencies``."""
        key = (device, rope, is_long)
        if key not in self.tables or self.tables[key][0].shape[0] < length:
            with torch.autocast(device.type, enabled=False):
                frequencies = rope_frequencies(rope.dim or self._dim, rope, is_long=is_long)
                cos, sin = _rotation(torch.outer(torch.arange(length).float(), frequencies), rope)
                self.tables[key] = (cos.to(device), sin.to(device))
        cos, sin = self.tables[key]
        return cos[:length], sin[:length]

    def of_long_documents(self, rope: Rope, places: Tensor, lengths: Tensor, longest: int) -> Rotation:
        """Return rotations that depend on the lengths of documents.

        Args:
            places: positions of the tokens in their documents, [S] or [B, S].
            lengths: lengths of these documents, of the same shape or a scalar.
            longest: upper bound on the lengths.
        """
        scaling = rope.scaling
        assert scaling is not None
        if scaling.rope_type == "longrope":
            is_long = (lengths > scaling.original).unsqueeze(-1)
            long, short = (self.table(rope, longest, places.device, is_long=which) for which in (True, False))
            cos, sin = (torch.where(is_long, long[part][places], short[part][places]) for part in (0, 1))
        else:
            with torch.autocast(places.device.type, enabled=False):
                stretch = scaling.factor * lengths.clamp(min=scaling.original) / scaling.original - (scaling.factor - 1)
                bases = rope.base * stretch ** (self._dim / (self._dim - 2))
                exponents = torch.arange(0, self._dim, 2, device=places.device).float() / self._dim
                frequencies = 1.0 / bases.unsqueeze(-1) ** exponents
                cos, sin = _rotation(places.unsqueeze(-1).float() * frequencies, rope)
        return (cos, sin) if places.ndim == 1 else (cos.unsqueeze(1), sin.unsqueeze(1))


def _rotation(angles: Tensor, rope: Rope) -> Rotation:
    """Return cosines and sines [..., E] of ``angles`` [..., P], multiplied by ``RopeScaling.attention``."""
    angles = torch.cat((angles, angles), dim=-1)
    factor = rope.scaling.attention if rope.scaling else 1.0
    return angles.cos() * factor, angles.sin() * factor


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate each pair (i, i + E/2) of ``x`` [B, heads, S, E] by its angle. The result has x's dtype.

    ``cos`` and ``sin`` are [S, E], or [B, 1, S, E] if positions differ between sequences, fp32. If they are narrower
    than ``x``, only the leading elements of each head are rotated.
    """
    if cos.shape[-1] < x.shape[-1]:
        turned, rest = x.tensor_split([cos.shape[-1]], dim=-1)
        return torch.cat((rotate(turned, cos, sin), rest), dim=-1)
    first, second = x.chunk(2, dim=-1)
    return (x * cos + torch.cat((-second, first), dim=-1) * sin).to(x.dtype)
