"""Runners: forward and backward of the micro-batches of a step."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, Protocol

from torch import Tensor, nn

from serried.parallel.loss_checks import check_terms, refuse_no_gradient, refuse_own_backward
from serried.parallel.plan import LossTerms, Objective
from serried.parallel.random_seed import seed_random_numbers
from serried.parallel.step_phases import BACKWARD, FORWARD, Phases
from serried.parallel.sync.gradient_sync import GradientSync


class StepDropped(Exception):
    """Raised when all ranks have agreed to drop the current step. Only gradients and buffers have changed."""


class Runner(Protocol):
    """Runs forward and backward of the modules on this rank."""

    divisor: int
    """Factor by which to multiply ``.grad`` to get the sum over ranks."""
    phases: Phases
    autocast: Callable[[], AbstractContextManager[Any]]
    """Factory of the context manager for forwards."""

    def train(
        self, batches: Sequence[Any], objective: Objective, scale: float | Tensor, seeds: Sequence[int],
        before: Callable[[int], None] | None = None,
    ) -> Iterator[LossTerms]:  # fmt: skip
        """Run forward and backward of all ``batches`` for ``scale`` x the summed loss.

        Yields the loss of each micro-batch in order, before its backward. A pipeline yields the losses after all
        backwards, and only on ranks that have a loss.

        Args:
            batches: This rank's micro-batches.
            objective: Computes the loss.
            scale: Factor of the loss before the backward.
            seeds: Seeds of torch's generators, one per micro-batch, or empty.
            before: Called with the index of each micro-batch before it starts; in a pipeline only with 0. It may raise
                ``StepDropped``.
        """

    def predict(self, batch: Any, objective: Objective) -> LossTerms | None:
        """Run the forward only. Return the loss, or None if it is on another rank."""

    def logits(self, ids: Tensor, index: int) -> Tensor:
        """Return the logits of token ``index`` of ``ids`` [B, S], on all ranks of a pipeline: [B, 1, V]."""

    def reshard(self) -> None:
        """Free parameters that a forward without backward left gathered."""


class Direct:
    """Runner without a pipeline: the forward and backward of one micro-batch after the other."""

    def __init__(self, sync: GradientSync, phases: Phases, autocast: Callable[[], AbstractContextManager[Any]]) -> None:
        self._sync, self.divisor = sync, sync.divisor
        self.phases, self.autocast = phases, autocast
        self._is_first = True

    def train(
        self, batches: Sequence[Any], objective: Objective, scale: float | Tensor, seeds: Sequence[int],
        before: Callable[[int], None] | None = None,
    ) -> Iterator[LossTerms]:  # fmt: skip
        for index, batch in enumerate(batches):
            if before is not None:
                before(index)
            with self._sync.during(index == len(batches) - 1):
                self.phases.enter(FORWARD)
                if seeds:
                    seed_random_numbers(seeds[index])
                with self.autocast():
                    terms = self._sync.root(objective.loss, batch)
                if self._is_first:
                    refuse_own_backward(self._sync.root)
                    self._is_first = False
                check_terms(terms)
                self.phases.enter(BACKWARD)
                yield terms
                loss = terms.loss_sum * scale
                refuse_no_gradient(loss)
                loss.backward()

    def predict(self, batch: Any, objective: Objective) -> LossTerms:
        with self.autocast():
            return check_terms(self._sync.root(objective.loss, batch))

    @property
    def model(self) -> Any:
        """A callable that runs the model; under FSDP2 the module itself has only shards of its parameters."""
        return partial(self._sync.root, nn.Module.__call__)

    def logits(self, ids: Tensor, index: int) -> Tensor:
        return self.model(ids)[:, index : index + 1].contiguous()

    def reshard(self) -> None:
        """Free parameters that a forward without backward left gathered."""
        self._sync.reshard()
