"""Generate the tables of package sizes in docs/concepts/architecture.md: ``python -m tools.lines``.

Counts Python files, and all lines (``wc -l``) of Python, YAML, JavaScript, CSS and HTML, without tests, benchmarks,
tools, examples and the vendored uPlot. Numbers are rounded, so that small commits do not change the tables.
"""

import ast
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("serried", "planner", "launch", "recipes", "trainer", "parallel", "records", "runtime", "configs")
SUFFIXES = {".py", ".yaml", ".js", ".css", ".html"}
MOST_ATTRIBUTES = 12
TO_ADD = (
    ("a task: model, data, loss", "your script", "`X.py`, `X_config.py` in `recipes/text/` or `classification/`"),
    (
        "a model family",
        "your script and a YAML preset",
        "`X.py`, `X_config.py` in `recipes/models/families/` and a YAML preset; its activations are traced, or "
        "a formula in `planner/activations/families.py`",
    ),
    ("an optimizer", "your script", "`X.py`, `X_config.py` in `trainer/optim/algorithms/` and a YAML preset"),
    ("a schedule", "your script", "`trainer/optim/schedules/` and a YAML preset"),
    ("a data source", "your script", "`recipes/data/sources/` and a YAML preset"),
    ("a callback", "your script", "-"),
    (
        "a parallel axis",
        "not possible",
        "`parallel/axes/`, its degree in `configs/schema/sections.py`, `mesh.py`, `process_groups.py`, "
        "`model_axes.py`; in `planner/` its messages, time and search",
    ),
)


class ClassSize(NamedTuple):
    """Size of a class."""

    path: Path
    name: str
    lines: int
    attributes: int
    is_record: bool
    """Whether the class is a named tuple or a dataclass, and none of its methods sets an attribute."""


def packages() -> str:
    """Return a table of the files and lines of each package and its subpackages."""
    rows = ["| package | files on top | rooms, with files | lines |", "| --- | --- | --- | --- |"]
    sums = [0, 0]
    for name in PACKAGES:
        files = [*_files(ROOT / name)]
        python = [path for path in files if path.suffix == ".py"]
        on_top = [path for path in python if path.parent == ROOT / name]
        rooms = Counter(path.relative_to(ROOT / name).parts[0] for path in python if path not in on_top)
        lines = sum(map(_lines, files))
        sums = [sums[0] + len(python), sums[1] + lines]
        words = ", ".join(f"`{room}/` {count}" for room, count in sorted(rooms.items())) or "-"
        rows.append(f"| `{name}/` | {len(on_top)} | {words} | {_rounded(lines)} |")
    rows.append(f"| all | {sums[0]} files | | {_rounded(sums[1])} |")
    return "\n".join(rows)


def shape() -> str:
    """Return a table of the largest file, class and folder, classes with many attributes, and repeated file names."""
    python = [path for name in PACKAGES for path in _files(ROOT / name) if path.suffix == ".py"]
    levels = Counter(path.parent for path in python)
    level, files = levels.most_common(1)[0]
    longest = max(python, key=_lines)
    classes = [found for path in python for found in _classes(path)]
    largest = max(classes, key=lambda found: found.lines)
    names = Counter(path.stem for path in python if not path.stem.startswith("__"))
    twice = sorted(name for name, count in names.items() if count > 1)
    rows = [
        ("largest file", f"`{longest.relative_to(ROOT)}`, {_rounded(_lines(longest))} lines"),
        ("largest class", f"`{largest.name}` in `{largest.path.relative_to(ROOT)}`, {_rounded(largest.lines)} lines"),
        ("most files on one level", f"{files}, in `{level.relative_to(ROOT)}/`"),
        (
            f"classes with more than {MOST_ATTRIBUTES} attributes",
            _largest(found for found in classes if not found.is_record),
        ),
        (
            f"records (named tuples, dataclasses whose methods set nothing) with more than {MOST_ATTRIBUTES} fields",
            _largest(found for found in classes if found.is_record),
        ),
        ("file names used more than once", ", ".join(f"`{name}`" for name in twice) or "none"),
    ]
    return "\n".join(["| of all packages | |", "| --- | --- |", *(f"| {what} | {value} |" for what, value in rows)])


def _largest(classes: Iterable[ClassSize]) -> str:
    """Return the names of ``classes`` with more than ``MOST_ATTRIBUTES`` attributes, and the number of their
    attributes."""
    many = sorted((found.attributes, found.name) for found in classes if found.attributes > MOST_ATTRIBUTES)
    return ", ".join(f"`{name}` {count}" for count, name in reversed(many)) or "none"


def to_add() -> str:
    """Return a table of the files to change to add a component."""
    rows = ["| to add | outside the checkout | built in |", "| --- | --- | --- |"]
    return "\n".join([*rows, *(f"| {what} | {outside} | {inside} |" for what, outside, inside in TO_ADD)])


def tables() -> str:
    """Return all tables as Markdown."""
    return "\n\n".join((packages(), shape(), to_add()))


def _files(folder: Path) -> Iterator[Path]:
    """Yield the non-empty files below ``folder`` that are counted. Links are left out: ``serried`` links to other
    packages."""
    for path in sorted(folder.iterdir()):
        if path.is_symlink() or path.name in ("uplot", "__pycache__"):
            continue
        if path.is_dir():
            yield from _files(path)
        elif path.suffix in SUFFIXES and _lines(path):  # most __init__.py are empty
            yield path


def _classes(path: Path) -> Iterator[ClassSize]:
    """Yield the size of each class in ``path``, except for config sections."""
    if path.is_relative_to(ROOT / "configs/schema") or path.stem.endswith("_config"):
        return
    for node in _statements(ast.parse(path.read_text("utf-8")).body):
        if not isinstance(node, ast.ClassDef):
            continue
        stored = {
            found.attr
            for statement in _statements(node.body)
            for target in _targets(statement)
            for found in ast.walk(target)
            if isinstance(found, ast.Attribute) and isinstance(found.ctx, ast.Store)
            and isinstance(found.value, ast.Name) and found.value.id == "self"
        }  # fmt: skip
        declared = {
            found.target.id
            for found in node.body
            if isinstance(found, ast.AnnAssign) and isinstance(found.target, ast.Name)
        }
        assert node.end_lineno is not None
        made_by = {word for part in (*node.bases, *node.decorator_list) for word in ast.unparse(part).split("(")[:1]}
        is_record = not stored and bool(made_by & {"NamedTuple", "dataclass"})
        lines = node.end_lineno - node.lineno + 1
        yield ClassSize(path, node.name, lines, len(stored | declared), is_record)


def _statements(body: Sequence[ast.stmt]) -> Iterator[ast.stmt]:
    """Yield all statements in ``body``. ``ast.walk`` would also yield expressions, which takes seconds."""
    for node in body:
        yield node
        for name in ("body", "orelse", "finalbody"):
            yield from _statements(getattr(node, name, ()))
        for inner in (*getattr(node, "handlers", ()), *getattr(node, "cases", ())):
            yield from _statements(inner.body)


def _targets(statement: ast.stmt) -> list[ast.expr]:
    """Return the expressions that ``statement`` assigns to."""
    if isinstance(statement, ast.Assign):
        return statement.targets
    if isinstance(statement, ast.AnnAssign | ast.AugAssign | ast.For):
        return [statement.target]
    if isinstance(statement, ast.With):
        return [item.optional_vars for item in statement.items if item.optional_vars is not None]
    return []


def _rounded(lines: int) -> str:
    return f"{round(lines, -2) if lines >= 1000 else round(lines, -1):,}"


def _lines(path: Path) -> int:
    return path.read_bytes().count(b"\n")


if __name__ == "__main__":
    print(tables())
