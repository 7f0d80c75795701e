"""Checks that a run with a fault ends in time, records the reason, and leaves no process behind."""

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

from serried.configs.errors import EXIT_FAILED, EXIT_STOPPED
from serried.trainer.checkpoint.retention import folder_name
from serried.verify.check import Bounds, Case, Found
from serried.verify.layouts import layouts
from serried.verify.started_runs import (
    FAULT,
    LIMIT_SECONDS,
    RAISED,
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

_ENDS_SECONDS = 60.0
"""Longest time from a fault until all processes are gone; a stall may take ``stall_seconds`` in addition."""
_AT = 10
"""Micro-batch of the fault, the first of step 4."""
_LOOK_SECONDS = 0.05


class _Fault(NamedTuple):
    """A fault on the last rank, and the expected end of the run."""

    name: str
    """Value of ``task.fault``."""
    code: int
    reason: tuple[str, ...]
    """Texts that the recorded reason must contain."""
    stall_seconds: int = 0
    """Value of ``launch.step_timeout_seconds`` for a fault that stalls the run; 0 for other faults."""


def faults(workplace: Workplace, _: Bounds) -> list[Case]:
    """A run with a fault on one rank, or asked to stop, ends as expected."""
    rank = workplace.ranks - 1
    alone = "" if rank else "needs two processes: one that hangs, and one that waits"
    stall = 20 if workplace.is_on_gpus else 6
    hangs = "a kernel of a rank hangs" if workplace.device == "cuda" else "a forward of a rank hangs"
    works = {
        "a rank is killed": _Fault("kill", EXIT_FAILED, (f"rank {rank} was killed by SIGKILL",)),
        "a rank raises an exception": _Fault("raise", EXIT_FAILED, (f"RuntimeError: {RAISED}",)),
        "data loading of a rank hangs": _Fault("data", EXIT_STOPPED, (f"rank {rank} ", "data.next"), stall),
        hangs: _Fault("kernel", EXIT_STOPPED, (f"rank {rank} ",), stall),
    }
    return [
        *(
            Case(name, partial(_end_of, workplace, fault), alone if fault.stall_seconds else "")
            for name, fault in works.items()
        ),
        Case("SIGTERM, and a resume", partial(_asked_to_stop, workplace)),
    ]


def _words(workplace: Workplace) -> tuple[str, ...]:
    fsdp = next(layout for layout in layouts(workplace.ranks, "cpu") if layout.name.startswith(("fsdp", "accumulated")))
    return (*fsdp.overrides(workplace.global_batch), "trainer.steps=400")


def _end_of(workplace: Workplace, fault: _Fault) -> Found:
    """Start a run with ``fault`` on its last rank, and check how it ends."""
    words = [f"task.fault={fault.name}", f"task.rank={workplace.ranks - 1}", f"task.at={_AT}", "checkpoint.every=2"]
    words += [f"launch.step_timeout_seconds={fault.stall_seconds}"] if fault.stall_seconds else []
    bound = _ENDS_SECONDS + fault.stall_seconds
    run, started = workplace.start(*_words(workplace), *words)
    with ending(started):
        _until(started, lambda: (run / FAULT).exists(), "the fault", LIMIT_SECONDS)
        began = (run / FAULT).stat().st_mtime
        ended = started.wait(bound + 10)
        return _judged(started, run, fault.code, fault.reason, ended, time.time() - began, bound)


def _asked_to_stop(workplace: Workplace) -> Found:
    """Ask a run to stop during a step. It must save that step, and the same command must resume from it."""
    words = (*_words(workplace), "checkpoint.every=0", "task.sleep_seconds=0.05")
    run, started = workplace.start(*words)
    with ending(started):
        _until(started, lambda: len(events_of(run, "step")) >= 3, "step 3", LIMIT_SECONDS)
        began = time.time()
        started.ask_to_stop()
        ended = started.wait(_ENDS_SECONDS + 10)
        found = _judged(started, run, EXIT_STOPPED, ("SIGTERM",), ended, time.time() - began, _ENDS_SECONDS)
    if not found.is_right:
        return found
    step = status_of(run).step
    if (saved := newest_checkpoint(run).name) != folder_name(step):
        raise RunFailed(f"stopped at step {step}, but the newest checkpoint is {saved}")
    workplace.train(*words, f"run.dir={run}", f"trainer.stop_at={step + 2}", code=EXIT_STOPPED)
    if resumed_from(run) != step:
        raise RunFailed(f"stopped at step {step}, but resumed from {resumed_from(run)}")
    return found._replace(figure=f"{found.figure}; resumed after step {step}")


def _judged(
    started: Started, run: Path, code: int, expected: tuple[str, ...], ended: int, seconds: float, bound: float
) -> Found:
    """Check the end of a run: exit code, reason, time and leftover processes."""
    status, left = status_of(run), started.left_over()
    reason = status.reason or reason_of(run, started.printed)
    problems = [f"exit code {ended} instead of {code}"] if ended != code else []
    problems += [f"status.json has exit code {status.exit_code}"] if status.exit_code != code else []
    problems += [f"the reason does not contain {part!r}" for part in expected if part not in reason]
    problems += [f"{len(left)} processes left over"] if left else []
    problems += [f"{seconds:.1f} s"] if seconds > bound else []
    figure = f"exit code {ended}, {seconds:.1f} s: {reason}"
    return Found(
        not problems, "; ".join([*problems, figure]), f"{code}, {bound:.0f} s",
        {"exit_code": ended, "seconds": seconds, "seconds_bound": bound, "left_over": len(left), "reason": reason},
    )  # fmt: skip


def _until(started: Started, is_there: Callable[[], bool], what: str, limit_seconds: float) -> None:
    """Wait until ``is_there()`` is true. Raises ``RunFailed`` if the run ends first, or it takes too long."""
    while not is_there():
        if started.has_ended():
            raise RunFailed(f"the run ended before {what}: {last_line(started.printed)}")
        if started.seconds > limit_seconds:
            raise RunFailed(f"{what} did not occur within {limit_seconds:.0f} s: {last_line(started.printed)}")
        time.sleep(_LOOK_SECONDS)
