"""Writing checkpoints beside training: copied to host memory, sent to their owners, written, committed by a rename.

A save that fails (disk full, permission lost) costs that checkpoint and nothing else: training goes on, and every
checkpoint committed before stays.
"""

import json
import os
import shutil
import time
import zlib
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from configs.schema import CheckpointSection
from parallel.mesh import Layout
from trainer.checkpoint.manifest import FileRecord, fsync_folder, record_of, write_manifest
from trainer.checkpoint.plan import BUCKET_BYTES, Part, Piece, Plan, deal_files, make_plan
from trainer.checkpoint.retention import STATE, folder_name, partial_name, prune
from trainer.checkpoint.state import MODEL, OPTIMIZER
from trainer.checkpoint.tensors import header, index_json, tensor_bytes
from trainer.track import size

if TYPE_CHECKING:
    from launch.session import Session

_SPARE_BYTES = 64 * 2**20
_ABANDONED_AFTER_SECONDS = 20.0  # torchrun kills 30 s after it asked to end


@dataclass(frozen=True)
class Saved:
    """What became of a save; the same on every rank."""

    step: int
    path: Path
    nbytes: int
    seconds: float
    """From the call to the commit."""
    stall_seconds: float
    """Of those, how long training waited."""
    problem: str | None
    """Why there is no such checkpoint, in one line; None: it is committed."""
    notes: list[str]
    """What else went wrong, such as an old checkpoint that cannot be deleted."""


class Checkpointer:
    """Saves the state of a run, one checkpoint at a time. Every rank has one and calls it at the same steps."""

    def __init__(
        self,
        folder: Path,
        section: CheckpointSection,
        layout: Layout,
        session: "Session",
        parts: Callable[[], Iterable[tuple[str, Part]]],
        write_extras: Callable[[Path], None],
    ) -> None:
        """``parts`` yields the state's tensors, each with the stem of its files, in the same order on every rank and
        time; ``write_extras`` writes what belongs beside the weights. A collective."""
        self._folder, self._section, self._layout = folder, section, layout
        self._session, self._rank = session, session.rank
        self._parts, self._write_extras = parts, write_extras
        copies = [range(first, first + layout.shard) for first in range(0, session.world_size, layout.shard)]
        self._world = session.background_group([range(session.world_size)])
        self._copy = self._world if len(copies) == 1 else session.background_group(copies)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._plan: Plan | None = None
        self._staged: dict[str, Tensor] = {}
        self._running: Future[Saved] | None = None
        self._stall_seconds = 0.0

    @property
    def is_saving(self) -> bool:
        """Whether a save is under way."""
        return self._running is not None

    def save(self, step: int, state: dict[str, Any]) -> None:
        """Begin to save ``step``; with ``checkpoint.mode=sync`` also end it. ``state`` is plain data, for state.json.

        Returns as soon as training may change the tensors. The save before must have been taken by ``wait``.
        """
        assert self._running is None, "one save at a time"
        started = time.perf_counter()
        staged = self._stage()
        self._running = self._thread.submit(self._save, step, state, staged, started)
        if self._section.mode == "sync":
            with suppress(Exception):  # wait() raises it
                self._running.result()
        self._stall_seconds = time.perf_counter() - started

    def poll(self) -> Saved | None:
        """What became of the save under way, once it has ended on this rank; does not wait."""
        return self._take() if self._running is not None and self._running.done() else None

    def wait(self) -> Saved | None:
        """As ``poll``, after waiting for the end. None: no save is under way.

        Raises:
            RuntimeError: a rank that took part is gone.
        """
        if self._running is None:
            return None
        started = time.perf_counter()
        with suppress(Exception):
            self._running.result()
        self._stall_seconds += time.perf_counter() - started
        return self._take()

    def _take(self) -> Saved:
        assert self._running is not None
        running, self._running = self._running, None
        saved = running.result()
        return Saved(**{**vars(saved), "stall_seconds": self._stall_seconds})

    def close(self) -> None:
        """Let a save under way end, if it does so soon: whatever ended the run, what it holds is good."""
        if self._running is not None:
            try:
                self._running.exception(_ABANDONED_AFTER_SECONDS)
            except TimeoutError:
                self._session.must_not_wait = True
            self._running = None
        self._thread.shutdown(wait=False, cancel_futures=True)

    # in the caller's thread -----------------------------------------------------------------------------------------

    def _stage(self) -> dict[str, Tensor]:
        """This rank's bytes of the tensors that its copy writes, as flat CPU tensors by name."""
        parts = list(self._parts())
        if self._plan is None:
            self._plan = self._make_plan(parts)
            mine = {piece.name for bucket in self._plan.writes for piece in bucket if piece.source == self._shard}
            self._kept = mine | {piece.name for sends in self._plan.sends for send in sends for piece in send}
        on_device = self._session.device.type == "cuda"
        staged: dict[str, Tensor] = {}
        for _, part in parts:
            name, local = part.spec.name, part.local.detach()
            if name not in self._kept:
                continue
            if self._section.mode == "sync" and not on_device:
                staged[name] = local.contiguous()  # nothing changes it meanwhile
                continue
            if name not in self._staged:
                self._staged[name] = torch.empty(local.shape, dtype=local.dtype, pin_memory=on_device)
            staged[name] = self._staged[name].copy_(local, non_blocking=on_device)
        if on_device:
            torch.cuda.synchronize(self._session.device)
        return staged

    @property
    def _shard(self) -> int:
        return self._rank % self._layout.shard

    def _make_plan(self, parts: list[tuple[str, Part]]) -> Plan:
        files = [
            file
            for stem in (MODEL, OPTIMIZER)
            for file in deal_files(
                [part.spec for of, part in parts if of == stem], stem, self._layout.replicate * self._layout.shard
            )
        ]
        sharded = {part.spec.name for _, part in parts if part.is_sharded} if self._layout.shard > 1 else set()
        return make_plan(files, sharded, self._layout, self._rank, BUCKET_BYTES)

    # in the background ----------------------------------------------------------------------------------------------

    def _save(self, step: int, state: dict[str, Any], staged: dict[str, Tensor], started: float) -> Saved:
        assert self._plan is not None
        partial, final = self._folder / partial_name(step), self._folder / folder_name(step)
        notes: list[str] = []
        problem = self._tell(self._prepare(partial) if self._rank == 0 else None)
        records: dict[str, FileRecord] = {}
        if problem is None:
            records, problem = self._write(partial, staged)
            answers = self._all({"problem": problem, "files": {name: [*record] for name, record in _plain(records)}})
            problem = next((answer["problem"] for answer in answers if answer["problem"]), None)
            files = {name: FileRecord(*record) for answer in answers for name, record in answer["files"].items()}
            if self._rank == 0:
                problem = problem or self._commit(partial, final, files, state)
                if problem is None:
                    prune(
                        self._folder, keep=self._section.keep, keep_every=self._section.keep_every,
                        keep_best=self._section.keep_best, problems=notes,
                    )  # fmt: skip
            problem = self._tell(problem)
        if problem is not None and self._rank == 0:
            shutil.rmtree(partial, ignore_errors=True)
        seconds = time.perf_counter() - started
        return Saved(step, final, self._plan.total_bytes, seconds, 0.0, problem, notes)

    def _prepare(self, partial: Path) -> str | None:
        """Make room and the folder. Returns why it cannot be done."""
        assert self._plan is not None
        try:
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
            return lack_of_space(self._folder, self._plan.total_bytes)
        except OSError as error:
            return f"cannot write {partial}: {error.strerror}"

    def _write(self, partial: Path, staged: dict[str, Tensor]) -> tuple[dict[str, FileRecord], str | None]:
        """Send this rank's pieces to their owners, and write what it owns. A collective of the ranks of one copy, to
        the end even where this rank cannot write any more."""
        assert self._plan is not None
        views = {name: tensor_bytes(tensor) for name, tensor in staged.items()}
        writer = _Writer(partial, self._plan)
        for sends, writes in zip(self._plan.sends, self._plan.writes, strict=True):
            writer.write(writes, self._exchange(sends, writes, views))
        return writer.finish()

    def _exchange(
        self, sends: list[list[Piece]], writes: list[Piece], views: dict[str, memoryview]
    ) -> list[memoryview]:
        """Bytes of ``writes``, in order."""

        def own(piece: Piece) -> memoryview:
            return views[piece.name][piece.start : piece.start + piece.nbytes]

        if self._layout.shard == 1:
            return [own(piece) for piece in writes]
        others = [[] if owner == self._shard else send for owner, send in enumerate(sends)]
        outgoing = torch.empty(sum(piece.nbytes for send in others for piece in send), dtype=torch.uint8)
        view, position = tensor_bytes(outgoing), 0
        for send in others:
            for piece in send:
                view[position : position + piece.nbytes] = own(piece)
                position += piece.nbytes
        sizes = [
            sum(piece.nbytes for piece in writes if piece.source == source) if source != self._shard else 0
            for source in range(self._layout.shard)
        ]
        incoming = torch.empty(sum(sizes), dtype=torch.uint8)
        dist.all_to_all_single(
            incoming, outgoing, sizes, [sum(piece.nbytes for piece in send) for send in others], group=self._copy
        )
        view, received = tensor_bytes(incoming), []
        begins = [sum(sizes[:source]) for source in range(self._layout.shard)]
        for piece in writes:
            if piece.source == self._shard:
                received.append(own(piece))
                continue
            received.append(view[begins[piece.source] : begins[piece.source] + piece.nbytes])
            begins[piece.source] += piece.nbytes
        return received

    def _commit(self, partial: Path, final: Path, files: dict[str, FileRecord], state: dict[str, Any]) -> str | None:
        """Complete the folder and give it its name. Returns why that failed."""
        assert self._plan is not None
        try:
            for stem in (MODEL, OPTIMIZER):
                specs = {file.name: file.specs for file in self._plan.files if file.name.startswith(f"{stem}")}
                if len(specs) > 1:
                    (partial / f"{stem}.safetensors.index.json").write_text(index_json(specs))
            self._write_extras(partial)
            (partial / STATE).write_text(json.dumps(state, indent=2, allow_nan=False) + "\n")
            written = {path.name for path in partial.iterdir()}
            if missing := sorted(files.keys() - written):
                return f"{partial / missing[0]} was written by another node and is not here; " + _NOT_SHARED
            for name in sorted(written - files.keys()):
                with (partial / name).open("rb") as file:
                    os.fsync(file.fileno())
                files[name] = record_of(partial / name)
            write_manifest(partial, files)
            partial.rename(final)
            fsync_folder(self._folder)
        except OSError as error:
            return f"cannot write {final}: {error.strerror}"
        return None

    def _tell(self, text: str | None) -> str | None:
        """Rank 0's ``text``, on every rank."""
        return self._all({"text": text})[0]["text"]

    def _all(self, value: dict[str, Any]) -> list[dict[str, Any]]:
        """Every rank's ``value``, by rank. Through the group of this thread: the store is the other thread's."""
        if self._world is None:
            return [value]
        data = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
        ranks = self._session.world_size
        lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(ranks)]
        dist.all_gather(lengths, torch.tensor([len(data)]), group=self._world)
        longest = max(int(length) for length in lengths)
        texts = [torch.zeros(longest, dtype=torch.uint8) for _ in range(ranks)]
        dist.all_gather(texts, torch.nn.functional.pad(data, (0, longest - len(data))), group=self._world)
        return [
            json.loads(bytes(tensor_bytes(text)[: int(length)])) for text, length in zip(texts, lengths, strict=True)
        ]


_NOT_SHARED = "run.dir must be on a disk that all nodes share"


def lack_of_space(folder: Path, nbytes: int) -> str | None:
    """Why a checkpoint of ``nbytes`` does not fit beside what lies in ``folder``, if it does not."""
    free = shutil.disk_usage(folder).free
    if free >= nbytes + _SPARE_BYTES:
        return None
    return f"a checkpoint takes {size(nbytes)} and {folder} has {size(free)} free"


def _plain(records: dict[str, FileRecord]) -> list[tuple[str, tuple[int, int]]]:
    return [(name, (record.size, record.crc32)) for name, record in records.items()]


class _Writer:
    """This rank's files, one after the other. The first thing that goes wrong ends the writing, not the calls."""

    def __init__(self, folder: Path, plan: Plan) -> None:
        self._folder, self._plan = folder, plan
        self._dtypes = {spec.name: spec.dtype for file in plan.files for spec in file.specs}
        self._records: dict[str, FileRecord] = {}
        self._problem: str | None = None
        self._file = -1
        self._descriptor: int | None = None
        self._size = self._crc32 = 0

    def write(self, pieces: list[Piece], contents: list[memoryview]) -> None:
        """Append ``contents`` to the files their ``pieces`` belong to."""
        for piece, content in zip(pieces, contents, strict=True):
            if self._problem is not None:
                return
            try:
                if piece.file != self._file:
                    self._close()
                    self._open(piece.file)
                if not _is_finite(content, self._dtypes[piece.name]):
                    self._problem = f"{piece.name} is not finite: such a state is not worth resuming from"
                    return
                self._append(content)
            except OSError as error:
                self._fail(error)

    def finish(self) -> tuple[dict[str, FileRecord], str | None]:
        """The files written, and what went wrong."""
        try:
            self._close()
        except OSError as error:
            self._fail(error)
        return self._records, self._problem

    def _fail(self, error: OSError) -> None:
        path = self._folder / self._plan.files[max(self._file, 0)].name
        reason = f"cannot write {path}: {error.strerror}"
        self._problem = reason if self._folder.is_dir() else f"{reason}; {_NOT_SHARED}"

    def _open(self, index: int) -> None:
        self._file, self._size, self._crc32 = index, 0, 0
        file = self._plan.files[index]
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
        self._descriptor = os.open(self._folder / file.name, flags, 0o644)
        self._append(memoryview(header(file.specs)))

    def _append(self, content: memoryview) -> None:
        assert self._descriptor is not None
        self._crc32 = zlib.crc32(content, self._crc32)
        self._size += len(content)
        while content:
            content = content[os.write(self._descriptor, content) :]

    def _close(self) -> None:
        if self._descriptor is None:
            return
        descriptor, self._descriptor = self._descriptor, None
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        self._records[self._plan.files[self._file].name] = FileRecord(self._size, self._crc32)


def _is_finite(content: memoryview, dtype: torch.dtype) -> bool:
    if not dtype.is_floating_point or not len(content):
        return True
    return bool(torch.frombuffer(content, dtype=dtype).isfinite().all())
