"""Checkpoints of a run in a bucket: saving, reading and removing them.

A save uploads into its own folder, and is committed by a write of the run's head (``records/head.py``). A
checkpoint is read through a local folder that has its small files, and whose tensor files are read by ranges
(``records/ranged_files.py``).
"""

import base64
import os
import shutil
import tempfile
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from serried.configs.errors import UserError
from serried.configs.plain_data import is_number
from serried.configs.schema.sections import CheckpointSection
from serried.records.head import HEAD, Earlier, Entry, Fenced, Head, HeadContent
from serried.records.object_store import s3_endpoint
from serried.records.ranged_files import BLOCK_BYTES, DamagedFile, RangedFile, attach
from serried.records.run_folder import RunFolder
from serried.records.store import ABSENT, Conflict, NoAnswer, Store, StoreError, Upload, ended_by, upload_file
from serried.runtime.session import Session
from serried.trainer.checkpoint.manifest import (
    MANIFEST,
    Damaged,
    FileRecord,
    manifest_text,
    parse_manifest,
    record_of,
    write_manifest,
)
from serried.trainer.checkpoint.retention import best_of, folder_name, kept_steps, step_of

_REQUESTS_AT_ONCE = 16
_PIECE_BYTES = 8 * 2**20
_LARGEST_SMALL_BYTES = 2**30
_SWEEP_EVERY_SAVES = 100
_LONGEST_END = 200


class Pace:
    """Limit in bytes per second for the uploads of this process."""

    def __init__(self, bytes_per_second: float) -> None:
        self._bytes_per_second = bytes_per_second
        self._free_at = 0.0
        self._lifted = threading.Event()

    def take(self, nbytes: int) -> None:
        """Wait until ``nbytes`` more may be sent."""
        now = time.monotonic()
        self._free_at = max(now, self._free_at) + nbytes / self._bytes_per_second
        self._lifted.wait(max(0.0, self._free_at - now))

    def lift(self, is_lifted: bool) -> None:
        """Lift the limit, or apply it again."""
        if is_lifted:
            self._lifted.set()
        else:
            self._lifted.clear()


class BucketFiles:
    """The files of one rank while they are uploaded, one after the other."""

    has_block_sums = True

    def __init__(self, store: Store, prefix: str, pace: Pace | None = None) -> None:
        self._store = store
        self._prefix = prefix
        self._pace = pace
        self._open: tuple[str, Upload] | None = None
        self.had_no_answer = False
        """Whether a file could not be written because the store did not answer."""

    def open(self, name: str) -> None:
        self._finish()
        self._open = name, self._store.writer(f"{self._prefix}/{name}")

    def append(self, name: str, contents: list[memoryview], size: int) -> None:  # noqa: ARG002
        assert self._open is not None
        for content in contents:
            if self._pace is not None:
                self._pace.take(len(content))
            self._open[1].write(content)

    def close(self, name: str, *, is_whole: bool) -> None:
        if self._open is None or self._open[0] != name:
            return  # finished when the next one was opened
        if is_whole:
            self._finish()
        else:
            self._open[1].abort()
            self._open = None

    def _finish(self) -> None:
        if self._open is not None:
            upload, self._open = self._open[1], None
            upload.finish()

    def reason(self, name: str, error: OSError | MemoryError) -> str:
        if isinstance(error, StoreError):
            self.had_no_answer = isinstance(error, NoAnswer)
            return str(error)
        reason = getattr(error, "strerror", None) or "out of memory"
        return f"cannot write {self._store.where(f'{self._prefix}/{name}')}: {reason}"


class BucketCheckpoints:
    """Checkpoints of the run at a URL. ``scratch``: local folder through which they are read."""

    def __init__(
        self, store: Store, scratch: Path, section: CheckpointSection, session: Session, folder: RunFolder | None
    ) -> None:
        """``folder``: the scratch folder of the run, with the claim. None except on rank 0."""
        self._store = store
        self._scratch = scratch
        self._section = section
        self._session = session
        self._folder = folder
        limit = section.upload_bytes_per_second
        self._pace = Pace(limit / session.local_world_size) if limit else None
        self._saves = 0
        self._files: BucketFiles | None = None
        self._commit_had_no_answer = False

    @property
    def _head(self) -> Head:
        assert self._folder is not None
        assert self._folder.head is not None
        return self._folder.head

    def path(self, step: int) -> Path:
        return self._scratch / folder_name(step)

    # saving -----------------------------------------------------------------------------------------------------------

    def begin(self, step: int, nbytes: int) -> tuple[str, str | None]:  # noqa: ARG002
        return self._head.begin(step), None

    def files(self, attempt: str) -> BucketFiles:
        self._store.begin_to_wait()  # a save is not given up because of an outage before it
        self._files, self._commit_had_no_answer = BucketFiles(self._store, f"checkpoints/{attempt}", self._pace), False
        return self._files

    def hurry(self, is_urgent: bool) -> None:
        if self._pace is not None:
            self._pace.lift(is_urgent)

    def commit(
        self, attempt: str, step: int, files: Mapping[str, FileRecord], write_others: Callable[[Path], None],
        state: Mapping[str, Any], notes: list[str],
    ) -> str | None:  # fmt: skip
        prefix = f"checkpoints/{attempt}"
        records = dict(files)
        try:
            with tempfile.TemporaryDirectory(prefix="serried-save-") as others:
                write_others(Path(others))
                for path in sorted(Path(others).iterdir()):
                    records[path.name] = self._upload(f"{prefix}/{path.name}", path)
            text = manifest_text(records)
            try:
                self._store.put(f"{prefix}/{MANIFEST}", text, ABSENT)
            except Conflict:  # an earlier try whose answer was lost: no other process uses this name
                found = self._store.get(f"{prefix}/{MANIFEST}")
                if found is None or found[0] != text:
                    raise
            assert self._folder is not None
            self._folder.upload()  # a run that resumes from this checkpoint needs the records of its steps
            entry = Entry(step, attempt, sum(record.size for record in records.values()), _validation(state))
            gone = self._head.commit(entry, lambda new: self._retain(new, state))
        except (Fenced, StoreError) as error:
            self._commit_had_no_answer = isinstance(error, NoAnswer)
            return str(error)
        except OSError as error:
            return f"cannot write {self._store.where(prefix)}: {error.strerror}"
        except Exception as error:  # an error in the task's export_files() fails the save, not the run
            return f"cannot write {self._store.where(prefix)}: {type(error).__name__}: {error}"
        for old in gone:
            with self._noting(notes, f"cannot remove {self._store.where(old.prefix)}"):
                self._remove(old)
        self._saves += 1
        if self._saves % _SWEEP_EVERY_SAVES == 0:
            notes += self.sweep()
        return None

    def _remove(self, entry: Entry) -> None:
        """Remove the files of a checkpoint that the head no longer names: first the manifest. Nothing is listed."""
        where = self._store.where(f"{entry.prefix}/{MANIFEST}")
        found = self._store.get(f"{entry.prefix}/{MANIFEST}")
        try:
            names = parse_manifest(found[0], where) if found else {}
        except Damaged:
            names = {}
        if not names:
            self._head.remove(entry.attempt)
            return
        self._store.delete([f"{entry.prefix}/{MANIFEST}"])
        self._store.delete(f"{entry.prefix}/{name}" for name in names)

    def _upload(self, key: str, path: Path) -> FileRecord:
        with path.open("rb") as file:
            upload_file(self._store, key, file)
        return record_of(path)

    def _retain(self, new: HeadContent, state: Mapping[str, Any]) -> None:
        """Remove the checkpoints from ``new`` that need not be kept."""
        section, later = self._section, _evaluated_later(state)
        entries = [
            Entry(entry.step, entry.attempt, entry.size_bytes, entry.validation | later.get(entry.step, {}))
            for entry in new.checkpoints
        ]
        best = _best(entries, section)
        kept = kept_steps(
            [entry.step for entry in entries], keep=section.keep, keep_every=section.keep_every,
            also=state.get("changed_after", ()), best=best and best[0].step,
        )  # fmt: skip
        new.checkpoints = [entry for entry in entries if entry.step in kept]
        new.extra["origin"] = state.get("origin") or ""

    @contextmanager
    def _noting(self, notes: list[str], what: str) -> Iterator[None]:
        """Context manager that appends a failure to ``notes``. The commit stands; a later sweep removes the rest."""
        try:
            yield
        except (Fenced, StoreError, UserError) as error:
            notes.append(f"{what}: {error}")

    def discard(self, attempt: str) -> None:
        if attempt:
            with self._noting([], ""):
                self._head.give_up(attempt)

    def lack_of_space(self, nbytes: int) -> str | None:  # noqa: ARG002
        return None  # a bucket has no limit

    def sweep(self) -> list[str]:
        notes: list[str] = []
        with self._noting(notes, f"cannot remove the remains of saves in {self._store.url}"):
            self._head.sweep()
        if self._head.is_ours:
            with self._noting(notes, f"cannot remove unfinished uploads in {self._store.url}"):
                abort_uploads(self._store, lambda key: self._head.is_abandoned(key.partition("/")[0]))
        return notes

    @property
    def is_ours(self) -> bool:
        """Whether this process may still write, as far as this rank knows."""
        return self._folder is None or self._head.is_ours

    @property
    def had_no_answer(self) -> bool:
        """Whether the last save failed on this rank because the store did not answer."""
        return self._commit_had_no_answer or (self._files is not None and self._files.had_no_answer)

    def where(self, step: int) -> str:
        entries = [entry for entry in self._head.content.checkpoints if entry.step == step]
        return self._store.where(entries[0].prefix if entries else f"checkpoints/{step:08d}-...")

    # reading ----------------------------------------------------------------------------------------------------------

    def saved(self) -> list[Path]:
        """Return the paths of the checkpoints, newest first. Called on rank 0."""
        return [self.path(entry.step) for entry in reversed(self._head.content.checkpoints)]

    def origin(self) -> str | None:
        """Return the path that the run was started from. Called on rank 0."""
        return self._head.content.extra.get("origin") or None

    def open(self, path: Path) -> str | None:
        """Make a checkpoint readable on all nodes. Returns why it is damaged, else None. This is a collective call."""
        return open_on_all_nodes(self._store, path, self._session, lambda: self._fetch(path))

    def _fetch(self, path: Path) -> dict[str, Any]:
        entry = next(entry for entry in self._head.content.checkpoints if entry.step == step_of(path))
        return fetch_contents(self._store, entry)

    def best(self) -> tuple[int, float] | None:
        found = _best(self._head.content.checkpoints, self._section)
        return (found[0].step, found[1]) if found else None


def set_aside(folder: RunFolder, head: Head, start_step: int | None) -> list[str]:
    """Set aside an earlier run (``start_step`` is None), or checkpoints newer than ``start_step``.

    Returns notes for the user. Called on rank 0.
    """
    content, where = head.content, head.store.where(HEAD)
    number = len(content.earlier) + 1
    if start_step is None:
        if not content.checkpoints and not content.records:
            return []
        earlier = Earlier(content.records, content.checkpoints, folder.earlier_end()[:_LONGEST_END])
        note = f"an earlier run here ({earlier.end}) is kept as entry {number} of {where}; starting from step 0"
    else:
        newer = [entry for entry in content.checkpoints if entry.step > start_step]
        if not newer:
            return []
        earlier = Earlier(0, newer, f"newer than step {start_step}")
        note = (
            f"newer checkpoints ({', '.join(entry.attempt for entry in newer)}) are kept as entry {number} of {where}"
        )

    def move(new: HeadContent) -> None:
        names = {entry.attempt for entry in earlier.checkpoints}
        new.checkpoints = [entry for entry in new.checkpoints if entry.attempt not in names]
        new.earlier = [*new.earlier[: number - 1], earlier]
        if start_step is None:
            new.records = 0

    try:
        head.swap(move)
    except StoreError as error:
        raise UserError(f"cannot set an earlier run aside: {error}") from None
    if start_step is None and folder.holds_a_run():
        folder.set_run_aside()  # the earlier records, in the scratch folder
    return [note]


# checkpoints as local folders -----------------------------------------------------------------------------------------


def open_on_all_nodes(store: Store, path: Path, session: Session, fetch: Callable[[], dict[str, Any]]) -> str | None:
    """Make a checkpoint readable through the local folder ``path`` on all nodes. ``fetch``, which is called on one
    rank, returns its contents as ``fetch_contents`` does.

    Returns why the checkpoint is damaged, else None. This is a collective call.
    """

    def fetched() -> dict[str, Any]:
        try:
            return fetch()
        except Damaged as damaged:
            return {"damage": str(damaged)}
        except StoreError as error:
            raise ended_by(error, f"cannot read {error}") from None

    answer = session.once(fetched)
    if "damage" in answer:
        return str(answer["damage"])
    session.once_per_node(lambda: _write_folder(path, answer))
    attach_files(store, path, answer)
    return None


def fetch_contents(store: Store, entry: Entry) -> dict[str, Any]:
    """Return the contents of a local folder of the checkpoint, as plain data: the small files and the headers.

    Raises ``Damaged`` if a file is missing or differs from the manifest, and ``StoreError`` or ``UserError`` if the
    store does not answer.
    """
    found = store.get(f"{entry.prefix}/{MANIFEST}")
    if found is None:
        raise Damaged(f"{store.where(f'{entry.prefix}/{MANIFEST}')} is missing")
    records = parse_manifest(found[0], store.where(f"{entry.prefix}/{MANIFEST}"))

    def fetch(name: str) -> str:
        record, key = records[name], f"{entry.prefix}/{name}"
        if record.blocks:
            return base64.b64encode(_header(store, key, record)).decode()
        content = store.get(key) if record.size <= _LARGEST_SMALL_BYTES else None
        if content is None or FileRecord(len(content[0]), zlib.crc32(content[0])) != record:
            raise Damaged(f"{store.where(key)} is missing or differs from {MANIFEST}")
        return base64.b64encode(content[0]).decode()

    with ThreadPoolExecutor(_REQUESTS_AT_ONCE) as pool:
        contents = dict(zip(records, pool.map(fetch, records), strict=True))
    return {"manifest": found[0].decode(), "contents": contents, "prefix": entry.prefix}


def _header(store: Store, key: str, record: FileRecord) -> bytes:
    """Return the header of a safetensors file. Usually this is one request.

    Raises ``Damaged``, or another error if the store does not answer: then the checkpoint may be whole.
    """
    file = RangedFile(store, key, record.size, record.blocks)
    start = memoryview(bytearray(min(record.size, BLOCK_BYTES)))
    try:
        file.read_into(0, start)
        nbytes = min(record.size, 8 + int.from_bytes(start[:8], "little"))
        if nbytes > len(start):
            start = memoryview(bytearray(nbytes))
            file.read_into(0, start)
    except DamagedFile as error:
        raise Damaged(str(error)) from None
    return bytes(start[:nbytes])


def _write_folder(path: Path, answer: Mapping[str, Any]) -> None:
    """Write the local folder of a checkpoint."""
    records = parse_manifest(answer["manifest"].encode(), path / MANIFEST)
    partial = path.with_name(f".{path.name}.partial")
    try:
        shutil.rmtree(partial, ignore_errors=True)
        shutil.rmtree(path, ignore_errors=True)
        partial.mkdir(parents=True)
        for name, content in answer["contents"].items():
            with (partial / name).open("wb") as file:
                file.write(base64.b64decode(content))
                file.truncate(records[name].size)  # the data of tensors is read from the bucket
        (partial / MANIFEST).write_text(answer["manifest"], "utf-8")
        partial.rename(path)
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}; set SERRIED_SCRATCH to another folder") from None


def attach_files(store: Store, path: Path, answer: Mapping[str, Any]) -> None:
    """Make this process read the tensors of the local folder ``path`` from the bucket."""
    for name, record in parse_manifest(answer["manifest"].encode(), path / MANIFEST).items():
        if record.blocks:
            attach(path / name, RangedFile(store, f"{answer['prefix']}/{name}", record.size, record.blocks))


def materialize(store: Store, entry: Entry, checkpoints: Path) -> Path:
    """Make a checkpoint readable in this process as a folder in ``checkpoints``, without its data. Returns the folder.

    Raises ``UserError`` if it is damaged, or the store does not answer.
    """
    path = checkpoints / folder_name(entry.step)
    try:
        answer = fetch_contents(store, entry)
    except Damaged as damaged:
        raise UserError(f"{damaged}; use another checkpoint: checkpoint=STEP") from None
    except StoreError as error:
        raise UserError(f"cannot read {error}") from None
    _write_folder(path, answer)
    attach_files(store, path, answer)
    return path


def download(store: Store, entry: Entry, checkpoints: Path) -> Path:
    """Copy a checkpoint to a folder in ``checkpoints``, as a run in a folder would have saved it. Returns the folder.

    Raises ``UserError`` if it is damaged, the store does not answer, or the disk is full.
    """
    path = checkpoints / folder_name(entry.step)
    partial = path.with_name(f".{path.name}.partial")
    try:
        found = store.get(f"{entry.prefix}/{MANIFEST}")
        if found is None:
            raise Damaged(f"{store.where(f'{entry.prefix}/{MANIFEST}')} is missing")
        records = parse_manifest(found[0], store.where(f"{entry.prefix}/{MANIFEST}"))
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        with ThreadPoolExecutor(4) as pool:
            list(
                pool.map(
                    lambda name: _download(store, f"{entry.prefix}/{name}", partial / name, records[name]), records
                )
            )
        write_manifest(partial, {name: record._replace(blocks="") for name, record in records.items()})
        shutil.rmtree(path, ignore_errors=True)
        partial.rename(path)
    except Damaged as damaged:
        raise UserError(f"{damaged}; use another checkpoint: checkpoint=STEP") from None
    except StoreError as error:
        raise UserError(f"cannot read {error}") from None
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}") from None
    return path


def _download(store: Store, key: str, path: Path, record: FileRecord) -> None:
    piece = memoryview(bytearray(min(record.size, _PIECE_BYTES)))
    with path.open("wb") as file:
        for offset in range(0, record.size, _PIECE_BYTES):
            view = piece[: min(_PIECE_BYTES, record.size - offset)]
            store.read_into(key, offset, view)
            file.write(view)
        file.flush()
        os.fsync(file.fileno())
    if record_of(path)[:2] != record[:2]:
        raise Damaged(f"{store.where(key)} differs from {MANIFEST}")


def abort_uploads(store: Store, is_orphan: Callable[[str], bool]) -> int:
    """Remove unfinished multipart uploads. Returns their number.

    obstore cannot list them, so this needs boto3 and S3. Otherwise a lifecycle rule of the bucket removes them.
    ``is_orphan`` is called with the part of the key after ``checkpoints/``.
    """
    url = urlsplit(store.url)
    try:
        import boto3
        from botocore.config import Config
        from botocore.exceptions import BotoCoreError, ClientError
    except ImportError:
        return 0
    if url.scheme != "s3":
        return 0
    prefix = f"{url.path.strip('/')}/checkpoints/".lstrip("/")
    aborted = 0
    try:
        region = os.environ.get("AWS_REGION") or None  # boto3 knows only AWS_DEFAULT_REGION
        client = boto3.client(
            "s3", region_name=region, endpoint_url=s3_endpoint() or None,
            config=Config(connect_timeout=5, read_timeout=20, retries={"max_attempts": 5}),
        )  # fmt: skip
        pages = client.get_paginator("list_multipart_uploads").paginate(Bucket=url.netloc, Prefix=prefix)
        for upload in [upload for page in pages for upload in page.get("Uploads", [])]:
            if is_orphan(upload["Key"].removeprefix(prefix)):
                client.abort_multipart_upload(Bucket=url.netloc, Key=upload["Key"], UploadId=upload["UploadId"])
                aborted += 1
    except (BotoCoreError, ClientError) as error:
        raise StoreError(str(error).splitlines()[0]) from None
    return aborted


def _validation(state: Mapping[str, Any]) -> dict[str, float]:
    """Return the metrics on the validation set at the step of ``state``."""
    progress = state.get("progress", {})
    found = dict(progress.get("validation") or {}) if progress.get("validated_step") == state.get("step") else {}
    found |= {"loss": state.get("validation_loss")}
    return {name: float(value) for name, value in found.items() if is_number(value)}


def _evaluated_later(state: Mapping[str, Any]) -> dict[int, dict[str, float]]:
    """Return the metrics, by step, of steps that were evaluated after their checkpoint was saved."""
    made_up = state.get("progress", {}).get("made_up") or {}
    return {
        int(step): {name: float(value) for name, value in values.items() if is_number(value)}
        for step, values in made_up.items()
    }


def _best(entries: Sequence[Entry], section: CheckpointSection) -> tuple[Entry, float] | None:
    metric = section.best_metric
    values = {entry.attempt: entry.validation[metric] for entry in entries if metric in entry.validation}
    if not section.keep_best or not values:
        return None
    best = best_of(values, section.best_mode)
    return next(entry for entry in entries if entry.attempt == best), values[best]
