"""The watchdog: each rank reports its current phase, and a rank that holds up the others is reported.

The training thread only records the phases that it enters (``Pulse.enter``, an attribute write). A thread of each
rank reports them about once a second through the rendezvous store, over its own connection. Rank 0's thread reads
all reports; rank 1's does too, and prints if rank 0 has fallen silent. A run makes no progress if none of its ranks
enters a new phase. Then the rank that the others wait for is named, first in a warning, and at last as the reason
for which all ranks end, resumable.

If the first node fails, so do the store and the judging ranks. The ranks of other nodes detect this on their own.
"""

import json
import math
import os
import sys
import threading
import time
import traceback
from collections.abc import Iterable
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from serried.configs.errors import EXIT_STOPPED
from serried.configs.schema.sections import LaunchSection
from serried.records.run_folder import RunFolder
from serried.records.status import read_status, record_end
from serried.runtime.console import Console
from serried.runtime.exit import is_consequence
from serried.runtime.session import Session
from serried.trainer.monitor.diagnosis import Beat, Verdict, details, diagnose, judge_silent_by_others, seconds_text
from serried.trainer.monitor.heartbeat import DATA, END, TRAIN, Patience, Pulse

if TYPE_CHECKING:
    from torch.distributed import Store

_WARN_AT = 0.2
_STARVED_AT = 0.1
_TELL_STACK_AT = 0.1
_STACK_FRAMES = 40
_COLLECTIVES_TOLD = 8
_OTHERS_READY_WITHIN_SECONDS = 5.0
_GONE_AFTER_SECONDS, _ANSWERS_WITHIN_SECONDS = 60.0, 5.0
_WRITTEN_WITHIN_SECONDS = 5.0


class Watchdog:
    """One rank's thread that reports the rank's phase and, on ranks 0 and 1, reads the reports of all."""

    def __init__(
        self, section: LaunchSection, session: Session, run_dir: Path, console: Console, folder: RunFolder | None
    ) -> None:
        """Start the thread. ``folder``: on rank 0 only."""
        self._section = section
        self._session = session
        self._run_dir = run_dir
        self._console, self._folder = console, folder
        self.pulse = Pulse()
        self._interval = min(1.0, section.step_timeout_seconds / 20)
        self._training_thread = threading.get_ident()
        self._keys = [f"beat/{rank}" for rank in range(session.world_size)]
        self._closing = threading.Event()
        self._told = 0
        self._answered = 0
        self._are_all_there = False
        self._patience = Patience(section, is_alone=session.world_size == 1)
        self._seen: dict[int, tuple[int, float]] = {}
        self._warned: Verdict | None = None
        self._starved: set[int] = set()
        self._failed_by: set[type[Exception]] = set()
        self._store: Store | None = None
        self._thread = threading.Thread(target=self._run, name="watchdog", daemon=True)
        self._thread.start()
        if session.rank != session.local_rank:  # those of the first node end with its launcher
            threading.Thread(target=self._watch_first_node, name="first node", daemon=True).start()

    def close(self) -> None:
        """Report the end of this rank, and stop the thread."""
        self.pulse.enter(END, self.pulse.now.step)
        self._closing.set()
        self._thread.join(2 * self._interval)

    # in its thread --------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        last, is_closing = time.monotonic(), False
        while not is_closing:  # report at once: nothing is judged before all have reported
            now = time.monotonic()
            # A machine that slept, or a suspended job, has not hung.
            elapsed, last = min(now - last, 2 * self._interval), now
            try:
                self._beat(elapsed)
            except RuntimeError:  # the store is unreachable: try again over a new connection
                self._store = None
            except Exception as error:  # a failure of the watchdog is no reason to end a run
                if type(error) not in self._failed_by:
                    self._failed_by.add(type(error))
                    self._console.say(f"WARNING    the watchdog of rank {self._session.rank} fails: {error!r}")
                    self._console.log(traceback.format_exc())
            is_closing = self._closing.wait(self._interval)
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
        is_ended = store.check(["end"])
        self._answered += 1
        if is_ended:
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
            *age, waits_for=self._session.exchange.waits_for, peers=list(self.pulse.phases.peers),
        )  # fmt: skip
        if beat.age_seconds > _TELL_STACK_AT * self._section.step_timeout_seconds:
            beat.stack = self._stack()
            beat.collectives = last_collectives(self._session.background_names())
        return beat

    def _stack(self) -> list[str]:
        """Return the stack of the training thread. Does not read source files: the disk may be the reason of the
        hang."""
        frame = sys._current_frames().get(self._training_thread)
        frames = traceback.StackSummary.extract(
            traceback.walk_stack(frame), limit=_STACK_FRAMES, lookup_lines=False
        )  # innermost first
        return [f"{entry.filename}:{entry.lineno} in {entry.name}" for entry in reversed(frames)]

    def _read(self, elapsed: float) -> list[Beat]:
        """Return the last report of each rank, timed by this rank's clock, since the clocks of nodes differ."""
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
                self._say(f"resumed    after standing still for {seconds_text(self._warned.stands_seconds)}")
                self._warned = None
            return
        verdict = diagnose(beats)
        limit = verdict.limit_seconds
        if limit is None or stands < verdict.warn_seconds:
            return
        if self._warned is None:
            ends = f"The run ends, resumably, when it has stood still for {seconds_text(limit)}"
            self._say(f"WARNING    no progress: {verdict}. {ends}")
            self._say("\n".join(details(verdict.culprits)))
        self._warned = verdict
        if stands >= limit:
            self._end(verdict, beats)

    def _tell_of_starved(self, beats: Iterable[Beat]) -> None:
        threshold = _STARVED_AT * self._section.step_timeout_seconds
        for beat in beats:
            is_starved = beat.phase == DATA and beat.age_seconds > threshold and not beat.silent_seconds
            if is_starved and beat.rank not in self._starved:
                self._starved.add(beat.rank)
                self._say(f"WARNING    {beat.where()} waits for data. Is its disk slow, or data.workers too small?")

    def _say(self, text: str) -> None:
        if self._session.is_main:
            self._console.say(text)
        else:  # instead of rank 0, which has fallen silent
            with suppress(OSError):
                print(text, file=sys.stderr, flush=True)
            self._console.log(text)

    def _end(self, verdict: Verdict, beats: list[Beat]) -> None:
        """End the run on all ranks, resumable. Only its own watchdog thread can end a rank that hangs in a
        collective."""
        assert self._store is not None
        reason = f"no progress for {seconds_text(verdict.stands_seconds)}: {verdict}"
        awake = [beat for beat in beats if not beat.silent_seconds]
        step = max(0, min(beat.step - (beat.phase in (DATA, TRAIN)) for beat in awake))
        end = {"rank": verdict.culprits[0].rank, "reason": reason}
        self._store.set("end", json.dumps(end))
        self._prepare_to_end(end)
        self._say(
            f"stopped    {reason}. Run the same command to resume from the newest checkpoint; the stacks of all ranks "
            f"are in {self._run_dir / 'log' / 'hang.txt'}"
        )
        with suppress(OSError):
            text = "\n".join([reason, *details(beats)])
            (self._run_dir / "log" / "hang.txt").write_text(f"{text}\n", "utf-8", "backslashreplace")
        status = read_status(self._run_dir)
        if status is not None and status.state == "failed" and not is_consequence(status.reason or ""):
            pass  # a rank has reported why it left; other ranks' waiting is a consequence
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
        """End this process together with the others: ending alone would raise an error in ranks that wait for it."""
        assert self._store is not None
        self._prepare_to_end(end)
        self._store.set(f"ready/{self._session.rank}", "")
        with suppress(RuntimeError):
            self._store.wait(["leave"], timedelta(seconds=2 * _OTHERS_READY_WITHIN_SECONDS))
        os._exit(EXIT_STOPPED)

    # in a thread of its own: a store on a machine without power leaves a question open for long ---------------------

    def _watch_first_node(self) -> None:
        """End this process if for a minute the store has not answered and the training thread has entered no phase."""
        limit = min(_GONE_AFTER_SECONDS, self._section.step_timeout_seconds)
        answered = 0
        moment = self.pulse.now
        silent = 0.0
        last = time.monotonic()
        while not self._closing.wait(self._interval):
            now = time.monotonic()
            elapsed, last = min(now - last, 2 * self._interval), now  # as in _run
            is_still = answered == self._answered and moment is self.pulse.now
            silent = silent + elapsed if is_still else 0.0
            answered, moment = self._answered, self.pulse.now
            if silent >= limit:
                if self._store_answers():
                    silent = 0.0
                else:
                    self._end_without_first_node(silent)

    def _store_answers(self) -> bool:
        """Return whether the store answers a new connection: the reporting thread may fail for another reason."""
        has_answered = threading.Event()

        def ask() -> None:
            with suppress(RuntimeError):
                self._session.own_connection("watchdog", _ANSWERS_WITHIN_SECONDS).check(["end"])
                has_answered.set()

        threading.Thread(target=ask, name="first node asked", daemon=True).start()
        return has_answered.wait(_ANSWERS_WITHIN_SECONDS)

    def _end_without_first_node(self, silent: float) -> None:
        where = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
        reason = f"the first node is gone: its store at {where} has not answered for {seconds_text(silent)}"
        moment = self.pulse.now
        step = max(0, moment.step - (moment.phase in (DATA, TRAIN)))
        if self._session.local_rank == 0:
            with suppress(OSError):
                print(
                    f"stopped    {reason}. Run the same command to resume from the newest checkpoint",
                    file=sys.stderr, flush=True,
                )  # fmt: skip

        def write() -> None:
            if self._session.local_rank == 0:
                with suppress(OSError):
                    record_end(self._run_dir, "stopped", step=step, reason=reason, exit_code=EXIT_STOPPED)
            self._prepare_to_end({"rank": self._session.rank, "reason": reason})

        writer = threading.Thread(target=write, name="last words", daemon=True)
        writer.start()
        writer.join(_WRITTEN_WITHIN_SECONDS)  # the disk may have been on the first node
        os._exit(EXIT_STOPPED)

    def _prepare_to_end(self, end: dict[str, Any]) -> None:
        """Write this rank's diagnostics to the run folder."""
        rank = self._session.rank
        self._console.quiet()
        self._session.cause.record(end["rank"], end["reason"], EXIT_STOPPED)
        self._console.log("\n".join([end["reason"], *self._stack()]))
        with suppress(OSError):
            (self._run_dir / "log" / f"collectives-{rank}.json").write_text(
                json.dumps(_flight_records()) + "\n", "utf-8"
            )


def last_collectives(leave_out: Iterable[str]) -> list[tuple[str, int, str, bool]]:
    """Return the latest collectives that this process entered, oldest first, in the format of ``Beat.collectives``,
    without the groups in ``leave_out``. Empty if the backend does not record them."""
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
            if group and number <= group[-1][1]:  # a second run in this process: groups are numbered from the start
                group.clear()
            group.append((f"{backend}/{name}", number, operation, entry["retired"] or entry["state"] == "completed"))
    return [entry for group in told.values() for entry in group[-_COLLECTIVES_TOLD:]]


def _flight_records() -> list[dict[str, Any]]:
    """Return torch's records of this process's collectives, of NCCL and of other backends."""
    # Private, and there is no public name for it: torch's own tools read a pickle of the same.
    # tests/runs/test_watchdog.py guards its shape.
    from torch._C import _distributed_c10d as c10d

    dumps = [getattr(c10d, name, None) for name in ("_dump_nccl_trace_json", "_dump_fr_trace_json")]
    return [json.loads(dump(includeCollectives=True)) for dump in dumps if dump is not None]
