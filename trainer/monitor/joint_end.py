"""Joint, resumable end of all ranks of a run that makes no progress, with the same reason."""

import json
import os
import sys
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from serried.configs.errors import EXIT_STOPPED
from serried.records.run_folder import RunFolder
from serried.records.status import read_status, record_end
from serried.runtime.console import Console
from serried.runtime.exit import is_consequence
from serried.runtime.peer_sockets import first_node_is_gone
from serried.runtime.session import Session
from serried.trainer.monitor.diagnosis import Beat, Verdict, details, seconds_text
from serried.trainer.monitor.heartbeat import DATA, TRAIN, Moment
from serried.trainer.monitor.rank_report import RankReport, flight_records

if TYPE_CHECKING:
    from torch.distributed import Store

_OTHERS_READY_WITHIN_SECONDS = 5.0
_WRITTEN_WITHIN_SECONDS = 5.0


class JointEnd:
    """Ends this process together with the other ranks.

    If one rank ended first, ranks that wait for it would raise an error. Only a rank's own watchdog thread can end a
    rank that hangs in a collective.
    """

    def __init__(
        self, session: Session, run_dir: Path, console: Console, folder: RunFolder | None, report: RankReport
    ) -> None:
        """``folder``: run folder, on rank 0 only."""
        self._session, self._run_dir = session, run_dir
        self._console, self._folder = console, folder
        self._report = report
        self.is_left_behind: Callable[[], bool] = lambda: False
        """Returns whether the other ranks continue without this one, so that it must not write their records."""

    def of_all_ranks(self, store: "Store", verdict: Verdict, beats: list[Beat], say: Callable[[str], None]) -> NoReturn:
        """End the run on all ranks because of ``verdict``, which is based on the reports ``beats``."""
        reason = f"no progress for {seconds_text(verdict.stands_seconds)}: {verdict}"
        awake = [beat for beat in beats if not beat.silent_seconds]
        step = min(_steps_done(beat.phase, beat.step) for beat in awake)
        end = {"rank": verdict.culprits[0].rank, "reason": reason}
        store.set("end", json.dumps(end))
        self._prepare(end)
        say(
            f"stopped    {reason}. Run the same command to resume from the newest checkpoint; the stacks of all ranks "
            f"are in {self._run_dir / 'log' / 'hang.txt'}"
        )
        with suppress(OSError):
            text = "\n".join([reason, *details(beats)])
            (self._run_dir / "log" / "hang.txt").write_text(f"{text}\n", "utf-8", "backslashreplace")
        self._record(step, reason)
        with suppress(RuntimeError):  # some ranks are not ready in time
            ready = [f"ready/{beat.rank}" for beat in awake if beat.rank != self._session.rank]
            store.wait(ready, timedelta(seconds=_OTHERS_READY_WITHIN_SECONDS))
        store.set("leave", "")
        os._exit(EXIT_STOPPED)

    def _record(self, step: int, reason: str) -> None:
        status = read_status(self._run_dir)
        if status is not None and status.state == "failed" and not is_consequence(status.reason or ""):
            return  # a rank has reported why it left; other ranks' waiting is a consequence
        if self._folder is not None:
            self._folder.stop_early(step, reason, EXIT_STOPPED)
        else:
            with suppress(OSError):
                record_end(self._run_dir, "stopped", step=step, reason=reason, exit_code=EXIT_STOPPED)

    def asked_by_another(self, store: "Store", end: dict[str, Any]) -> NoReturn:
        """End this process because another rank ends the run. ``end``: the rank that caused the end, and the reason."""
        self._prepare(end)
        store.set(f"ready/{self._session.rank}", "")
        with suppress(RuntimeError):
            store.wait(["leave"], timedelta(seconds=2 * _OTHERS_READY_WITHIN_SECONDS))
        os._exit(EXIT_STOPPED)

    def after_loss(self, lost: Mapping[str, Any]) -> NoReturn:
        """End this process because the process of another rank has ended. ``lost``: the rank, its step, the reason."""
        self._prepare({"rank": lost["rank"], "reason": lost["reason"]})
        if self._session.rank == (lost["rank"] == 0):  # rank 1 prints if rank 0 is lost
            with suppress(OSError):
                print(
                    f"stopped    {lost['reason']}. Run the same command to resume from the newest checkpoint",
                    file=sys.stderr, flush=True,
                )  # fmt: skip
            self._record(max(0, lost["step"] - 1), lost["reason"])
        os._exit(EXIT_STOPPED)

    def without_first_node(self, moment: Moment, how: str) -> NoReturn:
        """End this process because the store is gone. ``how``: behavior of the store, as the end of a sentence.

        Writing to the run folder has a time limit, because its disk may be on the first node.
        """
        reason = f"{first_node_is_gone()} {how}"
        step = _steps_done(moment.phase, moment.step)
        if self._session.local_rank == 0:
            with suppress(OSError):
                print(
                    f"stopped    {reason}. Run the same command to resume from the newest checkpoint",
                    file=sys.stderr, flush=True,
                )  # fmt: skip

        def write() -> None:
            if self._session.local_rank == 0 and not self.is_left_behind():
                with suppress(OSError):
                    record_end(self._run_dir, "stopped", step=step, reason=reason, exit_code=EXIT_STOPPED)
            self._prepare({"rank": self._session.rank, "reason": reason})

        writer = threading.Thread(target=write, name="last words", daemon=True)
        writer.start()
        writer.join(_WRITTEN_WITHIN_SECONDS)
        os._exit(EXIT_STOPPED)

    def _prepare(self, end: dict[str, Any]) -> None:
        """Write this rank's diagnostics to the run folder."""
        self._console.quiet()
        self._session.cause.record(end["rank"], end["reason"], EXIT_STOPPED)
        self._console.log("\n".join([end["reason"], *self._report.stack()]))
        with suppress(OSError):
            path = self._run_dir / "log" / f"collectives-{self._session.rank}.json"
            path.write_text(json.dumps(flight_records()) + "\n", "utf-8")


def _steps_done(phase: str, step: int) -> int:
    """Return the number of steps that a rank in ``phase`` of ``step`` has done."""
    return max(0, step - (phase in (DATA, TRAIN)))
