"""What the documentation prints holds: scripts run, files exist, tables are current."""

import re
from pathlib import Path

import pytest

from testing.cluster import ROOT
from testing.forked_runs import typed, typed_on
from testing.runs import metrics
from tools.lines import table

BLOCK = re.compile(r"```python\n# (?P<name>\w+\.py)\n(?P<code>.*?)```", re.DOTALL)
"""A block whose first line is the name of the file that the reader is to make."""


def scripts() -> dict[str, str]:
    pages = "".join((ROOT / page).read_text("utf-8") for page in ("README.md", "docs/how-to/extending.md"))
    return {match["name"]: match["code"] for match in BLOCK.finditer(pages)}


@pytest.mark.parametrize(
    ("names", "printed"),
    [(["my_task.py"], "finished   3 steps"), (["make_houses.py", "houses.py", "fit_houses.py"], "finished")],
)
def test_script_of_the_documentation_trains(names: list[str], printed: str, tmp_path: Path) -> None:
    found = scripts()
    for name in names:
        (tmp_path / name).write_text(found[name], "utf-8")
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
    assert len(named) > 40
    assert [name for name in sorted(named) if not (ROOT / name).exists()] == []


def test_line_counts_in_the_architecture_are_current() -> None:
    """Within 500 lines or a tenth, so that not every commit outdates them."""
    page = (ROOT / "docs/concepts/architecture.md").read_text("utf-8")
    committed = page.partition("<!-- python -m tools.lines -->\n")[2].partition("\n<!-- end -->")[0].splitlines()
    printed = table().splitlines()
    assert len(committed) == len(printed)
    for mine, current in zip(committed, printed, strict=True):
        words, lines = split(mine)
        assert (words, lines is None) == (split(current)[0], split(current)[1] is None), (
            "put the output of `python -m tools.lines` into docs/concepts/architecture.md"
        )
        if lines is not None:
            lines_now = split(current)[1] or 0
            assert abs(lines - lines_now) <= max(500, lines_now // 10), f"{mine}: {lines_now:,} now"


def split(row: str) -> tuple[str, int | None]:
    """A row of a table and the number in its last column; None: there is none."""
    match = re.fullmatch(r"(.*\|) ([\d,]+) \|", row)
    return (match[1], int(match[2].replace(",", ""))) if match else (row, None)
