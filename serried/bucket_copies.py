"""Local copies of runs in a bucket, which the commands read like run folders."""

import fcntl
import shutil
import sys
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from serried.configs.bucket_urls import check_bucket_url, is_bucket_url
from serried.configs.errors import UserError
from serried.configs.formats import size
from serried.configs.schema.fields import parse_count, scratch_folder
from serried.records.files import make_scratch
from serried.records.head import HEAD, Entry, HeadContent, read_head
from serried.records.object_store import open_store
from serried.records.record_upload import download_records, download_summary
from serried.records.store import Store, StoreError

_READ_A_MODEL = ("export", "merge", "generate", "chat", "evaluate")
"""Commands that read a checkpoint."""
_READ_ALL_RECORDS = ("report", "send")
_READ_A_SUMMARY = ("status", "plan")
_REQUESTS_AT_ONCE, _RUNS_AT_ONCE = 16, 8


def with_local_copies(command: str, words: Sequence[str]) -> list[str]:
    """Return the arguments of ``command`` with a local copy in place of each run in a bucket.

    Raises ``UserError`` if there is no such run, or the bucket cannot be read.
    """
    if command not in (*_READ_A_MODEL, *_READ_ALL_RECORDS, *_READ_A_SUMMARY):
        return [*words]
    steps = [word.partition("=")[2] for word in words if word.startswith("checkpoint=")]
    replaced, has_copy = [], False
    for word in words:
        key, _, url = word.rpartition("run.dir=") if command != "plan" else ("", "", word)
        if not key and is_bucket_url(url):
            has_copy, before = True, word.removesuffix(url)
            url = check_bucket_url(url, "run.dir")
            runs = runs_at(url) if command == "status" else [url]
            replaced += [f"{before}{copy}" for copy in _copies(command, runs, steps[-1:])]
        else:
            replaced.append(word)
    if has_copy and command == "report" and not any(word.startswith("out=") for word in words):
        replaced.append("out=report.html")  # not in the copy
    return replaced


def _copies(command: str, runs: Sequence[str], steps: Sequence[str]) -> list[Path]:
    """Copy ``runs``. Those that cannot be read are reported and left out. Raises ``UserError`` if none can be read."""

    def copy(run: str) -> Path | UserError:
        try:
            return _copy(command, run, steps)
        except UserError as error:
            return error

    with ThreadPoolExecutor(_RUNS_AT_ONCE) as pool:
        answers = [*pool.map(copy, runs)]
    errors = [answer for answer in answers if isinstance(answer, UserError)]
    for error in errors:
        if len(errors) == len(runs):
            raise error
        print(f"WARNING    {error}", file=sys.stderr, flush=True)
    return [answer for answer in answers if not isinstance(answer, UserError)]


def runs_at(url: str) -> list[str]:
    """Return the URL of the run at ``url``, or of all runs directly below it.

    Raises ``UserError`` if there is none, or the bucket cannot be read.
    """
    store = open_store(url)
    try:
        if store.stat(HEAD) is not None:
            return [url]
        folders = store.folders()
        with ThreadPoolExecutor(_REQUESTS_AT_ONCE) as pool:
            are_runs = pool.map(lambda name: store.stat(f"{name}/{HEAD}") is not None, folders)
        runs = [f"{url}/{name}" for name, is_run in zip(folders, are_runs, strict=True) if is_run]
    except StoreError as error:
        raise UserError(f"cannot use run.dir={url}: {error}") from None
    if not runs:
        raise UserError(
            f"there is no run in {url}, nor in a folder directly below it; use run.dir=URL of a run, the folder that "
            "contains head.json"
        )
    return runs


def copy_with_checkpoint(url: str) -> Path:
    """Return a local copy of the run at ``url`` with its newest checkpoint. Raises ``UserError`` if there is none."""
    return _copy("export", check_bucket_url(url, "path"), [])


def _copy(command: str, url: str, steps: Sequence[str]) -> Path:
    folder = scratch_folder(url).with_name(f"{scratch_folder(url).name}-copy")
    with opened(url) as (store, head), _locked(folder):
        if command in _READ_ALL_RECORDS:
            download_records(store, head.records, folder)
        else:
            download_summary(store, head.records, folder)
        if command in _READ_A_MODEL:
            _download_checkpoints(store, head, chosen_entries(url, head, steps), folder / "checkpoints")
    return folder


@contextmanager
def opened(url: str) -> Iterator[tuple[Store, HeadContent]]:
    """Yield the bucket's folder at ``url`` and the head of the run there. An error of the store becomes a
    ``UserError``.

    Raises ``UserError`` if there is no run.
    """
    store = open_store(url)
    try:
        head = read_head(store)
        if head is None:
            raise UserError(f"there is no run in {url}; use run.dir=URL of a run, the folder that contains head.json")
        yield store, head
    except StoreError as error:
        raise UserError(f"cannot use run.dir={url}: {error}") from None


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Create ``folder``, and lock it against other commands and ranks on this node."""
    make_scratch(folder)
    with folder.with_name(f"{folder.name}.lock").open("wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def chosen_entries(url: str, head: HeadContent, steps: Sequence[str]) -> list[Entry]:
    """Return the checkpoints with the comma-separated ``steps``, by default the newest one.

    Raises ``UserError`` if there is no such checkpoint.
    """
    if not head.checkpoints:
        raise UserError(f"the run in {url} has no checkpoint yet; use run.dir=OTHER")
    if not steps:
        return head.checkpoints[-1:]
    saved = {entry.step: entry for entry in head.checkpoints}
    numbers = {typed: parse_count(typed) for typed in steps[0].split(",")}
    for typed, step in numbers.items():
        if step not in saved:
            use = " or ".join(f"checkpoint={other}" for other in [*saved][-4:])
            raise UserError(f"checkpoint={typed}: there is no checkpoint of step {typed} in {url}; use {use}")
    return [saved[step] for step in numbers.values()]


def _download_checkpoints(store: Store, head: HeadContent, entries: Sequence[Entry], folder: Path) -> None:
    """Download ``entries`` into ``folder``, unless they are there, and remove copies that the run no longer has."""
    folder.mkdir(exist_ok=True)
    for marker in folder.glob(".*.attempt"):
        if marker.read_text() not in head.named():
            shutil.rmtree(folder / marker.name[1:].removesuffix(".attempt"), ignore_errors=True)
            marker.unlink()
    for entry in entries:
        download_checkpoint(store, entry, folder)


def download_checkpoint(store: Store, entry: Entry, folder: Path) -> None:
    """Download one checkpoint into ``folder``, under the name that it has in a run folder, unless it is there.

    Raises ``UserError`` if it is damaged or does not fit on the disk, or the store does not answer.
    """
    from serried.trainer.checkpoint.bucket_checkpoints import download
    from serried.trainer.checkpoint.retention import folder_name

    path = folder / folder_name(entry.step)
    marker = folder / f".{path.name}.attempt"
    if path.is_dir() and marker.exists() and marker.read_text() == entry.attempt:
        return
    free = shutil.disk_usage(folder).free
    if free < entry.size_bytes:
        raise UserError(
            f"{store.where(entry.prefix)} needs {size(entry.size_bytes)}, but only {size(free)} are free in {folder}; "
            "set SERRIED_SCRATCH to a folder on another disk"
        )
    print(f"downloads  {store.where(entry.prefix)}, {size(entry.size_bytes)}", file=sys.stderr, flush=True)
    download(store, entry, folder)
    marker.write_text(entry.attempt)


def kept_epochs(head: HeadContent) -> Collection[int]:
    """Return the epochs whose records belong to the run, or to one that was set aside."""
    return {head.records, *(run.records for run in head.earlier)}
