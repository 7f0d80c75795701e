"""Hugging Face datasets, from the Hub or a local folder, through the library ``datasets``."""

import hashlib
import json
import os
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
from serried.configs.schema import SourceSection
from serried.recipes.data.files import SourceFile, assignment, files_state, kind_of, library, quiet
from serried.recipes.data.rows import Column, JsonLines, ParquetRows, rows_of, units_of_file
from serried.recipes.data.source import Format, Reading, Row, Unit, WithoutEmpty

_UNIT_ROWS = 10_000
_BATCH_ROWS = 256


class HubDataset:
    """A dataset as a source: loaded (downloaded if necessary), then memory-mapped."""

    noun = "document"

    def __init__(self, section: SourceSection, validation_split: str | None, format: Format) -> None:
        """``validation_split`` None: a document goes to a split by its content.

        Raises:
            UserError: there is no such dataset, subset, split or column, or it cannot be had here.
        """
        self.section, self._column = section, _column(section, format)
        self._tables: list[tuple[Any, str | None]] = [(_load(section, section.split, format), None)]
        if validation_split:
            self._tables = [(self._tables[0][0], "train"), (_load(section, validation_split, format), "validation")]
        for table, _ in self._tables:
            self._column.check(table.column_names, _name_of(section))

    def identity(self) -> list[str]:
        prints = [table._fingerprint for table, _ in self._tables]  # datasets has no public name for it
        return [*prints, self._column.name]

    def state(self) -> str | None:
        paths = [Path(file["filename"]) for table, _ in self._tables for file in table.cache_files]
        return files_state([SourceFile(path.name, path) for path in paths]) if paths else None

    def fingerprint(self, reading: Reading) -> bytes:
        units = self.units()

        def digest(unit: TableRows) -> bytes:
            found = unit.digest()
            reading.done(unit.size_bytes)
            return found

        reading.total(sum(unit.size_bytes for unit in units))
        key = hashlib.sha256()
        for unit, found in zip(units, reading.map(digest, units), strict=True):
            key.update(str(unit.split).encode() + found)
        if not units:
            raise _no_rows(self.section)
        return key.digest()

    def units(self) -> list["TableRows"]:
        units = []
        for table, split in self._tables:
            rows = table.select_columns([self._column.name]).with_format("arrow")
            row_bytes = rows.data.nbytes / max(1, len(table.data)) if len(table) else 0
            for start in range(0, len(rows), _UNIT_ROWS):
                stop = min(start + _UNIT_ROWS, len(rows))
                size_bytes = int(row_bytes * (stop - start))
                units.append(TableRows(_name_of(self.section), rows, self._column, start, stop, size_bytes, split))
        return units


@dataclass(frozen=True)
class TableRows(WithoutEmpty):
    """Rows ``start`` up to ``stop`` of a dataset."""

    dataset: str
    table: Any
    column: Column
    start: int
    stop: int
    size_bytes: int
    split: str | None

    @property
    def name(self) -> str:
        return f"{self.dataset} rows {self.start + 1:,} to {self.stop:,}"

    def all_rows(self, first: int = 0) -> Iterator[Row]:
        for start in range(self.start + first, self.stop, _BATCH_ROWS):
            table = self.table[start : min(start + _BATCH_ROWS, self.stop)]
            for row in rows_of(table.column(0), self.column, start, self.dataset):
                yield row._replace(number=row.number - self.start)

    def digest(self) -> bytes:
        """Hash of the documents: the same however the rows lie in files."""
        arrow = library("pyarrow", "data=hf")
        sha256 = hashlib.sha256()
        for start in range(self.start, self.stop, _BATCH_ROWS):
            values = self.table[start : min(start + _BATCH_ROWS, self.stop)].column(0)
            if _is_text(values.type, arrow):
                for part in _bytes_of(values, arrow):
                    sha256.update(part)
            else:
                for value in values.to_pylist():
                    sha256.update(json.dumps(value, sort_keys=True, default=str).encode() + b"\n")
        return sha256.digest()


def _bytes_of(values: Any, arrow: Any) -> Iterator[bytes | memoryview]:
    """The lengths of texts and then the texts, as they lie in memory."""
    array = arrow.concat_arrays([chunk.cast(arrow.large_binary()) for chunk in values.chunks]).fill_null(b"")
    _, offsets, content = array.buffers()
    bounds = np.frombuffer(offsets, np.int64)[array.offset : array.offset + len(array) + 1]
    yield np.diff(bounds).astype("<i8").tobytes()
    if content is not None:
        yield memoryview(content)[int(bounds[0]) : int(bounds[-1])]


def _is_text(kind: Any, arrow: Any) -> bool:
    types = arrow.types
    return any(
        check(kind) for check in (types.is_string, types.is_large_string, types.is_binary, types.is_large_binary)
    )


class HubStream:
    """The files of a dataset as a source that is read during training."""

    noun = "document"

    def __init__(self, section: SourceSection, format: Format) -> None:
        """Asks for the list of files. Raises ``UserError`` as ``HubDataset`` does."""
        self.section, self._column = section, _column(section, format)
        self._builder = _guarded(section, section.split, partial(_builder, section), format)
        self._files = self._builder.config.data_files or {}
        if section.split not in self._files:
            raise _no_split(section, section.split, [str(name) for name in self._files])

    def identity(self) -> list[str]:
        return [str(file) for file in self._files[self.section.split]]

    def state(self) -> str | None:
        return None

    def fingerprint(self, reading: Reading) -> bytes:  # noqa: ARG002
        """Hash of the names of the files: the Hub's hold the commit, local ones their times."""
        files = [str(file) for file in self._files[self.section.split]]
        local = [SourceFile(file, Path(file)) for file in files if "://" not in file]
        times = [str(file.path.stat().st_mtime_ns) for file in local]
        return hashlib.sha256(json.dumps([files, times, self._column.name]).encode()).digest()

    def units(self) -> list[Unit]:
        """A unit for each file on the Hub, smaller ones for local files; in the order of the dataset."""
        return _units_of(self._builder, self.section.split, self._column)


def _units_of(builder: Any, split: str, column: Column) -> list[Unit]:
    files = [str(file) for file in (builder.config.data_files or {}).get(split, ())]
    size_bytes = _bytes_per_file(builder, split, len(files))
    return [unit for file in files for unit in _units_of_file(file, builder.name, column, size_bytes)]


def _units_of_file(file: str, loader: str, column: Column, size_bytes: int) -> list[Unit]:
    kind = kind_of(file)
    if "://" not in file and kind in (".jsonl", ".parquet"):
        return list(units_of_file(Path(file), column, Path(file).stat().st_size, None))
    if kind == ".parquet":
        return [ParquetRows(file, column, None, size_bytes, None)]
    if kind == ".jsonl":
        return [JsonLines(file, column, 0, None, size_bytes, None)]
    return [StreamedFile(file, loader, column, size_bytes)]


def _bytes_per_file(builder: Any, split: str, files: int) -> int:
    info = (builder.info.splits or {}).get(split)
    return int(info.num_bytes / files) if info is not None and info.num_bytes else 1


@dataclass(frozen=True)
class StreamedFile(WithoutEmpty):
    """A file in one of the other formats that ``datasets`` reads: arrow, csv, plain text, json."""

    name: str
    loader: str
    column: Column
    size_bytes: int
    split = None

    def all_rows(self, first: int = 0) -> Iterator[Row]:
        datasets = _library()
        try:
            rows = datasets.load_dataset(self.loader, data_files=[self.name], split="train", streaming=True)
            for number, row in enumerate(rows.skip(first), first):
                self.column.check(list(row), self.name)
                content = self.column.content(row[self.column.name], partial(self._place, number))
                yield Row(number, content)
        except (OSError, ValueError) as error:
            raise UserError(f"{self.name} cannot be read: {_sentence(error)}") from error

    def _place(self, number: int) -> str:
        return f"{self.name} row {number + 1:,}"


# loading --------------------------------------------------------------------------------------------------------------


def _column(section: SourceSection, format: Format) -> Column:
    return Column(section.messages_column if format == "chat" else section.text_column, format)


def _name_of(section: SourceSection) -> str:
    return f"dataset {section.path}" + (f" ({section.subset})" if section.subset else "")


def _library() -> Any:
    return library("datasets", "data=hf")


def _load(section: SourceSection, split: str, format: Format) -> Any:
    """A split as a table on this disk."""

    def load() -> Any:
        return _library().load_dataset(path_or_name(section), section.subset, split=split, revision=section.revision)

    return _guarded(section, split, load, format)


def _builder(section: SourceSection) -> Any:
    return _library().load_dataset_builder(path_or_name(section), section.subset, revision=section.revision)


def path_or_name(section: SourceSection) -> str:
    """The folder of a dataset, or its name on the Hub. Raises ``UserError`` where ``data.path`` is neither."""
    assert section.path is not None  # the schema sees to it
    path = os.path.expanduser(section.path)  # noqa: PTH111 -- methods of Path fail where they may not look
    if os.path.isfile(path):  # noqa: PTH113
        raise UserError(
            f"{assignment('data.path', section.path)} is a file, and data=hf takes a folder or the name of a dataset; "
            f"use data=text {assignment('data.path', section.path)}"
        )
    if os.path.isdir(path):  # noqa: PTH112
        return path
    if not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", section.path) or section.path.startswith((".", "/", "~")):
        raise UserError(
            f"{assignment('data.path', section.path)} is not a folder here, and not a name on the Hugging Face Hub; "
            "use data.path=OWNER/NAME, as in data.path=HuggingFaceFW/fineweb-edu, or the path of a folder"
        )
    return section.path


def _guarded(section: SourceSection, split: str, action: Callable[[], Any], format: Format) -> Any:
    """Return what ``action`` returns; turn what it raises into one ``UserError``."""
    datasets = _library()
    if not sys.stderr.isatty():  # bars are for whoever looks on
        datasets.disable_progress_bars()
    with quiet():
        try:
            return action()
        except UserError:
            raise
        except Exception as error:
            raise _explained(section, split, error, datasets, format) from error


def _explained(section: SourceSection, split: str, error: Exception, datasets: Any, format: Format) -> UserError:
    text, name = _sentence(error), _name_of(section)
    if "Unknown split" in text or "Bad split" in text:
        return _no_split(section, split, _listed(text))
    if "BuilderConfig" in text and "not found" in text:
        return _no_subset(section, f"has no subset {section.subset!r}", _listed(text))
    if "Config name is missing" in text:
        return _no_subset(section, "has several subsets, and none is named", _listed(text))
    if isinstance(error, OSError) and error.errno:
        return UserError(f"cannot read or store {name}: {error.strerror} ({error.filename}); HF_HOME says where to")
    if Path(str(section.path)).expanduser().is_dir():
        return _broken_file(section, split, format) or UserError(
            f"{name} cannot be read: {text}; name another folder: data.path=..."
        )
    if "is a gated dataset" in text:
        return UserError(
            f"{name} is gated: ask for access at https://huggingface.co/datasets/{section.path}, then run "
            "`hf auth login` (or set HF_TOKEN) and start again"
        )
    if isinstance(error, ConnectionError | TimeoutError) or "Couldn't reach" in text or "Offline" in text:
        return UserError(
            f"{name} is not on this machine, and the Hugging Face Hub cannot be reached ({text}); run `serried "
            "prepare` with the same overrides on a machine with network, and share data.cache_dir (and HF_HOME) with "
            "this one, or give a local folder: data.path=FOLDER"
        )
    if isinstance(error, datasets.exceptions.DatasetNotFoundError):
        return UserError(
            f"there is no {name} on the Hugging Face Hub, or it is private: {text}; check data.path and "
            "data.revision, or run `hf auth login`"
        )
    return UserError(f"{name} cannot be loaded: {type(error).__name__}: {text}")


def _broken_file(section: SourceSection, split: str, format: Format) -> UserError | None:
    """``datasets`` names neither file nor row: read the files one by one until the one that is broken says so."""
    rows = 0
    try:
        for unit in _units_of(_builder(section), split.partition("[")[0], _column(section, format)):
            rows += sum(1 for _ in unit.all_rows())
    except UserError as error:
        return error
    except Exception:  # what is to be explained, most likely
        return None
    return None if rows else _no_rows(section)


def _no_rows(section: SourceSection) -> UserError:
    return UserError(f"{_name_of(section)} has no rows: nothing to train on; name another: data.path=...")


def _no_split(section: SourceSection, split: str, there: list[str]) -> UserError:
    near = get_close_matches(split, there, 1) or there
    key = "data.split" if split == section.split else "data.validation_split"
    return UserError(f"{_name_of(section)} has no split {split!r}; it has {', '.join(there)}; use {key}={near[0]}")


def _no_subset(section: SourceSection, what: str, there: list[str]) -> UserError:
    near = get_close_matches(section.subset or "", there, 1) or there
    shown = ", ".join(there[:20]) + (f" and {len(there) - 20} more" if len(there) > 20 else "")
    return UserError(f"dataset {section.path} {what}; it has {shown}; use data.subset={near[0]}")


def _listed(text: str) -> list[str]:
    """The names in the list that a message of ``datasets`` ends with."""
    at = max(text.rfind("Available"), text.rfind("one of"), text.rfind("among"), 0)
    found = re.search(r"\[(.*?)\]", text[at:])
    return re.findall(r"['\"]([^'\"]+)['\"]", found[1]) if found else ["train"]


def _sentence(error: Exception) -> str:
    text = " ".join(str(error).split()).rstrip(".")
    return text or type(error).__name__
