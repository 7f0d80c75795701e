"""A check of ``serried verify``. It consists of cases, each with one row in the report."""

from collections.abc import Callable, Mapping
from typing import NamedTuple

from serried.verify.started_runs import Workplace


class Bounds(NamedTuple):
    """Bounds given by the user. None means that the figure is reported but not checked."""

    least_tokens_per_second: float | None = None
    least_mfu: float | None = None


class Found(NamedTuple):
    """Result of a case."""

    is_right: bool
    figure: str
    """Measurement or observation, for the table."""
    bound: str = ""
    """Limit of the figure; empty if there is none."""
    values: Mapping[str, float | int | str | None] = {}
    """Values of the figure and the bound, by name."""


class Case(NamedTuple):
    """One row of the report."""

    name: str
    work: Callable[[], Found]
    """Function that computes the result. Raises ``RunFailed`` if a run that it needs does not end as expected."""
    skipped: str = ""
    """Reason why the case cannot run on this machine; empty if it can."""


class Check(NamedTuple):
    """A named part of ``serried verify``."""

    name: str
    purpose: str
    cases: Callable[[Workplace, Bounds], list[Case]]
