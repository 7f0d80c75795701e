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
    """All ranks have agreed to drop the step under way. It has changed gradients and buffers, and nothing else."""


class Runner(Protocol):
    """Runs the modules of a model that are on this rank."""

    divisor: int
    """``.grad`` times this is the sum over ranks."""
    phases: Phases
    autocast: Callable[[], AbstractContextManager[Any]]
    """The context forwards run in."""

    def train(
        self, batches: Sequence[Any], objective: Objective, scale: float | Tensor, seeds: Sequence[int],
        before: Callable[[int], None] | None = None,
    ) -> Iterator[LossTerms]:  # fmt: skip
        """Forward and backward of all ``batches``, with gradients of ``scale`` x the summed loss.

        Yields the loss of each micro-batch in order: before its backward, or after all backwards of a pipeline, and
        only on ranks that have a loss. ``seeds``, one per micro-batch or none, seed torch's random numbers. ``before``
        is called with the number of each micro-batch before it begins, in a pipeline with that of the first alone, and
        may raise ``StepDropped``.
        """

    def predict(self, batch: Any, objective: Objective) -> LossTerms | None:
        """Forward only; None if another rank has the loss."""

    def logits(self, ids: Tensor, index: int) -> Tensor:
        """Return the logits of token ``index`` of ``ids`` [B, S], on all ranks of a pipeline: [B, 1, V]."""

    def reshard(self) -> None:
        """Free parameters that a forward without backward left gathered."""


class Direct:
    """A runner: the whole model on this rank, each micro-batch forward and then backward."""

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
        """The module to call; under FSDP2 it has only shards of its parameters."""
        return partial(self._sync.root, nn.Module.__call__)

    def logits(self, ids: Tensor, index: int) -> Tensor:
        return self.model(ids)[:, index : index + 1].contiguous()

    def reshard(self) -> None:
        """Free parameters that a forward without backward left gathered."""
        self._sync.reshard()
