"""Quantization-aware training: linear layers round weights and inputs as torchao will quantize them later.

Gradients pass through the rounding unchanged (straight-through), except for values outside the range. Rounded tensors
are recomputed in the backward: keeping them would need a copy of all weights that FSDP2 does not free.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from serried.parallel.layout.mesh import Layout
from serried.parallel.plan import ParallelPlan
from serried.parallel.precision.low_precision_linear import Chosen, choose_linear, import_torchao

GROUP = 32
"""Number of consecutive weights of a row that share a scale."""


class FakeQuantized:
    """``F.linear`` with fake-quantized weights and inputs."""

    def __init__(self, how: str) -> None:
        """``how``: see ``torchao_config``."""
        config = torchao_config(how)
        from torchao.quantization import quantize_
        from torchao.quantization.qat import QATConfig

        layer: Any = nn.Sequential(nn.Linear(GROUP, GROUP, bias=False, device="meta"))
        quantize_(layer, QATConfig(config, step="prepare"))
        self._round_weight: Callable[[Tensor], Tensor] = layer[0].weight_fake_quantizer
        self._round_input: Callable[[Tensor], Tensor] = layer[0].activation_fake_quantizer or nn.Identity()

    def __call__(self, x: Tensor, weight: Tensor) -> Tensor:
        kind = x.device.type
        # Rounded to the compute dtype first, because FSDP2 gathers it in this dtype.
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype
        return _Product.apply(x.to(dtype), weight.to(dtype), self._rounded_input, self._rounded_weight)

    def _rounded_input(self, x: Tensor) -> Tensor:
        return self._round_input(x.float()).to(x.dtype)

    def _rounded_weight(self, weight: Tensor) -> Tensor:
        return self._round_weight(weight.float()).to(weight.dtype)  # with fp32 scales, as in the export


class _Product(torch.autograd.Function):
    """Linear function of x [..., I] and a weight [O, I], both rounded. Returns [..., O]."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, round_input: Callable[..., Tensor], round_weight: Callable[..., Tensor]
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.rounds = round_input, round_weight
        return F.linear(round_input(x), round_weight(weight))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        given = [tensor.detach().requires_grad_() for tensor in ctx.saved_tensors]
        with torch.enable_grad():
            x, weight = (round_one(tensor) for round_one, tensor in zip(ctx.rounds, given, strict=True))
        of_x = torch.autograd.grad(x, given[0], grad @ weight.detach())[0]
        rows = grad.flatten(0, -2).T @ x.detach().flatten(0, -2)
        return of_x, torch.autograd.grad(weight, given[1], rows)[0], None, None


def quantized_layers(model: nn.Module, plan: ParallelPlan) -> Chosen:
    """Choose the linear layers to quantize: layers of the blocks whose inputs are a multiple of the group size."""
    return choose_linear(model, plan, Layout("single"), rows=1, columns=GROUP)


def torchao_config(how: str) -> Any:
    """Return the torchao config for ``how``.

    ``int4_weight_only`` quantizes groups of weights to 4 bits. ``int8_dynamic_int4`` also quantizes the inputs of each
    token to 8 bits.
    """
    import_torchao()
    from torchao.quantization import Int8DynamicActivationIntxWeightConfig, IntxWeightOnlyConfig
    from torchao.quantization.granularity import PerGroup

    int4 = vars(torch)["int4"]  # missing in torch's type stubs
    if how == "int4_weight_only":
        return IntxWeightOnlyConfig(weight_dtype=int4, granularity=PerGroup(GROUP))
    return Int8DynamicActivationIntxWeightConfig(weight_dtype=int4, weight_granularity=PerGroup(GROUP))
