"""``launch=local``: start the ranks on this machine with torchrun's elastic agent and report how they ended."""

import logging
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from serried.configs.errors import EXIT_FAILED, EXIT_FINISHED, EXIT_MISTAKE, EXIT_STOPPED, UserError
from serried.configs.schema import RunConfig
from serried.launch.forward import PASSED_ON, NotedSignals, killed_by, send
from serried.records.status import Status, read_status, record_kill
from serried.runtime.early import LAUNCHER
from serried.runtime.program import training_command
from serried.runtime.ranks import processes_per_node, usable_cores

if TYPE_CHECKING:
    from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent

_OUTPUT = "output"
_LOOK_SECONDS = 0.1
_LONGEST_REPORT_LINES = 100
_NOT_STARTED = "stopped    before training began; the same command starts it"
_OURS = ("Traceback (most recent call last)", "error: ", "failed: ")


def run_local(config: RunConfig, argv: Sequence[str]) -> int:
    """Train with ``launch.processes`` processes on this machine, each started with ``argv``. Return the exit code.

    Rank 0 prints to this console, the others to files in ``run.dir/output``; the output of the first rank that failed
    is printed last. Signals are passed on, and no process is left behind, however this one ends.

    Raises:
        UserError: the run folder cannot be written.
    """
    started = time.time()
    with NotedSignals() as signals:
        try:
            (config.run.dir / _OUTPUT).mkdir(parents=True, exist_ok=True)
            output = Path(tempfile.mkdtemp(prefix=time.strftime("%Y%m%d-%H%M%S-"), dir=config.run.dir / _OUTPUT))
        except OSError as error:
            raise UserError(
                f"cannot write the run folder {config.run.dir}: {error.strerror}; use run.dir=FOLDER"
            ) from None
        ranks = _Ranks(processes_per_node(config.launch), argv, output)
        if signals.received:
            print(_NOT_STARTED, flush=True)
            return EXIT_STOPPED
        ranks.start()
        sent: set[tuple[int, int]] = set()
        deadline = float("inf")
        while ranks.are_running(_LOOK_SECONDS):
            pids = ranks.pids()
            if signals.received:
                deadline = min(deadline, time.monotonic() + config.launch.stop_timeout_seconds)
            for count, number in enumerate(signals.received):
                for pid in pids:
                    if (count, pid) not in sent:
                        sent.add((count, pid))
                        send(pid, number)
            if time.monotonic() > deadline:
                for pid in pids:
                    send(pid, signal.SIGKILL)
        return _report_end(ranks, config, output, since=started, was_asked_to_stop=bool(signals.received))


class _Ranks:
    """The processes, under one elastic agent.

    The agent runs in a thread: in the main thread it would handle SIGTERM itself, pass it on once, and abandon the
    ranks at the second one.
    """

    def __init__(self, processes: int, argv: Sequence[str], output: Path) -> None:
        self.failures: dict[int, tuple[int, float]] = {}
        """Exit code, negative for a signal, and time, by rank."""
        self.problem: BaseException | None = None
        """The error of the agent itself, if it failed."""
        self._agent = _agent(processes, argv, output)
        self._thread = threading.Thread(target=self._run, name="elastic agent")

    def start(self) -> None:
        self._thread.start()

    def _run(self) -> None:
        try:
            result = self._agent.run()
            self.failures = {rank: (each.exitcode, each.timestamp) for rank, each in result.failures.items()}
        except BaseException as error:
            self.problem = error

    def are_running(self, wait_seconds: float) -> bool:
        self._thread.join(wait_seconds)
        return self._thread.is_alive()

    def pids(self) -> list[int]:
        """Return the process ids of the ranks that have been started; some may have ended."""
        return [int(worker.id) for worker in self._agent.get_worker_group().workers if worker.id]


def _agent(processes: int, argv: Sequence[str], output: Path) -> "LocalElasticAgent":
    """Return torchrun's agent for one node, whose store listens on loopback only."""
    import socket

    from torch.distributed import TCPStore
    from torch.distributed.elastic.agent.server.api import WorkerSpec
    from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std
    from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
    from torch.distributed.elastic.rendezvous.dynamic_rendezvous import DynamicRendezvousHandler

    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)  # the ranks report what went wrong
    os.environ[LAUNCHER] = str(os.getpid())
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, usable_cores() // processes)))
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    listener = socket.create_server(("127.0.0.1", 0))
    host, port = listener.getsockname()
    store = TCPStore(
        host, port, is_master=True, wait_for_workers=False, timeout=timedelta(minutes=5),
        master_listen_fd=listener.detach(),
    )  # fmt: skip
    run_id = output.name
    rendezvous = DynamicRendezvousHandler.from_backend(
        run_id, store, C10dRendezvousBackend(store, run_id), min_nodes=1, max_nodes=1, local_addr=host
    )
    spec = WorkerSpec(
        role="rank",
        local_world_size=processes,
        entrypoint=sys.executable,
        args=(*training_command(), *argv),
        rdzv_handler=rendezvous,
        max_restarts=0,
        monitor_interval=_LOOK_SECONDS,
        local_addr=host,
    )
    files = dict.fromkeys(range(1, processes), Std.ALL) | {0: Std.NONE}
    return LocalElasticAgent(spec, DefaultLogsSpecs(log_dir=str(output), redirects=files))


def _report_end(ranks: _Ranks, config: RunConfig, output: Path, *, since: float, was_asked_to_stop: bool) -> int:
    """Print what the ranks could not report themselves, and return the exit code of the run."""
    if ranks.problem is not None:
        print(f"failed: the elastic agent: {ranks.problem!r}", file=sys.stderr, flush=True)
        return EXIT_FAILED
    codes = {code for code, _ in ranks.failures.values()}
    if not codes:
        return EXIT_FINISHED
    killed = _first_killed(ranks, config.launch.stop_timeout_seconds, was_asked_to_stop=was_asked_to_stop)
    if killed:
        with suppress(OSError):
            record_kill(config.run.dir, killed, since=since)
    status = read_status(config.run.dir)
    if status is not None and status.time < since:
        status = None  # an earlier run's
    code = _exit_code(codes, status, was_asked_to_stop=was_asked_to_stop)
    if code == EXIT_STOPPED and codes != {EXIT_STOPPED} and status is None:
        print(_NOT_STARTED, flush=True)
    if code in (EXIT_FAILED, EXIT_MISTAKE):
        report = "" if killed else _report_of_another_rank(output)
        if code == EXIT_MISTAKE:
            _remove_output(output)
        if report or killed:
            print(report or f"failed: {killed}", file=sys.stderr, flush=True)
    return code


def _exit_code(codes: set[int], status: Status | None, *, was_asked_to_stop: bool) -> int:
    """Return the exit code in ``status.json`` if this run wrote one, else the most specific of the ranks' ``codes``."""
    if status is not None and status.exit_code is not None:
        return status.exit_code
    if EXIT_MISTAKE in codes:
        return EXIT_MISTAKE
    # 1 is not one of our codes: a Python that was interrupted while it started.
    asked = {1, *(-number for number in PASSED_ON.values())} if was_asked_to_stop else set()
    return EXIT_STOPPED if codes <= {EXIT_STOPPED, *asked} else EXIT_FAILED


def _first_killed(ranks: _Ranks, stop_timeout_seconds: float, *, was_asked_to_stop: bool) -> str | None:
    """Return, in words, the first rank that was killed by a signal which neither this process nor the agent sent."""
    killed = [(time, rank, -code) for rank, (code, time) in ranks.failures.items() if code < 0]
    asked = set(PASSED_ON.values()) if was_asked_to_stop else {signal.SIGTERM}
    by_others = [each for each in killed if each[2] not in asked]
    if not by_others:
        return None
    _, rank, number = min(by_others)
    if number == signal.SIGKILL and was_asked_to_stop:
        limit = f"launch.stop_timeout_seconds={stop_timeout_seconds:g}"
        return f"rank {rank} was killed by SIGKILL (stopping took longer than {limit})"
    return f"rank {rank} was {killed_by(number)}"


def _remove_output(output: Path) -> None:
    """Remove the output of a refused command, and the folders that hold nothing else."""
    with suppress(OSError):
        shutil.rmtree(output)
        output.parent.rmdir()
        output.parent.parent.rmdir()


def _report_of_another_rank(output: Path) -> str:
    """Return the output of the first rank that failed, unless that is rank 0, which has printed it already."""
    for path in sorted(output.glob("*/attempt_*/*/stderr.log"), key=lambda path: path.stat().st_mtime):
        lines = path.read_text("utf-8", "replace").splitlines()
        first = next((number for number, line in enumerate(lines) if line.startswith(_OURS)), None)
        if first is not None:
            return "\n".join(lines[first:][-_LONGEST_REPORT_LINES:])
    return ""
