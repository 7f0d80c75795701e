"""Prepared tokens on disk: written once, keyed by content, never half-written.

``<cache>/<key>/`` holds the shards of each split (``train-00000.safetensors``, ...; ``recipes.data.shards`` has their
format), ``tokenizer.json`` and ``summary.json``. The key is a hash of everything the tokens depend on, so a folder that
is there is right, whoever made it. One that is not there is made as ``<key>.partial``, shard by shard, and renamed when
it is whole; a preparation that was interrupted goes on with the shards it finds there. The sequence length is not part
of the key.
"""

import contextlib
import hashlib
import json
import os
import shutil
import socket
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from serried.configs.errors import UserError
from serried.configs.schema import DataSection
from serried.recipes.data.atomic_folder import claimed, publish
from serried.recipes.data.chat import chat_encoder
from serried.recipes.data.choose_source import open_source
from serried.recipes.data.encode import Encoder, TextEncoder
from serried.recipes.data.files import assignment
from serried.recipes.data.flat import FlatFiles
from serried.recipes.data.hugging_face_tokenizer import find_tokenizer, tokenizer_from_spec, train_tokenizer
from serried.recipes.data.progress import Progress, Show, usable_cores
from serried.recipes.data.shards import FlatTokens, TokenStream, to_disk
from serried.recipes.data.source import SPLITS, Source, Unit
from serried.recipes.data.tokenize import (
    Counts,
    Splitter,
    TokenCounts,
    all_characters,
    held_out_of,
    jobs_of,
    shard_name,
    texts_to_learn_from,
    write_shards,
)
from serried.recipes.data.tokenizer import BytesTokenizer, CharsTokenizer, Tokenizer, token_dtype

_FORMAT = 2
"""Version of everything the key does not contain: layout on disk, content of sources, rule of the split."""

_SAMPLE_TOKENS = 100


@dataclass(frozen=True)
class Prepared:
    """A folder of prepared tokens that was checked."""

    folder: Path
    key: str
    tokenizer: Tokenizer
    splits: dict[str, TokenCounts]
    shards: dict[str, list[Path | FlatTokens]]
    empty: int
    """Empty documents, which were left out."""
    held_out: int
    """Documents left out of training because they are in the validation split."""
    noun: str
    """Name of a document in messages: ``file`` or ``document``."""

    def stream(self, split: str) -> TokenStream:
        """The tokens of ``train`` or ``validation``, read from the disk where they are touched."""
        return TokenStream(self.shards[split])

    def whole(self) -> "Prepared":
        """The same with all documents in its validation split: what a validation set of its own is."""
        documents = TokenCounts()
        for split in self.splits.values():
            documents.add(split)
        shards = [shard for split in SPLITS for shard in self.shards[split]]
        return replace(
            self,
            key=f"{self.key}-whole",
            splits={"train": documents, "validation": documents},
            shards={"train": [], "validation": shards},
        )

    def describe(self) -> str:
        """Sizes for people: ``train 11,432,101 tokens of 721 files, validation 601,022 of 38``."""
        train, validation = (self.splits[name] for name in SPLITS)
        return (
            f"train {train.tokens:,} tokens of {train.documents:,} {self.noun}{'' if train.documents == 1 else 's'}, "
            f"validation {validation.tokens:,} of {validation.documents:,}"
        )

    def sample(self) -> str:
        """The beginning of the first training document, decoded."""
        stream = self.stream("train")
        stop = min(_SAMPLE_TOKENS, stream.tokens)
        following = stream.document_starts(1, stop)
        ids = stream.read(0, int(following[0]) if len(following) else stop).tolist()
        return self.tokenizer.decode(token for token in ids if token != self.tokenizer.end_id)


def prepare(section: DataSection, show: Show | None = None, threads: int | None = None) -> Prepared:
    """Tokenize the source into the cache, or find it there.

    Any number of processes may ask for this at once, on one node or several: one does it, and all get the same. Memory
    is bounded, whatever the size of the source. ``show`` is told how far it is; ``threads`` None: one for each core.

    Raises:
        UserError: the source is missing, empty, unreadable or changes meanwhile, or the cache cannot be written.
    """
    progress = Progress(show, threads or usable_cores())
    try:
        return _prepare_tokens(section, progress) if section.name == "tokens" else _prepare(section, progress)
    finally:
        progress.end()


def open_prepared(folder: Path) -> Prepared:
    """Open what ``prepare`` made, in this process or another. Reads headers and sizes, no tokens.

    Raises ``UserError`` where the folder is missing or not whole.
    """
    try:
        return _open(folder)
    except FileNotFoundError as error:
        raise UserError(
            f"prepared data {folder} does not exist or is not complete on {socket.gethostname()}; use a cache that "
            "every node sees: data.cache_dir=/shared/folder"
        ) from error
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"prepared data {folder} is damaged ({_one_line(error)}); remove the folder, and it is prepared again"
        ) from error


def cache_folder(section: DataSection) -> Path:
    """``data.cache_dir``, else ``$XDG_CACHE_HOME/serried``, else ``~/.cache/serried``."""
    try:
        if section.cache_dir:
            return section.cache_dir.expanduser().absolute()
        base = os.environ.get("XDG_CACHE_HOME", "")
        # The XDG specification has relative paths ignored.
        return (Path(base) if Path(base).is_absolute() else Path.home() / ".cache") / "serried"
    except RuntimeError as error:
        raise UserError(f"there is no home folder to keep prepared data in; {_other_cache(None)}") from error


def named_tokenizer(section: DataSection) -> Tokenizer | None:
    """The tokenizer that ``data.tokenizer`` names; None for those that are made from the text."""
    if section.tokenizer == "bytes":
        return BytesTokenizer()
    return None if section.tokenizer in ("chars", "train") else find_tokenizer(section.tokenizer)


def _prepare(section: DataSection, progress: Progress) -> Prepared:
    cache = cache_folder(section)
    tokenizer = named_tokenizer(section)
    source = open_source(
        section,
        format=section.format,
        validation_fraction=section.validation_fraction or None,
        validation_split=section.validation_split,
    )
    settings = _settings(section, tokenizer)
    memo = _Memo(cache, [section.name, section.path, *source.identity(), settings], source.state())
    if (key := memo.recall()) and (prepared := _open_if_intact(cache / key)):
        return prepared
    content = source.fingerprint(progress.phase("reading"))
    key = hashlib.sha256(settings.encode() + content).hexdigest()[:32]
    prepared = _make(section, cache / key, source, tokenizer, progress)
    memo.remember(key)
    return prepared


# the key --------------------------------------------------------------------------------------------------------------


def _settings(section: DataSection, tokenizer: Tokenizer | None) -> str:
    """All that the tokens depend on but the source."""
    settings: dict[str, Any] = {"format": _FORMAT, "rows": section.format}
    if tokenizer is not None:
        settings["tokenizer"] = hashlib.sha256(json.dumps(tokenizer.spec(), sort_keys=True).encode()).hexdigest()
    else:
        settings["tokenizer"] = [section.tokenizer, section.vocab_size if section.tokenizer == "train" else None]
    settings["validation"] = "split" if section.validation_split else section.validation_fraction
    if section.format == "chat" and tokenizer is not None:
        settings["chat"] = chat_encoder(section, tokenizer).spec()
    return json.dumps(settings, sort_keys=True)


class _Memo:
    """The key that a source had, for as long as the file system says that no file of it has changed.

    One small file per source and settings, so that a start need not read a large source only to find that it is
    prepared. It is a shortcut: where it cannot be read or written, the source is read.
    """

    def __init__(self, cache: Path, identity: Sequence[Any], state: str | None) -> None:
        self._path = cache / "memos" / f"{hashlib.sha256(json.dumps([*identity]).encode()).hexdigest()[:32]}.json"
        self._state = state

    def recall(self) -> str | None:
        try:
            memo = json.loads(self._path.read_bytes())
            return memo["key"] if memo["state"] == self._state else None
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def remember(self, key: str) -> None:
        if self._state is None:
            return
        with contextlib.suppress(OSError):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            unfinished = self._path.with_suffix(f".{os.getpid()}.{os.urandom(4).hex()}")
            unfinished.write_text(json.dumps({"state": self._state, "key": key}), "utf-8")
            unfinished.replace(self._path)


# making ---------------------------------------------------------------------------------------------------------------


def _make(
    section: DataSection, folder: Path, source: Source, tokenizer: Tokenizer | None, progress: Progress
) -> Prepared:
    """Make ``folder``, complete or not at all, or find it made by another process."""
    units: Sequence[Unit] = ()
    try:
        with claimed(folder, lambda: _open_if_intact(folder) is not None, progress) as partial:
            if partial is not None:
                try:
                    units = source.units()
                    _fill(partial, section, source, units, tokenizer, progress)
                    publish(partial, folder, lambda: _open_if_intact(folder) is not None)
                except UserError:  # it would be the same another time
                    shutil.rmtree(partial, ignore_errors=True)
                    raise
                except OSError:
                    if not any(partial.glob("done-*.json")):
                        shutil.rmtree(partial, ignore_errors=True)
                    raise
    except OSError as error:
        if _open_if_intact(folder) is None:
            raise _cannot_write(folder.parent, error, sum(unit.size_bytes for unit in units)) from error
        # Another machine, which shares the disk and not its locks, was first and took the folder away under us.
    for done in folder.glob("done-*.json"):
        done.unlink(missing_ok=True)
    return open_prepared(folder)


def _fill(
    partial: Path,
    section: DataSection,
    source: Source,
    units: Sequence[Unit],
    tokenizer: Tokenizer | None,
    progress: Progress,
) -> None:
    splitter = Splitter(section.validation_fraction, held_out_of(units) if section.validation_split else frozenset())
    tokenizer = tokenizer or _tokenizer_of_text(partial / "tokenizer.json", section, units, splitter, progress)
    write_json(partial / "tokenizer.json", tokenizer.spec())
    encoder = _encoder(section, tokenizer)
    # The threads are ours; those of the library would be one for each core, whatever was asked for.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    jobs = jobs_of(units)
    progress.phase("tokenising").total(sum(unit.size_bytes for unit in units))
    counts = Counts()
    for number, job in enumerate(jobs):
        done = partial / f"done-{number:05d}.json"
        if done.exists():
            progress.skipped(sum(unit.size_bytes for unit in job))
            counts.add(Counts.from_json(json.loads(done.read_bytes())))
            continue
        of_job = write_shards(partial, number, job, splitter, encoder, token_dtype(tokenizer.vocab_size), progress)
        write_json(done, of_job.as_json())
        counts.add(of_job)
    _check(section, source, counts)
    shards = {
        split: [name for number in range(len(jobs)) if (partial / (name := shard_name(split, number))).exists()]
        for split in SPLITS
    }
    write_summary(partial, counts, shards, source.noun)


def _tokenizer_of_text(
    path: Path, section: DataSection, units: Sequence[Unit], splitter: Splitter, progress: Progress
) -> Tokenizer:
    """Return the tokenizer made from the text, or the one that an interrupted preparation left."""
    with contextlib.suppress(OSError, ValueError, KeyError):
        return tokenizer_from_spec(json.loads(path.read_bytes()))
    if section.tokenizer == "chars":
        return CharsTokenizer(all_characters(units, section.tokenizer))
    progress.say(f"learning a tokenizer of {section.vocab_size:,} ids")
    return train_tokenizer(texts_to_learn_from(units, splitter, section.tokenizer), section.vocab_size)


def _encoder(section: DataSection, tokenizer: Tokenizer) -> Encoder:
    return chat_encoder(section, tokenizer) if section.format == "chat" else TextEncoder(tokenizer, section.tokenizer)


def _check(section: DataSection, source: Source, counts: Counts) -> None:
    """Raise ``UserError`` if a split is empty that must not be."""
    train, validation = counts.train.documents, counts.validation.documents
    documents = train + validation
    where = f"data.path={section.path}" if section.path else f"data={section.name}"
    if not documents and not counts.empty:
        raise UserError(f"{where} has no documents: nothing to train on; name another source: data.path=...")
    if not documents:
        raise UserError(f"all {counts.empty:,} documents of {where} are empty: nothing to train on")
    if source.noun == "file" or (train and validation) or not section.validation_fraction:
        return  # a text too small for validation is refused by the sequences it lacks
    if section.validation_split:
        what = "training" if not train else "validation"
        raise UserError(
            f"{where} leaves no {what} documents (data.split={section.split}, "
            f"data.validation_split={section.validation_split}; {counts.held_out:,} of the former are in the latter "
            "too); use other splits"
        )
    if counts.lowest == counts.highest:
        raise UserError(
            f"all {documents:,} documents of {where} are the same text, and a document is either trained on or kept "
            "for validation; give more text"
        )
    # The share goes by a hash of each document, so that few documents may all fall on one side.
    share = (counts.lowest if not validation else counts.highest) + (0.005 if not validation else -0.005)
    raise UserError(
        f"data.validation_fraction={section.validation_fraction} leaves none of the {documents:,} documents of {where} "
        f"for {'validation' if not validation else 'training'}; use more of them, or "
        f"data.validation_fraction={min(max(share, 0.001), 0.999):.2g}"
    )


def write_summary(folder: Path, counts: Counts, shards: dict[str, list[Any]], noun: str) -> None:
    """Write the file that says what else is in ``folder``; the last one to be written."""
    summary = {
        "format": _FORMAT, "key": folder.name.removesuffix(".partial"), "noun": noun, "empty": counts.empty,
        "held_out": counts.held_out, "splits": {split: asdict(getattr(counts, split)) for split in SPLITS},
        "shards": shards,
    }  # fmt: skip
    write_json(folder / "summary.json", summary)


def write_json(path: Path, value: Any) -> None:
    """Write ``path`` completely or not at all."""
    unfinished = path.with_name(f"{path.name}.{socket.gethostname()}.{os.urandom(6).hex()}.tmp")
    try:
        with unfinished.open("wb") as stream:
            stream.write(json.dumps(value, indent=1).encode() + b"\n")
            to_disk(stream)
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)


def _cannot_write(cache: Path, error: OSError, source_bytes: int) -> UserError:
    free = ""
    with contextlib.suppress(OSError):
        there = next(folder for folder in (cache, *cache.parents) if folder.exists())
        free = f", {shutil.disk_usage(there).free:,} bytes free"
    return UserError(
        f"cannot write prepared data to {cache}: {error.strerror} (about {2 * source_bytes:,} bytes needed{free}); "
        f"{_other_cache(cache)}"
    )


def _other_cache(cache: Path | None) -> str:
    other = Path(tempfile.gettempdir()) / "serried"
    return f"choose another folder: {assignment('data.cache_dir', other if other != cache else 'cache')}"


# tokens made before ---------------------------------------------------------------------------------------------------


def _prepare_tokens(section: DataSection, progress: Progress) -> Prepared:
    """Open existing tokens: a prepared folder, or files of another tool, which are not copied."""
    assert section.path is not None  # the schema sees to it
    path = Path(section.path).expanduser()
    if (path / "summary.json").exists():
        if section.tokenizer != "bytes":
            raise UserError(f"{path} was prepared with its own tokenizer; leave data.tokenizer={section.tokenizer} out")
        return open_prepared(path.absolute())
    if section.tokenizer in ("chars", "train"):
        raise UserError(
            f"data.tokenizer={section.tokenizer} is made from text, and data=tokens has none; name the tokenizer that "
            "made the tokens, as in data.tokenizer=openai-community/gpt2"
        )
    tokenizer = named_tokenizer(section)
    assert tokenizer is not None
    cache = cache_folder(section)
    files = FlatFiles(section, tokenizer, section.tokenizer)
    settings = json.dumps([_settings(section, tokenizer), section.token_dtype])
    memo = _Memo(cache, [section.name, section.path, settings], files.state())
    if (key := memo.recall()) and (prepared := _open_if_intact(cache / key)):
        return prepared
    found = files.read(progress.phase("reading"), section.validation_fraction)
    # The paths too: the tokens stay where they are.
    key = hashlib.sha256(settings.encode() + found.fingerprint + str(path.absolute()).encode()).hexdigest()[:32]
    folder = cache / key
    try:
        with claimed(folder, lambda: _open_if_intact(folder) is not None, progress) as partial:
            if partial is not None:
                write_json(partial / "tokenizer.json", tokenizer.spec())
                write_summary(partial, found.counts, found.write(partial), "document")
                publish(partial, folder, lambda: _open_if_intact(folder) is not None)
    except OSError as error:
        raise _cannot_write(cache, error, 0) from error
    memo.remember(key)
    return open_prepared(folder)


# opening --------------------------------------------------------------------------------------------------------------


def _open_if_intact(folder: Path) -> Prepared | None:
    try:
        return open_prepared(folder)
    except UserError:
        return None


def _open(folder: Path) -> Prepared:
    summary = json.loads((folder / "summary.json").read_bytes())
    if summary["format"] != _FORMAT:
        raise ValueError(f"summary.json is of format {summary['format']}, and this version reads {_FORMAT}")
    if folder.name.endswith((".tmp", ".partial")):
        raise ValueError("it was never finished")
    tokenizer = tokenizer_from_spec(json.loads((folder / "tokenizer.json").read_bytes()))
    splits = {split: TokenCounts(**summary["splits"][split]) for split in SPLITS}
    shards = {split: [_shard(folder, entry) for entry in summary["shards"][split]] for split in SPLITS}
    prepared = Prepared(
        folder, summary["key"], tokenizer, splits, shards, summary["empty"], summary["held_out"], summary["noun"]
    )
    for split in SPLITS:
        stored = prepared.stream(split).tokens
        if stored != splits[split].tokens:
            raise ValueError(f"its {split} shards have {stored} tokens where summary.json says {splits[split].tokens}")
    return prepared


def _shard(folder: Path, entry: str | dict[str, Any]) -> Path | FlatTokens:
    if isinstance(entry, str):
        return folder / entry
    fields = {**entry, "path": Path(entry["path"]), "starts": folder / entry["starts"]}
    return FlatTokens(**fields)


def _one_line(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())
