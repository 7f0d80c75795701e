"""Records of a run in a bucket: written to the node's scratch folder, and uploaded from there by a thread of each node.

``records/EPOCH/`` in the bucket has the files of a run folder under the same names, but ``metrics.jsonl`` is in
segments: an object cannot be appended to, and only the last segment is written again and again.
"""

import math
import os
import re
import threading
import time
import zlib
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from serried.configs.errors import TrainingStopped
from serried.records.files import replacing, write_atomically
from serried.records.head import PATIENCE_SECONDS
from serried.records.metrics import LOST_METRICS, METRICS
from serried.records.run_folder import IMAGES, PROFILES
from serried.records.status import STATUS
from serried.records.store import ABSENT, ANY, Conflict, NoAnswer, Store, StoreError, upload_file

RECORDS_PREFIX = "records"
SEGMENT_BYTES = 4 * 2**20
"""Size of a full segment of ``metrics.jsonl``. Readers stop at the first one that is shorter."""
_LOOK_SECONDS, _LOOK_AT_OTHERS_SECONDS = 10.0, 30.0
"""Interval in seconds between uploads of metrics and status, and of all other records."""
_PIECE_BYTES = 8 * 2**20
"""A larger file is uploaded in several requests."""
_LARGE_FILE_SECONDS = 600.0
"""Interval between two uploads of a file that is larger than ``_PIECE_BYTES``, except at the end of the run."""
_SETTINGS = ("config.yaml", "environment.json")
_OF_MAIN = (*_SETTINGS, STATUS, LOST_METRICS, "report.html", "log", "tensorboard", PROFILES, IMAGES)
_OF_OTHER_NODES = ("log", PROFILES)
_SAFE = re.compile(r"(?!\.)[\w.@+=-]+(?:/(?!\.)[\w.@+=-]+)*")
"""Names of records that are downloaded, with the letters of any language. A listing of a bucket is not trusted."""
_SEGMENT = re.compile(r"metrics-(\d{5})\.jsonl")


def records_folder(epoch: int) -> str:
    """Return the folder in the bucket that has the records of the start with this epoch."""
    return f"{RECORDS_PREFIX}/{epoch}"


class RecordUpload:
    """Upload the records of one node to the bucket while it trains.

    Uploads never end a run: an error is a warning, and the next upload repeats it.
    """

    def __init__(
        self, store: Store, epoch: int, folder: Path, say: Callable[[str], None], *, is_main: bool,
        announce: Callable[[], None] = lambda: None,
    ) -> None:  # fmt: skip
        """
        Args:
            epoch: The claim of the run that the records belong to.
            folder: This node's scratch folder.
            is_main: Whether this is rank 0's node, which has all records. Other nodes have logs.
            announce: Called once, when all records have been uploaded for the first time.
        """
        self._announce: Callable[[], None] | None = announce
        self._store = store
        self._folder = folder
        self._say = say
        self._is_main = is_main
        self._prefix = records_folder(epoch)
        self._lock, self._ended = threading.Lock(), threading.Event()
        self._sent: dict[str, tuple[int, int, float]] = {}
        """Modification time and size of each file when it was uploaded, and the ``time.monotonic()`` of the upload."""
        self._metrics = _Segments(store, self._prefix, folder / METRICS)
        self._is_failing = False
        self._thread = threading.Thread(target=self._look_again_and_again, daemon=True, name="records")

    def start(self) -> None:
        """Start to upload in the background."""
        self._thread.start()

    def flush(self) -> None:
        """Upload the metrics and the status now; the first time, all records. Raises ``StoreError`` if that fails."""
        with self._lock:
            if self._announce is not None:
                self._send_others()
            if self._is_main:
                self._metrics.send()
                self._send(STATUS)
            if self._announce is not None:
                self._announce()
                self._announce = None

    def send_all(self) -> None:
        """Upload all records now. Raises ``StoreError`` if that fails."""
        self.flush()
        with self._lock:
            self._send_others()

    def close(self) -> None:
        """Stop the thread and upload the remaining records. An error is printed as a warning."""
        self._ended.set()
        if self._thread.ident is not None:
            self._thread.join()
        try:
            self.send_all()
        except TrainingStopped:  # the training loop has reported it
            pass
        except OSError as error:
            is_claimed = self._is_main and isinstance(error, NoAnswer)
            then = f"; the next start waits up to {PATIENCE_SECONDS:.0f} s for this process" if is_claimed else ""
            self._say(f"WARNING    the last records are not in {self._store.where(self._prefix)}: {error}{then}")

    def _look_again_and_again(self) -> None:
        others_at = 0.0
        while not self._ended.wait(_LOOK_SECONDS):
            if time.monotonic() < others_at:
                self._unless_it_fails(self.flush)
                continue
            self._unless_it_fails(self.send_all)
            others_at = time.monotonic() + _LOOK_AT_OTHERS_SECONDS

    def _unless_it_fails(self, send: Callable[[], None]) -> None:
        try:
            send()
        except TrainingStopped:  # the training loop ends the run
            self._ended.set()
        except OSError as error:
            if not self._is_failing:  # one warning until the next success
                where = self._store.where(self._prefix)
                self._say(f"WARNING    records are not uploaded to {where}: {error}. Training continues")
            self._is_failing = True
        else:
            if self._is_failing:
                self._say(f"records    are uploaded again to {self._store.where(self._prefix)}")
            self._is_failing = False

    def _send_others(self) -> None:
        for name in _files_in(self._folder, _OF_MAIN if self._is_main else _OF_OTHER_NODES):
            self._send(name)

    def _send(self, name: str) -> None:
        """Upload the file ``name`` if it has changed."""
        with suppress(FileNotFoundError), (self._folder / name).open("rb") as file:
            stat = os.fstat(file.fileno())
            *before, sent_at = self._sent.get(name, (0, 0, -math.inf))
            is_soon = time.monotonic() < sent_at + _LARGE_FILE_SECONDS and not self._ended.is_set()
            if before == [stat.st_mtime_ns, stat.st_size] or (stat.st_size > _PIECE_BYTES and is_soon):
                return
            key = f"{self._prefix}/{name}"
            if stat.st_size <= _PIECE_BYTES:
                # At first, logs of other nodes are copies from an earlier start. The nodes themselves have newer ones.
                is_copy = self._is_main and name.startswith("log/") and name not in self._sent
                with suppress(Conflict):
                    self._store.put(key, file.read(), ABSENT if is_copy else ANY)
            else:
                upload_file(self._store, key, file)
            self._sent[name] = stat.st_mtime_ns, stat.st_size, time.monotonic()


class _Segments:
    """``metrics.jsonl`` in the bucket."""

    def __init__(self, store: Store, prefix: str, path: Path) -> None:
        self._store = store
        self._prefix = prefix
        self._path = path
        self._segments: list[tuple[int, int]] = []
        """Size and checksum of each segment that was uploaded."""
        self._inode = 0
        """Inode of the file whose segments were uploaded. A rollback replaces the file."""

    def send(self) -> None:
        """Upload the segments that have changed. Raises ``StoreError`` if that fails."""
        with suppress(FileNotFoundError), self._path.open("rb") as file:
            stat = os.fstat(file.fileno())
            count = -(-stat.st_size // SEGMENT_BYTES)
            is_appended = stat.st_ino == self._inode and count >= len(self._segments)
            while len(self._segments) > count:  # the last first, so that readers always find the beginning of a file
                self._store.delete([self._key_of(len(self._segments) - 1)])
                self._segments.pop()
            first = max(0, len(self._segments) - 1) if is_appended else 0
            file.seek(first * SEGMENT_BYTES)
            for number in range(first, count):
                content = file.read(SEGMENT_BYTES)
                record = (len(content), zlib.crc32(content))
                if self._segments[number : number + 1] != [record]:
                    self._store.put(self._key_of(number), content)
                    self._segments[number:] = [record, *self._segments[number + 1 :]]
            self._inode = stat.st_ino

    def _key_of(self, segment: int) -> str:
        return f"{self._prefix}/metrics-{segment:05d}.jsonl"


def _files_in(folder: Path, names: Sequence[str]) -> Iterator[str]:
    """Yield the paths, relative to ``folder``, of the files in ``names``. Links are skipped."""
    for name in names:
        path = folder / name
        found = sorted(path.rglob("*")) if path.is_dir() else [path]
        yield from (str(file.relative_to(folder)) for file in found if file.is_file() and not file.is_symlink())


def download_records(store: Store, epoch: int, folder: Path) -> None:
    """Download all records of the start with this epoch into ``folder``. Files there are replaced.

    Raises ``StoreError`` if the store does not answer.
    """
    prefix, segments = f"{records_folder(epoch)}/", False
    for listed in store.list(prefix.rstrip("/")):
        name = listed.key.removeprefix(prefix)
        if _SEGMENT.fullmatch(name):
            segments = True
        elif _SAFE.fullmatch(name) and name.split("/")[0] in _OF_MAIN:
            download(store, listed.key, listed.size_bytes, folder / name)
    if segments:
        _download_metrics(store, epoch, folder)


def download_summary(store: Store, epoch: int, folder: Path) -> None:
    """Download the settings, status and metrics of the start with this epoch into ``folder``, without a listing.

    Raises ``StoreError`` if the store does not answer.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for name in (*_SETTINGS, STATUS, LOST_METRICS):
        if (found := store.get(f"{records_folder(epoch)}/{name}")) is not None:
            write_atomically(folder / name, found[0], survives_power_loss=False)
        else:
            (folder / name).unlink(missing_ok=True)
    _download_metrics(store, epoch, folder)


def _download_metrics(store: Store, epoch: int, folder: Path) -> None:
    number = 0
    with replacing(folder / METRICS, survives_power_loss=False) as file:
        while (found := store.get(f"{records_folder(epoch)}/metrics-{number:05d}.jsonl")) is not None:
            file.write(found[0])
            number += 1
            if len(found[0]) < SEGMENT_BYTES:  # a later one may have been written after this one was read
                break


def download(store: Store, key: str, size_bytes: int, path: Path) -> None:
    """Write an object of ``size_bytes`` to the file ``path``. Raises ``StoreError`` if the store does not answer."""
    path.parent.mkdir(parents=True, exist_ok=True)
    piece = bytearray(min(size_bytes, _PIECE_BYTES))
    with replacing(path, survives_power_loss=False) as file:
        for offset in range(0, size_bytes, _PIECE_BYTES):
            view = memoryview(piece)[: min(_PIECE_BYTES, size_bytes - offset)]
            store.read_into(key, offset, view)
            file.write(view)


def remove_records(store: Store, epoch: int, kept: Collection[int]) -> None:
    """Remove the records of all starts before ``epoch``, this process's claim, except the epochs in ``kept``. Records
    of a later start, which has taken over the run, stay. An error is ignored: the next start repeats it."""
    with suppress(StoreError):
        keys = [(listed.key, listed.key.split("/")[1]) for listed in store.list(RECORDS_PREFIX)]
        store.delete(key for key, of in keys if of.isdecimal() and int(of) < epoch and int(of) not in kept)
