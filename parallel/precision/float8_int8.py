"""Products in float8 and int8, by torchao: factors are scaled to the range of the type and rounded, in forward and
backward."""

import dataclasses
from typing import Any

import torch
from torch import Tensor, nn

from serried.configs.errors import UserError
from serried.parallel.precision.low_precision_linear import check_torchao, import_torchao

MULTIPLE = 16
"""On GPUs, the number of outputs and of inputs of a layer must be a multiple of this."""
_CAPABILITIES = {"float8": ((8, 9), "8.9 (Ada, Hopper)"), "int8": ((8, 0), "8.0 (Ampere)")}


def is_eight_bits(precision: str) -> bool:
    """Whether linear layers of the blocks compute in 8 bits with this ``precision``."""
    return precision in _CAPABILITIES


def check_eight_bits(precision: str, device: torch.device) -> None:
    """Raise ``UserError`` if this ``precision`` cannot be used here."""
    check_torchao(f"precision={precision}", "precision=bf16")
    if device.type == "cuda" and torch.version.hip is None:
        refuse_old(precision, torch.cuda.get_device_name(device), torch.cuda.get_device_capability(device))


def refuse_old(precision: str, name: str, capability: tuple[int, int]) -> None:
    """Raise ``UserError`` if a GPU of this compute capability has no such products."""
    least, words = _CAPABILITIES[precision]
    if capability < least:
        raise UserError(
            f"precision={precision}: {name} has compute capability {'.'.join(map(str, capability))}, and {precision} "
            f"products need {words} or higher; use precision=bf16"
        )


class Float8:
    """``F.linear`` with products in float8, and everything else in bf16.

    Scales are rounded to powers of two, which change no digit of a float8 number: so it depends on the layout only for
    numbers that are too small for the type beside the largest with the same scale.
    """

    def __init__(self, recipe: str, *, gathers: bool = False, emulates: bool = False) -> None:
        """Make the products of a recipe.

        Args:
            recipe: Name of a recipe of torchao.
            gathers: See ``Float8Gather``.
            emulates: Multiply rounded numbers in fp32. On CPUs torch's float8 products are thousands of times slower.
        """
        import_torchao()
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training

        # No module is public whose weights keep their place: so its function is taken, with what it is called with.
        from torchao.float8.float8_linear import matmul_with_hp_or_float8_args

        self.gathers = gathers
        config = dataclasses.replace(
            Float8LinearConfig.from_recipe_name(recipe),
            round_scales_to_power_of_2=True,
            pad_inner_dim=True,  # where a micro-batch has a number of tokens that is not a multiple of 16
            emulate=emulates,
        )
        # It also repairs a fault of torch.compile on GPUs that torchao knows of.
        layer = convert_to_float8_training(nn.Linear(MULTIPLE, MULTIPLE, bias=False, device="meta"), config=config)
        self._config, self._products = config, layer.linear_mm_config
        self._multiply = matmul_with_hp_or_float8_args.apply

    def __call__(self, x: Tensor, weight: Tensor) -> Tensor:
        # Rounded to bf16 first, as FSDP2 gathers it.
        return self._multiply(x.to(torch.bfloat16), weight.to(torch.bfloat16).t(), self._products, self._config)

    def scales_of(self, largest: Tensor) -> Tensor:
        """Return the scales of weights whose largest absolute values are ``largest``, in fp32."""
        from torchao.float8.float8_utils import amax_to_scale

        dtype = self._config.cast_config_weight.target_dtype
        return amax_to_scale(largest.to(torch.bfloat16), dtype, round_scales_to_power_of_2=True)

    def round(self, weight: Tensor, scale: Tensor) -> Tensor:
        """Return the float8 numbers of a weight, or of a shard of it, as ``__call__`` rounds them."""
        from torchao.float8.float8_utils import to_fp8_saturated

        dtype = self._config.cast_config_weight.target_dtype
        return to_fp8_saturated(weight.to(torch.bfloat16).float() * scale, dtype)

    def rounded(self, numbers: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
        """Return a weight that ``__call__`` takes as rounded already, to these ``numbers``. ``dtype``: type of its
        gradient."""
        from torchao.float8.float8_training_tensor import Float8TrainingTensor, GemmInputRole

        numbers = numbers.view(self._config.cast_config_weight.target_dtype)
        return Float8TrainingTensor(numbers, scale, dtype, self._products, GemmInputRole.WEIGHT)


class Int8:
    """``F.linear`` with products in int8, with a scale for each row, and everything else in bf16."""

    def __init__(self) -> None:
        import_torchao()
        from torchao.prototype.quantized_training import Int8MixedPrecisionTrainingConfig

        # As in Float8: there is a public module, whose weights would lose their place.
        from torchao.prototype.quantized_training.int8_mixed_precision import _Int8MixedPrecisionTrainingLinearFunction

        self._config = Int8MixedPrecisionTrainingConfig()
        self._multiply = _Int8MixedPrecisionTrainingLinearFunction.apply

    def __call__(self, x: Tensor, weight: Tensor) -> Tensor:
        rows = x.to(torch.bfloat16).contiguous()
        if rows.numel() == rows.shape[-1]:  # torchao's kernel for GPUs asserts that there are two rows or more
            rows, shape = rows.view(1, -1).expand(2, -1).contiguous(), rows.shape
            return self(rows, weight)[:1].view(*shape[:-1], -1)
        return _ContiguousGradient.apply(self._multiply(rows, weight.to(torch.bfloat16), None, self._config))


class _ContiguousGradient(torch.autograd.Function):
    """Returns its input; torchao views the gradient as rows."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        del ctx
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        del ctx
        return grad.contiguous()
