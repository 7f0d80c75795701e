"""Initial weights: bitwise the same on every parallel layout and device.

Each parameter is drawn in blocks of rows. Each block has its own random stream, keyed by (seed, parameter name, block),
so a rank draws only the blocks that overlap its shard. The generator is numpy's Philox
(https://www.thesalmons.org/john/random123/papers/random123sc11.pdf) on the CPU, because the CPU and GPU generators of
torch differ. NEP 19 (https://numpy.org/neps/nep-0019-rng-policy.html) allows numpy to change the stream between
versions; tests/unit/models/test_model.py would detect that. Values beyond 3.65 use the logarithm of the C library,
which may round differently.
"""

import hashlib
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
from torch import Tensor, nn

from serried.parallel.layout.local_shards import HeldTensor

_BLOCK_NUMBERS = 2**20


@torch.no_grad()
def initialize(held: Iterable[HeldTensor], std_of: Callable[[str], float | None], seed: int) -> None:
    """Fill this rank's shard of every parameter, in place.

    ``std_of(name)`` returns the standard deviation of a normal distribution with mean 0, or None to fill with ones.
    """
    for shard in held:
        std, box = std_of(shard.name), shard.box
        if std is None:
            shard.local.fill_(1.0)
        elif box.numel:
            first_row, count = (box.starts[0], box.sizes[0]) if box.sizes else (0, 1)
            rows = normal_rows(seed, shard.name, shard.spec.shape or (1,), first_row, count)
            shard.local.copy_(rows[(slice(None), *box.columns())].mul_(std).view(box.sizes))


def padding_rows(module: nn.Module) -> dict[str, int]:
    """Return the padding row of each embedding of ``module`` that has one, by the name of its weight."""
    named = {f"{name}.weight": getattr(child, "padding_idx", None) for name, child in module.named_modules()}
    return {name: row for name, row in named.items() if row is not None}


@torch.no_grad()
def clear_rows(held: Iterable[HeldTensor], rows: Mapping[str, int]) -> None:
    """Set one row of each parameter to zero, on the ranks that hold it. ``rows`` maps parameter names to rows."""
    for shard in held:
        row = rows[shard.name] - shard.box.starts[0] if shard.name in rows else -1
        if 0 <= row < shard.box.sizes[0]:
            shard.local[row] = 0.0


@torch.no_grad()
def initialize_uniform(held: HeldTensor, bound: float, seed: int) -> None:
    """Fill this rank's shard of a matrix from a uniform distribution over [-bound, bound), in place."""
    box = held.box
    if box.numel:
        rows = _rows(seed, held.name, held.spec.shape, box.starts[0], box.sizes[0], np.random.Generator.random)
        held.local.copy_(rows[(slice(None), *box.columns())].mul_(2 * bound).sub_(bound))


def normal_rows(seed: int, name: str, shape: tuple[int, ...], first_row: int, rows: int) -> Tensor:
    """Return rows [first_row, first_row + rows) of the standard-normal fp32 tensor given by (seed, name, shape)."""
    return _rows(seed, name, shape, first_row, rows, np.random.Generator.standard_normal)


def _rows(
    seed: int, name: str, shape: tuple[int, ...], first_row: int, rows: int, draw: Callable[..., np.ndarray]
) -> Tensor:
    row_numbers = int(np.prod(shape[1:], dtype=np.int64))
    block_rows = max(1, _BLOCK_NUMBERS // max(1, row_numbers))
    out = np.empty((rows, row_numbers), dtype=np.float32)

    def fill(block: int) -> None:
        start, stop = block * block_rows, min((block + 1) * block_rows, shape[0])
        key = int.from_bytes(hashlib.blake2b(f"{seed}/{name}/{block}".encode(), digest_size=16).digest(), "little")
        generator = np.random.Generator(np.random.Philox(key=key))
        low, high = max(start, first_row), min(stop, first_row + rows)
        if (low, high) == (start, stop):
            draw(generator, dtype=np.float32, out=out[low - first_row : high - first_row])
        else:
            numbers = draw(generator, (stop - start, row_numbers), dtype=np.float32)
            out[low - first_row : high - first_row] = numbers[low - start : high - start]

    blocks = range(first_row // block_rows, -(-(first_row + rows) // block_rows))
    threads = min(torch.get_num_threads(), len(blocks))
    if threads > 1:  # numpy releases the GIL while it draws
        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(fill, blocks))
    else:
        for block in blocks:
            fill(block)
    return torch.from_numpy(out).reshape(rows, *shape[1:])
