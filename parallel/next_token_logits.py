"""Logits for the next token, from a model sharded over ranks."""

import math

import torch.distributed as dist
from torch import Tensor, nn

from serried.parallel.axes.context import head_tail, holder_of
from serried.parallel.layout.mesh import Coordinates
from serried.parallel.layout.process_groups import Groups
from serried.parallel.runner import Runner

_GPU_LENGTHS = 128
"""Multiple to which ``last_logits`` pads sequences on a GPU."""


def last_logits(runner: Runner, groups: Groups, place: Coordinates, ids: Tensor) -> Tensor:
    """Return the logits [B, 1, V] of the last token of ``ids`` [B, S]; each rank computes a shard. This is a collective
    call."""
    layout, length = groups.layout, ids.shape[1]
    parts = layout.context
    multiple = 2 * parts * layout.tensor
    if parts > 1 and ids.device.type == "cuda":
        # Attention is FlexAttention there, which is compiled for each length. torch stops compiling after eight.
        multiple = math.lcm(multiple, _GPU_LENGTHS)
    padding = -length % multiple  # at the end, so no token attends to it
    ids = nn.functional.pad(ids, (0, padding))
    rank, index = holder_of(length - 1, length + padding, parts)
    logits = runner.logits(head_tail(ids, 1, parts, place.context), index)
    if groups.context is not None:
        dist.broadcast(logits, group=groups.context, group_src=rank)
    return logits
