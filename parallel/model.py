"""The model as the trainer sees it, whatever its layout: forward, backward, totals over all ranks."""

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from serried.configs.errors import UserError
from serried.parallel.data import GradientSync
from serried.parallel.gradient import global_sum_of_squares, reduce_partial_gradients
from serried.parallel.groups import Groups
from serried.parallel.held import HeldTensor, held_parameters, local
from serried.parallel.mesh import Layout
from serried.parallel.phases import BACKWARD, FORWARD, Phases
from serried.parallel.plan import LossTerms, Objective
from serried.parallel.shard_specs import Box, ShardSpec


class Totals(NamedTuple):
    """Sums over the global batch and all ranks, fp64 scalars on the device."""

    loss_sum: Tensor
    weight: Tensor
    votes: Tensor
    metrics: Tensor
    """Sum and weight of each named metric, [2 x metrics]; ``DistributedModel.metric_names`` has the names."""
    by_source: Tensor
    """Valid targets of each source of a mixture, [sources]; empty: there is one source."""


class Direct:
    """A runner: the whole model on this rank, each micro-batch forward and then backward."""

    def __init__(self, sync: GradientSync, phases: Phases, autocast: Callable[[], AbstractContextManager[Any]]) -> None:
        self._sync, self._phases, self._autocast = sync, phases, autocast

    def train(
        self,
        batches: Sequence[Any],
        objective: Objective,
        seeds: Sequence[int],
        ended: Callable[[int, LossTerms], Tensor],
    ) -> None:
        """Forward and backward. ``ended(index, terms)`` turns the loss of a micro-batch into what its backward starts
        from; ``seeds``, one per micro-batch or none, are those of torch's random numbers."""
        for index, batch in enumerate(batches):
            with self._sync.during(index == len(batches) - 1):
                self._phases.enter(FORWARD)
                if seeds:
                    torch.manual_seed(seeds[index])
                with self._autocast():
                    terms = self._sync.root(objective.loss, batch)
                self._phases.enter(BACKWARD)
                ended(index, terms).backward()

    def predict(self, batch: Any, objective: Objective) -> LossTerms:
        """Forward only."""
        with self._autocast():
            terms: LossTerms = self._sync.root(objective.loss, batch)
            return terms


class DistributedModel:
    """A model on this rank: a runner, a gradient synchronization, and who holds what.

    ``module`` holds the parameters. Call ``model`` in its place: under FSDP2 it has only shards of them.
    """

    def __init__(
        self,
        module: nn.Module,
        sync: GradientSync,
        specs: Mapping[str, ShardSpec],
        layout: Layout,
        device: torch.device,
        *,
        groups: Groups,
        phases: Phases,
        autocast_dtype: torch.dtype | None,
        buffers: Sequence[str] = (),
    ) -> None:
        """``specs``: of the whole model; ``buffers`` names those that belong to the model's state."""
        self.module, self.specs, self.layout, self.device = module, specs, layout, device
        self.groups, self.phases = groups, phases
        rank = dist.get_rank() if dist.is_initialized() else 0
        self.place = layout.coordinates(rank)
        self.parameters: list[HeldTensor] = held_parameters([module], specs, layout, rank)
        self.gradient_divisor = sync.divisor
        """``.grad`` times this is the sum over ranks."""
        self._sync, self.buffer_names, self._autocast_dtype = sync, buffers, autocast_dtype
        self._runner = Direct(sync, phases, self.autocast)
        self.metric_names: tuple[str, ...] | None = None
        """Names of the metrics that the loss returns in training; None before the first step."""
        self._has_evaluated = False

    @property
    def buffers(self) -> list[HeldTensor]:
        """Buffers of the model's state, which every rank holds whole."""
        spec = ShardSpec("", (), holders=(self.place.pipeline,))
        return [_whole(name, self.module.get_buffer(name), spec) for name in self.buffer_names]

    def held_like(self, parameter: HeldTensor, value: Tensor) -> HeldTensor:
        """A tensor of the optimizer that belongs to ``parameter``: divided as that is, or whole."""
        if value.shape == parameter.tensor.shape:
            return parameter._replace(tensor=value)
        if len(value.shape) == len(parameter.spec.shape):
            spec = replace(parameter.spec, shape=tuple(value.shape))
            box = spec.box(self.layout, self.place)
            if tuple(local(value).shape) == box.sizes:  # such as running means of rows
                return HeldTensor(parameter.name, value, spec, box)
        assert local(value) is value, f"{parameter.name}: state of {list(value.shape)} is divided in another way"
        return _whole(parameter.name, value, parameter.spec)

    @property
    def model(self) -> Any:
        """What to call in place of the module, for its forward. Several ranks must call it together."""
        return partial(self._sync.root, nn.Module.__call__) if self.layout.is_sharded else self.module

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
        totals = torch.empty(0)
        travelling: dist.Work | None = None

        def ended(index: int, terms: LossTerms) -> Tensor:
            nonlocal totals, travelling
            if self.metric_names is None:
                same_sums_everywhere(terms)
            self.metric_names = same_names(self.metric_names, terms)
            mine, is_last = terms.totals(), index == len(batches) - 1
            if index == 0:  # the vote comes last
                totals = mine.new_zeros(len(mine) + 1)
            totals[:-1] += mine * self.place.owns_loss  # 0 x NaN is NaN: a bad number on any rank reaches all
            if is_last and (my_vote := vote()):
                totals[-1] = my_vote
            if is_last and dist.is_initialized():
                travelling = dist.all_reduce(totals, async_op=True)
            return terms.loss_sum * scale

        mine = [self._of_this_rank(batch, objective) for batch in batches]
        self._runner.train(mine, objective, seeds, ended)
        if self.groups.tensor is not None:
            reduce_partial_gradients(self.parameters, "tensor", self.groups.tensor)
        self._share_buffers()
        if travelling is not None:
            travelling.wait()
        metrics = 2 + 2 * len(self.metric_names or ())
        return Totals(totals[0], totals[1], totals[-1], totals[2:metrics], totals[metrics:-1])

    @torch.no_grad()
    def evaluate(self, batches: Iterable[tuple[Any, bool]], objective: Objective) -> LossTerms:
        """Totals of ``batches`` over all ranks, no gradients. Every rank must bring the same number of batches, each
        with whether it counts."""
        totals, names = torch.zeros(2, dtype=torch.float64, device=self.device), None
        with _evaluating(self.module):
            for batch, counts in batches:
                terms = self._runner.predict(self._of_this_rank(batch, objective), objective)
                terms = terms if counts else terms.zeroed()
                if (is_first := names is None) and not self._has_evaluated:
                    same_sums_everywhere(terms)
                    self._has_evaluated = True
                names = same_names(names, terms)
                mine = terms.totals()[: 2 + 2 * len(names)] * self.place.owns_loss
                totals = mine if is_first else totals + mine
        if dist.is_initialized():
            dist.all_reduce(totals)
        self.reshard()
        pairs = totals[2:].view(-1, 2).unbind()
        return LossTerms(
            totals[0], totals[1], {name: (pair[0], pair[1]) for name, pair in zip(names or (), pairs, strict=True)}
        )

    def sum_squares(self) -> Tensor:
        """Sum of squares of the whole reduced gradient (``.grad``), fp64 scalar, equal bits on all ranks."""
        return global_sum_of_squares(self.parameters, self.specs, self.layout, self.device)

    def autocast(self) -> AbstractContextManager[Any]:
        """The context forwards run in."""
        if self._autocast_dtype is None:
            return nullcontext()
        return torch.autocast(self.device.type, self._autocast_dtype)

    def reshard(self) -> None:
        """Free what a forward without backward left gathered."""
        self._sync.reshard()

    def _of_this_rank(self, batch: Any, objective: Objective) -> Any:
        """Return ``batch`` with this rank's part of each sequence."""
        del objective  # the context axis will ask it
        return batch

    @torch.no_grad()
    def _share_buffers(self) -> None:
        """Give every rank rank 0's buffers (statistics of its samples, as of BatchNorm): those a checkpoint holds."""
        if self.buffer_names and dist.is_initialized():
            for each in self.buffers:
                dist.broadcast(each.tensor, 0)


def same_names(names: tuple[str, ...] | None, terms: LossTerms) -> tuple[str, ...]:
    """Return the names of the metrics in ``terms``, which must be ``names`` unless that is None.

    Raises:
        UserError: they differ, so that sums of different things would be added; or ``terms`` are none.
    """
    if not isinstance(terms, LossTerms) or getattr(terms.loss_sum, "shape", None) != ():
        raise UserError("loss() must return serried.LossTerms(loss_sum, weight), with loss_sum a scalar tensor")
    found = tuple(terms.metrics)
    if names is not None and found != names:
        raise UserError(
            f"loss() returned the metrics {', '.join(found) or '(none)'} for one batch and "
            f"{', '.join(names) or '(none)'} for another; return the same names from every batch, with (0, 0) for none"
        )
    return found


def same_sums_everywhere(terms: LossTerms) -> None:
    """Check that all ranks are about to add up the same sums. A collective, on the host.

    Raises:
        UserError: they are not: ``loss`` returned other names on another rank.
    """
    if not dist.is_initialized():
        return
    names = [*terms.metrics, f"{0 if terms.by_source is None else len(terms.by_source)} sources"]
    digest = hashlib.blake2b("\n".join(names).encode(), digest_size=7).digest()
    mine = torch.tensor([int.from_bytes(digest, "little")])
    found = [torch.zeros_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(found, mine)
    if other := [rank for rank, each in enumerate(found) if not each.equal(mine)]:
        raise UserError(
            f"loss() returned the metrics {', '.join(terms.metrics) or '(none)'} on rank {dist.get_rank()}, and "
            f"rank {other[0]} others; return the same names, in the same order, from every batch, with (0, 0) for none"
        )


def _whole(name: str, tensor: Tensor, like: ShardSpec) -> HeldTensor:
    """A tensor that all ranks of the stages that hold ``like`` hold whole."""
    shape = tuple(tensor.shape)
    return HeldTensor(name, tensor, ShardSpec(name, shape, (), like.holders), Box((0,) * len(shape), shape))


@contextmanager
def _evaluating(module: nn.Module) -> Iterator[None]:
    """Modules in evaluation mode; afterwards each is in the mode it was in."""
    training = [each for each in module.modules() if each.training]
    module.eval()
    try:
        yield
    finally:
        for each in training:
            each.training = True
