"""Diagnosis of the ranks that block a run, from the reports of all ranks."""

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from serried.trainer.monitor.heartbeat import END, EVALUATE, LOG, PHASES, TRAIN

_LEFT_SECONDS = 60.0
"""Time limit in seconds for a rank that has ended while others wait for it on their devices, since it will not
return. The effective limit is at least a fifth of ``launch.step_timeout_seconds``."""


@dataclass
class Beat:
    """Report of one rank about itself."""

    rank: int
    host: str
    number: int
    """Number of the report, which increases with every report. A stopped process sends no more reports."""
    phase: str
    step: int
    age_seconds: float
    """Time since the rank entered its phase."""
    limit_seconds: float | None
    """Time limit of the phase; None if there is none."""
    warn_seconds: float
    """Time in the phase after which to warn."""
    waits_for: str | None = None
    """Description of the ranks that this rank waits for, if known (in exchanges through the store)."""
    peers: list[int] = field(default_factory=list)
    """Ranks from which this rank awaits a message, in a pipeline. Empty if it does not wait."""
    stack: list[str] = field(default_factory=list)
    """Stack of the training thread, innermost frame last; empty until the thread has made no progress for a while."""
    collectives: list[tuple[str, int, str, bool]] = field(default_factory=list)
    """Latest collectives, as (group, number in the group, operation with sizes, whether it is done). Empty until the
    rank has made no progress for a while."""
    not_started: list[tuple[str, int]] = field(default_factory=list)
    """Collectives that are queued on the GPU and have not started, as (group, number in the group)."""
    silent_seconds: float = 0.0
    """Time since the rank's last report."""

    @property
    def stands_seconds(self) -> float:
        """Time since this rank is known to have entered its phase, in seconds."""
        return self.age_seconds + self.silent_seconds

    def place(self) -> str:
        """Return a description such as ``rank 5 on n2``."""
        return f"rank {self.rank} on {self.host}"

    def doing(self) -> str:
        """Return a description such as ``data.next of step 812``."""
        return f"{self.phase} of step {self.step}" if self.step else self.phase

    def where(self) -> str:
        """Return a description such as ``rank 5 on n2 in data.next of step 812 for 61 s``."""
        text = f"{self.place()} in {self.doing()}"
        if self.silent_seconds:  # it may have continued a little before it fell silent
            return f"{text} when its heartbeat stopped {seconds_text(self.silent_seconds)} ago"
        return f"{text} for {seconds_text(self.stands_seconds)}"


def _longest_limit(beats: Iterable[Beat]) -> float | None:
    """Return the longest limit of ``beats``; None if one of them has no limit."""
    limits = [math.inf if beat.limit_seconds is None else beat.limit_seconds for beat in beats]
    return None if math.inf in limits else max(limits)


@dataclass
class Verdict:
    """The ranks that block the run."""

    culprits: list[Beat]
    others: str
    """Description of the other ranks' activity; empty if there are no others."""
    stands_seconds: float
    """Time since the last progress of any rank."""

    @property
    def limit_seconds(self) -> float | None:
        """Time that the run may wait for these ranks."""
        return _longest_limit(self.culprits)

    @property
    def warn_seconds(self) -> float:
        """Time that the run may wait for these ranks without a warning."""
        return max(beat.warn_seconds for beat in self.culprits)

    def __str__(self) -> str:
        shown = "; ".join(beat.where() for beat in self.culprits[:3])
        more = f"; and {len(self.culprits) - 3} more" if len(self.culprits) > 3 else ""
        return f"{shown}{more}" + (f"; {self.others}" if self.others else "")


def judge_silent_by_others(beats: list[Beat]) -> None:
    """Replace the limits of silent ranks with the limits of the others.

    The activity of a silent rank since its last report is unknown.
    """
    awake = [beat for beat in beats if not beat.silent_seconds]
    for beat in beats:
        if beat.silent_seconds and awake:
            beat.limit_seconds = _longest_limit(awake)
            beat.warn_seconds = max(other.warn_seconds for other in awake)
            if beat.phase == END and any(other.phase in (TRAIN, LOG, EVALUATE) for other in awake):
                beat.limit_seconds = min(beat.limit_seconds or _LEFT_SECONDS, _LEFT_SECONDS)
                beat.warn_seconds = min(beat.warn_seconds, _LEFT_SECONDS)


def diagnose(beats: list[Beat]) -> Verdict:
    """Return the ranks that the others wait for, given that no rank makes progress."""
    culprits, others = _silent(beats) or _missing_from_collective(beats) or _awaited(beats) or _behind(beats)
    if len(culprits) == len(beats):
        others = others if len(beats) > 1 else ""
    return Verdict(culprits, others, min(beat.stands_seconds for beat in beats))


def _silent(beats: list[Beat]) -> tuple[list[Beat], str] | None:
    silent = [beat for beat in beats if beat.silent_seconds]
    return _beside(silent, beats) if silent else None


def _missing_from_collective(beats: list[Beat]) -> tuple[list[Beat], str] | None:
    """Find ranks that are missing from a collective in which others wait, or that entered a different one."""
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
    # A rank may be late for one group because it waits in another: ranks that wait nowhere come first.
    waiting = {beat.rank for beat in beats if any(not done for *_, done in beat.collectives)}
    free = [beat for rank, beat in missing.items() if rank not in waiting and not beat.peers]
    culprits = free or _ends_of_chains(list(missing.values()), beats) or list(missing.values())
    if culprits:
        return _beside(culprits, beats)
    if odd:
        entered_ = ", ".join(f"rank {rank} is in {mine}" for rank, (_, mine, _) in sorted(odd.items()))
        usual = "" if len(odd) == len(beats) else f" where the others are in {next(iter(odd.values()))[2]}"
        return [beat for beat, *_ in odd.values()], f"{entered_}{usual}: a collective was skipped or repeated"
    if hung := _hung(beats):
        culprits, others = _beside(hung, beats)
        whose = "its GPU has" if len(hung) == 1 else "their GPUs have"
        return culprits, f"{others}, which {whose} not started: an earlier kernel hangs"
    if is_any_pending:
        return beats, f"all {_waiting(beats).removeprefix('the others ')}: no rank is missing, so check the network"
    return None


def _hung(beats: list[Beat]) -> list[Beat]:
    """Return the ranks whose GPU has started none of its queued collectives, although others wait in one of them."""
    pending = {
        beat.rank: {(group, number) for group, number, _, done in beat.collectives if not done} for beat in beats
    }
    queued = {beat.rank: {(group, number) for group, number in beat.not_started} for beat in beats}
    started = {entry for beat in beats for entry in pending[beat.rank] - queued[beat.rank]}
    return [beat for beat in beats if pending[beat.rank] <= queued[beat.rank] and pending[beat.rank] & started]


def _awaited(beats: list[Beat]) -> tuple[list[Beat], str] | None:
    """Find ranks that others await a message from and that await no message themselves."""
    waiting = [beat for beat in beats if beat.peers]
    if not waiting:
        return None
    culprits = _ends_of_chains(waiting, beats)
    if not culprits:
        return waiting, "each waits for a message from another: check the network"
    return _beside(culprits, beats)


def _ends_of_chains(starts: list[Beat], beats: list[Beat]) -> list[Beat]:
    """Follow the chains of ranks that await messages, and return the ranks at their ends.

    Ranks in ``starts`` that await no message are not the end of a chain.
    """
    by_rank, reached = {beat.rank: beat for beat in beats}, {beat.rank for beat in starts}
    left = [rank for beat in starts for rank in beat.peers]
    ends: dict[int, Beat] = {}
    while left:
        beat = by_rank[left.pop()]
        if not beat.peers:
            ends[beat.rank] = beat
        elif beat.rank not in reached:
            reached.add(beat.rank)
            left += beat.peers
    return [ends[rank] for rank in sorted(ends)]


def _behind(beats: list[Beat]) -> tuple[list[Beat], str]:
    """Find the ranks that are furthest behind, except ranks that report that they wait."""
    working = [beat for beat in beats if beat.waits_for is None] or beats
    # The others wait for a callback, so it counts as the earliest phase.
    order = {phase: place for place, phase in enumerate(PHASES)}
    behind = min((beat.step, order.get(beat.phase, -1)) for beat in working)
    culprits = [beat for beat in working if (beat.step, order.get(beat.phase, -1)) == behind]
    return _beside(culprits, beats)


def _beside(culprits: list[Beat], beats: list[Beat]) -> tuple[list[Beat], str]:
    """Return ``culprits`` and a description of where most other ranks in ``beats`` wait."""
    named = {beat.rank for beat in culprits}
    return culprits, _waiting([beat for beat in beats if beat.rank not in named])


def _waiting(beats: list[Beat]) -> str:
    """Return a description of where most ranks in ``beats`` wait."""
    if not beats:
        return ""
    kinds = Counter(
        next((f"wait in {operation}" for *_, operation, done in beat.collectives if not done), None)
        or (f"wait for {beat.waits_for}" if beat.waits_for else None)
        or ("wait for messages of the pipeline" if beat.peers else f"are in {beat.phase}")
        for beat in beats
    )
    steps = Counter(beat.step for beat in beats)
    step = steps.most_common(1)[0][0]
    return f"the others {kinds.most_common(1)[0][0]}" + (f" of step {step}" if step else "")


def details(beats: Iterable[Beat]) -> list[str]:
    """Return the stacks and collectives of ``beats`` as lines."""
    lines = []
    for beat in beats:
        lines.append(f"  {beat.where()}")
        lines += [f"    {entry}" for entry in beat.stack]
        waits = [entry for entry in beat.collectives if not entry[-1]]
        lines += [
            f"    {'done' if done else 'waits'}: {operation}, number {number} of group {group}"
            for group, number, operation, done in waits or beat.collectives[-3:]
        ]
    return lines


def seconds_text(seconds: float) -> str:
    """Format a duration, as in ``1.5 s`` or ``61 s``."""
    return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"
