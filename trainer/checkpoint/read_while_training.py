"""Reading a checkpoint while its run trains and may delete it."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from serried.configs.errors import UserError
from serried.runtime.session import Session

_T = TypeVar("_T")


class Deleted(UserError):
    """A checkpoint was deleted while it was being read."""


@contextmanager
def reading(checkpoint: Path) -> Iterator[None]:
    """Context manager: an error that results from the deletion of ``checkpoint`` becomes ``Deleted``."""
    try:
        yield
    except Exception as error:
        if checkpoint.exists():
            raise
        raise Deleted(f"{checkpoint} was deleted while it was read; use another checkpoint: checkpoint=STEP") from error


def read_by_all(session: Session, checkpoint: Path, function: Callable[[], _T]) -> _T:
    """Return the result of ``function``, which reads ``checkpoint``. A collective: if the checkpoint was deleted
    during the read of any rank, all ranks raise ``Deleted``."""
    deleted, result = None, None
    try:
        with reading(checkpoint):
            result = function()
    except Deleted as error:
        deleted = str(error)
    for message in session.gather(deleted):
        if message is not None:
            raise Deleted(message)
    return result  # type: ignore[return-value]


def with_chosen(choose: Callable[[], Path], use: Callable[[Path], _T]) -> _T:
    """Return ``use(choose())``, where ``choose`` returns a checkpoint. If the run deletes it in the meantime, choose
    again.

    Raises ``UserError`` if ``choose`` finds no other, and every error of ``use`` except ``Deleted``.
    """
    checkpoint = choose()
    while True:
        try:
            return use(checkpoint)
        except Deleted:
            deleted, checkpoint = checkpoint, choose()
            if checkpoint == deleted:
                raise
