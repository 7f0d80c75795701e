"""Files in a bucket, read through a cache on this node: ``s3://BUCKET/PATH`` as the value of a key that names files.

A separate process (``serried.records.bucket_files``) lists and reads the bucket, because a process that has
used the bucket library must not fork. A URL is listed once per composed config, so all its files are of one version.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import serried
from serried.configs.bucket_urls import check_bucket_url, is_bucket_url
from serried.configs.errors import UserError
from serried.configs.formats import is_terminal, size

_MODULE = "serried.records.bucket_files"
_DOWNLOADS = "downloads"
_EVERY_SECONDS, _EVERY_SECONDS_LIVE = 15.0, 0.5


class _Settings:
    """Settings of this process."""

    folder: Path | None = None
    """Folder of the cache; None: the default."""
    show: Callable[[str], None] | None = None
    """Function that shows progress."""
    answer: Callable[[dict[str, Any]], Any] | None = None
    """Function that answers requests in a process that may use the bucket itself; None: ask another process."""

    def __init__(self) -> None:
        self.listings: dict[str, BucketFiles] = {}
        self.downloaded: dict[str, str] = {}
        """URLs by the folder of the cache that they were downloaded to."""


_settings = _Settings()


@dataclass(frozen=True)
class BucketFiles:
    """Objects at a URL, all or some of which can be downloaded."""

    url: str
    """URL that the names are relative to."""
    key: str
    """Config key that was set to the URL, for messages."""
    is_folder: bool
    """Whether the URL named a folder, not an object or a glob."""
    files: dict[str, tuple[int, str]]
    """Size in bytes and tag by name, in the order of the names."""
    state: str
    """Hash of names, sizes and tags."""

    def fetch(self, names: Collection[str] | None = None) -> Path:
        """Download the files ``names``, by default all, and return the folder that contains them. Files that are in the
        cache are not read again. Raises ``UserError`` if one has changed since it was listed."""
        wanted = [(name, *self.files[name]) for name in (self.files if names is None else names)]
        request = {"files": wanted, "state": self.state, "cache": str(_settings.folder or download_cache(None))}
        folder = _ask("download", self.url, self.key, **request)
        _settings.downloaded[folder] = self.url
        return Path(folder)


def bucket_files(url: str, key: str, *, again: bool = False) -> BucketFiles:
    """List the objects that ``key=url`` names: an object, a folder or a glob. ``again``: also if this process has
    listed them before.

    Raises ``UserError`` if there are none, the URL is invalid, or the bucket cannot be read.
    """
    url = check_bucket_url(url, key)
    if again or url not in _settings.listings:
        found = _ask("list", url, key)
        files = {name: (size_bytes, tag) for name, size_bytes, tag in found["files"]}
        _settings.listings[url] = BucketFiles(found["root"], key, found["folder"], files, found["state"])
    return _settings.listings[url]


def forget_listings() -> None:
    """Forget all listings, so that buckets are listed again. Call this at the start of a command or run."""
    _settings.listings.clear()


def local_path(path: str, key: str, *patterns: str) -> str:
    """Return ``path``; if it is a URL of a bucket, download it and return its path in this node's cache.

    ``patterns``: names of the files of a folder to download, such as ``*.json``; by default all, at any depth.
    """
    if not is_bucket_url(path):
        return path
    found = bucket_files(path, key)
    if not found.is_folder and len(found.files) == 1:
        (name,) = found.files
        return str(found.fetch() / name)
    names = [name for name in found.files if not patterns or any(_matches(name, pattern) for pattern in patterns)]
    return str(found.fetch(names))


def note_download(folder: Path, url: str) -> None:
    """Make messages show ``url`` in place of the path ``folder``."""
    _settings.downloaded[str(folder)] = url


def with_urls(text: str) -> str:
    """Return a message with the URLs of objects in place of the paths of their copies in the cache."""
    for folder, url in _settings.downloaded.items():
        text = text.replace(folder, url)
    return text


def _matches(name: str, pattern: str) -> bool:
    """Return whether ``name`` matches ``pattern``. Both are relative to the same folder."""
    return name.count("/") == pattern.count("/") and fnmatchcase(name, pattern)


@contextmanager
def downloads(folder: Path | None, show: Callable[[str], None] | None) -> Iterator[None]:
    """Context manager within which files are downloaded into ``folder``, if it is given, and progress is shown by
    ``show``."""
    before = _settings.folder, _settings.show
    _settings.folder, _settings.show = folder and download_cache(folder), show
    try:
        yield
    finally:
        _settings.folder, _settings.show = before


def answer_here(answer: Callable[[dict[str, Any]], Any]) -> None:
    """Answer requests in this process, which never forks, by ``serried.records.bucket_files.answer``."""
    _settings.answer = answer


@contextmanager
def output_path(out: str, *, replaces: bool = False) -> Iterator[Path]:
    """Yield the path that ``out=`` names. For a URL of a bucket it is a temporary path: the file or folder there is
    uploaded at the end of the block, after other files that were written next to it.

    ``replaces``: existing objects may be replaced. Raises ``UserError`` if there are objects at the URL, or it cannot
    be written.
    """
    if not is_bucket_url(out):
        yield Path(out)
        return
    url, key = check_bucket_url(out, "out"), "out"
    root, _, name = url.rpartition("/")
    if root.endswith(":/"):
        raise UserError(f"{key}={url} names a whole bucket; name a file or folder in it: {key}={url}/NAME")
    if not replaces:
        _ask("refuse_taken", url, key)
    with TemporaryDirectory(prefix="serried-", dir=os.environ.get("SERRIED_SCRATCH")) as folder:
        _settings.downloaded[folder] = root
        try:
            yield Path(folder) / name
            written = sorted(Path(folder).iterdir(), key=lambda path: path.name == name)  # ``name`` comes last
            for path in written if not replaces else ():
                if path.name != name:
                    _ask("refuse_taken", f"{root}/{path.name}", key)
            for path in written:
                _ask("upload", f"{root}/{path.name}", key, path=str(path))
        except UserError as error:
            raise UserError(*(with_urls(str(line)) for line in error.args), head=with_urls(error.head)) from error
        finally:
            del _settings.downloaded[folder]


def download_cache(folder: Path | None) -> Path:
    """Return the folder of the downloads of this node. ``folder``: ``data.cache_dir``, if it is set to a folder."""
    if folder is not None:
        return folder / _DOWNLOADS
    if scratch := os.environ.get("SERRIED_SCRATCH"):
        return Path(scratch).absolute() / _DOWNLOADS
    base = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return (base if base.is_absolute() else Path.home() / ".cache") / "serried" / _DOWNLOADS


def _ask(kind: str, url: str, key: str, **more: Any) -> Any:
    """Send a request to ``serried.records.bucket_files``, show its progress, and return its answer."""

    def show(line: Mapping[str, Any]) -> None:
        if _settings.show is not None:
            _settings.show(f"{kind} {url}: {size(line['done'])} of {size(line['total'])}")

    request = {"do": kind, "url": url, "key": key, **more}
    return ask_process(_MODULE, request, show) if _settings.answer is None else _settings.answer(request)


def _message(line: str) -> dict[str, Any] | None:
    with suppress(ValueError):
        found = json.loads(line)
        if isinstance(found, dict) and {*found} & {"answer", "errors", "show", "done"}:
            return found
    return None


def ask_process(module: str, request: Mapping[str, Any], show: Callable[[Mapping[str, Any]], None]) -> Any:
    """Run ``module`` in a new interpreter with a request of plain data, and return its answer.

    ``show`` is called with its progress lines, some of which are skipped if they follow each other quickly. Raises
    ``UserError`` if the process reported one, or was killed.
    """
    shown, every = time.monotonic(), _EVERY_SECONDS_LIVE if is_terminal() else _EVERY_SECONDS
    root = str(Path(serried.__file__).parent.parent)  # the process must find serried from any folder
    others = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    with subprocess.Popen(
        [sys.executable, "-m", module],
        stdin=subprocess.PIPE,  # closes when this process ends, however it ends
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([root, *others])},
        encoding="utf-8",
        start_new_session=True,  # a signal to this process group is handled here
    ) as process:
        assert process.stdin is not None and process.stdout is not None
        try:
            process.stdin.write(json.dumps(request) + "\n")
            process.stdin.flush()
            for line in process.stdout:
                if (found := _message(line)) is None:  # printed by a library
                    print(line, end="", file=sys.stderr)
                    continue
                if "answer" in found:
                    return found["answer"]
                if "errors" in found:
                    raise UserError(*found["errors"], head=found["head"])
                if "show" in found or time.monotonic() - shown >= every:
                    shown = time.monotonic()
                    show(found)
        except BrokenPipeError:
            pass
        except BaseException:
            process.kill()
            raise
        finally:
            with suppress(BrokenPipeError):
                process.stdin.close()
    raise UserError(f"the process {module}, which uses the bucket, ended with code {process.returncode}; run again")
