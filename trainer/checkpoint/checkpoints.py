"""Checkpoints of a run while it trains: where a save is written, committed, and when old ones are removed."""

import os
import shutil
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

from serried.configs.formats import size
from serried.configs.schema.sections import CheckpointSection, RunConfig
from serried.runtime.session import Session
from serried.trainer.checkpoint.manifest import FileRecord, fsync_folder, record_of, write_manifest
from serried.trainer.checkpoint.retention import folder_name, partial_name, prune, sweep
from serried.trainer.checkpoint.writer import NOT_SHARED, Files, FolderFiles

CHECKPOINTS = "checkpoints"
"""Name of the folder with the checkpoints in a run folder."""
_SPARE_BYTES = 64 * 2**20


class Checkpoints(Protocol):
    """Checkpoints of a run. Only ``files`` and ``path`` are called on all ranks, the other methods on rank 0."""

    def path(self, step: int) -> Path:
        """Return the path of the checkpoint of ``step``, for messages and for reading it."""

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

    def sweep(self) -> list[str]:
        """Remove the remains of interrupted saves. Returns a message for each problem. Does not raise."""


class FolderCheckpoints:
    """Checkpoints in a folder on a disk that all nodes share. A save is committed by renaming its folder."""

    def __init__(self, folder: Path, section: CheckpointSection, session: Session) -> None:
        self._folder, self._section, self._session = folder, section, session

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

    def sweep(self) -> list[str]:
        return sweep(self._folder)


def checkpoints_of(config: RunConfig, session: Session) -> Checkpoints:
    """Return the checkpoints of the run that ``config`` describes."""
    return FolderCheckpoints(config.run.dir / CHECKPOINTS, config.checkpoint, session)


def lack_of_space(folder: Path, nbytes: int) -> str | None:
    """Return why a checkpoint of ``nbytes`` does not fit on the disk of ``folder``, or None if it fits."""
    free = shutil.disk_usage(folder).free
    if free >= nbytes + _SPARE_BYTES:
        return None
    return (
        f"a checkpoint needs {size(nbytes)}, plus {size(_SPARE_BYTES)} kept free, but {folder} has only {size(free)} "
        "free"
    )
