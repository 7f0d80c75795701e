"""Who is stuck, where, since when: each rank tells what it does, and one that holds the others up is named.

The training thread only says what it begins (``Pulse.enter``, an attribute write). A thread of each rank tells that
about once a second, through the store in which the processes met, over a connection of its own. Rank 0's thread reads
what all tell; rank 1's does too, and speaks where rank 0 has fallen silent. A run stands still when none of its ranks
begins anything new: then the rank that the others wait for is named, first in a warning, and at last in the reason for
which all end, resumably.
"""

import json
import math
import os
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from serried.configs.errors import EXIT_STOPPED
from serried.configs.schema import LaunchSection
from serried.parallel.phases import Phases
from serried.records.run_folder import RunFolder
from serried.records.status import read_status, record_end
from serried.runtime.cause import is_consequence
from serried.runtime.console import Console
from serried.runtime.session import Session

if TYPE_CHECKING:
    from torch.distributed import Store

SET_UP, DATA, TRAIN, LOG, EVALUATE, SAVE, END = PHASES = (
    "set-up", "data.next", "forward, backward and update", "reading and logging results", "evaluation", "saving",
    "the end of the run",
)  # fmt: skip
"""What a rank may be doing, in the order of a step."""

_PATIENT = (SET_UP, SAVE, END)
_WARN_AT = 0.2
_STARVED_AT = 0.1
_TELL_STACK_AT = 0.1
_WARN_AT_TIMES_LONGEST, _END_AT_TIMES_FIRST = 1.5, 2.0
_STACK_FRAMES = 40
_COLLECTIVES_TOLD = 8
_OTHERS_READY_WITHIN_SECONDS = 5.0


class Moment(NamedTuple):
    """What the training thread does."""

    phase: str
    step: int
    is_first: bool
    """Whether it does that for the first time: it may compile, or fill a cache."""


class Pulse:
    """What this rank does at present, as its training thread says."""

    def __init__(self) -> None:
        self._seen: set[str] = set()
        self.now = Moment(SET_UP, 0, True)
        self.phases = Phases()
        """The same, and within a step the finer part of it."""
        self.phases.enter(SET_UP)

    def enter(self, phase: str, step: int) -> None:
        """Begin ``phase`` of ``step``. Entering it again counts as progress."""
        self.now = Moment(phase, step, phase not in self._seen)
        self._seen.add(phase)
        self.phases.enter(phase)


@dataclass
class Beat:
    """What one rank tells of itself."""

    rank: int
    host: str
    number: int
    """Grows with every beat; a stopped process tells no more."""
    phase: str
    step: int
    age_seconds: float
    """Since it began that."""
    limit_seconds: float | None
    """How long that may take; None: for ever."""
    warn_seconds: float
    """How long it may take before it is worth a warning."""
    waits_for: str | None = None
    """Whom it waits for, where it knows: in exchanges through the store."""
    stack: list[str] = field(default_factory=list)
    """Of the training thread, innermost last; once it has stood still for a while."""
    collectives: list[tuple[str, int, str, bool]] = field(default_factory=list)
    """The last ones entered: group, number in the group, operation with sizes, whether it is done. Likewise."""
    silent_seconds: float = 0.0
    """How long nothing has come from the rank."""

    @property
    def stands_seconds(self) -> float:
        """How long the rank has not begun anything new, as far as anyone knows."""
        return self.age_seconds + self.silent_seconds

    def where(self) -> str:
        """``rank 5 on n2 in data.next of step 812 for 61 s``."""
        text = f"rank {self.rank} on {self.host} in {self.phase}"
        if self.step:
            text += f" of step {self.step}"
        if self.silent_seconds:  # it may have gone on a little before it fell silent
            return f"{text} when its heartbeat stopped {_seconds(self.silent_seconds)} ago"
        return f"{text} for {_seconds(self.stands_seconds)}"


@dataclass
class Verdict:
    """Who holds the run up."""

    culprits: list[Beat]
    others: str
    """What the rest does meanwhile; empty where there is none."""
    stands_seconds: float
    """How long the whole run has stood still."""

    @property
    def limit_seconds(self) -> float | None:
        """How long the run may stand still for them."""
        limits = [beat.limit_seconds for beat in self.culprits]
        return None if None in limits else max(limit for limit in limits if limit is not None)

    @property
    def warn_seconds(self) -> float:
        """How long the run may stand still for them without a word."""
        return max(beat.warn_seconds for beat in self.culprits)

    def __str__(self) -> str:
        shown = "; ".join(beat.where() for beat in self.culprits[:3])
        more = f"; and {len(self.culprits) - 3} more" if len(self.culprits) > 3 else ""
        return f"{shown}{more}" + (f"; {self.others}" if self.others else "")


class Patience:
    """How long what a rank does may take: short in a step, long for what is done once, twice what it took when it was
    done first. A step that is slow by nature is no hang."""

    def __init__(self, section: LaunchSection, *, is_alone: bool) -> None:
        """``is_alone``: the process keeps nobody waiting, and may set up and save for as long as it takes."""
        self._section, self._is_alone = section, is_alone
        self._moment: Moment | None = None
        self._age_seconds = 0.0
        self._first: dict[str, float] = {}
        self._longest: dict[str, float] = {}

    def measure(self, moment: Moment, elapsed_seconds: float) -> tuple[float, float | None, float]:
        """Age of ``moment``, its limit (None: for ever), and the age at which it is worth a warning, now that
        ``elapsed_seconds`` have passed since the call before."""
        if moment is not self._moment:
            if self._moment is not None:
                phase = self._moment.phase
                self._longest[phase] = max(self._longest.get(phase, 0.0), self._age_seconds)
                if self._moment.is_first:
                    self._first[phase] = self._age_seconds
            self._moment, self._age_seconds = moment, 0.0
        self._age_seconds += elapsed_seconds
        if moment.phase in _PATIENT and self._is_alone:
            return self._age_seconds, None, 0.0
        is_patient = moment.phase in _PATIENT or moment.is_first
        limit = self._section.start_timeout_seconds if is_patient else self._section.step_timeout_seconds
        limit = max(limit, _END_AT_TIMES_FIRST * self._first.get(moment.phase, 0.0))
        warn = max(_WARN_AT * limit, _WARN_AT_TIMES_LONGEST * self._longest.get(moment.phase, 0.0))
        return self._age_seconds, limit, warn


def judge_silent_by_others(beats: list[Beat]) -> None:
    """A rank that fell silent may have left, stopped, or gone on from what it told last, a save, say, that has much
    time: what the others do decides how long they may wait for it."""
    awake = [beat for beat in beats if not beat.silent_seconds]
    for beat in beats:
        if beat.silent_seconds and awake:
            limits = [other.limit_seconds for other in awake]
            beat.limit_seconds = None if None in limits else max(limit for limit in limits if limit is not None)
            beat.warn_seconds = max(other.warn_seconds for other in awake)


def diagnose(beats: list[Beat]) -> Verdict:
    """Who of the ranks, which all stand still, is the one that the others wait for."""
    culprits, others = _silent(beats) or _missing_from_collective(beats) or _behind(beats)
    if len(culprits) == len(beats):
        others = others if len(beats) > 1 else ""
    return Verdict(culprits, others, min(beat.stands_seconds for beat in beats))


def _silent(beats: list[Beat]) -> tuple[list[Beat], str] | None:
    silent = [beat for beat in beats if beat.silent_seconds]
    return (silent, _waiting([beat for beat in beats if not beat.silent_seconds])) if silent else None


def _missing_from_collective(beats: list[Beat]) -> tuple[list[Beat], str] | None:
    """Who has not come to a collective that others wait in, or has entered another one in its place."""
    missing: dict[int, Beat] = {}
    odd: dict[int, tuple[Beat, str, str]] = {}
    is_any_pending = False
    for group in sorted({group for beat in beats for group, *_ in beat.collectives}):
        entered = {
            beat.rank: {number: (operation, done) for of, number, operation, done in beat.collectives if of == group}
            for beat in beats
        }
        members = [beat for beat in beats if entered[beat.rank]]
        pending = [number for mine in entered.values() for number, (_, done) in mine.items() if not done]
        if not pending:
            continue
        is_any_pending, awaited = True, min(pending)
        late = [beat for beat in members if max(entered[beat.rank]) < awaited]
        missing |= {beat.rank: beat for beat in late}
        operations = Counter(mine[awaited][0] for mine in entered.values() if awaited in mine)
        if not late and len(operations) > 1:
            (usual, most), (_, next_most) = operations.most_common(2)
            for beat in members:
                mine = entered[beat.rank].get(awaited, (usual, False))[0]
                if mine != usual or most == next_most:
                    odd[beat.rank] = (beat, mine, usual)
    # A rank may be late for one group because it waits in another: who waits nowhere comes first.
    waiting = {beat.rank for beat in beats if any(not done for *_, done in beat.collectives)}
    culprits = [beat for rank, beat in missing.items() if rank not in waiting] or list(missing.values())
    if culprits:
        named = {beat.rank for beat in culprits}
        return culprits, _waiting([beat for beat in beats if beat.rank not in named])
    if odd:
        entered_ = ", ".join(f"rank {rank} is in {mine}" for rank, (_, mine, _) in sorted(odd.items()))
        usual = "" if len(odd) == len(beats) else f" where the others are in {next(iter(odd.values()))[2]}"
        return [beat for beat, *_ in odd.values()], f"{entered_}{usual}: a collective was skipped, or is one too many"
    if is_any_pending:
        return beats, f"all {_waiting(beats).removeprefix('the others ')}: none is missing, so look at the network"
    return None


def _behind(beats: list[Beat]) -> tuple[list[Beat], str]:
    """Those that are furthest behind, leaving out who says that it waits."""
    working = [beat for beat in beats if beat.waits_for is None] or beats
    order = {phase: place for place, phase in enumerate(PHASES)}
    behind = min((beat.step, order[beat.phase]) for beat in working)
    culprits = [beat for beat in working if (beat.step, order[beat.phase]) == behind]
    named = {beat.rank for beat in culprits}
    return culprits, _waiting([beat for beat in beats if beat.rank not in named])


def _waiting(beats: list[Beat]) -> str:
    """What most of ``beats`` wait in."""
    if not beats:
        return ""
    kinds = Counter(
        next((f"wait in {operation}" for *_, operation, done in beat.collectives if not done), None)
        or (f"wait for {beat.waits_for}" if beat.waits_for else f"are in {beat.phase}")
        for beat in beats
    )
    steps = Counter(beat.step for beat in beats)
    step = steps.most_common(1)[0][0]
    return f"the others {kinds.most_common(1)[0][0]}" + (f" of step {step}" if step else "")


class Watchdog:
    """One rank's thread that tells what the rank does and, on ranks 0 and 1, watches what the others tell."""

    def __init__(
        self,
        section: LaunchSection,
        session: Session,
        run_dir: Path,
        console: Console,
        folder: RunFolder | None,
    ) -> None:
        """Begin to tell and to watch. ``folder`` is there on rank 0 alone."""
        self._section, self._session, self._run_dir = section, session, run_dir
        self._console, self._folder = console, folder
        self.pulse = Pulse()
        self._interval = min(1.0, section.step_timeout_seconds / 20)
        self._training_thread = threading.get_ident()
        self._keys = [f"beat/{rank}" for rank in range(session.world_size)]
        self._closing = threading.Event()
        self._told, self._are_all_there = 0, False
        self._patience = Patience(section, is_alone=session.world_size == 1)
        self._seen: dict[int, tuple[int, float]] = {}
        self._warned: Verdict | None = None
        self._starved: set[int] = set()
        self._failed_by: set[type[Exception]] = set()
        self._store: Store | None = None
        self._thread = threading.Thread(target=self._run, name="watchdog", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop watching and telling, once the others have been told that this rank has come to its end."""
        self.pulse.enter(END, self.pulse.now.step)
        self._closing.set()
        self._thread.join(2 * self._interval)

    # in its thread --------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        last = time.monotonic()
        while not self._closing.wait(self._interval):
            now = time.monotonic()
            # A machine that slept, or a job that was suspended, has not stood still.
            elapsed, last = min(now - last, 2 * self._interval), now
            try:
                self._beat(elapsed)
            except RuntimeError:  # the store is out of reach: try again over a new connection
                self._store = None
            except Exception as error:  # whatever is wrong with the watchdog, it is no reason to end a run
                if type(error) not in self._failed_by:
                    self._failed_by.add(type(error))
                    self._console.say(f"WARNING    the watchdog of rank {self._session.rank} fails: {error!r}")
                    self._console.log(traceback.format_exc())
        if self._store is not None:
            with suppress(RuntimeError):
                self._tell(0.0)

    def _tell(self, elapsed: float) -> "Store":
        if self._store is None:
            self._store = self._session.own_connection("watchdog")
        self._store.set(self._keys[self._session.rank], json.dumps(vars(self._my_beat(elapsed))))
        return self._store

    def _beat(self, elapsed: float) -> None:
        store = self._tell(elapsed)
        if store.check(["end"]):
            self._obey(json.loads(store.get("end")))
        if self._session.rank <= 1:
            self._are_all_there = self._are_all_there or store.check(self._keys)
            if self._are_all_there:
                self._judge(self._read(elapsed))

    def _my_beat(self, elapsed: float) -> Beat:
        age = self._patience.measure(self.pulse.now, elapsed)
        self._told += 1
        beat = Beat(
            self._session.rank, self._session.host(), self._told, self.pulse.now.phase, self.pulse.now.step,
            *age, waits_for=self._session.exchange.waits_for,
        )  # fmt: skip
        if beat.age_seconds > _TELL_STACK_AT * self._section.step_timeout_seconds:
            beat.stack = self._stack()
            beat.collectives = last_collectives(self._session.background_names())
        return beat

    def _stack(self) -> list[str]:
        """Where the training thread is; no source is read, the disk may be what hangs."""
        frame = sys._current_frames().get(self._training_thread)
        frames = traceback.StackSummary.extract(
            traceback.walk_stack(frame), limit=_STACK_FRAMES, lookup_lines=False
        )  # innermost first
        return [f"{entry.filename}:{entry.lineno} in {entry.name}" for entry in reversed(frames)]

    def _read(self, elapsed: float) -> list[Beat]:
        """What all ranks told last. By this rank's clock: clocks of nodes differ."""
        assert self._store is not None
        beats = [Beat(**json.loads(text)) for text in self._store.multi_get(self._keys)]
        for beat in beats:
            number, silent = self._seen.get(beat.rank, (0, 0.0))
            silent = silent + elapsed if number == beat.number else 0.0
            self._seen[beat.rank] = beat.number, silent
            beat.silent_seconds = silent if silent > 5 * self._interval else 0.0
        judge_silent_by_others(beats)
        return beats

    def _judge(self, beats: list[Beat]) -> None:
        rank = self._session.rank
        if rank == 1 and not beats[0].silent_seconds:
            return
        self._tell_of_starved(beats)
        stands = min(beat.stands_seconds for beat in beats)
        if stands < _WARN_AT * self._section.step_timeout_seconds:
            if self._warned is not None:
                self._say(f"resumed    after standing still for {_seconds(self._warned.stands_seconds)}")
                self._warned = None
            return
        verdict = diagnose(beats)
        limit = verdict.limit_seconds
        if limit is None or stands < verdict.warn_seconds:
            return
        if self._warned is None:
            ends = f"The run ends, resumably, when it has stood still for {_seconds(limit)}"
            self._say(f"WARNING    no progress: {verdict}. {ends}")
            self._say("\n".join(_told_at_length(verdict.culprits)))
        self._warned = verdict
        if stands >= limit:
            self._end(verdict, beats)

    def _tell_of_starved(self, beats: Iterable[Beat]) -> None:
        threshold = _STARVED_AT * self._section.step_timeout_seconds
        for beat in beats:
            is_starved = beat.phase == DATA and beat.age_seconds > threshold and not beat.silent_seconds
            if is_starved and beat.rank not in self._starved:
                self._starved.add(beat.rank)
                self._say(f"WARNING    {beat.where()} waits for data. Is its disk slow, or trainer.workers too small?")

    def _say(self, text: str) -> None:
        if self._session.is_main:
            self._console.say(text)
        else:  # in place of rank 0, which has fallen silent
            with suppress(OSError):
                print(text, file=sys.stderr, flush=True)
            self._console.log(text)

    def _end(self, verdict: Verdict, beats: list[Beat]) -> None:
        """End the run for all, resumably; whoever hangs in a collective can be ended by its own thread alone."""
        assert self._store is not None
        reason = f"no progress for {_seconds(verdict.stands_seconds)}: {verdict}"
        awake = [beat for beat in beats if not beat.silent_seconds]
        step = max(0, min(beat.step - (beat.phase in (DATA, TRAIN)) for beat in awake))
        end = {"rank": verdict.culprits[0].rank, "reason": reason}
        self._store.set("end", json.dumps(end))
        self._prepare_to_end(end)
        self._say(
            f"stopped    {reason}. Run the same command to resume from the newest checkpoint; the stacks of all ranks are "
            f"in {self._run_dir / 'log' / 'hang.txt'}"
        )
        with suppress(OSError):
            text = "\n".join([reason, *_told_at_length(beats)])
            (self._run_dir / "log" / "hang.txt").write_text(f"{text}\n", "utf-8", "backslashreplace")
        status = read_status(self._run_dir)
        if status is not None and status.state == "failed" and not is_consequence(status.reason or ""):
            pass  # a rank has told why it left; that the others waited for it is only what came of that
        elif self._folder is not None:
            self._folder.stop_early(step, reason, EXIT_STOPPED)
        else:
            with suppress(OSError):
                record_end(self._run_dir, "stopped", step=step, reason=reason, exit_code=EXIT_STOPPED)
        with suppress(RuntimeError):  # not all are, in that time
            ready = [f"ready/{beat.rank}" for beat in awake if beat.rank != self._session.rank]
            self._store.wait(ready, timedelta(seconds=_OTHERS_READY_WITHIN_SECONDS))
        self._store.set("leave", "")
        os._exit(EXIT_STOPPED)

    def _obey(self, end: dict[str, Any]) -> None:
        """End this process with the others: the first to go would wake those who wait for it with an error."""
        assert self._store is not None
        self._prepare_to_end(end)
        self._store.set(f"ready/{self._session.rank}", "")
        with suppress(RuntimeError):
            self._store.wait(["leave"], timedelta(seconds=2 * _OTHERS_READY_WITHIN_SECONDS))
        os._exit(EXIT_STOPPED)

    def _prepare_to_end(self, end: dict[str, Any]) -> None:
        """Leave what this rank knows in the run folder."""
        rank = self._session.rank
        self._console.quiet()
        self._session.cause.record(end["rank"], end["reason"], EXIT_STOPPED)
        self._console.log("\n".join([end["reason"], *self._stack()]))
        with suppress(OSError):
            (self._run_dir / "log" / f"collectives-{rank}.json").write_text(
                json.dumps(_flight_records()) + "\n", "utf-8"
            )


def _told_at_length(beats: Iterable[Beat]) -> list[str]:
    lines = []
    for beat in beats:
        lines.append(f"  {beat.where()}")
        lines += [f"    {entry}" for entry in beat.stack]
        lines += [
            f"    {'done' if done else 'waits'}: {operation}, number {number} of group {group}"
            for group, number, operation, done in _told_collectives(beat)
        ]
    return lines


def _told_collectives(beat: Beat) -> list[tuple[str, int, str, bool]]:
    return [entry for entry in beat.collectives if not entry[-1]] or beat.collectives[-3:]


def _seconds(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"


def last_collectives(leave_out: Iterable[str]) -> list[tuple[str, int, str, bool]]:
    """The last collectives that this process entered, oldest first, as the fields of ``Beat.collectives``; those of the
    groups named in ``leave_out`` are not told. Empty where the backend records none."""
    left_out = set(leave_out)
    told: dict[str, list[tuple[str, int, str, bool]]] = {}
    for record in _flight_records():
        for entry in record.get("entries", ()):
            name = entry["process_group"][0]
            if name in left_out or entry["is_p2p"]:
                continue
            backend, _, operation = entry["profiling_name"].rpartition(":")
            number, sizes = entry["collective_seq_id"], [math.prod(shape) for shape in entry["input_sizes"]]
            if sizes:
                operation += f" of {sum(sizes)} numbers"
            group = told.setdefault(f"{backend}/{name}", [])
            if group and number <= group[-1][1]:  # a process that is in its second run: groups are numbered anew
                group.clear()
            group.append((f"{backend}/{name}", number, operation, entry["retired"] or entry["state"] == "completed"))
    return [entry for group in told.values() for entry in group[-_COLLECTIVES_TOLD:]]


def _flight_records() -> list[dict[str, Any]]:
    """torch's records of this process's collectives, through NCCL and through others; none where there are none."""
    # Private, and there is no public name for it: torch's own tools read a pickle of the same. tests/test_watchdog.py
    # guards its shape.
    from torch._C import _distributed_c10d as c10d

    dumps = [getattr(c10d, name, None) for name in ("_dump_nccl_trace_json", "_dump_fr_trace_json")]
    return [json.loads(dump(includeCollectives=True)) for dump in dumps if dump is not None]
