"""The order of samples: a pure function of (seed, global index).

Nothing is stored or shuffled: the sample at any position of any epoch is computed from its index, in constant
memory. Ranks, workers and restarts only choose the indices to read, so none of them can change the order, and a
position in the data is a single integer.
"""

import hashlib
import heapq
import math
from collections.abc import Callable, Mapping, Sequence, Sized
from fractions import Fraction
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np

_ROUNDS = 8
_KEY_BYTES = 8 * _ROUNDS  # 64: the size of one BLAKE2b digest
_LARGEST_BLOCK = 2**16
"""Maximum number of samples after which the choice of sources of a mixture repeats. It is kept in memory."""


Order = Callable[[np.ndarray], np.ndarray]
"""Maps global indices [n], int64, >= 0, to sample numbers [n], int64."""


class SampleOrder:
    """An endless order of ``size`` samples. Each epoch contains every sample once, in a different order.

    The permutation of an epoch is a Feistel network (Luby and Rackoff, "How to construct pseudorandom permutations
    from pseudorandom functions", 1988) over the smallest power of two that is at least ``size``. If the result is not a
    sample number, the network is applied again until it is. This cycle walking keeps it a permutation (Black and
    Rogaway, "Ciphers with arbitrary finite domains", 2002). For 3 or more samples, it takes less than 2 applications on
    average.
    """

    def __init__(self, size: int, seed: int) -> None:
        """``size``: number of samples, 1 to 2^62. ``seed``: a 64-bit integer >= 0."""
        self.size, self.seed = size, seed
        bits = max(2, (size - 1).bit_length())
        # The halves may differ by one bit. Their widths are exchanged when they are swapped.
        widths = ((bits // 2, bits - bits // 2), (bits - bits // 2, bits // 2))
        self._rounds = [
            tuple(np.uint64(n) for n in (low, 2**low - 1, high, 2**high - 1)) for low, high in widths * (_ROUNDS // 2)
        ]

    def __call__(self, indices: np.ndarray) -> np.ndarray:
        """Map global indices [n], int64, >= 0, to sample numbers [n], int64, in [0, size)."""
        epochs, positions = np.divmod(np.asarray(indices, np.int64), self.size)
        samples = np.empty_like(positions)
        for epoch in np.unique(epochs):
            here = epochs == epoch
            samples[here] = self._permute(positions[here].astype(np.uint64), self._keys(int(epoch)))
        return samples

    def _keys(self, epoch: int) -> np.ndarray:
        """Return the round keys [rounds], uint64."""
        text = self.seed.to_bytes(8, "little") + epoch.to_bytes(8, "little")
        return np.frombuffer(hashlib.blake2b(text, digest_size=_KEY_BYTES).digest(), "<u8")

    def _permute(self, positions: np.ndarray, keys: np.ndarray) -> np.ndarray:
        numbers = self._feistel(positions, keys)
        while len(outside := np.flatnonzero(numbers >= np.uint64(self.size))):
            numbers[outside] = self._feistel(numbers[outside], keys)
        return numbers.astype(np.int64)

    def _feistel(self, numbers: np.ndarray, keys: np.ndarray) -> np.ndarray:
        """Return a permutation of [0, 2^bits).

        Each round XORs one half with a keyed hash of the other half, and swaps them.
        """
        for key, (low_bits, low_mask, high_bits, high_mask) in zip(keys, self._rounds, strict=True):
            low = numbers & low_mask
            high = (numbers >> low_bits) ^ (_mix(low ^ key) & high_mask)
            numbers = (low << high_bits) | high
        return numbers


class Part(Protocol):
    """One source of a mixture."""

    @property
    def samples(self) -> int: ...
    @property
    def weight(self) -> float:
        """Share of the samples, relative to the other sources' weights."""


@runtime_checkable
class Mixture(Protocol):
    """A data set of several sources, with consecutively numbered samples."""

    parts: Mapping[str, Part]
    """Sources by name, in the order of their sample numbers."""
    is_shuffled_together: bool
    """Whether the samples of all sources are shuffled together, each used once per epoch, like a single source."""


@runtime_checkable
class Stream(Protocol):
    """A data set that is read sequentially, each sample once.

    Sample i is read after all earlier samples that have the same remainder modulo the global batch size.
    """

    def state(self, samples: int) -> dict[str, Any]:
        """Return this rank's part of the position after ``samples`` samples, as JSON data.

        ``load`` receives the parts of all ranks, merged by key.
        """

    def load(self, state: dict[str, Any], samples: int) -> None:
        """Resume after ``samples`` samples from the merged ``state`` of all ranks. The number of ranks may differ."""

    def rewind(self, samples: int) -> None:
        """Go back to the position after ``samples`` samples, a few steps earlier, on the same ranks."""

    def close(self) -> None:
        """Stop reading. No more samples are needed."""


class MixtureOrder:
    """An endless order over several sources with consecutively numbered samples, in proportion to their weights.

    The choice of sources repeats after a block of samples that has an exact count of each source. Within a block, and
    so at any index, the count of each source differs from its share by less than 1: at most 1 - 1/(2m - 2) for m
    sources, which is optimal (Tijdeman, "The chairman assignment problem", 1980). The k-th sample of a source is the
    k-th of its own ``SampleOrder``, whose seed depends on the source's name, so adding another source does not reorder
    it.
    """

    def __init__(self, parts: Mapping[str, Part], seed: int) -> None:
        """``parts``: sources by name, at least one. ``seed``: as in ``SampleOrder``."""
        self._counts = block_counts([part.weight for part in parts.values()])
        self._sources, self._earlier = _spread(self._counts)
        self._orders = [SampleOrder(part.samples, _seed_of(name, seed)) for name, part in parts.items()]
        self._first = np.cumsum([0, *(part.samples for part in parts.values())])

    def __call__(self, indices: np.ndarray) -> np.ndarray:
        """Map global indices [n], int64, >= 0, to sample numbers [n], int64, counted over all sources."""
        sources, places = self.places(indices)
        samples = np.empty_like(places)
        for source, order in enumerate(self._orders):
            here = sources == source
            samples[here] = order(places[here]) + self._first[source]
        return samples

    def places(self, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the source at each of the global ``indices`` [n], and the number of earlier samples of that source.

        Both are [n], int64.
        """
        blocks, within = np.divmod(np.asarray(indices, np.int64), len(self._sources))
        sources = self._sources[within]
        return sources, blocks * np.array(self._counts)[sources] + self._earlier[within]

    def in_turn(self, count: int) -> list[np.ndarray]:
        """Return the sample numbers of each source among the first ``count`` samples.

        Every source is read in order, and again from its start after its end.
        """
        sources, places = self.places(np.arange(count))
        sizes = np.diff(self._first)
        return [self._first[source] + places[sources == source] % size for source, size in enumerate(sizes)]


def sample_order(dataset: Sized, seed: int) -> Order:
    """Return the order of the training samples of ``dataset``."""
    if isinstance(dataset, Stream):
        return lambda indices: np.asarray(indices, np.int64)
    if isinstance(dataset, Mixture) and not dataset.is_shuffled_together:
        return MixtureOrder(dataset.parts, seed)
    return SampleOrder(len(dataset), seed)


def evaluation_samples(dataset: Sized, count: int) -> dict[str, np.ndarray]:
    """Return the first ``count`` samples for an evaluation by source, or all samples if there are fewer.

    For a mixture, their numbers are in proportion to the weights. A single source has the name "".
    """
    count = min(count, len(dataset))
    if isinstance(dataset, Mixture):
        samples = MixtureOrder(dataset.parts, 0).in_turn(count)
        return {name: each for name, each in zip(dataset.parts, samples, strict=True) if len(each)}
    return {"": np.arange(count)}


def passes(dataset: Sized, samples: int) -> dict[str, float]:
    """Return the number of epochs of each source in ``samples`` training samples.

    A single source has the name "". Empty for a stream, whose size is unknown.
    """
    if isinstance(dataset, Stream):
        return {}
    if not isinstance(dataset, Mixture) or dataset.is_shuffled_together:
        return {"": samples / len(dataset)}
    counts = block_counts([part.weight for part in dataset.parts.values()])
    return {
        name: samples * count / (sum(counts) * part.samples)
        for (name, part), count in zip(dataset.parts.items(), counts, strict=True)
    }


def block_counts(weights: Sequence[float]) -> list[int]:
    """Return the number of samples of each source in one block, in proportion to ``weights`` and at least 1.

    The counts are exact if the shares have a common denominator of at most 65,536, such as weights with a few decimals.
    Otherwise the block has 65,536 samples, distributed by largest remainder.
    """
    exact = [Fraction(repr(float(weight))) for weight in weights]
    shares = [weight / sum(exact) for weight in exact]
    block = math.lcm(*(share.denominator for share in shares))
    if block <= _LARGEST_BLOCK:
        return [int(share * block) for share in shares]
    counts = [max(1, int(share * _LARGEST_BLOCK)) for share in shares]
    by_remainder = sorted(range(len(shares)), key=lambda i: counts[i] - shares[i] * _LARGEST_BLOCK)
    for i in by_remainder[: max(0, _LARGEST_BLOCK - sum(counts))]:
        counts[i] += 1
    return counts


def _spread(counts: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
    """Return the source at each position of a block [block], and the number of its earlier positions [block], int64.

    Sample k of a source may be placed once its share has reached k + d, and must be placed before it exceeds
    k + 1 - d, with d = 1 / (2m - 2). Of the sources that may be placed, the one with the earliest deadline is chosen.
    Tijdeman proved that this meets every deadline.
    """
    block, pairs = sum(counts), max(2, 2 * len(counts) - 2)  # at least 2 if there is a single source
    sources, earlier = np.empty(block, np.int64), np.empty(block, np.int64)

    def window(source: int, k: int) -> tuple[int, int, int, int]:
        may = -(-block * (k * pairs + 1) // (counts[source] * pairs))
        must = block * ((k + 1) * pairs - 1) // (counts[source] * pairs) + 1
        return may, must, source, k

    waiting = [window(source, 0) for source in range(len(counts))]
    heapq.heapify(waiting)
    ready: list[tuple[int, int, int]] = []
    for place in range(block):
        while waiting and waiting[0][0] <= place + 1:
            heapq.heappush(ready, heapq.heappop(waiting)[1:])
        _, source, k = heapq.heappop(ready)
        sources[place], earlier[place] = source, k
        if k + 1 < counts[source]:
            heapq.heappush(waiting, window(source, k + 1))
    return sources, earlier


def _seed_of(name: str, seed: int) -> int:
    text = seed.to_bytes(8, "little") + name.encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")


def _mix(numbers: np.ndarray) -> np.ndarray:
    """Finalizer of SplitMix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number generators", 2014)."""
    numbers = (numbers ^ (numbers >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    numbers = (numbers ^ (numbers >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return numbers ^ (numbers >> np.uint64(31))


class BatchShare(NamedTuple):
    """One rank's share of each global batch."""

    micro_batch: int
    data_ranks: int = 1
    data_rank: int = 0
    global_batch: int = 1
    """Number of samples in a step. Evaluations do not use it."""

    @property
    def positions(self) -> range:
        """Positions of this rank's micro-batches among the micro-batches of a global batch.

        Micro-batches are assigned round-robin, so some ranks may have one more than others.
        """
        return range(self.data_rank, self.global_batch // self.micro_batch, self.data_ranks)

    @property
    def of_all(self) -> int:
        """Number of samples in one micro-batch of all ranks together."""
        return self.data_ranks * self.micro_batch


def micro_batch_indices(step: int, share: BatchShare, first_index: int = 0) -> list[np.ndarray]:
    """Return the global indices of one rank's micro-batches in a step: arrays [micro_batch], int64.

    Steps are counted from 0, and step 0 starts at ``first_index``. Each step uses the next global batch of indices, for
    any assignment to ranks.
    """
    first = first_index + step * share.global_batch
    return [
        np.arange(first + position * share.micro_batch, first + (position + 1) * share.micro_batch, dtype=np.int64)
        for position in share.positions
    ]
