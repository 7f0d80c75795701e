"""Bytes that a rank sends in a step, by axis. Pure arithmetic: torch is not imported."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Flow:
    """Collectives of one kind that a rank takes part in, in one step of the optimizer."""

    axis: str
    """``fsdp`` (shard x context), ``replicate``, ``context``, ``tensor``, ``expert``, ``expert fsdp``, ``pipeline``, or
    ``world`` for sums over all ranks."""
    kind: str
    """``all_gather``, ``reduce_scatter``, ``all_reduce``, ``all_to_all``, ``broadcast`` or ``send``."""
    when: str
    """``forward``, ``backward`` or ``end``, of the step."""
    bytes: int
    """Sent by this rank, as rings do it: (n - 1)/n of a whole tensor for a gather or scatter, twice that for a sum."""
    calls: int
    ranks: int
    """In the group."""
