"""Thinning of curves that keeps spikes: the lowest and highest value of each stretch are kept."""

import numpy as np
from numpy.typing import NDArray


def thinned(values: NDArray[np.float64], buckets: int) -> NDArray[np.intp]:
    """Return the indices of at most about ``2 * buckets`` of ``values``; all indices if there are no more values.

    Keeps the first and last value, the lowest and highest value of each of ``buckets`` stretches, and the first
    non-finite value of each stretch.
    """
    count = len(values)
    if count <= 2 * buckets:
        return np.arange(count)
    table, first = _table(values, buckets)
    missing = np.isnan(table)
    lowest = first + np.where(missing, np.inf, table).argmin(axis=1)
    highest = first + np.where(missing, -np.inf, table).argmax(axis=1)
    gaps = (first + missing.argmax(axis=1))[missing.any(axis=1)]
    chosen = np.unique(np.concatenate([[0], lowest, highest, gaps, [count - 1]]))
    return chosen[chosen < count]


def means(values: NDArray[np.float64], buckets: int) -> tuple[NDArray[np.intp], NDArray[np.float64]]:
    """Return the middle index and the mean of each stretch of ``values`` with finite values, for further smoothing."""
    table, first = _table(values, buckets)
    found = ~np.isnan(table)
    counts = found.sum(axis=1)
    some = counts > 0
    sums = np.where(found, table, 0.0).sum(axis=1)
    length = np.minimum(table.shape[1], len(values) - first)
    return (first + (length - 1) // 2)[some], sums[some] / counts[some]


def _table(values: NDArray[np.float64], buckets: int) -> tuple[NDArray[np.float64], NDArray[np.intp]]:
    """Return ``values`` as rows of equal length, padded with NaN, and the index of each row's first value."""
    length = -(-len(values) // buckets)
    rows = -(-len(values) // length)
    table = np.full(rows * length, np.nan)
    table[: len(values)] = values
    return table.reshape(rows, length), np.arange(rows) * length
