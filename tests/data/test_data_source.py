"""A data source of the user's: one file that registers it, and one YAML beside it, outside the checkout."""

import subprocess
from pathlib import Path
from typing import Any

import pytest

from serried.configs.compose import compose
from serried.configs.errors import UserError
from serried.configs.schema.data import register_source
from serried.configs.schema.fields import Section
from serried.recipes.data.readers.reading_progress import Progress
from serried.recipes.data.readers.source import open_source
from testing.forked_runs import typed
from testing.runs import metrics, tiny_overrides

_SCRIPT = '''
import csv
import serried
from serried.configs.schema.data import register_source


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
    return typed("mine.py", "--config-dir", "presets", *small, *words, cwd=folder)


def test_a_source_in_a_users_file_is_part_of_a_mixture(folder: Path) -> None:
    mixture = ["data=mixture", "data.sources.mine.name=csv", "data.sources.mine.column=body"]
    ended = run(folder, *mixture, "data.sources.library.name=stdlib")
    assert ended.returncode == 0, ended.stderr
    assert "data       mine (csv) 50 %, library (stdlib) 50 % of the tokens, bytes as tokens" in ended.stdout
    assert set(metrics(folder / "run")[-1]["source_tokens"]) == {"mine", "library"}


def test_mistake_in_the_keys_of_a_source_is_refused_in_one_line(folder: Path) -> None:
    ended = run(folder, "data=csv", "data.colunm=body", "dry_run=true")
    assert (ended.returncode, ended.stdout) == (78, "")
    assert "did you mean data.column=body or data.columns=body?" in ended.stderr
    assert ended.stderr.count("\n") == 1


class LinesSection(Section):
    """Lines of a text."""

    text: str = "one\ntwo"
    """The text."""


def test_a_registered_function_is_a_source() -> None:
    @register_source("lines", section=LinesSection)
    def lines(section: Any) -> list[str]:
        return section.text.split("\n")

    config = compose(["data=lines", "data.text='a b'"])
    source = open_source(config.data)
    assert [row.content for unit in source.units() for row in unit.rows()] == ["a b"]
    other = open_source(compose(["data=lines", "data.text=c"]).data)
    assert source.fingerprint(Progress(None, 1)) != other.fingerprint(Progress(None, 1))
    for words, answer in (
        (["data=lines", "data.subset=x"], "is a key of data=hf, but the run uses data=lines"),
        (["data=linse"], "Did you mean data=lines?"),
    ):
        with pytest.raises(UserError) as caught:
            compose(words)
        assert answer in str(caught.value)
