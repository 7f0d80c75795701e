"""``-m``: from a command line with several values for its keys to the runs of a sweep.

A grid is every combination. ``hydra/sweeper=optuna`` is a search.
"""

from collections.abc import Sequence
from pathlib import Path

from hydra.errors import HydraException

from serried.configs.announce import announced, tell
from serried.configs.compose import FOLDER, compose
from serried.configs.errors import UserError, noted
from serried.configs.origin import (
    Origin,
    each_once,
    example,
    in_a_name,
    is_known,
    parse_word,
    refuse_to_sweep,
    refuse_unreadable,
    words_of,
)
from serried.configs.points import Point, Sweep, labels
from serried.configs.search import OPTION, SAMPLER, read_search
from serried.configs.study import SWEEPER

_MOST_RUNS = 1000
_MANY_RUNS = 20
"""So many take more than a second to check."""
_EXAMPLE = "-m optim.lr=1e-3,3e-3"


def read_sweep(argv: Sequence[str], folder: Path = FOLDER) -> Sweep:
    """The sweep that ``argv``, overrides of which some have several values, asks for.

    Every run of a grid is composed and checked, of a search the corners of its space.

    Raises:
        UserError: no key has several values, or a combination is mistaken.
    """
    given, mistakes = each_once([_tidied(word) for word in argv])
    ours = [word for word in given if not _is_of_the_sweeper(word)]
    words = [word for word in given if _is_of_the_sweeper(word)]
    chosen = next((word.partition("=")[2] for word in words if word.startswith(f"{SWEEPER}=")), "basic")
    if chosen == "optuna":
        return read_search(ours, words, folder, mistakes)
    if chosen != "basic":
        mistakes.append(f"no {SWEEPER} {chosen!r}; there are basic, the grid, and optuna")
    elif options := [word for word in words if not word.startswith(f"{SWEEPER}=")]:
        mistakes.append(f"{options[0]} is read by {SWEEPER}=optuna alone; add that, or leave it out")
    return _grid(ours, folder, mistakes)


def _tidied(word: str) -> str:
    """An override as ``compose`` takes it: without ``+``, and without blanks around its key and value."""
    key, is_override, value = word.partition("=")
    return f"{key.lstrip('+').strip()}={value.strip()}" if is_override else word


def _is_of_the_sweeper(word: str) -> bool:
    key = word.partition("=")[0]
    return key in (SWEEPER, SAMPLER) or key.startswith(OPTION)


def _grid(argv: Sequence[str], folder: Path, mistakes: list[str]) -> Sweep:
    combinations: list[dict[str, str]] = [{}]
    fixed: list[str] = []
    for word in argv:
        if not is_known(word, folder):  # stays as it was typed, for the words that refuse it
            fixed.append(word)
            continue
        with noted(mistakes):
            refuse_unreadable(word, f"-m {example(word.partition('=')[0], folder)}")
            key, values = _values(word)
            if len(values) < 2:
                fixed.append(word if not values else f"{key}={values[0]}")
                continue
            refuse_to_sweep(key, word.partition("=")[2])
            if len(combinations) * len(values) > _MOST_RUNS:
                raise UserError(
                    f"a grid of more than {_MOST_RUNS} runs ({word}); give fewer values, or {SWEEPER}=optuna"
                )
            combinations = [{**rest, key: value} for rest in combinations for value in values]
    keys = tuple(combinations[0])
    if not keys and not mistakes and all(is_known(word, folder) for word in fixed):
        mistakes.append(f"-m sweeps over several values, and no key has them; e.g. {_EXAMPLE}")
    if mistakes or not keys:
        compose(fixed, folder, mistakes)  # refuses them, with what is wrong with the rest
    label = labels(keys)
    origin = Origin.of([*fixed, *words_of(combinations[0])], folder, f"sweep-{in_a_name('-'.join(label.values()))}")
    points: dict[Path, Point] = {}
    if len(combinations) >= _MANY_RUNS:
        tell(
            "sweep", f"{len(combinations)} runs: {' x '.join(keys)}; the settings of each are checked before any starts"
        )
    with announced(f"the settings of {len(combinations)} runs are checked", speaks=True):
        for chosen in combinations:
            name = "-".join(f"{label[key]}-{in_a_name(value)}" for key, value in chosen.items())
            point = origin.point(name, chosen, fixed)
            if point.config.run.dir in points:
                raise UserError(f"two runs of the sweep would share {point.config.run.dir}; give every value once")
            points[point.config.run.dir] = point
    return Sweep(origin.sweep_folder, keys, tuple(points.values()), len(points))


def _values(word: str) -> tuple[str, list[str]]:
    """The key of an override and its values: several where they are separated by commas, or made by ``range(...)``.

    Neither where it is no sweep, or no override that Hydra can read: that is told when it is composed.

    Raises:
        UserError: it has endless values.
    """
    parsed = parse_word(word)
    if parsed is None or not parsed.is_sweep_override():
        return "", []
    if parsed.is_interval_sweep():
        raise UserError(f"{word}: an interval has no end of values; give some, or search it: {SWEEPER}=optuna")
    try:
        return parsed.key_or_group, list(parsed.sweep_string_iterator())
    except HydraException:
        raise UserError(
            f"{word}: nothing here can list these values; write them out, with commas between them"
        ) from None
