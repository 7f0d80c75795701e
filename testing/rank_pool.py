"""Long-lived rank processes on this machine, reused by all distributed tests."""

import contextlib
import json
import multiprocessing
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from testing.forked_runs import FORKS, torchruns_variables
from testing.forked_runs import ROOT as ROOT
from testing.worker import serve

SPAWNED = multiprocessing.get_context("spawn")
"""New interpreters, because CUDA cannot be used in a fork of a process that has queried GPUs."""
_NOT_DONE = {"error": "not done in time"}


@dataclass(frozen=True)
class Answer:
    """Return value and output of one rank."""

    value: Any
    printed: str


class Cluster:
    """A pool of rank processes that rendezvous like torchrun workers.

    They use a store of the parent process, with one prefix per run.
    """

    def __init__(
        self, ranks: int, context: Any = FORKS, variables: Callable[..., dict[str, str]] = torchruns_variables
    ) -> None:
        """
        Args:
            ranks: Number of processes to start.
            context: Multiprocessing context.
            variables: Returns the environment of a rank, like ``torchruns_variables``.
        """
        from torch.distributed import TCPStore

        self._context, self._variables = context, variables

        self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # port 0 picks a free port
        self._folder = tempfile.TemporaryDirectory(prefix="serried-tests-")
        self._runs = 0
        self._workers: list[_Worker] = []
        self._start(ranks)

    def run(
        self, world_size: int, function: str, timeout_seconds: float = 120, after_death_seconds: float = 2,
        **arguments: Any,
    ) -> list[Answer]:  # fmt: skip
        """Call ``module:function`` with ``arguments`` on ``world_size`` ranks at once.

        ``after_death_seconds``: time for the other ranks once a rank has died, because they may be waiting for it.

        Raises:
            AssertionError: A rank raised an exception, died or timed out. The message contains the output of each rank.
        """
        self._runs += 1
        self._start(world_size)
        outputs = [Path(self._folder.name) / f"run{self._runs}-rank{rank}" for rank in range(world_size)]
        for rank, (worker, output) in enumerate(zip(self._workers, outputs, strict=False)):
            environment = self._variables(rank, world_size, self._store.port, self._runs)
            worker.send(
                function=function, arguments=arguments, output=str(output),
                environment=environment if world_size > 1 else {},
            )  # fmt: skip
        deadline = time.monotonic() + timeout_seconds
        answers = self._answers(world_size, deadline, after_death_seconds)
        printed = [output.read_text() if output.exists() else "" for output in outputs]
        errors = [f"rank {rank}: {a['error']}" for rank, a in enumerate(answers) if "error" in a]
        if errors:
            self.stop()  # a rank that is still in a collective would disturb the next test
            texts = [f"rank {rank} printed:\n{text}" for rank, text in enumerate(printed) if text]
            raise AssertionError("\n".join([*errors, *texts]))
        return [Answer(a["value"], text) for a, text in zip(answers, printed, strict=True)]

    def _answers(self, world_size: int, deadline: float, after_death_seconds: float) -> list[dict[str, Any]]:
        """Return one answer per rank."""
        answers: dict[int, dict[str, Any]] = {}
        while len(answers) < world_size:
            for rank, worker in enumerate(self._workers[:world_size]):
                until = min(deadline, time.monotonic() + 0.05) if len(answers) < world_size - 1 else deadline
                if rank in answers or ((answer := worker.answer(until)) == _NOT_DONE and until < deadline):
                    continue
                answers[rank] = answer
                if worker.is_dead:
                    deadline = min(deadline, time.monotonic() + after_death_seconds)
        return [answers[rank] for rank in range(world_size)]

    def stop(self) -> None:
        """End all processes. The next run starts new ones."""
        for worker in self._workers:
            worker.stop()
        self._workers = []

    def _start(self, count: int) -> None:
        """Start processes until there are at least ``count``."""
        new = [_Worker(self._context) for _ in range(count - len(self._workers))]
        deadline = time.monotonic() + 120
        for worker in new:
            assert "ready" in worker.answer(deadline)
        self._workers += new


class _Worker:
    def __init__(self, context: Any) -> None:
        self._pipe, its_end = context.Pipe()
        self._process = context.Process(target=serve, args=(its_end,))
        self._process.start()
        its_end.close()  # so that the pipe closes when the process ends

    def send(self, **task: Any) -> None:
        with contextlib.suppress(BrokenPipeError):  # the process died between two tests; answer() reports it
            self._pipe.send(json.dumps(task))

    def answer(self, deadline: float) -> dict[str, Any]:
        if not self._pipe.poll(max(0.0, deadline - time.monotonic())):
            return _NOT_DONE
        try:
            return json.loads(self._pipe.recv())
        except (EOFError, ConnectionError):
            self._process.join()
            return {"error": f"the process ended with {self._process.exitcode}"}

    @property
    def is_dead(self) -> bool:
        return not self._process.is_alive()

    def stop(self) -> None:
        self._process.kill()
        self._process.join()
        self._pipe.close()
