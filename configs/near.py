"""Names similar to a mistyped name."""

from collections.abc import Iterable
from difflib import get_close_matches


def nearest(typed: str, names: Iterable[str]) -> list[str]:
    """Return up to three of ``names`` that are similar to ``typed``, best first."""
    by_lower = {name.lower(): name for name in names}
    return [by_lower[name] for name in get_close_matches(typed.lower(), list(by_lower), n=3, cutoff=0.6)]
