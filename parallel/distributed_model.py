"""The trainer's interface to a model on any layout: forward, backward and sums over all ranks."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from serried.parallel.axes.context import head_tail
from serried.parallel.axes.expert import Loads
from serried.parallel.layout.local_shards import HeldTensor, evaluating, held_parameters, local
from serried.parallel.layout.mesh import Layout
from serried.parallel.layout.process_groups import Groups
from serried.parallel.layout.shard_specs import ShardSpec
from serried.parallel.loss_checks import LOSS_ALONE, agreed_shapes, check_names
from serried.parallel.plan import Decoding, LossTerms, Objective
from serried.parallel.precision.float8_all_gather import Float8Gather
from serried.parallel.runner import Direct, Runner
from serried.parallel.step_phases import OPTIMIZER, Phases
from serried.parallel.sum_table import Number, Shapes, SumTable
from serried.parallel.sync.buffers import Buffers
from serried.parallel.sync.gradient_norm import global_sum_of_squares, reduce_partial_gradients, sum_tied_gradients
from serried.parallel.token_generation import generate

_TRAINING, _EVALUATION, _MEAN = "training", "evaluation", "mean"


class DistributedModel:
    """A model on this rank: its runner and this rank's shards.

    ``modules`` contain the parameters, for reading only: call ``model`` to run the model.
    """

    def __init__(
        self,
        modules: Sequence[nn.Module],
        runner: Runner,
        specs: Mapping[str, ShardSpec],
        groups: Groups,
        device: torch.device,
        *,
        loads: Loads,
        buffers: Mapping[str, bool],
        gather: Float8Gather | None = None,
    ) -> None:
        """
        Args:
            modules: The model, or this rank's stages of it.
            runner: Runs forward and backward of the modules.
            specs: Shard specs of all parameters of the model, by name.
            groups: Process groups of this rank.
            device: Device of this rank.
            loads: Counts of the tokens sent to experts.
            buffers: For each persistent buffer of the model, by name, whether every stage has a copy.
            gather: Weights that are all-gathered in float8.
        """
        self.modules, self.runner = modules, runner
        self.specs, self.groups = specs, groups
        self.device, self.loads = device, loads
        self._gather = gather
        rank = dist.get_rank() if dist.is_initialized() else 0
        self.place = self.layout.coordinates(rank)
        self.parameters: list[HeldTensor] = held_parameters(modules, specs, self.layout, rank)
        copies = sorted({spec.copies(self.layout) for spec in specs.values()})
        self._by_copies: dict[int, list[Tensor]] = {count: [] for count in copies}
        for held in self.parameters:
            self._by_copies[held.spec.copies(self.layout)].append(held.tensor)
        self.buffers = Buffers(modules, buffers, groups, equal=lambda: loads.buffers)
        self._shapes: dict[str, Shapes] = {}
        """Names and shapes of the loss sums that all ranks agreed on, for training and for evaluation."""

    @property
    def layout(self) -> Layout:
        """The parallel layout."""
        return self.groups.layout

    @property
    def phases(self) -> Phases:
        """Phases of the current step."""
        return self.runner.phases

    @property
    def autocast(self) -> Callable[[], AbstractContextManager[Any]]:
        """Factory of the context manager for forwards."""
        return self.runner.autocast

    @property
    def gradient_divisor(self) -> int:
        """Factor by which to multiply ``.grad`` to get the sum over ranks."""
        return self.runner.divisor

    @property
    def module(self) -> nn.Module:
        """The model, or the first of this rank's stages."""
        return self.modules[0]

    def held_like(self, parameter: HeldTensor, value: Tensor) -> HeldTensor:
        """Return the optimizer state ``value`` as a ``HeldTensor``, sharded like ``parameter`` or replicated."""
        if value.shape == parameter.tensor.shape:
            return parameter._replace(tensor=value)
        if len(value.shape) == len(parameter.spec.shape):
            sizes = zip(value.shape, parameter.tensor.shape, parameter.spec.shape, strict=True)
            # State with fewer columns is sharded over tensor ranks like the parameter.
            whole = (of if each == ours else each * of // ours for each, ours, of in sizes)
            spec = replace(parameter.spec, shape=tuple(whole))
            box = spec.box(self.layout, self.place)
            if tuple(local(value).shape) == box.sizes:  # such as running means of rows, or quantized state
                return HeldTensor(parameter.name, value, spec, box)
        assert local(value) is value, f"{parameter.name}: state of {list(value.shape)} is divided in another way"
        return HeldTensor.whole(parameter.name, value, parameter.spec.holders)

    @property
    def model(self) -> Any:
        """A callable to use instead of the module's forward, valid until the weights change; not for a pipeline.

        With several ranks this is a collective: all ranks must get it and call it together.
        """
        self._set_scales()
        if not self.layout.is_sharded:
            return self.module
        assert isinstance(self.runner, Direct)
        return self.runner.model

    def forward_backward(
        self,
        batches: Sequence[Any],
        objective: Objective,
        scale: float | Tensor,
        further: Callable[[], Mapping[str, Number | Sequence[Number]]] = dict,
        seeds: Sequence[int] = (),
        before: Callable[[int], None] | None = None,
    ) -> SumTable:
        """Run forward and backward for ``scale`` x the loss summed over all ``batches`` of all ranks.

        ``.grad`` is the gradient of this sum, divided by ``gradient_divisor``. Gradients are reduced once, after the
        last micro-batch, unless ``parallel.sync_every_micro_batch`` is set.

        Args:
            batches: This rank's micro-batches.
            objective: Computes the loss.
            scale: Factor of the loss before the backward.
            further: Returns additional sums of this rank, by name. Called just before the exchange.
            seeds: Seeds of torch's generators, one per micro-batch, or empty.
            before: See ``Runner.train``.

        Returns:
            The sums over all ranks: the entries of ``LossTerms.table``, then ``further``. One all-reduce computes them
            while the last backward runs.
        """
        assert batches, "a step has a micro-batch at least"
        batches = [self._of_this_rank(batch, objective) for batch in batches]
        self._set_scales(OPTIMIZER)
        sums: SumTable | None = None
        total: SumTable | None = None
        for index, terms in enumerate(self.runner.train(batches, objective, scale, seeds, before)):
            check_names(terms, self._agreed(_TRAINING, terms))
            sums = terms.table() if sums is None else sums + terms.table()
            if index == len(batches) - 1:
                total = self._start_adding(sums, further())
        if total is None:  # the loss is on another pipeline stage
            total = self._start_adding(SumTable.zeros(self._agreed(_TRAINING, None), self.device), further())
        if self.layout.pipeline > 1:
            sum_tied_gradients(self.parameters, self.groups)
        if self.groups.tensor is not None:
            reduce_partial_gradients(self.parameters, "tensor", self.groups.tensor)
        self.buffers.share()
        return total.wait()

    def _start_adding(self, sums: SumTable, further: Mapping[str, Number | Sequence[Number]]) -> SumTable:
        """Start the all-reduce of the loss ``sums`` and the ``further`` sums."""
        # 0 x NaN is NaN, so a NaN on any rank reaches all ranks.
        own = SumTable(sums.shapes, sums.vector * self.place.owns_loss)
        return own.joined(SumTable.pack(further, self.device)).start_adding()

    def _agreed(self, use: str, terms: LossTerms | None) -> Shapes:
        """Return the names and shapes of the loss sums. The first call for each ``use`` is a collective call.

        ``terms`` is a loss of this rank, or None if the loss is on another pipeline stage.
        """
        if use not in self._shapes:
            self._shapes[use] = agreed_shapes(None if terms is None else terms.table().shapes, self.groups.gather)
        return self._shapes[use]

    def evaluate(self, batches: Iterable[tuple[Any, bool]], objective: Objective) -> SumTable:
        """Return the sums of ``batches`` over all ranks, without gradients.

        Every rank must pass the same number of batches, each with a flag whether it counts.
        """
        return self._evaluate(batches, objective, _EVALUATION)

    def mean_loss(self, batches: Iterable[tuple[Any, bool]], objective: Objective) -> Tensor:
        """Return the mean loss of ``batches`` over all ranks, without gradients, on the device. See ``evaluate``."""
        sums = self._evaluate(batches, objective, _MEAN)
        return sums["loss_sum"] / sums["weight"].clamp(min=1)

    @torch.no_grad()
    def _evaluate(self, batches: Iterable[tuple[Any, bool]], objective: Objective, use: str) -> SumTable:
        sums: SumTable | None = None
        self._set_scales()
        with evaluating(self.modules):
            for batch, counts in batches:
                terms = self.runner.predict(self._of_this_rank(batch, objective), objective)
                terms = None if terms is None else terms._replace(counts={})
                shapes = self._agreed(use, terms)
                sums = sums or SumTable.zeros(shapes, self.device)
                if terms is not None:
                    check_names(terms, shapes)
                    terms = terms if counts else terms.zeroed()
                    sums.vector += terms.table().vector * self.place.owns_loss
        total = (sums or SumTable.zeros(LOSS_ALONE, self.device)).start_adding().wait()
        self.reshard()
        return total

    @torch.no_grad()
    def predict(self, batches: Iterable[Any], objective: Objective) -> None:
        """Run the forward on ``batches``. ``objective`` collects the results.

        Every rank must pass the same number of batches.
        """
        self._set_scales()
        with evaluating(self.modules):
            for batch in batches:
                self.runner.predict(self._of_this_rank(batch, objective), objective)
        self.reshard()

    def generate(self, prompts: Sequence[Sequence[int]], limits: Sequence[int], how: Decoding) -> list[list[int]]:
        """Return the tokens that follow each of ``prompts``; see ``token_generation.generate``. This is a collective
        call."""
        self._set_scales()
        return generate(self, prompts, limits, how)

    def sum_squares(self) -> Tensor:
        """Return the sum of squares of the full reduced gradient (``.grad``).

        The result is an fp64 scalar, bitwise equal on all ranks.
        """
        return global_sum_of_squares(self._by_copies, self.layout, self.device)

    def reshard(self) -> None:
        """Free parameters that a forward without a backward left gathered."""
        self.runner.reshard()

    def _set_scales(self, phase: str | None = None) -> None:
        """Update the scales of weights that are all-gathered in float8 from their current values."""
        if self._gather is None:
            return
        if phase is not None:
            self.phases.enter(phase)
        self._gather.set_scales()

    def _of_this_rank(self, batch: Any, objective: Objective) -> Any:
        """Return ``batch`` with this rank's shard of each sequence."""
        parts, index = self.layout.context, self.place.context
        if parts == 1:
            return batch
        return objective.slice_sequence(batch, lambda tensor, dim: head_tail(tensor, dim, parts, index))
