"""What the runs of a sweep have in common: how their command lines, names and folders come from one."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, Quote, QuotedString
from hydra.errors import HydraException

from configs.compose import compose
from configs.errors import UserError
from configs.help import choices_of
from configs.keys import all_keys
from configs.points import Point

_SEVERAL = re.compile(r"[^=]+=\s*(?:tag|interval|range|choice|int|float|sort|shuffle|glob)\s*\(")
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
    key = word.partition("=")[0].strip()
    return key in all_keys() or key in choices_of(folder)


def refuse_unreadable(words: Sequence[str], example: str) -> None:
    """Have none of ``words`` begin to say several values, as in ``range(1,``, and not be readable.

    Raises:
        UserError: some do; ``example`` is one to paste that can be read.
    """
    mistaken = [word for word in words if _SEVERAL.match(word) and parse_word(word) is None]
    keys = all_keys()
    mistaken = [word for word in mistaken if (key := keys.get(word.partition("=")[0])) is None or not key.is_free_text]
    if mistaken:
        raise UserError(*(f"{word} cannot be read as values to sweep over; e.g. {example}" for word in mistaken))


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
        if len(typed) < len(fixed) + len(values):
            compose([*fixed, *words_of(values)], self.configs)  # a key that is given twice is refused there
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
