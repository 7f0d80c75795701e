"""What a rank is doing, in words for the status line."""

from typing import Any

from serried.configs.formats import duration, short
from serried.runtime.live import Doing
from serried.trainer.pulse import DATA, END, EVALUATE, LOG, SAVE, SET_UP, TRAIN, Pulse

_WORDS = {
    DATA: "waiting for the data of step {step}",
    TRAIN: "step {step}",
    LOG: "waiting for the results of step {step}",
    EVALUATE: "evaluating after step {step}",
    SAVE: "saving step {step}",
    END: "ending after step {step}",
}


def activity(pulse: Pulse, waits_for: str | None, steps: int, last: dict[str, Any] | None) -> Doing | None:
    """Return the phase of ``pulse``; None during set-up, which the console describes.

    ``waits_for``: which ranks this one waits for; ``steps``: of the whole run; ``last``: the step logged last.
    """
    moment = pulse.now
    if moment.phase == SET_UP:
        return Doing(f"waiting for {waits_for}", waits_for) if waits_for else None
    what, key = _WORDS[moment.phase].format(step=moment.step), (moment.phase, moment.step)
    if moment.is_first:
        more = ", the first of this start, which takes longer than others" if moment.phase == TRAIN else ""
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
