"""Objects in a bucket of Amazon S3, Google Cloud Storage, Azure Blob Storage, or a server with the interface of S3.

A process that has used a store must not fork: the child would hang at its first call.
"""

import os
import queue
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

from serried.configs.bucket_urls import check_bucket_url, credentials_of
from serried.configs.errors import UserError
from serried.records.store import ANY, Conflict, Expect, Listed, Store, StoreError, Unclear

PART_BYTES = 16 * 2**20
_SMALL_BYTES = 2**20
_SMALL_SECONDS = 5.0
"""Time limit of a request of at most ``_SMALL_BYTES``."""
_PART_SECONDS = 20.0
"""Time limit of a larger request."""
_CONNECT_SECONDS = 5.0
_RETRY_SECONDS = 180.0
_FIRST_WAIT_SECONDS = 0.5
_READS = 5
"""Number of attempts of a read: the library does not repeat every read whose body is cut off."""
_PARTS_AT_ONCE = 6

_REFUSALS = (
    "NoSuchBucket", "AccessDenied", "ExpiredToken", "InvalidAccessKeyId", "SignatureDoesNotMatch",
    "RequestTimeTooSkewed",
)  # fmt: skip
"""Error codes of S3 for requests that had no effect, and would fail again."""

_Read = TypeVar("_Read")


def open_store(url: str, key: str = "run.dir", *, retry_seconds: float = _RETRY_SECONDS) -> Store:
    """Return the folder in a bucket that ``key=url`` sets. No request is sent.

    Args:
        retry_seconds: A request that fails is repeated for this long.

    Raises:
        UserError: The URL is invalid, obstore is not installed, or there are no credentials.
    """
    url = check_bucket_url(url, key)
    try:
        import obstore  # noqa: F401
    except ImportError:
        raise UserError(f"{key}={url} needs obstore; pip install 'serried[cloud]'") from None
    _refuse_plain_http(url, key)
    if url.startswith("s3:") and not _has_aws_credentials():
        raise UserError(
            f"no credentials for {key}={url}; set {credentials_of(url)}, with the AWS CLI by "
            'eval "$(aws configure export-credentials --format env)", or use an instance or a service account with a '
            "role for this bucket"
        )
    return ObjectStore(url, retry_seconds=retry_seconds)


def s3_endpoint() -> str:
    """Return the address of the server with the interface of S3; empty for Amazon's."""
    return os.environ.get("AWS_ENDPOINT_URL") or os.environ.get("AWS_ENDPOINT") or ""


def _is_loopback(endpoint: str) -> bool:
    return urlsplit(endpoint).hostname in ("127.0.0.1", "::1", "localhost")


def _refuse_plain_http(url: str, key: str) -> None:
    endpoint = s3_endpoint() if url.startswith("s3:") else ""
    is_allowed = os.environ.get("AWS_ALLOW_HTTP", "").lower() == "true"
    if endpoint.startswith("http:") and not _is_loopback(endpoint) and not is_allowed:
        raise UserError(
            f"{key}={url}: AWS_ENDPOINT_URL={endpoint} is not encrypted; use https://..., or AWS_ALLOW_HTTP=true"
        )


def _has_aws_credentials() -> bool:
    named = (
        "AWS_ACCESS_KEY_ID", "AWS_WEB_IDENTITY_TOKEN_FILE", "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI",
        "AWS_CONTAINER_CREDENTIALS_FULL_URI", "AWS_SKIP_SIGNATURE", "AWS_METADATA_ENDPOINT",
    )  # fmt: skip
    return any(os.environ.get(name) for name in named) or _is_amazon_instance()


def _is_amazon_instance() -> bool:
    """Return whether this may be an instance with a role. Elsewhere the library would wait for minutes."""
    try:
        vendor = Path("/sys/class/dmi/id/sys_vendor").read_text("utf-8")
    except OSError:
        return False
    return vendor.startswith(("Amazon", "Xen"))


class ObjectStore:
    """A folder in a bucket, through obstore."""

    def __init__(self, url: str, *, retry_seconds: float = _RETRY_SECONDS, part_bytes: int = PART_BYTES) -> None:
        import obstore

        self.url, self.part_bytes = url, part_bytes
        self.obstore: Any = obstore
        self._retry_seconds = retry_seconds
        self._is_google = url.startswith("gs:")
        self._small = self._open(_SMALL_SECONDS)
        self.large = self._open(_PART_SECONDS)

    def _open(self, seconds: float) -> Any:
        import obstore.store

        client: dict[str, Any] = {
            "timeout": timedelta(seconds=seconds), "connect_timeout": timedelta(seconds=_CONNECT_SECONDS),
        }  # fmt: skip
        options: dict[str, Any] = {}
        if self.url.startswith("s3:"):
            if s3_endpoint().startswith("http:"):
                client["allow_http"] = True
            else:
                options["unsigned_payload"] = True  # encryption protects the content, and hashing it costs a core
        # The library's defaults give up after 3 seconds of "slow down".
        retries = {
            "max_retries": 1000, "retry_timeout": timedelta(seconds=self._retry_seconds),
            "backoff": {
                "init_backoff": timedelta(seconds=_FIRST_WAIT_SECONDS), "max_backoff": timedelta(seconds=15), "base": 3,
            },
        }  # fmt: skip
        from_url: Any = obstore.store.from_url
        try:
            return from_url(self.url, client_options=client, retry_config=retries, **options)
        except Exception as error:
            raise UserError(f"cannot use {self.url}: {_reason(error, self.url)}") from None

    def get(self, key: str) -> tuple[bytes, str] | None:
        def read() -> tuple[bytes, str]:
            answer = self.obstore.get(self._small, key)
            return bytes(answer.bytes()), self._tag(answer.meta)

        return self._found(key, read)

    def stat(self, key: str) -> tuple[int, str] | None:
        def read() -> tuple[int, str]:
            meta = self.obstore.head(self._small, key)
            return meta["size"], self._tag(meta)

        return self._found(key, read)

    def read_into(self, key: str, offset: int, view: memoryview, tag: str | None = None) -> None:
        view = view.cast("B")
        if not len(view):
            return
        options: dict[str, Any] = {"range": (offset, offset + len(view))}
        if tag is not None:
            options["if_match"] = tag.partition("|")[0]

        def read() -> memoryview:
            store = self._small if len(view) <= _SMALL_BYTES else self.large
            return memoryview(self.obstore.get(store, key, options=options).bytes())

        found = self._found(key, read)
        if found is None:
            raise StoreError(f"{self.where(key)} does not exist")
        if len(found) != len(view):
            raise StoreError(f"{self.where(key)} has {len(found)} bytes instead of {len(view)} at byte {offset}")
        view[:] = found

    def put(self, key: str, content: bytes, expect: Expect | str = ANY) -> str:
        from obstore.exceptions import (
            AlreadyExistsError,
            BaseError,
            PermissionDeniedError,
            PreconditionError,
            UnauthenticatedError,
        )

        mode: Any = "overwrite" if expect is ANY else "create"
        if isinstance(expect, str):
            e_tag, _, version = expect.partition("|")
            mode = {"e_tag": e_tag} | ({"version": version} if version else {})
        store = self._small if len(content) <= _SMALL_BYTES else self.large
        try:
            return self._tag(self.obstore.put(store, key, content, mode=mode, use_multipart=False))
        except (AlreadyExistsError, PreconditionError) as error:
            raise Conflict(f"{self.where(key)} is not as expected") from error
        except (BaseError, OSError) as error:
            is_refused = isinstance(error, PermissionDeniedError | UnauthenticatedError) or _is_refused(error)
            kind = StoreError if is_refused else Unclear
            raise kind(f"cannot write {self.where(key)}: {_reason(error, self.url)}") from None

    def writer(self, key: str) -> "ObjectUpload":
        return ObjectUpload(self, key)

    def list(self, prefix: str) -> list[Listed]:
        def read() -> list[Listed]:
            pages = self.obstore.list(self._small, prefix or None)
            return [Listed(meta["path"], meta["size"], self._tag(meta)) for page in pages for meta in page]

        return sorted(self._found(prefix, read) or [], key=lambda listed: listed.key)

    def delete(self, keys: Iterable[str]) -> None:
        keys = [*keys]

        def remove() -> None:
            if keys:
                self.obstore.delete(self._small, keys)

        self._found(keys[0] if keys else "", remove)

    def where(self, key: str) -> str:
        return f"{self.url}/{key}"

    def _found(self, key: str, call: Callable[[], _Read]) -> _Read | None:
        """Return what ``call`` returns, or None if there is no such object. Repeats it if the library does not."""
        from obstore.exceptions import BaseError, PermissionDeniedError, PreconditionError, UnauthenticatedError

        end = time.monotonic() + self._retry_seconds
        for tries_left in reversed(range(_READS)):
            try:
                return call()
            except FileNotFoundError as error:
                if "<Code>NoSuchBucket" in str(error):
                    raise StoreError(_reason(error, self.url)) from None
                return None
            except PreconditionError as error:
                raise Conflict(f"{self.where(key)} has changed") from error
            except (BaseError, OSError) as error:
                is_final = isinstance(error, PermissionDeniedError | UnauthenticatedError) or _is_refused(error)
                if is_final or not tries_left or time.monotonic() > end:
                    raise StoreError(f"{self.where(key)}: {_reason(error, self.url)}") from None
                time.sleep(0.2 * (_READS - tries_left))
        raise AssertionError

    def _tag(self, meta: Any) -> str:
        """Return the tag that a later write may expect. Google compares the version (generation), others the e_tag."""
        e_tag, version = meta.get("e_tag") or "", meta.get("version") or ""
        if e_tag.startswith("0x"):  # in listings of Azure
            e_tag = f'"{e_tag}"'
        return f"{e_tag}|{version}" if self._is_google else e_tag


def _is_refused(error: Exception) -> bool:
    """Return whether the store refused a request, so that it would refuse a repetition too."""
    code = re.search(r"<Code>(\w+)</Code>", str(error))
    return code is not None and code[1] in _REFUSALS


def _reason(error: Exception, url: str) -> str:
    """Return an error of the library in one line, without the debug output."""
    text, bucket = str(error), urlsplit(url).netloc
    code = re.search(r"<Code>(\w+)</Code>", text)
    found = code[1] if code else ""
    if found == "NoSuchBucket":
        return f"bucket {bucket} does not exist"
    if found in ("ExpiredToken", "ExpiredTokenException"):
        return "the credentials have expired"
    if found == "RequestTimeTooSkewed":
        return "the clock of this machine is more than 15 minutes off; set it"
    if found in ("InvalidAccessKeyId", "SignatureDoesNotMatch"):
        return f"the credentials are wrong ({found}); set {credentials_of(url)}"
    if found == "AccessDenied" or type(error).__name__ in ("PermissionDeniedError", "UnauthenticatedError"):
        return f"these credentials may not access it ({found or 'access denied'})"
    message = re.search(r"<Message>(.*?)</Message>", text, re.DOTALL)
    if message:
        return f"{found}: {message[1]}"
    return text.partition("\n")[0] or type(error).__name__


class ObjectUpload:
    """One object, written from front to back in parts. At most 8 parts are in memory.

    An object of less than one part is written with a single request.
    """

    def __init__(self, store: ObjectStore, key: str) -> None:
        self._store, self._key = store, key
        self._size_bytes = self._parts_taken = 0
        self._part = bytearray()
        self._queue: queue.Queue[bytearray | _Abort | None] = queue.Queue(1)
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._is_complete = False

    def write(self, content: memoryview) -> None:
        content, limit = memoryview(content).cast("B"), self._store.part_bytes
        self._size_bytes += len(content)
        while len(content):
            if self._error is not None:
                raise self._failure()
            taken = content[: limit - len(self._part)]
            self._part += taken
            content = content[len(taken) :]
            if len(self._part) == limit:
                self._send()

    def finish(self) -> None:
        if self._thread is None:
            try:
                self._store.put(self._key, bytes(self._part))
            except Unclear:
                if not self._is_there():
                    raise
            return
        if self._part:
            self._send()
        self._queue.put(None)
        self._thread.join()
        if self._error is not None and not self._is_there():
            raise self._failure()

    def abort(self) -> None:
        if self._thread is not None:
            self._queue.put(_Abort())
            self._queue.put(None)
            self._thread.join()

    def _is_there(self) -> bool:
        """Return whether the object is complete although an error was reported.

        If the answer to the last request was lost, its repetition finds no upload. No other process writes an object of
        this name, so its size decides.
        """
        found = self._store.stat(self._key)
        return found is not None and found[0] == self._size_bytes

    def _send(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="upload", daemon=True)
            self._thread.start()
        self._queue.put(self._part)
        self._queue.join()  # filling the next one meanwhile would be one more in memory
        self._part = bytearray()

    def _run(self) -> None:
        store = self._store
        try:
            for tries_left in reversed(range(_READS)):
                try:
                    store.obstore.put(
                        store.large, self._key, self._parts(), use_multipart=True, chunk_size=store.part_bytes,
                        max_concurrency=_PARTS_AT_ONCE,
                    )  # fmt: skip
                    break
                except Exception:
                    # The library does not repeat the request that starts an upload. Until then nothing is lost.
                    if self._parts_taken or not tries_left:
                        raise
        except BaseException as error:
            self._error = error
            while not self._is_complete and self._next() is not None:  # until ``finish`` or ``abort``
                pass

    def _parts(self) -> Iterator[bytearray]:
        while (part := self._next()) is not None:
            if isinstance(part, _Abort):
                raise _Aborted
            self._parts_taken += 1
            yield part
        self._is_complete = True

    def _next(self) -> "bytearray | _Abort | None":
        part = self._queue.get()
        self._queue.task_done()
        return part

    def _failure(self) -> StoreError:
        assert isinstance(self._error, Exception)
        return StoreError(f"cannot write {self._store.where(self._key)}: {_reason(self._error, self._store.url)}")


class _Abort:
    """Marks the end of the queue of parts when the upload is aborted."""


class _Aborted(Exception):
    """Raised in the library's iterator of parts, so that it removes the parts already sent."""
