"""Named sums of a step in one vector, for a single all-reduce and a single copy to the host."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

Number = Tensor | float
Shapes = Mapping[str, tuple[int, ...]]
"""Shape of each entry of a table by name, in order: () or (length,)."""


class SumTable:
    """Named sums, stored in one fp64 vector.

    Names may have sections: ``metrics/accuracy`` is an entry of section ``metrics``.

    Example:
        >>> table = SumTable.pack({"loss_sum": torch.tensor(2.0), "metrics/accuracy": (3, 4)}, torch.device("cpu"))
        >>> table["metrics/accuracy"]
        tensor([3., 4.], dtype=torch.float64)
    """

    def __init__(self, shapes: Shapes, vector: Tensor) -> None:
        """``vector`` contains the entries in order, in fp64."""
        self.shapes, self.vector = shapes, vector
        self._entries: dict[str, Tensor] = {}
        self._adding: dist.Work | None = None

    @classmethod
    def zeros(cls, shapes: Shapes, device: torch.device) -> "SumTable":
        """Return a table of zeros."""
        return cls(shapes, torch.zeros(sum(map(_numbers, shapes.values())), dtype=torch.float64, device=device))

    @classmethod
    def pack(cls, values: Mapping[str, Number | Sequence[Number]], device: torch.device) -> "SumTable":
        """Return a table of ``values`` on ``device``.

        Values are numbers, tensors of at most one dim, or sequences of numbers.
        """
        shapes: dict[str, tuple[int, ...]] = {}
        parts: list[Tensor] = []
        for name, value in values.items():
            if isinstance(value, Sequence):
                shapes[name] = (len(value),)
                parts += [_as_vector(number, device) for number in value]
            else:
                shapes[name] = tuple(value.shape) if isinstance(value, Tensor) else ()
                parts.append(_as_vector(value, device))
        return cls(shapes, torch.cat(parts) if parts else torch.zeros(0, dtype=torch.float64, device=device))

    def __getitem__(self, name: str) -> Tensor:
        """Return an entry as a view of the vector."""
        if not self._entries:
            parts = self.vector.split([_numbers(shape) for shape in self.shapes.values()])
            self._entries = dict(zip(self.shapes, parts, strict=True))
        return self._entries[name].view(self.shapes[name])

    def __add__(self, other: "SumTable") -> "SumTable":
        """Return the sum of two tables with the same entries."""
        return SumTable(self.shapes, self.vector + other.vector)

    def joined(self, other: "SumTable") -> "SumTable":
        """Return a table with the entries of both. Names must be distinct."""
        assert not self.shapes.keys() & other.shapes.keys(), "entries of a table have one name each"
        return SumTable({**self.shapes, **other.shapes}, torch.cat((self.vector, other.vector)))

    def start_adding(self) -> "SumTable":
        """Start an in-place all-reduce of the table, and return it. Call ``wait`` before reading it."""
        if dist.is_initialized():
            self._adding = dist.all_reduce(self.vector, async_op=True)
        return self

    def wait(self) -> "SumTable":
        """Wait for the all-reduce, and return this table."""
        if self._adding is not None:
            self._adding.wait()
            self._adding = None
        return self

    def read(self) -> dict[str, Any]:
        """Return the entries on the host, as floats and lists of floats. Waits for the device."""
        return self.named(self.vector.tolist())

    def named(self, numbers: list[float]) -> dict[str, Any]:
        """Return the entries of ``numbers``, a vector with this table's entries on the host, like ``read``."""
        rest = iter(numbers)
        return {
            name: [next(rest) for _ in range(shape[0])] if shape else next(rest) for name, shape in self.shapes.items()
        }


def section(values: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return the entries of a section, without the section prefix."""
    start = f"{name}/"
    return {key.removeprefix(start): value for key, value in values.items() if key.startswith(start)}


def _numbers(shape: tuple[int, ...]) -> int:
    return shape[0] if shape else 1


def _as_vector(value: Number, device: torch.device) -> Tensor:
    if isinstance(value, Tensor):
        return value.detach().to(device, torch.float64).reshape(-1)
    # Filled on the device, because copying a Python number to a GPU would block the host.
    return torch.full((1,), float(value), dtype=torch.float64, device=device)
