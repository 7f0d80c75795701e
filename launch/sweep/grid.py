"""``-m``: train every combination of the values given for each key; with ``search.trials``, search them."""

import itertools
import math
from collections.abc import Sequence
from pathlib import Path

from serried.configs.compose import compose
from serried.configs.errors import UserError
from serried.configs.requirements import install_command
from serried.launch.sweep.arguments import (
    GRID_EXAMPLE,
    MOST_RUNS,
    PointBuilder,
    Words,
    in_a_name,
    read_words,
    values_of,
)
from serried.launch.sweep.points import Point, Sweep, labels
from serried.runtime.process import say

_MANY_RUNS = 20
"""Number of runs that take more than a second to check."""


def read_sweep(argv: Sequence[str]) -> Sweep:
    """Return the sweep of the command line ``argv``.

    Every run of a grid is composed and checked. For a search, only the corners of its space are checked.

    Raises ``UserError`` if no key has several values or a run has a mistake. The error lists every mistake.
    """
    words = read_words(argv)
    if words.options:
        try:
            from serried.launch.sweep.optuna_search import read_search
        except ImportError:
            raise UserError(f"search.trials needs Optuna 4 or newer: {install_command('sweep')}") from None
        return read_search(words)
    return _grid(words)


def _grid(words: Words) -> Sweep:
    values = _values(words)
    runs = math.prod(map(len, values.values()))
    if runs > MOST_RUNS:
        words.mistakes.append(
            f"the grid has {runs} runs, and at most {MOST_RUNS} are allowed; give fewer values, or add search.trials=20"
        )
    if words.mistakes or not values:
        compose(words.fixed, found=words.mistakes)  # raises with all mistakes
        raise UserError(f"-m sweeps over keys with several values, but no key has several; e.g. {GRID_EXAMPLE}")
    keys = tuple(values)
    combinations = [dict(zip(keys, combination, strict=True)) for combination in itertools.product(*values.values())]
    label = labels(keys)
    name = f"sweep-{in_a_name('-'.join(label.values()))}"
    builder = PointBuilder.of(words.fixed, combinations[0], name, inside=False)
    if runs >= _MANY_RUNS:
        say(f"sweep      {runs} runs: {' x '.join(keys)}; checking the settings of each")
    points: dict[Path, Point] = {}
    for chosen in combinations:
        point = builder.point("-".join(f"{label[key]}-{in_a_name(value)}" for key, value in chosen.items()), chosen)
        if point.config.run.dir in points:
            raise UserError(f"two runs of the sweep would use {point.config.run.place}; give each value only once")
        points[point.config.run.dir] = point
    return Sweep(builder.sweep_folder, keys, tuple(points.values()), runs)


def _values(words: Words) -> dict[str, list[str]]:
    """Return the values of each swept key; keys with one value become fixed arguments."""
    values: dict[str, list[str]] = {}
    for key, override in words.swept.items():
        try:
            if override.is_interval_sweep():
                raise UserError(f"{override.input_line}: an interval can only be searched; add search.trials=20")
            values[key] = values_of(override)
        except UserError as error:
            words.mistakes += error.args
    words.fixed += [f"{key}={found[0]}" for key, found in values.items() if len(found) == 1]
    return {key: found for key, found in values.items() if len(found) > 1}
