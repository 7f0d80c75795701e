"""Weight gradients in fp32 under fp16 autocast, so that the same steps overflow on every layout.

The weight gradient of a linear layer is a sum over all tokens of a micro-batch. In fp16 this sum overflows earlier if a
rank processes more tokens at a time. Gradients of activations do not depend on the layout: each belongs to one token.
"""

from types import MethodType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from serried.parallel.plan import ParallelPlan


def widen_gradients(model: nn.Module, plan: ParallelPlan) -> None:
    """Make linear layers of ``model`` sum weight gradients in fp32 under fp16 autocast.

    These are all ``nn.Linear`` layers and the modules with a ``conv1d`` role.
    """
    for name, module in model.named_modules():
        is_conv1d = (plan.role(name) or "").startswith("conv1d")
        if is_conv1d or (isinstance(module, nn.Linear) and type(module).forward is nn.Linear.forward):
            if "forward" in vars(module):
                continue  # its weight is quantized and has no gradient
            module.forward = MethodType(_conv1d if is_conv1d else _linear, module)


def _linear(module: Any, x: Tensor) -> Tensor:
    return linear(x, module.weight, module.bias)


def _conv1d(module: Any, x: Tensor) -> Tensor:
    return linear(x, module.weight.T, module.bias)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``F.linear`` that computes the gradients of ``weight`` and ``bias`` in fp32 under fp16 autocast."""
    kind = x.device.type
    if not torch.is_autocast_enabled(kind) or torch.get_autocast_dtype(kind) != torch.float16:
        return F.linear(x, weight, bias)
    with torch.autocast(kind, enabled=False):
        return _WideLinear.apply(x.half(), weight, bias)


class _WideLinear(torch.autograd.Function):
    """Linear function of x [..., I] fp16 with weight [O, I] and bias [O] in fp32. Returns [..., O] fp16.

    No fp16 copy of the weight is saved for the backward.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        return F.linear(x, weight.to(x.dtype), None if bias is None else bias.to(x.dtype))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        of_x, of_weight, of_bias = ctx.needs_input_grad
        rows = grad.reshape(-1, weight.shape[0])
        return (
            grad @ weight.to(grad.dtype) if of_x else None,
            _fp32_product(rows.T, x.reshape(-1, weight.shape[1])).to(weight.dtype) if of_weight else None,
            rows.float().sum(0) if of_bias else None,
        )


def _fp32_product(a: Tensor, b: Tensor) -> Tensor:
    """Return ``a @ b`` in fp32 for fp16 matrices."""
    return torch.mm(a, b, out_dtype=torch.float32) if a.is_cuda else a.float() @ b.float()
