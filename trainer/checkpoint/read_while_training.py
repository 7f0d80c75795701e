"""Reading a checkpoint beside the run that trains, which may delete it meanwhile."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from serried.configs.errors import UserError
from serried.runtime.session import Session

_T = TypeVar("_T")


class Deleted(UserError):
    """A checkpoint was deleted while it was read."""


@contextmanager
def reading(checkpoint: Path) -> Iterator[None]:
    """Inside this context, an error that follows from the deletion of ``checkpoint`` becomes ``Deleted``."""
    try:
        yield
    except Exception as error:
        if checkpoint.exists():
            raise
        raise Deleted(f"{checkpoint} was deleted while it was read; use another checkpoint: checkpoint=STEP") from error


def read_by_all(session: Session, checkpoint: Path, function: Callable[[], _T]) -> _T:
    """Return the result of ``function``, which reads ``checkpoint``. A collective: if the checkpoint was deleted on the
    way of any rank, all raise ``Deleted``."""
    deleted, result = None, None
    try:
        with reading(checkpoint):
            result = function()
    except Deleted as error:
        deleted = str(error)
    for each in session.gather(deleted):
        if each is not None:
            raise Deleted(each)
    return result  # type: ignore[return-value]


def with_chosen(choose: Callable[[], Path], use: Callable[[Path], _T]) -> _T:
    """Return what ``use`` makes of the checkpoint that ``choose`` returns; if its run deletes it meanwhile, of the one
    that ``choose`` returns then.

    Raises ``UserError`` if ``choose`` finds no other, and whatever ``use`` raises but ``Deleted``.
    """
    checkpoint = choose()
    while True:
        try:
            return use(checkpoint)
        except Deleted:
            deleted, checkpoint = checkpoint, choose()
            if checkpoint == deleted:
                raise
