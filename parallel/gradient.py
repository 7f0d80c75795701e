"""Numbers of the gradient that every rank must agree on."""

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

_LONGEST_FP32_ROW = 2**15


def local(tensor: Tensor) -> Tensor:
    """The part that this rank holds, as a plain tensor over the same memory."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


@torch.no_grad()
def sum_of_squares(gradients: Iterable[Tensor]) -> Tensor:
    """Sum of squares of this rank's part of the gradients, fp64 scalar.

    Norms of rows (the last dim) are taken in fp32 and combined in fp64: as fast as one fp32 norm per tensor, whose
    rounding (1e-5 to 1e-3 on a CPU) depends on how the tensor was cut, but exact to about 1e-8.
    """
    return torch.cat([_row_norms(local(gradient)) for gradient in gradients]).double().square().sum()


def _row_norms(gradient: Tensor) -> Tensor:
    dtype = torch.float64 if gradient.shape[-1] > _LONGEST_FP32_ROW else None
    return torch.linalg.vector_norm(gradient, dim=-1, dtype=dtype).flatten()
