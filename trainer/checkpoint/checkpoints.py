"""Checkpoints of a run while it trains: where a save is written, how it is committed, and when old ones are removed."""

import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

from serried.configs.errors import UserError
from serried.configs.formats import size
from serried.configs.schema.sections import CheckpointSection, RunConfig
from serried.records.object_store import open_store
from serried.records.run_folder import RunFolder
from serried.runtime.session import Session
from serried.trainer.checkpoint.bucket_checkpoints import BucketCheckpoints
from serried.trainer.checkpoint.manifest import (
    MANIFEST,
    Damaged,
    FileRecord,
    check_file,
    fsync_folder,
    read_manifest,
    record_of,
    write_manifest,
)
from serried.trainer.checkpoint.retention import (
    best_checkpoint,
    folder_name,
    named,
    partial_name,
    prune,
    step_of,
    sweep,
)
from serried.trainer.checkpoint.saved_state import STATE, read_state
from serried.trainer.checkpoint.writer import NOT_SHARED, Files, FolderFiles

CHECKPOINTS = "checkpoints"
"""Name of the folder with the checkpoints in a run folder."""
_SPARE_BYTES = 64 * 2**20


class Checkpoints(Protocol):
    """Checkpoints of a run. ``path``, ``files`` and ``open`` are called on all ranks, the other methods on rank 0."""

    @property
    def is_ours(self) -> bool:
        """Whether no other process has taken over the run in the bucket."""

    @property
    def had_no_answer(self) -> bool:
        """Whether the last save failed on this rank because the bucket did not answer."""

    def path(self, step: int) -> Path:
        """Return the folder through which the checkpoint of ``step`` is read."""

    def begin(self, step: int, nbytes: int) -> tuple[str, str | None]:
        """Start a save of ``nbytes``. Returns the name of the attempt, and the reason if it cannot be written."""

    def files(self, attempt: str) -> Files:
        """Return the files that this rank writes."""

    def commit(
        self, attempt: str, step: int, files: Mapping[str, FileRecord], write_others: Callable[[Path], None],
        state: Mapping[str, Any], notes: list[str],
    ) -> str | None:  # fmt: skip
        """Make the attempt a checkpoint, atomically, and remove checkpoints that need not be kept.

        ``files``: tensor files of all ranks. ``write_others`` writes the other files into a folder. ``state``: content
        of state.json. Problems that do not concern this checkpoint are appended to ``notes``.

        Returns the reason if there is no checkpoint, else None. Does not raise.
        """

    def discard(self, attempt: str) -> None:
        """Remove the files of an attempt that failed. Does not raise."""

    def lack_of_space(self, nbytes: int) -> str | None:
        """Return why a checkpoint of ``nbytes`` cannot be saved for lack of space, or None."""

    def hurry(self, is_urgent: bool) -> None:
        """Lift ``checkpoint.upload_limit`` if training waits for the save, or apply it again. Called on all ranks."""

    def sweep(self) -> list[str]:
        """Remove the remains of interrupted saves. Returns a message for each problem. Does not raise."""

    def saved(self) -> list[Path]:
        """Return the paths of the checkpoints, newest first, without verifying them. May raise ``OSError``."""

    def open(self, path: Path) -> str | None:
        """Make the checkpoint ``path`` readable, and verify the files that are not verified while they are read.

        Returns a description of its damage, or None. This is a collective call.
        """

    def origin(self) -> str | None:
        """Return the path that the run was started from, if it did not start from scratch."""

    def best(self) -> tuple[int, float] | None:
        """Return the step and the metric of the checkpoint that ``checkpoint.keep_best`` keeps, or None."""

    def where(self, step: int) -> str:
        """Return the path or URL of the checkpoint of ``step``, for messages."""


class FolderCheckpoints:
    """Checkpoints in a folder on a disk that all nodes share. A save is committed by renaming its folder."""

    def __init__(self, folder: Path, section: CheckpointSection, session: Session) -> None:
        self._folder = folder
        self._section = section
        self._session = session

    is_ours = True
    had_no_answer = False

    def path(self, step: int) -> Path:
        return self._folder / folder_name(step)

    def begin(self, step: int, nbytes: int) -> tuple[str, str | None]:
        attempt = partial_name(step)
        partial = self._folder / attempt
        try:
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
            return attempt, lack_of_space(self._folder, nbytes)
        except OSError as error:
            return attempt, f"cannot write {partial}: {error.strerror}"

    def files(self, attempt: str) -> FolderFiles:
        return FolderFiles(self._folder / attempt)

    def commit(
        self, attempt: str, step: int, files: Mapping[str, FileRecord], write_others: Callable[[Path], None],
        state: Mapping[str, Any], notes: list[str],
    ) -> str | None:  # fmt: skip
        partial, final = self._folder / attempt, self.path(step)
        records = dict(files)
        try:
            write_others(partial)
            for name in files:
                if not self._session.appears(partial / name):
                    return (
                        f"{partial / name} was written by another node and is not visible on this node; "
                    ) + NOT_SHARED
            for name in sorted({path.name for path in partial.iterdir()} - files.keys()):
                with (partial / name).open("rb") as file:
                    os.fsync(file.fileno())
                records[name] = record_of(partial / name)
            write_manifest(partial, records)
            partial.rename(final)
        except OSError as error:
            return f"cannot write {final}: {error.strerror}"
        except Exception as error:  # an error in the task's export_files() fails the save, not the run
            return f"cannot write {final}: {type(error).__name__}: {error}"
        with suppress(OSError):
            fsync_folder(self._folder)
        section = self._section
        best = (section.best_metric, section.best_mode) if section.keep_best else None
        prune(
            self._folder, keep=section.keep, keep_every=section.keep_every, best=best,
            also=state.get("changed_after", ()), problems=notes,
        )  # fmt: skip
        return None

    def discard(self, attempt: str) -> None:
        shutil.rmtree(self._folder / attempt, ignore_errors=True)

    def lack_of_space(self, nbytes: int) -> str | None:
        return lack_of_space(self._folder.parent, nbytes)

    def hurry(self, is_urgent: bool) -> None:
        pass

    def sweep(self) -> list[str]:
        return sweep(self._folder)

    def saved(self) -> list[Path]:
        return named(self._folder)[::-1]

    def open(self, path: Path) -> str | None:
        return damage(path, self._session)

    def origin(self) -> str | None:
        return origin_of(self.saved())

    def best(self) -> tuple[int, float] | None:
        found = best_checkpoint(self._folder, self._section)
        return (step_of(found[0]) or 0, found[1]) if found else None

    def where(self, step: int) -> str:
        return str(self.path(step))


def origin_of(checkpoints: Sequence[Path]) -> str | None:
    """Return the path that a run was started from, as recorded in its newest intact checkpoint.

    ``checkpoints``: newest first.
    """
    for path in checkpoints:
        try:
            check_file(path, STATE, read_manifest(path)[STATE])
            found = read_state(path).get("origin")
        except (Damaged, KeyError, UserError):
            continue
        return str(found) if found else None
    return None


def damage(path: Path, session: Session) -> str | None:
    """Return a description of a checkpoint's damage, or None if it is intact.

    This is a collective call: each rank reads a share of its files.
    """

    def check() -> str | None:
        try:
            records = read_manifest(path)
            if STATE not in records:
                return f"{path / MANIFEST} does not list {STATE}"
            by_size = sorted(records, key=lambda name: -records[name].size)
            for name in by_size[session.rank :: session.world_size]:
                check_file(path, name, records[name])
        except Damaged as damaged:
            return str(damaged)
        return None

    seen = session.gather(path.is_dir())
    if any(seen) and not all(seen):
        raise UserError(
            f"{path} is visible on rank {seen.index(True)} but not on rank {seen.index(False)}; use a folder on a disk "
            "that all nodes share"
        )
    return next((problem for problem in session.gather(check()) if problem), None)


def checkpoints_of(config: RunConfig, session: Session, folder: RunFolder | None) -> Checkpoints:
    """Return the checkpoints of the run that ``config`` describes. ``folder``: its folder on rank 0, else None."""
    path, section = config.run.dir / CHECKPOINTS, config.checkpoint
    if config.run.url is None:
        return FolderCheckpoints(path, section, session)
    return BucketCheckpoints(open_store(config.run.url), path, section, session, folder)


def lack_of_space(folder: Path, nbytes: int) -> str | None:
    """Return why a checkpoint of ``nbytes`` does not fit on the disk of ``folder``, or None if it fits."""
    free = shutil.disk_usage(folder).free
    if free >= nbytes + _SPARE_BYTES:
        return None
    return (
        f"a checkpoint needs {size(nbytes)}, plus {size(_SPARE_BYTES)} kept free, but {folder} has only {size(free)} "
        "free"
    )
