"""``-m``: from a command line with several values for its keys to the runs of a sweep.

A grid is every combination. ``hydra/sweeper=optuna`` is a search.
"""

from collections.abc import Sequence
from pathlib import Path

from hydra.errors import HydraException

from configs.announce import announced, tell
from configs.compose import FOLDER, compose
from configs.errors import UserError
from configs.origin import Origin, in_a_name, is_known, parse_word, refuse_to_sweep, refuse_unreadable, words_of
from configs.points import Point, Sweep, labels
from configs.search import OPTION, SAMPLER, SWEEPER, read_search

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
    ours = [word.lstrip("+") for word in argv if not _is_of_the_sweeper(word)]
    words = [word.lstrip("+") for word in argv if _is_of_the_sweeper(word)]
    chosen = [word.partition("=")[2] for word in words if word.partition("=")[0] == SWEEPER]
    if chosen[-1:] == ["optuna"]:
        return read_search(ours, words, folder)
    if chosen and chosen[-1] != "basic":
        raise UserError(f"no {SWEEPER} {chosen[-1]!r}; there are basic, the grid, and optuna")
    if options := [word for word in words if not word.startswith(f"{SWEEPER}=")]:
        raise UserError(f"{options[0]} is read by {SWEEPER}=optuna alone; add that, or leave it out")
    return _grid(ours, folder)


def _is_of_the_sweeper(word: str) -> bool:
    key = word.partition("=")[0].lstrip("+")
    return key in (SWEEPER, SAMPLER) or key.startswith(OPTION)


def _grid(argv: Sequence[str], folder: Path) -> Sweep:
    combinations: list[dict[str, str]] = [{}]
    fixed: list[str] = []
    refuse_unreadable(argv, _EXAMPLE)
    for word in argv:
        key, values = _values(word)
        if not is_known(word, folder):  # stays as it was typed, for the words that refuse it
            fixed.append(word)
            continue
        if len(values) < 2:
            fixed.append(word if not values else f"{key}={values[0]}")
            continue
        refuse_to_sweep(key, word.partition("=")[2])
        combinations = [{**rest, key: value} for rest in combinations for value in values]
        if len(combinations) > _MOST_RUNS:
            raise UserError(f"a grid of more than {_MOST_RUNS} runs ({word}); give fewer values, or {SWEEPER}=optuna")
    keys = tuple(combinations[0])
    if not keys:
        if not all(is_known(word, folder) for word in fixed):
            compose(fixed, folder)
        raise UserError(f"-m sweeps over several values, and no key has them; e.g. {_EXAMPLE}")
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
