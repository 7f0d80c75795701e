"""Which rows of a tensor lie on which rank."""

from torch import Tensor
from torch.distributed.tensor import DTensor, Shard


def shard_rows(rows: int, shards: int, index: int) -> tuple[int, int]:
    """First row and number of rows that shard ``index`` of ``shards`` holds of a tensor of ``rows`` rows.

    torch.chunk's rule, which DTensor follows: ceil(rows / shards) each, the last ones shorter or empty.
    """
    chunk = -(-rows // shards)
    first = min(index * chunk, rows)
    return first, min(chunk, rows - first)


def local_rows(tensor: Tensor) -> tuple[Tensor, int]:
    """The part of ``tensor`` (whole, or sharded on dim 0) that this rank holds, as a plain tensor over the same
    memory, and the first row of it."""
    if not isinstance(tensor, DTensor):
        return tensor, 0
    local, first, rows = tensor.to_local(), 0, tensor.shape[0]
    for axis, placement in enumerate(tensor.placements):
        if isinstance(placement, Shard):
            assert placement.dim == 0, f"shards on dim {placement.dim} are not known here"
            offset, rows = shard_rows(rows, tensor.device_mesh.size(axis), tensor.device_mesh.get_local_rank(axis))
            first += offset
    assert local.shape[0] == rows, f"rank holds {local.shape[0]} rows, expected {rows} of {tuple(tensor.shape)}"
    return local, first
