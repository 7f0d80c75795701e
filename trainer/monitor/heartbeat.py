"""Current phase of a rank, and its time limit."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from serried.configs.formats import duration, short
from serried.configs.schema.launch_plan_track import LaunchSection
from serried.parallel.step_phases import Phases
from serried.runtime.console import Doing

SET_UP, DATA, TRAIN, LOG, EVALUATE, SAVE, END = PHASES = (
    "set-up", "data.next", "forward, backward and update", "reading and logging results", "evaluation", "saving",
    "the end of the run",
)  # fmt: skip
"""Phases of a rank, in the order of a step."""
CALLBACK = "callback "
"""Prefix of the name of a phase in which a callback runs. Such a phase is inside one of the others."""

_WORDS = {
    DATA: "waiting for the data of step {step}",
    TRAIN: "step {step}",
    LOG: "waiting for the results of step {step}",
    EVALUATE: "evaluating after step {step}",
    SAVE: "saving step {step}",
    END: "ending after step {step}",
}

_PATIENT = (SET_UP, SAVE, END)
_WARN_AT = 0.2
_WARN_AT_TIMES_LONGEST, _END_AT_TIMES_FIRST = 1.5, 2.0


class Moment(NamedTuple):
    """Phase and step of the training thread."""

    phase: str
    step: int
    is_first: bool
    """Whether the phase is entered for the first time, when it may compile or fill a cache."""


class Pulse:
    """Current phase of this rank, as recorded by its training thread."""

    def __init__(self) -> None:
        self._seen: set[str] = set()
        self.now = Moment(SET_UP, 0, True)
        self.phases = Phases()
        """The same phases, including the finer phases of a step."""
        self.phases.enter(SET_UP)

    def enter(self, phase: str, step: int) -> None:
        """Enter ``phase`` of ``step``. Entering it again counts as progress."""
        self.now = Moment(phase, step, phase not in self._seen)
        self._seen.add(phase)
        self.phases.enter(phase)

    @contextmanager
    def during_callback(self, name: str) -> Iterator[None]:
        """Context manager that sets the phase to the callback ``name``.

        Within a step, other ranks wait for the callback, so it has the timeout of a step. In set-up and at the end of a
        run it may take longer.
        """
        before = self.now
        self.now = Moment(f"{CALLBACK}{name}", before.step, is_first=before.phase in (SET_UP, END))
        try:
            yield
        finally:
            self.now = Moment(before.phase, before.step, is_first=False)


class Patience:
    """Time limits of phases.

    Limits are short within a step and long for phases that happen once. A limit is at least twice the duration of the
    first time in the phase, since a step that is always slow has not hung.
    """

    def __init__(self, section: LaunchSection, *, is_alone: bool) -> None:
        """``is_alone``: whether no other process waits, so that set-up, saving, the end and callbacks have no limit."""
        self._section, self._is_alone = section, is_alone
        self._moment: Moment | None = None
        self._age_seconds = 0.0
        self._first: dict[str, float] = {}
        self._longest: dict[str, float] = {}

    def measure(self, moment: Moment, elapsed_seconds: float) -> tuple[float, float | None, float]:
        """Return the age of ``moment``, its limit (None if it has none) and the age at which to warn.

        ``elapsed_seconds``: time since the previous call.
        """
        if moment is not self._moment:
            if self._moment is not None:
                phase = self._moment.phase
                self._longest[phase] = max(self._longest.get(phase, 0.0), self._age_seconds)
                if self._moment.is_first:
                    self._first[phase] = self._age_seconds
            self._moment, self._age_seconds = moment, 0.0
        self._age_seconds += elapsed_seconds
        if self._is_alone and (moment.phase in _PATIENT or moment.phase.startswith(CALLBACK)):
            return self._age_seconds, None, 0.0
        is_patient = moment.phase in _PATIENT or moment.is_first
        limit = self._section.start_timeout_seconds if is_patient else self._section.step_timeout_seconds
        limit = max(limit, _END_AT_TIMES_FIRST * self._first.get(moment.phase, 0.0))
        warn = max(_WARN_AT * limit, _WARN_AT_TIMES_LONGEST * self._longest.get(moment.phase, 0.0))
        return self._age_seconds, limit, warn


def activity(pulse: Pulse, waits_for: str | None, steps: int, last: dict[str, Any] | None) -> Doing | None:
    """Return the phase of ``pulse`` for the status line.

    The result is None during set-up, which the console describes, unless this rank waits for others.

    Args:
        waits_for: Description of the ranks that this rank waits for.
        steps: Number of steps of the whole run.
        last: Values of the last logged step.
    """
    moment = pulse.now
    if moment.phase == SET_UP:
        return Doing(f"waiting for {waits_for}", waits_for) if waits_for else None
    is_callback, key = moment.phase.startswith(CALLBACK), (moment.phase, moment.step)
    what = f"{moment.phase}, step {moment.step}" if is_callback else _WORDS[moment.phase].format(step=moment.step)
    if moment.is_first:
        more = ", the first step of this start, which takes longer" if moment.phase == TRAIN else ""
        return Doing(what + more, key)
    return Doing(what, key, _line(moment.step, steps, last) if moment.phase in (DATA, TRAIN, LOG) else "")


def _line(step: int, steps: int, last: dict[str, Any] | None) -> str:
    line = f"step {step:>{len(str(steps))}}/{steps}"
    if last is None:
        return line
    line += f"  loss {last['loss']:.4f} at step {last['step']}"
    if last["tokens_per_second"] is None or last["is_first"]:  # the first step takes longer
        return line
    left = max(0.0, last["eta_seconds"] - (step - last["step"]) * last["step_seconds"])
    unit = "tok" if last["unit"] == "tokens" else last["unit"]
    return f"{line}  {unit}/s {short(last['tokens_per_second'])}  eta {duration(left)}"
