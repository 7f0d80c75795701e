"""Parse a sweep's command line, in which keys have several values, and build its runs."""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Glob, Override, Quote, QuotedString, RangeSweep
from hydra.errors import HydraException

from serried.configs.compose import compose
from serried.configs.errors import UserError
from serried.configs.help import choices_of
from serried.configs.messages.keys import all_keys
from serried.configs.schema.sections import RunConfig
from serried.configs.subcommand_arguments import last_of_each
from serried.launch.sweep.points import Point

MOST_RUNS = 1000
"""Largest number of runs of a grid, and of values of a key."""
SEARCH = "search."
"""Prefix of the options of a search."""
SEARCH_EXAMPLE = "-m search.trials=20 'optim.lr=tag(log, interval(1e-5, 1e-2))'"
GRID_EXAMPLE = "-m optim.lr=1e-3,3e-3"
_ONE_VALUE = {
    "run.name": "each run gets its own name",
    "run.dir": "each run gets its own folder inside this one",
    "launch": "all runs are started in the same way",
    "dry_run": "a dry run prints the plan of the first run only",
    "slurm.dry_run": "a dry run prints one script for all runs",
}


@dataclass
class Words:
    """The arguments of a sweep's command line, sorted by kind."""

    fixed: list[str] = field(default_factory=list)
    """Overrides with one value, and arguments that ``compose`` will reject."""
    swept: dict[str, Override] = field(default_factory=dict)
    """Overrides with several values, as parsed by Hydra, by key."""
    options: dict[str, str] = field(default_factory=dict)
    """Options of a search, by name."""
    mistakes: list[str] = field(default_factory=list)


def read_words(argv: Sequence[str]) -> Words:
    """Sort the arguments ``argv``. For a repeated key, the last one counts."""
    words = Words()
    parser = OverridesParser.create()
    for typed in last_of_each(argv):
        key, is_override, value = (part.strip() for part in typed.partition("="))
        word = f"{key.lstrip('+')}={value}" if is_override else typed
        key = key.lstrip("+")
        if key.startswith(SEARCH):
            words.options[key.removeprefix(SEARCH)] = value
            continue
        known = all_keys().get(key)
        if not is_override or not (known or key in choices_of()):
            words.fixed.append(word)
            continue
        try:
            override = parser.parse_override(word)
        except HydraException:
            if "," in value and not (known and known.is_free_text):
                words.mistakes.append(f"{word} is not a valid list of values to sweep over; e.g. {GRID_EXAMPLE}")
            else:
                words.fixed.append(word)
            continue
        if not override.is_sweep_override():
            words.fixed.append(word)
        elif key in _ONE_VALUE:
            words.mistakes.append(f"{word} cannot be swept: {_ONE_VALUE[key]}; give one value")
        else:
            words.swept[key] = override
    return words


def values_of(override: Override) -> list[str]:
    """Return the values of a swept key as the user would type them. Raises ``UserError`` if they cannot be listed."""
    value = override.value()
    if isinstance(value, RangeSweep) and not _length(value) <= MOST_RUNS:
        raise UserError(
            f"{override.input_line} has more than {MOST_RUNS} values; give fewer values, or search a range: "
            f"{SEARCH_EXAMPLE}"
        )
    try:
        if isinstance(value, Glob):
            values = value.filter(choices_of().get(override.key_or_group, []))
        else:
            values = list(override.sweep_string_iterator())
    except (HydraException, ValueError) as error:
        raise UserError(f"{override.input_line} has no values: {error}; e.g. {GRID_EXAMPLE}") from None
    if not values:
        raise UserError(f"{override.input_line} has no values; e.g. {GRID_EXAMPLE}")
    return values


def _length(value: RangeSweep) -> float:
    """Return the unrounded number of values of a range; infinite or NaN if it never ends."""
    if not value.step or value.start is None or value.stop is None:
        return 0  # listing the values reports the mistake
    try:
        return (value.stop - value.start) / value.step
    except OverflowError:
        return math.inf


@dataclass(frozen=True)
class PointBuilder:
    """Builds the runs of a sweep from the values of the swept keys."""

    fixed: tuple[str, ...]
    """Overrides that all runs share."""
    sweep_folder: Path
    config: RunConfig
    """Config of the first run, in the folder that the user gave."""
    home: str | None
    """Parent of the run folders, if it is not the default ``runs/``."""

    @staticmethod
    def of(fixed: Sequence[str], values: Mapping[str, str], name: str, *, inside: bool) -> "PointBuilder":
        """Return the builder of the sweep ``name`` whose first run has ``values``.

        Args:
            inside: put the run folders inside the sweep's folder.

        Raises:
            UserError: the first run's command line has a mistake.
        """
        config = compose([*fixed, *overrides(values)])
        run = config.run
        if run.url is not None:
            if inside:
                raise UserError(
                    f"search.trials cannot be used with run.dir={run.url}: the trials of a search are found by their "
                    "folders; use run.dir=FOLDER"
                )
            return PointBuilder(tuple(fixed), Path("runs") / f"{run.name}-{name}", config, run.url)
        if any(word.startswith("run.dir=") for word in fixed):
            folder, home = run.dir / name, str(run.dir)
        else:
            folder, home = run.dir.with_name(f"{run.dir.name}-{name}"), None
        return PointBuilder(tuple(fixed), folder, config, str(folder) if inside else home)

    def point(self, name: str, values: Mapping[str, str]) -> Point:
        """Return the run with ``values`` for the swept keys. Raises ``UserError`` if these values do not fit the other
        settings."""
        typed = {word.partition("=")[0]: word for word in [*self.fixed, *overrides(values)]}
        # Each recipe names its runs after itself.
        run_name = compose(list(typed.values())).run.name if "recipe" in values else self.config.run.name
        added = {"run.name": f"{run_name}-{name}"}
        if self.home is not None:
            added["run.dir"] = f"{self.home}/{name}"
        if "track.group" not in typed:
            added["track.group"] = self.sweep_folder.name
        for key, value in added.items():
            typed[key] = f"{key}={QuotedString(text=value, quote=Quote.double).with_quotes()}"
        argv = tuple(typed.values())
        return Point(name, values, argv, compose(argv))


def overrides(values: Mapping[str, str]) -> list[str]:
    """Return ``values`` as command-line arguments."""
    return [f"{key}={value}" for key, value in values.items()]


def in_a_name(value: str) -> str:
    """Return ``value`` without characters that are unsuitable for a folder name."""
    return re.sub(r"[^A-Za-z0-9_.+-]+", "_", value).strip("_") or "_"
