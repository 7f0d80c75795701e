"""Ranks that are forks of the launcher, so that training's modules are imported only once."""

import ctypes
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from serried.configs.schema.launch_plan_track import LaunchSection
from serried.launch.local.processes import NotedSignals, held_back
from serried.runtime.console import announced
from serried.runtime.process import may_use_gpus

_OPENBLAS = "libscipy_openblas"  # in the wheels of numpy and scipy; it starts threads when it is imported
_THREAD_ENDS_SECONDS = 1.0  # the system may still list a thread that was joined


class Forked:
    """A forked process, with the part of ``subprocess.Popen``'s interface that launchers use."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """Return the exit code of the process, negative for a signal; None while it runs."""
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode

    def send_signal(self, number: int, /) -> None:
        """Send signal ``number`` if the process is running."""
        if self.poll() is None:  # the process was not waited for, so its id is not reused
            os.kill(self.pid, number)


def load_to_fork(load: Callable[[], object], section: LaunchSection) -> bool:
    """Import the ranks' modules with ``load``. Return whether the ranks can be forked. If they cannot,
    the modules may not have been imported.

    Other threads do not exist in a fork: a lock that one of them holds stays locked, and OpenMP would wait for
    its threads. A script may have started threads. CUDA does not work in a fork if its driver was initialized
    before. Counting the GPUs initializes it, which a script or an imported library may have done, so ranks on
    GPUs are never forks.
    """
    if sys.platform != "linux" or may_use_gpus(section) or not _is_alone():
        return False
    with announced("loading torch", speaks=True), suppress(Exception):  # the ranks will fail, too, and report it
        load()
    deadline = time.monotonic() + _THREAD_ENDS_SECONDS
    while not (is_alone := _is_alone()) and time.monotonic() < deadline:
        time.sleep(0.01)
    return is_alone


def _is_alone() -> bool:
    """Return whether OpenBLAS, which stops its threads before each fork, owns all other threads of this process."""
    mapped = Path("/proc/self/maps").read_text().splitlines()
    libraries = {line.split(maxsplit=5)[5] for line in mapped if _OPENBLAS in line}  # a path may have spaces
    threads = 1
    for library in map(_loaded, libraries):
        names = ("scipy_openblas_get_num_threads64_", "scipy_openblas_get_num_threads")
        threads += next((getattr(library, name)() - 1 for name in names if hasattr(library, name)), 0)
    return len(list(Path("/proc/self/task").iterdir())) in (1, threads)


def _loaded(library: str) -> ctypes.CDLL | None:
    try:
        return ctypes.CDLL(library)
    except OSError:  # the library file was replaced: its threads count like any others
        return None


def fork_ranks(
    variables: Sequence[Mapping[str, str]], logs: Sequence[Path | None], signals: NotedSignals
) -> list[Forked] | None:
    """Fork one process for each entry of ``variables``. Return the processes. In a forked process, restore the handlers
    that ``signals`` replaced and return None.

    Args:
        variables: environment variables, by rank.
        logs: output file of each rank; None to print to this console.
    """
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError):
            stream.flush()  # otherwise a fork would print the unflushed text again
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # if a parent process ignored it, exit codes would be lost
    ranks = []
    with held_back():  # a signal to a fork that still has the launcher's handlers would be lost
        for given, log in zip(variables, logs, strict=True):
            pid = os.fork()
            if pid == 0:
                signals.restore()
                os.setpgid(0, 0)  # a terminal's Ctrl-C reaches only the launcher, which passes it on once
                os.environ.update(given)
                if log is not None:
                    _print_to(log)
                return None
            ranks.append(Forked(pid))
    return ranks


def _print_to(log: Path) -> None:
    with log.open("wb") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
