"""Files with one document per row, as a source: JSON Lines and JSON arrays, compressed or not, and Parquet."""

import hashlib
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from serried.configs.errors import UserError
from serried.recipes.data.readers.columns import Column
from serried.recipes.data.readers.json_rows import JsonArray, JsonLines, is_array
from serried.recipes.data.readers.parquet_rows import ParquetRows, open_parquet
from serried.recipes.data.readers.reading_progress import Progress
from serried.recipes.data.readers.source import Source, Unit
from serried.recipes.data.readers.source_files import (
    COMPRESSED,
    Document,
    SourceFile,
    Stamp,
    files_state,
    hash_files,
    key_of,
    kind_of,
)

_UNIT_BYTES = 32 << 20
"""Number of bytes of a .jsonl file that one unit reads."""

_SHOWN_COLUMNS = 20


class RowFiles(Source):
    """Files of rows as a source. The split of a document depends on its content."""

    def __init__(self, files: Sequence[SourceFile], column: Column) -> None:
        self._files, self._column = files, column
        self._hashed: list[Document] = []

    def identity(self) -> list[str]:
        return [os.path.commonpath([file.path.absolute() for file in self._files]), self._column.identity]

    def state(self) -> str | None:
        return files_state(self._files)

    def fingerprint(self, progress: Progress) -> bytes:
        self._hashed = hash_files(self._files, progress)
        return hashlib.sha256(key_of(self._hashed) + self._column.identity.encode()).digest()

    def units(self) -> list[Unit]:
        units = [
            unit
            for file in self._hashed
            for unit in units_of_file(file.path, self._column, file.size_bytes, file.stamp)
        ]
        _check_renamed([unit for unit in units if isinstance(unit, JsonLines | JsonArray)], self._column)
        return units


class _Names:
    """The names of the columns of a row."""

    def content_of(self, row: Mapping[str, Any]) -> list[str]:
        return list(row)


def _check_renamed(units: Sequence[JsonLines | JsonArray], column: Column) -> None:
    """Raise ``UserError`` if no row of ``units`` has a column that ``data.columns`` names. Reads rows until all are
    found, usually one."""
    missing, names = dict(column.renamed), dict[str, None]()
    rows = (row for unit in units if missing for row in replace(unit, column=_Names()).all_rows())
    for row in rows:
        if row.error is None:
            names.update(dict.fromkeys(map(str, row.content)))
            missing = {ours: theirs for ours, theirs in missing.items() if theirs not in names}
        if not missing:
            return
    if names and missing:
        ours, theirs = next(iter(missing.items()))
        more = [f"and {len(names) - _SHOWN_COLUMNS:,} more"] if len(names) > _SHOWN_COLUMNS else []
        raise UserError(
            f"data.columns.{ours}={theirs}: no row of "
            f"{units[0].path}{' or the other files' if units[-1].path != units[0].path else ''} has this column; the "
            f"columns are {', '.join([*[*names][:_SHOWN_COLUMNS], *more])}"
        )


def units_of_file(path: Path, column: Column, size_bytes: int, stamp: Stamp | None) -> Iterator[Unit]:
    """Yield the units of a file: one per row group, one per 32 MiB of lines, or one per JSON array or compressed
    file."""
    if kind_of(path) == ".parquet":
        with open_parquet(path) as file:
            column.check(file.schema_arrow.names, str(path))
            for group in range(file.metadata.num_row_groups):
                name, size = f"{path} row group {group + 1}", file.metadata.row_group(group).total_byte_size
                yield ParquetRows(name=name, size_bytes=size, path=path, column=column, group=group, stamp=stamp)
        return
    if is_array(path):
        yield JsonArray(name=str(path), size_bytes=size_bytes, path=path, column=column, stamp=stamp)
        return
    step = size_bytes if path.suffix.lower() in COMPRESSED else _UNIT_BYTES
    for start in range(0, size_bytes, step):
        stop = start + step if start + step < size_bytes else None
        yield JsonLines(
            name=f"{path} from byte {start:,}" if start else str(path), size_bytes=min(step, size_bytes - start),
            path=path, column=column, start_bytes=start, stop_bytes=stop, stamp=stamp,
        )  # fmt: skip
