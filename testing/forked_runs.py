"""Processes forked from one that has already imported the modules they need.

The imports for training take 5 seconds of CPU time. Tests of torchrun, of program startup, or of signals during startup
need new interpreters.
"""

import ctypes
import gc
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
_MANY_OBJECTS = 20_000

FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["testing.runs", "testing.preloaded", "torch._dynamo", "pytest"])
"""Optimizers import torch._dynamo. Tests whose functions run on ranks import pytest."""


def settle() -> None:
    """Set up a forked process.

    It is killed when its parent ends, so that no process outlives the tests. Like a run at its start, it excludes
    imported modules from garbage collection.
    """
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    gc.freeze()


def set_aside() -> None:
    """Exclude the objects of earlier runs in this process from garbage collection, if they are many.

    A run collects garbage when it begins. Looking through all that earlier runs have cached would take it as long as
    the rest of a tiny run.
    """
    if len(gc.get_objects(2)) > _MANY_OBJECTS:
        gc.collect()
        gc.freeze()


class Typed:
    """``python`` with interpreter ``arguments``, run in a fork: a file, ``-m`` and a module, or ``-c`` and a script."""

    def __init__(self, *arguments: str, cwd: Path = ROOT, env: Mapping[str, str] | None = None) -> None:
        self._outputs = tempfile.TemporaryDirectory(prefix="serried-tests-")
        self._files = [Path(self._outputs.name) / name for name in ("stdout", "stderr")]
        environment = dict(os.environ if env is None else env)
        self._process = FORKS.Process(target=_run, args=(arguments, cwd, environment, self._files), daemon=True)
        self._process.start()
        assert self._process.pid is not None
        self.pid = self._process.pid

    def end(self, timeout_seconds: float = 240) -> subprocess.CompletedProcess[str]:
        """Wait for the process to end, and kill it after ``timeout_seconds``."""
        self._process.join(timeout_seconds)
        self._process.kill()
        self._process.join()
        stdout, stderr = (file.read_text() for file in self._files)
        self._outputs.cleanup()
        assert self._process.exitcode is not None
        return subprocess.CompletedProcess([], self._process.exitcode, stdout, stderr)


def typed(*arguments: str, cwd: Path = ROOT, env: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """Run ``python`` with ``arguments`` in a fork, and return its exit code and output."""
    return Typed(*arguments, cwd=cwd, env=env).end()


def typed_on(ranks: int, *arguments: str, cwd: Path = ROOT) -> list[subprocess.CompletedProcess[str]]:
    """Run ``python`` with ``arguments`` on ``ranks`` forked ranks that rendezvous as under torchrun.

    Returns:
        The exit code and output of each rank.
    """
    from torch.distributed import TCPStore

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    processes = [
        Typed(*arguments, cwd=cwd, env={**os.environ, **torchruns_variables(rank, ranks, store.port)})
        for rank in range(ranks)
    ]
    return [process.end() for process in processes]


def torchruns_variables(rank: int, ranks: int, port: int, run: int = 1) -> dict[str, str]:
    """Return the environment variables that torchrun sets for a rank on this machine."""
    variables = {
        "RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks, "GROUP_RANK": 0,
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "TORCHELASTIC_USE_AGENT_STORE": True,
        "TORCHELASTIC_RUN_ID": run,
    }  # fmt: skip
    return {key: str(value) for key, value in variables.items()}


def _run(arguments: tuple[str, ...], cwd: Path, environment: dict[str, str], outputs: list[Path]) -> None:
    settle()
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(environment)
    for number, path in enumerate(outputs, start=1):
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(descriptor, number)
        os.close(descriptor)
    first, *rest = arguments
    is_file = not first.startswith("-")
    sys.argv = list(arguments) if is_file else rest
    sys.path.insert(0, str(Path(first).parent.resolve()) if is_file else str(cwd))
    if is_file:
        runpy.run_path(first, run_name="__main__")
    elif first == "-m":
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    else:
        exec(rest[0], {"__name__": "__main__"})
