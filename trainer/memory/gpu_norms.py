"""``F.rms_norm`` on fake tensors, with the same memory use as on a GPU."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from serried.configs.schema.sections import RunConfig
from serried.runtime.accelerator import accelerator_type


def is_for_gpus(config: RunConfig) -> bool:
    """Return whether memory estimates for ``config`` are for GPUs.

    ``launch.device`` decides, unless it is ``auto``. Then they are for GPUs if this machine has GPUs, if
    ``plan.device`` is set, or in a dry run of a sharded run.
    """
    if config.launch.device != "auto":
        return config.launch.device != "cpu"
    is_planned = config.dry_run and config.parallel.strategy in ("fsdp", "hsdp")
    return is_planned or bool(config.plan.device) or accelerator_type() is not None


@contextmanager
def norms_of_a_gpu() -> Iterator[None]:
    """Context manager in which ``F.rms_norm`` is one operation that keeps its input, as on a GPU.

    Otherwise torch decomposes it for fake tensors, as on a CPU, and the backward also keeps the normalized input.
    """
    plain = F.rms_norm

    def fused(x: Tensor, shape: Sequence[int], weight: Tensor | None = None, eps: float | None = None) -> Tensor:
        if torch.is_autocast_enabled(x.device.type):  # on a GPU, autocast computes it in fp32
            x, weight = x.float(), weight if weight is None else weight.float()
        if weight is not None and weight.dtype != x.dtype:  # torch decomposes this case on a GPU, too
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
        return x * x if weight is None else x * weight  # reads and writes the same memory; the values are never used

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, _ = ctx.saved_tensors
        return grad * x, None, None if weight is None else torch.zeros_like(weight)
