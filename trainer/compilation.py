"""What torch.compile does in a run: announced, reported, kept for the next start."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import gettempdir
from typing import Any

import torch

from serried.configs.compilers import missing_compiler
from serried.configs.errors import StopRequested, TrainingFailed, UserError
from serried.runtime.console import Console

_CACHE = "TORCHINDUCTOR_CACHE_DIR"
_MOST_WARNINGS = 8


def check_compiler(device: torch.device) -> None:
    """Raise ``UserError`` if torch.compile has no compiler here for ``device``."""
    if missing := missing_compiler(device.type):
        what, remedy = missing
        raise UserError(f"trainer.compile=true needs {what}; {remedy}, or use trainer.compile=false")


class Compilation:
    """Reports the compilations of a run on this rank."""

    def __init__(self, console: Console) -> None:
        # torch names a temporary folder as soon as its compiler is imported. Never in the run folder, which may come
        # from a stranger: torch keeps pickles and programs there.
        temporary = f"{gettempdir()}/torchinductor_"
        if os.environ.get(_CACHE, temporary).startswith(temporary):
            os.environ[_CACHE] = str(_cache_folder())
        torch.compiler.reset()  # torch keeps few graphs of a function, and an earlier run of this process had others
        self._console, self._seen, self._recompiled = console, _newest(), 0
        self._is_first = True
        self._unreported: list[tuple[int, int]] = []
        self.blocks = 0
        """Blocks on this rank."""

    def announce(self) -> None:
        """Print that blocks are about to be compiled."""
        self._console.say(
            f"compiling  {self.blocks} blocks in the first step, which takes longer; kept in {os.environ[_CACHE]}"
        )

    @contextmanager
    def unreported(self) -> Iterator[None]:
        """Do not report what is compiled inside this context, such as attention in evaluations, whose shapes vary."""
        began = _newest()
        yield
        self._unreported.append((began, _newest()))

    def report(self, step: int) -> None:
        """Print what was compiled in ``step``: in the first one as expected, later as a warning."""
        found = [
            each
            for each in _compilations()
            if each.start_time_us > self._seen
            and not any(began < each.start_time_us <= ended for began, ended in self._unreported)
        ]
        self._unreported.clear()
        self._seen = _newest()
        if not found:
            return
        graphs = [each for each in found if each.co_name is not None]  # others are their backwards
        seconds = sum(each.duration_us or 0 for each in found) / 1e6
        if self._is_first:
            many = f"{len(graphs)} graph{'' if len(graphs) == 1 else 's'}"
            self._console.say(f"compiled   {self.blocks} blocks in {seconds:.1f} s: {many}")
            self._is_first = False
            return
        for each in graphs:
            self._recompiled += 1
            if self._recompiled <= _MOST_WARNINGS:
                reason = (each.recompile_reason or "a part that had not run before").splitlines()[0]
                self._console.say(
                    f"WARNING    step {step} compiled a block again, number {self._recompiled} ({seconds:.1f} s): "
                    f"{reason}; batches of one shape need no other graph"
                )


def explained(error: BaseException, asked: str | None) -> BaseException:
    """Return ``error``, or if torch could not compile a block a failure of one line.

    ``asked``: the signal that this process has received, if any. Slurm and terminals send it to the compiler as well,
    and the run can be resumed.
    """
    cause: BaseException | None = error
    while cause is not None:
        if type(cause).__module__.startswith(("torch._dynamo.exc", "torch._inductor.exc")):
            if asked is not None:
                return StopRequested(asked)
            first = next(filter(None, str(cause).splitlines()), type(cause).__name__)
            return TrainingFailed(
                f"torch could not compile a block ({type(cause).__name__}: {first}); use trainer.compile=false. The "
                "log of the rank has the rest"
            )
        cause = cause.__cause__
    return error


def _cache_folder() -> Path:
    """The user's cache folder, by what a compiled program depends on."""
    base = Path(os.environ.get("XDG_CACHE_HOME") or "")
    base = base if base.is_absolute() else Path.home() / ".cache"
    return base / "serried" / "compiled" / f"{torch.__version__}-{torch.backends.cpu.get_cpu_capability()}"


def _compilations() -> list[Any]:
    """The last compilations of this process. Private to torch, which has no public name for them; a test guards it."""
    from torch._dynamo.utils import get_compilation_metrics

    return list(get_compilation_metrics())


def _newest() -> int:
    """When the last of them began."""
    return max((each.start_time_us for each in _compilations()), default=0)
