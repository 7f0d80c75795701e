"""Rows of CSV files with a header."""

import csv
import io
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from serried.configs.errors import UserError
from serried.recipes.data.readers.columns import RowContent, row_of
from serried.recipes.data.readers.source import Place, Row, Unit
from serried.recipes.data.readers.source_files import Stamp, open_plain, unchanged


@dataclass(frozen=True, kw_only=True)
class CsvRows(Unit):
    """All rows of a CSV file."""

    path: Path
    column: RowContent
    stamp: Stamp | None = None

    def all_rows(self, first: int = 0) -> Iterator[Row]:
        count, before = 0, csv.field_size_limit(max(self.size_bytes, 1))
        try:
            with unchanged(self.path, self.stamp), open_plain(self.path) as stream:
                # Strict: otherwise an unclosed quote swallows all later rows.
                rows = csv.DictReader(io.TextIOWrapper(stream, "utf-8-sig", newline=""), strict=True)
                names = list(rows.fieldnames or ())
                if twice := [name for name in names if names.count(name) > 1]:  # csv would silently use the last one
                    raise UserError(
                        f"{self.path} has {names.count(twice[0])} columns named {twice[0]!r}; remove all but one"
                    )
                for row in rows:
                    if count >= first:
                        yield row_of(count, Place(str(self.path), count, "row"), row, self.column.content_of)
                    count += 1
        except UnicodeDecodeError:
            raise UserError(f"cannot read {self.path}: it is not UTF-8; convert it, e.g. with iconv -t UTF-8") from None
        except csv.Error as error:  # it may hide other rows, so it cannot be skipped as a bad row
            raise UserError(f"cannot read {self.path}, row {count + 1}: {error}; fix or remove the row") from None
        finally:
            csv.field_size_limit(before)
