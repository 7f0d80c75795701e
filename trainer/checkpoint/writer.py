"""Sequential writer of a rank's own checkpoint files, with checks and checksums."""

import math
import os
import zlib
from contextlib import suppress
from pathlib import Path

from torch import Tensor

from serried.records.safetensors_files import header, tensor_bytes
from serried.trainer.checkpoint.file_assignment import Plan, Window
from serried.trainer.checkpoint.manifest import FileRecord

NOT_SHARED = "run.dir must be on a disk that all nodes share"

_PIECE_BYTES = 4 * 2**20  # bytes per call: the piece stays in the CPU cache, and other threads wait for less time
_MOST_VIEWS = 512  # per call; POSIX systems accept at least 1024
_PUSH_BYTES = 16 * 2**20
_REMEMBERED_BYTES = 8 * _PUSH_BYTES


class Writer:
    """Write this rank's files one after the other. After an error nothing more is written, but calls still succeed."""

    def __init__(self, folder: Path, plan: Plan) -> None:
        self._folder, self._plan = folder, plan
        self._records: dict[str, FileRecord] = {}
        self._problem: str | None = None
        self._file = -1
        self._open_files: dict[int, int] = {}
        self._pushed = 0

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
            self._fail(error)

    def finish(self) -> tuple[dict[str, FileRecord], str | None]:
        """Flush the files to the disk. Returns their records, and the error if there was one."""
        for index, descriptor in self._open_files.items():
            self._file = index
            try:
                if self._problem is None:
                    os.fsync(descriptor)
            except OSError as error:
                self._fail(error)
            finally:
                os.close(descriptor)
        return self._records, self._problem

    def _fail(self, error: OSError | MemoryError) -> None:
        path = self._folder / self._plan.files[max(self._file, 0)].name
        reason = f"cannot write {path}: {getattr(error, 'strerror', None) or 'out of memory'}"
        self._problem = reason if self._folder.is_dir() else f"{reason}; {NOT_SHARED}"

    def _open(self, index: int) -> memoryview:
        """Create a file. Returns its header."""
        file = self._plan.files[index]
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
        # Keep the file open: the disk writes it while the next is filled, and all are flushed together at the end.
        self._open_files[index] = os.open(self._folder / file.name, flags, 0o666)
        self._file, self._pushed = index, 0
        self._records[file.name] = FileRecord(0, 0)
        start = memoryview(header(file.specs))
        self._count(start)
        return start

    def _count(self, content: memoryview) -> None:
        name = self._plan.files[self._file].name
        record = self._records[name]
        self._records[name] = FileRecord(record.size + len(content), zlib.crc32(content, record.crc32))

    def _append(self, contents: list[memoryview]) -> None:
        """Write to the current file. Large writes let file systems allocate pages in larger units."""
        if not contents:
            return
        descriptor = self._open_files[self._file]
        for first in range(0, len(contents), _MOST_VIEWS):
            rest = contents[first : first + _MOST_VIEWS]
            while rest:
                written = os.writev(descriptor, rest)
                while rest and written >= len(rest[0]):
                    written -= len(rest.pop(0))
                if rest:
                    rest[0] = rest[0][written:]
        size = self._records[self._plan.files[self._file].name].size
        if size - self._pushed >= _PUSH_BYTES:
            self._push(descriptor, size)

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


def _is_finite(content: Tensor) -> bool:
    if not content.is_floating_point() or not content.numel():
        return True
    # One pass without copies, whereas isfinite().all() needs several: min and max are NaN if any value is NaN.
    low, high = content.aminmax()
    return math.isfinite(low.item()) and math.isfinite(high.item())
