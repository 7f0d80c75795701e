"""Opening of streamed training data, and preparation of its validation set."""

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from serried.configs.errors import UserError
from serried.configs.plain_data import read_regular
from serried.recipes.data.prepared.atomic_folder import make_folder
from serried.recipes.data.prepared.prepare import (
    Prepared,
    cache_folder,
    is_intact,
    open_prepared,
    write_json,
    write_summary,
)
from serried.recipes.data.prepared.token_shards import ShardWriter
from serried.recipes.data.prepared.tokenize import Counts, place_of
from serried.recipes.data.readers.hugging_face_dataset import streamed_units
from serried.recipes.data.readers.reading_progress import Progress, Show
from serried.recipes.data.readers.source import Row, Unit
from serried.recipes.data.streaming.lanes import Deal, StreamDataset
from serried.recipes.data.tokenizers.encode_rows import TextEncoder
from serried.recipes.data.tokenizers.hugging_face_tokenizer import named_tokenizer
from serried.recipes.data.tokenizers.tokenizer import Tokenizer, token_dtype

_FORMAT = 3
"""Version of the prepared files of a stream. Version 4 is used for tokenizers that need the pieces of long documents to
be joined."""

_JOINED = "pieces are joined"
"""Text added to the identity of the data if its tokens depend on joining the pieces of long documents."""
_SINCE_JOINED = "documents above 1 MiB were tokenized in pieces of 1 MiB and are now tokenized as a whole"

_HELD_OUT = "held-out.json"
"""File with the sorted values of ``place_of`` of the documents of ``data.validation_split``."""

_ROWS_AT_ONCE = 64
_REMEMBERED_STEPS = 64
"""Number of past steps whose cursors are kept. A rollback returns to the step before a loss spike, which may be
detected about 50 steps late."""


def prepare_stream(section: Any, sequences: int, show: Show | None = None) -> Prepared:
    """Tokenize enough validation documents for ``sequences`` sequences, or reuse them from the cache.

    Validation documents are the documents of ``data.validation_split``, or else documents whose hash is below
    ``data.validation_fraction``. None of them is trained on, even if ``sequences`` sequences do not need it. The full
    ``data.validation_split`` is read to exclude its documents. The result is empty if no data is held out.

    Raises ``UserError`` if the source cannot be read, or has too little text for one sequence.
    """
    tokenizer = _tokenizer(section)
    units = [] if section.keeps_none else streamed_units(section, section.validation_split or section.split)
    wanted = sequences * section.sequence_length + 1
    names = [[unit.name, unit.size_bytes] for unit in units]
    version = _FORMAT if tokenizer.splits_anywhere else _FORMAT + 1
    identity = [version, _identity(section, tokenizer), names, wanted, section.validation_split]
    folder = cache_folder(section) / f"stream-{hashlib.sha256(json.dumps(identity).encode()).hexdigest()[:32]}"
    with Progress(show, 1) as progress:

        def write(partial: Path) -> None:
            progress.say("reading validation documents")
            _write(partial, section, units, tokenizer, wanted)

        make_folder(folder, write, lambda: is_intact(folder) and (folder / _HELD_OUT).is_file(), progress)
    return replace(open_prepared(folder), tokenizer=tokenizer)


def open_training(section: Any, prepared: Prepared, *, lanes: int, seed: int, workers: int) -> StreamDataset:
    """Open the training documents as ``lanes`` lanes. ``prepared``: result of ``prepare_stream``. Raises ``UserError``
    if the dataset, subset or split does not exist or is not available."""
    tokenizer = _tokenizer(section)
    places = read_regular(prepared.folder / _HELD_OUT)
    held_out = frozenset(json.loads(places))
    fraction = 0.0 if section.validation_split else section.validation_fraction

    def is_training(row: Row, unit: str) -> bool:
        place = place_of(row, unit)
        return place >= fraction and place not in held_out

    units = streamed_units(section, section.split)
    before = [_identity(section, tokenizer), hashlib.sha256(places).hexdigest()]
    joins = not tokenizer.splits_anywhere
    return StreamDataset(
        units,
        TextEncoder(tokenizer, section.tokenizer),
        is_training,
        Deal(len(units), lanes, seed),
        sequence_length=section.sequence_length,
        isolate_documents=section.isolate_documents,
        # The loader reads two steps ahead, or one step per thread.
        remembered=_REMEMBERED_STEPS + workers,
        identity=json.dumps([*before, _JOINED] if joins else before),
        earlier={json.dumps(before): _SINCE_JOINED} if joins else {},
    )


def _tokenizer(section: Any) -> Tokenizer:
    tokenizer = named_tokenizer(section)
    assert tokenizer is not None, "the schema refuses those that are learned from the text"
    return tokenizer


def _identity(section: Any, tokenizer: Tokenizer) -> str:
    """Return all settings that determine the tokens of a document and its split."""
    spec = hashlib.sha256(json.dumps(tokenizer.spec(), sort_keys=True).encode()).hexdigest()
    return json.dumps([spec, section.text_column, section.validation_fraction])


def _write(folder: Path, section: Any, units: Sequence[Unit], tokenizer: Tokenizer, wanted: int) -> None:
    counts, held_out = Counts(), set[float]()
    encoder = TextEncoder(tokenizer, section.tokenizer)
    with ShardWriter(folder, "validation-00000", token_dtype(tokenizer.vocab_size)) as writer:
        for unit, rows in _held_out_rows(section, units):
            if section.validation_split:  # all documents, since the number that an evaluation uses may change
                held_out.update(place_of(row, unit.name) for row in rows)
            elif writer.tokens >= wanted:
                break
            if writer.tokens >= wanted:
                continue
            for encoded in encoder(rows, unit.name):
                if isinstance(encoded, UserError):
                    raise encoded
                if writer.tokens >= wanted:
                    break
                writer.add(encoded, begins=True)
                counts.validation.documents += 1
        counts.validation.tokens = writer.tokens
    if counts.validation.tokens <= section.sequence_length and not section.keeps_none:
        keep = f"data.validation_fraction={section.validation_fraction:g}"
        raise UserError(
            f"the validation documents ({section.validation_split or keep}) of {section.path} have "
            f"{counts.validation.tokens:,} tokens, but data.sequence_length={section.sequence_length} needs "
            f"{section.sequence_length + 1:,}; keep more documents for validation, or use a shorter "
            "data.sequence_length"
        )
    write_json(folder / _HELD_OUT, sorted(held_out))
    shards = {"validation": [writer.shard()]} if writer.tokens else {}
    write_summary(folder, counts, shards, "document", tokenizer)


def _held_out_rows(section: Any, units: Sequence[Unit]) -> Iterator[tuple[Unit, list[Row]]]:
    """Yield validation documents, a few at a time, in order."""
    for unit in units:
        chosen = []
        for row in unit.all_rows():
            if row.error is not None:
                raise row.error
            if not row.content:
                continue
            if section.validation_split or place_of(row, unit.name) < section.validation_fraction:
                chosen.append(row)
            if len(chosen) == _ROWS_AT_ONCE:
                yield unit, chosen
                chosen = []
        yield unit, chosen
