"""Terms of a plan: work, memory, and whether it fits."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

IN_HOST_MEMORY = " in host memory"
"""Suffix of the names of parts of a rank's memory that are not on its device."""
Shape = tuple[int, int, int]
"""(m, n, k) of a matrix product."""


@dataclass(frozen=True)
class Work:
    """Work of a rank, from which its time is computed."""

    products: Mapping[Shape, float] = field(default_factory=dict)
    """Number of matrix products by shape; a batched product counts once per matrix."""
    attention_flops: float = 0
    """FLOPs of fused attention kernels. The time model leaves out masked scores; the trace counts them."""
    moved_bytes: float = 0
    """Bytes that all other operations read and write."""
    launches: float = 0
    """Number of operations."""

    def plus(self, other: "Work", times: float = 1) -> "Work":
        """Return the sum of this work and ``times`` times ``other``."""
        shapes = {*self.products, *other.products}
        products = {shape: self.products.get(shape, 0) + times * other.products.get(shape, 0) for shape in shapes}
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
    """Bytes at the peak, by kind."""
    phase: str
    """Phase of the step at the peak."""
    by_phase: Mapping[str, int]
    """Peak of each phase; empty if computed by formula."""
    rank: int = 0
    """The rank, or the first of several ranks with equal memory."""
    unused: int | None = None
    """Bytes that torch's allocator reserves beyond the peak; None: unknown."""

    @property
    def peak(self) -> int:
        """Sum of all parts on the device, in bytes."""
        return int(sum(self.parts.values())) - self.on_host

    @property
    def on_host(self) -> int:
        """Bytes in host memory."""
        return int(sum(part for kind, part in self.parts.items() if kind.endswith(IN_HOST_MEMORY)))


@dataclass(frozen=True)
class Fits:
    """Comparison of the needed memory with the usable memory."""

    needed: int
    """Bytes that torch's allocator reserves if they are available."""
    usable: int
    """Bytes of the device that a run can use."""
    held: int | None = None
    """Bytes in use at the peak. If no more are available, the allocator frees its unused segments. None: unknown."""

    @property
    def margin(self) -> int:
        """Bytes that are left; negative if bytes are missing."""
        return self.usable - self.needed

    @property
    def answer(self) -> Literal["yes", "tight", "no"]:
        """``tight``: less than a tenth is left, or the allocator must free its unused segments."""
        least = self.needed if self.held is None else self.held
        return "no" if least > self.usable else "tight" if self.margin < self.usable / 10 else "yes"
