"""Prepared data in a bucket, shared by nodes without a common disk: ``data.cache_dir=s3://BUCKET/FOLDER``.

One process prepares the data on its disk and uploads each finished job; the others wait and download the result. If it
dies, another process continues with the finished jobs::

    memos/<hash>.json      the key of data that lies in a bucket, by its listing and the settings
    claims/<name>.json     the process that prepares; it writes the object again every few seconds
    <key>/                 shards; a done-NNNNN.json per finished job; when all are there, summary.json

Two processes that prepare the same data at once, because one was thought dead, write the same bytes.
"""

import contextlib
import json
import re
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from serried.configs.plain_data import parse_json
from serried.recipes.data.prepared.ranged_objects import (
    OBJECTS,
    StoredObject,
    is_large,
    is_written_here,
    read_objects,
    write_objects,
)
from serried.recipes.data.readers.reading_progress import Progress
from serried.recipes.data.readers.source import SPLITS
from serried.records.bucket_files import ObjectCopy, check_space, download_objects, send_file
from serried.records.object_store import open_store
from serried.records.store import ABSENT, Conflict, Expect, Listed, Store, StoreError

PATIENCE_SECONDS = 45.0
"""Time without an update of the claim after which another process takes over."""
_KEY = re.compile(r"[0-9a-f]{32}")
_KINDS = ("bin", "starts", "supervised", "weights", "places", "crc32")
_FILE = re.compile(
    rf"(?:{'|'.join(SPLITS)})-([0-9]{{5,}})\.(?:{'|'.join(_KINDS)})|tokenizer\.json|{re.escape(OBJECTS)}"
)
_DONE = re.compile(r"done-([0-9]{5,})\.json")
_SUMMARY = "summary.json"
_LONGEST_WAIT_SECONDS = 10.0
_SECONDS_PER_DAY = 86400.0


def remove_unfinished(url: str, days: float) -> int:
    """Remove data in the cache at ``url`` whose preparation was interrupted, and to which nothing was written for
    ``days``. Returns the number of keys.

    Raises ``StoreError`` if the store does not answer.
    """
    store, before = open_store(url, "data.cache_dir"), time.time() - days * _SECONDS_PER_DAY
    files: dict[str, list[Listed]] = {}
    for entry in store.list(""):
        key, _, name = entry.key.partition("/")
        if name and _KEY.fullmatch(key):
            files.setdefault(key, []).append(entry)
    removed = 0
    for key, entries in files.items():
        is_complete = f"{key}/{_SUMMARY}" in [entry.key for entry in entries]
        if not is_complete and max(entry.written_at for entry in entries) < before:
            store.delete(entry.key for entry in entries)
            removed += 1
    return removed


class SharedCache:
    """Prepared data in a bucket."""

    def __init__(self, url: str, progress: Progress, patience_seconds: float = PATIENCE_SECONDS) -> None:
        self._store = open_store(url, "data.cache_dir")
        self._progress, self._patience_seconds = progress, patience_seconds
        self._pool = ThreadPoolExecutor(2)
        self._uploads: list[Future[None]] = []

    # memos ------------------------------------------------------------------------------------------------------------

    def recall(self, name: str, state: str) -> str | None:
        """Return the key that the memo ``name`` records for data with this ``state``."""
        found = self._store.get(f"memos/{name}")
        with contextlib.suppress(ValueError, KeyError, TypeError):
            memo = parse_json(found[0]) if found else {}
            if memo["state"] == state and _KEY.fullmatch(memo["key"]) and self.has(memo["key"]):
                return str(memo["key"])
        return None

    def remember(self, name: str, state: str, key: str) -> None:
        """Write the memo ``name``."""
        self._store.put(f"memos/{name}", json.dumps({"state": state, "key": key}).encode())

    # prepared data ----------------------------------------------------------------------------------------------------

    def has(self, key: str) -> bool:
        """Return whether the data ``key`` is complete."""
        return self._store.stat(f"{key}/{_SUMMARY}") is not None

    def fetch(self, key: str, folder: Path, *, in_ranges: bool = False) -> None:
        """Download the complete data ``key`` into ``folder``, its summary last. ``in_ranges``: record the objects that
        have the tokens instead of downloading them. Raises ``UserError`` if the disk has too little space."""
        objects = self._objects(key)
        if in_ranges:
            self.record_objects(key, folder)
        files = [entry for name, entry in objects.items() if _FILE.fullmatch(name)]
        files = [entry for entry in files if not (in_ranges and is_large(_name_of(entry)))]
        check_space(folder, sum(entry.size_bytes for entry in files), self._store.url, "data.cache_dir")
        self._download(folder, files)
        self._download(folder, [objects[_SUMMARY]])

    def record_objects(self, key: str, folder: Path) -> None:
        """Write which objects have the tokens of the data ``key`` into ``folder``. Their tags change if the same data
        is prepared again."""
        large = [entry for name, entry in self._objects(key).items() if is_large(name)]
        if large:  # the objects of token files of other tools are not in the cache
            tokens = {_name_of(entry): StoredObject(_name_of(entry), entry.size_bytes, entry.tag) for entry in large}
            write_objects(folder, self._store.where(key), tokens)

    def fetch_finished_jobs(self, key: str, folder: Path) -> None:
        """Download the finished jobs of an interrupted preparation that ``folder`` does not have."""
        objects = self._objects(key)
        done = {name: match[1] for name in objects if (match := _DONE.fullmatch(name))}
        done = {name: number for name, number in done.items() if not (folder / name).exists()}
        if done:
            self._progress.say(f"continuing with {len(done)} parts that another process prepared")
        wanted = [name for name in objects if (match := _FILE.fullmatch(name)) and match[1] in done.values()]
        if (tokenizer := folder / "tokenizer.json").name in objects and not tokenizer.exists():
            wanted.append(tokenizer.name)
        self._download(folder, [objects[name] for name in wanted])
        self._download(folder, [objects[name] for name in done])

    def _objects(self, key: str) -> dict[str, Listed]:
        return {entry.key.removeprefix(f"{key}/"): entry for entry in self._store.list(key)}

    def _download(self, folder: Path, objects: Iterable[Listed]) -> None:
        copies = [ObjectCopy(entry.key, entry.size_bytes, entry.tag, folder / _name_of(entry)) for entry in objects]
        download_objects(self._store, copies)

    def publish_job(self, key: str, folder: Path, number: int) -> None:
        """Upload the files of a finished job in the background."""
        done = f"done-{number:05d}.json"
        names = [f"{split}-{number:05d}.{kind}" for split in SPLITS for kind in _KINDS]
        # Listed now: if an error removes the folder later, the upload fails, and the job is not marked as complete.
        files = [file for name in ["tokenizer.json", *names] if (file := folder / name).exists()]

        def send(content: bytes) -> None:
            for file in files:
                send_file(self._store, f"{key}/{file.name}", file)
            self._store.put(f"{key}/{done}", content)  # last, since it marks the other files as complete

        self._uploads.append(self._pool.submit(send, (folder / done).read_bytes()))

    def wait_for_jobs(self) -> None:
        """Wait until the files of all finished jobs are uploaded. Raises ``StoreError`` if an upload failed."""
        while self._uploads:
            self._uploads.pop().result()

    def publish(self, key: str, folder: Path) -> None:
        """Upload the files of the complete data ``key`` in ``folder`` that the bucket lacks."""
        objects = self._objects(key)
        elsewhere = read_objects(folder)[1]
        for file in sorted(folder.iterdir()):
            if file.name in elsewhere or is_written_here(file.name):
                continue
            there = objects.get(file.name)
            is_there = there is not None and there.size_bytes == file.stat().st_size and file.suffix != ".json"
            if file.name != _SUMMARY and not is_there:
                send_file(self._store, f"{key}/{file.name}", file)
        with contextlib.suppress(Conflict):  # another process was first, with the same bytes
            self._store.put(f"{key}/{_SUMMARY}", (folder / _SUMMARY).read_bytes(), ABSENT)
        self._store.delete([entry.key for name, entry in objects.items() if _DONE.fullmatch(name)])

    # the claim --------------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def claimed(self, name: str, find: Callable[[], str | None]) -> Iterator[str | None]:
        """Yield None while this process holds the claim ``name``, or what ``find`` returns when another process has
        finished."""
        claim = _Claim(self._store, f"claims/{name}.json", self._patience_seconds)
        wait_seconds = min(2.0, self._patience_seconds / 10)
        while (found := find()) is None and not claim.take():
            self._progress.say(f"waiting for {claim.holder}, which is preparing the same data")
            time.sleep(wait_seconds)
            wait_seconds = min(wait_seconds * 1.2, _LONGEST_WAIT_SECONDS, self._patience_seconds / 4)
        if found is None:
            with claim.kept():
                found = find()  # its last holder may have finished in between
                if found is None:
                    yield None
                    return
        yield found


def _name_of(entry: Listed) -> str:
    return entry.key.rpartition("/")[2]


class _Claim:
    """Object that names the process at work, which changes it to show that it is alive. Clocks are not compared."""

    def __init__(self, store: Store, key: str, patience_seconds: float) -> None:
        self._store = store
        self._key = key
        self._patience_seconds = patience_seconds
        self._owner = uuid.uuid4().hex
        self._number = 0
        self._tag: Expect | str = ABSENT
        self._seen_at = time.monotonic()
        self._ended = threading.Event()
        self.holder = ""
        """Host of the process that holds the claim."""

    def take(self) -> bool:
        """Take the claim if it is free, or its holder has not renewed it for some time. Return whether this process
        holds it."""
        found = self._store.get(self._key)
        if found is None:
            self._tag = ABSENT
        elif self._is_ours(found):
            return True
        elif found[1] != self._tag:
            self._tag, self._seen_at = found[1], time.monotonic()
            return False
        elif time.monotonic() - self._seen_at < self._patience_seconds:
            return False
        return self._write()

    @contextlib.contextmanager
    def kept(self) -> Iterator[None]:
        """Context manager that renews the claim, and releases it on exit."""
        thread = threading.Thread(target=self._renew, daemon=True, name="claim")
        thread.start()
        try:
            yield
        finally:
            self._ended.set()
            thread.join()
            with contextlib.suppress(StoreError):
                found = self._store.get(self._key)
                if found is not None and self._is_ours(found):
                    self._store.delete([self._key])

    def _renew(self) -> None:
        while not self._ended.wait(self._patience_seconds / 5):
            with contextlib.suppress(StoreError):  # tried again; if another process takes over, both write the same
                if not self._write():
                    return

    def _write(self) -> bool:
        """Write the claim if it is unchanged. Return whether this process holds it."""
        self._number += 1
        content = {"owner": self._owner, "host": socket.gethostname(), "number": self._number}
        with contextlib.suppress(Conflict):
            try:
                self._tag = self._store.put(self._key, json.dumps(content).encode(), self._tag)
                return True
            except StoreError:
                pass  # the write may have taken effect
        found = self._store.get(self._key)
        return found is not None and self._is_ours(found)

    def _is_ours(self, found: tuple[bytes, str]) -> bool:
        content = {}
        with contextlib.suppress(ValueError):
            content = parse_json(found[0])
        self.holder = str(content.get("host", "another process")) if isinstance(content, dict) else ""
        if not isinstance(content, dict) or content.get("owner") != self._owner:
            return False
        self._tag = found[1]
        return True
