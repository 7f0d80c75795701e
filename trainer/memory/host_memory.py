"""Host memory that is available for tensors."""

import os
import resource
from contextlib import suppress
from pathlib import Path

from serried.configs.errors import UserError
from serried.configs.formats import size
from serried.configs.schema.sections import RunConfig
from serried.runtime.session import Session

_LIBRARIES_BYTES = 2**30
"""Approximate memory that torch and its libraries use in a process, in bytes."""
_OF_A_PROCESS = "this process may have (ulimit -v)"


def machine_bytes() -> tuple[int, int]:
    """Return the total and the available memory of this machine, in bytes."""
    page = os.sysconf("SC_PAGE_SIZE")
    total, available = os.sysconf("SC_PHYS_PAGES") * page, os.sysconf("SC_AVPHYS_PAGES") * page
    with suppress(OSError, ValueError, StopIteration):
        lines = Path("/proc/meminfo").read_text(encoding="utf-8").splitlines()
        available = 1024 * next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable"))
    return total, available


def limits() -> dict[str, int]:
    """Return the memory limits in bytes that are below the memory of this machine. Keys describe their scope."""
    found = {_OF_A_PROCESS: resource.getrlimit(resource.RLIMIT_AS)[0]}
    with suppress(OSError, ValueError):
        found["the control group may have"] = int(Path("/sys/fs/cgroup/memory.max").read_text(encoding="utf-8"))
    return {whose: limit for whose, limit in found.items() if 0 < limit < machine_bytes()[0]}


def tensor_bytes(held: int = 0, processes: int = 1) -> int:
    """Return the host memory in bytes that tensors may use in each of ``processes`` processes.

    ``held``: bytes that are already in use for them, which count as available.
    """
    found = limits()
    own = found.pop(_OF_A_PROCESS, None)
    shared = min([held + machine_bytes()[1], *found.values()]) // processes
    return (shared if own is None else min(shared, own)) - _LIBRARIES_BYTES


def check_host_memory(config: RunConfig, needed: int, copied: int, session: Session) -> None:
    """Check that host memory suffices for offloading and saves. This is a collective call.

    With GPUs, both use pinned memory, and the kernel kills processes that use too much.

    Args:
        needed: bytes of offloaded state per rank.
        copied: bytes per rank that a save copies to host memory.

    Raises:
        UserError: host memory does not suffice on some rank.
    """
    if not config.offloads_state and session.device.type == "cpu":
        return  # the plan prints its memory
    usable = max(0, min(session.gather(tensor_bytes(processes=session.local_world_size))))
    if needed + copied <= usable:
        return
    if not config.offloads_state:
        raise UserError(
            f"a save needs {size(copied)} of host memory per rank to copy the state, but only {size(usable)} are "
            "available; use optim=adamw8bit, or more nodes with parallel=fsdp"
        )
    key = "parallel.offload" if config.parallel.offload else "optim.offload"
    copy = f" and {size(copied)} to copy the state in a save" if copied > 0 else ""
    smaller = "checkpoint.mode=sync, " if config.checkpoint.mode == "async" else ""
    raise UserError(
        f"{key}=true needs {size(needed)} of host memory per rank{copy}, but only {size(usable)} are available; use "
        f"{smaller}optim=adamw8bit, more ranks with parallel=fsdp, or {key}=false"
    )
