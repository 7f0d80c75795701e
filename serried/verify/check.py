"""What a check of ``serried verify`` is made of: cases, each with one row in the report."""

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
    """What was measured or seen, for the table."""
    bound: str = ""
    """What it must be; empty: nothing is required of the figure."""
    values: Mapping[str, float | int | str | None] = {}
    """The same for programs."""


class Case(NamedTuple):
    """One row of the report."""

    name: str
    work: Callable[[], Found]
    """Raises ``RunFailed`` if a run that it needs does not end as it should."""
    skipped: str = ""
    """Why it cannot be done here; empty: it can."""


class Check(NamedTuple):
    """A named part of ``serried verify``."""

    name: str
    purpose: str
    cases: Callable[[Workplace, Bounds], list[Case]]
