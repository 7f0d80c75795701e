"""Lines of the product per package: ``python -m benchmarks.lines``.

Counts every line (``wc -l``) of Python, YAML, JavaScript, CSS and HTML, without tests, benchmarks, examples and the
vendored uPlot. Rounded to hundreds, so that the table in docs/architecture.md is not outdated by every commit.
"""

from collections.abc import Collection
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SUFFIXES = {".py", ".yaml", ".js", ".css", ".html"}
PACKAGES = ("serried", "launch", "recipes", "trainer", "parallel", "records", "runtime", "configs")


def count_lines(suffixes: Collection[str] = SUFFIXES) -> dict[str, int]:
    """Return the lines of each package in files with one of ``suffixes``."""
    found = {name: _lines(ROOT / name, suffixes) for name in PACKAGES}
    found["serried"] += _lines_of(ROOT / "train.py")
    return found


def table() -> str:
    """Return the Markdown table of docs/architecture.md."""
    found = count_lines()
    rows = [(f"`{name}/`", lines) for name, lines in found.items()]
    rows += [("all", sum(found.values())), ("Python alone", sum(count_lines({".py"}).values()))]
    return "\n".join(
        ["| package | lines |", "| --- | --- |", *(f"| {name} | {_rounded(lines)} |" for name, lines in rows)]
    )


def _rounded(lines: int) -> str:
    return f"{round(lines, -2):,}"


def _lines(folder: Path, suffixes: Collection[str]) -> int:
    """Lines below ``folder``. Links are left out: ``serried`` links to the other packages."""
    total = 0
    for path in folder.iterdir():
        if path.is_symlink() or path.name in ("uplot", "__pycache__"):
            continue
        total += _lines(path, suffixes) if path.is_dir() else _lines_of(path) if path.suffix in suffixes else 0
    return total


def _lines_of(path: Path) -> int:
    return path.read_bytes().count(b"\n")


if __name__ == "__main__":
    print(table())
