"""Tokenized texts, optionally with labels, from JSON Lines or CSV files or a Hugging Face dataset."""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np

from serried.configs.bucket_paths import local_path
from serried.configs.errors import UserError
from serried.configs.plain_data import NotPlainData, expanded, read_regular
from serried.configs.schema.tasks import LabelledSection, TextsSection
from serried.recipes.data.labelled.splits_and_classes import (
    TRAINING,
    Classes,
    LabelledData,
    missing_column,
    open_dataset,
    validation_split,
)
from serried.recipes.data.readers.csv_rows import CsvRows
from serried.recipes.data.readers.json_rows import JsonLines
from serried.recipes.data.readers.source import SHOWN_ROWS, bad_rows
from serried.recipes.data.readers.source_files import assignment, library

_KINDS = (".jsonl", ".csv")


class LabelledText(NamedTuple):
    """A tokenized text with its class."""

    tokens: np.ndarray
    """[tokens], int64"""
    label: int


class Texts:
    """Dataset of the texts of one split. Texts are tokenized on access."""

    def __init__(self, texts: Sequence[str], labels: Sequence[int], encoder: Any, fingerprint: str) -> None:
        """``encoder``: a ``tokenizers.Tokenizer``."""
        self._texts = texts
        self._labels = labels
        self._encoder = encoder
        self.fingerprint = fingerprint

    def __len__(self) -> int:
        return len(self._labels)

    def __getitem__(self, index: int) -> LabelledText:
        tokens = np.array(self._encoder.encode(self._texts[index]).ids, np.int64)
        if not len(tokens):
            raise UserError(f"the text of row {index + 1} has no tokens; remove such rows")
        return LabelledText(tokens, self._labels[index])


def open_encoder(folder: Path, sequence_length: int, side: str = "right") -> Any:
    """Load the tokenizer from the model ``folder``. It truncates texts to ``sequence_length`` tokens, removing tokens
    on ``side``. Raises ``UserError`` if there is no valid tokenizer."""
    tokenizers, file = library("tokenizers", "a tokenizer.json"), folder / "tokenizer.json"
    if not file.is_file():
        raise UserError(
            f"task.model={folder} has no tokenizer.json; save the model's fast tokenizer "
            "there with tokenizer.save_pretrained(FOLDER)"
        )
    try:
        encoder = tokenizers.Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises no specific exception
        reason = " ".join(str(error).split())[:200]
        raise UserError(
            f"cannot read {file}: {reason}; save the tokenizer again with tokenizer.save_pretrained(FOLDER)"
        ) from None
    encoder.no_padding()
    encoder.enable_truncation(sequence_length, direction=side)
    return encoder


def open_texts(section: TextsSection, encoder: Any, form: str = "") -> LabelledData:
    """Open the texts at ``task.path``. ``form`` is appended to their fingerprint. Raises ``UserError`` if there are
    none, or a row is invalid."""
    path, typed = expanded(local_path(section.path, "task.path")), assignment("task.path", section.path)
    files = {TRAINING: path} if path.is_file() else {}
    if path.is_dir():
        for file in sorted(path.iterdir()):
            if file.suffix in _KINDS and files.setdefault(file.stem, file) != file:
                raise UserError(f"{typed} has {files[file.stem].name} and {file.name}; keep one file per split")
    if files:
        return _of_files(section, files, encoder, typed, form)
    if not path.is_dir() and section.path.count("/") != 1:
        raise UserError(
            f"{typed} is neither a file, a folder nor the name of a dataset; use a .jsonl or .csv file, a folder of "
            "such files, or OWNER/NAME"
        )

    def opened(table: Any, number: Callable[[Any], int]) -> Texts:
        labels = table[section.label_column] if isinstance(section, LabelledSection) else [0] * len(table)
        return Texts(table[section.text_column], list(map(number, labels)), encoder, f"{table._fingerprint}{form}")

    wanted = f"folder with {TRAINING}.jsonl or {TRAINING}.csv"
    return open_dataset(section, str(path) if path.is_dir() else section.path, _columns(section), wanted, opened)


def _columns(section: TextsSection) -> dict[str, str]:
    """Return the columns to read, as a mapping from config key to column name."""
    labels = {"task.label_column": section.label_column} if isinstance(section, LabelledSection) else {}
    return {"task.text_column": section.text_column} | labels


def _of_files(section: TextsSection, files: dict[str, Path], encoder: Any, typed: str, form: str) -> LabelledData:
    if TRAINING not in files:
        raise UserError(
            f"{typed} has no {TRAINING}.jsonl or {TRAINING}.csv; it has "
            f"{', '.join(path.name for path in files.values())}; rename the training file"
        )
    split = validation_split(section, files)
    read = [_read(files[name], section) for name in (TRAINING, split) if name]
    are_mixed = len({type(label) for file in read for label in file.labels}) > 1  # labels of CSV files are strings
    of_splits = [[str(label) for label in file.labels] if are_mixed else file.labels for file in read]
    classes = Classes(of_splits[0])
    if split:
        classes.check(of_splits[1], str(files[split]))
    training, *others = (
        Texts(file.texts, [classes.number(label) for label in labels], encoder, file.digest + form)
        for file, labels in zip(read, of_splits, strict=True)
    )
    left_out = sum(file.bad_rows for file in read)
    return LabelledData(classes.names, training, others[0] if others else None, left_out)


class _TextAndLabel:
    """Reader of the text and label of a row. The label is empty if the task has no labels."""

    def __init__(self, section: TextsSection) -> None:
        self._columns, self._text = _columns(section), section.text_column
        self._label = section.label_column if isinstance(section, LabelledSection) else None

    def content_of(self, row: Mapping[str, Any]) -> tuple[str, str | int]:
        """Return text and label. Raises ``UserError`` if one is missing or has the wrong type. Its message is appended
        to the row's position."""
        names = [str(name) for name in row]
        if missing := missing_column(self._columns, names):
            typed, instead = missing
            raise UserError(f" has no column for {typed}; its columns are {', '.join(names)}; use {instead}")
        text, label = row[self._text], "" if self._label is None else row[self._label]
        if not isinstance(text, str) or not isinstance(label, str | int):
            labelled = f" and {self._label!r} text or an integer" if self._label is not None else ""
            raise UserError(f": {self._text!r} must be text{labelled}; fix or remove the row")
        return text, label


class _File(NamedTuple):
    """Contents of a file."""

    texts: list[str]
    labels: Sequence[str | int]
    digest: str
    bad_rows: int
    """Number of bad rows, which are left out."""


def _read(path: Path, section: TextsSection) -> _File:
    """Read the rows of a file. Raises ``UserError`` if there are none, or there are bad rows and
    ``task.bad_rows=refuse``."""
    try:
        content = read_regular(path)
    except (OSError, NotPlainData) as error:
        raise UserError(f"cannot read {path}: {getattr(error, 'strerror', None) or error}") from None
    reader: type[CsvRows | JsonLines] = CsvRows if path.suffix == ".csv" else JsonLines
    rows: list[tuple[str, str | int]] = []
    shown: list[str] = []
    bad = 0
    for row in reader(name=str(path), size_bytes=len(content), path=path, column=_TextAndLabel(section)).all_rows():
        if row.error is None:
            rows.append(cast(tuple[str, str | int], row.content))
            continue
        bad += 1
        if len(shown) < SHOWN_ROWS:
            shown.append(str(row.error))
    if not rows:  # if all rows are bad, the first error explains the wrong format
        raise UserError(shown[0] if bad else f"{path} has no rows; use another file")
    if bad and section.bad_rows == "refuse":
        raise bad_rows(shown, bad, key="task.bad_rows")
    texts, labels = zip(*rows, strict=True)
    return _File(list(texts), list(labels), hashlib.sha256(content).hexdigest(), bad)
