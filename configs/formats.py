"""Formatting of bytes, durations, counts, tables and foreign text."""

import os
import sys
from collections.abc import Sequence


def size(number_bytes: float) -> str:
    """Format a number of bytes, as in ``512B`` or ``1.5GiB``."""
    if number_bytes < 2**10:
        return f"{number_bytes:.0f}B"
    for limit, divisor, unit in ((2**20, 2**10, "KiB"), (2**30, 2**20, "MiB"), (2**40, 2**30, "GiB")):
        if number_bytes < limit:
            return f"{number_bytes / divisor:.1f}{unit}"
    return f"{number_bytes / 2**40:.2f}TiB"


def duration(seconds: float) -> str:
    """Format seconds, as in ``45s``, ``3m20s``, ``5h12m`` or ``1d03h``."""
    whole = round(seconds)
    for size, unit, part, name in ((86400, "d", 3600, "h"), (3600, "h", 60, "m"), (60, "m", 1, "s")):
        if whole >= size:
            return f"{whole // size}{unit}{whole % size // part:02d}{name}"
    return f"{whole}s"


def short(number: float) -> str:
    """Format a count, as in ``1.2M`` for 1234567."""
    for limit, divisor, suffix in ((1e3, 1, ""), (1e6, 1e3, "k"), (1e9, 1e6, "M"), (1e12, 1e9, "B")):
        if number < limit:
            return f"{number / divisor:.1f}{suffix}" if suffix else f"{number:.0f}"
    return f"{number / 1e12:.1f}T"


def columns(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return one line per row, with each column as wide as its longest cell."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def printable(text: str) -> str:
    """Return ``text`` with control characters replaced, so that it cannot control a terminal. Newlines and tabs
    stay."""
    return "".join(c if c.isprintable() or c in "\n\t" else "\ufffd" for c in text)


def is_terminal() -> bool:
    """Return whether standard output is a terminal that can redraw a line."""
    return sys.stdout.isatty() and os.environ.get("TERM", "dumb") != "dumb"
