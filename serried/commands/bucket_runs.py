"""Commands for runs in a bucket: ``serried stop``, ``save``, ``logs``, ``fetch``, ``repair`` and ``clean``."""

import shutil
import sys
from pathlib import Path

from serried.bucket_copies import chosen_entries, download_checkpoint, kept_epochs, opened
from serried.configs.bucket_paths import download_cache
from serried.configs.bucket_urls import check_bucket_url, is_bucket_url
from serried.configs.errors import EXIT_FINISHED, UserError
from serried.configs.formats import size
from serried.configs.subcommand_arguments import number, pairs
from serried.records.bucket_files import remove_unused
from serried.records.bucket_run import CONTROL, rebuilt_head, write_request
from serried.records.files import write_atomically
from serried.records.head import HEAD, Head
from serried.records.object_store import open_store
from serried.records.record_upload import download_records, records_folder, remove_records
from serried.records.status import read_status
from serried.records.store import Conflict, StoreError
from serried.runtime.process import say
from serried.saved import find_run, is_run


def stop(words: list[str]) -> int:
    """Ask a run to save and stop after its current step."""
    return _ask(words, "stop")


def save(words: list[str]) -> int:
    """Ask a run to save after its current step, and to continue."""
    return _ask(words, "save")


def _ask(words: list[str], word: str) -> int:
    given, _ = pairs(words, word, ("run.dir", "run.name"))
    if is_bucket_url(place := given.get("run.dir")):
        write_request(check_bucket_url(given["run.dir"], "run.dir"), word)
    else:
        folder = find_run(given, word, is_run)
        place, status = str(folder), read_status(folder)
        if status is not None and status.state != "running":  # the next start would follow the request
            raise UserError(f"no process is training in {place}, so there is nothing to {word}; see serried status")
        try:
            write_atomically(folder / CONTROL, f"{word}\n")
        except OSError as error:
            raise UserError(f"cannot write {folder / CONTROL}: {error.strerror}; use run.dir=FOLDER") from None
    then = "saves and stops" if word == "stop" else "saves and continues"
    return say(f"asked      {place}: if it is training, it {then} after its current step")


def logs(words: list[str]) -> int:
    """Print the log of one process of a run.

    rank         the process; 0 by default
    """
    given, _ = pairs(words, "logs", ("run.dir", "run.name", "rank"))
    rank = number(given, "rank", 0, 0, 10**6)
    name = f"log/rank-{rank}.log"
    if is_bucket_url(given.get("run.dir")):
        with opened(check_bucket_url(given["run.dir"], "run.dir")) as (store, head):
            where = f"{records_folder(head.records)}/{name}"
            found = store.get(where)
            where, text = store.where(where), None if found is None else found[0]
    else:
        path = find_run(given, "logs", is_run) / name
        where, text = str(path), path.read_bytes() if path.is_file() else None
    if text is None:
        raise UserError(f"there is no log {where}; use rank=N of a process of the run")
    sys.stdout.write(text.decode("utf-8", "replace"))
    return EXIT_FINISHED


def fetch(words: list[str]) -> int:
    """Download a run from a bucket into a new run folder.

    out          folder to write
    checkpoint   step of the checkpoint, several with commas, all, or none; the newest by default
    """
    given, _ = pairs(words, "fetch", ("run.dir", "out", "checkpoint"))
    url = _bucket_url(given, "fetch")
    if "out" not in given:
        raise UserError("out=FOLDER, the folder to write, is missing; e.g. out=runs/fetched")
    out, steps = Path(given["out"]), given.get("checkpoint", "")
    if out.exists():
        raise UserError(f"out={out} exists already; use another folder")
    with opened(url) as (store, head):
        entries = head.checkpoints if steps == "all" else []
        if steps not in ("all", "none") and (head.checkpoints or steps):
            entries = chosen_entries(url, head, [steps] if steps else [])
        try:
            (out / "checkpoints").mkdir(parents=True)
            for entry in entries:
                download_checkpoint(store, entry, out / "checkpoints")
            download_records(store, head.records, out)
        except BaseException as error:
            shutil.rmtree(out, ignore_errors=True)  # a part of a run; the same command starts again
            if not isinstance(error, OSError) or isinstance(error, StoreError):
                raise
            raise UserError(f"cannot write out={out}: {error.strerror}; use out=FOLDER on another disk") from None
    for marker in (out / "checkpoints").glob(".*.attempt"):
        marker.unlink()
    saved = ", ".join(str(entry.step) for entry in entries) or "none"
    return say(f"fetched    {url} to {out}; checkpoints: {saved}")


def repair(words: list[str]) -> int:
    """Rebuild the lost head.json of a run in a bucket from the manifests of its checkpoints.

    yes          true: do not ask
    """
    given, _ = pairs(words, "repair", ("run.dir", "yes"))
    url = _bucket_url(given, "repair")
    store = open_store(url)
    try:
        content, expected = rebuilt_head(store)
        steps = ", ".join(str(entry.step) for entry in content.checkpoints)
        _confirm(given, f"write {store.where(HEAD)} with the checkpoints {steps}? No process may train there.")
        store.put(HEAD, content.to_json(), expected)
    except Conflict:
        raise UserError(f"{store.where(HEAD)} has changed in the meantime; see serried status {url}") from None
    except StoreError as error:
        raise UserError(f"cannot use run.dir={url}: {error}") from None
    return say(f"repaired   {url}: checkpoints {steps}")


def clean(words: list[str]) -> int:
    """Remove remains of interrupted saves and earlier starts from a run in a bucket that is not training, or files in
    caches of data.

    downloads       days: instead, remove downloads of this node that no run has used for so long
    prepared        days: instead, remove unfinished data in data.cache_dir to which nothing was written for so long
    data.cache_dir  the cache, a folder or s3://BUCKET/PATH
    """
    given, _ = pairs(words, "clean", ("run.dir", "downloads", "prepared", "data.cache_dir"))
    if {"downloads", "prepared", "data.cache_dir"} & {*given}:
        return _clean_cache(given)
    url = _bucket_url(given, "clean")
    with opened(url) as (store, _):
        head = Head.claim(store, say=print)
        try:
            attempts = head.sweep()
            remove_records(store, head.epoch, kept_epochs(head.content))
        finally:
            head.release()
    return say(f"cleaned    {url}: removed {len(attempts)} incomplete checkpoints")


def _clean_cache(given: dict[str, str]) -> int:
    cache, is_clear = given.get("data.cache_dir"), len({"run.dir", "downloads", "prepared"} & {*given}) == 1
    if is_clear and "prepared" in given and is_bucket_url(cache):
        from serried.recipes.data.prepared.shared_cache import remove_unfinished

        days, cache = (
            number(given, "prepared", 7, 1, 10**4),
            check_bucket_url(given["data.cache_dir"], "data.cache_dir"),
        )
        try:
            removed = remove_unfinished(cache, days)
        except StoreError as error:
            raise UserError(f"cannot use data.cache_dir={cache}: {error}") from None
        return say(f"cleaned    {cache}: removed {removed} unfinished preparations")
    if not is_clear or "downloads" not in given or is_bucket_url(cache):
        raise UserError(
            "serried clean of a cache is serried clean downloads=DAYS, with data.cache_dir=FOLDER if it is there, or "
            "serried clean prepared=DAYS data.cache_dir=s3://BUCKET/PATH"
        )
    folder = download_cache(Path(cache) if cache else None)
    try:
        removed, size_bytes = remove_unused(folder, number(given, "downloads", 30, 1, 10**4))
    except OSError as error:
        raise UserError(f"cannot clean {error.filename}: {error.strerror}") from None
    return say(f"cleaned    {folder}: removed {removed} files, {size(size_bytes)}")


def _bucket_url(given: dict[str, str], command: str) -> str:
    url = given.get("run.dir", "")
    if not is_bucket_url(url):
        raise UserError(f"serried {command} needs a run in a bucket; e.g. serried {command} s3://BUCKET/runs/NAME")
    return check_bucket_url(url, "run.dir")


def _confirm(given: dict[str, str], question: str) -> None:
    if given.get("yes") == "true":
        return
    if not sys.stdin.isatty():
        raise UserError(f"{question} Add yes=true to confirm")
    if input(f"{question} [y/N] ").strip().lower() not in ("y", "yes"):
        raise UserError("nothing was changed")
