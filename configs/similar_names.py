"""Names similar to a mistyped name."""

from collections.abc import Callable, Collection, Iterable
from difflib import get_close_matches
from fnmatch import fnmatchcase


def nearest(typed: str, names: Iterable[str]) -> list[str]:
    """Return up to three of ``names`` that are similar to ``typed``, best first."""
    by_lower = {name.lower(): name for name in names}
    return [by_lower[name] for name in get_close_matches(typed.lower(), list(by_lower), n=3, cutoff=0.6)]


def nearest_pattern(typed: str, names: Collection[str], matches: Callable[[str, str], bool]) -> str | None:
    """Return a pattern for which ``matches(name, pattern)`` holds for some of the dotted ``names``: ``typed``, with
    similar parts of names in place of those that none has. None: there is no such pattern."""
    known = {part for name in names for part in name.split(".")}
    parts: list[str] = []
    for part in typed.split("."):
        text = part.strip("*")
        if not any(fnmatchcase(each, part) for each in known):
            begins, ends = ({each[: len(text)] for each in known}, {each[-len(text) :] for each in known})
            near = nearest(text, known if part == text else ends if part.startswith("*") else begins)
            part = part.replace(text, near[0]) if near else part
        parts.append(part)
    whole = ".".join(parts)
    guesses = (whole, f"{whole}*", f"*{whole}*")
    return next((guess for guess in guesses if any(matches(name, guess) for name in names)), None)
