"""What a rank does at present, in words for whoever looks on. Asked from another thread: the step pays nothing."""

from typing import Any

from serried.configs.formats import duration, short
from serried.runtime.console import Console
from serried.runtime.live import Doing
from serried.runtime.session import Session
from serried.trainer.watchdog import DATA, END, EVALUATE, LOG, SAVE, SET_UP, TRAIN, Pulse

_ROUTINE = (DATA, TRAIN, LOG)
_WORDS = {
    DATA: "waiting for the data of step {step}",
    TRAIN: "step {step}",
    LOG: "waiting for the results of step {step}",
    EVALUATE: "evaluating after step {step}",
    SAVE: "saving step {step}",
    END: "ending after step {step}",
}
_FIRST = "step {step}, the first of this start, which takes longer than others"


class Activity:
    """Says what ``pulse`` is at; None while the run is set up, of which the console knows more."""

    def __init__(self, pulse: Pulse, session: Session, console: Console, steps: int) -> None:
        """``steps``: of the whole run."""
        self._pulse, self._session, self._console, self._steps = pulse, session, console, steps

    def __call__(self) -> Doing | None:
        moment, waits_for = self._pulse.now, self._session.waits_for
        if moment.phase == SET_UP:
            return Doing(f"waiting for {waits_for}", SET_UP, waits_for) if waits_for else None
        is_routine = moment.phase in _ROUTINE and not moment.is_first
        words = _FIRST if moment.phase == TRAIN and moment.is_first else _WORDS[moment.phase]
        line = self._line(moment.step) if is_routine else ""
        return Doing(words.format(step=moment.step), moment.phase, moment.step, is_routine, line)

    def _line(self, step: int) -> str:
        parts = [f"step {step:>{len(str(self._steps))}}/{self._steps}"]
        last: dict[str, Any] | None = self._console.last_step
        if last is not None:
            parts.append(f"loss {last['loss']:.4f} at step {last['step']}")
        if last is not None and last["tokens_per_second"] is not None and not last["is_first"]:  # it took longer
            parts.append(f"tok/s {short(last['tokens_per_second'])}")
            since = (step - last["step"]) * last["step_seconds"]
            parts.append(f"eta {duration(max(0.0, last['eta_seconds'] - since))}")
        return "  ".join(parts)
