"""Names similar to a mistyped name."""

from collections.abc import Callable, Collection, Iterable
from difflib import get_close_matches
from fnmatch import fnmatchcase


def nearest(typed: str, names: Iterable[str]) -> list[str]:
    """Return up to three of ``names`` that are similar to ``typed``, best first."""
    by_lower = {name.lower(): name for name in names}
    return [by_lower[name] for name in get_close_matches(typed.lower(), list(by_lower), n=3, cutoff=0.6)]


def nearest_pattern(typed: str, names: Collection[str], matches: Callable[[str, str], bool]) -> str | None:
    """Return a pattern like ``typed`` that matches some of the dotted ``names`` by ``matches(name, pattern)``; None if
    there is no such pattern.

    Unknown parts are replaced by similar parts of names, and ``*`` may be added.
    """
    known = {part for name in names for part in name.split(".")}
    parts: list[str] = []
    for part in typed.split("."):
        text = part.strip("*")
        if not any(fnmatchcase(name, part) for name in known):
            begins, ends = ({name[: len(text)] for name in known}, {name[-len(text) :] for name in known})
            near = nearest(text, known if part == text else ends if part.startswith("*") else begins)
            part = part.replace(text, near[0]) if near else part
        parts.append(part)
    whole = ".".join(parts)
    guesses = (whole, f"{whole}*", f"*{whole}*")
    return next((guess for guess in guesses if any(matches(name, guess) for name in names)), None)
