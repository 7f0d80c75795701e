"""The words of a sweep's command line, and what its runs have in common: how their names and folders come from one."""

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, Quote, QuotedString
from hydra.errors import HydraException

from serried.configs.compose import compose
from serried.configs.errors import UserError
from serried.configs.explain import given_twice
from serried.configs.help import choices_of
from serried.configs.keys import all_keys
from serried.configs.points import Point
from serried.configs.suggest import pasteable

_ONE_VALUE = {
    "run.name": "each run gets a name of its own",
    "run.dir": "each run gets a folder of its own in it",
    "launch": "all runs are started alike",
    "dry_run": "it prints the plan of the first run",
    "slurm.dry_run": "it prints the script of all runs",
}


def refuse_to_sweep(key: str, value: str) -> None:
    """Have nothing swept that the runs of a sweep have in common.

    Raises:
        UserError: ``key`` is such a key.
    """
    if key in _ONE_VALUE:
        raise UserError(f"{key}={value} cannot be swept: {_ONE_VALUE[key]}; give one value")


def is_known(word: str, folder: Path) -> bool:
    """Whether the key of an override is one, or a group in ``folder``; where not, ``compose`` is to say so."""
    key, is_override, _ = word.partition("=")
    return bool(is_override) and (key in all_keys() or key in choices_of(folder))


def each_once(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """``words`` less those whose key another has before them, and the sentences for those that say something else."""
    first: dict[str, str] = {}
    kept: list[str] = []
    mistakes: list[str] = []
    for word in words:
        key, is_override, value = word.partition("=")
        if not is_override or key not in first:
            kept.append(word)
        elif first[key] != value:
            mistakes.append(given_twice(key, first[key], value))
        first.setdefault(key, value)
    return kept, mistakes


def refuse_unreadable(word: str, example: str) -> None:
    """Have ``word``, whose key is known, be one that can be read, unlike ``trainer.seed=range(1,``.

    Raises:
        UserError: it is not; ``example`` is one that is.
    """
    key = all_keys().get(word.partition("=")[0])
    if parse_word(word) is None and (key is None or not key.is_free_text):
        raise UserError(f"{word} cannot be read as values to sweep over; e.g. {example}")


def example(name: str, folder: Path, *, is_searched: bool = False) -> str:
    """``name``, a key or a group in ``folder``, with several values; where ``is_searched``, with a range if it can."""
    key, choices = all_keys().get(name), choices_of(folder).get(name, [])
    if key is not None and key.kind == "boolean":
        choices = ["true", "false"]
    elif key is not None and key.choices:
        choices = [*key.choices]
    if choices or key is None:
        return pasteable(name, ",".join(choices[:2]) or "FIRST,SECOND")
    value = shlex.split(key.override)[0].partition("=")[2]
    if key.kind == "integer":
        low, high = int(value), 2 * int(value)
        return pasteable(name, f"range({low},{high})" if is_searched else f"{low},{high}")
    if key.kind == "number":
        number = float(value)
        ends = f"tag(log, interval({number / 10:g}, {number * 10:g}))"
        return pasteable(name, ends if is_searched else f"{value},{2 * number:g}")
    return pasteable(name, f"{value},OTHER")


def parse_word(word: str) -> Override | None:
    """What Hydra's grammar makes of an override; None: it is none."""
    try:
        return OverridesParser.create().parse_override(word)
    except HydraException:
        return None


def in_a_name(value: str) -> str:
    """``value`` less what a folder's name should not have."""
    return re.sub(r"[^A-Za-z0-9_.+-]+", "_", value).strip("_") or "_"


def words_of(values: Mapping[str, str]) -> list[str]:
    """Values by key, as one would type them."""
    return [f"{key}={value}" for key, value in values.items()]


@dataclass(frozen=True)
class Origin:
    """What the runs of a sweep have in common."""

    run_name: str
    home: Path | None
    """Folder of the runs' folders, where the user or the search says it; else each is in ``runs``, by its name."""
    sweep_folder: Path
    configs: Path

    @staticmethod
    def of(argv: Sequence[str], configs: Path, name: str) -> "Origin":
        """Of the sweep to which the run ``argv`` would belong; ``name`` tells sweeps of that run apart.

        Raises:
            UserError: the run is mistaken.
        """
        run = compose(argv, configs).run
        if any(word.startswith("run.dir=") for word in argv):
            return Origin(run.name, run.dir, run.dir / name, configs)
        return Origin(run.name, None, run.dir.with_name(f"{run.dir.name}-{name}"), configs)

    def point(self, name: str, values: Mapping[str, str], fixed: Sequence[str]) -> Point:
        """The run with ``values`` for the swept keys.

        Raises:
            UserError: it is mistaken.
        """
        typed = {word.partition("=")[0]: word for word in [*fixed, *words_of(values)]}
        # Where the recipe is swept, the runs' names begin with their own recipes'.
        own_name = compose(list(typed.values()), self.configs).run.name if "recipe" in values else self.run_name
        added = {"run.name": f"{own_name}-{name}"}
        if self.home is not None:
            added["run.dir"] = str(self.home / name)
        if "track.group" in all_keys() and "track.group" not in typed:
            added["track.group"] = self.sweep_folder.name
        for key, value in added.items():
            typed[key] = f"{key}={QuotedString(text=value, quote=Quote.double).with_quotes()}"
        argv = tuple(typed.values())
        return Point(name, values, argv, compose(argv, self.configs))
