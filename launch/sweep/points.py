"""Data classes of a sweep and its runs."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from serried.configs.schema.sections import RunConfig


@dataclass(frozen=True)
class Point:
    """One run of a sweep."""

    name: str
    """Name that distinguishes the run: ``lr-0.001-layers-2``, ``trial-3``."""
    values: Mapping[str, str]
    """The value of each swept key, as the user would type it."""
    argv: tuple[str, ...]
    """Command line of this run."""
    config: RunConfig


Evaluate = Callable[[Point], float | None]
"""Function that trains a point and returns its result (lower is better); None if the run failed or has no result."""


@dataclass(frozen=True)
class Sweep:
    """Runs that differ in the values of a few keys: a grid, or a search that chooses each run from the results so
    far."""

    folder: Path
    """Folder of the table and the report, the same for the same command."""
    keys: tuple[str, ...]
    """The swept keys, full and dotted, in the order they were typed."""
    points: tuple[Point, ...]
    """Every run of a grid. For a search, the corners of its space, which are checked but never run."""
    runs: int
    search: Callable[[Evaluate], None] | None = None
    """Function that chooses points and evaluates each of them; None for a grid."""


def labels(keys: Sequence[str]) -> dict[str, str]:
    """Return the last part of each dotted key, or the full key if two keys share that part."""
    leaves = [key.rpartition(".")[2] for key in keys]
    return {key: leaf if leaves.count(leaf) == 1 else key for key, leaf in zip(keys, leaves, strict=True)}
