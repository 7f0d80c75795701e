"""Gradient synchronization without FSDP2: none on one process, DDP and its like. Gradients are sums over ranks."""

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
            # On a GPU the host then waits for the end of each step's backward, to learn which no rank has used.
            root.unused = nn.Parameter(torch.zeros(1, device=device))
        # Every rank starts with the same bits: nothing to broadcast.
        replicas = DistributedDataParallel(
            root,
            device_ids=None if device.type == "cpu" else [device],
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


class Summed(NoSync):
    """Data parallelism with gradients of another type than the parameters, which DDP refuses.

    Every rank holds the model. The gradient of each parameter is summed as soon as it is complete.
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
        """Sum gradients in the last micro-batch only. Raises ``UserError`` if a parameter has none, so that it would
        not be summed, or with another one of another rank."""
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
