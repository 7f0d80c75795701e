"""The scripts of README.md and docs/extending.md run as they are printed."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cluster import ROOT

BLOCK = re.compile(r"```python\n# (?P<name>\w+\.py)\n(?P<code>.*?)```", re.DOTALL)
"""A block whose first line is the name of the file that the reader is to make."""


def scripts() -> dict[str, str]:
    pages = "".join((ROOT / page).read_text("utf-8") for page in ("README.md", "docs/extending.md"))
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
        done = subprocess.run(
            [sys.executable, name, *short],
            cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False,
            env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
    assert printed in done.stdout
