"""Matrix products in float8 and int8 with torchao.

In forward and backward, factors are scaled to the range of the dtype and rounded.
"""

import dataclasses
from typing import Any

import torch
from torch import Tensor, nn

from serried.configs.errors import UserError
from serried.parallel.precision.low_precision_linear import check_torchao, import_torchao

MULTIPLE = 16
"""The numbers of inputs and outputs of a layer must be multiples of this value on GPUs."""
_CAPABILITIES = {"float8": ((8, 9), "8.9 (Ada, Hopper)"), "int8": ((8, 0), "8.0 (Ampere)")}


def is_eight_bits(precision: str) -> bool:
    """Return whether ``precision`` computes the linear layers of blocks in 8 bits."""
    return precision in _CAPABILITIES


def check_eight_bits(precision: str, device: torch.device) -> None:
    """Raise ``UserError`` if ``precision`` is not available on ``device``."""
    check_torchao(f"precision={precision}", "precision=bf16")
    if device.type == "cuda" and torch.version.hip is None:
        refuse_old(precision, torch.cuda.get_device_name(device), torch.cuda.get_device_capability(device))


def refuse_old(precision: str, name: str, capability: tuple[int, int]) -> None:
    """Raise ``UserError`` if a GPU of this compute capability does not support ``precision``."""
    least, words = _CAPABILITIES[precision]
    if capability < least:
        raise UserError(
            f"precision={precision} needs a GPU of compute capability {words} or higher, but {name} has "
            f"{'.'.join(map(str, capability))}; use precision=bf16"
        )


class Float8:
    """``F.linear`` with matrix products in float8 and everything else in bf16.

    Scales are rounded to powers of two, which do not change the digits of a float8 value. Results therefore depend on
    the layout only for values that underflow because another value with the same scale is much larger.
    """

    def __init__(self, recipe: str, *, gathers: bool = False, emulates: bool = False) -> None:
        """
        Args:
            recipe: Name of a torchao recipe.
            gathers: See ``Float8Gather``.
            emulates: Multiply the rounded values in fp32. On CPUs torch's float8 products are thousands of times
                slower.
        """
        import_torchao()
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training

        # torchao's public modules replace the weights. So its autograd function is called directly, with its settings.
        from torchao.float8.float8_linear import matmul_with_hp_or_float8_args

        self.gathers = gathers
        config = dataclasses.replace(
            Float8LinearConfig.from_recipe_name(recipe),
            round_scales_to_power_of_2=True,
            pad_inner_dim=True,  # if the number of tokens of a micro-batch is not a multiple of 16
            emulate=emulates,
        )
        # The conversion also works around a torch.compile bug on GPUs that is known to torchao.
        layer = convert_to_float8_training(nn.Linear(MULTIPLE, MULTIPLE, bias=False, device="meta"), config=config)
        self._config, self._products = config, layer.linear_mm_config
        self._multiply = matmul_with_hp_or_float8_args.apply

    def __call__(self, x: Tensor, weight: Tensor) -> Tensor:
        # Rounded to bf16 first, because FSDP2 gathers it in bf16.
        return self._multiply(x.to(torch.bfloat16), weight.to(torch.bfloat16).t(), self._products, self._config)

    def scales_of(self, largest: Tensor) -> Tensor:
        """Return the fp32 scales of weights with the absolute maxima ``largest``."""
        from torchao.float8.float8_utils import amax_to_scale

        dtype = self._config.cast_config_weight.target_dtype
        return amax_to_scale(largest.to(torch.bfloat16), dtype, round_scales_to_power_of_2=True)

    def round(self, weight: Tensor, scale: Tensor) -> Tensor:
        """Return a weight, or a shard of it, in float8, rounded as in ``__call__``."""
        from torchao.float8.float8_utils import to_fp8_saturated

        dtype = self._config.cast_config_weight.target_dtype
        return to_fp8_saturated(weight.to(torch.bfloat16).float() * scale, dtype)

    def rounded(self, numbers: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
        """Return a weight that ``__call__`` uses without rounding it again.

        Args:
            numbers: The float8 values, as bytes.
            scale: Their scale.
            dtype: Dtype of the weight's gradient.
        """
        from torchao.float8.float8_training_tensor import Float8TrainingTensor, GemmInputRole

        numbers = numbers.view(self._config.cast_config_weight.target_dtype)
        return Float8TrainingTensor(numbers, scale, dtype, self._products, GemmInputRole.WEIGHT)


class Int8:
    """``F.linear`` with matrix products in int8, one scale per row, and everything else in bf16."""

    def __init__(self) -> None:
        import_torchao()
        from torchao.prototype.quantized_training import Int8MixedPrecisionTrainingConfig

        # As in Float8, the public module would replace the weights.
        from torchao.prototype.quantized_training.int8_mixed_precision import _Int8MixedPrecisionTrainingLinearFunction

        self._config = Int8MixedPrecisionTrainingConfig()
        self._multiply = _Int8MixedPrecisionTrainingLinearFunction.apply

    def __call__(self, x: Tensor, weight: Tensor) -> Tensor:
        rows = x.to(torch.bfloat16).contiguous()
        if rows.numel() == rows.shape[-1]:  # torchao's GPU kernel asserts that there are at least two rows
            rows, shape = rows.view(1, -1).expand(2, -1).contiguous(), rows.shape
            return self(rows, weight)[:1].view(*shape[:-1], -1)
        return _ContiguousGradient.apply(self._multiply(rows, weight.to(torch.bfloat16), None, self._config))


class _ContiguousGradient(torch.autograd.Function):
    """Identity whose backward makes the gradient contiguous, as torchao requires."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        del ctx
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        del ctx
        return grad.contiguous()
