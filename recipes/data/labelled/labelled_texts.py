"""Tokenized texts, with classes if they have any: JSON or CSV rows, or a Hugging Face dataset."""

import csv
import hashlib
import io
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from serried.configs.errors import UserError
from serried.configs.plain_data import NotPlainData, expanded, read_regular
from serried.configs.schema.tasks import LabelledSection, TextsSection
from serried.recipes.data.labelled.splits_and_classes import (
    TRAINING,
    Classes,
    LabelledData,
    check_columns,
    open_dataset,
    validation_split,
)
from serried.recipes.data.readers.files import assignment, library

_KINDS = (".jsonl", ".csv")


class LabelledText(NamedTuple):
    """A tokenized text with its class."""

    tokens: np.ndarray
    """[tokens], int64"""
    label: int


class Texts:
    """The texts of one split, which are tokenized when they are read."""

    def __init__(self, texts: Sequence[str], labels: Sequence[int], encoder: Any, fingerprint: str) -> None:
        """``encoder``: a tokenizer of ``tokenizers``."""
        self._texts = texts
        self._labels = labels
        self._encoder = encoder
        self.fingerprint = fingerprint

    def __len__(self) -> int:
        return len(self._labels)

    def __getitem__(self, index: int) -> LabelledText:
        tokens = np.array(self._encoder.encode(self._texts[index]).ids, np.int64)
        if not len(tokens):
            raise UserError(f"the text of row {index + 1} has no tokens; leave such rows out")
        return LabelledText(tokens, self._labels[index])


def open_encoder(folder: Path, sequence_length: int, side: str = "right") -> Any:
    """Return the tokenizer in the model ``folder``, set to truncate texts after ``sequence_length`` tokens (or on
    the other ``side``). Raises ``UserError`` if there is none."""
    tokenizers, file = library("tokenizers", "a tokenizer.json"), folder / "tokenizer.json"
    if not file.is_file():
        raise UserError(f"task.model={folder} has no tokenizer.json; save its fast tokenizer there (transformers)")
    try:
        encoder = tokenizers.Tokenizer.from_file(str(file))
    except Exception as error:  # the library's own exception type
        raise UserError(f"cannot read {file}: {' '.join(str(error).split())[:200]}") from None
    encoder.no_padding()
    encoder.enable_truncation(sequence_length, direction=side)
    return encoder


def open_texts(section: TextsSection, encoder: Any, form: str = "") -> LabelledData:
    """Read the texts that ``section`` names. ``form`` is added to their fingerprint. Raises ``UserError`` if there
    are none, or a row is invalid."""
    path, typed = expanded(section.path), assignment("task.path", section.path)
    files = {TRAINING: path} if path.is_file() else {}
    if path.is_dir():
        for file in sorted(path.iterdir()):
            if file.suffix in _KINDS and files.setdefault(file.stem, file) != file:
                raise UserError(f"{typed} has {files[file.stem].name} and {file.name}; keep one file of each split")
    if files:
        return _of_files(section, files, encoder, typed, form)
    if not path.is_dir() and section.path.count("/") != 1:
        raise UserError(f"{typed}: there is no such file or folder; name a .jsonl or .csv file, or a dataset")

    def opened(table: Any, number: Callable[[Any], int]) -> Texts:
        labels = table[section.label_column] if isinstance(section, LabelledSection) else [0] * len(table)
        return Texts(table[section.text_column], list(map(number, labels)), encoder, f"{table._fingerprint}{form}")

    wanted = f"folder with {TRAINING}.jsonl or {TRAINING}.csv"
    return open_dataset(section, str(path) if path.is_dir() else section.path, _columns(section), wanted, opened)


def _columns(section: TextsSection) -> dict[str, str]:
    """Return the columns to read, by the config keys that name them."""
    labels = {"task.label_column": section.label_column} if isinstance(section, LabelledSection) else {}
    return {"task.text_column": section.text_column} | labels


def _of_files(section: TextsSection, files: dict[str, Path], encoder: Any, typed: str, form: str) -> LabelledData:
    if TRAINING not in files:
        raise UserError(f"{typed} has {', '.join(path.name for path in files.values())}, and no {TRAINING}.jsonl")
    split = validation_split(section, files)
    read = [_read(files[name], section) for name in (TRAINING, split) if name]
    are_mixed = len({type(label) for _, labels, _ in read for label in labels}) > 1  # labels of CSV files are strings
    of_splits = [[str(label) for label in labels] if are_mixed else labels for _, labels, _ in read]
    classes = Classes(of_splits[0])
    if split:
        classes.check(of_splits[1], str(files[split]))
    training, *others = (
        Texts(texts, [classes.number(label) for label in labels], encoder, fingerprint + form)
        for (texts, _, fingerprint), labels in zip(read, of_splits, strict=True)
    )
    return LabelledData(classes.names, training, others[0] if others else None)


def _read(path: Path, section: TextsSection) -> tuple[list[str], list[str | int], str]:
    """Return the texts and labels of a file, and a digest."""
    try:
        content = read_regular(path)
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise UserError(f"cannot read {path}: it is not UTF-8") from None
    except (OSError, NotPlainData) as error:
        raise UserError(f"cannot read {path}: {getattr(error, 'strerror', None) or error}") from None
    texts: list[str] = []
    labels: list[str | int] = []
    columns, label_column = _columns(section), section.label_column if isinstance(section, LabelledSection) else None
    rows = _csv_rows if path.suffix == ".csv" else _json_rows
    for number, row in enumerate(rows(path, text), 1):
        where = f"{path}, row {number}"
        check_columns(columns, [str(name) for name in row], where)
        one, label = row[section.text_column], "" if label_column is None else row[label_column]
        if not isinstance(one, str) or not isinstance(label, str | int):
            labelled = " and, as its label, a text or a whole number" if label_column is not None else ""
            raise UserError(f"{where}: needs a text{labelled}; fix or remove the row")
        texts.append(one)
        labels.append(label)
    if not texts:
        raise UserError(f"{path} holds no rows; use another file")
    return texts, labels, hashlib.sha256(content).hexdigest()


def _csv_rows(path: Path, text: str) -> Iterator[dict[str, Any]]:
    count, before = 0, csv.field_size_limit(len(text))
    try:
        # Strict: otherwise an unclosed quote swallows all later rows.
        rows = csv.DictReader(io.StringIO(text, newline=""), strict=True)
        names = list(rows.fieldnames or ())
        if twice := [name for name in names if names.count(name) > 1]:  # the last one would be used
            raise UserError(f"{path} has {names.count(twice[0])} columns named {twice[0]!r}; leave all but one out")
        for row in rows:
            count += 1
            yield row
    except csv.Error as error:
        raise UserError(f"cannot read {path}, row {count + 1}: {error}; fix or remove the row") from None
    finally:
        csv.field_size_limit(before)


def _json_rows(path: Path, text: str) -> Iterator[dict[str, Any]]:
    for number, line in enumerate(text.split("\n"), 1):  # splitlines() would split inside JSON strings, too
        if not line.strip():
            continue
        where = f"{path}, line {number}"
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise UserError(f"{where} is not JSON: {error}; fix or remove the row") from None
        if not isinstance(row, dict):
            raise UserError(f'{where} is not an object; write {{"text": "..."}}, and a label where texts have classes')
        yield row
