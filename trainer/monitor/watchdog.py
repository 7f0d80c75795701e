"""The watchdog: each rank reports its current phase, and a rank that blocks the others is reported.

The training thread only records the phases that it enters (``Pulse.enter``, an attribute write). A thread of each rank
reports them about once a second through the rendezvous store, over its own connection. Rank 0's thread reads all
reports. Rank 1's thread does too, and prints if rank 0 has fallen silent. A run makes no progress if none of its ranks
enters a new phase. Then the rank that the others wait for is reported, first in a warning, and finally as the reason
for a resumable end of all ranks. A rank whose process has ended without an error message is reported at once by ranks
on other nodes, whose connections to it are closed.

If the first node fails, the store and the judging ranks fail with it. The ranks of other nodes detect this on their
own.
"""

import json
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from serried.configs.schema.launch_plan_track import LaunchSection
from serried.records.run_folder import RunFolder
from serried.runtime.console import Console
from serried.runtime.peer_sockets import PeerSockets
from serried.runtime.session import Session
from serried.trainer.monitor.diagnosis import Beat, Verdict, details, diagnose, judge_silent_by_others, seconds_text
from serried.trainer.monitor.first_node import FirstNodeWatch
from serried.trainer.monitor.heartbeat import DATA, END, Pulse
from serried.trainer.monitor.joint_end import JointEnd
from serried.trainer.monitor.rank_report import RankReport

if TYPE_CHECKING:
    from torch.distributed import Store

_LEAVES_WITHIN_SECONDS = 10.0
"""Time for the training thread to notice that a rank is gone. On a GPU, it may wait for the rank forever."""
_SILENT_LOOKS = 3
_WARN_AT = 0.2
_STARVED_AT = 0.1


class Watchdog:
    """Thread that publishes this rank's report and, on ranks 0 and 1, judges the reports of all ranks."""

    def __init__(
        self, section: LaunchSection, session: Session, run_dir: Path, console: Console, folder: RunFolder | None,
        pulse: Pulse | None = None,
    ) -> None:  # fmt: skip
        """Start the thread.

        Args:
            folder: Run folder, on rank 0 only.
            pulse: Phase of this rank so far; None at the start.
        """
        self._session, self._console = session, console
        self.pulse = pulse or Pulse()
        self._report = RankReport(section, session, self.pulse)
        self._end = JointEnd(session, run_dir, console, folder, self._report)
        self._interval = min(1.0, section.step_timeout_seconds / 20)
        self._judge = _Judge(section, session, self._interval, self._say) if session.rank <= 1 else None
        self._closing = threading.Event()
        self._answers = 0
        self._store: Store | None = None
        self._neighbours = _Neighbours(session)
        self._thread = threading.Thread(target=self._run, name="watchdog", daemon=True)
        self._thread.start()
        if session.rank != session.local_rank:  # ranks on the first node end with its launcher
            FirstNodeWatch(
                session, self.pulse, lambda: self._answers, self._end.without_first_node,
                step_timeout_seconds=section.step_timeout_seconds, interval_seconds=self._interval,
                closing=self._closing,
            )  # fmt: skip

    def on_loss(self, lose: Callable[[int, str], None], is_left_behind: Callable[[], bool]) -> None:
        """Call ``lose`` with a rank on another node that is gone, and the reason, instead of ending this rank, too.

        ``is_left_behind``: returns whether the others continue without this rank.
        """
        self._neighbours.lose, self._end.is_left_behind = lose, is_left_behind

    def close(self) -> None:
        """Report the end of this rank, and stop the thread."""
        self.pulse.enter(END, self.pulse.now.step)
        self.stop()

    def stop(self) -> None:
        """Stop the thread."""
        self._closing.set()
        self._thread.join(2 * self._interval)

    # in its thread --------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        last, is_closing = time.monotonic(), False
        failed_by: set[type[Exception]] = set()
        while not is_closing:  # report immediately: nothing is judged before all ranks have reported
            now = time.monotonic()
            # Limited, because a machine that slept, or a suspended job, has not hung.
            elapsed, last = min(now - last, 2 * self._interval), now
            try:
                self._beat(elapsed)
            except RuntimeError:  # the store is unreachable: try again over a new connection
                self._store = None
            except Exception as error:  # a failure of the watchdog must not end the run
                if type(error) not in failed_by:
                    failed_by.add(type(error))
                    self._console.say(f"WARNING    the watchdog of rank {self._session.rank} failed: {error!r}")
                    self._console.log(traceback.format_exc())
            is_closing = self._closing.wait(self._interval)
        if self._store is not None:
            with suppress(RuntimeError):
                self._tell(0.0)

    def _tell(self, elapsed: float) -> "Store":
        if self._store is None:
            self._store = self._session.own_connection("watchdog")
        self._store.set(_key(self._session.rank), json.dumps(vars(self._report.beat(elapsed))))
        return self._store

    def _beat(self, elapsed: float) -> None:
        store = self._tell(elapsed)
        is_ended = store.check(["end"])
        self._answers += 1
        if is_ended:
            self._end.asked_by_another(store, json.loads(store.get("end")))
        if (lost := self._neighbours.lost(store)) is not None:
            self._session.cause.lost = str(lost["reason"])
            if self._neighbours.lose is not None:
                self._neighbours.lose(lost["rank"], str(lost["reason"]))
            elif self._neighbours.has_waited(0.0 if self.pulse.now.phase == END else elapsed):
                self._end.after_loss(lost)
        if self._judge is not None and (judged := self._judge(store, elapsed)) is not None:
            self._end.of_all_ranks(store, *judged, self._say)

    def _say(self, text: str) -> None:
        if self._session.is_main:
            self._console.say(text)
        else:  # rank 1 prints in place of a silent rank 0
            with suppress(OSError):
                print(text, file=sys.stderr, flush=True)
            self._console.log(text)


class _Judge:
    """Reads the reports of all ranks, warns, and decides when a run must end and which ranks caused it."""

    def __init__(
        self, section: LaunchSection, session: Session, interval_seconds: float, say: Callable[[str], None]
    ) -> None:
        self._timeout_seconds = section.step_timeout_seconds
        self._rank = session.rank
        self._keys = [_key(rank) for rank in range(session.world_size)]
        self._interval_seconds, self._say = interval_seconds, say
        self._are_all_there = False
        self._seen: dict[int, tuple[int, float]] = {}
        """Number of each rank's latest report, and the seconds since it arrived."""
        self._warned: Verdict | None = None
        self._starved: set[int] = set()

    def __call__(self, store: "Store", elapsed: float) -> tuple[Verdict, list[Beat]] | None:
        """Read the reports, ``elapsed`` seconds after the previous call.

        Returns:
            The verdict that ends the run and the reports; None if the run continues.
        """
        self._are_all_there = self._are_all_there or store.check(self._keys)
        if not self._are_all_there:
            return None
        beats = self._read(store, elapsed)
        if self._rank == 1 and not beats[0].silent_seconds:
            return None
        self._tell_of_starved(beats)
        stands = min(beat.stands_seconds for beat in beats)
        if stands < _WARN_AT * self._timeout_seconds:
            if self._warned is not None:
                self._say(f"resumed    after {seconds_text(self._warned.stands_seconds)} without progress")
                self._warned = None
            return None
        verdict = diagnose(beats)
        limit = verdict.limit_seconds
        if limit is None or stands < verdict.warn_seconds:
            return None
        if self._warned is None:
            ends = f"The run ends, and can be resumed, after {seconds_text(limit)} without progress"
            self._say(f"WARNING    no progress: {verdict}. {ends}")
            self._say("\n".join(details(verdict.culprits)))
        self._warned = verdict
        return (verdict, beats) if stands >= limit else None

    def _read(self, store: "Store", elapsed: float) -> list[Beat]:
        """Return the latest report of each rank.

        Silence is timed by this rank's clock, since the clocks of nodes differ.
        """
        beats = [Beat(**json.loads(text)) for text in store.multi_get(self._keys)]
        for beat in beats:
            number, silent = self._seen.get(beat.rank, (0, 0.0))
            silent = silent + elapsed if number == beat.number else 0.0
            self._seen[beat.rank] = beat.number, silent
            beat.silent_seconds = silent if silent > 5 * self._interval_seconds else 0.0
        judge_silent_by_others(beats)
        return beats

    def _tell_of_starved(self, beats: Iterable[Beat]) -> None:
        threshold = _STARVED_AT * self._timeout_seconds
        for beat in beats:
            is_starved = beat.phase == DATA and beat.age_seconds > threshold and not beat.silent_seconds
            if is_starved and beat.rank not in self._starved:
                self._starved.add(beat.rank)
                self._say(f"WARNING    {beat.where()} waits for data. Its disk may be slow, or data.workers too small")


class _Neighbours:
    """Reports a rank on another node whose process has ended without an error message.

    Each rank watches its connections to the ranks in its place on the next nodes.
    """

    def __init__(self, session: Session) -> None:
        self._rank = session.rank
        ranks, per_node = session.world_size, session.local_world_size
        self._peers = [(session.rank + per_node * nodes) % ranks for nodes in (1, 2) if per_node * nodes < ranks]
        session.cause.hears_of_losses = bool(self._peers)
        self._sockets: PeerSockets | None = None
        self._silent: dict[int, tuple[int, int]] = {}
        """Number of the latest report of each rank without connections, and the number of checks since it arrived."""
        self.lose: Callable[[int, str], None] | None = None
        """See ``Watchdog.on_loss``."""
        self._waited_seconds = 0.0
        """Time that this rank has continued since a rank is known to be gone."""

    def lost(self, store: "Store") -> dict[str, Any] | None:
        """Return the first rank that is known to be gone, and the reason to report; None if there is none."""
        if not self._peers:
            return None
        if self._sockets is None:
            self._sockets = PeerSockets(store, self._rank, self._peers)
        for peer in self._sockets.closed(store):
            if store.check([_key(peer)]):
                self._look_at(store, Beat(**json.loads(store.get(_key(peer)))))
        return json.loads(store.get("lost")) if store.check(["lost"]) else None

    def has_waited(self, elapsed: float) -> bool:
        """Add ``elapsed`` seconds since a rank is known to be gone. Return whether this rank must exit on its own."""
        self._waited_seconds += elapsed
        return self._waited_seconds > _LEAVES_WITHIN_SECONDS

    def _look_at(self, store: "Store", beat: Beat) -> None:
        """Report the rank of ``beat``, to which all connections are closed, once its heartbeat has stopped too.

        A network may close connections that are not in use. A rank that fails or finishes reports that first.
        """
        number, looks = self._silent.get(beat.rank, (0, 0))
        self._silent[beat.rank] = beat.number, looks + 1 if number == beat.number else 0
        if self._silent[beat.rank][1] == _SILENT_LOOKS and beat.phase != END:
            how = f"is gone without an error message; its last heartbeat was in {beat.doing()}"
            lost = {"rank": beat.rank, "step": beat.step, "reason": f"{beat.place()} {how}"}
            store.compare_set("lost", "", json.dumps(lost))


def _key(rank: int) -> str:
    return f"beat/{rank}"
