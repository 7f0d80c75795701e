"""Which sample comes when: a pure function of (seed, global index).

Nothing is stored and nothing is shuffled: the sample at any place of any epoch is computed from its index alone, in
constant memory. Ranks, workers and restarts only choose which indices they ask for, so none of them can change the
order, and a position in the data is one integer.
"""

import hashlib

import numpy as np

_ROUNDS = 8
_KEY_BYTES = 8 * _ROUNDS  # 64: what one BLAKE2b gives
_LARGEST_SIZE = 2**62


class SampleOrder:
    """An endless order of ``size`` samples: each once per epoch, every epoch in another order.

    The permutation of an epoch is a Feistel network (Luby and Rackoff, "How to construct pseudorandom permutations from
    pseudorandom functions", 1988) over the smallest power of two that holds ``size``. Where it leads to a number that
    is none of the samples, it is applied again until it does not: cycle walking, which keeps it a permutation (Black
    and Rogaway, "Ciphers with arbitrary finite domains", 2002). From 3 samples on, that takes less than 2 on average.
    """

    def __init__(self, size: int, seed: int) -> None:
        """``size`` samples, 1 to 2^62; ``seed`` is any 64-bit number that is not negative."""
        if not 1 <= size <= _LARGEST_SIZE:
            raise ValueError(f"size must be in [1, 2^62], got {size}")
        if not 0 <= seed < 2**64:
            raise ValueError(f"seed must be in [0, 2^64), got {seed}")
        self.size, self.seed = size, seed
        bits = max(2, (size - 1).bit_length())
        # The halves may differ by a bit: they swap widths when they swap places.
        widths = ((bits // 2, bits - bits // 2), (bits - bits // 2, bits // 2))
        self._rounds = [
            tuple(np.uint64(n) for n in (low, 2**low - 1, high, 2**high - 1)) for low, high in widths * (_ROUNDS // 2)
        ]

    def __call__(self, indices: np.ndarray) -> np.ndarray:
        """Global indices [n], int64, not negative -> sample numbers [n], int64, in [0, size)."""
        indices = np.asarray(indices, np.int64)
        if len(indices) and indices.min() < 0:
            raise ValueError(f"indices must not be negative, got {indices.min()}")
        epochs, positions = np.divmod(indices, self.size)
        samples = np.empty_like(positions)
        for epoch in np.unique(epochs):
            here = epochs == epoch
            samples[here] = self._permute(positions[here].astype(np.uint64), self._keys(int(epoch)))
        return samples

    def _keys(self, epoch: int) -> np.ndarray:
        """Round keys [rounds], uint64."""
        text = self.seed.to_bytes(8, "little") + epoch.to_bytes(8, "little")
        return np.frombuffer(hashlib.blake2b(text, digest_size=_KEY_BYTES).digest(), "<u8")

    def _permute(self, positions: np.ndarray, keys: np.ndarray) -> np.ndarray:
        numbers = self._feistel(positions, keys)
        while len(outside := np.flatnonzero(numbers >= np.uint64(self.size))):
            numbers[outside] = self._feistel(numbers[outside], keys)
        return numbers.astype(np.int64)

    def _feistel(self, numbers: np.ndarray, keys: np.ndarray) -> np.ndarray:
        """A permutation of [0, 2^bits): each round changes one half by a keyed hash of the other, and swaps them."""
        for key, (low_bits, low_mask, high_bits, high_mask) in zip(keys, self._rounds, strict=True):
            low = numbers & low_mask
            high = (numbers >> low_bits) ^ (_mix(low ^ key) & high_mask)
            numbers = (low << high_bits) | high
        return numbers


def _mix(numbers: np.ndarray) -> np.ndarray:
    """Finaliser of SplitMix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number generators", 2014)."""
    numbers = (numbers ^ (numbers >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    numbers = (numbers ^ (numbers >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return numbers ^ (numbers >> np.uint64(31))


def micro_batch_indices(
    step: int, *, accumulation: int, data_ranks: int, micro_batch: int, data_rank: int, first_index: int = 0
) -> list[np.ndarray]:
    """Global indices of one rank's micro-batches in a step (from 0): ``accumulation`` arrays [micro_batch], int64.

    Step 0 begins at ``first_index``.

    A step takes the next accumulation x data_ranks x micro_batch indices, whoever they are dealt to.
    """
    across_ranks = data_ranks * micro_batch
    first = first_index + step * accumulation * across_ranks + data_rank * micro_batch
    return [
        np.arange(start, start + micro_batch, dtype=np.int64)
        for start in range(first, first + accumulation * across_ranks, across_ranks)
    ]
