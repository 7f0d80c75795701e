"""Expert parallelism: the experts of a mixture are sharded over ranks, and tokens are sent to their experts and back.

The rest of the model shards samples, sequences and matrices over the ranks of a block. Experts are sharded differently:
each group of ``expert`` consecutive ranks holds all experts, and FSDP2 shards each rank's experts over the ranks of the
other groups. An all-to-all sends tokens to their experts within a group (GShard, https://arxiv.org/abs/2006.16668). No
token is dropped: the routers determine the sizes of the exchange.

A model declares its ``mixtures`` (see ``plan.ParallelPlan``).
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from serried.configs.errors import UserError
from serried.parallel import collectives
from serried.parallel.layout.checks import check_experts
from serried.parallel.layout.mesh import Coordinates, Layout
from serried.parallel.layout.process_groups import Groups
from serried.parallel.layout.shard_specs import ShardSpec, Slice, chunk
from serried.parallel.plan import Dispatch, ParallelPlan
from serried.parallel.sum_table import SumTable


class ExpertAxis:
    """The expert axis."""

    axis = "expert"

    def slices(self, plan: ParallelPlan, layout: Layout, name: str, shape: Sequence[int]) -> tuple[Slice, ...]:
        """Return the slice of stacked experts; () for other parameters."""
        del layout, shape
        return (Slice(0, ("expert",)),) if plan.is_expert(name) else ()

    def is_partial(self, plan: ParallelPlan, layout: Layout, name: str) -> bool:
        """Return False: FSDP2 sums the gradients of experts over all ranks that hold them."""
        del plan, layout, name
        return False

    def apply(self, module: nn.Module, plan: ParallelPlan, layout: Layout, place: Coordinates, groups: Groups) -> None:
        group = groups.expert
        assert group is not None
        for mixture in mixtures(module, plan).values():
            for name, parameter in mixture.experts.named_parameters():
                start, size = chunk(len(parameter), layout.expert, place.expert)
                mine = parameter.detach()[start : start + size].clone()
                setattr(mixture.experts, name, nn.Parameter(mine, requires_grad=parameter.requires_grad))
            mixture.dispatch = Exchange(group)


EXPERT = ExpertAxis()


def refuse_misfits(model: nn.Module, plan: ParallelPlan, layout: Layout) -> None:
    """Raise ``UserError`` if ``layout`` does not fit the experts of ``model``, which may come from a custom task."""
    if layout.expert > 1 and not plan.mixtures:
        raise UserError(
            f"parallel.expert={layout.expert}: the model declares no experts in its parallel plan; use "
            "parallel.expert=1, or return ParallelPlan(mixtures=...) from parallel_plan()"
        )
    shapes = {
        f"{mixture}.experts.{name}": parameter.shape
        for mixture in plan.mixtures
        for name, parameter in model.get_submodule(mixture).experts.named_parameters()  # type: ignore[union-attr]
    }
    widths = {f"dim 1 of {name}": shape[1] if len(shape) > 1 else 1 for name, shape in shapes.items()}
    check_experts(layout, {f"dim 0 of {name}": shape[0] for name, shape in shapes.items()}, widths)


def mixtures(module: nn.Module, plan: ParallelPlan) -> dict[int, Any]:
    """Return the mixtures of ``module``, the model or a stage of it, by their index in ``plan.mixtures``."""
    found = dict(module.named_modules())
    return {number: found[name] for number, name in enumerate(plan.mixtures) if name in found}


class Exchange(Dispatch):
    """Send each row to the rank that holds its expert, and return the result."""

    def __init__(self, group: ProcessGroup) -> None:
        self._group, self._ranks = group, dist.get_world_size(group)

    def run(self, rows: Tensor, counts: Tensor, experts: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        """Run the experts; see ``Dispatch.run``. This is a collective call, also for ranks without rows."""
        experts_here = [len(counts) // self._ranks] * self._ranks
        # [ranks x local experts]: number of rows from each rank for each local expert
        received = collectives.exchange(counts, experts_here, experts_here, self._group)
        table = received.view(self._ranks, -1)
        sent, taken = self.sizes(len(rows), counts, table)
        arrived = collectives.all_to_all(rows, sent, taken, self._group)
        # Rows arrive sorted by rank, then expert. The experts need them sorted by expert, then rank.
        expert = torch.arange(table.shape[1], device=rows.device).repeat(self._ranks)
        order = expert.repeat_interleave(received, output_size=len(arrived)).argsort(stable=True)
        back = torch.empty_like(order)
        back[order] = torch.arange(len(order), device=order.device)
        results = experts(_Reordered.apply(arrived, order, back), table.sum(0))
        return collectives.all_to_all(_Reordered.apply(results, back, order), taken, sent, self._group)

    def sizes(self, rows: int, counts: Tensor, table: Tensor) -> tuple[list[int], list[int]]:
        """Return how many of the ``rows`` to send to each rank, and how many to receive from each.

        The host waits for the device only here, before the rows are exchanged.
        """
        del rows
        sent, taken = torch.stack((counts.view(self._ranks, -1).sum(1), table.sum(1))).tolist()
        return sent, taken


class _Reordered(torch.autograd.Function):
    """Computes ``rows[order]``. The backward is a gather.

    The backward of torch's indexing is a scatter-add, which is slower, and not deterministic on a GPU.
    """

    @staticmethod
    def forward(ctx, rows: Tensor, order: Tensor, back: Tensor) -> Tensor:  # type: ignore[no-untyped-def]
        ctx.save_for_backward(back)
        return rows[order]

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[no-untyped-def]
        (back,) = ctx.saved_tensors
        return gradient[back], None, None


class Loads:
    """Number of tokens sent to each expert in a step, and load balancing of the routers."""

    def __init__(self, modules: Sequence[nn.Module], plan: ParallelPlan, specs: Mapping[str, ShardSpec]) -> None:
        """
        Args:
            modules: The model, or this rank's stages of it.
            plan: The model's parallel plan.
            specs: Shard specs of all parameters of the model, by name.
        """
        held = {number: mixture for module in modules for number, mixture in mixtures(module, plan).items()}
        self._routers: dict[int, Any] = {number: mixture.gate for number, mixture in sorted(held.items())}
        self.experts = [
            next(spec.shape[0] for name, spec in specs.items() if name.startswith(f"{mixture}.experts."))
            for mixture in plan.mixtures
        ]
        """Number of experts of each mixture of the model, over all stages."""

    @property
    def buffers(self) -> set[Tensor]:
        """Buffers of the routers, which are equal on all ranks without synchronization."""
        return {buffer for router in self._routers.values() for buffer in router.buffers()}

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Count tokens in the forwards inside this context, except in evaluation mode."""
        for router in self._routers.values():
            router.is_counting = router.training
        yield
        for router in self._routers.values():
            router.is_counting = False

    def take(self, device: torch.device) -> dict[str, Tensor]:
        """Return the tokens that this rank's routers counted since the last call.

        The keys are ``experts/NUMBER`` for each mixture of the model, the values fp64 [experts].
        """
        counts = [torch.zeros(experts, dtype=torch.float64, device=device) for experts in self.experts]
        for number, router in self._routers.items():
            if router.loads is not None:
                counts[number].copy_(router.loads)
        self.clear()
        return {f"experts/{number}": count for number, count in enumerate(counts)}

    def clear(self) -> None:
        """Reset the counts."""
        for router in self._routers.values():
            router.loads = None

    @torch.no_grad()
    def balance(self, sums: SumTable, accepted: Tensor) -> None:
        """Let routers shift tokens towards experts with fewer tokens than the mean.

        The host does not wait.

        Args:
            sums: The counts of ``take``, summed over all ranks.
            accepted: Flag on the device. Nothing changes if it is false.
        """
        for number, router in self._routers.items():
            router.balance(sums[f"experts/{number}"], accepted)
