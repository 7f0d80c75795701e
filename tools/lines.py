"""Lines of the product per package, before and after it was opened to users' code: ``python -m tools.lines``.

Counts every line (``wc -l``) of Python, YAML, JavaScript, CSS and HTML, without tests, benchmarks, examples and the
vendored uPlot. Rounded to hundreds, so that the table in docs/concepts/architecture.md is not outdated by every commit.
"""

from collections.abc import Collection
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SUFFIXES = {".py", ".yaml", ".js", ".css", ".html"}
COMMIT = "4b49c34"
BEFORE = {
    "serried": 674, "launch": 3284, "recipes": 6041, "trainer": 11128, "parallel": 769, "records": 0, "runtime": 0,
    "configs": 3694, "planner": 0,
}  # fmt: skip
"""At ``COMMIT``, where ``records``, ``runtime`` and ``planner`` were in ``trainer`` and ``launch``."""
PYTHON_BEFORE = 23064
TO_ADD = (
    ("a task: model, data, loss", "6 or more", "none: the user's script"),
    (
        "a model family",
        "8 or 9",
        "none: the user's script and a YAML. Built in: `recipes/models/families/`, its section in "
        "`configs/schema/models.py`, its line in `configs/schema/registry.py`, YAML",
    ),
    ("an optimizer", "7", "none: the user's script. Built in: 1 + YAML, `trainer/optim/algorithms/`"),
    ("a schedule", "not counted", "none: the user's script. Built in: 1 + YAML, `trainer/optim/schedules/`"),
    ("a data source", "not counted", "none: the user's script. Built in: 1 + YAML, `recipes/data/sources/`"),
    (
        "a parallel axis",
        "not counted",
        "`parallel/axes/`, its degree in `configs/schema/sections.py`, `mesh.py`, `process_groups.py`, `model_axes.py`",
    ),
)


def lines_now(suffixes: Collection[str] = SUFFIXES) -> dict[str, int]:
    """Return the lines of each package as it is, in files with one of ``suffixes``."""
    found = {name: _lines(ROOT / name, suffixes) for name in BEFORE}
    found["serried"] += _lines_of(ROOT / "train.py")
    return found


def table() -> str:
    """Return both tables as Markdown."""
    now = lines_now()
    rows = [(f"`{name}/`", before, now[name]) for name, before in BEFORE.items()]
    rows.append(("all", sum(BEFORE.values()), sum(now.values())))
    rows.append(("Python alone", PYTHON_BEFORE, sum(lines_now({".py"}).values())))
    return "\n".join(
        [
            f"| package | lines at {COMMIT} | lines now |",
            "| --- | --- | --- |",
            *(f"| {name} | {_rounded(before)} | {_rounded(after)} |" for name, before, after in rows),
            "",
            "| to add | files touched before | files to touch now |",
            "| --- | --- | --- |",
            *(f"| {what} | {before} | {after} |" for what, before, after in TO_ADD),
        ]
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
