"""Data parallelism: one process, replicas, shards, replicas of shards. Gradients are sums over ranks."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from serried.configs.schema import ParallelSection
from serried.parallel.mesh import Layout, build_mesh
from serried.parallel.phases import BACKWARD, FORWARD, Phases
from serried.parallel.plan import LossTerms, ParallelPlan
from serried.parallel.unit_waits import UnitWaits

LossFunction = Callable[[nn.Module, Any], LossTerms]


class Totals(NamedTuple):
    """Sums over the global batch and all ranks, fp64 scalars on the device."""

    loss_sum: Tensor
    weight: Tensor
    votes: Tensor
    by_source: Tensor
    """Valid targets of each source of a mixture, [sources]; empty: there is one source."""


class Single:
    """The whole model on one process; also the base of the others, which change when and how gradients are summed."""

    def __init__(
        self,
        model: nn.Module,
        layout: Layout,
        device: torch.device,
        phases: Phases,
        autocast_dtype: torch.dtype | None,
    ) -> None:
        self.module = model
        """The model itself: parameters by name, as this rank holds them."""
        self.model: nn.Module = model
        """What to call for a loss."""
        self.gradient_divisor = 1
        """``.grad`` times this is the sum over ranks."""
        self.layout = layout
        self.device = device
        self.phases = phases
        """Told of what is computed."""
        self._autocast_dtype = autocast_dtype

    def forward_backward(
        self, batches: Sequence[Any], loss: LossFunction, scale: float | Tensor, vote: Callable[[], float]
    ) -> Totals:
        """Backward through ``scale`` x the summed loss of all ``batches`` of all ranks.

        ``.grad`` is that sum's gradient over ``gradient_divisor``. Ranks exchange gradients once, after the last
        micro-batch, unless asked to do so after each; the totals travel while the last backward runs. This rank's
        ``vote`` travels with them: asked for at the last moment, it costs no exchange of its own.
        """
        assert batches, "a step has a micro-batch at least"
        travelling = None
        for index, batch in enumerate(batches):
            is_last = index == len(batches) - 1
            with self._gradient_exchange(is_last):
                self.phases.enter(FORWARD)
                with self.autocast():
                    terms = loss(self.model, batch)
                self.phases.enter(BACKWARD)
                mine = terms.totals()
                if index == 0:  # the vote comes last
                    totals = mine.new_zeros(len(mine) + 1)
                totals[:-1] += mine
                if is_last and (my_vote := vote()):
                    totals[-1] = my_vote
                if is_last and dist.is_initialized():
                    travelling = dist.all_reduce(totals, async_op=True)
                (terms.loss_sum * scale).backward()
        if travelling is not None:
            self.phases.wait()
            travelling.wait()
        return Totals(totals[0], totals[1], totals[-1], totals[2:-1])

    @torch.no_grad()
    def evaluate(self, batches: Iterable[Any], loss: LossFunction) -> LossTerms:
        """Totals of ``batches`` over all ranks, no gradients. Every rank must bring the same number of batches."""
        totals = torch.zeros(2, dtype=torch.float64, device=self.device)
        for batch in batches:
            with self.autocast():
                terms = loss(self.model, batch)
            totals += torch.stack((terms.loss_sum.double(), terms.weight.double()))
        if dist.is_initialized():
            dist.all_reduce(totals)
        return LossTerms(totals[0], totals[1])

    def autocast(self) -> AbstractContextManager[Any]:
        """The context forwards run in."""
        if self._autocast_dtype is None:
            return nullcontext()
        return torch.autocast(self.device.type, self._autocast_dtype)

    def reshard(self) -> None:
        """Free whatever a forward without backward left gathered."""

    def sum_squares(self, squares: Tensor) -> Tensor:
        """This rank's sum of squares of the reduced gradients -> that of the whole gradient, equal bits on all ranks.

        Whole gradients came out of an all-reduce, so all ranks have the same sum already.
        """
        return squares

    def _gradient_exchange(self, is_last: bool) -> AbstractContextManager[Any]:
        del is_last
        return nullcontext()


class Replicated(Single):
    """DistributedDataParallel: every rank holds the model, gradients are summed in buckets while backward runs."""

    def __init__(
        self,
        model: nn.Module,
        layout: Layout,
        device: torch.device,
        phases: Phases,
        autocast_dtype: torch.dtype | None,
    ) -> None:
        super().__init__(model, layout, device, phases, autocast_dtype)
        # One parameter vector on every rank from the start: initialize() gave every rank the same bits.
        self.model = self._replicas = DistributedDataParallel(
            model,
            device_ids=[device] if device.type == "cuda" else None,
            init_sync=False,
            gradient_as_bucket_view=True,
        )
        # DDP averages. Its own sum would take a communication hook in Python, and the fp16 overflow of a loss scaled up
        # against the average would depend on the number of ranks; so the average stays, and the optimizer undoes it.
        self.gradient_divisor = layout.replicate
        self._last_gradients: list[Tensor] = [parameter for parameter in model.parameters() if parameter.requires_grad]
        """Of these, that of one comes last: of all, until a backward has shown which. The graph sets their order."""

    def _gradient_exchange(self, is_last: bool) -> AbstractContextManager[Any]:
        if not is_last:
            return self._replicas.no_sync()
        if not self.phases.are_marked:
            return nullcontext()
        return self._wait_behind_backward()

    @contextmanager
    def _wait_behind_backward(self) -> Iterator[None]:
        """Once this backward has computed its last gradient, the rest of it is waiting for other ranks."""
        wait = self.phases.wait_after(self._last_gradients)
        yield
        wait.remove()
        if wait.last is not None:
            self._last_gradients = [wait.last]


class Sharded(Single):
    """FSDP2 over the mesh (replicate, shard): each rank holds 1/shard of everything, replicas hold the same shards."""

    def __init__(
        self,
        model: nn.Module,
        layout: Layout,
        device: torch.device,
        phases: Phases,
        plan: ParallelPlan,
        low_dtype: torch.dtype | None,
        section: ParallelSection,
    ) -> None:
        mesh = build_mesh(layout, device.type)
        policy = MixedPrecisionPolicy(
            param_dtype=low_dtype,
            reduce_dtype=torch.float32 if low_dtype else None,
            cast_forward_inputs=False,  # the model keeps its rotary tables in fp32
        )
        options: dict[str, Any] = {"mesh": mesh if layout.replicate > 1 else mesh["shard"], "mp_policy": policy}
        reshard = section.reshard_after_forward
        for unit in plan.units:
            modules = [model.get_submodule(name) for name in unit]
            fully_shard(modules, reshard_after_forward=reshard and unit is not plan.units[-1], **options)
        fully_shard(model, reshard_after_forward=False, **options)
        self._units = [module for module in model.modules() if isinstance(module, FSDPModule)]
        for unit_module in self._units:
            # Sums, not averages. Both calls on every unit: they are not recursive, and Gloo has no pre-multiplied sum
            # (https://github.com/pytorch/pytorch/blob/v2.11.0/torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py).
            unit_module.set_force_sum_reduction_for_comms(True)
            unit_module.set_gradient_divide_factor(1.0)
        super().__init__(model, layout, device, phases, autocast_dtype=None)
        self._root = self._units[0]
        self._waits = UnitWaits(self._units, self.phases)
        self._sync_every_micro_batch = section.sync_every_micro_batch
        self._keep_gathered = not reshard

    def evaluate(self, batches: Iterable[Any], loss: LossFunction) -> LossTerms:
        totals = super().evaluate(batches, loss)
        self.reshard()
        return totals

    def reshard(self) -> None:
        # A forward without backward leaves some units gathered, and the model showing whole parameters for its shards.
        for unit in self._units:
            unit.reshard()

    def sum_squares(self, squares: Tensor) -> Tensor:
        # All holders of a copy contribute, so that a bad number on any rank reaches all.
        self.phases.begin_wait()
        dist.all_reduce(squares)
        self.phases.end_wait()
        return squares / self.layout.replicate

    @contextmanager
    def _gradient_exchange(self, is_last: bool) -> Iterator[None]:
        self._waits.reduces = is_last or self._sync_every_micro_batch
        self._root.set_is_last_backward(is_last)
        self._root.set_requires_gradient_sync(self._waits.reduces)
        # ZeRO-2 holds gathered parameters from forward to backward anyway: keep them for the next micro-batch too.
        self._root.set_reshard_after_backward(is_last or not self._keep_gathered)
        yield
        self._waits.forget()
