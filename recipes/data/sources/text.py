"""The user's own files: plain text, a document each, or rows (``.jsonl``, ``.parquet``), a document in each row."""

from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any, ClassVar

from pydantic import Field

from serried.configs.errors import UserError
from serried.configs.schema.data import SourceSection, register_source
from serried.configs.schema.fields import PathText
from serried.recipes.data.readers.find_files import check_path, find_files
from serried.recipes.data.readers.json_parquet_rows import COLUMNS, Column, RowFiles, holds_rows
from serried.recipes.data.readers.plain_text import TextFiles
from serried.recipes.data.readers.source import Source
from serried.recipes.data.readers.source_files import assignment, ending_of, kind_of

TEXT_SUFFIXES = (".txt", ".text", ".md", ".rst", ".py")
"""Files that are one document each, in a folder. A file that is named, or matches a glob, may end in anything."""
ROW_SUFFIXES = (".jsonl", ".parquet")
_JSON_SUFFIXES = (".json", ".ndjson")
"""Files that hold rows or one document, as their first line shows. In a folder they are left out."""


class RowsSection(SourceSection):
    """Documents in the rows of a table."""

    text_column: str = "text"
    """Column of the text, in Hugging Face datasets and in .jsonl and .parquet files."""
    messages_column: str = "messages"
    """Column of the conversation (``data.format=chat``)."""
    columns: dict[str, str] = Field(default_factory=dict)
    """Names of other columns of conversations and pairs, such as ``data.columns.prompt=question_text``."""

    def _mistakes(self) -> Iterator[str]:
        yield from super()._mistakes()
        for name, column in self.columns.items():
            if name not in COLUMNS:
                near = get_close_matches(name, COLUMNS, 1)
                hint = f"did you mean data.columns.{near[0]}={column}?" if near else f"they are {', '.join(COLUMNS)}"
                yield f"data.columns.{name}={column}: no column is called so here; {hint}"


class TextSection(RowsSection):
    """Your files."""

    needs: ClassVar[Mapping[str, str]] = {"path": "FILE_OR_FOLDER_OR_GLOB"}
    path: PathText | None = None
    """File, folder or glob; for ``hf`` the name of a dataset, or its folder."""

    def check(self) -> None:
        check_path(str(self.path))


@register_source("text", section=TextSection)
def text(section: Any) -> Source:
    """Return files of text or files of rows."""
    files = find_files(section.path, (*TEXT_SUFFIXES, *ROW_SUFFIXES))
    column = Column.of(section)
    rows = [file for file in files if _has_rows(file.path, column)]
    texts = [file for file in files if file not in rows]
    if texts and rows:
        globs = [
            assignment("data.path", f"{section.path}/**/*{ending_of(files_of_kind[0].path)}")
            for files_of_kind in (rows, texts)
        ]
        raise UserError(
            f"{assignment('data.path', section.path)} holds both files of text ({texts[0].name}: {len(texts)}) and "
            f"files of rows ({rows[0].name}: {len(rows)}); name one kind with a glob, as in {' or '.join(globs)}"
        )
    if rows:
        return RowFiles(rows, column)
    if section.format != "text":
        columns = "columns chosen and rejected"
        if section.format == "chat":
            columns = f"a column {section.messages_column}"
        raise UserError(
            f"data.format={section.format} needs rows, and {files[0].path} is text; use .jsonl or .parquet files with "
            f"{columns}, or data=hf"
        )
    return TextFiles(files, section.validation_fraction)


def _has_rows(path: Path, column: Column) -> bool:
    kind = kind_of(path)
    return kind in ROW_SUFFIXES or (kind in _JSON_SUFFIXES and holds_rows(path, column))
