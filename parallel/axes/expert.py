"""The expert axis: the experts of a mixture divided over ranks, to which tokens are sent and from which they return.

The ranks of a block, which divide samples, sequences and matrices for the rest of the model, divide the experts in
another way: each group of ``expert`` consecutive ranks holds all of them, and FSDP2 shards each rank's experts over the
ranks of the other groups. As tokens travel, every rank's experts see tokens of all ranks of the group (GShard,
https://arxiv.org/abs/2006.16668). No token is dropped: the exchange has the sizes that the routers chose.

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
    """See the module."""

    axis = "expert"

    def slices(self, plan: ParallelPlan, layout: Layout, name: str, shape: Sequence[int]) -> tuple[Slice, ...]:
        """Stacked experts, by expert."""
        del layout, shape
        return (Slice(0, ("expert",)),) if plan.is_expert(name) else ()

    def is_partial(self, plan: ParallelPlan, layout: Layout, name: str) -> bool:
        """Never: FSDP2 sums the gradients of experts over all ranks that hold them."""
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
    """Raise ``UserError`` where ``layout`` does not fit the experts of ``model``, which its task may have built
    itself."""
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
    """Return the mixtures of ``module``, which may be a stage of the model, by their number in ``plan``."""
    found = dict(module.named_modules())
    return {number: found[name] for number, name in enumerate(plan.mixtures) if name in found}


class Exchange(Dispatch):
    """Sends each row to the rank that holds its expert, and its result back."""

    def __init__(self, group: ProcessGroup) -> None:
        self._group, self._ranks = group, dist.get_world_size(group)

    def run(self, rows: Tensor, counts: Tensor, experts: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        """Run the experts, see ``Dispatch.run``. A collective: a rank without rows takes part too."""
        experts_here = [len(counts) // self._ranks] * self._ranks
        # [ranks x experts here]: rows from each rank for each expert here
        received = collectives.exchange(counts, experts_here, experts_here, self._group)
        table = received.view(self._ranks, -1)
        sent, taken = self.sizes(len(rows), counts, table)
        arrived = collectives.all_to_all(rows, sent, taken, self._group)
        # By rank and then by expert, as they arrived; by expert and then by rank, as the experts take them.
        expert = torch.arange(table.shape[1], device=rows.device).repeat(self._ranks)
        order = expert.repeat_interleave(received, output_size=len(arrived)).argsort(stable=True)
        back = torch.empty_like(order)
        back[order] = torch.arange(len(order), device=order.device)
        results = experts(_Reordered.apply(arrived, order, back), table.sum(0))
        return collectives.all_to_all(_Reordered.apply(results, back, order), taken, sent, self._group)

    def sizes(self, rows: int, counts: Tensor, table: Tensor) -> tuple[list[int], list[int]]:
        """Return how many of the ``rows`` to send to each rank, and how many to take from each.

        The only time that the host waits for the device here, before anything else is exchanged.
        """
        del rows
        sent, taken = torch.stack((counts.view(self._ranks, -1).sum(1), table.sum(1))).tolist()
        return sent, taken


class _Reordered(torch.autograd.Function):
    """``rows[order]`` with a backward that gathers. Indexing's own backward adds: slower, and varying on a GPU."""

    @staticmethod
    def forward(ctx, rows: Tensor, order: Tensor, back: Tensor) -> Tensor:  # type: ignore[no-untyped-def]
        ctx.save_for_backward(back)
        return rows[order]

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[no-untyped-def]
        (back,) = ctx.saved_tensors
        return gradient[back], None, None


class Loads:
    """Tokens that the routers of a model sent to each expert in a step, and the balance that follows from them."""

    def __init__(self, modules: Sequence[nn.Module], plan: ParallelPlan, specs: Mapping[str, ShardSpec]) -> None:
        """``modules`` hold this rank's stages of a model; ``specs``: of all its parameters."""
        held = {number: mixture for module in modules for number, mixture in mixtures(module, plan).items()}
        self._routers: dict[int, Any] = {number: mixture.gate for number, mixture in sorted(held.items())}
        self.experts = [
            next(spec.shape[0] for name, spec in specs.items() if name.startswith(f"{mixture}.experts."))
            for mixture in plan.mixtures
        ]
        """Number of experts of each mixture of the whole model."""

    @property
    def buffers(self) -> set[Tensor]:
        """Buffers of the routers, which are equal on all ranks as they are."""
        return {buffer for router in self._routers.values() for buffer in router.buffers()}

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Count in the forwards within, unless in evaluation mode."""
        for router in self._routers.values():
            router.is_counting = router.training
        yield
        for router in self._routers.values():
            router.is_counting = False

    def take(self, device: torch.device) -> dict[str, Tensor]:
        """Return the tokens that this rank's routers counted since the last call: ``experts/NUMBER`` of each mixture of
        the whole model, fp64 [experts]."""
        counts = [torch.zeros(experts, dtype=torch.float64, device=device) for experts in self.experts]
        for number, router in self._routers.items():
            if router.loads is not None:
                counts[number].copy_(router.loads)
        self.clear()
        return {f"experts/{number}": count for number, count in enumerate(counts)}

    def clear(self) -> None:
        """Forget the tokens counted so far."""
        for router in self._routers.values():
            router.loads = None

    @torch.no_grad()
    def balance(self, sums: SumTable, accepted: Tensor) -> None:
        """Let routers move tokens towards experts with fewer of them than the mean; ``sums`` has the counts of ``take``
        over all ranks.

        Nothing changes unless ``accepted``, a flag on the device. The host does not wait.
        """
        for number, router in self._routers.items():
            router.balance(sums[f"experts/{number}"], accepted)
