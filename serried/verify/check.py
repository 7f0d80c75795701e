"""A check of ``serried verify``: cases, with one row in the report each."""

from collections.abc import Callable, Mapping
from typing import NamedTuple

from serried.verify.started_runs import Workplace


class Bounds(NamedTuple):
    """Bounds that only the user can know. None: a figure is reported and not judged."""

    least_tokens_per_second: float | None = None
    least_mfu: float | None = None


class Found(NamedTuple):
    """The result of a case."""

    is_right: bool
    figure: str
    """Measurement or observation, for the table."""
    bound: str = ""
    """Limit of the figure; empty: there is none."""
    values: Mapping[str, float | int | str | None] = {}
    """Figure and bound as numbers and texts, by name."""


class Case(NamedTuple):
    """One row of the report."""

    name: str
    work: Callable[[], Found]
    """Raises ``RunFailed`` if a run that it needs does not end as it should."""
    skipped: str = ""
    """Reason why it cannot run here; empty: it can."""


class Check(NamedTuple):
    """A named part of ``serried verify``."""

    name: str
    purpose: str
    cases: Callable[[Workplace, Bounds], list[Case]]
