"""The source that a section of the config names."""

import glob
import os
from pathlib import Path

from serried.configs.errors import UserError
from serried.configs.schema import SourceSection
from serried.recipes.data.files import assignment, kind_of
from serried.recipes.data.hugging_face_dataset import HubDataset, HubStream, path_or_name
from serried.recipes.data.rows import RowFiles
from serried.recipes.data.source import Format, Source
from serried.recipes.data.text import ROW_SUFFIXES, TextFiles, find_files, no_such_path


def check_path(section: SourceSection) -> None:
    """Raise ``UserError`` if nothing can be at ``data.path``. Only looks at the local disk, before anything slow."""
    if section.name == "hf":
        path_or_name(section)
    elif section.path and not glob.has_magic(section.path):
        path = Path(os.path.expanduser(section.path))  # noqa: PTH111 -- that of Path fails where there is no such user
        try:
            path.stat()
        except FileNotFoundError:
            raise no_such_path(section.path, path) from None
        except OSError:
            pass  # whoever opens it says why


def open_source(
    section: SourceSection,
    *,
    format: Format = "text",
    validation_fraction: float | None = None,
    validation_split: str | None = None,
) -> Source:
    """Return the documents that ``section`` names. Finds files and loads datasets; reads no document.

    ``validation_fraction`` matters for files of text alone, whose split is known before they are read; elsewhere a
    document goes to a split by its content. ``validation_split`` is the Hugging Face split that validation is.

    Raises:
        UserError: there is no such source, or it cannot be had.
    """
    if section.name == "hf":
        return HubDataset(section, validation_split, format)
    files = find_files(section)
    kinds = {kind_of(file.path) in ROW_SUFFIXES for file in files}
    if kinds == {False, True}:
        raise UserError(
            f"{assignment('data.path', str(section.path))} matches both files of text and files of rows "
            f"({' '.join(ROW_SUFFIXES)}); name one kind, as in data.path='corpus/**/*.jsonl'"
        )
    if kinds == {True}:
        return RowFiles(section, files, format)
    if format == "chat":
        raise UserError(
            f"data.format=chat needs rows, and {files[0].path} is text; use .jsonl or .parquet files with a column "
            f"{section.messages_column}, or data=hf"
        )
    return TextFiles(section, files, validation_fraction)


def open_stream(section: SourceSection, *, format: Format = "text") -> HubStream:
    """Return the documents of a Hugging Face dataset, to be read during training (``data.streaming=true``).

    Raises:
        UserError: there is no such dataset, subset or split, or it cannot be had.
    """
    return HubStream(section, format)
