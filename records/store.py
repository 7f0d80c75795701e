"""Interface to the objects of a folder in a bucket."""

import errno
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import BinaryIO, Protocol

from serried.configs.errors import TrainingStopped, UserError


class Expect(Enum):
    """Conditions of a write other than a tag."""

    ANY = "any"
    ABSENT = "absent"


ANY, ABSENT = Expect.ANY, Expect.ABSENT


class StoreError(OSError):
    """The store did not answer, or refused a request. The message is one line with the reason."""

    def __init__(self, message: str) -> None:
        super().__init__(errno.EIO, message)

    def __str__(self) -> str:
        return str(self.strerror)


class NoAnswer(StoreError):
    """The store did not answer, or only that it cannot answer now. The same request may succeed later."""


class Unclear(NoAnswer):
    """The store did not answer a write. It may have taken effect, or may take effect later."""


class Conflict(Exception):
    """The object is not as expected. Nothing was written, or an earlier try of the same call wrote it."""


@dataclass(frozen=True)
class Listed:
    """One object of a listing."""

    key: str
    size_bytes: int
    tag: str
    written_at: float = 0.0
    """Time of the write in Unix seconds, by the clock of the store."""


def ended_by(error: StoreError, message: str) -> UserError | TrainingStopped:
    """Return the exception that ends a run which cannot do without what ``error`` prevents.

    If the store did not answer, the run may be started again later. Otherwise its user has to act first.
    """
    return TrainingStopped(message) if isinstance(error, NoAnswer) else UserError(message)


class Upload(Protocol):
    """One object, written from front to back."""

    def write(self, content: memoryview) -> None:
        """Append bytes, which are copied. Waits while too many parts are being sent.

        Raises ``StoreError`` if an earlier part could not be written.
        """

    def finish(self) -> None:
        """Complete the object. Raises ``StoreError`` if that fails."""

    def abort(self) -> None:
        """Abort the upload, and remove the parts that were sent."""


class Store(Protocol):
    """Objects by key below one URL. A tag changes with the content, and is compared only for equality."""

    url: str

    def get(self, key: str) -> tuple[bytes, str] | None:
        """Return the content and the tag of an object, or None if there is no such object."""

    def read_into(self, key: str, offset: int, view: memoryview, tag: str | None = None) -> None:
        """Fill ``view`` with the bytes of an object from ``offset`` on.

        Raises:
            Conflict: ``tag`` is given, and the object has another one.
            StoreError: The object is missing or too short, or the store does not answer.
        """

    def put(self, key: str, content: bytes, expect: Expect | str = ANY) -> str:
        """Write a small object if the present one is as expected: anything, absent, or with a given tag.

        Returns the new tag.

        Raises:
            Conflict: The object is not as expected, or an earlier try of this call wrote it and its answer was lost.
            Unclear: There was no answer.
            StoreError: The store refused the request, for example because of expired credentials.
        """

    def writer(self, key: str) -> Upload:
        """Return a writer of an object of any size."""

    def stat(self, key: str) -> tuple[int, str] | None:
        """Return the size in bytes and the tag of an object, or None if there is no such object."""

    def list(self, prefix: str) -> list[Listed]:
        """Return all objects below the folder ``prefix``, sorted by key."""

    def folders(self) -> Sequence[str]:
        """Return the names of the folders directly below the URL, sorted. Their objects are not listed."""

    def delete(self, keys: Iterable[str]) -> None:
        """Remove objects. Missing ones are skipped."""

    def where(self, key: str) -> str:
        """Return the URL of an object, for messages."""

    def begin_to_wait(self) -> None:
        """Wait for the next answer as long as if there had just been one.

        Requests are repeated until the store has not answered this process for some time. Later ones then fail soon.
        """


_PIECE_BYTES = 8 * 2**20


def upload_file(store: Store, key: str, file: BinaryIO) -> None:
    """Write the rest of ``file`` to an object, in pieces. The upload is aborted if a piece cannot be read or sent.

    Raises ``StoreError`` or ``OSError``.
    """
    upload = store.writer(key)
    try:
        while piece := file.read(_PIECE_BYTES):
            upload.write(memoryview(piece))
    except BaseException:
        upload.abort()
        raise
    upload.finish()
