"""Data that is read during training: opening it, and preparing its validation set."""

import hashlib
import json
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from serried.configs.errors import UserError
from serried.configs.schema import DataSection
from serried.recipes.data.atomic_folder import claimed, publish
from serried.recipes.data.choose_source import open_stream
from serried.recipes.data.encode import TextEncoder
from serried.recipes.data.hugging_face_dataset import HubStream
from serried.recipes.data.lanes import StreamDataset
from serried.recipes.data.prepare import (
    Prepared,
    cache_folder,
    named_tokenizer,
    open_prepared,
    write_json,
    write_summary,
)
from serried.recipes.data.progress import Progress, Show
from serried.recipes.data.shards import ShardWriter
from serried.recipes.data.source import Row, Unit
from serried.recipes.data.tokenize import Counts, place_of
from serried.recipes.data.tokenizer import Tokenizer, token_dtype

_FORMAT = 2
"""Version of the prepared files of a stream."""

_HELD_OUT = "held-out.json"
"""Places (``place_of``) of the documents of ``data.validation_split``, sorted."""

_ROWS_AT_ONCE = 64
_REMEMBERED_STEPS = 64
"""Steps to remember: a rollback returns to before the spike, which may have been noticed some fifty steps later."""


def prepare_stream(section: DataSection, sequences: int, show: Show | None = None) -> Prepared:
    """Tokenise enough documents for ``sequences`` sequences of validation, of those that come first, or find them done.

    They are those of ``data.validation_split``, else those whose content's hash is below ``data.validation_fraction``:
    of all that pass it, whether they are in the validation set or not, none is trained on. For that the whole of a
    ``data.validation_split`` is read.

    Raises:
        UserError: the source cannot be read, or has too little for one sequence.
    """
    tokenizer = _tokenizer(section)
    units = _validation_units(section)
    wanted = sequences * section.sequence_length + 1
    identity = [_FORMAT, _identity(section, tokenizer), _names(units), wanted, section.validation_split]
    folder = cache_folder(section) / f"stream-{hashlib.sha256(json.dumps(identity).encode()).hexdigest()[:32]}"
    progress = Progress(show, 1)

    def is_there() -> bool:
        with suppress(UserError):
            return bool(open_prepared(folder))
        return False

    try:
        with claimed(folder, is_there, progress) as partial:
            if partial is not None:
                progress.say("reading documents for validation")
                _write(partial, section, units, tokenizer, wanted)
                publish(partial, folder, is_there)
    except OSError as error:
        raise UserError(
            f"cannot write the validation set of a stream to {error.filename or folder.parent}: {error.strerror}; use "
            "data.cache_dir=FOLDER on another disk"
        ) from error
    finally:
        progress.end()
    return open_prepared(folder)


def open_training(section: DataSection, prepared: Prepared, *, lanes: int, seed: int, workers: int) -> StreamDataset:
    """The training documents, as ``lanes`` lanes; ``prepared`` is what ``prepare_stream`` made.

    Raises:
        UserError: there is no such dataset, subset or split, or it cannot be had.
    """
    tokenizer = _tokenizer(section)
    places = (prepared.folder / _HELD_OUT).read_bytes()
    held_out = frozenset(json.loads(places))
    fraction = 0.0 if section.validation_split else section.validation_fraction

    def is_training(row: Row, unit: str) -> bool:
        place = place_of(row, unit)
        return place >= fraction and place not in held_out

    return StreamDataset(
        open_stream(section).units(),
        TextEncoder(tokenizer, section.tokenizer),
        is_training,
        lanes=lanes,
        sequence_length=section.sequence_length,
        seed=seed,
        isolate_documents=section.isolate_documents,
        # The loader reads two steps ahead, or one for each of its threads.
        remembered=_REMEMBERED_STEPS + workers,
        identity=json.dumps([_identity(section, tokenizer), hashlib.sha256(places).hexdigest()]),
    )


def _tokenizer(section: DataSection) -> Tokenizer:
    tokenizer = named_tokenizer(section)
    assert tokenizer is not None, "the schema refuses those that are learned from the text"
    return tokenizer


def _identity(section: DataSection, tokenizer: Tokenizer) -> str:
    """What the tokens of a document, and the split it goes to, depend on."""
    spec = hashlib.sha256(json.dumps(tokenizer.spec(), sort_keys=True).encode()).hexdigest()
    return json.dumps([spec, section.text_column, section.validation_fraction])


def _names(units: Sequence[Unit]) -> list[list[str | int]]:
    return [[unit.name, unit.size_bytes] for unit in units]


def _validation_units(section: DataSection) -> Sequence[Unit]:
    split = section.validation_split or section.split
    stream: HubStream = open_stream(section.model_copy(update={"split": split}))
    return stream.units()


def _write(folder: Path, section: DataSection, units: Sequence[Unit], tokenizer: Tokenizer, wanted: int) -> None:
    counts, name, held_out = Counts(), "validation-00000.safetensors", set[float]()
    encoder = TextEncoder(tokenizer, section.tokenizer)
    with ShardWriter(folder / name, token_dtype(tokenizer.vocab_size)) as shard:
        for unit, rows in _held_out_rows(section, units):
            if section.validation_split:  # all of it, however much an evaluation takes: that may change
                held_out.update(place_of(row, unit.name) for row in rows)
            elif shard.tokens >= wanted:
                break
            if shard.tokens >= wanted:
                continue
            for encoded in encoder(rows, unit.name):
                if shard.tokens >= wanted:
                    break
                shard.add(encoded, begins=True)
                counts.validation.documents += 1
        counts.validation.tokens = shard.tokens
    if counts.validation.tokens <= section.sequence_length:
        keep = f"data.validation_fraction={section.validation_fraction:g}"
        raise UserError(
            f"the documents for validation ({section.validation_split or keep}) of {section.path} have "
            f"{counts.validation.tokens:,} tokens, and data.sequence_length={section.sequence_length} needs "
            f"{section.sequence_length + 1:,}; keep more of them, or use shorter sequences"
        )
    write_json(folder / "tokenizer.json", tokenizer.spec())
    write_json(folder / _HELD_OUT, sorted(held_out))
    write_summary(folder, counts, {"train": [], "validation": [name]}, "document")


def _held_out_rows(section: DataSection, units: Sequence[Unit]) -> Iterator[tuple[Unit, list[Row]]]:
    """Documents for validation, some at a time, in order."""
    for unit in units:
        chosen = []
        for row in unit.rows():
            if section.validation_split or place_of(row, unit.name) < section.validation_fraction:
                chosen.append(row)
            if len(chosen) == _ROWS_AT_ONCE:
                yield unit, chosen
                chosen = []
        yield unit, chosen
