"""Report of a rank about itself: its phase and age, and, without progress, its stack and collectives."""

import json
import math
import sys
import threading
import traceback
from collections.abc import Iterable
from typing import Any

from serried.configs.schema.launch_plan_track import LaunchSection
from serried.runtime.session import Session
from serried.trainer.monitor.diagnosis import Beat
from serried.trainer.monitor.heartbeat import Patience, Pulse

_TELL_STACK_AT = 0.1
"""Share of the step timeout after which a report includes the stack of the training thread."""
_STACK_FRAMES = 40
_COLLECTIVES_TOLD = 8


class RankReport:
    """Creates the reports of this rank. Construct it in the training thread."""

    def __init__(self, section: LaunchSection, session: Session, pulse: Pulse) -> None:
        self._session, self._pulse = session, pulse
        self._patience = Patience(section, is_alone=session.world_size == 1)
        self._stack_after_seconds = _TELL_STACK_AT * section.step_timeout_seconds
        self._training_thread = threading.get_ident()
        self._number = 0

    def beat(self, elapsed: float) -> Beat:
        """Return the next report, ``elapsed`` seconds after the previous one."""
        age = self._patience.measure(self._pulse.now, elapsed)
        self._number += 1
        beat = Beat(
            self._session.rank, self._session.host(), self._number, self._pulse.now.phase, self._pulse.now.step,
            *age, waits_for=self._session.exchange.waits_for, peers=list(self._pulse.phases.peers),
        )  # fmt: skip
        if beat.age_seconds > self._stack_after_seconds:
            beat.stack = self.stack()
            background = self._session.background_names()
            beat.collectives, beat.not_started = last_collectives(background), queued_collectives(background)
        return beat

    def stack(self) -> list[str]:
        """Return the stack of the training thread.

        Does not read source files, since the disk may be the cause of the hang.
        """
        frame = sys._current_frames().get(self._training_thread)
        frames = traceback.StackSummary.extract(
            traceback.walk_stack(frame), limit=_STACK_FRAMES, lookup_lines=False
        )  # innermost first
        return [f"{entry.filename}:{entry.lineno} in {entry.name}" for entry in reversed(frames)]


def last_collectives(leave_out: Iterable[str]) -> list[tuple[str, int, str, bool]]:
    """Return the latest collectives that this process entered, in the format of ``Beat.collectives``, oldest first.

    Groups in ``leave_out`` are skipped. The result is empty if the backend does not record collectives.
    """
    left_out = set(leave_out)
    told: dict[str, list[tuple[str, int, str, bool]]] = {}
    for record in flight_records():
        for entry in record.get("entries", ()):
            name = entry["process_group"][0]
            if name in left_out or entry["is_p2p"]:
                continue
            backend, _, operation = entry["profiling_name"].rpartition(":")
            number, sizes = entry["collective_seq_id"], [math.prod(shape) for shape in entry["input_sizes"]]
            if sizes:
                operation += f" of {sum(sizes)} numbers"
            group = told.setdefault(f"{backend}/{name}", [])
            if group and number <= group[-1][1]:  # a second run in this process starts numbering again
                group.clear()
            group.append((f"{backend}/{name}", number, operation, entry["retired"] or entry["state"] == "completed"))
    return [entry for group in told.values() for entry in group[-_COLLECTIVES_TOLD:]]


def queued_collectives(leave_out: Iterable[str]) -> list[tuple[str, int]]:
    """Return the collectives that this process has entered and its GPU has not started.

    The result has the format of ``Beat.not_started``. Only NCCL records the start of a collective, with
    ``TORCH_NCCL_ENABLE_TIMING``.
    """
    left_out = set(leave_out)
    return [
        (f"nccl/{entry['process_group'][0]}", entry["collective_seq_id"])
        for record in flight_records()
        for entry in record.get("entries", ())
        if entry["state"] == "scheduled" and entry["profiling_name"].startswith("nccl:") and not entry["retired"]
        and not entry["is_p2p"] and entry["process_group"][0] not in left_out
    ]  # fmt: skip


def flight_records() -> list[dict[str, Any]]:
    """Return the collectives in the flight recorder of this process, for NCCL and other backends."""
    # Private API, since torch has no public function that returns these records; its own tools read them from a pickled
    # dump. tests/runs/test_watchdog.py checks their format.
    from torch._C import _distributed_c10d as c10d

    dumps = [getattr(c10d, name, None) for name in ("_dump_nccl_trace_json", "_dump_fr_trace_json")]
    return [json.loads(dump(includeCollectives=True)) for dump in dumps if dump is not None]
