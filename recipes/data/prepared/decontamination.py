"""Removal of training documents from validation sets."""

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np

from serried.configs.errors import UserError
from serried.configs.plain_data import read_regular
from serried.recipes.data.prepared.atomic_folder import make_folder
from serried.recipes.data.prepared.prepare import Prepared, write_json, write_summary
from serried.recipes.data.prepared.token_shards import ShardWriter, TokenStream
from serried.recipes.data.prepared.tokenize import Counts
from serried.recipes.data.readers.reading_progress import Progress, Show
from serried.recipes.data.tokenizers.encode_rows import Encoded
from serried.recipes.data.tokenizers.tokenizer import token_dtype

_SHARED = "shared.json"


def kept_apart(name: str, held: Prepared, training: Sequence[Prepared], cache: Path, show: Show | None) -> Path | None:
    """Return a folder with the validation split of ``held`` without documents that are also in ``training``. None if
    there are no such documents. The folder is created once and then reused. Raises ``UserError`` if all documents of
    the validation set ``name`` are in ``training``, or the cache cannot be written."""
    keys = [held.key, *sorted(prepared.key for prepared in training)]
    folder = cache / f"apart-{hashlib.sha256(json.dumps(keys).encode()).hexdigest()[:32]}"

    def write(partial: Path) -> None:
        stream = held.stream("validation")
        shared = _shared(stream, [prepared.stream("train") for prepared in training])
        if len(shared) and shared.all():
            raise UserError(
                f"all {len(shared):,} documents of the validation set {name} are also in the training data; remove "
                "them from one of the two"
            )
        if shared.any():
            _write(partial, held, stream, shared)
        write_json(partial / _SHARED, int(shared.sum()))

    with Progress(show, 1) as progress:
        make_folder(folder, write, (folder / _SHARED).is_file, progress)
    return folder if left_out(folder) else None


def left_out(folder: Path) -> int:
    """Return the number of documents that ``kept_apart`` removed because they are trained on."""
    return int(json.loads(read_regular(folder / _SHARED)))


def _shared(held: TokenStream, training: Sequence[TokenStream]) -> np.ndarray:
    """Return a mask of the documents of ``held`` that are also in ``training``, [documents], bool.

    Only training documents with the same length as a document of ``held`` are read.
    """
    own: dict[bytes, list[int]] = {}
    lengths = set[int]()
    shared = np.zeros(held.documents, bool)
    for number, (start, stop) in enumerate(_documents(held)):
        own.setdefault(_digest(held, start, stop), []).append(number)
        lengths.add(stop - start)
    asked = np.array(sorted(lengths))
    for stream in training:
        for start, stop in _documents(stream, lambda sizes: np.isin(sizes, asked)):
            shared[own.get(_digest(stream, start, stop), [])] = True
    return shared


def _documents(
    stream: TokenStream, wanted: Callable[[np.ndarray], np.ndarray] = lambda sizes: sizes > 0
) -> Iterator[tuple[int, int]]:
    """Yield the start and stop of each selected document. ``wanted`` maps the lengths of all documents to a mask."""
    bounds = np.append(stream.all_document_starts(), stream.tokens)
    chosen = np.flatnonzero(wanted(np.diff(bounds)))
    yield from zip(bounds[chosen].tolist(), bounds[chosen + 1].tolist(), strict=True)


def _digest(stream: TokenStream, start: int, stop: int) -> bytes:
    return hashlib.blake2b(stream.read(start, stop).astype("<u4").tobytes(), digest_size=16).digest()


def _write(folder: Path, held: Prepared, stream: TokenStream, shared: np.ndarray) -> None:
    counts = Counts()
    with ShardWriter(folder, "validation-00000", token_dtype(held.tokenizer.vocab_size)) as writer:
        for number, (start, stop) in enumerate(_documents(stream)):
            if not shared[number]:
                supervised = stream.supervised(start, stop) if stream.is_supervised else None
                weights = stream.weights(start, stop) if stream.is_weighted else None
                writer.add(Encoded(stream.read(start, stop), supervised, weights=weights), begins=True)
                counts.validation.documents += 1
        counts.validation.tokens = writer.tokens
    write_summary(folder, counts, {"validation": [writer.shard()]}, held.noun, held.tokenizer)
