"""Who am I, where do I compute, whom do I talk to: one context manager from start to clean end."""

import ctypes
import json
import os
import socket
import sys
import time
import traceback
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

from configs.errors import (
    EXIT_FAILED,
    EXIT_FINISHED,
    EXIT_MISTAKE,
    EXIT_STOPPED,
    StopRequested,
    TrainingFailed,
    TrainingStopped,
    UserError,
)
from configs.schema import LaunchSection
from launch.signals import Signals, end_with_torchrun

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup, Store

_GLOO_SETTLES_SECONDS = 0.2
_MEETING_LOOK_SECONDS = 0.01


_PATIENCE_BEYOND_LIMIT = 1.25
_RECORDED_COLLECTIVES = "2000"
_LONGEST_NAP_SECONDS = 0.5
_NO_ANSWER = ("Timed out waiting", "Application timeout")  # Gloo's words
_BROKEN_OFF = ("Connection closed by peer", "Connection reset by peer", "Broken pipe")
STATUS_DECIDES = "SERRIED_STATUS_DECIDES"
"""Environment variable: whoever waits for the ranks reads ``status.json``, not exit codes. Its value is a file to make
where a rank stops on request: before the first step there is no status."""
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


def _started() -> tuple[int, int, int, int]:
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
    _, _, started, per_node = _started()
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


class Failure(NamedTuple):
    """Why a run ended."""

    rank: int
    """Who failed first: the others' errors are its echo."""
    reason: str
    """One line."""
    exit_code: int


@dataclass
class Session:
    """One process among ``world_size``."""

    rank: int
    local_rank: int
    world_size: int
    local_world_size: int
    device: "torch.device"
    section: LaunchSection
    signals: Signals = field(default_factory=Signals)
    started: float = field(default_factory=time.monotonic)
    """When this process began to join, by ``time.monotonic``."""
    failed: bool = False
    must_not_wait: bool = False
    """Set where a thread of this process still uses a group: leave without destroying it, which could hang."""
    waits_for: str | None = None
    """Whom this rank waits for at present in an exchange of verdicts, for the watchdog to tell."""
    _store: "Store | None" = None
    _exchanges: int = field(default=0)
    _failure: "Failure | None" = None
    _is_told: bool = False
    _attempt: str = ""
    """What the keys of this attempt begin with, in the store."""
    _patient: "list[ProcessGroup]" = field(default_factory=list)
    _first_step_is_done: bool = False
    _processes: list[int] = field(default_factory=list)
    """The ranks' process numbers, each of its own machine."""

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0, which writes the records and speaks."""
        return self.rank == 0

    def place(self) -> str:
        """For the plan: ``2 processes on cpu (gloo), 1 thread each``."""
        import torch

        count = f"{self.world_size} process" + ("es" if self.world_size > 1 else "")
        if self.device.type == "cuda":
            return f"{count} on {torch.cuda.get_device_name(self.device)}" + (" (nccl)" if self.world_size > 1 else "")
        each = " each" if self.world_size > 1 else ""
        gloo = " (gloo)" if self.world_size > 1 else ""
        return (
            f"{count} on cpu{gloo}, {torch.get_num_threads()} thread{'s' if torch.get_num_threads() > 1 else ''}{each}"
        )

    def command(self) -> str:
        """How to start as many processes again, here."""
        if self.world_size == 1:
            return "python train.py"
        if self.section.name == "local":
            return f"python train.py launch=local launch.processes={self.world_size}"
        nodes = self.world_size // self.local_world_size
        where = "--standalone" if nodes == 1 else f"--nnodes={nodes} ..."
        return f"torchrun {where} --nproc_per_node={self.local_world_size} train.py"

    def once(self, function: Callable[[], Any]) -> Any:
        """Run ``function`` on rank 0 while the others wait; all return its result (plain JSON data).

        Raises:
            UserError: on every rank, when ``function`` raised it on rank 0.
        """
        return self._leader(function, leads=self.is_main, group="world")

    def once_per_node(self, function: Callable[[], Any]) -> Any:
        """As ``once``, by the first process of each node, one node at a time after rank 0's.

        For files: where nodes share a disk, the others find what rank 0 made; where they do not, each makes its own.
        """
        result = self.once(function)
        leads, again = self.local_rank == 0, (lambda: result) if self.is_main else function
        return self._leader(again, leads=leads, group=f"node {os.environ.get('GROUP_RANK', '0')}")

    def _leader(self, function: Callable[[], Any], *, leads: bool, group: str) -> Any:
        self._exchanges += 1
        key = f"once/{group}/{self._exchanges}"
        verdict: dict[str, Any] = {}
        if leads:
            try:
                verdict = {"result": function()}
            except UserError as error:
                verdict = {"error": str(error)}
            except BaseException as error:
                self.first_failure(error)  # before the others hear of it, and fail by it
                verdict = {"failure": repr(error)}
                raise
            finally:
                if self._store is not None:
                    self._store.set(key, json.dumps(verdict))
        elif self._store is not None:
            self._await([key], f"the first process of the {group}")
            verdict = json.loads(self._store.get(key))
        if "error" in verdict:
            raise UserError(verdict["error"])
        if "failure" in verdict:
            raise RuntimeError(f"the first process of the {group} failed: {verdict['failure']}")
        return verdict["result"]

    def same_everywhere(self, what: str, value: str) -> None:
        """Check that all ranks have the same ``value``; of several lines the first that differs is told.

        Raises:
            UserError: they differ; names the first rank that does.
        """
        if self._store is None:
            return
        values = self.gather(value)
        for rank, other in enumerate(values):
            lines = zip_longest(values[0].splitlines(), other.splitlines())
            for expected, found in lines:
                if expected != found:
                    raise UserError(
                        f"{what} differs between rank 0 ({expected}) and rank {rank} ({found}); start them alike"
                    )

    def first_step_done(self, seconds: float = 0.0) -> None:
        """From here on a silent peer is waited for only a little longer than ``launch.step_timeout_seconds``, or twice
        the ``seconds`` that the first step took: by then the watchdog should have named it."""
        self._first_step_is_done = True
        if self._store is None:
            return
        import torch.distributed as dist

        # Private, and the only way to shorten a live group's patience; tests/test_session.py guards it.
        from torch.distributed.distributed_c10d import _get_default_group, _set_pg_timeout

        timeout = timedelta(seconds=_PATIENCE_BEYOND_LIMIT * max(self.section.step_timeout_seconds, 2 * seconds))
        groups = {id(group): group for group in [_get_default_group(), *dist.distributed_c10d._world.pg_map]}
        for group in groups.values():
            if not any(group is patient for patient in self._patient):
                _set_pg_timeout(timeout, group)

    def background_group(self, partition: Sequence[Sequence[int]]) -> "ProcessGroup | None":
        """A Gloo group for work beside training, of those ranks in ``partition`` that this rank is one of.

        Its patience stays ``launch.start_timeout_seconds``: a disk may be slow. None for a single process. A
        collective: all ranks call it with the same partition. Never share a group between threads: their collectives
        would mix.
        """
        if self._store is None:
            return None
        import torch.distributed as dist

        timeout = timedelta(seconds=self.section.start_timeout_seconds)
        groups = [dist.new_group(list(ranks), backend="gloo", timeout=timeout) for ranks in partition]
        self._patient += groups
        return next(group for group, ranks in zip(groups, partition, strict=True) if self.rank in ranks)

    def gather(self, value: Any) -> list[Any]:
        """Every rank's ``value`` (plain JSON data), by rank, on every rank."""
        if self._store is None:
            return [value]
        self._exchanges += 1
        keys = [f"gather/{self._exchanges}/{rank}" for rank in range(self.world_size)]
        self._store.set(keys[self.rank], json.dumps(value))
        self._await(keys, "every rank")
        return [json.loads(self._store.get(key)) for key in keys]

    def _await(self, keys: list[str], whom: str) -> None:
        """Wait until the store has ``keys``. By looking again and again: no signal is heard inside ``Store.wait``."""
        assert self._store is not None
        self.waits_for = whom
        deadline, nap = time.monotonic() + self.section.start_timeout_seconds, 0.001
        while not self._store.check(keys):
            if time.monotonic() > deadline:
                self._store.wait(keys, timedelta(milliseconds=1))  # raises what it raises
            time.sleep(nap)
            nap = min(2 * nap, _LONGEST_NAP_SECONDS)
        self.waits_for = None

    def host(self) -> str:
        """Name of this machine."""
        return socket.gethostname()

    def background_names(self) -> list[str]:
        """Names of the groups that ``background_group`` made and this rank is in."""
        return [str(group.group_name) for group in self._patient if hasattr(group, "group_name")]

    def own_connection(self, name: str) -> "Store":
        """A store that all ranks share under ``name``, for another thread than the session's: with a connection of its
        own, since whoever waits on one blocks all its users."""
        import torch.distributed as dist

        if self._store is None:
            return dist.HashStore()
        tcp = _connect(self, is_master=False)
        return dist.PrefixStore(name, dist.PrefixStore(self._attempt, tcp))

    def end_with(self, rank: int, reason: str, exit_code: int) -> None:
        """Have whatever fails from here on counted as an echo of this, which the user has been told."""
        self._failure, self._is_told = Failure(rank, reason, exit_code), True

    def shield(self) -> None:
        """From here on a signal does not interrupt: what is left is to clean up. Ctrl-C still ends it, at once.

        torchrun sends SIGTERM to all as soon as one process has failed, which must not cut short the words why.
        """
        self.signals.clean_up()

    def first_failure(self, error: BaseException) -> Failure:
        """The failure that ended the run: ``error`` of this rank, unless another rank's came before."""
        if self._failure is None:
            mine = self._failure = self.failure(error)
            if self._store is not None:
                try:
                    self._failure = Failure(*json.loads(self._store.compare_set("failure", "", json.dumps(mine))))
                except RuntimeError:  # the store died with its host: nobody is left to ask
                    self._failure = self._without_store(mine)
        return self._failure

    def _without_store(self, mine: Failure) -> Failure:
        """``mine``, unless it is but the echo of a torchrun that was killed before there was anything to save."""
        if self._first_step_is_done or mine.exit_code == EXIT_MISTAKE:
            return mine
        time.sleep(_GLOO_SETTLES_SECONDS)  # its connections go before the kernel says that it has gone
        end = self.signals.end_of_parent
        return mine if end is None else Failure(self.rank, f"{end} before the first step", EXIT_STOPPED)

    def failure(self, error: BaseException) -> Failure:
        """``error`` of this rank, as far as it knows by itself."""
        if not isinstance(error, StopRequested):
            return Failure(self.rank, self._reason(error), _exit_code(error))
        first = self.rank - self.local_rank
        for peer, process in enumerate(self._processes[first : first + self.local_world_size], start=first):
            if not _is_running(process):  # torchrun sends SIGTERM to all when one has died: that is no request to stop
                return Failure(self.rank, f"rank {peer} died without a word before the first step", EXIT_FAILED)
        where = f" on rank {self.rank}" if self.world_size > 1 else ""
        return Failure(self.rank, f"{error}{where} before the first step", EXIT_STOPPED)

    def _reason(self, error: BaseException) -> str:
        text = _in_one_line(error)
        if isinstance(error, RuntimeError) and any(words in text for words in _NO_ANSWER):
            patience = f"launch.step_timeout_seconds={self.section.step_timeout_seconds:g}"
            return f"no answer from another process in time ({patience}): {text}"
        if isinstance(error, RuntimeError) and any(words in text for words in _BROKEN_OFF):
            return f"another process ended, or the network between them broke: {text}"
        return text


def _is_running(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    return True


def _in_one_line(error: BaseException) -> str:
    text = str(error).strip().splitlines()
    named = "" if isinstance(error, UserError | TrainingFailed) else f"{type(error).__name__}: "
    return f"{named}{text[0]}" if text else type(error).__name__


def _exit_code(error: BaseException) -> int:
    if isinstance(error, StopRequested | TrainingStopped):
        return EXIT_STOPPED
    return EXIT_MISTAKE if isinstance(error, UserError) else EXIT_FAILED


def run_in_session(section: LaunchSection, work: Callable[[Session], int]) -> int:
    """Join the other processes, do ``work``, leave. What goes wrong is printed, once, by the process that failed first.

    Returns the exit code.
    """
    end_with_torchrun()
    try:
        with open_session(section) as session:
            try:
                return work(session)
            except BaseException as error:
                session.shield()
                return _report(error, session)
    except (UserError, TrainingFailed, StopRequested) as error:
        # While joining: each machine speaks for itself, as others may be fine.
        return _report_alone(error, speaks=os.environ.get("LOCAL_RANK", "0") == "0")


@contextmanager
def open_session(section: LaunchSection) -> Iterator[Session]:
    """Join the processes that torchrun started, or be alone. Leaves no group behind on any path.

    GPU: NCCL for device tensors and Gloo beside it for host tensors, in one group. CPU: Gloo.

    Raises:
        UserError: a GPU is asked for and there is none, or more processes than GPUs.
        StopRequested: a signal came, now or later, and nobody has taken charge of ``Session.signals``.
    """
    with Signals() as signals, _joined(section, signals) as session:
        yield session


@contextmanager
def _joined(section: LaunchSection, signals: Signals) -> Iterator[Session]:
    started = time.monotonic()
    import torch

    env = os.environ
    rank, local_rank, world, local_world = _started()
    device = _choose_device(section, local_rank, local_world)
    if device.type == "cuda":
        torch.cuda.set_device(device)
        os.environ.setdefault("TORCH_FR_BUFFER_SIZE", _RECORDED_COLLECTIVES)  # for the watchdog to name who is missing
    # torchrun sets OMP_NUM_THREADS=1; ranks that share this machine's cores should use all of them between them.
    torch.set_num_threads(max(1, usable_cores() // local_world))
    if device.type == "cpu":
        _keep_freed_memory()
    session = Session(rank, local_rank, world, local_world, device, section, signals, started)
    if world > 1:
        try:
            session._store = _start_group(session)
        except RuntimeError as error:
            reason = str(error).splitlines()[0]
            raise TrainingFailed(
                f"rank {rank} of {world} could not join at {env.get('MASTER_ADDR')}:{env.get('MASTER_PORT')} "
                f"within launch.start_timeout_seconds={section.start_timeout_seconds:g}: {reason}"
            ) from error
        session._processes = session.gather(os.getpid())
    try:
        yield session
    finally:
        if not session.failed:
            signals.leave()
        session.shield()
        if world > 1:
            import torch.distributed as dist

            # A Gloo thread that lets go of its last tensor wants the interpreter lock while it holds a lock of its
            # group; destroying the group holds the first and wants the second. Give it a moment to finish (seen here
            # as a hang in ~ProcessGroupGloo; https://github.com/pytorch/pytorch/issues/190489 is its kin).
            time.sleep(_GLOO_SETTLES_SECONDS)
            # After a failure a GPU may still wait for a peer that is gone, and NCCL would wait with it.
            if not (session.must_not_wait or (session.failed and device.type == "cuda")):
                dist.destroy_process_group()


def _choose_device(section: LaunchSection, local_rank: int, local_world: int) -> "torch.device":
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


def _keep_freed_memory() -> None:
    """Let glibc keep what a step frees for the next step: given back, it is faulted in anew, 10,000 pages a step."""
    with suppress(OSError, AttributeError):
        libc = ctypes.CDLL("libc.so.6")
        for option, value in ((_M_TRIM_THRESHOLD, 2**31 - 1), (_M_TOP_PAD, 2**26), (_M_MMAP_THRESHOLD, 2**30)):
            libc.mallopt(option, value)


def _start_group(session: Session) -> "Store":
    import torch.distributed as dist

    timeout = timedelta(seconds=session.section.start_timeout_seconds)
    agent_hosts = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    tcp = _connect(session, is_master=session.rank == 0 and not agent_hosts)
    # A restart under the same agents meets the store of the attempt before, with addresses of dead processes in it.
    session._attempt = f"attempt_{_agree_on_attempt(tcp, session, timeout) if agent_hosts else 'only'}"
    store = dist.PrefixStore(session._attempt, tcp)
    dist.init_process_group(
        "cuda:nccl,cpu:gloo" if session.device.type == "cuda" else "gloo",
        store=store,
        rank=session.rank,
        world_size=session.world_size,
        timeout=timeout,
        device_id=session.device if session.device.type == "cuda" else None,
    )
    return dist.PrefixStore("control", store)


def _agree_on_attempt(tcp: "Store", session: Session, timeout: timedelta) -> str:
    """A name for this attempt that its ranks have in common, and no process of an earlier one knows.

    No variable of torchrun's will do: agents count restarts each for itself, and a node that joins begins at 0. So rank
    0 makes a name up and answers everybody who asks for it, the dead too, until all of its own ranks have checked in.
    """
    import torch.distributed as dist

    store = dist.PrefixStore(f"meeting_{os.environ.get('TORCHELASTIC_RUN_ID')}", tcp)
    mine, nap, deadline = uuid.uuid4().hex, 0.005, time.monotonic() + timeout.total_seconds()
    if session.rank != 0:
        store.set(f"asks/{store.add('asked', 1)}", mine)
        while not store.check([f"answer/{mine}"]):  # no signal is heard inside Store.wait
            if time.monotonic() > deadline:
                raise dist.DistStoreError("rank 0 has not come")
            time.sleep(nap)
            nap = min(2 * nap, _LONGEST_NAP_SECONDS)
        name = store.get(f"answer/{mine}").decode()
        store.set(f"{name}/is_here/{session.rank}", "")
        return name
    everybody = [f"{mine}/is_here/{rank}" for rank in range(1, session.world_size)]
    unanswered: set[int] = set()
    seen = 0
    while not store.check(everybody):
        asked = store.add("asked", 0)
        unanswered |= set(range(seen + 1, asked + 1))
        seen = asked
        for number in sorted(unanswered):
            if store.check([f"asks/{number}"]):  # who died in between will never have written it
                store.set(f"answer/{store.get(f'asks/{number}').decode()}", mine)
                unanswered.discard(number)
        if time.monotonic() > deadline:
            came = sum(store.check([key]) for key in everybody)
            raise dist.DistStoreError(f"{came + 1} of {session.world_size} processes came")
        time.sleep(_MEETING_LOOK_SECONDS)
    return mine


def _connect(session: Session, *, is_master: bool) -> "Store":
    """A new connection to the store in which the processes meet."""
    import torch.distributed as dist

    return dist.TCPStore(
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        session.world_size,
        is_master=is_master,
        timeout=timedelta(seconds=session.section.start_timeout_seconds),
    )


def report_mistake(error: UserError) -> int:
    """Print ``error`` from rank 0 alone: without a session all processes are about to make the same mistake.

    Returns the exit code.
    """
    return _report_alone(error, speaks=speaks())


def _report_alone(error: UserError | TrainingFailed | StopRequested, *, speaks: bool) -> int:
    if isinstance(error, StopRequested):
        if speaks:
            _say(f"stopped: {error} while the processes were joining; go on: the same command")
    elif speaks:
        _say(f"{'error' if isinstance(error, UserError) else 'failed'}: {error}")
    else:
        _let_another_end_first()
    return _exit_code(error)


def _report(error: BaseException, session: Session) -> int:
    session.failed = True
    failure = session.first_failure(error)
    if session._is_told:
        return failure.exit_code
    if failure.exit_code == EXIT_STOPPED:
        if failure.rank == session.rank:
            _say(f"stopped: {failure.reason}; go on: the same command")
        return EXIT_STOPPED
    if failure.rank != session.rank:
        if isinstance(error, UserError):
            _let_another_end_first()
    elif isinstance(error, StopRequested):
        _say(f"failed: {failure.reason}")
    elif isinstance(error, UserError | TrainingFailed):
        _say(f"{'error' if isinstance(error, UserError) else 'failed'}: {error}")
    else:
        traceback.print_exception(error)
    return EXIT_FAILED if isinstance(error, StopRequested) else _exit_code(error)


def _say(line: str) -> None:
    with suppress(OSError):  # whoever listened is gone
        print(line, file=sys.stderr, flush=True)


def _let_another_end_first() -> None:
    # torchrun ends all processes as soon as one has ended: the one that speaks must be it.
    with suppress(KeyboardInterrupt):
        time.sleep(10)


def leave(code: int) -> NoReturn:
    """End the process at once.

    Past the point where work is done, Gloo's threads can abort an interpreter that is shutting down
    (https://github.com/pytorch/pytorch/issues/179291), which would turn success into exit code -6.

    An agent of torchrun takes every code but 0 for a failure. With restarts left it would start a run again that was
    stopped on request, and a Slurm job of ours asks ``status.json`` anyway: for these, stopped is 0.
    """
    restarts = os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0") != "0"
    if code == EXIT_STOPPED and (restarts or STATUS_DECIDES in os.environ):
        code = EXIT_FINISHED
        with suppress(OSError, KeyError):
            Path(os.environ[STATUS_DECIDES]).touch()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError):  # whoever listened is gone
            stream.flush()
    os._exit(code)
