"""Tokens on disk: made once, keyed by content, never half-written.

``<cache>/<key>/`` holds ``train.safetensors`` and ``validation.safetensors`` (``tokens`` [tokens], every document
followed by the end mark; ``document_starts`` [documents], int64), ``tokenizer.json`` and ``summary.json``. The key is a
hash of everything the tokens depend on, so a folder that is there is right, whoever made it, and one that is not there
was never finished: it is written under another name and renamed. The sequence length is not part of it.
"""

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import socket
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from configs.errors import UserError
from configs.schema import DataSection
from recipes.data.shards import TokenStream
from recipes.data.text import Document, Part, SourceFile, assignment, find_files, read_documents, split_documents
from recipes.data.tokenizer import Tokenizer, build_tokenizer, token_dtype, tokenizer_from_spec

SPLITS = ("train", "validation")

_FORMAT = 1
"""Version of everything the key does not see: the layout on disk, what is in a source, the rule of the split."""

_HEADER_BYTES = 512
_ABANDONED_SECONDS = 24 * 3600.0
_SETTLED_SECONDS = 2.0


@dataclass(frozen=True)
class SplitSummary:
    """Size of one split. ``files`` counts those with a part in it; ``tokens`` includes an end mark for each."""

    files: int
    text_bytes: int
    tokens: int


@dataclass(frozen=True)
class Prepared:
    """A folder of prepared tokens that was checked."""

    folder: Path
    key: str
    tokenizer: Tokenizer
    splits: dict[str, SplitSummary]

    def tokens(self, split: str) -> np.ndarray:
        """The stream of ``train`` or ``validation``, [tokens], unsigned, read from the disk where it is touched."""
        return _map_tokens(self.folder / f"{split}.safetensors")

    def stream(self, split: str) -> TokenStream:
        """Tokens and documents of ``train`` or ``validation``, read from the disk where they are touched."""
        return TokenStream([self.folder / f"{split}.safetensors"])

    def describe(self) -> str:
        """Sizes for people: ``train 11,432,101 tokens of 721 files, validation 601,022 of 38``."""
        train, validation = (self.splits[name] for name in SPLITS)
        return (
            f"train {train.tokens:,} tokens of {train.files:,} files, "
            f"validation {validation.tokens:,} of {validation.files:,}"
        )


def prepare(section: DataSection) -> Prepared:
    """Tokenise the source into the cache, or find that this was done before.

    Any number of processes may do this at once, on one node or several: the first to finish wins, and all get the same.
    One document at a time is held in memory. Raises ``UserError`` for a source that is missing, empty or unreadable and
    a cache that cannot be written.
    """
    cache = cache_folder(section)
    files = find_files(section)
    memo = _Memo(cache, section, files)
    if (key := memo.recall()) and (prepared := _open_if_intact(cache / key)):
        return prepared
    documents = read_documents(files)
    key = _content_key(section, documents)
    prepared = _open_if_intact(cache / key) or _make(section, cache / key, documents)
    memo.remember(key)
    return prepared


def open_prepared(folder: Path) -> Prepared:
    """Open what ``prepare`` made, in this process or another. Reads headers and sizes, no tokens.

    Raises ``UserError`` where the folder is missing or not whole.
    """
    try:
        return _open(folder)
    except FileNotFoundError as error:
        raise UserError(
            f"prepared data {folder} is not there, or not whole, on {socket.gethostname()}; use a cache that every "
            "node sees: data.cache_dir=/shared/folder"
        ) from error
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"prepared data {folder} is damaged ({_one_line(error)}); remove the folder and it is made anew"
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


# the key --------------------------------------------------------------------------------------------------------------


def _content_key(section: DataSection, documents: Sequence[Document]) -> str:
    settings = {
        "format": _FORMAT,
        "tokenizer": section.tokenizer,
        "validation_fraction": section.validation_fraction,
    }
    key = hashlib.sha256(json.dumps(settings, sort_keys=True).encode())
    for document in documents:
        name = document.name.encode("utf-8", "surrogateescape")
        key.update(len(name).to_bytes(8, "little") + name + document.sha256)
    return key.hexdigest()[:32]


class _Memo:
    """The key that a source had, for as long as the file system says that no file of it has changed.

    One small file per source and settings, so that a start need not read a large source only to find that it is
    prepared. It is a shortcut: where it cannot be read or written, the source is read.
    """

    def __init__(self, cache: Path, section: DataSection, files: Sequence[SourceFile]) -> None:
        folder = os.path.commonpath([file.path.absolute() for file in files])
        identity = [_FORMAT, section.name, section.path, folder, section.tokenizer, section.validation_fraction]
        self._path = cache / "memos" / f"{hashlib.sha256(json.dumps(identity).encode()).hexdigest()[:32]}.json"
        self._state = _source_state(files)

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
            unfinished.write_text(json.dumps({"state": self._state, "key": key}))
            unfinished.replace(self._path)


def _source_state(files: Sequence[SourceFile]) -> str | None:
    """Hash of names, sizes and times. None where a file is so fresh that one more change could leave the same times."""
    settled_ns = time.time_ns() - int(_SETTLED_SECONDS * 1e9)
    state = hashlib.sha256()
    for file in files:
        try:
            status = file.path.stat()
        except OSError:
            return None  # whoever reads it says why
        # The time of the last change to the inode too: copying tools set the time of modification back.
        if max(status.st_mtime_ns, status.st_ctime_ns) > settled_ns:
            return None
        fields = (file.name, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)
        state.update(repr(fields).encode())
    return state.hexdigest()


# writing --------------------------------------------------------------------------------------------------------------


def _make(section: DataSection, folder: Path, documents: Sequence[Document]) -> Prepared:
    """Write ``folder``, whole or not at all."""
    tokenizer = build_tokenizer(section, documents)
    parts = split_documents(documents, section.validation_fraction)
    try:
        with _unfinished_folder(folder) as unfinished:
            splits = {name: _write_split(unfinished / f"{name}.safetensors", parts[name], tokenizer) for name in SPLITS}
            _write_json(unfinished / "tokenizer.json", tokenizer.spec())
            summary = {"format": _FORMAT, "key": folder.name, "splits": {n: asdict(s) for n, s in splits.items()}}
            _write_json(unfinished / "summary.json", summary)
            _publish(unfinished, folder)
    except OSError as error:
        raise _cannot_write(folder.parent, error, sum(document.size_bytes for document in documents)) from error
    return open_prepared(folder)


def _write_split(path: Path, parts: Sequence[Part], tokenizer: Tokenizer) -> SplitSummary:
    """Write the tokens of ``parts``, one after the other, as a safetensors file.

    ``safetensors.save_file`` wants whole tensors in memory; here the header, whose size is fixed by padding it with
    spaces as the format allows, is written when the number of tokens is known. ``document_starts`` comes first, so that
    its 8-byte elements are aligned.
    """
    dtype = token_dtype(tokenizer.vocab_size)
    end = np.array([tokenizer.end_id], dtype)
    starts = np.zeros(len(parts), np.int64)
    tokens = 0
    with path.open("wb") as stream:
        stream.seek(_HEADER_BYTES + starts.nbytes)
        for i, part in enumerate(parts):
            ids = tokenizer.encode(part.read())
            stream.write(np.concatenate((ids, end), dtype=dtype).data.cast("B"))
            starts[i] = tokens
            tokens += len(ids) + 1
        stream.seek(0)
        name, stop = f"U{8 * dtype.itemsize}", starts.nbytes + tokens * dtype.itemsize
        header = {
            "document_starts": {"dtype": "I64", "shape": [len(parts)], "data_offsets": [0, starts.nbytes]},
            "tokens": {"dtype": name, "shape": [tokens], "data_offsets": [starts.nbytes, stop]},
        }
        stream.write((_HEADER_BYTES - 8).to_bytes(8, "little"))
        stream.write(json.dumps(header).encode().ljust(_HEADER_BYTES - 8))
        stream.write(starts.tobytes())
        _to_disk(stream)
    return SplitSummary(len(parts), sum(part.size_bytes for part in parts), tokens)


def _write_json(path: Path, value: Any) -> None:
    with path.open("wb") as stream:
        stream.write(json.dumps(value, indent=1).encode() + b"\n")
        _to_disk(stream)


def _to_disk(stream: BinaryIO) -> None:
    """Without this, a power cut after the rename could leave the name and lose the content."""
    stream.flush()
    os.fsync(stream.fileno())


@contextlib.contextmanager
def _unfinished_folder(folder: Path) -> Iterator[Path]:
    """A new folder beside ``folder``, gone at the end, and locked for as long as its maker lives."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    _remove_abandoned(folder.parent)
    unfinished = _beside(folder)
    unfinished.mkdir()
    # Locked under another name first: a file called "lock" always has had its owner's lock.
    lock = (unfinished / "lock.new").open("wb")
    try:
        with contextlib.suppress(OSError):  # a file system without locks: age alone will tell
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            (unfinished / "lock.new").rename(unfinished / "lock")
        yield unfinished
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
        lock.close()


def _beside(folder: Path) -> Path:
    """A name nobody else has, which says whose it is. Not ``tempfile``: what that makes, only its maker may read."""
    return folder.with_name(f"{folder.name}.{socket.gethostname()}.{os.urandom(6).hex()}.tmp")


def _remove_abandoned(cache: Path) -> None:
    """Remove what killed processes left, where it is certain that they no longer live.

    On this machine that is when their lock is free; for other machines, which may not share locks, when nothing was
    written for a day.
    """
    for folder in cache.glob("*.tmp"):
        with contextlib.suppress(OSError):
            written = max(entry.stat().st_mtime for entry in (folder, *folder.iterdir()))
            if time.time() - written > _ABANDONED_SECONDS:
                shutil.rmtree(folder)
            elif f".{socket.gethostname()}." in folder.name:
                with (folder / "lock").open("rb") as lock:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # raises where the owner lives
                    shutil.rmtree(folder)


def _publish(unfinished: Path, folder: Path) -> None:
    """Rename into place, unless another process was first."""
    for name in ("lock", "lock.new"):
        (unfinished / name).unlink(missing_ok=True)
    while True:
        try:
            unfinished.rename(folder)
            return
        except OSError:
            if not folder.exists():
                raise
        if _open_if_intact(folder):
            return
        aside = _beside(folder)
        with contextlib.suppress(FileNotFoundError):  # another process found it damaged too
            folder.rename(aside)
            shutil.rmtree(aside, ignore_errors=True)


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


# opening --------------------------------------------------------------------------------------------------------------


def _open_if_intact(folder: Path) -> Prepared | None:
    try:
        return open_prepared(folder)
    except UserError:
        return None


def _open(folder: Path) -> Prepared:
    summary = json.loads((folder / "summary.json").read_bytes())
    if summary["format"] != _FORMAT or summary["key"] != folder.name:
        raise ValueError(f"summary.json is of format {summary['format']} and key {summary['key']}")
    tokenizer = tokenizer_from_spec(json.loads((folder / "tokenizer.json").read_bytes()))
    prepared = Prepared(
        folder, summary["key"], tokenizer, {name: SplitSummary(**summary["splits"][name]) for name in SPLITS}
    )
    for name, split in prepared.splits.items():
        stored_tokens = len(prepared.tokens(name))
        if stored_tokens != split.tokens:
            raise ValueError(f"{name}.safetensors has {stored_tokens} tokens where summary.json says {split.tokens}")
    return prepared


def _map_tokens(path: Path) -> np.ndarray:
    """The tensor ``tokens`` of a safetensors file; raises ``ValueError`` where the file is shorter than it says.

    ``safetensors`` itself copies slices while it holds the interpreter lock: one page of a slow disk would stop the
    training thread. Copies out of a NumPy map let it go, and cost half (1.2 against 2.7 microseconds for 2,048 tokens).
    """
    with path.open("rb") as stream:
        header_bytes = int.from_bytes(stream.read(8), "little")
        if header_bytes > path.stat().st_size:
            raise ValueError(f"{path.name} is cut off in its header")
        entry = json.loads(stream.read(header_bytes))["tokens"]
    dtype = {"U8": np.uint8, "U16": np.uint16, "U32": np.uint32}[entry["dtype"]]
    (tokens,) = entry["shape"]
    if tokens == 0:
        return np.empty(0, dtype)  # which cannot be mapped
    offset = 8 + header_bytes + entry["data_offsets"][0]
    # As a plain array: np.memmap's own slices cost more.
    return np.asarray(np.memmap(path, dtype, mode="r", offset=offset, shape=(tokens,)))


def _one_line(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())
