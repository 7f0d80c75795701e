"""Compilation in a run: status lines, warnings about recompilation, and a cache for later starts."""

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import gettempdir
from typing import Any

import torch

from serried.configs.errors import StopRequested, TrainingFailed, UserError
from serried.configs.requirements import missing_compiler
from serried.runtime.console import Console
from serried.runtime.process import usable_cores

_CACHE, _THREADS = "TORCHINDUCTOR_CACHE_DIR", "TORCHINDUCTOR_COMPILE_THREADS"
_MOST_WARNINGS = 8
_MOUNTS = Path("/proc/self/mountinfo")
_OF_A_NETWORK = (
    "nfs", "nfs4", "lustre", "gpfs", "beegfs", "ceph", "cifs", "smb3", "smbfs", "afs", "panfs", "wekafs", "9p",
)  # fmt: skip
"""Types of network file systems. FUSE file systems count as network file systems as well."""


def check_compiler(device: torch.device) -> None:
    """Raise ``UserError`` if torch.compile has no compiler for ``device`` on this machine."""
    if missing := missing_compiler(device.type):
        what, remedy = missing
        raise UserError(f"trainer.compile=true needs {what}; {remedy}, or use trainer.compile=false")


class Compilation:
    """Report the compilations of a run on this rank."""

    def __init__(self, console: Console, processes: int = 1, *, is_on_one_node: bool = True) -> None:
        """Set up the compile cache and the compile threads.

        Args:
            console: Receives the reports.
            processes: Number of processes on this node.
            is_on_one_node: Whether the run uses a single node.

        Raises:
            UserError: The temporary folder for the cache belongs to another user.
        """
        # torch sets a temporary cache folder as soon as its compiler is imported. The cache must not be in the run
        # folder: torch loads pickles and programs from the cache, and a run folder may come from an untrusted source.
        temporary = f"{gettempdir()}/torchinductor_"
        if os.environ.get(_CACHE, temporary).startswith(temporary):
            os.environ[_CACHE] = str(_cache_folder(is_on_one_node=is_on_one_node))
        if processes > 1 and _THREADS not in os.environ:
            share_threads(processes)
        torch.compiler.reset()  # discard graphs of earlier runs of this process: torch limits their number
        self._console = console
        self._seen = _newest()
        self._recompiled = 0
        self._is_first = True
        self._unreported: list[tuple[int, int]] = []
        self.blocks = 0
        """Number of blocks on this rank."""

    def announce(self) -> None:
        """Print that the blocks are about to be compiled."""
        self._console.say(
            f"compiling  {self.blocks} blocks in the first step, which takes longer; compiled code is cached in "
            f"{os.environ[_CACHE]}"
        )

    @contextmanager
    def unreported(self) -> Iterator[None]:
        """Do not report compilations in this context, such as attention with the varying shapes of evaluation."""
        began = _newest()
        yield
        self._unreported.append((began, _newest()))

    def report(self, step: int) -> None:
        """Print the compilations of ``step``: as information in the first step, as a warning later."""
        found = [
            compilation
            for compilation in _compilations()
            if compilation.start_time_us > self._seen
            and not any(began < compilation.start_time_us <= ended for began, ended in self._unreported)
        ]
        self._unreported.clear()
        self._seen = _newest()
        if not found:
            return
        # Backward graphs have no name.
        graphs = [compilation for compilation in found if compilation.co_name is not None]
        seconds = sum(compilation.duration_us or 0 for compilation in found) / 1e6
        if self._is_first:
            many = f"{len(graphs)} graph{'' if len(graphs) == 1 else 's'}"
            self._console.say(f"compiled   {self.blocks} blocks in {seconds:.1f} s: {many}")
            self._is_first = False
            return
        for graph in graphs:
            self._recompiled += 1
            if self._recompiled <= _MOST_WARNINGS:
                reason = (graph.recompile_reason or "code that had not run before").splitlines()[0]
                self._console.say(
                    f"WARNING    step {step} recompiled a block, recompilation {self._recompiled} ({seconds:.1f} s): "
                    f"{reason}; batches of one shape avoid recompilation"
                )


def explained(error: BaseException, asked: str | None) -> BaseException:
    """Return ``error``, or a one-line failure if torch could not compile a block.

    Args:
        error: The exception to explain.
        asked: The signal that this process has received, if any. Slurm and terminals send it to the compiler as well,
            so the run is reported as stopped and can be resumed.
    """
    cause: BaseException | None = error
    while cause is not None:
        if type(cause).__module__.startswith(("torch._dynamo.exc", "torch._inductor.exc")):
            if asked is not None:
                return StopRequested(asked)
            first = next(filter(None, str(cause).splitlines()), type(cause).__name__)
            return TrainingFailed(
                f"torch could not compile a block ({type(cause).__name__}: {first}); use trainer.compile=false. The "
                "log of the rank has the full error"
            )
        cause = cause.__cause__
    return error


def share_threads(processes: int) -> None:
    """Set the number of compile threads to half of this process's share of the node's cores.

    The default of torch is up to 32 threads per process.
    """
    from torch._inductor import config  # TORCHINDUCTOR_COMPILE_THREADS has no effect after this import

    config.compile_threads = max(1, usable_cores() // processes // 2)


def _cache_folder(*, is_on_one_node: bool) -> Path:
    """Return the user's compile cache folder for this environment.

    The cache is on a local disk if the run uses several nodes or the default folder is on a network file system:
    there, files vanish if many processes rename and delete them at the same time.
    """
    base = Path(os.environ.get("XDG_CACHE_HOME") or "")
    base = (base if base.is_absolute() else Path.home() / ".cache") / "serried"
    if not is_on_one_node or is_of_a_network(base):
        base = _own_temporary_folder()
    return base / "compiled" / f"{torch.__version__}-{torch.backends.cpu.get_cpu_capability()}"


def is_of_a_network(path: Path) -> bool:
    """Return whether ``path``, which need not exist, is on a network file system. False if this is unknown."""
    path = path.resolve()
    found = ""
    depth = 0
    with suppress(OSError):
        for line in _MOUNTS.read_text(encoding="utf-8", errors="replace").splitlines():
            before, _, after = line.partition(" - ")
            point = Path(before.split()[4].replace("\\040", " "))
            if path.is_relative_to(point) and len(point.parts) >= depth:  # the last mount of a folder hides the earlier
                found, depth = after.split()[0], len(point.parts)
    return found in _OF_A_NETWORK or found.startswith("fuse.")


def _own_temporary_folder() -> Path:
    """Return a private temporary folder. Programs are run from it, so no other user may write to it."""
    folder = Path(gettempdir(), f"serried-{os.geteuid()}")
    with suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o077:
        raise UserError(
            f"{folder}, the cache of compiled code, is not a folder that only this user can access (mode 700); remove "
            f"it, or use {_CACHE}=FOLDER"
        )
    return folder


def _compilations() -> list[Any]:
    """Return the recent compilations of this process. Uses a private function of torch; a test guards it."""
    from torch._dynamo.utils import get_compilation_metrics

    return list(get_compilation_metrics())


def _newest() -> int:
    """Return the start time of the latest compilation, in microseconds."""
    return max((compilation.start_time_us for compilation in _compilations()), default=0)
