"""Read a checkpoint while its run is training and may delete it."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from serried.configs.errors import UserError
from serried.runtime.session import Session

_T = TypeVar("_T")


class Deleted(UserError):
    """Raised if a checkpoint was deleted while it was being read."""


@contextmanager
def reading(checkpoint: Path) -> Iterator[None]:
    """Context manager that converts an error caused by the deletion of ``checkpoint`` into ``Deleted``."""
    try:
        yield
    except Exception as error:
        if checkpoint.exists():
            raise
        raise Deleted(f"{checkpoint} was deleted while it was read; use another checkpoint: checkpoint=STEP") from error


def read_by_all(session: Session, checkpoint: Path, function: Callable[[], _T]) -> _T:
    """Return the result of ``function``, which reads ``checkpoint``.

    This is a collective call: if the checkpoint was deleted while any rank read it, all ranks raise ``Deleted``.
    """
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
    """Return ``use(choose())``, where ``choose`` returns a checkpoint. If it is deleted meanwhile, choose again.

    Raises ``Deleted`` if ``choose`` returns the deleted checkpoint again, and all other errors of ``use``.
    """
    checkpoint = choose()
    while True:
        try:
            return use(checkpoint)
        except Deleted:
            deleted, checkpoint = checkpoint, choose()
            if checkpoint == deleted:
                raise
