"""One optimizer step: a transaction that all ranks commit or none, without synchronizing with the device."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from serried.configs.schema.sections import HealthSection
from serried.parallel.distributed_model import DistributedModel
from serried.parallel.plan import Objective
from serried.parallel.runner import StepDropped
from serried.parallel.step_phases import FORWARD, OPTIMIZER
from serried.parallel.sum_table import Number, SumTable, section
from serried.trainer.monitor.spikes import SpikeWindow
from serried.trainer.optim.optimizer import take_step
from serried.trainer.optim.weight_average import WeightAverage
from serried.trainer.precision import GradScaler
from serried.trainer.task import StepMean

FAILURES_THAT_STOP = 3
"""Number of consecutive failed steps after which every step is rejected. The host then reads the count and ends the
run."""


class StepResult(NamedTuple):
    """Result of a step over the global batch, read from the device when the host can wait for it."""

    loss: float
    """Mean loss over all valid targets."""
    tokens: float
    """Number of valid targets."""
    grad_norm: float
    """Global gradient norm before clipping."""
    skipped: float
    """1.0 if the step was rejected and changed nothing, else 0.0."""
    scale: float
    """Loss scale of the step. 1 unless the precision is fp16."""
    loss_limit: float
    """Loss above which a step is a spike."""
    norm_limit: float
    """Gradient norm above which a step is a spike."""
    failed_in_row: float
    """Number of consecutive rejected steps, including this one. Overflows of fp16 loss scaling are not counted."""
    metrics: Mapping[str, float] = MappingProxyType({})
    """Named metrics of the task, averaged over the global batch. NaN if the weight is 0."""
    by_source: tuple[float, ...] = ()
    """Number of valid targets from each source of a mixture. Empty if there is one source."""
    loads: tuple[tuple[int, ...], ...] = ()
    """Number of tokens sent to each expert, by layer. Empty if there are no experts."""

    @classmethod
    def read(cls, numbers: Mapping[str, Any]) -> "StepResult":
        """Return the result in ``numbers``, the table returned by ``TrainStep``, copied to the host."""
        pairs = section(numbers, "metrics").items()
        metrics = {name: total / weight if weight else math.nan for name, (total, weight) in pairs}
        loads = tuple(tuple(map(int, experts)) for experts in section(numbers, "experts").values())
        single = {name: numbers[name] for name in cls._fields if name in numbers}
        return cls(
            **single, tokens=numbers["weight"], metrics=metrics, by_source=tuple(numbers.get("counts/sources", ())),
            loads=loads,
        )  # fmt: skip

    @property
    def is_finite(self) -> bool:
        """Whether loss and gradient norm are finite."""
        return math.isfinite(self.loss) and math.isfinite(self.grad_norm)

    @property
    def is_overflow(self) -> bool:
        """Whether only the gradients overflowed, because of the fp16 loss scale."""
        return not self.is_finite and math.isfinite(self.loss) and self.scale > 1

    @property
    def is_spike(self) -> bool:
        """Whether loss or gradient norm exceeded its limit."""
        return self.is_finite and (self.loss > self.loss_limit or self.grad_norm > self.norm_limit)


class Prepared(NamedTuple):
    """A step after everything that needs other ranks. Only gradients and buffers have changed."""

    sums: SumTable
    squares: Tensor
    """Sum of squares of the gradient, equal on all ranks."""
    lr: float


class Transaction:
    """The step that is under way."""

    def __init__(self, votes: bool) -> None:
        self.votes = votes
        """Whether all ranks vote before each commit, so that a step can be undone after a loss."""
        self.prepared: Prepared | None = None
        """The step if it is prepared and not committed."""
        self.buffers: list[Tensor] | None = None
        """Copies of the buffers before the step, if it can be undone."""
        self.is_committing = False
        """Whether an update has begun and has not ended, as after an error in it."""


def confirm(world: int) -> None:
    """Return once every rank has called this for the current step. This is a collective call.

    A rank that this returns on knows that every rank has prepared the step.
    """
    ready = torch.ones(1)
    if dist.is_initialized():
        dist.all_reduce(ready)
        assert ready.item() == world


class TrainStep:
    """Prepare a step (forward, backward, gradient norm and vote), then commit it (update)."""

    def __init__(
        self,
        parallel: DistributedModel,
        optimizer: torch.optim.Optimizer,
        objective: Objective,
        scaler: GradScaler,
        *,
        max_grad_norm: float,
        nominal_weight: int,
        health: HealthSection,
        average: WeightAverage | None = None,
        step_mean: StepMean | None = None,
        votes_to_commit: bool = False,
    ) -> None:
        """``nominal_weight``: number of targets in a global batch without masking. The loss is divided by it before
        backward, which keeps fp16 gradients in range on every layout. The gradients are corrected by the actual weight
        afterwards. ``votes_to_commit``: exchange a vote before each commit, so that a rank that misses its result
        because another rank is lost can commit alone."""
        self.transaction = Transaction(votes_to_commit)
        self._parallel = parallel
        self._optimizer = optimizer
        self._objective = objective
        self.scaler = scaler
        self._max_grad_norm = max_grad_norm if max_grad_norm > 0 else float("inf")
        self._nominal_weight = nominal_weight
        self._window, self._skips_spikes = SpikeWindow(health, parallel.device), health.spike == "skip"
        self._failed_in_row = torch.zeros((), dtype=torch.float64, device=parallel.device)
        self._average = average
        self._step_mean = step_mean

    def __call__(
        self,
        batches: Sequence[Any],
        lr: float,
        vote: Callable[[], Number | Sequence[Number]],
        seeds: Sequence[int] = (),
        before: Callable[[int], None] | None = None,
    ) -> SumTable:
        """Train on ``batches``, this rank's micro-batches of one global batch.

        Args:
            batches: Micro-batches on the device.
            lr: Learning rate.
            vote: Returns this rank's vote, see ``trainer.monitor.shutdown``. Called as late as possible.
            seeds: Random seed for torch in each micro-batch, so that a resumed run draws the same dropout masks.
            before: Called before each micro-batch. If None, the step cannot be dropped. See ``Runner.train``.

        Returns:
            The result on the device for ``StepResult.read``, with the sum of all votes under ``votes``.

        Raises:
            StepDropped: ``before`` raised it on all ranks. The step changed nothing.
        """
        self.transaction.buffers = self._parallel.buffers.copy() if self.transaction.votes else None
        self.transaction.prepared = None
        loads, scale = self._parallel.loads, self.scaler.scale / self._nominal_weight

        def further() -> dict[str, Number | Sequence[Number]]:
            return {**loads.take(self._parallel.device), "votes": vote()}

        batches = self._with_mean(batches)
        # All other communication between ranks happens here. Only gradients and buffers change.
        with self._undone_if_dropped(may_be_dropped=before is not None and len(batches) > 1):
            loads.clear()  # discard tokens counted outside of steps, for example during generation
            sums = self._parallel.forward_backward(batches, self._objective, scale, further, seeds, before)
            self._parallel.phases.enter(OPTIMIZER)
            squares = self._parallel.sum_squares()
        self.transaction.prepared = Prepared(sums, squares, lr)
        if self.transaction.votes:
            confirm(self._parallel.layout.world)
        return self.commit()

    def _with_mean(self, batches: Sequence[Any]) -> Sequence[Any]:
        """Return ``batches`` with the mean over the global batch, if the loss needs one."""
        if self._step_mean is None:
            return batches
        self._parallel.phases.enter(FORWARD)
        mean = self._parallel.mean_loss(((batch, True) for batch in batches), self._step_mean.objective)
        return [self._step_mean.use(batch, mean) for batch in batches]

    @torch.no_grad()
    def commit(self) -> SumTable:
        """Accept or reject the prepared step, and update the state of this rank accordingly.

        Optimizers that communicate in their update (Muon, Adafactor) still need the other ranks.
        """
        assert self.transaction.prepared is not None
        sums, squares, lr = self.transaction.prepared
        self.transaction.prepared = self.transaction.buffers = None
        self.transaction.is_committing = True
        loads, scale = self._parallel.loads, self.scaler.scale
        loss_sum, weight = sums["loss_sum"], sums["weight"]
        # .grad divided by this divisor is the gradient of the mean loss.
        divisor = scale * (weight / (self._nominal_weight * self._parallel.gradient_divisor))
        norm = squares.sqrt() / divisor
        halted = self._failed_in_row >= FAILURES_THAT_STOP
        mean_loss, limits = loss_sum / weight, self._window.limits()
        has_loss = loss_sum.isfinite()
        failed = ~(has_loss & norm.isfinite()) | halted
        spike = (mean_loss > limits[0]) | (norm > limits[1])
        rejected = failed | spike if self._skips_spikes else failed
        # An overflow of fp16 loss scaling is not a failure.
        overflow = failed & has_loss & (scale > 1)
        self._failed_in_row = (self._failed_in_row + ~overflow) * rejected
        self._window.add(mean_loss, norm, ~rejected)
        clip = (norm / self._max_grad_norm).clamp(min=1.0)
        for group in self._optimizer.param_groups:
            group["lr"] = lr * group["lr_scale"]
        # A NaN gradient multiplied by zero is NaN, so the update of a rejected step must not be computed at all.
        take_step(self._optimizer, divisor * clip, rejected)
        loads.balance(sums, ~rejected)
        if self._average is not None:
            self._average.update(~rejected)
        self.scaler.update(failed)
        self.transaction.is_committing = False
        result = {
            "loss": mean_loss, "grad_norm": norm, "skipped": rejected, "scale": scale, "loss_limit": limits[0],
            "norm_limit": limits[1], "failed_in_row": self._failed_in_row,
        }  # fmt: skip
        return SumTable.pack(result, weight.device).joined(sums)

    def drop(self) -> None:
        """Undo the step that was prepared or under way when a rank was lost. The model must be built again."""
        if self.transaction.buffers is not None:
            self._parallel.buffers.restore(self.transaction.buffers)
        self.transaction.prepared = self.transaction.buffers = None

    @contextmanager
    def _undone_if_dropped(self, *, may_be_dropped: bool) -> Iterator[None]:
        """If the step is dropped in this context, undo its changes, so that the state can be saved.

        ``may_be_dropped``: whether the step can be dropped between micro-batches, when forward passes may have changed
        buffers, such as BatchNorm statistics. Training must not continue afterwards: FSDP2 keeps gradients that are not
        reduced yet and would accumulate into them.
        """
        buffers = self._parallel.buffers
        copies = buffers.copy() if may_be_dropped else None
        try:
            yield
        except StepDropped:
            self._optimizer.zero_grad()
            self._parallel.loads.clear()
            self._parallel.reshard()
            if copies is not None:
                buffers.restore(copies)
            raise

    def state_dict(self) -> dict[str, Any]:
        """Return the plain data of a checkpoint. Synchronizes with the device."""
        return {
            "scaler": self.scaler.state_dict(),
            "failed_in_row": int(self._failed_in_row.item()),
            "window": self._window.state_dict(),
            **({"average": self._average.state_dict()} if self._average is not None else {}),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore ``state``."""
        self.scaler.load_state_dict(state["scaler"])
        self._failed_in_row.fill_(state["failed_in_row"])
        self._window.load_state_dict(state.get("window"))
        if self._average is not None:
            self._average.load_state_dict(state["average"])

    def rehearse(self, batch: Any) -> None:
        """Run one forward and backward pass on ``batch`` without changing the state.

        DDP rebuilds its gradient buckets after its first backward pass, which changes the order of summation on 3 or
        more ranks. After a rehearsal, the first step of a new or resumed run uses the same order as later steps.
        """
        self._parallel.forward_backward(self._with_mean([batch]), self._objective, 0.0)
        self._optimizer.zero_grad()
