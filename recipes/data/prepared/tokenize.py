"""Tokenization of the units of a source into shards, with several threads and bounded memory."""

import hashlib
import json
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from serried.configs.errors import UserError
from serried.recipes.data.prepared.token_shards import Shard, ShardWriter
from serried.recipes.data.readers.reading_progress import Progress, ordered
from serried.recipes.data.readers.source import SHOWN_ROWS, SPLITS, Row, Unit, bad_rows
from serried.recipes.data.readers.source_files import PIECE_BYTES
from serried.recipes.data.tokenizers.encode_rows import Encoded, Encoder, Joiner, as_bytes, texts_of

_SHARD_BYTES = 64 << 20
_MOST_SHARDS = 200
"""Maximum number of shards per split, since every process keeps all of them mapped."""

_BATCH_BYTES = 1 << 19
"""Number of bytes of text that a thread tokenizes at once."""

_BATCH_ROWS = 4096
_LEARN_BYTES = 1 << 30
"""Maximum number of bytes of text on which a tokenizer is trained."""

BUCKETS = 48

_ALL_BAD = 1000
"""Number of bad rows without any valid row after which reading stops, since the format must be wrong."""


@dataclass
class TokenCounts:
    """Sizes of a split, or of a part of it."""

    documents: int = 0
    text_bytes: int = 0
    tokens: int = 0
    """Number of tokens, including end tokens."""
    lengths: list[int] = field(default_factory=lambda: [0] * BUCKETS)
    """Histogram of document lengths. Entry i is the number of documents of 2^(i - 1) up to 2^i - 1 tokens."""

    def add(self, other: "TokenCounts") -> None:
        self.documents += other.documents
        self.text_bytes += other.text_bytes
        self.tokens += other.tokens
        self.lengths = [mine + its for mine, its in zip(self.lengths, other.lengths, strict=True)]


@dataclass
class SplitRows:
    """Conversations that became several documents, because their template drops or changes earlier turns."""

    rows: int = 0
    documents: int = 0
    """Number of documents produced from these conversations."""

    def add(self, other: "SplitRows") -> None:
        self.rows += other.rows
        self.documents += other.documents


@dataclass
class Counts:
    """Counts of the documents of a source, or of a part of it."""

    train: TokenCounts = field(default_factory=TokenCounts)
    validation: TokenCounts = field(default_factory=TokenCounts)
    empty: int = 0
    """Number of documents without text, which are left out."""
    zero_weight: int = 0
    """Number of rows with a ``weight`` of 0, which are left out."""
    held_out: int = 0
    """Number of training documents that are left out because they are also in the validation split."""
    bad: int = 0
    """Number of rows that are not valid documents."""
    bad_rows: list[str] = field(default_factory=list)
    """Positions of the first bad rows, with the reason."""
    lowest: float = 1.0
    """Lowest value of ``place_of`` among documents whose split depends on it."""
    highest: float = 0.0
    long: int = 0
    """Number of documents that are tokenized in pieces."""
    split: SplitRows = field(default_factory=SplitRows)
    new_rows: int = 0
    """Number of conversations that earlier versions of this library encoded differently."""

    def add(self, other: "Counts") -> None:
        for split in SPLITS:
            getattr(self, split).add(getattr(other, split))
        self.empty += other.empty
        self.zero_weight += other.zero_weight
        self.held_out += other.held_out
        self.long += other.long
        self.split.add(other.split)
        self.new_rows += other.new_rows
        self.bad += other.bad
        self.bad_rows = [*self.bad_rows, *other.bad_rows][:SHOWN_ROWS]
        self.lowest, self.highest = min(self.lowest, other.lowest), max(self.highest, other.highest)

    def add_bad(self, error: UserError) -> None:
        """Count a bad row. Raises ``UserError`` if there are many bad rows and no valid one."""
        self.bad += 1
        if len(self.bad_rows) < SHOWN_ROWS:
            self.bad_rows.append(str(error))
        if self.bad == _ALL_BAD and not self.train.documents + self.validation.documents:
            raise bad_rows(self.bad_rows, self.bad, f"the first {_ALL_BAD:,} rows are all invalid")

    @classmethod
    def from_json(cls, plain: dict[str, Any]) -> "Counts":
        """Create the counts from the result of ``dataclasses.asdict``."""
        tokens = {split: TokenCounts(**plain[split]) for split in SPLITS}
        return cls(**{**plain, **tokens, "split": SplitRows(**plain["split"])})


def place_of(row: Row, unit: str) -> float:
    """Return a hash of the content of a document as a number in [0, 1)."""
    if isinstance(row.content, list | dict):
        content = json.dumps(row.content, sort_keys=True, default=str).encode()
    else:
        content = as_bytes(row, unit)
    return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "big") / 2**64


class Splitter:
    """Chooses the split of a document: the split of its unit, or one that depends on the document's content."""

    def __init__(self, validation_fraction: float, held_out: frozenset[float]) -> None:
        """``held_out``: values of ``place_of`` of documents that are kept out of training."""
        self._fraction, self._held_out = validation_fraction, held_out

    def choose(self, row: Row, unit: Unit, counts: Counts) -> str | None:
        """Return the split; None if the document is left out, which is recorded in ``counts``."""
        if unit.split is not None and not (self._held_out and unit.split == "train"):
            return unit.split
        place = place_of(row, unit.name)
        if unit.split == "train":
            counts.held_out += place in self._held_out
            return None if place in self._held_out else "train"
        counts.lowest, counts.highest = min(counts.lowest, place), max(counts.highest, place)
        return "validation" if place < self._fraction else "train"


def held_out_of(units: Sequence[Unit]) -> frozenset[float]:
    """Return the values of ``place_of`` of validation documents; empty if no unit is for validation."""
    validation = [unit for unit in units if unit.split == "validation"]
    return frozenset(place_of(row, unit.name) for unit in validation for row in unit.rows())


def jobs_of(units: Sequence[Unit]) -> list[list[Unit]]:
    """Group units into shards, in order. The grouping depends only on the source, so that an interrupted preparation
    can continue."""
    wanted = max(_SHARD_BYTES, sum(unit.size_bytes for unit in units) // _MOST_SHARDS)
    jobs: list[list[Unit]] = []
    size_bytes = wanted
    for unit in units:
        if size_bytes >= wanted:
            jobs.append([])
            size_bytes = 0
        jobs[-1].append(unit)
        size_bytes += unit.size_bytes
    return jobs


class _Batch(NamedTuple):
    rows: list[Row]
    splits: list[str]
    unit: str
    size_bytes: int


def write_shards(
    folder: Path,
    number: int,
    units: Sequence[Unit],
    splitter: Splitter,
    encoder: Encoder,
    dtype: np.dtype[Any],
    progress: Progress,
) -> tuple[Counts, dict[str, Shard]]:
    """Write the documents of ``units`` as shard ``number`` of each split. Return counts, and the shards of splits that
    have documents."""
    counts, join = Counts(), Joiner(encoder)
    open_documents = dict.fromkeys(SPLITS, 0)

    def encoded(batch: _Batch) -> tuple[_Batch, list[Encoded | UserError]]:
        documents = iter(encoder([row for row in batch.rows if row.error is None], batch.unit))
        return batch, [row.error or next(documents) for row in batch.rows]

    with ExitStack() as stack:
        writers = {split: stack.enter_context(ShardWriter(folder, f"{split}-{number:05d}", dtype)) for split in SPLITS}
        pool = stack.enter_context(ThreadPoolExecutor(progress.threads))
        batches = _batches(units, splitter, counts, progress)
        for batch, documents in ordered(pool, encoded, batches, 2 * progress.threads + 1):
            for row, split, document in zip(batch.rows, batch.splits, documents, strict=True):
                if isinstance(document, UserError):
                    counts.add_bad(document)
                    continue
                document = join(row, document, batch.unit)
                counts.long += row.begins and (not row.ends or _size_of(row) > PIECE_BYTES)
                of_split: TokenCounts = getattr(counts, split)
                counts.new_rows += document.is_new or row.is_new
                is_pair = isinstance(row.content, dict) and "chosen" in row.content  # one document for each answer
                if document.before and not is_pair:
                    counts.split.add(SplitRows(1, 1 + len(document.before)))
                for whole in document.before:
                    writers[split].add(whole, begins=True, place=row.place)
                    of_split.tokens += len(whole.tokens)
                    of_split.documents += 1
                    of_split.lengths[len(whole.tokens).bit_length()] += 1
                writers[split].add(document, begins=row.begins, place=row.place)
                open_documents[split] += len(document.tokens)
                of_split.tokens += len(document.tokens)
                of_split.text_bytes += _size_of(row)
                if row.ends:
                    of_split.documents += 1
                    of_split.lengths[open_documents[split].bit_length()] += 1
                    open_documents[split] = 0
    return counts, {split: writer.shard() for split, writer in writers.items() if writer.tokens}


def _batches(units: Sequence[Unit], splitter: Splitter, counts: Counts, progress: Progress) -> Iterator[_Batch]:
    for unit in units:
        reported = 0
        batch = _Batch([], [], unit.name, 0)
        for row in unit.all_rows():
            split: str | None = ""
            if row.error is None:
                if not row.content:
                    counts.empty += not row.has_zero_weight
                    counts.zero_weight += row.has_zero_weight
                    counts.new_rows += row.is_new
                    continue
                try:
                    split = splitter.choose(row, unit, counts)
                except UserError as error:
                    if row.place is None:
                        raise
                    row = row._replace(content="", error=error)
            if split is None:
                continue
            batch.rows.append(row)
            batch.splits.append(split)
            batch = batch._replace(size_bytes=batch.size_bytes + _size_of(row))
            if batch.size_bytes >= _BATCH_BYTES or len(batch.rows) >= _BATCH_ROWS:
                yield batch
                step = min(batch.size_bytes, unit.size_bytes - reported)  # the size of a unit is an estimate
                progress.done(step)
                reported += step
                batch = _Batch([], [], unit.name, 0)
        if batch.rows:
            yield batch
        progress.done(unit.size_bytes - reported)


def _size_of(row: Row) -> int:
    if isinstance(row.content, dict):
        return sum(_size_of(row._replace(content=value)) for value in row.content.values() if value)
    if isinstance(row.content, list):
        return sum(len(str(message.get("content", ""))) for message in row.content)
    content = row.content
    if not isinstance(content, str | bytes):
        return 0  # a label or a weight
    return len(content) if isinstance(content, bytes) or content.isascii() else len(content.encode("utf-8", "replace"))


def texts_to_learn_from(units: Sequence[Unit], splitter: Splitter, tokenizer: str) -> Iterator[str]:
    """Yield text to train a tokenizer: the training text, or an evenly spaced sample of about 1 GiB."""
    every = max(1, -(-sum(unit.size_bytes for unit in units) // _LEARN_BYTES))
    ignored = Counts()
    for unit in units[::every]:
        rows = (row for row in unit.rows() if splitter.choose(row, unit, ignored) == "train")
        yield from texts_of(rows, unit.name, tokenizer)


def all_characters(units: Sequence[Unit], tokenizer: str) -> str:
    """Return the distinct characters of the text, sorted."""
    characters: set[str] = set()
    for unit in units:
        for text in texts_of(unit.rows(), unit.name, tokenizer):
            characters.update(text)
    return "".join(sorted(characters))
