"""The Python of README.md and docs/extending.md runs as it is printed."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cluster import ROOT

PAGES = ("README.md", "docs/extending.md")
SCRIPT = re.compile(r"```python\n# (?P<name>\w+\.py)\n(?P<code>.*?)```", re.DOTALL)
"""A block whose first line is the name of the file that the reader is to make."""


def scripts() -> dict[str, str]:
    pages = "".join((ROOT / page).read_text("utf-8") for page in PAGES if (ROOT / page).exists())
    return {match["name"]: match["code"] for match in SCRIPT.finditer(pages)}


@pytest.mark.parametrize("name", scripts())
def test_script_of_the_docs_trains(name: str, tmp_path: Path) -> None:
    for file, code in scripts().items():
        (tmp_path / file).write_text(code, "utf-8")
    done = subprocess.run(
        [sys.executable, name, "trainer.steps=3", "schedule.warmup_steps=1", "launch.device=cpu", "trainer.workers=1"],
        cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False,
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "finished   3 steps" in done.stdout
