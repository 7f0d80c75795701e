"""Checks that a run in which something fails ends in time, with the reason, and leaves no process behind."""

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from serried.configs.errors import EXIT_FAILED, EXIT_STOPPED
from serried.trainer.checkpoint.retention import folder_name
from serried.verify.check import Bounds, Case, Found
from serried.verify.layouts import layouts
from serried.verify.started_runs import (
    FAULT,
    LIMIT_SECONDS,
    RunFailed,
    Started,
    Workplace,
    ending,
    events_of,
    last_line,
    newest_checkpoint,
    reason_of,
    resumed_from,
    status_of,
)

_STALL_SECONDS = {"cpu": 6, "cuda": 20}
"""``launch.step_timeout_seconds`` of a run that hangs."""
_ENDS_SECONDS = 60.0
"""Longest time from a fault until all processes are gone, plus the time after which a stall is one."""
_AT = 10
"""Micro-batch of the fault, the first of step 4."""
_LOOK_SECONDS = 0.05


def faults(workplace: Workplace, _: Bounds) -> list[Case]:
    """A fault on one rank, or a request to stop."""
    rank = workplace.ranks - 1
    alone = "" if rank else "needs two processes: one that hangs, and one that waits"
    stall = _STALL_SECONDS[workplace.device]
    killed, raised = f"rank {rank} was killed by SIGKILL", "RuntimeError: raised on purpose by serried verify"

    def case(name: str, fault: str, code: int, expected: tuple[str, ...], allowed: float = 0.0, skip: str = "") -> Case:
        return Case(name, partial(_fault, workplace, fault, code, expected, allowed + _ENDS_SECONDS), skip)

    return [
        case("a rank is killed", "kill", EXIT_FAILED, (killed,)),
        case("a rank raises an exception", "raise", EXIT_FAILED, (raised,)),
        case("the data of a rank does not come", "data", EXIT_STOPPED, (f"rank {rank} ", "data.next"), stall, alone),
        case(
            "a kernel of a rank hangs" if workplace.device == "cuda" else "a forward of a rank hangs",
            "kernel", EXIT_STOPPED, (f"rank {rank} ",), stall, alone,
        ),
        Case("SIGTERM, and a resume", partial(_asked_to_stop, workplace)),
    ]  # fmt: skip


def _words(workplace: Workplace) -> tuple[str, ...]:
    fsdp = next(each for each in layouts(workplace.ranks, "cpu") if each.name.startswith(("fsdp", "accumulated")))
    stall = _STALL_SECONDS[workplace.device]
    return (*fsdp.overrides(workplace.global_batch), "trainer.steps=400", f"launch.step_timeout_seconds={stall}")


def _fault(workplace: Workplace, fault: str, code: int, expected: tuple[str, ...], bound: float) -> Found:
    """Start a run with ``fault`` on its last rank, and judge its end.

    Args:
        code: exit code that it must end with.
        expected: parts of the reason that it must record.
        bound: longest time from the fault to the end in seconds.
    """
    words = (f"task.fault={fault}", f"task.rank={workplace.ranks - 1}", f"task.at={_AT}", "checkpoint.every=2")
    run, started = workplace.start(*_words(workplace), *words)
    with ending(started):
        _until(started, lambda: (run / FAULT).exists(), "the fault", LIMIT_SECONDS[workplace.device])
        began = (run / FAULT).stat().st_mtime
        ended = started.wait(bound + 10)
        seconds = time.time() - began
        return _judged(started, run, code, expected, ended, seconds, bound)


def _asked_to_stop(workplace: Workplace) -> Found:
    """Ask a run to stop in a step; it must save that step, and the same command must resume after it."""
    words = (*_words(workplace), "checkpoint.every=0", "task.sleep_seconds=0.05")
    run, started = workplace.start(*words)
    with ending(started):
        _until(started, lambda: len(events_of(run, "step")) >= 3, "step 3", LIMIT_SECONDS[workplace.device])
        began = time.time()
        started.ask_to_stop()
        ended = started.wait(_ENDS_SECONDS + 10)
        found = _judged(started, run, EXIT_STOPPED, ("SIGTERM",), ended, time.time() - began, _ENDS_SECONDS)
    if not found.is_right:
        return found
    step = status_of(run).step
    if (saved := newest_checkpoint(run).name) != folder_name(step):
        raise RunFailed(f"stopped at step {step}, and the newest checkpoint is {saved}")
    workplace.train(*words, f"run.dir={run}", f"trainer.stop_at={step + 2}", code=EXIT_STOPPED)
    if resumed_from(run) != step:
        raise RunFailed(f"stopped at step {step}, and resumed from {resumed_from(run)}")
    return found._replace(figure=f"{found.figure}; resumed after step {step}")


def _judged(
    started: Started, run: Path, code: int, expected: tuple[str, ...], ended: int, seconds: float, bound: float
) -> Found:
    """Judge the end of a run: exit code, reason, time and processes."""
    status, left = status_of(run), started.left_over()
    reason = status.reason or reason_of(run, started.printed)
    problems = [f"exit code {ended} and not {code}"] if ended != code else []
    problems += [f"status.json has exit code {status.exit_code}"] if status.exit_code != code else []
    problems += [f"the reason does not have {part!r}" for part in expected if part not in reason]
    problems += [f"{len(left)} processes left over"] if left else []
    problems += [f"{seconds:.1f} s"] if seconds > bound else []
    figure = f"exit code {ended}, {seconds:.1f} s: {reason}"
    return Found(
        not problems, "; ".join([*problems, figure]), f"{code}, {bound:.0f} s",
        {"exit_code": ended, "seconds": seconds, "seconds_bound": bound, "left_over": len(left), "reason": reason},
    )  # fmt: skip


def _until(started: Started, is_there: Callable[[], bool], what: str, limit_seconds: float) -> None:
    """Wait until ``is_there()``. Raises ``RunFailed`` if the run ends before that, or it takes too long."""
    while not is_there():
        if started.has_ended():
            raise RunFailed(f"the run ended before {what}: {last_line(started.printed)}")
        if started.seconds > limit_seconds:
            raise RunFailed(f"{what} did not come in {limit_seconds:.0f} s: {last_line(started.printed)}")
        time.sleep(_LOOK_SECONDS)
