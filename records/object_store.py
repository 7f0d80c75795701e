"""Objects in a bucket of Amazon S3, Google Cloud Storage, Azure Blob Storage, or a server with the interface of S3.

A process that has used a store must not fork: the child would hang at its first call.
"""

import itertools
import math
import os
import queue
import re
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

from serried.configs.bucket_urls import check_bucket_url, credentials_of
from serried.configs.errors import UserError
from serried.records.store import ANY, Conflict, Expect, Listed, NoAnswer, Store, StoreError, Unclear

PART_BYTES = 16 * 2**20
_SMALL_BYTES = 2**20
_SMALL_SECONDS = 5.0
"""Time limit of a request of at most ``_SMALL_BYTES``."""
_PART_SECONDS = 20.0
"""Time limit of a larger request."""
_CONNECT_SECONDS = 5.0
_RETRY_SECONDS = 180.0
_LIBRARY_RETRY_SECONDS = 3.0
"""Time for which the library repeats a request, except the parts of an upload. It does not repeat all of them: not a
read whose body is cut off, nor a conditional write without an answer in time."""
_FIRST_WAIT_SECONDS, _LONGEST_WAIT_SECONDS = 0.2, 5.0
_TRIES = 5
"""Number of attempts of a request that fails for an unknown reason."""
_PARTS_AT_ONCE = 6

_REFUSALS = (
    "NoSuchBucket", "AccessDenied", "ExpiredToken", "InvalidAccessKeyId", "SignatureDoesNotMatch",
    "RequestTimeTooSkewed",
)  # fmt: skip
"""Error codes of S3 for requests that had no effect, and would fail again."""
_MAY_SUCCEED_LATER = ("408", "409", "429")
"""Status codes of refused requests that may succeed when they are repeated."""

_Answer = TypeVar("_Answer")


def open_store(
    url: str, key: str = "run.dir", *, retry_seconds: float = _RETRY_SECONDS,
    say: Callable[[str], None] | None = None,
) -> Store:  # fmt: skip
    """Return the folder in a bucket that ``key=url`` sets. No request is sent.

    Args:
        say: Called with a line when a request has been repeated for a few seconds.
        retry_seconds: A request is repeated until the store has not answered it, or this process, for this long.

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
    return ObjectStore(url, retry_seconds=retry_seconds, say=say)


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


class _Silence:
    """Time since which a bucket has not answered this process. All requests share it, so an outage is waited for only
    once."""

    def __init__(self) -> None:
        self._since: float | None = None
        self._answered_at = -math.inf

    def end(self) -> None:
        """Note an answer, or start to wait again."""
        self._answered_at, self._since = time.monotonic(), None

    def seconds(self, began: float) -> float:
        """Note that there was no answer to a request that ``began`` at this time of ``time.monotonic()``. Returns how
        long there has been none."""
        since = self._since
        if since is None:
            since = self._since = max(began, self._answered_at)
        return time.monotonic() - since

    def lasts(self, seconds: float) -> bool:
        """Return whether there has been no answer for ``seconds``."""
        return self._since is not None and time.monotonic() - self._since > seconds


_silences: defaultdict[str, _Silence] = defaultdict(_Silence)
"""By bucket."""


class ObjectStore:
    """A folder in a bucket, through obstore."""

    def __init__(
        self, url: str, *, retry_seconds: float = _RETRY_SECONDS, part_bytes: int = PART_BYTES,
        say: Callable[[str], None] | None = None,
    ) -> None:  # fmt: skip
        import obstore

        self._say = say
        self.url, self.part_bytes = url, part_bytes
        self.obstore: Any = obstore
        self._retry_seconds = retry_seconds
        self._silence = _silences["/".join(url.split("/")[:3])]
        self._is_google = url.startswith("gs:")
        library_seconds = min(retry_seconds, _LIBRARY_RETRY_SECONDS)
        self._small = self._open(_SMALL_SECONDS, library_seconds)
        self._large = self._open(_PART_SECONDS, library_seconds)
        self._parts = self._open(_PART_SECONDS, retry_seconds)

    def _open(self, seconds: float, retry_seconds: float) -> Any:
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
            "max_retries": 1000, "retry_timeout": timedelta(seconds=retry_seconds),
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
            store = self._small if len(view) <= _SMALL_BYTES else self._large
            return memoryview(self.obstore.get(store, key, options=options).bytes())

        found = self._found(key, read)
        if found is None:
            raise StoreError(f"{self.where(key)} does not exist")
        if len(found) != len(view):
            raise StoreError(f"{self.where(key)} has {len(found)} bytes instead of {len(view)} at byte {offset}")
        view[:] = found

    def put(self, key: str, content: bytes, expect: Expect | str = ANY) -> str:
        from obstore.exceptions import AlreadyExistsError, BaseError, PreconditionError

        mode: Any = "overwrite" if expect is ANY else "create"
        if isinstance(expect, str):
            e_tag, _, version = expect.partition("|")
            mode = {"e_tag": e_tag} | ({"version": version} if version else {})
        store = self._small if len(content) <= _SMALL_BYTES else self._large
        try:
            return self._tag(
                self._answer(lambda: self.obstore.put(store, key, content, mode=mode, use_multipart=False))
            )
        except (AlreadyExistsError, PreconditionError) as error:
            raise Conflict(f"{self.where(key)} is not as expected") from error
        except (BaseError, OSError) as error:
            kind = StoreError if _is_refused(error) else Unclear
            raise kind(f"cannot write {self.where(key)}: {_reason(error, self.url)}") from None

    def writer(self, key: str) -> "ObjectUpload":
        return ObjectUpload(self, key)

    def list(self, prefix: str) -> list[Listed]:
        def read() -> list[Listed]:
            pages = self.obstore.list(self._small, prefix or None)
            return [
                Listed(meta["path"], meta["size"], self._tag(meta), meta["last_modified"].timestamp())
                for page in pages
                for meta in page
            ]

        return sorted(self._found(prefix, read) or [], key=lambda listed: listed.key)

    def folders(self) -> Sequence[str]:
        def read() -> Sequence[str]:
            return [str(path) for path in self.obstore.list_with_delimiter(self._small)["common_prefixes"]]

        return sorted(path.strip("/").rpartition("/")[2] for path in self._found("", read) or [])

    def delete(self, keys: Iterable[str]) -> None:
        keys = [*keys]

        def remove() -> None:
            if keys:
                self.obstore.delete(self._small, keys)

        self._found(keys[0] if keys else "", remove)

    def where(self, key: str) -> str:
        return f"{self.url}/{key}"

    def begin_to_wait(self) -> None:
        """Wait for the next answer as long as if there had just been one."""
        self._silence.end()

    def _found(self, key: str, call: Callable[[], _Answer]) -> _Answer | None:
        """Return what ``call`` returns, or None if there is no such object."""
        from obstore.exceptions import BaseError, PreconditionError

        try:
            return self._answer(call)
        except FileNotFoundError as error:
            if "<Code>NoSuchBucket" in str(error):
                raise StoreError(_reason(error, self.url)) from None
            return None
        except PreconditionError as error:
            raise Conflict(f"{self.where(key)} has changed") from error
        except (BaseError, OSError) as error:
            kind = NoAnswer if _is_unanswered(error) else StoreError
            raise kind(f"{self.where(key)}: {_reason(error, self.url)}") from None

    def _answer(self, call: Callable[[], _Answer]) -> _Answer:
        """Return what ``call`` returns. Repeats it if the store does not answer, until there has been no answer to this
        or to any request for the time that the store is given."""
        from obstore.exceptions import AlreadyExistsError, BaseError, PreconditionError

        first = time.monotonic()
        for number in itertools.count():
            began = time.monotonic()
            try:
                answer = call()
            except (AlreadyExistsError, FileNotFoundError, PreconditionError):
                self._silence.end()
                raise
            except (BaseError, OSError) as error:
                if not _is_unanswered(error):
                    self._silence.end()
                    if _is_refused(error) or number == _TRIES - 1:
                        raise
                elif self.gives_up(first, began):
                    raise
                elif self._say is not None and number == 0:
                    self._say(
                        f"waiting    up to {self._retry_seconds:.0f} s for {self.url}: {_reason(error, self.url)}"
                    )
            else:
                self._silence.end()
                return answer
            time.sleep(min(_LONGEST_WAIT_SECONDS, _FIRST_WAIT_SECONDS * 2**number))
        raise AssertionError

    def put_parts(self, key: str, parts: Iterator[bytearray]) -> None:
        """Write an object in parts. Raises an exception of the library."""
        store = self._large if self._silence.lasts(self._retry_seconds) else self._parts
        self.obstore.put(
            store, key, parts, use_multipart=True, chunk_size=self.part_bytes, max_concurrency=_PARTS_AT_ONCE
        )
        self._silence.end()

    def gives_up(self, first: float, began: float) -> bool:
        """Note that there was no answer to a request that ``began`` at this time of ``time.monotonic()``, and was sent
        for the ``first`` time before that. Returns whether it should not be repeated.

        A store may answer reads but no writes, for example if its disk is full.
        """
        is_silent = self._silence.seconds(began) > self._retry_seconds
        return is_silent or time.monotonic() - first > self._retry_seconds

    def _tag(self, meta: Any) -> str:
        """Return the tag that a later write may expect. Google compares the version (generation), others the e_tag."""
        e_tag, version = meta.get("e_tag") or "", meta.get("version") or ""
        if e_tag.startswith("0x"):  # in listings of Azure
            e_tag = f'"{e_tag}"'
        return f"{e_tag}|{version}" if self._is_google else e_tag


def _is_refused(error: Exception) -> bool:
    """Return whether the store refused a request, so that it would refuse a repetition too."""
    text = str(error)
    if type(error).__name__ in ("PermissionDeniedError", "UnauthenticatedError") or "Received redirect" in text:
        return True
    code, status = re.search(r"<Code>(\w+)</Code>", text), re.search(r"status code: (\d{3})", text)
    if code is not None and code[1] in (*_REFUSALS, "RequestTimeout"):
        return code[1] in _REFUSALS
    return status is not None and status[1].startswith("4") and status[1] not in _MAY_SUCCEED_LATER


def _is_unanswered(error: Exception) -> bool:
    """Return whether there was no answer, or only that the store cannot answer now."""
    if _is_refused(error):
        return False
    return bool(re.search(r"HttpError|HTTP error|status code: (?:5\d\d|408|409|429)|RequestTimeout", str(error)))


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
    if message := re.search(r"<Message>(.*?)</Message>", text, re.DOTALL):
        return f"{found}: {message[1]}" if message[1] != found else found
    return _why_unanswered(text) or text.partition("\n")[0] or type(error).__name__


def _why_unanswered(text: str) -> str | None:
    """Return why there was no answer in a few words, from an error of the library with its debug output."""
    if status := re.search(r"status code: (\d{3}[^:\n]*)", text):
        return f"the server answers {status[1].strip()}"
    kind = re.search(r"HttpError \{\s*kind: (\w+)", text)
    if kind is None:
        return None
    server = re.search(r"performing \w+ https?://(?:[^/\s]*@)?([^/\s]+)", text)
    where = f" to {server[1]}" if server else ""
    if kind[1] == "Connect":
        detail = re.search(r'(?:message|error): "([^"]+)"', text)
        return f"no connection{where}{f': {detail[1]}' if detail else ''}"
    return "no answer in time" if kind[1] == "Timeout" else f"the connection{where} breaks"


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
        with suppress(StoreError):
            found = self._store.stat(self._key)
            return found is not None and found[0] == self._size_bytes
        return False

    def _send(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="upload", daemon=True)
            self._thread.start()
        self._queue.put(self._part)
        self._queue.join()  # filling the next one meanwhile would be one more in memory
        self._part = bytearray()

    def _run(self) -> None:
        store, first = self._store, time.monotonic()
        try:
            while True:
                began = time.monotonic()
                try:
                    store.put_parts(self._key, self._parts())
                    break
                except Exception as error:
                    # The library does not repeat the request that starts an upload. Until then nothing is lost.
                    if not _is_unanswered(error) or store.gives_up(first, began) or self._parts_taken:
                        raise
                time.sleep(_FIRST_WAIT_SECONDS)
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
        kind = NoAnswer if _is_unanswered(self._error) else StoreError
        return kind(f"cannot write {self._store.where(self._key)}: {_reason(self._error, self._store.url)}")


class _Abort:
    """Marks the end of the queue of parts when the upload is aborted."""


class _Aborted(Exception):
    """Raised in the library's iterator of parts, so that it removes the parts already sent."""
