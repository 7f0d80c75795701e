"""What a sweep is made of: runs that differ in the values of a few keys. Needs no Hydra."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from serried.configs.schema import RunConfig


@dataclass(frozen=True)
class Point:
    """One run of a sweep."""

    name: str
    """What tells it from the others: ``lr-0.001-layers-2``, ``trial-3``."""
    values: Mapping[str, str]
    """What it has for each swept key, as one would type it."""
    argv: tuple[str, ...]
    """Its own command line."""
    config: RunConfig


Evaluate = Callable[[Point], float | None]
"""Trains a point and returns its best validation loss; None: it failed, or has none."""


@dataclass(frozen=True)
class Sweep:
    """Runs that belong together: a grid, or a search that chooses each by how the ones before it ended."""

    folder: Path
    """Where the summary and the report go; its name is the sweep's. Found again by the same command."""
    keys: tuple[str, ...]
    """The swept keys, full and dotted, in the order they were typed."""
    points: tuple[Point, ...]
    """Of a grid, every run. Of a search none that is run: the corners of its space, all of one name, so that what is
    wrong with them is told before anything starts."""
    runs: int
    """How many runs it has in all."""
    search: Callable[[Evaluate], None] | None = None
    """Chooses points and has each evaluated; None: a grid.

    Raises:
        UserError: the search cannot be had that way.
    """


def labels(keys: Sequence[str]) -> dict[str, str]:
    """The last name of each key; the whole of it where two keys share that."""
    leaves = [key.rpartition(".")[2] for key in keys]
    return {key: leaf if leaves.count(leaf) == 1 else key for key, leaf in zip(keys, leaves, strict=True)}
