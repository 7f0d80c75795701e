"""Session of one process: its rank, device and process group, as one context manager from start to a clean end."""

import hashlib
import os
import time
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any

from serried.configs.errors import EXIT_FAILED, EXIT_STOPPED, StopRequested, TrainingFailed, UserError
from serried.configs.schema.launch_plan_track import LaunchSection
from serried.runtime.cloud_notice import watch
from serried.runtime.console import announced
from serried.runtime.exit import (
    CONNECTIONS_CLOSE_SECONDS,
    Cause,
    exit_code_of,
    is_end_of_another,
    print_traceback,
    report_alone,
    say_stopped,
    say_why,
)
from serried.runtime.import_signals import importing
from serried.runtime.peer_sockets import opened
from serried.runtime.process import (
    allow_open_files,
    choose_device,
    expand_gpu_segments,
    host_name,
    is_called_from_python,
    keep_freed_memory,
    only_gpu,
    refuse_shared_gpu,
    tell_launcher,
    threads_per_process,
    torchrun_says,
    typed_command,
    typed_words,
)
from serried.runtime.rendezvous import (
    INTERFACE,
    Exchange,
    check_interface,
    choose_interface,
    describe_interface,
    limit_connections,
)
from serried.runtime.signals import Signals, end_with_torchrun

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup, Store

_LEAST_TIME_TO_NAME_SECONDS = 5.0
_RECORDED_COLLECTIVES = "2000"
_LOOKS = 10


class Session:
    """One process of a run with ``world_size`` processes."""

    def __init__(
        self,
        ranks: tuple[int, int, int, int],
        device: "torch.device",
        section: LaunchSection,
        signals: Signals | None = None,
    ) -> None:
        """``ranks``: rank, local rank, world size and local world size."""
        self.rank, self.local_rank, self.world_size, self.local_world_size = ranks
        self.device = device
        self.section = section
        self.signals = signals or Signals()
        self.started = time.monotonic()
        """Time when this process began to join, from ``time.monotonic``."""
        self.must_not_wait = False
        """Set if a thread of this process still uses a group: exit without destroying the group, which could hang."""
        self.exchange = Exchange(self.rank, self.world_size, section.start_timeout_seconds)
        first = self.rank - self.local_rank
        local_ranks = range(first, first + self.local_world_size)
        self.cause = Cause(self.rank, local_ranks, section, self.signals, self.exchange)
        self._patient: list[ProcessGroup] = []

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0, which writes the records and prints."""
        return self.rank == 0

    def place(self) -> str:
        """Describe the processes for the plan, as in ``2 processes on cpu (gloo), 1 thread each``.

        On several nodes, the description includes the network between them.
        """
        import torch
        import torch.distributed as dist

        from serried.runtime.accelerator import device_name

        count = f"{self.world_size} process" + ("es" if self.world_size > 1 else "")
        network = ""
        if self.world_size > self.local_world_size and (name := os.environ.get(INTERFACE)):
            network = f", host network {describe_interface(name)}"
        if self.device.type != "cpu":
            backend = f" ({dist.get_default_backend_for_device(self.device)})" if self.world_size > 1 else ""
            return f"{count} on {device_name(self.device)}{backend}{network}"
        each = " each" if self.world_size > 1 else ""
        gloo = " (gloo)" if self.world_size > 1 else ""
        threads = f"{torch.get_num_threads()} thread{'s' if torch.get_num_threads() > 1 else ''}{each}"
        return f"{count} on cpu{gloo}, {threads}{network}"

    def command(self) -> str:
        """Return the command (or call) that starts the same number of processes with the same overrides."""
        if is_called_from_python():
            return "serried.fit with"
        program = f"{typed_command()}{typed_words()}"
        if self.section.name != "torchrun" or self.world_size == 1:
            return f"python {program}"
        nodes = self.world_size // self.local_world_size
        where = "--standalone" if nodes == 1 else f"--nnodes={nodes} ..."
        return f"torchrun {where} --nproc_per_node={self.local_world_size} {program}"

    def once(self, function: Callable[[], Any]) -> Any:
        """Run ``function`` on rank 0 while the others wait. All ranks return its result (plain JSON data).

        Raises:
            UserError: ``function`` raised it on rank 0. It is raised on every rank.
        """
        return self.exchange.once(function, self.cause.first, leads=self.is_main, group="world")

    def once_per_node(self, function: Callable[[], Any]) -> Any:
        """Like ``once``, on the first process of each node, after rank 0.

        Use this for files: if nodes share a disk, the other nodes find the files of rank 0; if not, each node writes
        its own.
        """
        result = self.once(function)
        leads, again = self.local_rank == 0, (lambda: result) if self.is_main else function
        node = f"node {os.environ.get('GROUP_RANK', '0')}"
        return self.exchange.once(again, self.cause.first, leads=leads, group=node)

    def gather(self, value: Any) -> list[Any]:
        """Return every rank's ``value`` (plain JSON data), by rank, on every rank."""
        return self.exchange.gather(value)

    def same_everywhere(self, what: str, value: str) -> None:
        """Check that all ranks have the same ``value``.

        Raises:
            UserError: the values differ. The message has the first rank and the first line that differ.
        """
        if len(set(self.gather(hashlib.sha256(value.encode()).hexdigest()))) == 1:
            return
        values = self.gather(value)
        for rank, other in enumerate(values):
            for expected, found in zip_longest(values[0].splitlines(), other.splitlines()):
                if expected != found:
                    raise UserError(
                        f"{what} differs between rank 0 ({expected}) and rank {rank} ({found}); start all ranks with "
                        "the same command, files and environment"
                    )

    def first_step_done(self, seconds: float = 0.0) -> None:
        """Shorten the timeout of process groups from now on.

        A silent rank is waited for only a little longer than ``launch.step_timeout_seconds``, or twice the ``seconds``
        of the first step. The watchdog reports the rank before that.
        """
        self.cause.first_step_is_done = True
        self.signals.has_begun()
        if self.exchange.store is None:
            return
        limit = max(self.section.step_timeout_seconds, 2 * seconds)
        self._set_timeouts(limit + max(limit / 4, _LEAST_TIME_TO_NAME_SECONDS))

    def _set_timeouts(self, seconds: float) -> None:
        """Set the timeout of all groups except those of ``background_group``."""
        # Private API: the only list of all groups and, before torch 2.14, the only way to change a live group's
        # timeout. tests/runs/test_session.py guards both.
        from torch.distributed import distributed_c10d as c10d

        set_timeout = c10d.set_timeout if hasattr(c10d, "set_timeout") else c10d._set_pg_timeout
        timeout = timedelta(seconds=seconds)
        groups = {id(group): group for group in [c10d._get_default_group(), *c10d._world.pg_map]}
        for group in groups.values():
            if not any(group is patient for patient in self._patient):
                set_timeout(timeout, group)

    def background_group(self, partition: Sequence[Sequence[int]]) -> "ProcessGroup | None":
        """Return a Gloo group for background work among the ranks in this rank's entry of ``partition``.

        Its timeout stays ``launch.start_timeout_seconds``, since a disk may be slow. None for a single process. This is
        a collective: all ranks call it with the same partition. Never share a group between threads: their collectives
        would mix.
        """
        if self.exchange.store is None:
            return None
        import torch.distributed as dist

        timeout = timedelta(seconds=self.section.start_timeout_seconds)
        groups = [dist.new_group(list(ranks), backend="gloo", timeout=timeout) for ranks in partition]
        self._patient += groups
        return next(group for group, ranks in zip(groups, partition, strict=True) if self.rank in ranks)

    def appears(self, path: Path) -> bool:
        """Return whether a file that another node wrote is visible here.

        Waits for up to ten seconds, since a network disk may show it late.
        """
        for _ in range(_LOOKS):
            if path.exists():
                return True
            time.sleep(1)
        return False

    def host(self) -> str:
        """Return the name of this machine (under Slurm, its Slurm node name)."""
        return host_name()

    def background_names(self) -> list[str]:
        """Return the names of this rank's groups from ``background_group``."""
        return [str(group.group_name) for group in self._patient if hasattr(group, "group_name")]

    def own_connection(self, name: str, patience_seconds: float | None = None) -> "Store":
        """Return a store for another thread, which all ranks share under ``name``.

        It has its own connection, since a wait blocks all users of a connection. ``patience_seconds``: timeout, by
        default ``launch.start_timeout_seconds``.
        """
        patience = timedelta(seconds=patience_seconds or self.section.start_timeout_seconds)
        return self.exchange.own_connection(name, patience)

    def form_again(
        self, ranks: Sequence[int], nodes: Sequence[int], generation: int, note: Callable[[list[str]], object]
    ) -> None:
        """Make this the session of only ``ranks``, in this order, since the others are lost. A collective call of these
        ranks.

        Args:
            nodes: The node of each of ``ranks``.
            generation: Number of the new set of ranks.
            note: Called with the local addresses of the connection through which all groups are formed from now on.
                Closing it ends a wait for a rank that is lost meanwhile.

        The process groups are destroyed: drop every reference to them before, and build everything that depends on the
        ranks again.
        """
        import torch.distributed as dist
        from torch.distributed import distributed_c10d as c10d

        self.exchange = self.exchange.of_generation(generation, ranks.index(self.rank), len(ranks))
        self.rank, self.world_size = ranks.index(self.rank), len(ranks)
        here = [rank for rank, node in enumerate(nodes) if node == nodes[self.rank]]
        self.local_rank, self.local_world_size = here.index(self.rank), len(here)
        cause = Cause(self.rank, range(here[0], here[-1] + 1), self.section, self.signals, self.exchange)
        cause.processes = [self.cause.processes[rank] for rank in ranks]
        cause.first_step_is_done = self.cause.first_step_is_done
        self.cause = cause
        self.must_not_wait, self._patient = False, []
        if dist.is_initialized():
            time.sleep(CONNECTIONS_CLOSE_SECONDS)  # see _joined
            dist.destroy_process_group()
        patience = timedelta(seconds=self.section.start_timeout_seconds)
        store, addresses = opened(partial(self.exchange.own_connection, "groups", patience))
        note(addresses)
        # Private API: names of groups have this number, which differs between ranks after an attempt that failed.
        # tests/runs/test_session.py guards it.
        c10d._world.group_count = 0
        self.gather(None)  # a rank that is lost meanwhile is noticed here; torch would wait for its timeout
        dist.init_process_group(
            "gloo", store=store, rank=self.rank, world_size=self.world_size, timeout=patience
        )  # fmt: skip

    def shield(self) -> None:
        """Ignore signals during the cleanup, from now on. Only Ctrl-C still ends the process immediately.

        torchrun sends SIGTERM to all processes as soon as one has failed. That must not cut off the report of the
        failure.
        """
        self.signals.clean_up()


def run_in_session(section: LaunchSection, work: Callable[[Session], int]) -> int:
    """Join the other processes, call ``work`` and leave.

    An error is printed once, by the rank that failed first. Returns the exit code.
    """
    end_with_torchrun()
    try:
        with open_session(section) as session:
            try:
                code = work(session)
            except BaseException as error:
                session.shield()
                code = _report(error, session)
    except (UserError, TrainingFailed, StopRequested) as error:
        # While joining, each machine reports its own error, since the others may have none.
        code = report_alone(error, is_heard=os.environ.get("LOCAL_RANK", "0") == "0")
    tell_launcher(ended=True)
    return code


def keep_report_of_hang(environment: MutableMapping[str, str]) -> None:
    """Set ``TORCH_NCCL_ASYNC_ERROR_HANDLING=3`` unless the user set another value: after a failure, NCCL then ends the
    process without a cleanup that may hang.

    With torchrun's default, 1, torch's own report of the hang is lost
    (https://github.com/pytorch/pytorch/issues/121055).
    """
    if environment.get("TORCH_NCCL_ASYNC_ERROR_HANDLING") in (None, "1"):
        environment["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = "3"


@contextmanager
def open_session(section: LaunchSection) -> Iterator[Session]:
    """Context manager that joins the processes that torchrun started. Without torchrun, there is only this process.

    On GPUs, one group has the device's backend (such as NCCL) for device tensors and Gloo for host tensors. On a CPU,
    it has Gloo. The group is destroyed on exit, unless that could hang.

    Raises:
        UserError: a GPU is requested and there is none, there are more processes than GPUs, or the cloud's metadata
            service does not answer.
        StopRequested: a signal arrived before ``Session.signals.hold`` was called.
    """
    is_first = torchrun_says()[1] == 0
    with (
        Signals() as signals,
        watch(section, signals, is_first_on_node=is_first),
        _joined(section, signals) as session,
    ):
        yield session


@contextmanager
def _joined(section: LaunchSection, signals: Signals) -> Iterator[Session]:
    began = time.monotonic()
    env = os.environ
    ranks = torchrun_says()
    rank, local_rank, world, local_world = ranks
    signals.last_words_unheard = lambda: report_alone(StopRequested(signals.received), is_heard=local_rank == 0)
    expand_gpu_segments(section)
    with announced("loading torch", speaks=rank == 0), signals.loading(), importing():
        import torch

        from serried.runtime.accelerator import use_accelerator

    device = choose_device(section, local_rank, local_world)
    session = Session(ranks, device, section, signals)
    session.started = began
    if device.type != "cpu":
        try:
            use_accelerator(device)
        except RuntimeError as error:  # device_count() does not initialize CUDA
            raise UserError(
                f"torch {torch.__version__} cannot use the GPUs of this machine: "
                f"{str(error).splitlines()[0].rstrip('.')}; use launch.device=cpu to train without them"
            ) from None
        # Records let the watchdog report missing ranks; with timing, also collectives that a GPU has not started.
        os.environ.setdefault("TORCH_FR_BUFFER_SIZE", _RECORDED_COLLECTIVES)
        os.environ.setdefault("TORCH_NCCL_ENABLE_TIMING", "1")
        keep_report_of_hang(os.environ)
    allow_open_files()
    torch.set_num_threads(threads_per_process(section, local_world))
    if device.type == "cpu":
        keep_freed_memory()
    gpus: list[str | None] = []
    if world > 1:
        check_interface()
        limit_connections(world)
        others = (
            f"for {world} processes to join at {env.get('MASTER_ADDR')}:{env.get('MASTER_PORT')}, at most "
            f"launch.start_timeout_seconds={section.start_timeout_seconds:g}"
        )
        try:
            with announced(others, speaks=rank == 0):
                session.exchange.store = _start_group(session)
        except RuntimeError as error:
            reason = str(error).splitlines()[0]
            if os.environ.get(INTERFACE) and "Unable to find address for" in reason:  # Gloo's message
                named = os.environ[INTERFACE]
                raise UserError(f"{INTERFACE}={named}: this interface has no address; unset {INTERFACE}") from error
            raise TrainingFailed(
                f"rank {rank} of {world} could not join at {env.get('MASTER_ADDR')}:{env.get('MASTER_PORT')} "
                f"within launch.start_timeout_seconds={section.start_timeout_seconds:g}: {reason}; "
                "check that rank 0 is running and that this host can reach that address"
            ) from error
        facts = session.gather([os.getpid(), only_gpu(device, local_world)])
        session.cause.processes = [process for process, _ in facts]
        gpus = [gpu for _, gpu in facts]
    try:
        refuse_shared_gpu(gpus)
        yield session
    finally:
        if not session.cause.ended_run:
            signals.leave()
        session.shield()
        if world > 1:
            import torch.distributed as dist

            # A Gloo thread that releases its last tensor holds a lock of its group and waits for the interpreter lock.
            # Destroying the group holds the interpreter lock and waits for the group's. Give the thread time to finish
            # (seen here as a hang in ~ProcessGroupGloo; https://github.com/pytorch/pytorch/issues/190489 is related).
            time.sleep(CONNECTIONS_CLOSE_SECONDS)
            # After a failure, a GPU may still wait for a rank that is gone, and NCCL would wait too.
            waits = session.must_not_wait or (session.cause.ended_run and device.type != "cpu")
            if dist.is_initialized() and not waits:
                dist.destroy_process_group()


def _start_group(session: Session) -> "Store":
    import torch.distributed as dist

    patience = timedelta(seconds=session.section.start_timeout_seconds)
    store = session.exchange.join(patience)
    ranks = (session.rank, session.local_rank, session.world_size, session.local_world_size)
    choose_interface(store, ranks, patience)
    device = session.device
    dist.init_process_group(
        "gloo" if device.type == "cpu" else f"{device.type}:{dist.get_default_backend_for_device(device)},cpu:gloo",
        store=store,
        rank=session.rank,
        world_size=session.world_size,
        timeout=patience,
        # No device_id: with it, each new_group would split the communicator of the world one after the other, and the
        # groups of a pipeline would send through the world's communicator (torch's ProcessGroupNCCL::pointToPoint).
    )
    return dist.PrefixStore("control", store)


def _report(error: BaseException, session: Session) -> int:
    session.cause.ended_run = True
    failure = session.cause.first(error)
    if session.cause.is_reported:
        return failure.exit_code
    if failure.exit_code == EXIT_STOPPED:
        if session.is_main:  # the user reads rank 0's console, whichever rank was asked
            say_stopped(failure.reason)
        return EXIT_STOPPED
    if failure.rank != session.rank:
        if isinstance(error, UserError):
            session.cause.let_end_first(failure.rank)
    elif isinstance(error, StopRequested):
        say_why(f"failed: {failure.reason}")
    elif isinstance(error, UserError | TrainingFailed):
        say_why(f"{'error' if isinstance(error, UserError) else 'failed'}: {error}")
    elif is_end_of_another(failure.reason):  # the traceback of this rank is irrelevant
        say_why(f"failed: {failure.reason}")
    else:
        print_traceback(error)
    return EXIT_FAILED if isinstance(error, StopRequested) else exit_code_of(error)
