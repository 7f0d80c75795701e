"""Gradient synchronization by FSDP2. Imported only if a layout is sharded, as it imports torch.distributed.tensor."""

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard

from serried.configs.schema.sections import ParallelSection
from serried.parallel.layout.process_groups import Groups
from serried.parallel.plan import ParallelPlan
from serried.parallel.sync.gradient_norm import zero_gradient
from serried.parallel.sync.gradient_sync import Root


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
        if section.offload:
            # Gradients are copied to pinned memory while the backward runs. Before ``backward`` returns, the host waits
            # for these copies (``finalize_backward``, after each backward marked as a last one), so that norms may read
            # (https://github.com/pytorch/pytorch/blob/v2.11.0/torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py).
            options["offload_policy"] = CPUOffloadPolicy(pin_memory=groups.fsdp.device_type != "cpu")
        if whole:
            options["ignored_params"] = set(whole)
        reshard = section.frees_after_forward and not plan.is_one_unit

        def along(parameter: nn.Parameter) -> Shard:
            return Shard(groups.expert_shard_dim(parameter))

        for mixture in experts:
            over: dict[str, Any] = {"mesh": groups.expert_fsdp, "shard_placement_fn": along}
            fully_shard(mixture, reshard_after_forward=reshard, **over, **options)
        options["mesh"] = groups.fsdp
        for unit in plan.units:
            modules = [module.get_submodule(name) for name in unit]
            fully_shard(modules, reshard_after_forward=reshard and unit is not plan.units[-1], **options)
        fully_shard(self.root, reshard_after_forward=False, **options)
        self._units = [unit for unit in self.root.modules() if isinstance(unit, FSDPModule)]
        for wrapped in self._units:
            # Sums, not averages. Both calls on every unit: they are not recursive, and Gloo has no pre-multiplied sum
            # (https://github.com/pytorch/pytorch/blob/v2.11.0/torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py).
            wrapped.set_force_sum_reduction_for_comms(True)
            wrapped.set_gradient_divide_factor(1.0)
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
        """Sum the gradients of parameters that FSDP2 cannot shard, over the ranks over which it sums all others."""
        assert isinstance(self.root, Root)
        for name in self._whole:  # scalars: a handful
            parameter = self.root.module.get_parameter(name)
            if parameter.requires_grad:
                if parameter.grad is None:
                    parameter.grad = zero_gradient(parameter)
                for group in self._groups:
                    dist.all_reduce(parameter.grad, group=group)

    def reshard(self) -> None:
        """Free gathered units, and let the model show its shards again."""
        for unit in self._units:
            unit.reshard()
