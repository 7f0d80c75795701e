"""Gradient synchronization of data parallelism: none on one process, DDP, FSDP2. Gradients are sums over ranks."""

from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from serried.configs.schema import ParallelSection
from serried.parallel.groups import Groups
from serried.parallel.mesh import Layout
from serried.parallel.plan import ParallelPlan


class Root(nn.Module):
    """Runs a function of the model as one forward, so that DDP and FSDP2 wrap all of its calls of the model."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Return ``function(model, ...)``."""
        return function(self.module, *args, **kwargs)


class GradientSync(Protocol):
    """When and how ranks sum gradients."""

    root: nn.Module
    """A ``Root``, or its wrapper."""
    divisor: int
    """``.grad`` times this is the sum over ranks."""

    def during(self, is_last: bool) -> AbstractContextManager[None]:
        """Return the context of a micro-batch's forward and backward."""

    def reshard(self) -> None:
        """Free parameters that a forward without backward left gathered."""


class NoSync:
    """One process."""

    divisor = 1

    def __init__(self, module: nn.Module) -> None:
        self.root: nn.Module = Root(module)

    def during(self, is_last: bool) -> AbstractContextManager[None]:
        """Nothing to do."""
        del is_last
        return nullcontext()

    def reshard(self) -> None:
        """Nothing is ever gathered."""


class Replicated:
    """DistributedDataParallel: every rank holds the model, gradients are summed in buckets while backward runs."""

    def __init__(self, module: nn.Module, layout: Layout, device: torch.device, *, uses_all: bool) -> None:
        """``uses_all``: each loss depends on every parameter, so there is no need to look."""
        root = Root(module)
        if not uses_all:
            # DDP warns on every rank if it looks for unused parameters and finds none, in C++: so there is always one.
            root.unused = nn.Parameter(torch.zeros(1, device=device))
        # Every rank starts with the same bits: nothing to broadcast.
        replicas = DistributedDataParallel(
            root,
            device_ids=[device] if device.type == "cuda" else None,
            init_sync=False,
            gradient_as_bucket_view=True,
            find_unused_parameters=not uses_all,
        )
        self.root: nn.Module = replicas
        replicas.broadcast_buffers = False  # DistributedModel does. The argument of this name is deprecated since 2.13
        # DDP averages. Its own sum would take a communication hook in Python, and the fp16 overflow of a loss scaled up
        # against the average would depend on the number of ranks; so the average stays, and the optimizer undoes it.
        self.divisor = layout.replicate

    def during(self, is_last: bool) -> AbstractContextManager[None]:
        """Sum gradients in the last micro-batch only."""
        assert isinstance(self.root, DistributedDataParallel)
        return nullcontext() if is_last else self.root.no_sync()

    def reshard(self) -> None:
        """Nothing is ever gathered."""


class Sharded:
    """FSDP2 over the mesh (replicate, shard x context): each rank holds a part of everything, replicas the same."""

    divisor = 1

    def __init__(
        self,
        module: nn.Module,
        groups: Groups,
        plan: ParallelPlan,
        low_dtype: torch.dtype | None,
        section: ParallelSection,
        whole: Collection[nn.Parameter] = (),
        experts: Collection[nn.Module] = (),
    ) -> None:
        """``low_dtype``: gather parameters in it, and compute in it. ``whole``: what FSDP2 cannot shard. ``experts``:
        stacked, divided by the expert axis, and hence over a mesh of their own."""
        self.root: nn.Module = Root(module)
        policy = MixedPrecisionPolicy(
            param_dtype=low_dtype,
            reduce_dtype=torch.float32 if low_dtype else None,
            cast_forward_inputs=False,  # the model keeps its rotary tables in fp32
        )
        options: dict[str, Any] = {"mp_policy": policy}
        if whole:
            options["ignored_params"] = set(whole)
        reshard = section.frees_after_forward and not plan.is_one_unit
        for each in experts:
            over: dict[str, Any] = {"mesh": groups.expert_fsdp, "shard_placement_fn": groups.expert_shard_dim}
            fully_shard(each, reshard_after_forward=reshard, **over, **options)
        options["mesh"] = groups.fsdp
        for unit in plan.units:
            modules = [module.get_submodule(name) for name in unit]
            fully_shard(modules, reshard_after_forward=reshard and unit is not plan.units[-1], **options)
        fully_shard(self.root, reshard_after_forward=False, **options)
        self._units = [each for each in self.root.modules() if isinstance(each, FSDPModule)]
        for each in self._units:
            # Sums, not averages. Both calls on every unit: they are not recursive, and Gloo has no pre-multiplied sum
            # (https://github.com/pytorch/pytorch/blob/v2.11.0/torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py).
            each.set_force_sum_reduction_for_comms(True)
            each.set_gradient_divide_factor(1.0)
        self._sync_every_micro_batch = section.sync_every_micro_batch
        self._keep_gathered = not reshard
        self._groups = groups.fsdp.get_all_groups()
        self._whole = [name for name, parameter in module.named_parameters() if parameter in set(whole)]

    @contextmanager
    def during(self, is_last: bool) -> Iterator[None]:
        """Reduce gradients in the last micro-batch, or in each."""
        root = self._units[0]
        reduces = is_last or self._sync_every_micro_batch
        # FSDP2 holds what it reduced until a "last" backward: with a reduction each, every backward is one.
        root.set_is_last_backward(reduces)
        root.set_requires_gradient_sync(reduces)
        # ZeRO-2 holds gathered parameters from forward to backward anyway: keep them for the next micro-batch too.
        root.set_reshard_after_backward(is_last or not self._keep_gathered)
        yield
        if is_last:
            self.sum_whole_gradients()

    def sum_whole_gradients(self) -> None:
        """Sum the gradients of what FSDP2 cannot shard over the ranks over which it sums those of all else."""
        assert isinstance(self.root, Root)
        for name in self._whole:  # scalars: a handful
            parameter = self.root.module.get_parameter(name)
            if parameter.requires_grad:
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                for group in self._groups:
                    dist.all_reduce(parameter.grad, group=group)

    def reshard(self) -> None:
        """Free gathered units, and let the model show its shards again."""
        for unit in self._units:
            unit.reshard()
