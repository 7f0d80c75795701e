"""Asynchronous checkpoint saves: copy to host memory, send to the files' owners, write, and commit.

A failed save (disk full, permission lost) loses only that checkpoint: training continues, and all earlier checkpoints
are kept.

A save may begin before an evaluation of the same step. Its files are then written during the evaluation, and the
commit waits for the results. If the run ends during the evaluation on any rank, the checkpoint is committed without
them.
"""

import json
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from serried.configs.errors import UserError
from serried.configs.formats import size
from serried.configs.schema.sections import CheckpointSection
from serried.parallel.layout.mesh import Layout
from serried.parallel.layout.process_groups import gather_plain
from serried.records.safetensors_files import TensorSpec, index_json
from serried.runtime.accelerator import wait_for_device
from serried.runtime.session import Session
from serried.trainer.checkpoint.checkpoints import Checkpoints
from serried.trainer.checkpoint.file_assignment import (
    BUCKET_BYTES,
    Part,
    Plan,
    PlannedFile,
    Target,
    aligned,
    deal_files,
    make_plan,
    targets_of,
)
from serried.trainer.checkpoint.manifest import FileRecord
from serried.trainer.checkpoint.retention import ADAPTER, STATE, STEMS
from serried.trainer.checkpoint.tensor_exchange import Exchange
from serried.trainer.checkpoint.writer import Files, Writer

_CHUNK_BYTES = 2**29
_OUTGOING_BYTES = 2**31
_LEAST_BUCKET_BYTES = 4 * 2**20
_ABANDONED_AFTER_SECONDS = 20.0  # torchrun kills processes 30 s after SIGTERM
_LOOK_SECONDS, _ANSWERS_WITHIN_SECONDS = 1.0, 5.0
_LOOK_FOR_END_SECONDS = 0.02
_ENDS = "a rank ends"
"""Key in the store that a rank sets if it ends while a save waits for the final state."""


@dataclass(frozen=True)
class Saved:
    """Result of a save, the same on every rank."""

    step: int
    path: Path
    """Folder through which the checkpoint is read."""
    where: str
    """Path or URL of the checkpoint on rank 0, for messages."""
    nbytes: int
    seconds: float
    """Duration of writing and commit in seconds, excluding the wait for an evaluation in between."""
    stall_seconds: float
    """Seconds that training waited during the save."""
    problem: str | None
    """One-line reason why no checkpoint was saved. None if it is committed."""
    notes: list[str]
    """Other problems, such as an old checkpoint that cannot be deleted."""
    is_taken_over: bool = False
    """Whether another process has taken over the run in the bucket, so that this one must end."""


class _Ranks:
    """The ranks that save together: their process groups for background threads, and the assignment of files."""

    def __init__(self, session: Session, layout: Layout) -> None:
        """Create the process groups. This is a collective call."""
        self.layout, self._rank = layout, session.rank
        blocks = [range(first, first + layout.block) for first in range(0, session.world_size, layout.block)]
        self._world = session.background_group([range(session.world_size)])
        # Blocks that have a single rank exchange nothing.
        self.block = session.background_group(blocks) if 1 < layout.block < session.world_size else self._world

    @property
    def rank_of_block(self) -> int:
        """Index of this rank within its block."""
        return self._rank % self.layout.block

    def all(self, value: Any) -> list[Any]:
        """Return the ``value`` of every rank, in rank order, gathered by the group of the background thread.

        The training thread may also call this while the background thread is idle.
        """
        return [value] if self._world is None else gather_plain(value, self._world)

    def make_plan(self, parts: list[tuple[str, Part]]) -> Plan:
        """Assign ``parts``, the parts of this rank, to files and ranks. This is a collective call on all pipeline
        stages."""
        stage = self.layout.coordinates(self._rank).pipeline
        files: list[PlannedFile] = []
        targets: dict[str, Target] = {}
        for stem in STEMS:
            mine = targets_of((part for of, part in parts if of == stem), stage)
            files += deal_files(
                self._of_all_stages(mine), stem, self.layout.world // self.layout.pipeline, is_spread=stem != ADAPTER
            )  # PEFT opens only a single file
            targets |= mine
        # In one round, all owners may need data from the same rank.
        bucket = max(_LEAST_BUCKET_BYTES, min(BUCKET_BYTES, _OUTGOING_BYTES // self.layout.block))
        return make_plan(files, targets, self.layout, self._rank, bucket)

    def _of_all_stages(self, mine: Mapping[str, Target]) -> list[list[TensorSpec]]:
        """Return the tensors that each stage saves. ``mine``: tensors that this rank's stage saves."""
        specs, stages = [target.spec for target in mine.values()], self.layout.pipeline
        if stages == 1:
            return [specs]
        ranks = self.layout.world // stages
        answers = self.all([spec.plain() for spec in specs] if self._rank % ranks == 0 else None)
        return [[TensorSpec.of_plain(entry) for entry in answer] for answer in answers[::ranks]]


class HostCopies:
    """The tensors of the state, and host memory copies of the data that this rank's replica writes."""

    def __init__(self, parts: Callable[[], Iterable[tuple[str, Part]]], session: Session, mode: str) -> None:
        """``parts``: see ``Checkpointer``. ``mode``: ``checkpoint.mode``."""
        self._parts, self._session = parts, session
        self.mode = mode
        self._planned: list[tuple[str, torch.dtype, tuple[int, ...]]] = []
        self._kept: set[str] = set()
        self._copies: dict[str, Tensor] = {}

    def tensors(self) -> list[tuple[str, Part]]:
        """Return the current tensors of the state, each with the stem of its files."""
        return list(self._parts())

    def are_outdated(self) -> bool:
        """Return whether the names, dtypes or shapes of the tensors have changed since the last ``allocate``."""
        return _names_and_shapes(self._parts()) != self._planned

    def allocate(self, held: Sequence[tuple[str, Part]], plan: Plan, rank_of_block: int) -> None:
        """Allocate copies of the tensors in ``held`` for which ``plan`` needs data from this rank."""
        self._planned = _names_and_shapes(held)
        pieces = (piece for bucket in plan.writes for window in bucket for piece in window.pieces)
        mine = {piece.part for piece in pieces if piece.source == rank_of_block}
        self._kept = mine | {piece.part for sends in plan.sends for send in sends for piece in send}
        kept = {part.name: part for _, part in reversed(held) if part.name in self._kept}
        self._copies = self._allocated([*kept.values()])

    def take(self) -> dict[str, Tensor]:
        """Copy this rank's shards of the tensors that its replica writes. Returns CPU tensors by name."""
        staged: dict[str, Tensor] = {}
        for _, part in self._parts():
            name, local = part.name, part.local.detach()
            if name in staged:
                continue  # a tied parameter that this rank holds twice
            if name in self._copies:
                staged[name] = self._copies[name].copy_(local, non_blocking=True)
            elif name in self._kept:
                staged[name] = local.contiguous()  # training waits, so it does not change meanwhile
        wait_for_device(self._session.device)
        return staged

    def _allocated(self, parts: list[Part]) -> dict[str, Tensor]:
        """Allocate copies of ``parts`` in host memory, by name. If training waits, skip tensors in host memory.

        The copies are allocated in chunks, since pinned memory is rounded up to powers of two. Single tensors could
        take up to twice their size.

        Raises ``UserError`` if there is not enough memory.
        """
        on_device = self._session.device.type != "cpu"
        if self.mode == "sync":
            parts = [part for part in parts if part.local.device.type != "cpu"]
        staged: dict[str, Tensor] = {}
        chunk, used = torch.empty(0, dtype=torch.uint8), 0
        left = total = sum(aligned(part.local.nbytes) for part in parts)
        try:
            for part in parts:
                room = aligned(part.local.nbytes)
                if room > len(chunk) - used:
                    chunk = torch.empty(max(room, min(left, _CHUNK_BYTES)), dtype=torch.uint8, pin_memory=on_device)
                    used = 0
                flat = chunk[used : used + part.local.nbytes].view(part.local.dtype)
                staged[part.name] = flat.view(part.local.shape)
                used, left = used + room, left - room
        except RuntimeError as error:
            smaller = "checkpoint.mode=sync, or " if self.mode == "async" else ""
            raise UserError(
                f"rank {self._session.rank} cannot copy its {size(total)} of state to host memory: "
                f"{str(error).splitlines()[0]}; use {smaller}more ranks with parallel=fsdp"
            ) from None
        return staged


class Checkpointer:
    """Save the state of a run, one checkpoint at a time. Every rank has one instance and calls it at the same steps."""

    def __init__(
        self,
        checkpoints: Checkpoints,
        section: CheckpointSection,
        layout: Layout,
        session: Session,
        parts: Callable[[], Iterable[tuple[str, Part]]],
        write_extras: Callable[[Path], None],
    ) -> None:
        """Plan the files. This is a collective call.

        Args:
            parts: Yields the tensors of the state, each with the stem of its files, in the same order on every rank.
            write_extras: Writes the files that are stored with the weights.
        """
        self._checkpoints = checkpoints
        self._attempt = ""
        self._session = session
        self._write_extras = write_extras
        self._ranks = _Ranks(session, layout)
        self._copies = HostCopies(parts, session, section.mode)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._plan_save()
        self._running: Future[Saved] | None = None
        self._final_state: Future[dict[str, Any] | None] | None = None
        """Set by ``finish``. The running save waits for it. If the result is None, the state of ``begin`` is saved."""
        self._is_closed = False
        self._stall_seconds = 0.0

    def _plan_save(self) -> None:
        """Assign the data of the current tensors to files and ranks."""
        held = self._copies.tensors()
        self._plan = self._ranks.make_plan(held)
        self._copies.allocate(held, self._plan, self._ranks.rank_of_block)

    @property
    def had_no_answer(self) -> bool:
        """Whether the last save failed on this rank because the bucket did not answer."""
        return self._checkpoints.had_no_answer

    @property
    def is_begun(self) -> bool:
        """Whether a started save waits for ``finish``."""
        return self._final_state is not None and not self._final_state.done()

    def begin(self, step: int, state: dict[str, Any]) -> None:
        """Start to save ``step``. With ``checkpoint.mode=sync``, also write all tensors. ``finish`` commits the save.

        ``state``: plain data for state.json. If the run ends before ``finish``, ``close`` commits the save with it.

        Returns as soon as training may change the tensors. Call ``wait`` first to take the result of the previous save.
        """
        assert self._running is None, "one save at a time"
        started = time.perf_counter()
        has_changed = self._copies.are_outdated()  # the first step creates optimizer state
        if self._ranks.layout.pipeline > 1:  # each rank knows the state of its own stage only
            has_changed = any(self._ranks.all(has_changed))
        if has_changed:
            self._plan_save()
        self._checkpoints.hurry(self._copies.mode == "sync")
        writing = self._thread.submit(self._write_all, step, self._copies.take())
        self._final_state = Future()
        self._running = self._thread.submit(self._save, step, state, writing, self._final_state, started)
        if self._copies.mode == "sync":
            with suppress(Exception):  # wait() raises it
                writing.result()
        self._stall_seconds = time.perf_counter() - started

    def finish(self, state: dict[str, Any] | None = None) -> None:
        """Commit the save that ``begin`` started. With ``checkpoint.mode=sync``, wait until it is committed.

        ``state`` replaces the state given to ``begin``.
        """
        assert self._final_state is not None
        assert self._running is not None
        started = time.perf_counter()
        self._final_state.set_result(state)
        if self._copies.mode == "sync":
            with suppress(Exception):  # wait() raises it
                self._running.result()
        self._stall_seconds += time.perf_counter() - started

    def poll(self) -> Saved | None:
        """Return the result of the running save if it has ended on this rank, else None. Does not wait."""
        return self._take() if self._running is not None and self._running.done() else None

    def wait(self) -> Saved | None:
        """Wait for the running save and return its result. None if no save is running.

        Raises:
            RuntimeError: A participating rank has ended.
        """
        if self._running is None:
            return None
        assert not self.is_begun, "it would wait forever"
        started = time.perf_counter()
        self._checkpoints.hurry(True)
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
        """Wait a short time for a running save. Its content is valid no matter how the run ended.

        If the save waits for ``finish``, all ranks commit it with the state of ``begin``. Their training threads need
        not take part.

        Returns the result, or None if no save was running or it is not complete. May be called again.

        Raises:
            RuntimeError: A participating rank has ended.
        """
        if self._is_closed:
            return None
        self._is_closed = True
        self._checkpoints.hurry(True)
        if self._final_state is not None and not self._final_state.done():
            self._final_state.set_result(None)
            with suppress(RuntimeError):  # the store is gone if its host has failed
                self._session.own_connection("checkpoint", _ANSWERS_WITHIN_SECONDS).set(_ENDS, "")
        try:
            self._thread.submit(lambda: None).result(_ABANDONED_AFTER_SECONDS)
        except TimeoutError:
            self._session.must_not_wait = True
        self._thread.shutdown(wait=False, cancel_futures=True)
        return self.poll()

    def give_up(self, sever: Callable[[], None]) -> bool:
        """Abandon a running save, since a rank that takes part in it is lost. Returns whether its thread has ended.

        ``sever``: closes the connections to other ranks. Called often, since the thread may open a wait after a call.
        """
        self._is_closed = True
        self._checkpoints.hurry(True)
        if self._final_state is not None and not self._final_state.done():
            self._final_state.set_exception(RuntimeError("the save was abandoned"))
        end = self._thread.submit(lambda: None)
        deadline = time.monotonic() + _ABANDONED_AFTER_SECONDS
        while not end.done() and time.monotonic() < deadline:
            sever()
            time.sleep(_LOOK_FOR_END_SECONDS)
        self._thread.shutdown(wait=False, cancel_futures=True)
        return end.done()

    # background thread ----------------------------------------------------------------------------------------------

    def _write_all(self, step: int, staged: dict[str, Tensor]) -> tuple[dict[str, FileRecord], str | None]:
        """Write the tensor files of all ranks. Returns their records, and the reason if this failed on any rank."""
        total_bytes = self._plan.total_bytes
        begun = self._ranks.all(self._checkpoints.begin(step, total_bytes) if self._session.is_main else None)[0]
        self._attempt, problem = begun
        if problem is not None:
            return {}, problem
        records, problem = self._write(self._checkpoints.files(self._attempt), staged)
        answers = self._ranks.all({"problem": problem, "files": records})
        problem = next((answer["problem"] for answer in answers if answer["problem"]), None)
        return {name: FileRecord(*record) for answer in answers for name, record in answer["files"].items()}, problem

    def _save(
        self, step: int, state: dict[str, Any], writing: "Future[tuple[dict[str, FileRecord], str | None]]",
        final_state: "Future[dict[str, Any] | None]", started: float,
    ) -> Saved:  # fmt: skip
        notes: list[str] = []
        is_taken_over = False
        files, problem = writing.result()
        written = may_commit = time.perf_counter()
        if problem is None:
            state = self._await(final_state) or state
            may_commit = time.perf_counter()
            if self._session.is_main:
                problem = self._checkpoints.commit(
                    self._attempt, step, files, partial(self._write_others, state), state, notes
                )
            try:
                problem, is_taken_over = self._ranks.all([problem, not self._checkpoints.is_ours])[0]
            except RuntimeError:  # a rank has ended, which ends the run; rank 0 still reports its commit
                if not self._session.is_main:
                    raise
        if problem is not None and self._session.is_main:
            self._checkpoints.discard(self._attempt)
        seconds = written - started + time.perf_counter() - may_commit
        where = self._checkpoints.where(step) if self._session.is_main else ""
        path = self._checkpoints.path(step)
        return Saved(step, path, where, self._plan.total_bytes, seconds, 0.0, problem, notes, is_taken_over)

    def _await(self, final_state: "Future[dict[str, Any] | None]") -> dict[str, Any] | None:
        """Return the state that ``finish`` sets, or None as soon as another rank ends before that.

        This rank's training thread may then wait for the ended rank in the evaluation.
        """
        with suppress(TimeoutError):
            return final_state.result(_LOOK_SECONDS)
        with suppress(RuntimeError):  # the store is gone if its host has failed
            store = self._session.own_connection("checkpoint", _ANSWERS_WITHIN_SECONDS)
            while not store.check([_ENDS]):
                with suppress(TimeoutError):
                    return final_state.result(_LOOK_SECONDS)
            return None
        return final_state.result()

    def _write(self, files: Files, staged: dict[str, Tensor]) -> tuple[dict[str, FileRecord], str | None]:
        """Send this rank's pieces to their owners, and write the files that this rank owns.

        This is a collective call on the ranks of one block. It is completed even if this rank can no longer write.
        """
        plan, ranks = self._plan, self._ranks
        exchange = Exchange(plan, staged, ranks.rank_of_block, ranks.layout.block, ranks.block)
        writer = Writer(files, plan)
        exchange.begin(0)
        for number, writes in enumerate(plan.writes):
            contents = exchange.end(number)
            exchange.begin(number + 1)  # transfer the next bucket while this one is written
            writer.write(writes, contents)
        return writer.finish()

    def _write_others(self, state: dict[str, Any], folder: Path) -> None:
        """Write the files of a checkpoint other than its tensors into ``folder``."""
        for stem in STEMS:
            specs = {file.name: file.specs for file in self._plan.files if file.name.startswith(stem)}
            if len(specs) > 1:
                (folder / f"{stem}.safetensors.index.json").write_text(index_json(specs), "utf-8")
        self._write_extras(folder)
        (folder / STATE).write_text(json.dumps(state, indent=2, allow_nan=False) + "\n", "utf-8")


def _names_and_shapes(parts: Iterable[tuple[str, Part]]) -> list[tuple[str, torch.dtype, tuple[int, ...]]]:
    return [(part.name, part.held.tensor.dtype, part.shards.shape) for _, part in parts]
