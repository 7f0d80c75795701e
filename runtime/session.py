"""Who am I, where do I compute, whom do I talk to: one context manager from start to clean end."""

import json
import os
import socket
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any

from serried.configs.announce import announced
from serried.configs.errors import EXIT_FAILED, EXIT_MISTAKE, EXIT_STOPPED, StopRequested, TrainingFailed, UserError
from serried.configs.schema import LaunchSection
from serried.runtime.ending import Failure, exit_code_of, in_one_line, let_another_end_first, report_alone, say_why
from serried.runtime.ranks import choose_device, keep_freed_memory, threads_per_process, torchrun_says
from serried.runtime.rendezvous import connect, meet
from serried.runtime.signals import Signals, end_with_torchrun

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup, Store

_GLOO_SETTLES_SECONDS = 0.2
_NO_ANSWER = ("Timed out waiting", "Application timeout")  # Gloo's words
_BROKEN_OFF = ("Connection closed by peer", "Connection reset by peer", "Broken pipe")
_SILENCE, _END_OF_ANOTHER = "no answer from another process", "another process ended"
_LEAST_TIME_TO_NAME_SECONDS = 5.0
_RECORDED_COLLECTIVES = "2000"
_LONGEST_NAP_SECONDS = 0.5
_LOOKS = 10


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
        self.signals.has_begun()
        if self._store is None:
            return
        import torch.distributed as dist

        # Private, and the only way to shorten a live group's patience; tests/test_session.py guards it.
        from torch.distributed.distributed_c10d import _get_default_group, _set_pg_timeout

        limit = max(self.section.step_timeout_seconds, 2 * seconds)
        timeout = timedelta(seconds=limit + max(limit / 4, _LEAST_TIME_TO_NAME_SECONDS))
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

    def appears(self, path: Path) -> bool:
        """Whether a file that another node has written is here; a network disk may show it late."""
        for _ in range(_LOOKS):
            if path.exists():
                return True
            time.sleep(1)
        return False

    def host(self) -> str:
        """Name of this machine; under Slurm, Slurm's for it."""
        return os.environ.get("SLURMD_NODENAME") or socket.gethostname()

    def background_names(self) -> list[str]:
        """Names of the groups that ``background_group`` made and this rank is in."""
        return [str(group.group_name) for group in self._patient if hasattr(group, "group_name")]

    def own_connection(self, name: str) -> "Store":
        """A store that all ranks share under ``name``, for another thread than the session's: with a connection of its
        own, since whoever waits on one blocks all its users."""
        import torch.distributed as dist

        if self._store is None:
            return dist.HashStore()
        patience = timedelta(seconds=self.section.start_timeout_seconds)
        tcp = connect(self.rank, self.world_size, patience, again=True)
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
            reason = self._reason(error)
            if self.signals.is_overdue and not self._first_step_is_done and self.is_echo(reason):
                return Failure(self.rank, f"{self.signals.deadline} before the first step", EXIT_STOPPED)
            return Failure(self.rank, reason, exit_code_of(error))
        asked = str(error)
        if not asked.startswith("SIG"):  # the same on every rank
            return Failure(self.rank, f"{asked} before the first step", EXIT_STOPPED)
        first = self.rank - self.local_rank
        for peer, process in enumerate(self._processes[first : first + self.local_world_size], start=first):
            if not _is_running(process):  # torchrun sends SIGTERM to all when one has died: that is no request to stop
                return Failure(self.rank, f"rank {peer} died without a word before the first step", EXIT_FAILED)
        where = f" on rank {self.rank}" if self.world_size > 1 else ""
        return Failure(self.rank, f"{asked}{where} before the first step", EXIT_STOPPED)

    @staticmethod
    def is_echo(reason: str) -> bool:
        """Whether ``reason``, of a ``Failure``, only says that another rank has hung, or gone."""
        return reason.startswith((_SILENCE, _END_OF_ANOTHER))

    def _reason(self, error: BaseException) -> str:
        text = in_one_line(error)
        if isinstance(error, RuntimeError) and any(words in text for words in _NO_ANSWER):
            patience = f"launch.step_timeout_seconds={self.section.step_timeout_seconds:g}"
            return f"{_SILENCE} in time ({patience}): {text}"
        if isinstance(error, RuntimeError) and any(words in text for words in _BROKEN_OFF):
            return f"{_END_OF_ANOTHER}, or the network between them broke: {text}"
        return text


def _is_running(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    return True


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
        return report_alone(error, is_heard=os.environ.get("LOCAL_RANK", "0") == "0")


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
    began, env = time.monotonic(), os.environ
    rank, local_rank, world, local_world = torchrun_says()
    with announced("loading torch", speaks=rank == 0):
        import torch

    device = choose_device(section, local_rank, local_world)
    if device.type == "cuda":
        torch.cuda.set_device(device)
        os.environ.setdefault("TORCH_FR_BUFFER_SIZE", _RECORDED_COLLECTIVES)  # for the watchdog to name who is missing
    torch.set_num_threads(threads_per_process(section, local_world))
    if device.type == "cpu":
        keep_freed_memory()
    session = Session(rank, local_rank, world, local_world, device, section, signals, began)
    signals.last_words_unheard = lambda: report_alone(StopRequested(signals.received), is_heard=local_rank == 0)
    if world > 1:
        others = (
            f"for {world} processes to join at {env.get('MASTER_ADDR')}:{env.get('MASTER_PORT')}, at most "
            f"launch.start_timeout_seconds={section.start_timeout_seconds:g}"
        )
        try:
            with announced(others, speaks=rank == 0):
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


def _start_group(session: Session) -> "Store":
    import torch.distributed as dist

    patience = timedelta(seconds=session.section.start_timeout_seconds)
    session._attempt = f"attempt_{meet(session.rank, session.world_size, patience)}"
    store = dist.PrefixStore(session._attempt, connect(session.rank, session.world_size, patience))
    dist.init_process_group(
        "cuda:nccl,cpu:gloo" if session.device.type == "cuda" else "gloo",
        store=store,
        rank=session.rank,
        world_size=session.world_size,
        timeout=patience,
        device_id=session.device if session.device.type == "cuda" else None,
    )
    return dist.PrefixStore("control", store)


def _report(error: BaseException, session: Session) -> int:
    session.failed = True
    failure = session.first_failure(error)
    if session._is_told:
        return failure.exit_code
    if failure.exit_code == EXIT_STOPPED:
        if session.is_main:  # whose console is the user's, whoever was asked
            say_why(f"stopped: {failure.reason}; go on: the same command")
        return EXIT_STOPPED
    if failure.rank != session.rank:
        if isinstance(error, UserError):
            let_another_end_first()
    elif isinstance(error, StopRequested):
        say_why(f"failed: {failure.reason}")
    elif isinstance(error, UserError | TrainingFailed):
        say_why(f"{'error' if isinstance(error, UserError) else 'failed'}: {error}")
    else:
        traceback.print_exception(error)
    return EXIT_FAILED if isinstance(error, StopRequested) else exit_code_of(error)
