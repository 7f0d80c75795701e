"""Stochastic rounding of bf16 weights: up or down at random, unbiased on average.

The random bits are a hash of the seed, the optimizer step, the parameter name and the element's index in the full
parameter. Every layout, and a resumed run, therefore rounds each element the same way.
"""

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from math import prod

import torch
from torch import Tensor

from serried.parallel.distributed_model import DistributedModel
from serried.parallel.layout.local_shards import HeldTensor

_ELEMENTS_AT_ONCE, _ON_A_CPU = 2**22, 2**18
"""Largest number of elements per piece, to bound working memory.

On a CPU pieces should fit into its caches, but there are at most about ``_PIECES_ON_A_CPU`` pieces.
"""
_PIECES_ON_A_CPU = 4
_LOST_BITS = 16
"""Mantissa bits of fp32 that bf16 lacks."""

Place = tuple[slice, ...]
"""Index of a piece in a rank's shard of a parameter."""


class Rounding:
    """Stochastic rounding of this rank's shards of the parameters of a model."""

    def __init__(self, held: Iterable[HeldTensor], seed: int) -> None:
        self._held = {shard.tensor: shard for shard in held}
        self._keys = {tensor: _key(seed, shard.name) for tensor, shard in self._held.items()}

    @classmethod
    def of(cls, model: DistributedModel, seed: int) -> "Rounding":
        """Return the ``Rounding`` for the parameters of ``model``."""
        return cls(model.parameters, seed)

    @classmethod
    def whole(cls, parameters: Iterable[Tensor], seed: int = 0) -> "Rounding":
        """Return the ``Rounding`` for unnamed, unsharded ``parameters`` in one process."""
        return cls((HeldTensor.whole("", parameter) for parameter in parameters), seed)

    def pieces(self, parameter: Tensor) -> Iterator[Place]:
        """Yield indices of pieces that cover this rank's shard, each small enough to process in fp32."""
        sizes, most = self._held[parameter].box.sizes, _ELEMENTS_AT_ONCE
        if parameter.device.type == "cpu":
            most = min(most, max(_ON_A_CPU, -(-prod(sizes) // _PIECES_ON_A_CPU)))
        yield from _pieces(sizes, most)

    def round(self, values: Tensor, parameter: Tensor, place: Place, step: Tensor) -> Tensor:
        """Round new values of the piece at ``place`` to bf16.

        Args:
            values: New values in fp32. They are overwritten.
            parameter: The parameter.
            place: Index of the piece.
            step: The optimizer step, on the device.
        """
        bits = values.view(torch.int32)
        bits.add_(self._random_bits(values, parameter, place, step)).bitwise_and_(-1 << _LOST_BITS)
        return values.bfloat16()

    def _random_bits(self, values: Tensor, parameter: Tensor, place: Place, step: Tensor) -> Tensor:
        """Return 16 random bits for each of ``values``, from a key per row and the column."""
        held = self._held[parameter]
        starts = list(held.box.starts)
        for dim, interval in enumerate(place):
            starts[dim] += interval.start
        *rows, columns = [
            torch.arange(start, start + size, device=values.device)
            for start, size in zip(starts or [0], values.shape or [1], strict=True)
        ]
        index = torch.zeros((), dtype=torch.int64, device=values.device)
        for size, row in zip(held.spec.shape, rows, strict=False):
            index = index.unsqueeze(-1) * size + row
        of_step = _mixed(step.long() * _ODD + self._keys[parameter])
        keys = _mixed(index * _ODD + of_step).bitwise_right_shift_(32).int()
        bits = keys.unsqueeze(-1) ^ columns.int()
        bits ^= (bits >> 16) & 0xFFFF  # the rest is "lowbias32" of https://nullprogram.com/blog/2018/07/31/
        bits *= 0x7FEB352D
        bits ^= (bits >> 15) & 0x1FFFF
        bits *= 0x846CA68B - 2**32
        return ((bits >> 16) & 0xFFFF).view(values.shape)


_ODD = 0x9E3779B97F4A7C15 - 2**64


def _mixed(x: Tensor) -> Tensor:
    """Mix the bits of int64 numbers (the finalizer of https://prng.di.unimi.it/splitmix64.c)."""
    x = (x ^ ((x >> 30) & (2**34 - 1))) * (0xBF58476D1CE4E5B9 - 2**64)
    x = (x ^ ((x >> 27) & (2**37 - 1))) * (0x94D049BB133111EB - 2**64)
    return x ^ ((x >> 31) & (2**33 - 1))


def _key(seed: int, name: str) -> int:
    digest = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


def _pieces(sizes: Sequence[int], most: int) -> Iterator[Place]:
    if not prod(sizes):
        return
    if not sizes:
        yield ()
        return
    entry = prod(sizes[1:])
    if len(sizes) > 2 and entry > most:
        for index in range(sizes[0]):
            yield from ((slice(index, index + 1), *place) for place in _pieces(sizes[1:], most))
        return
    step = max(1, most // entry)
    for start in range(0, sizes[0], step):
        yield (slice(start, min(start + step, sizes[0])),)
