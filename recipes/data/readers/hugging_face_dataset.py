"""Hugging Face datasets, from the Hub or a local folder, through the library ``datasets``."""

import hashlib
import json
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from serried.configs.errors import UserError
from serried.configs.plain_data import expanded
from serried.recipes.data.readers.columns import Column, row_of
from serried.recipes.data.readers.json_rows import JsonLines
from serried.recipes.data.readers.parquet_rows import ParquetRows, documents_of, rows_of
from serried.recipes.data.readers.reading_progress import Progress
from serried.recipes.data.readers.row_files import units_of_file
from serried.recipes.data.readers.source import Place, Row, Source, Unit
from serried.recipes.data.readers.source_files import SourceFile, files_state, kind_of, library, quiet

_UNIT_ROWS = 10_000
_BATCH_ROWS = 256


class HubDataset(Source):
    """A dataset as a source: loaded (downloaded if necessary), then memory-mapped."""

    def __init__(self, section: Any) -> None:
        """Load the tables. Raises ``UserError`` if the dataset, subset, split or column does not exist or is not
        available."""
        self.section, self._column = section, Column.of(section)
        self.validation_split = section.validation_split
        wanted: list[tuple[str, str | None]] = [(section.split, None)]
        if self.validation_split:
            wanted = [(section.split, "train"), (self.validation_split, "validation")]
        self._tables = [(_guarded(section, split, partial(_load, section, split)), kind) for split, kind in wanted]
        for table, _ in self._tables:
            self._column.check(table.column_names, _name_of(section))

    def identity(self) -> list[str]:
        prints = [table._fingerprint for table, _ in self._tables]  # not public in datasets
        return [*prints, self._column.identity]

    def state(self) -> str | None:
        paths = [Path(file["filename"]) for table, _ in self._tables for file in table.cache_files]
        return files_state([SourceFile(path.name, path) for path in paths]) if paths else None

    def fingerprint(self, progress: Progress) -> bytes:
        units = self.units()

        def digest(unit: TableRows) -> bytes:
            found = unit.digest()
            progress.done(unit.size_bytes)
            return found

        progress.total_bytes = sum(unit.size_bytes for unit in units)
        key = hashlib.sha256()
        for unit, found in zip(units, progress.map(digest, units), strict=True):
            key.update(str(unit.split).encode() + found)
        if not units:
            raise _no_rows(self.section)
        return key.digest()

    def units(self) -> list["TableRows"]:
        units, name = [], _name_of(self.section)
        for table, split in self._tables:
            rows = table.select_columns(self._column.found(table.column_names)).with_format("arrow")
            row_bytes = rows.data.nbytes / max(1, len(table.data)) if len(table) else 0
            for start in range(0, len(rows), _UNIT_ROWS):
                stop = min(start + _UNIT_ROWS, len(rows))
                units.append(
                    TableRows(
                        name=f"{name} rows {start + 1:,} to {stop:,}", size_bytes=int(row_bytes * (stop - start)),
                        split=split, dataset=name, table=rows, column=self._column, start=start, stop=stop,
                    )
                )  # fmt: skip
        return units


@dataclass(frozen=True, kw_only=True)
class TableRows(Unit):
    """Rows ``start`` up to ``stop`` of a dataset."""

    dataset: str
    table: Any
    column: Column
    start: int
    stop: int

    def all_rows(self, first: int = 0) -> Iterator[Row]:
        for start, values in self._batches(self.start + first):
            for row in rows_of(values, self.column, start, self.dataset):
                yield row._replace(number=row.number - self.start)

    def digest(self) -> bytes:
        """Return a hash of the documents that does not depend on how the rows are stored in files."""
        arrow = library("pyarrow", "data=hf")
        sha256 = hashlib.sha256()
        for _, values in self._batches(self.start):
            if any(getattr(arrow.types, f"is_{kind}")(values.type) for kind in _TEXTS):
                for part in _bytes_of(values, arrow):
                    sha256.update(part)
            else:
                for value in values.to_pylist():
                    sha256.update(json.dumps(value, sort_keys=True, default=str).encode() + b"\n")
        return sha256.digest()

    def _batches(self, first: int) -> Iterator[tuple[int, Any]]:
        for start in range(first, self.stop, _BATCH_ROWS):
            yield start, documents_of(self.table[start : min(start + _BATCH_ROWS, self.stop)])


_TEXTS = ("string", "large_string", "binary", "large_binary")


def _bytes_of(values: Any, arrow: Any) -> Iterator[bytes | memoryview]:
    """Yield the lengths of the texts as int64, then their concatenated bytes."""
    array = arrow.concat_arrays([chunk.cast(arrow.large_binary()) for chunk in values.chunks]).fill_null(b"")
    _, offsets, content = array.buffers()
    bounds = np.frombuffer(offsets, np.int64)[array.offset : array.offset + len(array) + 1]
    yield np.diff(bounds).astype("<i8").tobytes()
    if content is not None:
        yield memoryview(content)[int(bounds[0]) : int(bounds[-1])]


def streamed_units(section: Any, split: str) -> list[Unit]:
    """Return the units of ``split`` for streaming, in the order of the dataset: one per file on the Hub, and smaller
    ones for local files. Raises ``UserError`` like ``HubDataset``."""
    builder = _guarded(section, split, partial(_builder, section))
    files = builder.config.data_files or {}
    if split not in files:
        raise _no_split(section, split, [str(name) for name in files])
    return _units_of(builder, split, Column.of(section))


def _units_of(builder: Any, split: str, column: Column) -> list[Unit]:
    files = [str(file) for file in (builder.config.data_files or {}).get(split, ())]
    info = (builder.info.splits or {}).get(split)
    size_bytes = int(info.num_bytes / len(files)) if info is not None and info.num_bytes else 1
    return [unit for file in files for unit in _units_of_file(file, builder.name, column, size_bytes)]


def _units_of_file(file: str, loader: str, column: Column, size_bytes: int) -> list[Unit]:
    kind = kind_of(file)
    if "://" not in file and kind in (".jsonl", ".parquet"):
        return list(units_of_file(Path(file), column, Path(file).stat().st_size, None))
    if kind == ".parquet":
        return [ParquetRows(name=file, size_bytes=size_bytes, path=file, column=column)]
    if kind == ".jsonl":
        return [JsonLines(name=file, size_bytes=size_bytes, path=file, column=column)]
    return [StreamedFile(name=file, size_bytes=size_bytes, loader=loader, column=column)]


@dataclass(frozen=True, kw_only=True)
class StreamedFile(Unit):
    """A file in another format that is read through ``datasets``: Arrow, CSV, plain text or JSON."""

    loader: str
    column: Column

    def all_rows(self, first: int = 0) -> Iterator[Row]:
        try:
            rows = _library().load_dataset(self.loader, data_files=[self.name], split="train", streaming=True)
            for number, row in enumerate(rows.skip(first), first):
                yield row_of(number, Place(self.name, number, "row"), row, self.column.content_of)
        except (OSError, ValueError) as error:
            raise UserError(f"{self.name} cannot be read: {_sentence(error)}") from error


# loading --------------------------------------------------------------------------------------------------------------


def _name_of(section: Any) -> str:
    return f"dataset {section.path}" + (f" ({section.subset})" if section.subset else "")


def _library() -> Any:
    return library("datasets", "data=hf")


def _load(section: Any, split: str) -> Any:
    return _library().load_dataset(section.folder_or_name(), section.subset, split=split, revision=section.revision)


def _builder(section: Any) -> Any:
    return _library().load_dataset_builder(section.folder_or_name(), section.subset, revision=section.revision)


def _guarded(section: Any, split: str, action: Callable[[], Any]) -> Any:
    """Return the result of ``action``; convert its exceptions to a ``UserError``."""
    datasets = _library()
    if not sys.stderr.isatty():  # no progress bars in log files
        datasets.disable_progress_bars()
    with quiet():
        try:
            return action()
        except UserError:
            raise
        except Exception as error:
            raise _explained(section, split, error, datasets) from error


def _explained(section: Any, split: str, error: Exception, datasets: Any) -> UserError:
    text, name = _sentence(error), _name_of(section)
    if "Unknown split" in text or "Bad split" in text:
        return _no_split(section, split, _listed(text))
    if "BuilderConfig" in text and "not found" in text:
        return _no_subset(section, f"has no subset {section.subset!r}", _listed(text))
    if "Config name is missing" in text:
        return _no_subset(section, "has several subsets, but data.subset is not set", _listed(text))
    if isinstance(error, OSError) and error.errno:
        return UserError(
            f"cannot read or store {name}: {error.strerror} ({error.filename}); set HF_HOME to store datasets in "
            "another folder"
        )
    if expanded(str(section.path)).is_dir():
        return _broken_file(section, split) or UserError(
            f"{name} cannot be read: {text}; name another folder: data.path=..."
        )
    if "is a gated dataset" in text:
        return UserError(
            f"{name} is gated: request access at https://huggingface.co/datasets/{section.path}, then run `hf auth "
            "login` (or set HF_TOKEN) and start again"
        )
    if isinstance(error, ConnectionError | TimeoutError) or "Couldn't reach" in text or "Offline" in text:
        return UserError(
            f"{name} is not on this machine, and the Hugging Face Hub cannot be reached ({text}); run `serried "
            "prepare` with the same overrides on a machine with network access, and share data.cache_dir (and "
            "HF_HOME) with this machine, or use a local folder: data.path=FOLDER"
        )
    if isinstance(error, datasets.exceptions.DatasetNotFoundError):
        return UserError(
            f"there is no {name} on the Hugging Face Hub, or it is private: {text}; check data.path and "
            "data.revision, or run `hf auth login`"
        )
    return UserError(f"{name} cannot be loaded: {type(error).__name__}: {text}")


def _broken_file(section: Any, split: str) -> UserError | None:
    """Return the error for a broken file; None if none is found. ``datasets`` names neither file nor row in its errors,
    so the files are read one by one."""
    rows = 0
    try:
        for unit in _units_of(_builder(section), split.partition("[")[0], Column.of(section)):
            for row in unit.all_rows():
                if row.error is not None:
                    return row.error
                rows += 1
    except UserError as error:
        return error
    except Exception:  # most likely the same error again
        return None
    return None if rows else _no_rows(section)


def _no_rows(section: Any) -> UserError:
    return UserError(
        f"{_name_of(section)} has no rows, so there is nothing to train on; use another dataset: data.path=..."
    )


def _no_split(section: Any, split: str, there: list[str]) -> UserError:
    near = get_close_matches(split, there, 1) or there
    key = "data.split" if split == section.split else "data.validation_split"
    return UserError(f"{_name_of(section)} has no split {split!r}; it has {', '.join(there)}; use {key}={near[0]}")


def _no_subset(section: Any, what: str, there: list[str]) -> UserError:
    near = get_close_matches(section.subset or "", there, 1) or there
    shown = ", ".join(there[:20]) + (f" and {len(there) - 20} more" if len(there) > 20 else "")
    return UserError(f"dataset {section.path} {what}; it has {shown}; use data.subset={near[0]}")


def _listed(text: str) -> list[str]:
    """Return the names in the list at the end of an error message of ``datasets``."""
    at = max(text.rfind("Available"), text.rfind("one of"), text.rfind("among"), 0)
    found = re.search(r"\[(.*?)\]", text[at:])
    return re.findall(r"['\"]([^'\"]+)['\"]", found[1]) if found else ["train"]


def _sentence(error: Exception) -> str:
    text = " ".join(str(error).split()).rstrip(".")
    return text or type(error).__name__
