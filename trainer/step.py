"""One optimizer step: a transaction that all ranks commit or none does, without waiting for the device."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from serried.configs.schema.sections import HealthSection
from serried.parallel.distributed_model import DistributedModel
from serried.parallel.plan import Objective
from serried.parallel.runner import StepDropped
from serried.parallel.step_phases import OPTIMIZER
from serried.parallel.sum_table import Number, SumTable, section
from serried.trainer.monitor.spikes import SpikeWindow
from serried.trainer.optim.optimizer import take_step
from serried.trainer.optim.weight_average import WeightAverage
from serried.trainer.precision import GradScaler

FAILURES_THAT_STOP = 3
"""After so many failed steps in a row every later step is rejected, until the host has read this and stops."""


class StepResult(NamedTuple):
    """Result of a step, over the whole global batch; read from the device when the host can wait for it."""

    loss: float
    """Mean over all valid targets."""
    tokens: float
    """Number of valid targets."""
    grad_norm: float
    """Global norm before clipping."""
    skipped: float
    """1.0 if the step was rejected and changed nothing."""
    scale: float
    """Loss scale the step ran with; 1 unless fp16."""
    loss_limit: float
    """A higher loss is a spike."""
    norm_limit: float
    """Gradient norm above which a step is a spike."""
    failed_in_row: float
    """Consecutive rejected steps including this one, without steps that a smaller loss scale may cure."""
    metrics: Mapping[str, float] = MappingProxyType({})
    """Named metrics of the task, means over the global batch; NaN if their weight is 0."""
    by_source: tuple[float, ...] = ()
    """Valid targets of each source of a mixture; empty: there is one source."""
    loads: tuple[tuple[int, ...], ...] = ()
    """Tokens sent to each expert, by layer; empty: there are no experts."""

    @classmethod
    def read(cls, numbers: Mapping[str, Any]) -> "StepResult":
        """Return the result in ``numbers``, the table that ``TrainStep`` returned, after it was copied to the host."""
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
        """Whether loss and gradient are numbers."""
        return math.isfinite(self.loss) and math.isfinite(self.grad_norm)

    @property
    def is_overflow(self) -> bool:
        """Whether gradients alone overflowed under a loss scale: fp16 finding its scale."""
        return not self.is_finite and math.isfinite(self.loss) and self.scale > 1

    @property
    def is_spike(self) -> bool:
        """Whether loss or gradient jumped."""
        return self.is_finite and (self.loss > self.loss_limit or self.grad_norm > self.norm_limit)


class TrainStep:
    """Forward, backward, norm and vote, which prepare a step; then the update, which commits it."""

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
    ) -> None:
        """``nominal_weight``: targets of a global batch without masks. The loss is divided by this constant before
        backward, which keeps fp16 in range on every layout, and by actual / nominal weight afterwards."""
        self._parallel = parallel
        self._optimizer = optimizer
        self._objective = objective
        self.scaler = scaler
        self._max_grad_norm = max_grad_norm if max_grad_norm > 0 else float("inf")
        self._nominal_weight = nominal_weight
        self._window, self._skips_spikes = SpikeWindow(health, parallel.device), health.spike == "skip"
        self._failed_in_row = torch.zeros((), dtype=torch.float64, device=parallel.device)
        self._average = average

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
            vote: Returns this rank's vote, see ``trainer.monitor.shutdown``. Called at the last moment.
            seeds: Seeds of torch's random numbers in each micro-batch: a resumed run draws the same dropout masks.
            before: Called before each micro-batch; None: the step cannot be dropped. See ``Runner.train``.

        Returns:
            The result for ``StepResult.read`` on the device, with the sum of all votes under ``votes``.

        Raises:
            StepDropped: ``before`` raised it on all ranks. The step has changed nothing.
        """
        loads, scale = self._parallel.loads, self.scaler.scale / self._nominal_weight

        def further() -> dict[str, Number | Sequence[Number]]:
            return {**loads.take(self._parallel.device), "votes": vote()}

        # All that needs other ranks: only gradients and buffers change.
        with self._undone_if_dropped(may_be_dropped=before is not None and len(batches) > 1):
            loads.clear()  # what was counted outside of steps, as while text was generated
            sums = self._parallel.forward_backward(batches, self._objective, scale, further, seeds, before)
            self._parallel.phases.enter(OPTIMIZER)
            squares = self._parallel.sum_squares()
        return self._commit(sums, squares, lr)

    @torch.no_grad()
    def _commit(self, sums: SumTable, squares: Tensor, lr: float) -> SumTable:
        """Decide whether the step counts, and update everything that it changes, on this rank alone.

        Optimizers that exchange something in their update (Muon, Adafactor) still need the other ranks.
        """
        loads, scale = self._parallel.loads, self.scaler.scale
        loss_sum, weight = sums["loss_sum"], sums["weight"]
        # .grad divided by this is the gradient of the mean loss.
        divisor = scale * (weight / (self._nominal_weight * self._parallel.gradient_divisor))
        norm = squares.sqrt() / divisor
        halted = self._failed_in_row >= FAILURES_THAT_STOP
        mean_loss, limits = loss_sum / weight, self._window.limits()
        has_loss = loss_sum.isfinite()
        failed = ~(has_loss & norm.isfinite()) | halted
        spike = (mean_loss > limits[0]) | (norm > limits[1])
        rejected = failed | spike if self._skips_spikes else failed
        # fp16 finding its scale is not a failure.
        overflow = failed & has_loss & (scale > 1)
        self._failed_in_row = (self._failed_in_row + ~overflow) * rejected
        self._window.add(mean_loss, norm, ~rejected)
        clip = (norm / self._max_grad_norm).clamp(min=1.0)
        for group in self._optimizer.param_groups:
            group["lr"] = lr * group["lr_scale"]
        # A gradient of NaN times zero is NaN: a rejected step must not be computed at all.
        take_step(self._optimizer, divisor * clip, rejected)
        loads.balance(sums, ~rejected)
        if self._average is not None:
            self._average.update(~rejected)
        self.scaler.update(failed)
        result = {
            "loss": mean_loss, "grad_norm": norm, "skipped": rejected, "scale": scale, "loss_limit": limits[0],
            "norm_limit": limits[1], "failed_in_row": self._failed_in_row,
        }  # fmt: skip
        return SumTable.pack(result, weight.device).joined(sums)

    @contextmanager
    def _undone_if_dropped(self, *, may_be_dropped: bool) -> Iterator[None]:
        """Undo what the step has changed in this context if it is dropped there, so that the state can be saved.

        ``may_be_dropped``: in the middle, when forwards may have changed buffers, such as the statistics of BatchNorm.
        Training must not continue afterwards: FSDP2 keeps what it has not reduced, to which it would add.
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
        """Return the plain data of a checkpoint. Waits for the device."""
        return {
            "scaler": self.scaler.state_dict(),
            "failed_in_row": int(self._failed_in_row.item()),
            "window": self._window.state_dict(),
            **({"average": self._average.state_dict()} if self._average is not None else {}),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from ``state``."""
        self.scaler.load_state_dict(state["scaler"])
        self._failed_in_row.fill_(state["failed_in_row"])
        self._window.load_state_dict(state.get("window"))
        if self._average is not None:
            self._average.load_state_dict(state["average"])

    def rehearse(self, batch: Any) -> None:
        """One pass on ``batch`` that changes nothing.

        DDP deals gradients into other buckets after its first backward, which changes the order of sums on 3 or more
        ranks: after a rehearsal the first step, of a new run and of a resumed one, is as any other.
        """
        self._parallel.forward_backward([batch], self._objective, 0.0)
        self._optimizer.zero_grad()
