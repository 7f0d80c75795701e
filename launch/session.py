"""Who am I, where do I compute, whom do I talk to: one context manager from start to clean end."""

import ctypes
import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from itertools import zip_longest
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

from configs.errors import EXIT_FAILED, EXIT_MISTAKE, EXIT_STOPPED, StopRequested, TrainingFailed, UserError
from configs.schema import LaunchSection
from launch.signals import Signals, end_with_torchrun

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup, Store

_GLOO_SETTLES_SECONDS = 0.2
_LONGEST_NAP_SECONDS = 0.5
_TORCHRUN = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD = -1, -2, -3  # malloc.h


def speaks() -> bool:
    """Whether this process is the one that talks to the user."""
    return os.environ.get("RANK", "0") == "0"


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


def planned_processes(section: LaunchSection, dry_run: bool) -> int:
    """Number of processes the run has, or would have in a dry run.

    Raises:
        UserError: ``launch.processes`` or ``launch.nodes`` contradicts what torchrun started, or torchrun's variables
            are there in part only.
    """
    _, _, started, per_node = _started()
    if dry_run and started == 1:
        return (section.processes or 1) * (section.nodes or 1)
    for key, asked, actual in (
        ("processes", section.processes, per_node),
        ("nodes", section.nodes, started // per_node),
    ):
        if asked is not None and asked != actual:
            nodes = f"--nnodes={section.nodes} " if (section.nodes or 1) > 1 else "--standalone "
            raise UserError(
                f"launch.{key}={asked} but {actual} {'was' if actual == 1 else 'were'} started; start them with: "
                f"torchrun {nodes}--nproc_per_node={section.processes or per_node} train.py ..., or plan: dry_run=true"
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
    _store: "Store | None" = None
    _exchanges: int = field(default=0)
    _failure: "Failure | None" = None
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
            self._await([key])
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

    def first_step_done(self) -> None:
        """From here on a silent peer is waited for only ``launch.step_timeout_seconds``."""
        self._first_step_is_done = True
        if self._store is None:
            return
        import torch.distributed as dist

        # Private, and the only way to shorten a live group's patience; tests/test_session.py guards it.
        from torch.distributed.distributed_c10d import _get_default_group, _set_pg_timeout

        timeout = timedelta(seconds=self.section.step_timeout_seconds)
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
        self._await(keys)
        return [json.loads(self._store.get(key)) for key in keys]

    def _await(self, keys: list[str]) -> None:
        """Wait until the store has ``keys``. By looking again and again: no signal is heard inside ``Store.wait``."""
        assert self._store is not None
        deadline, nap = time.monotonic() + self.section.start_timeout_seconds, 0.001
        while not self._store.check(keys):
            if time.monotonic() > deadline:
                self._store.wait(keys, timedelta(milliseconds=1))  # raises what it raises
            time.sleep(nap)
            nap = min(2 * nap, _LONGEST_NAP_SECONDS)

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
            return Failure(self.rank, _in_one_line(error), _exit_code(error))
        first = self.rank - self.local_rank
        for peer, process in enumerate(self._processes[first : first + self.local_world_size], start=first):
            if not _is_running(process):  # torchrun sends SIGTERM to all when one has died: that is no request to stop
                return Failure(self.rank, f"rank {peer} died without a word before the first step", EXIT_FAILED)
        where = f" on rank {self.rank}" if self.world_size > 1 else ""
        return Failure(self.rank, f"{error}{where} before the first step", EXIT_STOPPED)


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
    if isinstance(error, StopRequested):
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

    env = os.environ
    timeout = timedelta(seconds=session.section.start_timeout_seconds)
    agent_hosts = env.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    tcp = dist.TCPStore(
        env["MASTER_ADDR"],
        int(env["MASTER_PORT"]),
        session.world_size,
        is_master=session.rank == 0 and not agent_hosts,
        timeout=timeout,
    )
    # A restart under the same agent meets the store of the attempt before, with addresses of dead processes in it.
    attempt = f"{env.get('TORCHELASTIC_RUN_ID')}_{env.get('TORCHELASTIC_RESTART_COUNT', '0')}"
    store = dist.PrefixStore(f"attempt_{attempt}_world_{session.world_size}", tcp)
    dist.init_process_group(
        "cuda:nccl,cpu:gloo" if session.device.type == "cuda" else "gloo",
        store=store,
        rank=session.rank,
        world_size=session.world_size,
        timeout=timeout,
        device_id=session.device if session.device.type == "cuda" else None,
    )
    return dist.PrefixStore("control", store)


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
    """
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError):  # whoever listened is gone
            stream.flush()
    os._exit(code)
