"""What the documentation prints holds: scripts run, files exist, tables are current."""

import re
from pathlib import Path

import pytest

import serried
from testing.forked_runs import typed, typed_on
from testing.rank_pool import ROOT
from testing.runs import metrics
from tools.lines import MOST_ATTRIBUTES, packages, shape, to_add
from tools.site_hooks import public_names

BLOCK = re.compile(r"```python\n# (?P<name>\w+\.py)\n(?P<code>.*?)```", re.DOTALL)
"""A block whose first line is the name of the file that the reader is to make."""


def scripts() -> dict[str, str]:
    pages = "".join((ROOT / page).read_text("utf-8") for page in ("README.md", "docs/how-to/extending.md"))
    return {match["name"]: match["code"] for match in BLOCK.finditer(pages)}


@pytest.mark.parametrize(
    ("names", "printed"),
    [
        (["my_task.py"], "finished   3 steps"),
        (["make_houses.py", "houses.py", "fit_houses.py"], "finished"),
        (["make_houses.py", "copies.py"], "finished   3 steps"),
    ],
)
def test_script_of_the_documentation_trains(names: list[str], printed: str, tmp_path: Path) -> None:
    found = scripts()
    for name, code in found.items():
        (tmp_path / name).write_text(code, "utf-8")
    for name in names:
        short = ["trainer.steps=3", "launch.device=cpu"] if "serried.main(" in found[name] else []
        done = typed(name, *short, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
    assert printed in done.stdout


@pytest.mark.slow
def test_documented_plan_has_the_same_losses_in_tensor_and_pipeline(tmp_path: Path) -> None:
    (tmp_path / "divided.py").write_text(scripts()["divided.py"], "utf-8")
    short = ["divided.py", "trainer.steps=3", "trainer.log_every=1", "launch.device=cpu"]

    def losses(name: str, ranks: int, *more: str) -> list[float]:
        for done in typed_on(ranks, *short, f"run.name={name}", *more, cwd=tmp_path):
            assert done.returncode == 0, done.stderr
        return [line["loss"] for line in metrics(tmp_path / "runs" / name)]

    whole = losses("whole", 1)
    assert len(whole) == 3
    for axis in ("tensor", "pipeline"):
        assert losses(axis, 2, "parallel=fsdp", f"parallel.{axis}=2") == pytest.approx(whole, rel=1e-5), axis


@pytest.mark.slow
@pytest.mark.parametrize(("name", "whole"), [("towers.py", ["trainer.micro_batch=32"]), ("gan.py", [])])
def test_documented_loss_over_all_ranks_has_one_curve_on_data_parallel_layouts(
    name: str, whole: list[str], tmp_path: Path
) -> None:
    (tmp_path / name).write_text(scripts()[name], "utf-8")

    def losses(run: str, ranks: int, *more: str) -> list[float]:
        short = ["trainer.steps=6", "trainer.log_every=1", "launch.device=cpu", f"run.name={run}"]
        for done in typed_on(ranks, name, *short, *more, cwd=tmp_path):
            assert done.returncode == 0, done.stderr
        return [line["loss"] for line in metrics(tmp_path / "runs" / run)]

    alone = losses("one", 1, *whole)
    assert len(alone) == 6
    for strategy in ("ddp", "fsdp"):
        assert losses(strategy, 2, f"parallel={strategy}") == pytest.approx(alone, rel=1e-5), strategy


def test_readme_shows_launch_local_before_torchrun_and_its_traceback() -> None:
    readme = (ROOT / "README.md").read_text("utf-8")
    assert readme.index("launch=local launch.processes=") < readme.index("torchrun -")
    assert "prints its own traceback on Ctrl-C" in readme
    assert "torchrun" not in (ROOT / "Makefile").read_text("utf-8")


def test_files_that_the_architecture_names_exist() -> None:
    page = (ROOT / "docs/concepts/architecture.md").read_text("utf-8")
    named = set(re.findall(r"`?((?:configs|launch|parallel|recipes|records|runtime|serried|trainer)/[\w/]+\.py)", page))
    assert len(named) > 30
    assert [name for name in sorted(named) if not (ROOT / name).exists()] == []


def test_sizes_in_the_architecture_are_current() -> None:
    """Packages are those of now, their lines within 500 or a tenth: not every commit outdates the table."""
    page = (ROOT / "docs/concepts/architecture.md").read_text("utf-8")
    committed = page.partition("<!-- python -m tools.lines -->\n")[2].partition("\n<!-- end -->")[0]

    def lines(table: str) -> dict[str, int]:
        rows = re.findall(r"^\| (\S+) \|.*\| ([\d,]+) \|$", table, re.MULTILINE)
        return {name: int(count.replace(",", "")) for name, count in rows}

    shown, now = lines(committed), lines(packages())
    assert len(now) > 5
    assert shown.keys() == now.keys()
    outdated = [name for name, count in now.items() if abs(shown[name] - count) > max(500, count // 10)]
    assert not outdated, "put the output of `python -m tools.lines` into docs/concepts/architecture.md"
    assert to_add() in committed
    assert all(row.split(" | ")[0] in committed for row in shape().splitlines())


def test_architecture_stays_readable() -> None:
    """Its page fits in 150 lines, no file name is used often, and no level or class is large."""
    assert len((ROOT / "docs/concepts/architecture.md").read_text("utf-8").splitlines()) <= 150
    rows = dict(re.findall(r"^\| ([^|]+) \| ([^|]+) \|$", shape(), re.MULTILINE))
    assert int(rows["most files on one level"].partition(",")[0]) <= 20
    assert rows["file names used more than once"].count("`") <= 2 * 5
    assert rows[f"classes with more than {MOST_ATTRIBUTES} attributes"] == "none"


def test_commands_of_the_reference_are_current() -> None:
    page = (ROOT / "docs/reference/commands.md").read_text("utf-8")
    committed = page.partition("<!-- python -m tools.command_reference -->\n")[2].partition("\n<!-- end -->")[0]
    printed = typed("-m", "tools.command_reference").stdout.strip()
    assert "## serried plan" in printed
    assert committed == printed, "put the output of `python -m tools.command_reference` into docs/reference/commands.md"


def test_site_shows_every_public_name() -> None:
    assert [*public_names()] == serried.__all__


def test_site_has_every_page() -> None:
    """mkdocs checks links and anchors: ``make docs``."""
    named = re.findall(r"[\w/-]+\.md", (ROOT / "mkdocs.yml").read_text("utf-8"))
    assert sorted(named) == sorted(str(page.relative_to(ROOT / "docs")) for page in (ROOT / "docs").rglob("*.md"))


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md", "CHANGELOG.md"])
def test_links_of_pages_outside_the_site_lead_somewhere(page: str) -> None:
    def anchors(path: Path) -> set[str]:
        headings = re.findall(r"^#+ (.*)", path.read_text("utf-8"), re.MULTILINE)
        return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}

    links = re.findall(r"\]\(([^):#]+)(?:#([^)]*))?\)", (ROOT / page).read_text("utf-8"))
    assert len(links) > 3
    for name, anchor in links:
        assert (ROOT / name).exists(), name
        assert not anchor or anchor in anchors(ROOT / name), f"{name}#{anchor}"
