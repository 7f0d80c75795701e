"""Frozen weights of linear layers in 4 bits: NF4 of QLoRA (https://arxiv.org/abs/2305.14314), with fp32 scales.

Each row of a weight is split into blocks of 64 values. A block is divided by its largest absolute value, and each value
is rounded to the nearest of 16 levels. One parameter stores the levels, two per byte, followed by the fp32 scales of
the blocks. Its dtype is nominally bf16, so that FSDP2 shards and gathers its rows without a cast.
"""

import functools
import math
from types import MethodType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

BLOCK = 64
_LEVELS = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
"""Quantiles of a normal distribution, with the values of the authors' code."""


def can_quantize(module: nn.Module) -> bool:
    """Return whether ``module`` uses the forward of ``nn.Linear`` and its inputs are a multiple of the block size."""
    if not isinstance(module, nn.Linear) or type(module).forward is not nn.Linear.forward:
        return False
    return module.in_features % BLOCK == 0


def quantize(module: nn.Linear) -> None:
    """Replace the weight of ``module`` by a quantized one. A weight on meta stays on meta."""
    weight = module.weight.detach()
    columns = module.in_features // 4 + 2 * module.in_features // BLOCK  # two bytes each
    packed = torch.empty(len(weight), columns, dtype=torch.bfloat16, device="meta") if weight.is_meta else pack(weight)
    module.weight = nn.Parameter(packed, requires_grad=False)
    module.weight.whole_shape = weight.shape  # type: ignore[attr-defined]
    module.forward = MethodType(_forward, module)  # type: ignore[method-assign]
    module.product = _product  # type: ignore[assignment]  # for the tensor axis, which replaces forward


def is_quantized(module: nn.Module) -> bool:
    """Return whether the weight of ``module`` is quantized."""
    return getattr(module, "product", None) is _product


def is_packed(parameter: Tensor) -> bool:
    """Return whether ``parameter`` is a quantized weight. Call this before sharding."""
    return hasattr(parameter, "whole_shape")


def whole_numel(parameter: Tensor) -> int:
    """Return the number of weights that ``parameter`` represents. Call this before sharding."""
    return math.prod(getattr(parameter, "whole_shape", parameter.shape))


def pack(rows: Tensor) -> Tensor:
    """Quantize rows [R, I] to [R, I / 4 + I / 32] of dtype bf16."""
    blocks = rows.float().unflatten(1, (-1, BLOCK))
    scales = blocks.abs().amax(2)
    levels = _levels(rows.device)
    between = (levels[1:] + levels[:-1]) / 2
    codes = torch.bucketize(blocks / scales.clamp(min=1e-30).unsqueeze(2), between).to(torch.uint8).flatten(1)
    pairs = codes[:, ::2] << 4 | codes[:, 1::2]
    return torch.cat((pairs, scales.contiguous().view(torch.uint8)), 1).view(torch.bfloat16)


def inputs_of_shard(packed: Tensor, shard: int, shards: int) -> Tensor:
    """Return the packed weights of one of several equal shards of the inputs, which do not split blocks."""
    columns = packed.shape[1] * BLOCK // (BLOCK // 2 + 4) // 2  # of the levels; the others contain the scales
    parts = packed.split([columns, packed.shape[1] - columns], 1)
    return torch.cat([part.chunk(shards, 1)[shard] for part in parts], 1)


def unpack(packed: Tensor, dtype: torch.dtype) -> Tensor:
    """Return an approximation of the weights [R, I] that were passed to ``pack``."""
    content = packed.view(torch.uint8)
    inputs = content.shape[1] * BLOCK // (BLOCK // 2 + 4)
    pairs, scales = content.split([inputs // 2, inputs // BLOCK * 4], 1)
    codes = torch.stack((pairs >> 4, pairs & 15), 2).flatten(1)
    values = _levels(packed.device)[codes.int()].unflatten(1, (-1, BLOCK))
    return (values * scales.contiguous().view(torch.float32).unsqueeze(2)).flatten(1).to(dtype)


def _levels(device: torch.device) -> Tensor:
    if torch.compiler.is_compiling():  # a constant of the graph
        return torch.tensor(_LEVELS, device=device)
    return _kept_levels(device)


@functools.cache
def _kept_levels(device: torch.device) -> Tensor:
    return torch.tensor(_LEVELS, device=device)


def _forward(module: nn.Linear, x: Tensor) -> Tensor:
    return _product(x, module.weight, module.bias)


def _product(x: Tensor, packed: Tensor, bias: Tensor | None = None) -> Tensor:
    if torch.is_autocast_enabled(x.device.type):
        x = x.to(torch.get_autocast_dtype(x.device.type))
    product: Tensor = _PackedLinear.apply(x, packed, bias)
    return product


class _PackedLinear(torch.autograd.Function):
    """Linear function of x [..., I] with a weight packed by ``pack`` and a bias [O], both without gradients.

    The weight is unpacked again in the backward: keeping it would use the memory that quantization saves.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, packed: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(packed)
        return F.linear(x, unpack(packed, x.dtype), None if bias is None else bias.to(x.dtype))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (packed,) = ctx.saved_tensors
        return grad @ unpack(packed, grad.dtype), None, None
