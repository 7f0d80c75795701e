"""Recovery from memory: the replicas that are left after a loss continue with the step that was not done.

The survivors close their connections, agree on who continues after which step (``runtime/agreement.py``), keep their
state, and build the trainer again over new process groups, as at a start. The state is copied into the new model, and
kept until the replicas are found to be bitwise equal, so that another loss meanwhile does no harm.
"""

import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch.distributed as dist
from torch.distributed import DistNetworkError, DistStoreError

from serried.configs.errors import TrainingStopped, UserError
from serried.configs.schema.sections import RunConfig
from serried.parallel.layout.checks import checked_layout, with_values
from serried.parallel.layout.mesh import AXES, Layout, gradient_accumulation
from serried.parallel.layout.recovery_checks import layout_without, replicas_of
from serried.records.generations import claim, newest_generation, read_generation
from serried.records.metrics import METRICS, last_events
from serried.records.run_folder import RunFolder
from serried.records.status import Members
from serried.runtime.agreement import Agreement, NotRecoverable, Report, meet_survivors
from serried.runtime.console import Console
from serried.runtime.exit import is_broken_off
from serried.runtime.peer_sockets import first_node_is_gone
from serried.runtime.peer_watch import PeerWatch
from serried.runtime.process import tell_launcher
from serried.runtime.session import Session
from serried.trainer.checkpoint.kept_state import KeptState
from serried.trainer.checkpoint.resume import Start
from serried.trainer.loop import Rest, is_due
from serried.trainer.metrics.recovery_log import Lost, log_loss, log_recovery
from serried.trainer.replica_check import GoBack
from serried.trainer.step import StepResult
from serried.trainer.trainer import Trainer

_LOSSES_OF_A_STEP = 3
"""Number of losses in the same step after which the run ends, since the step may be their cause."""


class Kept(NamedTuple):
    """What a survivor keeps of its trainer."""

    state: KeptState
    newest: tuple[int, StepResult] | None
    """The last step that was read, and its result."""
    before_evaluation: tuple[int, dict[str, Any]] | None
    """See ``Evaluator.before``."""
    validation: list[str]
    """Names of the validation sets."""
    has_begun: bool
    """Whether the step after the last one that is done had begun."""
    requests: tuple[bool, bool]
    """See ``Shutdown.requests``."""

    @property
    def step(self) -> int:
        """The last step that is done."""
        return int(self.state.plain["step"])


class Recovery:
    """Notices losses, and agrees with the other survivors. One instance on each rank."""

    def __init__(self, session: Session, config: RunConfig, layout: Layout, first_step: int) -> None:
        """Watch the other ranks from now on. This is a collective call.

        ``first_step``: the step after which the run has started.
        """
        self._first_step = first_step
        self._session, self._config, self._layout = session, config, layout
        self._total_replicas = layout.replicate
        self._watch = PeerWatch(session, config.recover.silence_seconds)
        session.exchange.survives, session.exchange.check_peers = self.survives, self._check_peers
        self._generation = session.once(partial(newest_generation, config.run.dir))
        """Number of the newest generation. A run that was resumed has files of earlier ones."""
        self._has_agreed = True
        """Whether this rank knows the result of the last meeting."""
        self._losses: tuple[int, int] = (-1, 0)
        """The step of the last loss, and the number of losses in a row after it."""
        self._before = 0.0, self._watch.members, layout
        """When this rank noticed the last loss, and who trained before."""
        self._agreed: Agreement | None = None
        tell_launcher(recovers=True)

    def close(self) -> None:
        """Tell the other ranks that this one ends as planned, and stop watching them."""
        self._session.exchange.survives, self._session.exchange.check_peers = (lambda _: False), (lambda: None)
        self._watch.close()

    @property
    def lose(self) -> Callable[[int, str], None]:
        """Function that treats a rank as lost; takes its current number, also after later losses, and the reason."""
        members = self._watch.members
        return lambda rank, reason: self._watch.lose(members[rank], reason)

    def survives(self, error: BaseException) -> bool:
        """Return whether ``error`` is the consequence of a loss after which this rank may continue.

        Raises:
            TrainingStopped: The first node is lost, which has the store of all nodes.
        """
        if not isinstance(error, RuntimeError):
            return False
        is_loss = isinstance(error, DistNetworkError | DistStoreError) or is_broken_off(error)
        if not (is_loss or self._watch.is_severed or self._watch.all_lost()):
            return False
        try:  # if a rank has ended with an error message, all end
            return not self._session.exchange.has("failure")
        except RuntimeError:
            if self._session.world_size == self._session.local_world_size:
                return False  # the launcher has ended, which the signals of this process report
            raise TrainingStopped(f"{first_node_is_gone()} has ended, through which the others agree") from None

    @property
    def has_lost_rank_0(self) -> bool:
        """Whether the rank that reports for all is lost, and this one may report in its place."""
        try:
            self._check()
        except DistNetworkError:  # with the first node
            return self._session.local_rank == 0
        except RuntimeError:
            pass
        return self._watch.lost(0) is not None

    @property
    def is_fenced(self) -> bool:
        """Whether the others have continued without this rank, which was frozen, or cannot reach them."""
        run_dir = self._config.run.dir
        if newest_generation(run_dir) > self._generation:
            return True
        claimed = None if self._has_agreed else read_generation(run_dir, self._generation)
        return claimed is not None and self._session.rank not in claimed["ranks"]

    def keep(self, trainer: Trainer) -> Kept:
        """Return the state of ``trainer`` after the step on which the survivors agree. Drop the trainer then.

        Raises:
            TrainingStopped: The run cannot continue from memory.
            Fenced: The other ranks continue without this one.
        """
        self._before = time.perf_counter(), self._watch.members, self._layout
        self._watch.sever()
        loop = trainer.loop
        reached = loop.step
        if not trainer.saver.give_up(self._watch.sever):  # before the others count on this rank
            raise TrainingStopped(f"{self._lost()}, and the thread that saves does not end")
        step = self._agree(trainer.report(self._session.rank))
        try:
            state = trainer.keep(step)
        except (NotRecoverable, GoBack) as why:
            raise TrainingStopped(f"{self._lost()}, and {why}") from None
        return Kept(
            state, loop.log.newest, loop.evaluator.before, list(trainer.validation), reached > step,
            trainer.shutdown.requests,
        )  # fmt: skip

    def agree_again(self, kept: Kept) -> None:
        """Agree with the others after another loss, before the new trainer was complete.

        Raises:
            TrainingStopped: The run cannot continue from memory.
            Fenced: The other ranks continue without this one.
        """
        self._watch.sever()
        self._agree(Report(self._session.rank, kept.step, kept.step))

    def _agree(self, report: Report) -> int:
        """Agree on the ranks that continue. Returns the last step that is done."""
        session, layout, store = self._session, self._layout, self._session.exchange.store
        assert store is not None
        self._generation += 1
        self._has_agreed = False
        try:
            agreement = meet_survivors(
                dist.PrefixStore(f"meeting_{self._generation}", store),
                report,
                replicas_of(layout),
                least_replicas=self._config.recover.min_replicas,
                is_gone=lambda rank: self._watch.lost(rank) is not None,
                patience_seconds=session.section.step_timeout_seconds,
                claim=partial(claim, self._config.run.dir, self._generation),
                check=self._check,
            )
            self._has_agreed = True
            step, count = self._losses
            self._losses = agreement.step, count + 1 if agreement.step == step else 1
            if self._losses[1] == _LOSSES_OF_A_STEP:
                raise NotRecoverable(f"step {agreement.step + 1} has failed {_LOSSES_OF_A_STEP} times in a row")
            self._agreed = agreement
            per_replica = layout.world // layout.replicate
            self._layout = layout_without(layout, layout.replicate - len(agreement.ranks) // per_replica)
            self.configured(self._config)
        except (NotRecoverable, UserError) as why:
            raise TrainingStopped(f"{self._lost()}, and {why}") from None
        except DistNetworkError:
            raise TrainingStopped(f"{first_node_is_gone()} has ended, through which the others agree") from None
        return agreement.step

    def _check(self) -> None:
        if self._session.exchange.has("failure"):
            raise RuntimeError("another rank has failed")

    def _check_peers(self) -> None:
        self._watch.check()
        self._check()

    def _lost(self) -> str:
        reasons = self._watch.all_lost().values()
        return next(iter(reasons), "the connection to another process broke")

    def form(self) -> None:
        """Form the process groups of the ranks that continue. This is a collective call."""
        assert self._agreed is not None
        self._watch.continue_with(self._agreed.ranks)
        nodes = [member.node for member in self._watch.members]

        def note(addresses: list[str]) -> None:
            self._watch.also_severed = addresses

        self._session.form_again(self._agreed.ranks, nodes, self._generation, note)

    def configured(self, config: RunConfig) -> RunConfig:
        """Return ``config`` for the ranks that continue.

        Raises:
            UserError: They cannot train this configuration.
        """
        degrees = {f"parallel.{axis}": getattr(self._layout, axis) for axis in AXES}
        changed = with_values(config, {**degrees, "parallel.uneven": True})
        checked_layout(changed, self._layout.world)
        return changed

    def start(self, kept: Kept, newest_checkpoint: int, callbacks: Mapping[str, Any]) -> tuple[Start, Rest, bool]:
        """Return where the new trainer starts, what is left to do of the last step, and whether to log the step.

        All ranks continue with the plain data of the new rank 0. This is a collective call.

        Args:
            newest_checkpoint: Step of the run's newest checkpoint. 0 if there is none. Used on rank 0.
            callbacks: State of the callbacks, as an entry of the plain data. Used on rank 0.
        """

        def shared() -> dict[str, Any]:
            plain = {key: value for key, value in kept.state.plain.items() if key != "callbacks"} | dict(callbacks)
            trainer, step, progress = self._config.trainer, kept.step, plain["progress"]
            events = last_events(self._config.run.dir / METRICS, step)
            recorded = {event["event"] for event in events}
            evaluated = {event.get("set") for event in events if event["event"] == "eval"}
            is_evaluated = evaluated >= {*kept.validation} and not (progress["missed"] or progress["early_stop"])
            evaluates = step > 0 and bool(kept.validation) and is_due(step, trainer.evaluates_every, trainer.last_step)
            evaluate = evaluates and not (is_evaluated and progress["validated_step"] == step)
            if evaluate and kept.before_evaluation is not None and kept.before_evaluation[0] == step:
                plain["progress"] = kept.before_evaluation[1]
            saves = step > newest_checkpoint and (
                step == trainer.last_step or is_due(step, self._config.checkpoint.every, trainer.last_step)
            )
            logs = step > 0 and (step == 1 or is_due(step, trainer.log_every, trainer.last_step))
            return {
                "plain": plain, "rest": [evaluate, saves], "newest_checkpoint": newest_checkpoint,
                "logs": logs and trainer.log_every > 0 and "step" not in recorded,
            }  # fmt: skip

        found = self._session.once(shared)
        state = kept.state._replace(plain=found["plain"])
        start = Start(
            origin=found["plain"].get("origin"), state=state.plain, kept=state,
            newest_checkpoint=found["newest_checkpoint"], first_step=self._first_step,
        )  # fmt: skip
        return start, Rest(*found["rest"]), found["logs"]

    @property
    def members(self) -> Members:
        """The replicas that train."""
        return Members(self._generation, self._layout.replicate, self._total_replicas)

    def report(self, kept: Kept, console: Console, folder: RunFolder | None) -> None:
        """Report the loss, and that training continues. ``folder``: run folder, on rank 0 only."""
        assert self._agreed is not None
        began, before, layout = self._before
        seconds = time.perf_counter() - began
        ranks = [member.number for member in self._watch.members]
        gone = [member for member in before if member.number not in ranks]
        if self._session.is_main:
            tell_launcher(formed=ranks)
        if folder is not None:
            folder.members = self.members
            folder.status("running", step=kept.step)
        if gone:  # otherwise only a connection broke
            reason = self._watch.first_reason(gone) or "its connections broke"
            hosts = tuple(member.host for member in gone)
            lost = Lost(kept.step + 1, hosts, tuple(member.number for member in gone), reason)
            micro_batches = [gradient_accumulation(self._config.trainer, of) for of in (layout, self._layout)]
            log_loss(console, folder, lost, self.members, (micro_batches[0], micro_batches[1]))
        log_recovery(
            console, folder, kept.step + 1, self._generation, seconds, redone=kept.has_begun,
            rolled_forward=len(self._agreed.behind),
        )  # fmt: skip
