"""Sequential writer of a rank's own checkpoint files, with checks and checksums."""

import math
import os
import zlib
from contextlib import suppress
from pathlib import Path
from typing import Protocol

from torch import Tensor

from serried.records.ranged_files import BlockSums
from serried.records.safetensors_files import header, tensor_bytes
from serried.trainer.checkpoint.file_assignment import Plan, Window
from serried.trainer.checkpoint.manifest import FileRecord

NOT_SHARED = "run.dir must be on a disk that all nodes share"

_PIECE_BYTES = 4 * 2**20  # bytes per call: the piece stays in the CPU cache, and other threads wait for less time
_MOST_VIEWS = 512  # per call; POSIX systems accept at least 1024
_PUSH_BYTES = 16 * 2**20
_REMEMBERED_BYTES = 8 * _PUSH_BYTES


class Files(Protocol):
    """Files of one checkpoint while they are written, each from front to back."""

    has_block_sums: bool
    """Whether the records of the files have a checksum for each MiB."""

    def open(self, name: str) -> None:
        """Create a file. The previous file is not written to any more. Raises ``OSError``."""

    def append(self, name: str, contents: list[memoryview], size: int) -> None:
        """Write to the file that was opened last. ``size``: its size in bytes afterwards. Raises ``OSError``."""

    def close(self, name: str, *, is_whole: bool) -> None:
        """Close a file. If it ``is_whole``, it must survive a power loss from now on, or ``OSError`` is raised."""

    def reason(self, name: str, error: OSError | MemoryError) -> str:
        """Return why ``name`` cannot be written, in one line."""


class FolderFiles:
    """Files in a folder that all nodes share. All are flushed to the disk at the end, when they are closed."""

    has_block_sums = False

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._descriptors: dict[str, int] = {}
        self._pushed = 0

    def open(self, name: str) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
        # Keep the file open: the disk writes it while the next is filled, and all are flushed together at the end.
        self._descriptors[name] = os.open(self._folder / name, flags, 0o666)
        self._pushed = 0

    def append(self, name: str, contents: list[memoryview], size: int) -> None:
        # Large writes let file systems allocate pages in larger units.
        descriptor = self._descriptors[name]
        for first in range(0, len(contents), _MOST_VIEWS):
            rest = contents[first : first + _MOST_VIEWS]
            while rest:
                written = os.writev(descriptor, rest)
                while rest and written >= len(rest[0]):
                    written -= len(rest.pop(0))
                if rest:
                    rest[0] = rest[0][written:]
        if size - self._pushed >= _PUSH_BYTES:
            self._push(descriptor, size)

    def close(self, name: str, *, is_whole: bool) -> None:
        descriptor = self._descriptors.pop(name)
        try:
            if is_whole:
                os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def reason(self, name: str, error: OSError | MemoryError) -> str:
        path = self._folder / name
        reason = f"cannot write {path}: {getattr(error, 'strerror', None) or 'out of memory'}"
        return reason if self._folder.is_dir() else f"{reason}; {NOT_SHARED}"

    def _push(self, descriptor: int, size: int) -> None:
        """Start writing to the disk now, instead of writing everything at the end.

        ``posix_fadvise(DONTNEED)`` asks the kernel to drop the file's pages from the page cache. The kernel starts to
        write back dirty pages, and drops pages that were written back since earlier calls. So a checkpoint reuses the
        same pages and does not evict pages that training reads.
        """
        if hasattr(os, "posix_fadvise"):
            first = max(0, self._pushed - _REMEMBERED_BYTES)
            with suppress(OSError):
                os.posix_fadvise(descriptor, first, size - first, os.POSIX_FADV_DONTNEED)
        self._pushed = size


class Writer:
    """Write this rank's files one after the other. After an error nothing more is written, but calls still succeed."""

    def __init__(self, files: Files, plan: Plan) -> None:
        self._files, self._plan = files, plan
        self._records: dict[str, FileRecord] = {}
        self._sums: dict[str, BlockSums] = {}
        self._problem: str | None = None
        self._file = -1

    def write(self, windows: list[Window], contents: list[list[Tensor]]) -> None:
        """Append the contents of each window to its file."""
        ready: list[memoryview] = []
        try:
            for window, tensors in zip(windows, contents, strict=True):
                if self._problem is not None:
                    return
                if window.file != self._file:
                    self._append(ready)
                    ready = [self._open(window.file)]
                for flat in (tensor.reshape(-1) for tensor in tensors):
                    for part in flat.split(_PIECE_BYTES // flat.element_size()):
                        if not _is_finite(part):
                            self._problem = f"{window.spec.name} is not finite, so no run could resume from this state"
                            return
                        self._count(tensor_bytes(part))
                    ready.append(tensor_bytes(flat))
            self._append(ready)
        except (OSError, MemoryError) as error:
            self._fail(self._name, error)

    def finish(self) -> tuple[dict[str, FileRecord], str | None]:
        """Complete the files. Returns their records, and the error if there was one."""
        for name in self._records:
            try:
                self._files.close(name, is_whole=self._problem is None)
            except OSError as error:
                self._fail(name, error)
        records = {
            name: record._replace(blocks=self._sums[name].text()) if name in self._sums else record
            for name, record in self._records.items()
        }
        return records, self._problem

    @property
    def _name(self) -> str:
        return self._plan.files[max(self._file, 0)].name

    def _fail(self, name: str, error: OSError | MemoryError) -> None:
        self._problem = self._files.reason(name, error)

    def _open(self, index: int) -> memoryview:
        """Create a file. Returns its header."""
        file = self._plan.files[index]
        self._files.open(file.name)
        self._file = index
        self._records[file.name] = FileRecord(0, 0)
        if self._files.has_block_sums:
            self._sums[file.name] = BlockSums()
        start = memoryview(header(file.specs))
        self._count(start)
        return start

    def _count(self, content: memoryview) -> None:
        record, sums = self._records[self._name], self._sums.get(self._name)
        if sums is not None:
            sums.add(content)
        self._records[self._name] = FileRecord(record.size + len(content), zlib.crc32(content, record.crc32))

    def _append(self, contents: list[memoryview]) -> None:
        if contents:
            self._files.append(self._name, contents, self._records[self._name].size)


def _is_finite(content: Tensor) -> bool:
    if not content.is_floating_point() or not content.numel():
        return True
    # One pass without copies, whereas isfinite().all() needs several: min and max are NaN if any value is NaN.
    low, high = content.aminmax()
    return math.isfinite(low.item()) and math.isfinite(high.item())
