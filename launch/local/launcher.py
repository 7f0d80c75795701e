"""``launch=local``: start the ranks on this machine and report how they ended."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from serried.configs.errors import EXIT_FAILED, EXIT_FINISHED, EXIT_MISTAKE, EXIT_STOPPED, UserError
from serried.configs.formats import printable
from serried.configs.schema.sections import RunConfig
from serried.launch.local.forks import fork_ranks, load_to_fork
from serried.launch.local.processes import PASSED_ON, NotedSignals, Started, held_back, killed_by, wait_for_all
from serried.records.files import make_scratch
from serried.records.run_folder import refuse_links
from serried.records.status import Status, read_status, record_kill
from serried.runtime.import_signals import (
    EXIT_UNREPORTED,
    LAUNCHER,
    check_temporary_folder,
    end_in_one_line,
    is_program,
)
from serried.runtime.process import CONSOLE, REPORTS, processes_per_node, training_command, usable_cores

if TYPE_CHECKING:
    from torch.distributed import TCPStore

_OUTPUT = "output"
_LONGEST_REPORT_LINES = 100
_NOT_STARTED = "stopped    before training began; run the same command to start it"
_GONE = 256
"""Recorded instead of exit code 0 for a rank that ended before the run did. No process can have this exit code."""
_OURS = ("Traceback (most recent call last)", "error: ", "failed: ")


def run_local(
    config: RunConfig, argv: Sequence[str], load: Callable[[], object] | None = None, program: Sequence[str] = ()
) -> int | None:
    """Train with ``launch.processes`` processes on this machine. Return the exit code; None in a rank.

    The ranks are forks of this process, made after ``load`` has imported training's modules. If forking is not
    safe or ``load`` is None, they are new interpreters started with ``argv``. Rank 0 prints to this console, the
    others to files in ``run.dir/output``; the output of the first rank that failed is printed last. Signals are
    passed on, and no process is left behind, however this one ends.

    Args:
        program: arguments of the interpreter instead of the training command.

    Raises:
        UserError: the run folder cannot be written or contains links, or torch cannot be imported.
    """
    started, world = time.time(), processes_per_node(config.launch)
    check_temporary_folder()
    if config.run.url is not None:
        make_scratch(config.run.dir)
    refuse_links(config.run.dir)
    try:
        (config.run.dir / _OUTPUT).mkdir(parents=True, exist_ok=True)
        output = config.run.dir / _OUTPUT / f"{time.strftime('%Y%m%d-%H%M%S')}-{os.urandom(4).hex()}"
        output.mkdir()  # not with tempfile, whose folders only their owner may read
    except OSError as error:
        raise UserError(
            f"cannot write the run folder {config.run.dir}: {error.strerror}; use {config.run.another_disk}"
        ) from None
    end_in_one_line(PASSED_ON)
    # Set before torch is imported, because it reads OMP_NUM_THREADS then.
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, usable_cores() // world)))
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    is_forked = load is not None and load_to_fork(load, config.launch)
    with NotedSignals() as signals:
        listener, reports = socket.create_server(("127.0.0.1", 0)), _Reports()
        port = listener.getsockname()[1]
        recovers = config.recover.mode == "memory"
        console = _console() if recovers else ()
        variables = [_variables(rank, world, port, output.name, reports, console) for rank in range(world)]
        logs = [None, *(output / f"rank-{rank}.log" for rank in range(1, world))]
        processes: Sequence[Started] | None
        if is_forked:
            processes = fork_ranks(variables, logs, signals)
            if processes is None:
                listener.close()
                reports.close()
                return None
        else:
            processes = [
                _start_rank(its_variables, log, [*(program or training_command()), *argv], reports, console)
                for its_variables, log in zip(variables, logs, strict=True)
            ]
        store = _store(listener)  # it must exist during the ranks' rendezvous
        ranks = [_Rank(number, process, reports) for number, process in enumerate(processes)]
        survivors = _Survivors(ranks, reports) if recovers else None
        on_look = survivors.end_others if survivors is not None else reports.read
        failed = wait_for_all(ranks, signals, config.launch.stop_timeout_seconds, on_look)
        reports.read()
        if survivors is not None:
            failed = failed or survivors.killed()
        del store
        for descriptor in console:
            os.close(descriptor)
        return _report_end(
            failed, config, output, reports.said, since=started, was_asked_to_stop=bool(signals.received)
        )


class _Reports:
    """Messages that the ranks write to this process with ``tell_launcher``."""

    def __init__(self) -> None:
        self.ended: set[int] = set()
        """Ranks that reported a regular end."""
        self.said: list[str] = []
        """Errors of the ranks that print to a file, in the order they were printed."""
        self.recovering: set[int] = set()
        """Ranks that continue from memory if another one is lost."""
        self.fenced: set[int] = set()
        """Ranks that ended because the others continue without them."""
        self.formed: list[int] | None = None
        """Ranks that continued after the last loss; None before the first one."""
        self.printing = 0
        """The rank that prints to this console."""
        self._end, self.descriptor = os.pipe()
        os.set_blocking(self._end, False)
        self._rest = b""

    def read(self) -> None:
        """Read the ranks' messages since the last call."""
        with suppress(BlockingIOError):
            while content := os.read(self._end, 2**16):
                self._rest += content
        *lines, self._rest = self._rest.split(b"\n")
        for line in lines:
            try:
                told = json.loads(line)
            except ValueError:  # two ranks wrote at the same time, which the system should not allow
                continue
            if told.get("ended"):
                self.ended.add(told["rank"])
            elif told.get("recovers"):
                self.recovering.add(told["rank"])
            elif told.get("fenced"):
                self.fenced.add(told["rank"])
            elif "formed" in told:
                self.formed = told["formed"]
            elif told.get("prints"):
                self.printing = told["rank"]
            elif told["rank"] != self.printing:
                self.said.append(told["said"])

    def close(self) -> None:
        """Close the read end of the pipe, in a rank."""
        os.close(self._end)


class _Rank:
    """Process of a rank, for ``wait_for_all``. Exit code 0 before the end of the run counts as a failure, and the end
    of a rank without which the others continue does not."""

    def __init__(self, number: int, process: Started, reports: _Reports) -> None:
        self.number = number
        self._process = process
        self._reports = reports
        self.returncode: int | None = None
        self.lost: int | None = None
        """Exit code, if the others continue without this rank."""

    def poll(self) -> int | None:
        code = self._process.poll()
        self._reports.read()
        if self.lost is None and code is not None:
            is_killed = code < 0 and self.number in self._reports.recovering
            is_left_behind = self._reports.formed is not None and self.number not in self._reports.formed
            self.lost = code if is_killed or is_left_behind or self.number in self._reports.fenced else None
        if self.lost is not None:
            self.returncode = 0
        else:
            self.returncode = _GONE if code == 0 and self.number not in self._reports.ended else code
        return self.returncode

    def send_signal(self, number: int, /) -> None:
        self._process.send_signal(number)


class _Survivors:
    """Ranks of a run that continues without lost ranks."""

    def __init__(self, ranks: Sequence[_Rank], reports: _Reports) -> None:
        self._ranks, self._reports = ranks, reports

    def end_others(self) -> None:
        """Kill ranks that the others have left behind, such as a frozen one, once the run has ended."""
        members = self._reports.formed
        if members is None or any(self._ranks[number].poll() is None for number in members):
            return
        for rank in self._ranks:
            rank.send_signal(signal.SIGKILL)

    def killed(self) -> dict[int, int]:
        """Return the exit codes of lost ranks, by rank, if the rank that writes the records has not reached the end, as
        when it is killed after the others have ended; else nothing."""
        main = self._ranks[(self._reports.formed or [0])[0]]
        if main.number in self._reports.ended and main.lost is None:
            return {}
        return {rank.number: rank.lost for rank in self._ranks if rank.lost is not None}


def _console() -> tuple[int, ...]:
    """Return copies of the descriptors of this process's output, for the rank that prints if rank 0 is lost."""
    with suppress(OSError):
        return os.dup(1), os.dup(2)
    return ()


def _variables(
    rank: int, world: int, port: int, run_id: str, reports: _Reports, console: Sequence[int]
) -> dict[str, str]:
    """Return the variables that torchrun sets for a rank."""
    given = {
        "RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world, "GROUP_RANK": 0,
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "TORCHELASTIC_USE_AGENT_STORE": True,
        "TORCHELASTIC_RUN_ID": run_id, LAUNCHER: os.getpid(), REPORTS: reports.descriptor,
        **({CONSOLE: ",".join(map(str, console))} if console else {}),
    }  # fmt: skip
    return {name: str(value) for name, value in given.items()}


def _start_rank(
    variables: Mapping[str, str], log: Path | None, argv: Sequence[str], reports: _Reports, console: Sequence[int]
) -> "subprocess.Popen[bytes]":
    """Start a rank as a new interpreter."""
    # Our program unblocks signals once it has handlers; before that, an interrupted import may continue.
    until_handled = held_back() if is_program() else nullcontext()
    with log.open("wb") if log else nullcontext() as file, until_handled:
        return subprocess.Popen(
            [sys.executable, *argv],
            stdout=file, stderr=file, env=os.environ | variables, pass_fds=(reports.descriptor, *console),
            process_group=0,  # a terminal's Ctrl-C reaches only this process, which passes it on once
        )  # fmt: skip


def _store(listener: socket.socket) -> "TCPStore":
    """Return a store that listens on ``listener``. A store that opens its own port listens on all networks.

    Create it only after the ranks are forked, because it starts a thread.
    """
    from torch.distributed import TCPStore

    host, port = listener.getsockname()
    return TCPStore(host, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())


def _report_end(
    failed: Mapping[int, int], config: RunConfig, output: Path, said: Sequence[str], *, since: float,
    was_asked_to_stop: bool,
) -> int:  # fmt: skip
    """Print the failures that the ranks could not report, and return the exit code of the run.

    Args:
        failed: exit codes by rank, negative for a signal.
        said: errors of the ranks that print to a file.
        since: start time of the run in Unix seconds.
    """
    codes = set(failed.values())
    if not codes:
        return EXIT_FINISHED
    killed = _first_killed(failed, config.launch.stop_timeout_seconds, was_asked_to_stop=was_asked_to_stop)
    killed = killed or _gone(failed)
    if killed:
        with suppress(OSError):
            record_kill(config.run.dir, killed, since=since)
    status = read_status(config.run.dir)
    if status is not None and status.time < since:
        status = None  # written by an earlier run
    code = _exit_code(codes, status, was_asked_to_stop=was_asked_to_stop)
    if code == EXIT_STOPPED and codes != {EXIT_STOPPED} and status is None:
        print(_NOT_STARTED, flush=True)
    if code in (EXIT_FAILED, EXIT_MISTAKE):
        # If the disk is full, the report could not be written.
        report = "" if killed else _report_of_another_rank(output) or "".join(said[:1])
        if code == EXIT_MISTAKE:
            _remove_output(output)
        if report or killed:
            print(printable(report or f"failed: {killed}"), file=sys.stderr, flush=True)
    return code


def _exit_code(codes: set[int], status: Status | None, *, was_asked_to_stop: bool) -> int:
    """Return the exit code in ``status.json`` if this run wrote one, else the most specific one in ``codes``."""
    if codes == {EXIT_MISTAKE}:  # for example, status.json may belong to another command in this folder
        return EXIT_MISTAKE
    if status is not None and status.exit_code is not None:
        return status.exit_code
    if EXIT_MISTAKE in codes:
        return EXIT_MISTAKE
    # 1 is not one of our codes: Python exits with it if it is interrupted during start-up.
    asked = {1, *(-number for number in PASSED_ON.values())} if was_asked_to_stop else set()
    return EXIT_STOPPED if codes <= {EXIT_STOPPED, EXIT_UNREPORTED, *asked} else EXIT_FAILED


def _first_killed(failed: Mapping[int, int], stop_timeout_seconds: float, *, was_asked_to_stop: bool) -> str | None:
    """Describe the first rank that was killed by a signal which this process did not send; None if there is none."""
    asked = set(PASSED_ON.values()) if was_asked_to_stop else set()
    killed = [(rank, -code) for rank, code in sorted(failed.items()) if code < 0 and -code not in asked]
    if not killed:
        return None
    rank, number = killed[0]
    if number == signal.SIGKILL and was_asked_to_stop:
        limit = f"launch.stop_timeout_seconds={stop_timeout_seconds:g}"
        return f"rank {rank} was killed by SIGKILL (stopping took longer than {limit})"
    return f"rank {rank} was {killed_by(number)}"


def _gone(failed: Mapping[int, int]) -> str | None:
    """Describe the ranks that ended as if the run had finished; None if there are none."""
    gone = [str(rank) for rank, code in sorted(failed.items()) if code == _GONE]
    if not gone:
        return None
    which = f"rank {gone[0]}" if len(gone) == 1 else f"ranks {', '.join(gone[:-1])} and {gone[-1]}"
    return f"{which} ended with exit code 0 before the run finished: code in it called os._exit() or exit()"


def _remove_output(output: Path) -> None:
    """Remove the output of a refused command, and the folders that hold nothing else."""
    with suppress(OSError):
        shutil.rmtree(output)
        output.parent.rmdir()
        output.parent.parent.rmdir()


def _report_of_another_rank(output: Path) -> str:
    """Return the output of the first rank that failed, unless that is rank 0, which has printed it already."""
    for path in sorted(output.glob("rank-*.log"), key=lambda path: path.stat().st_mtime):
        lines = path.read_text("utf-8", "replace").splitlines()
        first = next((number for number, line in enumerate(lines) if line.startswith(_OURS)), None)
        if first is not None:
            return "\n".join(lines[first:][-_LONGEST_REPORT_LINES:])
    return ""
