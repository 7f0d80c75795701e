"""Claim on a run in a bucket, from the start of a run to its end, and upload of its records."""

import os
import shutil
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

from serried.configs.errors import UserError
from serried.configs.plain_data import NotPlainData, parse_json
from serried.records.head import (
    CHECKPOINTS,
    HEAD,
    MANIFEST,
    Entry,
    Fenced,
    Head,
    HeadContent,
    NewerVersion,
    epoch_of,
    is_attempt,
    read_head,
)
from serried.records.object_store import open_store
from serried.records.record_upload import RECORDS_PREFIX, RecordUpload, download_records, remove_records
from serried.records.run_folder import RECORDS, RunFolder
from serried.records.status import STATUS
from serried.records.store import ABSENT, Expect, Store, StoreError, ended_by

CONTROL = "control"
"""Name of the file in a run folder, and of the object in a bucket, that contains the user's request."""
_JOBS = ("SERRIED_JOB", "SLURM_JOB_ID")
"""Variables with the name of a job whose scheduler ends one process of a run before it starts the next."""
_MOST_BYTES = 100


class BucketRun:
    """This process's claim on the run at ``url``. Only rank 0 has an instance."""

    def __init__(self, url: str, folder: RunFolder, say: Callable[[str], None]) -> None:
        """Claim the run and download its records into ``folder``, which is a scratch folder.

        Raises ``UserError`` if another process trains there, or the bucket cannot be used.
        """
        self._folder = folder
        self._is_claimed = False
        store = open_store(url, say=lambda line: None if self._is_claimed else say(line))
        job = next((f"{name} {os.environ[name]}" for name in _JOBS if os.environ.get(name)), "")
        try:
            self.head = Head.claim(store, job, say=say)
            try:
                _replace_records(folder.path, self.head)
            except BaseException:
                self.head.release()
                raise
        except StoreError as error:
            raise ended_by(error, f"cannot use run.dir={url}: {error}") from None
        except OSError as error:
            raise UserError(
                f"cannot write the scratch folder {folder.path}: {error.strerror}; set SERRIED_SCRATCH to another "
                "folder"
            ) from None
        self._upload = RecordUpload(store, self.head.epoch, folder.path, say, is_main=True, announce=self._announce)
        folder.join(self.head, self._upload.flush)
        self._is_claimed = True  # from here on, failed uploads and saves are reported

    @property
    def epoch(self) -> int:
        """Number of the claim."""
        return self.head.epoch

    def start(self) -> None:
        """Start to upload the records."""
        self._upload.start()

    def _announce(self) -> None:
        """Make this start's records the records of the run. Called once all of them have been uploaded."""

        def name_records(new: HeadContent) -> None:
            new.records = new.epoch

        self.head.swap(name_records)
        content = self.head.content
        remove_records(self.head.store, content.epoch, [run.records for run in content.earlier])

    def close(self) -> None:
        """Upload the remaining records, and end the claim."""
        if (self._folder.has_begun or self._folder.has_new_status) and self.head.is_ours:
            self._upload.close()
        self.head.release()


def _replace_records(folder: Path, head: Head) -> None:
    """Replace the records in ``folder``, which may belong to another start, by the records in the bucket."""
    for name in {*RECORDS} - {"wandb"}:  # wandb's files exist only on this node
        path = folder / name
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
    if records := head.content.records:
        download_records(head.store, records, folder)
        with suppress(FileNotFoundError):
            os.utime(folder / STATUS, (1, 1))  # so that it counts as written by an earlier start


def new_request(head: Head, acted_upon: str) -> tuple[str, str] | None:
    """Return the content and the tag of ``control`` if the tag is not ``acted_upon``, and note in the head that this
    run acts on it; None otherwise.

    Raises ``StoreError`` if the store does not answer. The note may have been written, so the caller remembers what it
    acted upon.
    """
    found = head.store.get(CONTROL)
    if found is None or found[1] == acted_upon:
        return None
    word, tag = found[0][:_MOST_BYTES].decode("utf-8", "replace").strip(), found[1]

    def note(new: HeadContent) -> None:
        new.control_seen = tag

    try:
        head.swap(note)
    except Fenced:
        return None
    return word.partition(" ")[0], tag  # without the random number of ``write_request``


def write_request(url: str, word: str) -> None:
    """Ask the run at ``url`` to ``stop`` or to ``save``.

    Raises ``UserError`` if there is no run, no process trains there, or the bucket cannot be written.
    """
    store = open_store(url)
    try:
        head = read_head(store)
        if head is None:
            raise UserError(f"there is no run in {url}; use run.dir={url.partition('/')[0]}//BUCKET/PATH of a run")
        if head.state != "held":  # the next start would follow the request
            raise UserError(f"no process is training in {url}, so there is nothing to {word}; see serried status {url}")
        # A random number makes the content of each request new, so that a request can be repeated.
        store.put(CONTROL, f"{word} {os.urandom(4).hex()}\n".encode())
    except StoreError as error:
        raise UserError(f"cannot write to {url}: {error}") from None


def rebuilt_head(store: Store) -> tuple[HeadContent, Expect | str]:
    """Return a head that names the complete checkpoints in ``store``, and the condition under which to write it.

    Raises:
        UserError: The head is intact or of a later version of serried, or there is no checkpoint.
        StoreError: The store does not answer.
    """
    found, is_intact = store.get(HEAD), False
    try:
        is_intact = found is not None and bool(HeadContent.parse(found[0], store.where(HEAD)))
    except NewerVersion:
        raise
    except UserError:
        pass  # the head is damaged, and rebuilt below
    if is_intact:
        raise UserError(f"{store.where(HEAD)} is intact, so there is nothing to repair; leave it")
    sizes: dict[str, dict[str, int]] = {}
    for listed in store.list(CHECKPOINTS):
        attempt, _, name = listed.key.removeprefix(f"{CHECKPOINTS}/").partition("/")
        if is_attempt(attempt):
            sizes.setdefault(attempt, {})[name] = listed.size_bytes
    newest: dict[int, Entry] = {}
    for attempt in sorted(sizes, key=epoch_of):
        if _is_complete(store, attempt, sizes[attempt]):
            step = int(attempt.split("-")[0])
            newest[step] = Entry(step, attempt, sum(sizes[attempt].values()))
    if not newest:
        raise UserError(f"there is no complete checkpoint in {store.url}; use run.dir=URL of a run")
    keys = [listed.key.split("/") for listed in store.list(RECORDS_PREFIX)]
    records = max((int(key[1]) for key in keys if key[1].isdecimal()), default=0)
    content = HeadContent(
        epoch=max(records, *map(epoch_of, sizes)), checkpoints=[newest[step] for step in sorted(newest)],
        records=records,
    )  # fmt: skip
    if (control := store.stat(CONTROL)) is not None:  # an old request, which must not stop the next start
        content.control_seen = control[1]
    return content, ABSENT if found is None else found[1]


def _is_complete(store: Store, attempt: str, sizes: Mapping[str, int]) -> bool:
    """Return whether the manifest of ``attempt`` exists, and all files that it lists have the listed sizes."""
    found = store.get(f"{CHECKPOINTS}/{attempt}/{MANIFEST}")
    if found is None:
        return False
    try:
        files = parse_json(found[0])["files"]
        return bool(files) and all(sizes.get(name) == record["size"] for name, record in files.items())
    except (NotPlainData, AttributeError, KeyError, TypeError):
        return False
