"""What a rank is doing, in words for the status line."""

from collections.abc import Callable

from serried.configs.formats import duration, short
from serried.runtime.console import Console
from serried.runtime.live import Doing
from serried.runtime.session import Session
from serried.trainer.pulse import DATA, END, EVALUATE, LOG, SAVE, SET_UP, TRAIN, Pulse

_WORDS = {
    DATA: "waiting for the data of step {step}",
    TRAIN: "step {step}",
    LOG: "waiting for the results of step {step}",
    EVALUATE: "evaluating after step {step}",
    SAVE: "saving step {step}",
    END: "ending after step {step}",
}


class Activity:
    """Returns the phase of ``pulse`` in words; None during set-up, which the console describes."""

    def __init__(self, pulse: Pulse, session: Session, console: Console, steps: Callable[[], int]) -> None:
        """``steps``: of the whole run."""
        self._pulse, self._session, self._console, self._steps = pulse, session, console, steps

    def __call__(self) -> Doing | None:
        moment, waits_for = self._pulse.now, self._session.exchange.waits_for
        if moment.phase == SET_UP:
            return Doing(f"waiting for {waits_for}", waits_for) if waits_for else None
        what, key = _WORDS[moment.phase].format(step=moment.step), (moment.phase, moment.step)
        if moment.is_first:
            more = ", the first of this start, which takes longer than others" if moment.phase == TRAIN else ""
            return Doing(what + more, key)
        return Doing(what, key, self._line(moment.step) if moment.phase in (DATA, TRAIN, LOG) else "")

    def _line(self, step: int) -> str:
        line, last = f"step {step:>{len(str(self._steps()))}}/{self._steps()}", self._console.last_step
        if last is None:
            return line
        line += f"  loss {last['loss']:.4f} at step {last['step']}"
        if last["tokens_per_second"] is None or last["is_first"]:  # the first step takes longer
            return line
        left = max(0.0, last["eta_seconds"] - (step - last["step"]) * last["step_seconds"])
        unit = "tok" if last["unit"] == "tokens" else last["unit"]
        return f"{line}  {unit}/s {short(last['tokens_per_second'])}  eta {duration(left)}"
