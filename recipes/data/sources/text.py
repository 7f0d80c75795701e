"""The user's own files: plain text with one document per file, or ``.jsonl`` and ``.parquet`` with one per row."""

from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any, ClassVar

from pydantic import Field

from serried.configs.errors import UserError
from serried.configs.schema.data import SourceSection, register_source
from serried.configs.schema.fields import PathOrUrl
from serried.recipes.data.readers.columns import COLUMNS, Column
from serried.recipes.data.readers.find_files import check_path, find_files
from serried.recipes.data.readers.json_rows import holds_rows
from serried.recipes.data.readers.plain_text import TextFiles
from serried.recipes.data.readers.row_files import RowFiles
from serried.recipes.data.readers.source import Source
from serried.recipes.data.readers.source_files import assignment, ending_of, kind_of

TEXT_SUFFIXES = (".txt", ".text", ".md", ".rst", ".py")
"""Suffixes of text files that are read from a folder, one document per file. Files given by name or glob may have any
suffix."""
ROW_SUFFIXES = (".jsonl", ".parquet")
_JSON_SUFFIXES = (".json", ".ndjson")
"""Suffixes of files that contain either rows or one document, which is detected from their first lines. They are
ignored in folders."""


class RowsSection(SourceSection):
    """Config of sources with one document per table row."""

    text_column: str = "text"
    """Column of the text, in Hugging Face datasets and in .jsonl and .parquet files."""
    messages_column: str = "messages"
    """Column of the conversation (``data.format=chat``)."""
    columns: dict[str, str | None] = Field(default_factory=dict)
    """Names of other columns of conversations and pairs, such as ``data.columns.prompt=question_text``; null: the
    column is not read."""

    def _mistakes(self) -> Iterator[str]:
        yield from super()._mistakes()
        for name, column in self.columns.items():
            if name not in COLUMNS:
                near = get_close_matches(name, COLUMNS, 1)
                typed = "null" if column is None else column
                hint = f"did you mean data.columns.{near[0]}={typed}?" if near else f"use one of {', '.join(COLUMNS)}"
                yield f"data.columns.{name}={typed}: unknown column {name}; {hint}"


class TextSection(RowsSection):
    """Config of the user's own files."""

    needs: ClassVar[Mapping[str, str]] = {"path": "FILE_OR_FOLDER_OR_GLOB"}
    path: PathOrUrl | None = None
    """File, folder or glob, also ``s3://BUCKET/PATH``; for ``hf`` the name of a dataset, or its folder."""

    def check(self) -> None:
        check_path(str(self.path))


@register_source("text", section=TextSection)
def text(section: Any) -> Source:
    """Return the source for the files at ``data.path``, which must be either all text or all rows."""
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
            f"{assignment('data.path', section.path)} has both text files ({texts[0].name}: {len(texts)}) and files "
            f"with rows ({rows[0].name}: {len(rows)}); select one kind with a glob, as in {' or '.join(globs)}"
        )
    if rows:
        return RowFiles(rows, column)
    if section.format != "text":
        columns = "columns chosen and rejected"
        if section.format == "chat":
            columns = f"a column {section.messages_column}"
        raise UserError(
            f"data.format={section.format} needs rows, but {files[0].path} is plain text; use .jsonl or .parquet files "
            f"with {columns}, or data=hf"
        )
    return TextFiles(files, section.validation_fraction)


def _has_rows(path: Path, column: Column) -> bool:
    kind = kind_of(path)
    return kind in ROW_SUFFIXES or (kind in _JSON_SUFFIXES and holds_rows(path, column))
