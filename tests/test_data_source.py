"""A data source of the user's: one file that registers it, and one YAML beside it, outside the checkout."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.runs import metrics, tiny_overrides

_SCRIPT = '''
import csv
import serried
from serried.configs.data_section import register_source


class CsvSection(serried.Section):
    """A column of a CSV file."""

    file: str = "texts.csv"
    """The file."""
    column: str = "text"
    """Name of the column."""


@register_source("csv", section=CsvSection)
def read(section):
    with open(section.file, newline="") as file:
        for row in csv.DictReader(file):
            yield row[section.column]


if __name__ == "__main__":
    serried.main()
'''


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "mine.py").write_text(_SCRIPT)
    (tmp_path / "presets" / "data").mkdir(parents=True)
    (tmp_path / "presets" / "data" / "csv.yaml").write_text("name: csv\ncolumn: body\n")
    rows = [f'{number},"text {number}, {"and so on " * (number % 7)}"' for number in range(300)]
    (tmp_path / "texts.csv").write_text("\n".join(["id,body", *rows]))
    return tmp_path


def run(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    words_of_text = ("data.path", "data=text")
    small = [word for word in tiny_overrides(folder, folder / "run") if not word.startswith(words_of_text)]
    return subprocess.run(
        [sys.executable, "mine.py", "--config-dir", "presets", *small, *words],
        cwd=folder, capture_output=True, text=True, timeout=240, check=False, env=os.environ | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip


def test_a_source_in_a_users_file_trains_alone_and_in_a_mixture(folder: Path) -> None:
    alone = run(folder, "data=csv")
    assert alone.returncode == 0, alone.stderr
    assert "data       csv, bytes as tokens" in alone.stdout
    assert [line["step"] for line in metrics(folder / "run")][-1] == 6
    mixture = ["data=mixture", "data.sources.mine.name=csv", "data.sources.mine.column=body", "run.name=mixed"]
    mixed = run(folder, *mixture, "data.sources.library.name=stdlib", f"run.dir={folder / 'mixed'}")
    assert mixed.returncode == 0, mixed.stderr
    counted = json.loads((folder / "mixed" / "metrics.jsonl").read_text().splitlines()[-3])
    assert set(metrics(folder / "mixed")[-1]["source_tokens"]) == {"mine", "library"}, counted


@pytest.mark.parametrize(
    ("words", "answer"),
    [
        (["data=csv", "data.colunm=body"], "did you mean data.column=body?"),
        (["data=csv", "data.subset=x"], "is read by data=hf, and this is data=csv"),
        (["data=cvs"], "Did you mean data=csv?"),
    ],
)
def test_mistakes_in_its_keys_are_one_line(words: list[str], answer: str, folder: Path) -> None:
    ended = run(folder, *words, "dry_run=true")
    assert (ended.returncode, ended.stdout) == (78, "")
    assert answer in ended.stderr
    assert ended.stderr.count("\n") == 1
