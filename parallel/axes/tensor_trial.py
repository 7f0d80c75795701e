"""Test of the roles of a model on the tensor axis: a small copy of it, sharded over threads, against the whole copy."""

import threading
from collections.abc import Callable
from copy import deepcopy
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from serried.parallel.axes.tensor import TENSOR, Stream
from serried.parallel.collectives import Exchange
from serried.parallel.layout.mesh import Layout
from serried.parallel.plan import ParallelPlan

_LAYOUT = Layout("fsdp", tensor=2, sequence=False)
_ROUNDING = 1e-3
_SECONDS = 60.0
"""Time after which a thread stops waiting for another one that failed."""


def difference_of_shards(whole: nn.Module, plan: ParallelPlan, run: Callable[[nn.Module], Tensor]) -> str:
    """Return what differs if the matrices of ``whole`` are sharded over two ranks: the output, the gradient of a
    parameter, or the error that its code raises; empty if only rounding does.

    ``run`` maps the model, on the CPU, to its output. Only the roles ``region``, ``column`` and ``row`` are tested.
    """
    expected = _output_and_gradients(whole, run)
    between = _Between(_LAYOUT.tensor)
    shards = [deepcopy(whole) for _ in range(_LAYOUT.tensor)]
    found: list[Any] = [None] * len(shards)

    def shard_and_run(rank: int) -> None:
        try:
            TENSOR.shard(shards[rank], plan, _LAYOUT, _LAYOUT.coordinates(rank), _ThreadStream(between, rank))
            found[rank] = _output_and_gradients(shards[rank], run)
        except Exception as error:  # code that needs the full width
            found[rank] = error
            between.barrier.abort()

    threads = [threading.Thread(target=shard_and_run, args=(rank,)) for rank in range(len(shards))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    failed = [each for each in found if isinstance(each, Exception)]
    if failed:
        own = [error for error in failed if not isinstance(error, threading.BrokenBarrierError)]
        return " ".join(str((own or failed)[0]).split())[:120]
    for name, value in expected.items():
        for rank in range(len(shards)):
            if not _is_close(_own_value(name, found, rank, plan), _sliced(name, value, rank, plan)):
                return f"the gradient of {name}" if name else "the output"
    return ""


def _output_and_gradients(model: nn.Module, run: Callable[[nn.Module], Tensor]) -> dict[str, Tensor]:
    """Return the output, with the name "", and the gradients of all parameters by name."""
    with torch.enable_grad(), torch.device("cpu"):
        model.zero_grad()
        output = run(model)
        weights = torch.linspace(-1, 1, output.numel()).cos_().view_as(output)
        (output.float() * weights).sum().backward()
    gradients = {name: each.grad for name, each in model.named_parameters() if each.grad is not None}
    return {"": output.detach(), **gradients}


def _own_value(name: str, found: list[dict[str, Tensor]], rank: int, plan: ParallelPlan) -> Tensor:
    """Return the gradient of a parameter on a rank, after its sum over ranks if it is partial."""
    if name and TENSOR.is_partial(plan, _LAYOUT, name):
        return torch.stack([each[name] for each in found]).sum(0)
    return found[rank][name]


def _sliced(name: str, value: Tensor, rank: int, plan: ParallelPlan) -> Tensor:
    for dim, _ in TENSOR.slices(plan, _LAYOUT, name, value.shape) if name else ():
        value = value.chunk(_LAYOUT.tensor, dim)[rank]
    return value


def _is_close(value: Tensor, expected: Tensor) -> bool:
    return bool((value - expected).abs().max() <= _ROUNDING * expected.abs().max())


class _Between:
    """Sums over threads."""

    def __init__(self, ranks: int) -> None:
        self.barrier = threading.Barrier(ranks, timeout=_SECONDS)
        self._parts: list[Tensor | None] = [None] * ranks

    def sum(self, x: Tensor, rank: int) -> Tensor:
        """Return the sum of the tensors of all threads."""
        self._parts[rank] = x
        self.barrier.wait()
        total = torch.stack([part for part in self._parts if part is not None]).sum(0)
        self.barrier.wait()  # before a thread replaces its part
        return total


class _ThreadStream(Stream):
    """The residual stream of a rank that is a thread."""

    def __init__(self, between: _Between, rank: int) -> None:
        self._sum = partial(between.sum, rank=rank)

    def enter(self, x: Tensor) -> Tensor:
        return Exchange.apply(x, _same, self._sum)

    def sum(self, x: Tensor) -> Tensor:
        return Exchange.apply(x, self._sum, _same)


def _same(x: Tensor) -> Tensor:
    return x.view_as(x)
