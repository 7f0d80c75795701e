"""Which process this is, of how many, and what it computes on."""

import ctypes
import os
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from serried.configs.errors import EXIT_FINISHED, UserError
from serried.configs.schema import LaunchSection

if TYPE_CHECKING:
    import torch

_TORCHRUN = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD = -1, -2, -3  # malloc.h


def speaks() -> bool:
    """Whether this process is the one that talks to the user."""
    return os.environ.get("RANK", "0") == "0"


def say(text: str) -> int:
    """Print ``text`` from rank 0 alone, for a command that was only asked for words. Returns the exit code."""
    if speaks():
        with suppress(BrokenPipeError):  # into a pager or head that has read enough
            print(text.rstrip("\n"), flush=True)
    return EXIT_FINISHED


def usable_cores() -> int:
    """Cores this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def torchrun_says() -> tuple[int, int, int, int]:
    """rank, local rank, world size and local world size, as torchrun says; of one process without torchrun.

    Raises:
        UserError: some of the variables are there and others are not.
    """
    env, wanted = os.environ, _TORCHRUN[:4]
    if env.get("WORLD_SIZE", "1") != "1":
        missing = [name for name in _TORCHRUN if not env.get(name)]
        if missing:
            raise UserError(
                f"WORLD_SIZE={env['WORLD_SIZE']} is set but not {', '.join(missing)}; start with torchrun, "
                "which sets them all, or unset WORLD_SIZE for one process"
            )
    values = [env.get(name) or default for name, default in zip(wanted, "0011", strict=True)]
    wrong = [f"{name}={value}" for name, value in zip(wanted, values, strict=True) if not value.isdecimal()]
    if wrong:
        raise UserError(f"{', '.join(wrong)}: not a whole number; start with torchrun, which sets it")
    rank, local_rank, world, local_world = map(int, values)
    return rank, local_rank, world, local_world


def is_started() -> bool:
    """Whether torchrun, or a launcher of ours, made this process one of several: then it trains, and starts nobody."""
    return bool(os.environ.get("TORCHELASTIC_RUN_ID")) or "RANK" in os.environ


def processes_per_node(section: LaunchSection) -> int:
    """How many processes ``launch=local`` and ``launch=slurm`` start on a node. Needs no torch."""
    if section.processes is not None:
        return section.processes
    return max(1, _gpus_of_the_system()) if section.name == "local" and section.device != "cpu" else 1


def _gpus_of_the_system() -> int:
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return len([name for name in visible.split(",") if name.strip() not in ("", "-1")])
    with suppress(OSError):
        return len(list(Path("/proc/driver/nvidia/gpus").iterdir()))
    return 0


def planned_processes(section: LaunchSection, dry_run: bool) -> int:
    """Number of processes the run has, will have once they are started, or would have in a dry run.

    Raises:
        UserError: ``launch.processes`` or ``launch.nodes`` contradicts what torchrun started, or torchrun's variables
            are there in part only.
    """
    _, _, started, per_node = torchrun_says()
    if section.name == "local" and (section.nodes or 1) > 1:
        raise UserError(
            f"launch.nodes={section.nodes} with launch=local, which starts processes on this machine alone; use "
            "launch=slurm, or torchrun on each node"
        )
    if started == 1 and (dry_run or (section.name != "torchrun" and not is_started())):
        return processes_per_node(section) * (section.nodes or 1)
    for key, asked, actual in (
        ("processes", section.processes, per_node),
        ("nodes", section.nodes, started // per_node),
    ):
        if asked is not None and asked != actual:
            nodes = f"--nnodes={section.nodes} " if (section.nodes or 1) > 1 else "--standalone "
            raise UserError(
                f"launch.{key}={asked} but {actual} {'was' if actual == 1 else 'were'} started; start them with: "
                f"torchrun {nodes}--nproc_per_node={section.processes or per_node} train.py ..., or launch=local, or "
                "plan: dry_run=true"
            )
    return started


def choose_device(section: LaunchSection, local_rank: int, local_world: int) -> "torch.device":
    import torch

    gpus = torch.cuda.device_count() if section.device != "cpu" else 0
    if section.device == "cuda" and gpus == 0:
        raise UserError("launch.device=cuda but this machine shows no GPU to torch; use launch.device=cpu")
    if gpus and local_world > gpus:
        raise UserError(
            f"{local_world} processes on this machine but {gpus} GPU{'s' if gpus > 1 else ''} visible; use "
            f"--nproc_per_node={gpus}, or launch.device=cpu"
        )
    return torch.device("cuda", local_rank) if gpus else torch.device("cpu")


def keep_freed_memory() -> None:
    """Let glibc keep what a step frees for the next step: given back, it is faulted in anew, 10,000 pages a step."""
    with suppress(OSError, AttributeError):
        libc = ctypes.CDLL("libc.so.6")
        for option, value in ((_M_TRIM_THRESHOLD, 2**31 - 1), (_M_TOP_PAD, 2**26), (_M_MMAP_THRESHOLD, 2**30)):
            libc.mallopt(option, value)
