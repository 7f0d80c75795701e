"""A sweep and its runs, as data."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from serried.configs.schema.sections import RunConfig


@dataclass(frozen=True)
class Point:
    """One run of a sweep."""

    name: str
    """Distinguishes it from the other runs: ``lr-0.001-layers-2``, ``trial-3``."""
    values: Mapping[str, str]
    """The value of each swept key, as one would type it."""
    argv: tuple[str, ...]
    """Its own command line."""
    config: RunConfig


Evaluate = Callable[[Point], float | None]
"""Trains a point and returns its result, lower being better; None if it failed or has none."""


@dataclass(frozen=True)
class Sweep:
    """Runs that differ in the values of a few keys: a grid, or a search that chooses each from the results so far."""

    folder: Path
    """Holds the table and the report; the same command finds it again."""
    keys: tuple[str, ...]
    """The swept keys, full and dotted, in the order they were typed."""
    points: tuple[Point, ...]
    """Every run of a grid. For a search the corners of its space, which are checked but never run."""
    runs: int
    search: Callable[[Evaluate], None] | None = None
    """Chooses points and evaluates each; None for a grid."""


def labels(keys: Sequence[str]) -> dict[str, str]:
    """Return the last part of each dotted key, or the whole key if two share that part."""
    leaves = [key.rpartition(".")[2] for key in keys]
    return {key: leaf if leaves.count(leaf) == 1 else key for key, leaf in zip(keys, leaves, strict=True)}
