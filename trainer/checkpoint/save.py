"""Writing checkpoints beside training: copied to host memory, sent to their owners, written, committed by a rename.

A save that fails (disk full, permission lost) costs that checkpoint and nothing else: training goes on, and every
checkpoint committed before stays.
"""

import json
import math
import os
import shutil
import time
import zlib
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from configs.errors import UserError
from configs.schema import CheckpointSection
from parallel.mesh import Layout
from trainer.checkpoint.manifest import FileRecord, fsync_folder, record_of, write_manifest
from trainer.checkpoint.plan import ALIGNMENT, BUCKET_BYTES, Part, Piece, Plan, deal_files, make_plan
from trainer.checkpoint.retention import MODEL, OPTIMIZER, STATE, folder_name, partial_name, prune
from trainer.checkpoint.tensors import header, index_json, tensor_bytes
from trainer.track import size

if TYPE_CHECKING:
    from launch.session import Session

_SPARE_BYTES = 64 * 2**20
_PIECE_BYTES = 4 * 2**20  # in one call: fits into a cache for all that is done to it, and other threads wait for less
_MOST_VIEWS = 512  # in one call; POSIX systems take at least 1024
_PUSH_BYTES = 16 * 2**20
_REMEMBERED_BYTES = 8 * _PUSH_BYTES
_CHUNK_BYTES = 2**29
_LOOKS = 10
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
        # Copies of one rank have nothing to exchange.
        self._copy = session.background_group(copies) if 1 < layout.shard < session.world_size else self._world
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        held = list(parts())
        self._plan = self._make_plan(held)
        mine = {piece.name for bucket in self._plan.writes for piece in bucket if piece.source == self._shard}
        self._kept = mine | {piece.name for sends in self._plan.sends for send in sends for piece in send}
        self._staged = self._allocate([part for _, part in held if part.spec.name in self._kept])
        self._running: Future[Saved] | None = None
        self._is_closed = False
        self._stall_seconds = 0.0

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
        return replace(saved, stall_seconds=self._stall_seconds)

    def close(self) -> Saved | None:
        """Let a save under way end, if it does so soon: whatever ended the run, what it holds is good.

        Returns what became of it, None where there was none or it goes on. May be called again.

        Raises:
            RuntimeError: a rank that took part is gone.
        """
        if self._is_closed:
            return None
        self._is_closed = True
        try:
            self._thread.submit(lambda: None).result(_ABANDONED_AFTER_SECONDS)
        except TimeoutError:
            self._session.must_not_wait = True
        self._thread.shutdown(wait=False, cancel_futures=True)
        return self.poll()

    # in the caller's thread -----------------------------------------------------------------------------------------

    def _stage(self) -> dict[str, Tensor]:
        """This rank's bytes of the tensors that its copy writes, as CPU tensors by name."""
        staged: dict[str, Tensor] = {}
        for _, part in self._parts():
            name, local = part.spec.name, part.local.detach()
            if name in self._staged:
                staged[name] = self._staged[name].copy_(local, non_blocking=True)
            elif name in self._kept:
                staged[name] = local.contiguous()  # training waits: nothing changes it meanwhile
        if self._session.device.type == "cuda":
            torch.cuda.synchronize(self._session.device)
        return staged

    def _allocate(self, parts: list[Part]) -> dict[str, Tensor]:
        """Room for a copy of ``parts`` in host memory, by name; none where training waits and they are there already.

        In chunks, since pinned memory is given in powers of two: up to twice what single tensors need.

        Raises:
            UserError: there is not so much memory.
        """
        on_device = self._session.device.type == "cuda"
        if self._section.mode == "sync" and not on_device:
            return {}
        staged: dict[str, Tensor] = {}
        chunk, used = torch.empty(0, dtype=torch.uint8), 0
        left = total = sum(_aligned(part.local.nbytes) for part in parts)
        try:
            for part in parts:
                room = _aligned(part.local.nbytes)
                if room > len(chunk) - used:
                    chunk = torch.empty(max(room, min(left, _CHUNK_BYTES)), dtype=torch.uint8, pin_memory=on_device)
                    used = 0
                flat = chunk[used : used + part.local.nbytes].view(part.local.dtype)
                staged[part.spec.name] = flat.view(part.local.shape)
                used, left = used + room, left - room
        except RuntimeError as error:
            raise UserError(
                f"rank {self._rank} cannot hold a copy of its {size(total)} of the state in host memory: "
                f"{str(error).splitlines()[0]}; use checkpoint.mode=sync, or more ranks with parallel=fsdp"
            ) from None
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
        try:
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
            return lack_of_space(self._folder, self._plan.total_bytes)
        except OSError as error:
            return f"cannot write {partial}: {error.strerror}"

    def _write(self, partial: Path, staged: dict[str, Tensor]) -> tuple[dict[str, FileRecord], str | None]:
        """Send this rank's pieces to their owners, and write what it owns. A collective of the ranks of one copy, to
        the end even where this rank cannot write any more."""
        plan, exchange = self._plan, _Exchange(self._plan, staged, self._shard, self._layout.shard, self._copy)
        writer = _Writer(partial, plan)
        exchange.begin(0)
        for number, writes in enumerate(plan.writes):
            contents = exchange.end(number)
            exchange.begin(number + 1)  # on its way while this bucket is written
            writer.write(writes, contents)
        return writer.finish()

    def _commit(self, partial: Path, final: Path, files: dict[str, FileRecord], state: dict[str, Any]) -> str | None:
        """Complete the folder and give it its name. Returns why that failed."""
        try:
            for stem in (MODEL, OPTIMIZER):
                specs = {file.name: file.specs for file in self._plan.files if file.name.startswith(stem)}
                if len(specs) > 1:
                    (partial / f"{stem}.safetensors.index.json").write_text(index_json(specs))
            self._write_extras(partial)
            (partial / STATE).write_text(json.dumps(state, indent=2, allow_nan=False) + "\n")
            for name in files:
                if not _appears(partial / name):
                    return f"{partial / name} was written by another node and is not here; " + _NOT_SHARED
            for name in sorted({path.name for path in partial.iterdir()} - files.keys()):
                with (partial / name).open("rb") as file:
                    os.fsync(file.fileno())
                files[name] = record_of(partial / name)
            write_manifest(partial, files)
            partial.rename(final)
        except OSError as error:
            return f"cannot write {final}: {error.strerror}"
        except Exception as error:  # whatever a recipe's files may bring: it costs the checkpoint, not the run
            return f"cannot write {final}: {type(error).__name__}: {error}"
        with suppress(OSError):
            fsync_folder(self._folder)
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


def _appears(path: Path) -> bool:
    """Whether a file of another node is there; a network disk may show it late."""
    for _ in range(_LOOKS):
        if path.exists():
            return True
        time.sleep(1)
    return False


def lack_of_space(folder: Path, nbytes: int) -> str | None:
    """Why a checkpoint of ``nbytes`` does not fit beside what lies in ``folder``, if it does not."""
    free = shutil.disk_usage(folder).free
    if free >= nbytes + _SPARE_BYTES:
        return None
    return f"a checkpoint takes {size(nbytes)} and {folder} has {size(free)} free"


def _plain(records: dict[str, FileRecord]) -> list[tuple[str, tuple[int, int]]]:
    return [(name, (record.size, record.crc32)) for name, record in records.items()]


class _Exchange:
    """The rounds of a plan: each brings one bucket from the ranks of this copy. One is under way at a time."""

    def __init__(
        self, plan: Plan, staged: dict[str, Tensor], shard: int, shards: int, group: "dist.ProcessGroup | None"
    ) -> None:
        self._group = group
        self._staged = {name: tensor.view(-1).view(torch.uint8) for name, tensor in staged.items()}
        self._under_way: dist.Work | None = None
        # [round][rank of the copy]: what goes there, and what comes from there.
        self._sends = [[[] if to == shard else send for to, send in enumerate(sends)] for sends in plan.sends]
        self._writes, self._is_alone = plan.writes, shards == 1
        self._receives: list[list[list[Piece]]] = [[[] for _ in range(shards)] for _ in plan.writes]
        for pieces, receives in zip(plan.writes, self._receives, strict=True):
            for piece in pieces:
                if piece.source != shard and not self._is_alone:
                    receives[piece.source].append(piece)
        self._outgoing = _buffer(self._sends)
        # Two: what has come is written while the next bucket comes.
        self._incoming = [_buffer(self._receives), _buffer(self._receives)]

    def begin(self, number: int) -> None:
        """Start to send and receive round ``number``, if there is one."""
        if self._is_alone or number >= len(self._sends):
            return
        position = 0
        for piece in chain(*self._sends[number]):
            self._outgoing[position : position + piece.nbytes].copy_(self._own(piece))
            position += _room(piece)
        out, into = ([sum(map(_room, pieces)) for pieces in side[number]] for side in (self._sends, self._receives))
        self._under_way = dist.all_to_all_single(
            self._incoming[number % 2][: sum(into)], self._outgoing[: sum(out)], into, out,
            group=self._group, async_op=True,
        )  # fmt: skip

    def end(self, number: int) -> list[Tensor]:
        """Bytes of what this rank writes in round ``number``, in order; they stay until the round after the next."""
        if self._under_way is not None:
            self._under_way.wait()
        position, received = 0, {}
        for piece in chain(*self._receives[number]):
            received[piece] = self._incoming[number % 2][position : position + piece.nbytes]
            position += _room(piece)
        return [received[piece] if piece in received else self._own(piece) for piece in self._writes[number]]

    def _own(self, piece: Piece) -> Tensor:
        return self._staged[piece.name][piece.start : piece.start + piece.nbytes]


def _room(piece: Piece) -> int:
    """Bytes that a piece takes on its way."""
    return _aligned(piece.nbytes)


def _aligned(nbytes: int) -> int:
    """With numbers of several sizes one after the other, each begins where such a number may."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def _buffer(rounds: list[list[list[Piece]]]) -> Tensor:
    return torch.empty(max((sum(map(_room, chain(*pieces))) for pieces in rounds), default=0), dtype=torch.uint8)


class _Writer:
    """This rank's files, one after the other. The first thing that goes wrong ends the writing, not the calls."""

    def __init__(self, folder: Path, plan: Plan) -> None:
        self._folder, self._plan = folder, plan
        self._dtypes = {spec.name: spec.dtype for file in plan.files for spec in file.specs}
        self._records: dict[str, FileRecord] = {}
        self._problem: str | None = None
        self._file = -1
        self._open_files: dict[int, int] = {}
        self._pushed = 0

    def write(self, pieces: list[Piece], contents: list[Tensor]) -> None:
        """Append ``contents`` to the files their ``pieces`` belong to."""
        ready: list[memoryview] = []
        try:
            for piece, content in zip(pieces, contents, strict=True):
                if self._problem is not None:
                    return
                if piece.file != self._file:
                    self._append(ready)
                    ready = [self._open(piece.file)]
                for part in content.split(_PIECE_BYTES):
                    if not _is_finite(part, self._dtypes[piece.name]):
                        self._problem = f"{piece.name} is not finite: such a state is not worth resuming from"
                        return
                    self._count(tensor_bytes(part))
                ready.append(tensor_bytes(content))
            self._append(ready)
        except (OSError, MemoryError) as error:
            self._fail(error)

    def finish(self) -> tuple[dict[str, FileRecord], str | None]:
        """The files written, and what went wrong. They are on the disk."""
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
        reason = f"cannot write {path}: {getattr(error, 'strerror', None) or 'no memory'}"
        self._problem = reason if self._folder.is_dir() else f"{reason}; {_NOT_SHARED}"

    def _open(self, index: int) -> memoryview:
        """Begin a file. Returns what stands first in it."""
        file = self._plan.files[index]
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
        # Open to the end: the disk writes the first file while the next is filled, and all are waited for at once.
        self._open_files[index] = os.open(self._folder / file.name, flags, 0o644)
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
        """Write to the file that is open. Large calls: systems take a file's pages in larger units then."""
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
        """Have the disk begin with what it was given, instead of all at once at the end.

        What this call asks for is that the system forget the pages. It begins to write those that are not on the disk
        yet, and forgets those that are, the ones of earlier calls: so a checkpoint fills the same pages again instead
        of pushing out of memory what training reads.
        """
        if hasattr(os, "posix_fadvise"):
            first = max(0, self._pushed - _REMEMBERED_BYTES)
            with suppress(OSError):
                os.posix_fadvise(descriptor, first, size - first, os.POSIX_FADV_DONTNEED)
        self._pushed = size


def _is_finite(content: Tensor, dtype: torch.dtype) -> bool:
    if not dtype.is_floating_point or not content.numel():
        return True
    # One pass and no copies, where isfinite().all() takes several; either end is NaN when any number is.
    low, high = content.view(dtype).aminmax()
    return math.isfinite(low.item()) and math.isfinite(high.item())
