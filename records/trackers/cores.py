"""What a mirror leaves of the machine's cores to training: less where the system does not tell, as all but Linux."""

import os
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

_LOOK_SECONDS, _NEARLY_ALL = 1.0, 0.9
_STAT, _IDLE = Path("/proc/stat"), 4


def be_nice(niceness: int) -> None:
    """Leave the cores to others, as the command ``nice`` does. What a tracker starts inherits it."""
    with suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, 0, niceness)
    with suppress(OSError):  # where the kernel shares out cores by session, the above counts within this one alone
        Path("/proc/self/autogroup").write_text(str(niceness))


def have_children_be_nice() -> None:
    """Where the kernel shares out cores by session, a child that begins one has there what others have, whatever it
    inherited."""
    with suppress(OSError):
        for child in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split():
            group, niceness = Path(f"/proc/{child}/autogroup"), os.getpriority(os.PRIO_PROCESS, 0)
            if not group.read_text().endswith(f" nice {niceness}\n"):
                group.write_text(str(niceness))


def is_a_core_idle(wait: Callable[[float], object]) -> bool:
    """Whether the cores that this process may use leave the time of one of them unused, while ``wait`` waits for a
    second. True where the system does not tell."""
    before, began = _idle_seconds(), time.monotonic()
    wait(_LOOK_SECONDS)
    after, looked = _idle_seconds(), time.monotonic() - began
    return before is None or after is None or after - before > _NEARLY_ALL * looked


def _idle_seconds() -> float | None:
    """How long the cores that this process may use have had nothing to do, added up; None: unknown. proc_stat(5)."""
    with suppress(OSError, AttributeError, ValueError, IndexError):
        own = {f"cpu{number}" for number in os.sched_getaffinity(0)}
        lines = [line.split() for line in _STAT.read_text().splitlines()]
        if ticks := [int(line[_IDLE]) for line in lines if line[0] in own]:
            return sum(ticks) / os.sysconf("SC_CLK_TCK")
    return None
