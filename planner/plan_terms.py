"""What a plan consists of."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

IN_HOST_MEMORY = " in host memory"
"""End of the names of those parts of a rank's memory that are not on its device."""
Shape = tuple[int, int, int]
"""m, n, k of a matrix product."""


@dataclass(frozen=True)
class Work:
    """What a rank computes, to be turned into seconds."""

    products: Mapping[Shape, float] = field(default_factory=dict)
    """How often each matrix product is done; a batched one counts once per matrix."""
    attention_flops: float = 0
    """Of fused attention kernels; what causal masks leave out is not counted."""
    moved_bytes: float = 0
    """Read and written by all other operations."""
    launches: float = 0
    """Number of operations."""

    def plus(self, other: "Work", times: float = 1) -> "Work":
        """Return this work and ``times`` times the other's."""
        shapes = {*self.products, *other.products}
        products = {each: self.products.get(each, 0) + times * other.products.get(each, 0) for each in shapes}
        return Work(
            {shape: count for shape, count in products.items() if count},
            self.attention_flops + times * other.attention_flops,
            self.moved_bytes + times * other.moved_bytes,
            self.launches + times * other.launches,
        )


@dataclass(frozen=True)
class Memory:
    """Memory of the rank that needs the most."""

    parts: Mapping[str, float]
    """At the moment of the peak, by kind, in bytes."""
    phase: str
    """Of the step, at the peak."""
    by_phase: Mapping[str, int]
    """The peak within each phase; empty: formula."""
    rank: int = 0
    """The rank, or the first of those that need as much."""
    unused: int | None = None
    """Bytes that torch's allocator takes beyond what is held at most; None: unknown."""

    @property
    def peak(self) -> int:
        """All parts on the device, in bytes."""
        return int(sum(self.parts.values())) - self.on_host

    @property
    def on_host(self) -> int:
        """What is in host memory instead, in bytes."""
        return int(sum(part for kind, part in self.parts.items() if kind.endswith(IN_HOST_MEMORY)))


@dataclass(frozen=True)
class Fits:
    """Whether the memory suffices."""

    needed: int
    """Bytes that torch's allocator takes, if they are there."""
    usable: int
    """Bytes of the device that a run can have."""
    held: int | None = None
    """Bytes that are held at most: if no more are there, the allocator frees what it does not use. None: unknown."""

    @property
    def margin(self) -> int:
        """Bytes that are left; negative: that are missing."""
        return self.usable - self.needed

    @property
    def answer(self) -> Literal["yes", "tight", "no"]:
        """``tight``: by less than a tenth, or without what the allocator would not use."""
        least = self.needed if self.held is None else self.held
        return "no" if least > self.usable else "tight" if self.margin < self.usable / 10 else "yes"
