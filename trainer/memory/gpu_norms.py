"""``F.rms_norm`` without data as a GPU computes it."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from serried.configs.schema.sections import RunConfig


def is_for_gpus(config: RunConfig) -> bool:
    """Return whether estimates of ``config`` are for GPUs: this machine's, those of ``plan.device``, or in a dry run
    those that a sharded run is meant for."""
    if config.launch.device != "auto":
        return config.launch.device == "cuda"
    is_planned = config.dry_run and config.parallel.strategy in ("fsdp", "hsdp")
    return is_planned or bool(config.plan.device) or torch.cuda.is_available()


@contextmanager
def norms_of_a_gpu() -> Iterator[None]:
    """Inside this context ``F.rms_norm`` is one operation that keeps its input. Without data torch takes it apart, as
    on a CPU, and the backward then keeps the normalised input too."""
    plain = F.rms_norm

    def fused(x: Tensor, shape: Sequence[int], weight: Tensor | None = None, eps: float | None = None) -> Tensor:
        if torch.is_autocast_enabled(x.device.type):  # on a GPU autocast has it in fp32
            x, weight = x.float(), weight if weight is None else weight.float()
        if weight is not None and weight.dtype != x.dtype:  # which torch takes apart on a GPU too
            return plain(x, shape, weight, eps)
        found: Tensor = _RMSNorm.apply(x, shape, weight)
        return found

    F.rms_norm = fused  # type: ignore[assignment]
    try:
        yield
    finally:
        F.rms_norm = plain


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, shape: Sequence[int], weight: Tensor | None) -> Tensor:
        scale = x.new_empty(*x.shape[: x.ndim - len(shape)], *(1 for _ in shape), dtype=torch.float32)
        ctx.save_for_backward(x, weight, scale)
        return x * x if weight is None else x * weight  # what it reads and writes; the numbers are no one's

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, _ = ctx.saved_tensors
        return grad * x, None, None if weight is None else torch.zeros_like(weight)
