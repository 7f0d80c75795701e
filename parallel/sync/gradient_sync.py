"""Gradient synchronization without FSDP2: none on one process, DDP, and all-reduce per parameter."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from serried.configs.errors import UserError
from serried.parallel.layout.mesh import Layout


class Root(nn.Module):
    """Module whose forward runs a function of the model, so that DDP and FSDP2 wrap all model calls inside it."""

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
    """Factor by which to multiply ``.grad`` to get the sum over ranks."""

    def during(self, is_last: bool) -> AbstractContextManager[None]:
        """Return a context manager for the forward and backward of a micro-batch."""

    def reshard(self) -> None:
        """Free parameters that a forward without backward left gathered."""


class NoSync:
    """No synchronization, for one process."""

    divisor = 1

    def __init__(self, module: nn.Module) -> None:
        self.root: nn.Module = Root(module)

    def during(self, is_last: bool) -> AbstractContextManager[None]:
        """Return an empty context manager."""
        del is_last
        return nullcontext()

    def reshard(self) -> None:
        """Do nothing, since no parameters are gathered."""


class Replicated:
    """DistributedDataParallel: the model is replicated, and gradients are reduced in buckets during the backward."""

    def __init__(self, module: nn.Module, layout: Layout, device: torch.device, *, uses_all: bool) -> None:
        """``uses_all`` means that each loss depends on every parameter, so DDP need not search for unused ones."""
        root = Root(module)
        if not uses_all:
            # DDP warns on every rank, in C++, if it searches for unused parameters and finds none, so there is always
            # one. On a GPU the host waits for the end of each backward to find the parameters that no rank used.
            root.unused = nn.Parameter(torch.zeros(1, device=device))
        # Ranks start bitwise equal, so no initial broadcast is needed (init_sync=False).
        replicas = DistributedDataParallel(
            root,
            device_ids=None if device.type == "cpu" else [device],
            init_sync=False,
            gradient_as_bucket_view=True,
            find_unused_parameters=not uses_all,
        )
        self.root: nn.Module = replicas
        # DistributedModel broadcasts buffers. The argument of this name is deprecated since torch 2.13.
        replicas.broadcast_buffers = False
        # DDP averages. A sum would need a communication hook in Python. Scaling the loss up instead would make fp16
        # overflow depend on the number of ranks. So the average stays, and the optimizer multiplies it by the divisor.
        self.divisor = layout.replicate

    def during(self, is_last: bool) -> AbstractContextManager[None]:
        """Return a context manager that reduces gradients only in the last micro-batch."""
        assert isinstance(self.root, DistributedDataParallel)
        return nullcontext() if is_last else self.root.no_sync()

    def reshard(self) -> None:
        """Do nothing, since no parameters are gathered."""


class Summed(NoSync):
    """Data parallelism with gradients of a different dtype than the parameters, which DDP does not support.

    The model is replicated. The gradient of each parameter is all-reduced as soon as it is complete.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module)
        self._is_last, self._travelling = False, dict[torch.Tensor, dist.Work]()
        self._names = {each: name for name, each in module.named_parameters() if each.requires_grad}
        for parameter in self._names:
            parameter.register_post_accumulate_grad_hook(self._sum)

    def _sum(self, parameter: torch.Tensor) -> None:
        if self._is_last:
            work = dist.all_reduce(parameter.grad, async_op=True)
            assert work is not None
            self._travelling[parameter] = work

    @contextmanager
    def during(self, is_last: bool) -> Iterator[None]:
        """Context manager that sums gradients only in the last micro-batch.

        Raises:
            UserError: A parameter has no gradient, so the all-reduces of ranks would not match.
        """
        self._is_last = is_last
        yield
        if is_last and (unused := [name for each, name in self._names.items() if each not in self._travelling]):
            raise UserError(
                f"the loss does not depend on {unused[0]}, as it must if parallel_plan() names units; set "
                "requires_grad=False for it, or use optim=adamw and a plan without units"
            )
        for work in self._travelling.values():
            work.wait()
        self._travelling.clear()
