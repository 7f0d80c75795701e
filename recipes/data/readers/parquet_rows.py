"""Rows of Parquet files and Arrow tables."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from serried.configs.errors import UserError
from serried.recipes.data.readers.columns import Column, row_of
from serried.recipes.data.readers.source import Place, Row, Unit
from serried.recipes.data.readers.source_files import Stamp, library, opened, unchanged, unreadable

_BATCH_ROWS = 256


@dataclass(frozen=True, kw_only=True)
class ParquetRows(Unit):
    """Rows of a Parquet file: the row group ``group``, or all groups in order if it is None."""

    path: Path | str
    column: Column
    group: int | None = None
    stamp: Stamp | None = None

    def all_rows(self, first: int = 0) -> Iterator[Row]:
        with unchanged(self.path, self.stamp), open_parquet(self.path) as file:
            self.column.check(file.schema_arrow.names, str(self.path))
            lengths = [file.metadata.row_group(group).num_rows for group in range(file.metadata.num_row_groups)]
            groups = range(len(lengths)) if self.group is None else [self.group]
            before, number = sum(lengths[: groups[0]]) if groups else 0, 0
            for group in groups:
                if number + lengths[group] > first:
                    for row in self._group(file, group, before + number):
                        if row.number - before >= first:
                            yield row._replace(number=row.number - before)
                number += lengths[group]

    def _group(self, file: Any, group: int, number: int) -> Iterator[Row]:
        """Yield the rows of one row group with their numbers in the file, starting at ``number``."""
        arrow = library("pyarrow", f"reading {Path(self.path).name}")
        names = self.column.found(file.schema_arrow.names)
        batches = file.iter_batches(_BATCH_ROWS, row_groups=[group], columns=names)
        while True:
            try:
                batch = next(batches, None)
            except (arrow.ArrowException, OSError) as error:
                raise UserError(
                    f"{self.path} cannot be read from row {number + 1:,} on (row group {group + 1}): {error}; "
                    "create it again, or leave it out with data.path=..."
                ) from error
            if batch is None:
                return
            yield from rows_of(documents_of(batch), self.column, number, str(self.path))
            number += len(batch)


def documents_of(batch: Any) -> Any:
    """Return the documents of an Arrow table as one array: its only column, or a struct array of several columns."""
    return batch.column(0) if batch.num_columns == 1 else batch.to_struct_array()


def rows_of(values: Any, column: Column, first: int, name: str) -> Iterator[Row]:
    """Yield the rows of an Arrow array. The first has the number ``first``."""
    try:
        contents = values.to_pylist()
    except UnicodeDecodeError:
        contents = [_text_or_error(value) for value in values]
    except ValueError as error:  # raised by Arrow if fields of a column have the same name
        raise UserError(
            f"cannot read {Place(name, first, 'row')} or a later row: {error}; write the file again"
        ) from None
    for number, content in enumerate(contents, first):
        place = Place(name, number, "row")
        yield row_of(number, place, content, column.content)


def _text_or_error(value: Any) -> Any:
    try:
        return value.as_py()
    except UnicodeDecodeError as error:
        return UserError(
            f" is not UTF-8: byte 0x{error.object[error.start]:02x} at offset {error.start} of its text "
            f"({error.reason}); fix or remove the row"
        )


@contextmanager
def open_parquet(path: Path | str) -> Iterator[Any]:
    """Open a Parquet file, on the disk or at an fsspec address. Raises ``UserError`` if it is invalid or incomplete."""
    arrow = library("pyarrow", f"reading {Path(path).name}")
    parquet = library("pyarrow.parquet", f"reading {Path(path).name}")
    with ExitStack() as stack:
        try:
            file = parquet.ParquetFile(opened(path, stack), pre_buffer=False)
        except (arrow.ArrowException, OSError) as error:
            if isinstance(error, OSError) and error.errno:
                raise unreadable(path, error) from error
            raise UserError(
                f"{path} is not a complete parquet file: {error}; it may be cut off: create it "
                "again, or leave it out with data.path=..."
            ) from error
        yield file
