"""Prepared tokens on disk: written once, keyed by content, never incomplete.

``<cache>/<key>/`` holds the shards of each split (format: ``recipes.data.prepared.token_shards``),
``tokenizer.json`` and ``summary.json``. The key is a hash of everything that the tokens depend on, so an existing
folder is valid whichever process created it. It is created as ``<key>.partial``, shard by shard, and renamed when
complete. An interrupted preparation continues with the existing shards. The sequence length is not part of the key.
"""

import contextlib
import hashlib
import json
import math
import os
import shutil
import socket
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial as partial_function
from pathlib import Path
from typing import Any

import numpy as np

from serried.configs.bucket_paths import ask_process, bucket_files, downloads, local_path, with_urls
from serried.configs.bucket_urls import is_bucket_url
from serried.configs.errors import UserError
from serried.configs.formats import size
from serried.configs.plain_data import expanded, read_regular
from serried.configs.schema.data import MOST_VALIDATION, DataSection, sources
from serried.recipes.data.chat.conversations import EARLIER_FORMATS, encoder_of_rows
from serried.recipes.data.chat.preference_pairs import pair_encoder
from serried.recipes.data.prepared.atomic_folder import make_folder, other_cache
from serried.recipes.data.prepared.ranged_objects import (
    StoredObject,
    is_large,
    is_ranged,
    read_in_ranges,
    use_limit,
    write_objects,
)
from serried.recipes.data.prepared.shared_cache import PATIENCE_SECONDS, SharedCache
from serried.recipes.data.prepared.token_files import FlatFiles, place_files, record_files
from serried.recipes.data.prepared.token_shards import Shard, TokenStream
from serried.recipes.data.prepared.tokenize import (
    Counts,
    Splitter,
    TokenCounts,
    all_characters,
    held_out_of,
    jobs_of,
    texts_to_learn_from,
    write_shards,
)
from serried.recipes.data.readers.columns import Column
from serried.recipes.data.readers.reading_progress import Progress, Show, usable_cores
from serried.recipes.data.readers.source import SPLITS, Place, Source, Unit, bad_rows, open_source
from serried.recipes.data.readers.source_files import assignment
from serried.recipes.data.tokenizers.encode_rows import Encoder, TextEncoder
from serried.recipes.data.tokenizers.hugging_face_tokenizer import named_tokenizer, tokenizer_from_spec, train_tokenizer
from serried.recipes.data.tokenizers.tokenizer import CharsTokenizer, Tokenizer, token_dtype
from serried.records.files import write_atomically

_FORMAT = 3
"""Version of everything else that the key depends on: disk layout, reading of sources, and splitting."""

_SAMPLE_TOKENS = 100
_PROCESS = "serried.recipes.data.prepared.shared_preparation"
_FILES_AT_URL = ("text", "tokens")
"""Sources that read files of a bucket themselves, so that a listing shows whether they have changed."""
_CHECKSUM = "crc32"
"""Key in ``summary.json`` of the checksum of its other contents and of ``tokenizer.json``."""
_FEWEST_TOKENS = 2**14
"""Minimum number of tokens in a document above 1 MiB, since few tokens are longer than 64 bytes."""
_COMPARED_TOKENS = 1 << 22


@dataclass(frozen=True)
class Prepared:
    """A verified folder of prepared tokens."""

    folder: Path
    key: str
    tokenizer: Tokenizer
    splits: dict[str, TokenCounts]
    shards: dict[str, list[Shard]]
    empty: int
    """Number of empty documents, which were left out."""
    held_out: int
    """Number of documents that were left out of training because they are in the validation split."""
    noun: str
    """Name of a document in messages: ``file`` or ``document``."""
    bad: int = 0
    """Number of rows that were left out because they are not valid documents."""
    bad_rows: tuple[str, ...] = ()
    """Positions of the first bad rows, with the reason."""
    split_rows: int = 0
    """Number of conversations that became several documents, because their template drops or changes earlier turns."""
    split_documents: int = 0
    """Number of documents produced from these conversations."""
    zero_weight: int = 0
    """Number of rows with a ``weight`` of 0, which were left out."""

    def stream(self, split: str) -> TokenStream:
        """Return the tokens of ``train`` or ``validation``, memory-mapped."""
        return TokenStream(self.shards[split])

    def place(self, split: str, document: int) -> Place | None:
        """Return the position of a document of ``split`` in its source; None if it is unknown."""
        for shard in self.shards[split]:
            documents = shard.starts.stat().st_size // 8
            if document < documents:
                return shard.place(document)
            document -= documents
        return None

    def whole(self) -> "Prepared":
        """Return a copy with all documents in the validation split."""
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
        """Describe the sizes: ``train 11,432,101 tokens of 721 files, validation 601,022 of 38``."""
        train, validation = (self.splits[name] for name in SPLITS)
        left_out = f"; {count_of(self.zero_weight, 'row')} of weight 0 left out" if self.zero_weight else ""
        left_out += f"; {count_of(self.bad, 'bad row')} left out" if self.bad else ""
        return (
            f"train {train.tokens:,} tokens of {count_of(train.documents, self.noun)}, "
            f"validation {validation.tokens:,} of {validation.documents:,}{left_out}{self.describe_split()}"
        )

    def describe_split(self) -> str:
        """Describe the conversations that became several documents; empty if there are none."""
        if not self.split_rows:
            return ""
        return (
            f"; {count_of(self.split_rows, 'row')} split into {self.split_documents:,} samples, as the chat template "
            "changes earlier turns"
        )

    def sample(self) -> str:
        """Return the beginning of the first training document, decoded."""
        stream = self.stream("train")
        stop = min(_SAMPLE_TOKENS, stream.tokens)
        following = stream.document_starts(1, stop)
        ids = stream.read(0, int(following[0]) if len(following) else stop).tolist()
        return self.tokenizer.decode(token for token in ids if token != self.tokenizer.end_id)


def prepare(section: DataSection, show: Show | None = None, threads: int | None = None) -> Prepared:
    """Tokenize the source into the cache, or reuse the cached result.

    Any number of processes may call this at once, on one or several nodes: one does the work, and all get the same
    result. Memory use is bounded for any size of the source.

    Args:
        show: function that shows a progress line.
        threads: number of threads; None: one per core.

    Raises:
        UserError: the source is missing, empty, unreadable or changes while it is read, or the cache cannot be written.
    """
    if _uses_bucket(section):
        return _prepared_by_process(section, show, threads)
    with Progress(show, threads or usable_cores()) as progress, downloads(cache_folder(section), progress.say):
        try:
            return prepare_source(section, progress)
        except UserError as error:
            raise _with_urls_of(error) from error


def _uses_bucket(section: DataSection) -> bool:
    """Return whether preparation reads or writes the bucket itself, not only downloads files from it."""
    if section.name != "tokens":
        return is_bucket_url(section.cache_dir)
    is_elsewhere = is_bucket_url(getattr(section, "path", None)) and not getattr(section, "is_prepared", False)
    return is_elsewhere and (is_bucket_url(section.cache_dir) or section.fetch == "ranges")


def _with_urls_of(error: UserError) -> UserError:
    """Return ``error`` with the objects of a bucket instead of their copies on this node."""
    return UserError(*(with_urls(str(line)) for line in error.args), head=with_urls(error.head))


def _prepared_by_process(section: DataSection, show: Show | None, threads: int | None) -> Prepared:
    """Prepare in another process, which uses the bucket ``data.cache_dir``."""
    if not sources.is_found_elsewhere(section.name):
        raise UserError(
            f"data.cache_dir={section.cache_dir} is not supported with data={section.name}, which your script "
            "registers; use a folder: data.cache_dir=/shared/tokens"
        )
    request = {
        "section": section.model_dump(mode="json"), "threads": threads, "shows": show is not None,
        "patience_seconds": PATIENCE_SECONDS,
    }  # fmt: skip

    def show_line(line: Mapping[str, Any]) -> None:
        if show is not None:
            loading = "" if "show" in line else f"downloading {size(line['done'])} of {size(line['total'])}"
            show(line.get("show", f"preparing data: {loading}"))

    try:
        folder = ask_process(_PROCESS, request, show_line)
    finally:
        if show is not None:
            show("")
    return _used(section, named_tokenizer(section), open_prepared(Path(folder)))


def prepare_source(section: DataSection, progress: Progress, shared: SharedCache | None = None) -> Prepared:
    """Prepare ``section`` in this process. ``shared``: cache in a bucket to download from and upload to."""
    if getattr(section, "is_prepared", False):
        path = _prepared_folder(section, progress)
        prepared = open_prepared(path.absolute())
        named = None if section.tokenizer == "bytes" else named_tokenizer(section)
        if section.tokenizer != "bytes" and (named is None or named.spec() != prepared.tokenizer.spec()):
            raise UserError(
                f"{path} was prepared with a different tokenizer than data.tokenizer={section.tokenizer}; remove "
                "data.tokenizer to use the tokenizer in the folder"
            )
        return prepared
    cache = cache_folder(section)
    tokenizer = named_tokenizer(section)
    at_url = _memo_of_url(section, cache, tokenizer)
    if at_url is not None and (name := at_url.recall()) and (folder := _found(section, cache, name, shared)):
        return _used(section, tokenizer, open_prepared(folder))
    if shared is None or at_url is None or at_url.state is None:
        return _prepare_files(section, cache, tokenizer, at_url, progress, shared)
    where, state = at_url.name, at_url.state
    with shared.claimed(f"{where.partition('.')[0]}-{state[:32]}", lambda: shared.recall(where, state)) as found:
        if found is None:
            prepared = _prepare_files(section, cache, tokenizer, at_url, progress, shared)
            shared.remember(where, state, prepared.folder.name)
            return prepared
    folder = _fetch(found, section, cache, progress, shared)
    at_url.remember(found)
    return _used(section, tokenizer, open_prepared(folder))


def _prepared_folder(section: DataSection, progress: Progress) -> Path:
    """Return the folder that ``data.path`` names. If it is in a bucket, its files are downloaded, but with
    ``data.fetch=ranges`` only the small ones."""
    url = str(getattr(section, "path", ""))
    if section.fetch == "whole" or not is_bucket_url(url):
        return expanded(local_path(url, "data.path"))
    listed = bucket_files(url, "data.path")
    name = hashlib.sha256(f"{listed.url} {listed.state}".encode()).hexdigest()[:32]
    folder = _ranges(cache_folder(section)) / name

    def write(partial: Path) -> None:
        small = [file for file in listed.files if "/" not in file and not is_large(file)]
        copies = listed.fetch(small)
        for file in small:
            shutil.copyfile(copies / file, partial / file)
        large = {
            file: StoredObject(file, *entry) for file, entry in listed.files.items() if is_large(file) and entry[0]
        }
        write_objects(partial, listed.url, large)
        read_in_ranges(partial, section.fetch_limit_bytes)

    make_folder(folder, write, lambda: is_intact(folder), progress)
    use_limit(folder, section.fetch_limit_bytes)
    return folder


def _ranges(cache: Path) -> Path:
    """Return the folder of prepared data whose tokens are read in ranges."""
    return cache / "ranges"


def _place_of(section: DataSection, cache: Path, name: str) -> Path:
    """Return the folder for the data ``name`` if its tokens are in a bucket."""
    return (_ranges(cache) if section.fetch == "ranges" else cache) / name


def _found(section: DataSection, cache: Path, name: str, shared: SharedCache | None) -> Path | None:
    """Return the intact folder of the data ``name`` on this node; None if there is none. If the shared cache lacks the
    data, it is uploaded."""
    folder = next((place for place in (cache / name, _place_of(section, cache, name)) if is_intact(place)), None)
    if folder is None:
        return None
    if shared is not None and not shared.has(name):
        if is_ranged(folder) and section.name != "tokens":
            return None  # the bucket had the only copy
        shared.publish(name, folder)
    _update_ranges(folder, section, name, shared)
    return folder


def _update_ranges(folder: Path, section: DataSection, name: str, shared: SharedCache | None) -> None:
    """Record the present objects and limit of an existing folder whose tokens are read in ranges."""
    if not is_ranged(folder):
        return
    if section.name == "tokens":
        record_files(folder, section)
    elif shared is not None:
        shared.record_objects(name, folder)
    use_limit(folder, section.fetch_limit_bytes)


def _fetch(name: str, section: DataSection, cache: Path, progress: Progress, shared: SharedCache) -> Path:
    """Download the data ``name`` from the shared cache. Return its folder."""
    progress.say(f"downloading prepared data {name}")
    folder = cache / name if is_intact(cache / name) else _place_of(section, cache, name)

    def write(partial: Path) -> None:
        shared.fetch(name, partial, in_ranges=section.fetch == "ranges")
        if section.name == "tokens":
            record_files(partial, section)
            place_files(partial, section)
        elif section.fetch == "ranges":
            read_in_ranges(partial, section.fetch_limit_bytes)

    if is_intact(folder):
        _update_ranges(folder, section, name, shared)
    make_folder(folder, write, lambda: is_intact(folder), progress)
    return folder


def _prepare_files(
    section: DataSection, cache: Path, tokenizer: Tokenizer | None, at_url: "_Memo | None", progress: Progress,
    shared: SharedCache | None,
) -> Prepared:  # fmt: skip
    """Open the source, and prepare it unless that was done before."""
    source = open_source(section)
    settings = _settings(section, tokenizer, source.validation_split)
    joins = _joins_pieces(section, tokenizer, source)
    identity = [section.name, getattr(section, "path", None), *source.identity(), settings, *["joined"] * joins]
    memo = _Memo(cache, identity, source.state())
    if (name := memo.recall()) and (folder := _found(section, cache, name, shared)):
        return _used(section, tokenizer, open_prepared(folder))
    content = source.fingerprint(progress.phase("reading"))
    name = key = _key(settings, content)
    earlier = cache / key if joins and is_intact(cache / key) else None
    if joins and (earlier is None or _may_be_in_pieces(earlier)):
        name = hashlib.sha256(f"{key} joined".encode()).hexdigest()[:32]
    earlier_keys = [
        _key(_settings(section, tokenizer, source.validation_split, format), content) for format in EARLIER_FORMATS
    ]

    def write(partial: Path) -> None:
        if isinstance(source, FlatFiles):
            assert tokenizer is not None
            write_summary(partial, *source.write(partial), source.noun, tokenizer)
        else:
            if shared is not None:
                shared.fetch_finished_jobs(name, partial)
            after = None if shared is None else partial_function(shared.publish_job, name, partial)
            _fill(partial, section, source, tokenizer, progress, key, earlier_keys, after)
            if shared is not None:
                shared.wait_for_jobs()

    with contextlib.ExitStack() as stack:
        found = shared and stack.enter_context(shared.claimed(name, lambda: name if shared.has(name) else None))
        folder = _place_of(section, cache, name) if isinstance(source, FlatFiles) else cache / name
        if shared is not None and found:
            folder = _fetch(name, section, cache, progress, shared)
        else:
            make_folder(folder, write, lambda: is_intact(folder), progress)
            _update_ranges(folder, section, name, shared)
            if shared is not None:
                shared.publish(name, folder)
    for remembered in (memo, at_url):
        if remembered is not None:
            remembered.remember(name)
    prepared = open_prepared(folder)
    if earlier is not None and prepared.key != key:
        progress.say(
            f"documents above 1 MiB have other tokens than in {earlier}, where they were split into pieces before they "
            "were tokenized; to resume a run that started with that folder: data=tokens "
            f"{assignment('data.path', earlier)}"
        )
    return _used(section, tokenizer, prepared)


def _used(section: DataSection, named: Tokenizer | None, prepared: Prepared) -> Prepared:
    """Return ``prepared``, with the tokenizer ``named`` if it is given, as an earlier version may have stored fewer of
    its files. Raises ``UserError`` if rows were left out and ``data.bad_rows=refuse``."""
    if prepared.bad and section.bad_rows == "refuse":
        raise bad_rows(prepared.bad_rows, prepared.bad)
    return prepared if named is None else replace(prepared, tokenizer=named)


def count_of(number: int, noun: str) -> str:
    """Return a number with its noun, such as ``1 row`` or ``12,345 rows``."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def is_intact(folder: Path) -> bool:
    """Return whether ``open_prepared`` can open the folder."""
    with contextlib.suppress(UserError):
        return bool(open_prepared(folder))
    return False


def open_prepared(folder: Path) -> Prepared:
    """Open prepared data. Reads the summary and file sizes, but no tokens.

    Raises ``UserError`` if the folder is missing or incomplete.
    """
    try:
        return _open(folder)
    except FileNotFoundError as error:
        raise UserError(
            f"prepared data {folder} does not exist or is not complete on {socket.gethostname()}; use a folder on a "
            "shared file system: data.cache_dir=/shared/folder"
        ) from error
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"prepared data {folder} is damaged ({type(error).__name__}: {error}); remove the folder to prepare the "
            "data again"
        ) from error


def cache_folder(section: DataSection) -> Path:
    """Return ``data.cache_dir`` if it is on this node, else ``$XDG_CACHE_HOME/serried``, else ``~/.cache/serried``."""
    try:
        if is_bucket_url(section.cache_dir) and (scratch := os.environ.get("SERRIED_SCRATCH")):
            return Path(scratch).absolute() / "prepared"
        if section.cache_dir and not is_bucket_url(section.cache_dir):
            return expanded(str(section.cache_dir)).absolute()
        base = Path(os.environ.get("XDG_CACHE_HOME", ""))
        return (base if base.is_absolute() else Path.home() / ".cache") / "serried"  # as the XDG specification requires
    except RuntimeError as error:
        raise UserError(f"no home folder found for the prepared data; {other_cache(None)}") from error


# the key --------------------------------------------------------------------------------------------------------------


def _key(settings: str, content: bytes) -> str:
    return hashlib.sha256(settings.encode() + content).hexdigest()[:32]


def _settings(
    section: DataSection, tokenizer: Tokenizer | None, validation_split: str | None, chat_format: int | None = None
) -> str:
    """Return all settings that the tokens depend on, as JSON, except the content of the source.

    Args:
        validation_split: Split of the source that is used for validation, if it has one.
        chat_format: Format of an earlier version to use for conversations.
    """
    settings: dict[str, Any] = {"format": _FORMAT, "rows": section.format}
    if tokenizer is not None:
        settings["tokenizer"] = hashlib.sha256(json.dumps(tokenizer.spec(), sort_keys=True).encode()).hexdigest()
    else:
        settings["tokenizer"] = [section.tokenizer, section.vocab_size if section.tokenizer == "train" else None]
    ignored = [name for name, theirs in getattr(section, "columns", {}).items() if theirs is None]
    if ignored and chat_format is None:
        settings["ignored"] = sorted(ignored)
    settings["validation"] = "split" if validation_split else section.validation_fraction
    if section.format == "chat" and tokenizer is not None:
        settings["chat"] = encoder_of_rows(section, tokenizer).spec(chat_format)
    if section.format in ("preference", "unpaired") and tokenizer is not None:
        settings["pairs"] = pair_encoder(section, tokenizer).spec(chat_format)
    return json.dumps(settings, sort_keys=True)


def _joins_pieces(section: DataSection, tokenizer: Tokenizer | None, source: Source) -> bool:
    """Return whether the tokens of long documents depend on how their pieces are joined."""
    is_split_anywhere = section.tokenizer == "chars" if tokenizer is None else tokenizer.splits_anywhere
    return section.format == "text" and not isinstance(source, FlatFiles) and not is_split_anywhere


def _may_be_in_pieces(folder: Path) -> bool:
    """Return whether ``folder`` may have a document that an earlier version tokenized in pieces without joining
    them."""
    counts = open_prepared(folder).splits.values()
    return any(any(split.lengths[_FEWEST_TOKENS.bit_length() :]) for split in counts)


class _Memo:
    """Record of the folder in which a source was prepared. It is valid while the state of the source files is
    unchanged.

    There is one small file per source and settings. With it, a start finds the prepared data without reading a large
    source. If the file cannot be read or written, the source is read.
    """

    def __init__(self, cache: Path, identity: Sequence[Any], state: str | None) -> None:
        self._path = cache / "memos" / f"{hashlib.sha256(json.dumps([*identity]).encode()).hexdigest()[:32]}.json"
        self.state = state

    @property
    def name(self) -> str:
        """Name of the file."""
        return self._path.name

    def recall(self) -> str | None:
        try:
            memo = json.loads(read_regular(self._path))
            return memo["key"] if memo["state"] == self.state else None
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def remember(self, key: str) -> None:
        if self.state is not None:
            with contextlib.suppress(OSError):
                self._path.parent.mkdir(parents=True, exist_ok=True)
                write_json(self._path, {"state": self.state, "key": key})


def _memo_of_url(section: DataSection, cache: Path, tokenizer: Tokenizer | None) -> _Memo | None:
    """Return the memo of data in a bucket, which needs only a listing; None for other data. The bucket is listed
    again."""
    path = str(getattr(section, "path", None))
    if not is_bucket_url(path) or section.name not in _FILES_AT_URL:
        return None
    columns = Column.of(section).identity if hasattr(section, "text_column") else ""
    settings = _settings(section, tokenizer, None)
    identity = [section.name, path, columns, getattr(section, "token_dtype", ""), settings]
    return _Memo(cache, identity, bucket_files(path, "data.path", again=True).state)


# preparing ------------------------------------------------------------------------------------------------------------


def _fill(
    partial: Path,
    section: DataSection,
    source: Source,
    named: Tokenizer | None,
    progress: Progress,
    key: str,
    earlier_keys: Sequence[str],
    after_job: Callable[[int], None] | None = None,
) -> None:
    units = source.units()
    splitter = Splitter(section.validation_fraction, held_out_of(units) if source.validation_split else frozenset())
    tokenizer = named or _tokenizer_of_text(partial / "tokenizer.json", section, units, splitter, progress)
    write_json(partial / "tokenizer.json", tokenizer.state())
    encoder = _encoder(section, tokenizer)
    # Otherwise the tokenizers library would start one thread per core, in addition to ours.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    progress.phase("tokenising").total_bytes = sum(unit.size_bytes for unit in units)
    counts, shards = Counts(), {split: list[Shard]() for split in SPLITS}
    for number, job in enumerate(jobs_of(units)):
        done = partial / f"done-{number:05d}.json"
        if done.is_file():
            progress.skipped(sum(unit.size_bytes for unit in job))
        else:
            of_job, made = write_shards(
                partial, number, job, splitter, encoder, token_dtype(tokenizer.vocab_size), progress
            )
            found = {split: _with_urls(shard).as_json(partial) for split, shard in made.items()}
            of_job.bad_rows = [with_urls(row) for row in of_job.bad_rows]
            write_json(done, {"counts": asdict(of_job), "shards": found})
            if after_job is not None:
                after_job(number)
        plain = json.loads(read_regular(done))
        counts.add(Counts.from_json(plain["counts"]))
        for split, shard in plain["shards"].items():
            shards[split].append(Shard.from_json(partial, shard))
    if counts.bad and section.bad_rows == "refuse":
        raise bad_rows(counts.bad_rows, counts.bad)
    _check(section, source, counts)
    if section.is_chat:
        folders = [partial.with_name(earlier_key) for earlier_key in earlier_keys]
        intact = [folder for folder in folders if is_intact(folder)]
        equal = next(filter(None, (_key_of_equal(folder, shards) for folder in intact)), None)
        if equal is not None:
            key = equal
        elif not counts.new_rows and folders[0] not in intact:
            key = earlier_keys[0]
        if equal is None and intact:
            progress.say(
                f"WARNING: the training tokens differ from the tokens in {intact[0]}, which an earlier version "
                "prepared; to resume a run that started with that folder: data=tokens "
                f"{assignment('data.path', intact[0])}"
            )
    is_joined = counts.long and _joins_pieces(section, tokenizer, source)
    write_summary(partial, counts, shards, source.noun, tokenizer, None if is_joined else key)
    for done in partial.glob("done-*.json"):
        done.unlink()


def _with_urls(shard: Shard) -> Shard:
    return replace(shard, named=tuple((with_urls(path), noun) for path, noun in shard.named))


def _key_of_equal(earlier: Path, shards: Mapping[str, Sequence[Shard]]) -> str | None:
    """Return the key of the data in the folder ``earlier``, which an earlier version prepared, if it equals ``shards``.
    Runs that started with it can then be resumed. None if the data differs or does not exist."""
    with contextlib.suppress(UserError):
        before = open_prepared(earlier)
        for split in SPLITS:
            mine, its = TokenStream(shards[split]), before.stream(split)
            if mine.tokens != its.tokens or not np.array_equal(mine.all_document_starts(), its.all_document_starts()):
                return None
            for start in range(0, mine.tokens, _COMPARED_TOKENS):
                stop = min(start + _COMPARED_TOKENS, mine.tokens)
                for read in (TokenStream.read, TokenStream.supervised, TokenStream.weights):
                    if not np.array_equal(read(mine, start, stop), read(its, start, stop)):
                        return None
        return before.key
    return None


def _tokenizer_of_text(
    path: Path, section: DataSection, units: Sequence[Unit], splitter: Splitter, progress: Progress
) -> Tokenizer:
    """Train a tokenizer on the text, or load the tokenizer that an interrupted preparation saved."""
    with contextlib.suppress(OSError, ValueError, KeyError):
        return tokenizer_from_spec(json.loads(read_regular(path)))
    if section.tokenizer == "chars":
        return CharsTokenizer(all_characters(units, section.tokenizer))
    progress.say(f"training a tokenizer with a vocabulary of {section.vocab_size:,}")
    return train_tokenizer(texts_to_learn_from(units, splitter, section.tokenizer), section.vocab_size)


def _encoder(section: DataSection, tokenizer: Tokenizer) -> Encoder:
    if section.format == "text":
        return TextEncoder(tokenizer, section.tokenizer)
    return (encoder_of_rows if section.format == "chat" else pair_encoder)(section, tokenizer)


def _check(section: DataSection, source: Source, counts: Counts) -> None:
    """Raise ``UserError`` if a required split is empty."""
    train, validation = counts.train.documents, counts.validation.documents
    documents = train + validation
    path = getattr(section, "path", None)
    where = f"data.path={path}" if path else f"data={section.name}"
    if counts.bad and not documents:
        raise bad_rows(counts.bad_rows, counts.bad, f"all {counts.bad:,} rows of {where} are invalid")
    if not documents and counts.zero_weight and not counts.empty:
        raise UserError(
            f"all {counts.zero_weight:,} rows of {where} have weight 0, so there is nothing to train on; to ignore the "
            "column: data.columns.weight=null"
        )
    if not documents and not counts.empty:
        raise UserError(f"{where} has no documents, so there is nothing to train on; use another source: data.path=...")
    if not documents:
        raise UserError(
            f"all {counts.empty:,} documents of {where} are empty, so there is nothing to train on; use another "
            "source: data.path=..."
        )
    if source.noun == "file" or (train and validation) or section.keeps_none:
        return  # a text that is too short for a validation sequence is refused later
    if source.validation_split:
        what = "training" if not train else "validation"
        raise UserError(
            f"{where} has no {what} documents left (data.split={getattr(section, 'split', '')}, "
            f"data.validation_split={source.validation_split}; {counts.held_out:,} documents are in both); use other "
            "splits"
        )
    if counts.lowest == counts.highest:
        raise UserError(
            f"all {documents:,} documents of {where} have the same text, so they cannot be split into training and "
            "validation data; add other documents"
        )
    # Documents are assigned by their hash, so a few documents may all get the same split.
    share = _dividing_fraction(counts.lowest, counts.highest, is_small=not validation)
    raise UserError(
        f"data.validation_fraction={section.validation_fraction} leaves none of the {documents:,} documents of {where} "
        f"for {'validation' if not validation else 'training'}; add documents, or use "
        f"data.validation_fraction={share:g}" + (" to train on all" if share == 0 else "")
    )


def _dividing_fraction(lowest: float, highest: float, *, is_small: bool) -> float:
    """Return a validation fraction with few digits that puts documents in both splits: above ``lowest`` and at most
    ``highest``, which are values of ``place_of``. It is near the lower limit if ``is_small``, else near the upper
    limit. 0 if there is no valid fraction."""
    for parts in (10**digits for digits in range(2, 7)):
        fraction = (math.floor(lowest * parts) + 1 if is_small else math.floor(highest * parts)) / parts
        if lowest < fraction <= min(highest, MOST_VALIDATION):
            return fraction
    return 0.0


def write_summary(
    folder: Path, counts: Counts, shards: Mapping[str, Sequence[Shard]], noun: str, tokenizer: Tokenizer,
    key: str | None = None,
) -> None:  # fmt: skip
    """Write ``tokenizer.json`` and ``summary.json``, after all other files of ``folder``. ``key``: defaults to the name
    of the folder."""
    write_json(folder / "tokenizer.json", tokenizer.state())
    summary = {
        "format": _FORMAT, "key": key or folder.name.removesuffix(".partial"), "noun": noun, "empty": counts.empty,
        "held_out": counts.held_out, "bad": counts.bad, "bad_rows": counts.bad_rows,
        "zero_weight": counts.zero_weight, "split_rows": counts.split.rows, "split_documents": counts.split.documents,
        "splits": {split: asdict(getattr(counts, split)) for split in SPLITS},
        "shards": {split: [shard.as_json(folder) for shard in shards.get(split, ())] for split in SPLITS},
    }  # fmt: skip
    checksum = _checksum(summary, read_regular(folder / "tokenizer.json"))
    write_json(folder / "summary.json", {**summary, _CHECKSUM: checksum})


def write_json(path: Path, value: Any) -> None:
    """Write ``value`` as JSON to ``path``, atomically."""
    write_atomically(path, json.dumps(value, indent=1) + "\n")


def _checksum(summary: Mapping[str, Any], tokenizer: bytes) -> str:
    return f"{zlib.crc32(tokenizer, zlib.crc32(json.dumps(summary, sort_keys=True).encode())):08x}"


# opening --------------------------------------------------------------------------------------------------------------


def _open(folder: Path) -> Prepared:
    summary = json.loads(read_regular(folder / "summary.json"))
    spec = read_regular(folder / "tokenizer.json")
    if summary.pop(_CHECKSUM, None) not in (None, _checksum(summary, spec)):  # None: written by an earlier version
        raise ValueError("summary.json or tokenizer.json does not match its checksum")
    if summary["format"] != _FORMAT:
        raise ValueError(f"summary.json has format {summary['format']}, but this version reads format {_FORMAT}")
    if folder.name.endswith((".tmp", ".partial")):
        raise ValueError("its preparation was not completed")
    tokenizer = tokenizer_from_spec(json.loads(spec))
    splits = {split: TokenCounts(**summary["splits"][split]) for split in SPLITS}
    shards = {split: [Shard.from_json(folder, shard) for shard in summary["shards"][split]] for split in SPLITS}
    prepared = Prepared(
        folder, summary["key"], tokenizer, splits, shards, summary["empty"], summary["held_out"], summary["noun"],
        summary.get("bad", 0), tuple(summary.get("bad_rows", ())), summary.get("split_rows", 0),
        summary.get("split_documents", 0), summary.get("zero_weight", 0),
    )  # fmt: skip
    for split in SPLITS:
        stored = prepared.stream(split).tokens
        if stored != splits[split].tokens:
            raise ValueError(f"the {split} shards have {stored} tokens, but summary.json says {splits[split].tokens}")
    return prepared
