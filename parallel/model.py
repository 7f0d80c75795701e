"""The model as the trainer sees it, whatever its layout: forward, backward, totals over all ranks."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from serried.configs.errors import UserError
from serried.parallel.axes.context import head_tail, holder_of
from serried.parallel.axes.expert import Loads
from serried.parallel.layout.local_shards import HeldTensor, evaluating, held_parameters, local
from serried.parallel.layout.mesh import MODEL_AXES
from serried.parallel.layout.process_groups import Groups, gather_plain
from serried.parallel.layout.shard_specs import ShardSpec
from serried.parallel.plan import LossTerms, Objective
from serried.parallel.precision.float8_all_gather import Float8Gather
from serried.parallel.random_seed import seed_random_numbers
from serried.parallel.step_phases import BACKWARD, FORWARD, OPTIMIZER, Phases
from serried.parallel.sync.gradient_norm import global_sum_of_squares, reduce_partial_gradients, sum_tied_gradients
from serried.parallel.sync.gradient_sync import GradientSync

_GPU_LENGTHS = 128
"""Of which the length of generated text is a multiple on a GPU, with what pads it."""


class Totals(NamedTuple):
    """Sums over the global batch and all ranks, fp64 scalars on the device."""

    loss_sum: Tensor
    weight: Tensor
    votes: Tensor
    metrics: Tensor
    """Sum and weight of each named metric, [2 x metrics]; ``DistributedModel.metric_names`` has the names."""
    by_source: Tensor
    """Valid targets of each source of a mixture, [sources]; empty: there is one source."""
    loads: Tensor
    """Tokens sent to each expert of each layer, one layer after the other."""


Ended = Callable[[int, LossTerms], Tensor]
"""Number and loss of a micro-batch -> what its backward starts from."""


class Runner(Protocol):
    """Runs the part of the model that is on this rank."""

    divisor: int
    """``.grad`` times this is the sum over ranks."""
    phases: Phases
    autocast: Callable[[], AbstractContextManager[Any]]
    """The context forwards run in."""

    def train(self, batches: Sequence[Any], objective: Objective, seeds: Sequence[int], ended: Ended) -> None:
        """Forward and backward. ``seeds``, one per micro-batch or none, are those of torch's random numbers."""

    def predict(self, batch: Any, objective: Objective) -> LossTerms | None:
        """Forward only; None if another rank has the loss."""

    def logits(self, ids: Tensor, index: int) -> Tensor:
        """Return those of token ``index`` of ``ids`` [B, S], on all ranks of a pipeline: [B, 1, V]."""

    def reshard(self) -> None:
        """Free what a forward without backward left gathered."""


class Direct:
    """A runner: the whole model on this rank, each micro-batch forward and then backward."""

    def __init__(self, sync: GradientSync, phases: Phases, autocast: Callable[[], AbstractContextManager[Any]]) -> None:
        self._sync, self.phases, self.autocast = sync, phases, autocast
        self.divisor = sync.divisor
        self._is_first = True

    def train(self, batches: Sequence[Any], objective: Objective, seeds: Sequence[int], ended: Ended) -> None:
        for index, batch in enumerate(batches):
            with self._sync.during(index == len(batches) - 1):
                self.phases.enter(FORWARD)
                if seeds:
                    seed_random_numbers(seeds[index])
                with self.autocast():
                    terms = self._sync.root(objective.loss, batch)
                if self._is_first:
                    refuse_own_backward(self._sync.root)
                    self._is_first = False
                self.phases.enter(BACKWARD)
                loss = ended(index, terms)
                if not loss.requires_grad:
                    raise UserError(
                        "loss() returned a loss_sum without a gradient; compute it with the model's output, without "
                        "torch.no_grad(), detach() or item()"
                    )
                loss.backward()

    def predict(self, batch: Any, objective: Objective) -> LossTerms:
        with self.autocast():
            return self._sync.root(objective.loss, batch)

    @property
    def model(self) -> Any:
        """The module to call; under FSDP2 it has only shards of its parameters."""
        return partial(self._sync.root, nn.Module.__call__)

    def logits(self, ids: Tensor, index: int) -> Tensor:
        return self.model(ids)[:, index : index + 1].contiguous()

    def reshard(self) -> None:
        """Free what a forward without backward left gathered."""
        self._sync.reshard()


class DistributedModel:
    """A model on this rank: a runner, and who holds what.

    ``modules`` hold the parameters: the model, or this rank's stages of it. Call ``model`` in their place.
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
        """``specs``: of the whole model; ``buffers``: names of those that belong to the model's state, each with
        whether every stage has a copy."""
        layout = groups.layout
        self.modules, self.specs, self.layout, self.device = modules, specs, layout, device
        self.groups, self.runner = groups, runner
        self.phases, self.autocast, self.gradient_divisor = runner.phases, runner.autocast, runner.divisor
        rank = dist.get_rank() if dist.is_initialized() else 0
        self.place = layout.coordinates(rank)
        self.parameters: list[HeldTensor] = held_parameters(modules, specs, layout, rank)
        copies = sorted({each.copies(layout) for each in specs.values()})
        self._by_copies: dict[int, list[Tensor]] = {each: [] for each in copies}
        for held in self.parameters:
            self._by_copies[held.spec.copies(layout)].append(held.tensor)
        self._loads, self._gather = loads, gather
        self.buffer_names = buffers
        """Of the model's state, on all stages."""
        self.metric_names: tuple[str, ...] | None = None
        """Names of the metrics that the loss returns in training; None before the first step."""
        self._sources = 0
        self.agree_on_sums = same_sums_everywhere
        """Returns the sums that all ranks add up, from this one's. A plan, which has no other ranks, replaces it."""
        self._evaluation_names: tuple[str, ...] | None = None

    @property
    def buffers(self) -> list[HeldTensor]:
        """Buffers of the model's state, which every rank holds whole."""
        here = (self.place.pipeline,)
        everywhere = tuple(map(self.layout.pipeline_of, range(self.layout.stages)))
        found = [dict(module.named_buffers()) for module in self.modules]
        return [
            HeldTensor.whole(name, buffers[name], everywhere if is_shared else here)
            for name, is_shared in self.buffer_names.items()
            for buffers in found
            if name in buffers
        ]

    @property
    def module(self) -> nn.Module:
        """The model, or the first of this rank's stages of it."""
        return self.modules[0]

    def held_like(self, parameter: HeldTensor, value: Tensor) -> HeldTensor:
        """A tensor of the optimizer that belongs to ``parameter``: divided as that is, or whole."""
        if value.shape == parameter.tensor.shape:
            return parameter._replace(tensor=value)
        if len(value.shape) == len(parameter.spec.shape):
            sizes = zip(value.shape, parameter.tensor.shape, parameter.spec.shape, strict=True)
            # Tensor ranks divide what has fewer columns as they do the parameter.
            whole = (of if each == ours else each * of // ours for each, ours, of in sizes)
            spec = replace(parameter.spec, shape=tuple(whole))
            box = spec.box(self.layout, self.place)
            if tuple(local(value).shape) == box.sizes:  # such as running means of rows, or codes of fewer bits
                return HeldTensor(parameter.name, value, spec, box)
        assert local(value) is value, f"{parameter.name}: state of {list(value.shape)} is divided in another way"
        return HeldTensor.whole(parameter.name, value, parameter.spec.holders)

    @property
    def model(self) -> Any:
        """What to call in place of the module, for its forward, until weights change. Several ranks must get and call
        it together."""
        self._set_scales()
        if not self.layout.is_sharded:
            return self.module
        if self.layout.size(MODEL_AXES) > 1:
            return self._last_logits
        assert isinstance(self.runner, Direct)
        return self.runner.model

    def _last_logits(self, ids: Tensor) -> Tensor:
        """Return the logits [B, 1, V] of the last of ``ids`` [B, S], of which each rank computes a part."""
        parts, length = self.layout.context, ids.shape[1]
        multiple = 2 * parts * self.layout.tensor
        if parts > 1 and ids.device.type == "cuda":
            # There attention is FlexAttention, which is compiled for each length, and torch gives up after eight.
            multiple = math.lcm(multiple, _GPU_LENGTHS)
        padding = -length % multiple  # at the end, where no token attends to it
        ids = nn.functional.pad(ids, (0, padding))
        rank, index = holder_of(length - 1, length + padding, parts)
        mine = head_tail(ids, 1, parts, self.place.context)
        logits = self.runner.logits(mine, index)
        if self.groups.context is not None:
            dist.broadcast(logits, group=self.groups.context, group_src=rank)
        return logits

    def forward_backward(
        self,
        batches: Sequence[Any],
        objective: Objective,
        scale: float | Tensor,
        vote: Callable[[], float],
        seeds: Sequence[int] = (),
    ) -> Totals:
        """Backward through ``scale`` x the summed loss of all ``batches`` of all ranks.

        ``.grad`` is that sum's gradient over ``gradient_divisor``. Ranks exchange gradients once, after the last
        micro-batch, unless asked to do so after each; the totals travel while the last backward runs. This rank's
        ``vote`` travels with them: asked for at the last moment, it costs no exchange of its own.
        """
        assert batches, "a step has a micro-batch at least"
        # The ranks of a pipeline are apart until its schedule is through.
        early, names = self.layout.pipeline == 1, self.metric_names
        sums: Tensor | None = None
        seen: LossTerms | None = None
        totals, travelling = torch.zeros(0, dtype=torch.float64, device=self.device), None

        def travel() -> None:
            nonlocal totals, travelling
            numbers = 2 + 2 * len(self.metric_names or ()) + self._sources
            totals = totals.new_zeros(numbers + sum(self.experts) + 1)  # the vote comes last
            totals[numbers:-1] = self._loads.take(self.device)
            if sums is not None:
                totals[:numbers] = sums * self.place.owns_loss  # 0 x NaN is NaN: a bad number on any rank reaches all
            if my_vote := vote():
                totals[-1] = my_vote
            if dist.is_initialized():
                travelling = dist.all_reduce(totals, async_op=True)

        def ended(index: int, terms: LossTerms) -> Tensor:
            nonlocal sums, names, seen
            names, seen = same_names(names, terms), terms
            if early and self.metric_names is None:
                self.metric_names, self._sources = self.agree_on_sums(terms)
            mine = terms.totals()
            sums = mine if sums is None else sums + mine
            if early and index == len(batches) - 1:
                travel()
            return terms.loss_sum * scale

        self._loads.take(self.device)  # what was counted outside of steps, as while text was generated
        mine = [self._of_this_rank(batch, objective) for batch in batches]
        self._set_scales(OPTIMIZER)
        self.runner.train(mine, objective, seeds, ended)
        if not early:
            if self.metric_names is None:
                self.metric_names, self._sources = self.agree_on_sums(seen)
            travel()
            sum_tied_gradients(self.parameters, self.groups)
        if self.groups.tensor is not None:
            reduce_partial_gradients(self.parameters, "tensor", self.groups.tensor)
        self._share_buffers()
        if travelling is not None:
            travelling.wait()
        parts = totals.split([1, 1, 2 * len(self.metric_names or ()), self._sources, sum(self.experts), 1])
        loss_sum, weight, metrics, by_source, loads, votes = parts
        return Totals(loss_sum[0], weight[0], votes[0], metrics, by_source, loads)

    @torch.no_grad()
    def evaluate(self, batches: Iterable[tuple[Any, bool]], objective: Objective) -> LossTerms:
        """Totals of ``batches`` over all ranks, no gradients. Every rank must bring the same number of batches, each
        with whether it counts."""
        totals = torch.zeros(2, dtype=torch.float64, device=self.device)
        names: tuple[str, ...] | None = None
        self._set_scales()
        with evaluating(self.modules):
            for batch, counts in batches:
                terms = self.runner.predict(self._of_this_rank(batch, objective), objective)
                if self._evaluation_names is None:
                    if terms is not None:
                        same_names(None, terms)
                    self._evaluation_names, _ = self.agree_on_sums(terms)
                if names is None:
                    totals = totals.new_zeros(2 + 2 * len(self._evaluation_names))
                names = self._evaluation_names if terms is None else same_names(names, terms)
                if terms is not None:
                    terms = terms if counts else terms.zeroed()
                    totals += terms.totals()[: len(totals)] * self.place.owns_loss
        if dist.is_initialized():
            dist.all_reduce(totals)
        self.reshard()
        pairs = totals[2:].view(-1, 2).unbind()
        return LossTerms(
            totals[0], totals[1], {name: (pair[0], pair[1]) for name, pair in zip(names or (), pairs, strict=True)}
        )

    @torch.no_grad()
    def predict(self, batches: Iterable[Any], objective: Objective) -> None:
        """Run ``batches`` forward, for what ``objective`` keeps of them. Every rank must bring the same number."""
        self._set_scales()
        with evaluating(self.modules):
            for batch in batches:
                self.runner.predict(self._of_this_rank(batch, objective), objective)
        self.reshard()

    def sum_squares(self) -> Tensor:
        """Sum of squares of the whole reduced gradient (``.grad``), fp64 scalar, equal bits on all ranks."""
        return global_sum_of_squares(self._by_copies, self.layout, self.device)

    @property
    def experts(self) -> list[int]:
        """Number of experts of each mixture of the whole model, in order."""
        return self._loads.experts

    def after_step(self, loads: Tensor, accepted: Tensor) -> None:
        """Let routers balance ``Totals.loads`` after a step, if it was ``accepted``, a flag on the device."""
        self._loads.balance(loads, accepted)

    def reshard(self) -> None:
        """Free what a forward without backward left gathered."""
        self.runner.reshard()

    def _set_scales(self, phase: str | None = None) -> None:
        """Let weights that are gathered in float8 have the scales of what they are now."""
        if self._gather is None:
            return
        if phase is not None:
            self.phases.enter(phase)
        self._gather.set_scales()

    def _of_this_rank(self, batch: Any, objective: Objective) -> Any:
        """Return ``batch`` with this rank's part of each sequence."""
        parts, index = self.layout.context, self.place.context
        if parts == 1:
            return batch
        return objective.slice_sequence(batch, lambda tensor, dim: head_tail(tensor, dim, parts, index))

    @torch.no_grad()
    def _share_buffers(self) -> None:
        """Give every rank of a stage its first one's buffers (statistics of its samples, as of BatchNorm), as in a
        checkpoint: those of a type in one broadcast, as a CNN has hundreds."""
        if self.buffer_names and self.layout.world > self.layout.pipeline:
            group = self.groups.stage
            by_type: dict[torch.dtype, list[Tensor]] = {}
            for each in self.buffers:
                if not any(each.tensor is buffer for buffer in self._loads.buffers):  # those are equal on all ranks
                    by_type.setdefault(each.tensor.dtype, []).append(each.tensor)
            for buffers in by_type.values():
                flat = torch.cat([buffer.flatten() for buffer in buffers])
                dist.broadcast(flat, group=group, group_src=0)
                for buffer, values in zip(buffers, flat.split([each.numel() for each in buffers]), strict=True):
                    buffer.copy_(values.view_as(buffer))


def refuse_own_backward(root: nn.Module) -> None:
    """Raise ``UserError`` if the first loss of a run left gradients, as a task with an optimizer of its own does."""
    if any(parameter.grad is not None for parameter in root.parameters()):
        raise UserError(
            "loss() called backward(); return all losses added up in serried.LossTerms: backward and the update of "
            "the run's one optimizer follow"
        )


def same_names(names: tuple[str, ...] | None, terms: LossTerms) -> tuple[str, ...]:
    """Return the names of the metrics in ``terms``, which must be ``names`` unless that is None.

    Raises:
        UserError: they differ, so different quantities would be added; or ``terms`` has another form.
    """
    returned = terms.loss_sum if isinstance(terms, LossTerms) else terms
    if not isinstance(terms, LossTerms) or getattr(returned, "shape", None) != ():
        shape = f" of shape {[*returned.shape]}" if isinstance(returned, Tensor) else ""
        raise UserError(
            "loss() must return serried.LossTerms(loss_sum, weight), sums over the batch and not means, "
            "with loss_sum a scalar tensor; it returned "
            f"{'a loss_sum of type ' * isinstance(terms, LossTerms)}{type(returned).__name__}{shape}"
        )
    if isinstance(terms.weight, Tensor) and terms.weight.dim():
        raise UserError(
            f"loss() returned a weight of shape {[*terms.weight.shape]}; return one number, such as mask.sum()"
        )
    if isinstance(terms.weight, int | float) and terms.weight < 0:
        raise UserError(f"loss() returned the weight {terms.weight}; return how much the batch counts, such as len(x)")
    for name, metric in terms.metrics.items():
        if not isinstance(name, str):
            raise UserError(f"loss() returned a metric with the name {name!r}; use text")
        if not isinstance(metric, tuple | list) or len(metric) != 2:
            raise UserError(f"loss() returned the metric {name} as {metric}; return it as (sum, weight), not as a mean")
        for number in metric:
            if isinstance(number, Tensor) and number.dim():
                raise UserError(
                    f"loss() returned the metric {name} with a part of shape {[*number.shape]}; return two numbers"
                )
    found = tuple(terms.metrics)
    if names is not None and found != names:
        raise UserError(
            f"loss() returned the metrics {', '.join(found) or '(none)'} for one batch and "
            f"{', '.join(names) or '(none)'} for another; return the same names from every batch, with (0, 0) for none"
        )
    return found


def own_sums(terms: LossTerms | None) -> tuple[tuple[str, ...], int]:
    """Return the metrics in ``terms``, and the number of sources of a mixture; nothing, if there are no terms."""
    if terms is None:
        return (), 0
    return tuple(terms.metrics), 0 if terms.by_source is None else len(terms.by_source)


def same_sums_everywhere(terms: LossTerms | None) -> tuple[tuple[str, ...], int]:
    """Return the metrics that all ranks are about to add up, and the number of sources of a mixture.

    A collective, on the host. ``terms``: of a batch of this rank; None on those that a pipeline gives no loss.

    Raises:
        UserError: they are not the same: ``loss`` returned other names on another rank.
    """
    mine = own_sums(terms)
    found = gather_plain(None if terms is None else mine)
    known = {rank: (tuple(each[0]), each[1]) for rank, each in enumerate(found) if each is not None}
    if terms is not None and (other := [rank for rank, each in known.items() if each != mine]):
        raise UserError(
            f"loss() returned the metrics {', '.join(terms.metrics) or '(none)'} on rank {dist.get_rank()}, and rank "
            f"{other[0]} others; return the same names, in the same order, from every batch, with (0, 0) for none"
        )
    return next(iter(known.values()))
