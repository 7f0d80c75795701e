"""What a rank is doing now, and how long that may take."""

from typing import NamedTuple

from serried.configs.schema import LaunchSection
from serried.parallel.phases import Phases

SET_UP, DATA, TRAIN, LOG, EVALUATE, SAVE, END = PHASES = (
    "set-up", "data.next", "forward, backward and update", "reading and logging results", "evaluation", "saving",
    "the end of the run",
)  # fmt: skip
"""What a rank can be doing, in the order of a step."""

_PATIENT = (SET_UP, SAVE, END)
_WARN_AT = 0.2
_WARN_AT_TIMES_LONGEST, _END_AT_TIMES_FIRST = 1.5, 2.0


class Moment(NamedTuple):
    """What the training thread is doing."""

    phase: str
    step: int
    is_first: bool
    """Whether it does that for the first time, when it may compile or fill a cache."""


class Pulse:
    """What this rank is doing now, as its training thread records it."""

    def __init__(self) -> None:
        self._seen: set[str] = set()
        self.now = Moment(SET_UP, 0, True)
        self.phases = Phases()
        """The same, and in a step its finer phases."""
        self.phases.enter(SET_UP)

    def enter(self, phase: str, step: int) -> None:
        """Begin ``phase`` of ``step``. Entering it again counts as progress."""
        self.now = Moment(phase, step, phase not in self._seen)
        self._seen.add(phase)
        self.phases.enter(phase)


class Patience:
    """Time limit of a phase: short in a step, long for what happens once, and at least twice the time of the first one.
    A step that is always slow is not a hang."""

    def __init__(self, section: LaunchSection, *, is_alone: bool) -> None:
        """``is_alone``: no other process waits, so set-up and saving may take any time."""
        self._section, self._is_alone = section, is_alone
        self._moment: Moment | None = None
        self._age_seconds = 0.0
        self._first: dict[str, float] = {}
        self._longest: dict[str, float] = {}

    def measure(self, moment: Moment, elapsed_seconds: float) -> tuple[float, float | None, float]:
        """Return the age of ``moment``, its limit (None: there is none) and the age at which to warn, after
        ``elapsed_seconds`` since the previous call."""
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
