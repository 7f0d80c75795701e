"""Listing, download and upload of files in a bucket, as a process: ``python -m serried.records.bucket_files``.

A process that has used the bucket library must not fork, and a launcher or a user's program may fork at any time. So
``configs.bucket_paths`` runs this module in a separate interpreter. It reads one request from stdin and writes lines
of JSON to stdout: progress, then the answer or the error.
"""

import contextlib
import fcntl
import glob
import hashlib
import json
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, NamedTuple

from serried.configs.bucket_urls import check_bucket_url
from serried.configs.errors import UserError
from serried.configs.formats import size
from serried.records.files import machine
from serried.records.object_store import open_store
from serried.records.store import Conflict, Listed, Store, StoreError

_AT_ONCE = 16
"""Maximum number of concurrent requests."""
_PIECE_BYTES = 8 * 2**20
_SECONDS_PER_DAY = 86400.0


# listing --------------------------------------------------------------------------------------------------------------


def list_files(url: str, key: str) -> dict[str, Any]:
    """Return the objects that ``key=url`` names, which is an object, a folder or a glob, as plain data.

    The answer has the ``root`` URL, whether it is a ``folder``, the ``files`` as (name relative to the root, size in
    bytes, tag), sorted by name, and the ``state``, a hash of these. Hidden files are left out, as in a local folder.

    Raises ``UserError`` if there are none.
    """
    url = check_bucket_url(url, key)
    scheme, _, place = url.partition("://")
    bucket, *parts = place.split("/")
    fixed = next((number for number, part in enumerate(parts) if glob.has_magic(part)), None)
    root = url if fixed is None else f"{scheme}://{'/'.join([bucket, *parts[:fixed]])}"
    below = open_store(root, key)
    if fixed is None and parts:
        parent = open_store(url.rpartition("/")[0], key)
        if (found := parent.stat(parts[-1])) is not None:
            return _answer(parent.url, [Listed(parts[-1], *found)], is_folder=False)
    objects = below.list("")
    if fixed is None:
        files = [entry for entry in objects if is_visible(entry.key)]
    else:
        files = [entry for entry in objects if _is_match(entry.key.split("/"), parts[fixed:])]
    if not files and objects and fixed is not None:
        some = ", ".join(entry.key for entry in objects[:5])
        raise UserError(f"{key}={url} matches no object; {root} has {some}, ...; ** matches subfolders")
    if not files:
        raise UserError(f"{key}={url} has no objects; list what is there: {_command(root.rpartition('/')[0])}")
    return _answer(root, files, is_folder=fixed is None)


def is_visible(name: str) -> bool:
    """Return whether a file is read from a folder: neither it nor a folder that contains it is hidden, or a cache."""
    return not any(part.startswith(".") or part == "__pycache__" for part in name.split("/"))


def _command(url: str) -> str:
    scheme = url.partition(":")[0]
    return {"s3": f"aws s3 ls {url}/", "gs": f"gcloud storage ls {url}/"}.get(scheme, f"az storage blob list ({url})")


def _is_match(parts: Sequence[str], patterns: Sequence[str]) -> bool:
    """Return whether a glob matches a name, by the rules of ``glob``: ``**`` stands for any number of folders, and
    hidden names match only a pattern that begins with a dot."""
    if not patterns:
        return not parts
    first, *rest = patterns
    if first == "**":
        hidden = next((number for number, part in enumerate(parts) if part.startswith(".")), len(parts))
        return any(_is_match(parts[number:], rest or ["*"]) for number in range(hidden + 1))
    if not parts or (parts[0].startswith(".") and not first.startswith(".")):
        return False
    return fnmatchcase(parts[0], first) and _is_match(parts[1:], rest)


def _answer(root: str, objects: Sequence[Listed], *, is_folder: bool) -> dict[str, Any]:
    names = {entry.key for entry in objects}
    folders = {name[:at] for name in names for at in range(len(name)) if name[at] == "/"}
    # Cloud consoles represent an empty folder by an empty object with its name.
    files: list[tuple[str, int, str]] = sorted(
        (entry.key, entry.size_bytes, entry.tag) for entry in objects if entry.size_bytes or entry.key not in folders
    )
    for name, _, _ in files:
        parts = name.split("/")
        if (
            name in folders
            or "\0" in name
            or any(part in ("", ".", "..") or len(part.encode()) > 255 for part in parts)
        ):
            reason = "it is also the name of a folder" if name in folders else "it is not the path of a file"
            raise UserError(f"the object {root}/{name!s} cannot be stored as a file: {reason}; rename it")
    state = hashlib.sha256(json.dumps(files).encode()).hexdigest()
    return {"root": root, "folder": is_folder, "files": files, "state": state}


# download -------------------------------------------------------------------------------------------------------------


class ObjectCopy(NamedTuple):
    """An object, and the file that it is downloaded to."""

    name: str
    size_bytes: int
    tag: str
    path: Path


def download(root: str, files: Sequence[tuple[str, int, str]], state: str, cache: Path, key: str) -> Path:
    """Store ``files`` of a listing with ``state`` in the folder ``cache``, and return the folder that contains them.

    Each content is stored once, under a name made from its tag; the folder links to it. A file has its final name
    only when it is complete, so an interrupted download continues with the missing files.

    Raises ``UserError`` if an object has changed since it was listed, or there is not enough space.
    """
    own = cache / hashlib.sha256(root.encode()).hexdigest()[:24]
    folder = own / state[:24]
    contents = own / "contents"
    contents.mkdir(parents=True, exist_ok=True)
    with (own / ".lock").open("wb") as lock:
        _lock(lock.fileno())
        wanted = [ObjectCopy(*file, contents / _content_name(*file)) for file in files]
        missing = [file for file in wanted if not file.path.exists()]
        check_space(own, sum(file.size_bytes for file in missing), root, key)
        for path in contents.glob(f".*.{machine()}.*.tmp"):  # left by a process that was killed
            path.unlink(missing_ok=True)
        for file in wanted:
            if file not in missing:
                os.utime(file.path)  # see ``remove_unused``
        if missing:
            download_objects(open_store(root, key), missing, _show)
        for file in wanted:
            _link(folder / file.name, file.path)
    return folder


def remove_unused(cache: Path, days: float) -> tuple[int, int]:
    """Remove the files in the folder ``cache`` of downloads that no start has used for ``days``. Returns their number
    and their size in bytes.

    Raises ``OSError`` if a file cannot be removed.
    """
    count = size_bytes = 0
    before = time.time() - days * _SECONDS_PER_DAY
    for own in sorted(path.parent for path in cache.glob("*/contents")):
        with (own / ".lock").open("wb") as lock:
            _lock(lock.fileno())
            for path in sorted((own / "contents").iterdir()):
                stat = path.stat()
                if max(stat.st_mtime, stat.st_atime) < before:
                    path.unlink()
                    count, size_bytes = count + 1, size_bytes + stat.st_size
            for link in [path for path in own.rglob("*") if path.is_symlink() and not path.exists()]:
                link.unlink()
    return count, size_bytes


def _content_name(name: str, size_bytes: int, tag: str) -> str:
    return hashlib.sha256(json.dumps([name, size_bytes, tag]).encode()).hexdigest()[:32]


def _lock(descriptor: int) -> None:
    with contextlib.suppress(OSError):  # without locks, two processes may store the same content
        fcntl.flock(descriptor, fcntl.LOCK_EX)


def _link(path: Path, content: Path) -> None:
    if path.exists():
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name[:200]}.{os.urandom(6).hex()}.tmp")
    temporary.symlink_to(content.absolute())
    temporary.replace(path)


def check_space(folder: Path, needed_bytes: int, root: str, key: str) -> None:
    """Raise ``UserError`` if the disk of ``folder`` has less than ``needed_bytes`` for objects of ``key=root``."""
    free_bytes = shutil.disk_usage(folder).free
    if needed_bytes > free_bytes:
        other = {
            "data.path": " or data.cache_dir=/LARGER/DISK, read tokens without a copy (data.fetch=ranges), or name "
            "fewer files",
            "data.cache_dir": ", or read tokens without a copy: data.fetch=ranges",
        }.get(key, ", or name fewer files")
        raise UserError(
            f"{key}={root}: {size(needed_bytes)} to download, but only {size(free_bytes)} are free in {folder}; choose "
            f"another disk with SERRIED_SCRATCH=/LARGER/DISK{other}"
        )


def download_objects(store: Store, files: Sequence[ObjectCopy], show: Callable[[int, int], None] | None = None) -> None:
    """Download each file in pieces, several pieces at a time, and give it its name when all its pieces are there.

    ``show`` is called with the downloaded bytes and their total.
    """
    total = sum(file.size_bytes for file in files)
    done, lock = 0, threading.Lock()
    left: dict[Path, int] = {}

    def fetch(wanted: ObjectCopy, temporary: Path, start: int, length: int) -> None:
        nonlocal done
        view = memoryview(bytearray(length))
        try:
            store.read_into(wanted.name, start, view, wanted.tag)
        except Conflict:
            raise UserError(
                f"{store.where(wanted.name)} changed while it was being read; run again when nothing writes to it"
            ) from None
        with temporary.open("r+b") as file:  # on a disk that is almost full, os.pwrite may write less than this
            file.seek(start)
            file.write(view)
        with lock:
            left[temporary] -= 1
            is_complete = not left[temporary]
            done += length
            if show is not None:
                show(done, total)
        if is_complete:
            with temporary.open("r+b") as file:
                os.fsync(file.fileno())  # after a power loss, a file with its final name is complete
            temporary.replace(wanted.path)

    def pieces() -> Iterator[tuple[ObjectCopy, Path, int, int]]:
        for file in files:
            temporary = file.path.with_name(f".{file.path.name}.{machine()}.{os.urandom(6).hex()}.tmp")
            with temporary.open("wb") as stream:
                stream.truncate(file.size_bytes)
            starts = range(0, file.size_bytes, _PIECE_BYTES) if file.size_bytes else range(0)
            left[temporary] = len(starts)
            if not starts:
                temporary.replace(file.path)
            for start in starts:
                yield file, temporary, start, min(_PIECE_BYTES, file.size_bytes - start)

    with ThreadPoolExecutor(_AT_ONCE) as pool:
        _bounded(pool, fetch, pieces())


def _bounded(pool: ThreadPoolExecutor, function: Any, arguments: Iterator[tuple[Any, ...]]) -> None:
    """Call ``function`` on the threads of ``pool`` with each of ``arguments``, which are generated when needed. Raises
    the first error."""
    waiting: set[Future[None]] = set()
    try:
        for values in arguments:
            waiting.add(pool.submit(function, *values))
            if len(waiting) >= 2 * _AT_ONCE:
                finished, waiting = wait(waiting, return_when="FIRST_COMPLETED")
                for future in finished:
                    future.result()
        for future in waiting:
            future.result()
    except BaseException:
        pool.shutdown(cancel_futures=True)
        raise


# upload ---------------------------------------------------------------------------------------------------------------


def upload(path: Path, url: str, key: str) -> int:
    """Write the file ``path``, or all files in the folder ``path``, to ``key=url``. Returns the number of objects.

    Existing objects are replaced; see ``refuse_taken``.
    """
    url = check_bucket_url(url, key)
    root, _, name = url.rpartition("/")
    store = open_store(root, key)
    if path.is_dir():
        files = {
            f"{name}/{file.relative_to(path).as_posix()}": file for file in sorted(path.rglob("*")) if file.is_file()
        }
    else:
        files = {name: path}
    total = sum(file.stat().st_size for file in files.values())
    done = 0
    lock = threading.Lock()

    def count(size_bytes: int) -> None:
        nonlocal done
        with lock:
            done += size_bytes
            _show(done, total)

    def send(key_of_object: str, file: Path) -> None:
        send_file(store, key_of_object, file, count)

    with ThreadPoolExecutor(4) as pool:  # each writer sends several parts at a time
        _bounded(pool, send, iter(files.items()))
    return len(files)


def send_file(store: Store, key: str, file: Path, count: Callable[[int], None] | None = None) -> None:
    """Write the content of ``file`` to the object ``key``. ``count`` is called with the size of each piece.

    Raises ``StoreError`` or ``OSError`` if that fails.
    """
    writer = store.writer(key)
    try:
        with file.open("rb") as stream:
            while piece := stream.read(_PIECE_BYTES):
                writer.write(memoryview(piece))
                if count is not None:
                    count(len(piece))
    except BaseException:
        writer.abort()
        raise
    writer.finish()


def refuse_taken(url: str, key: str) -> None:
    """Raise ``UserError`` if there is an object at ``key=url`` or below it."""
    url = check_bucket_url(url, key)
    root, _, name = url.rpartition("/")
    store = open_store(root, key)
    if store.stat(name) is not None or store.list(name):
        raise UserError(f"{key}={url} exists already; use another {key}, or remove it")


# the process ----------------------------------------------------------------------------------------------------------


def answer(request: dict[str, Any]) -> Any:
    """Return the answer to a request as plain data."""
    kind = request["do"]
    url = request["url"]
    key = request["key"]
    try:
        if kind == "list":
            return list_files(url, key)
        if kind == "download":
            return str(download(url, request["files"], request["state"], Path(request["cache"]), key))
        if kind == "upload":
            return upload(Path(request["path"]), url, key)
        assert kind == "refuse_taken"
        return refuse_taken(url, key)
    except StoreError as error:
        reason = str(error).partition(": ")[2] if str(error).startswith(url) else str(error)
        raise UserError(f"{key}={url}: {reason}") from None
    except OSError as error:
        raise UserError(f"{key}={url}: {error.filename or ''}: {error.strerror or error}") from None


def _show(done_bytes: int, total_bytes: int) -> None:
    write_line({"done": done_bytes, "total": total_bytes})


def write_line(line: dict[str, Any]) -> None:
    """Write a line of JSON to stdout."""
    sys.stdout.write(json.dumps(line) + "\n")
    sys.stdout.flush()


def end_with_parent() -> None:
    """Read the request's end from stdin in the background, and end this process when its parent has ended."""

    def watch() -> None:
        sys.stdin.read()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def main() -> int:
    request = json.loads(sys.stdin.readline())
    end_with_parent()
    try:
        write_line({"answer": answer(request)})
    except UserError as error:
        write_line({"errors": [str(error)], "head": ""})
    return 0


if __name__ == "__main__":
    sys.exit(main())
