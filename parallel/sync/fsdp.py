"""Gradient synchronization with FSDP2. Imported only for sharded layouts, since it imports torch.distributed.tensor."""

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
    """FSDP2 over the mesh (replicate, shard x context). Parameters are sharded over the second dim of the mesh."""

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
        """
        Args:
            module: The model, or a stage of it.
            groups: Process groups of this rank.
            plan: Its ``units`` become FSDP2 units.
            low_dtype: Dtype in which parameters are gathered and used. None means their own dtype.
            section: The configuration section ``parallel``.
            whole: Parameters that FSDP2 cannot shard.
            experts: Modules with stacked experts, sharded by the expert axis and therefore over a separate mesh.
        """
        self.root: nn.Module = Root(module)
        policy = MixedPrecisionPolicy(
            param_dtype=low_dtype,
            reduce_dtype=torch.float32 if low_dtype else None,
            cast_forward_inputs=False,  # rotary tables stay in fp32
        )
        options: dict[str, Any] = {"mp_policy": policy}
        if section.offload:
            # Gradients are copied to pinned memory during the backward. Before ``backward`` returns, the host waits for
            # these copies (``finalize_backward``, after each backward marked as the last), so norms can be computed
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
            # Sum instead of average. Both are set on every unit: they are not recursive, and Gloo has no pre-multiplied
            # sum
            # (https://github.com/pytorch/pytorch/blob/v2.11.0/torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py).
            wrapped.set_force_sum_reduction_for_comms(True)
            wrapped.set_gradient_divide_factor(1.0)
        self._sync_every_micro_batch = section.sync_every_micro_batch
        self._keep_gathered = not reshard
        self._groups = groups.fsdp.get_all_groups()
        self._whole = [name for name, parameter in module.named_parameters() if parameter in set(whole)]

    @contextmanager
    def during(self, is_last: bool) -> Iterator[None]:
        """Context manager of a micro-batch. Gradients are reduced in the last one, or in each if configured."""
        root = self._units[0]
        reduces = is_last or self._sync_every_micro_batch
        # FSDP2 keeps reduced gradients until a "last" backward. If each one is reduced, every backward is a last one.
        root.set_is_last_backward(reduces)
        root.set_requires_gradient_sync(reduces)
        # ZeRO-2 keeps gathered parameters from forward to backward anyway, so keep them for the next micro-batch too.
        root.set_reshard_after_backward(is_last or not self._keep_gathered)
        yield
        if is_last:
            self.sum_whole_gradients()

    def sum_whole_gradients(self) -> None:
        """All-reduce the gradients of parameters that FSDP2 cannot shard, over the groups of the FSDP2 mesh."""
        assert isinstance(self.root, Root)
        for name in self._whole:  # only a few scalars
            parameter = self.root.module.get_parameter(name)
            if parameter.requires_grad:
                if parameter.grad is None:
                    parameter.grad = zero_gradient(parameter)
                for group in self._groups:
                    dist.all_reduce(parameter.grad, group=group)

    def reshard(self) -> None:
        """Free gathered parameters, so that the model has its shards again."""
        for unit in self._units:
            unit.reshard()
