"""Quantized weights of Hugging Face models, dequantized while they are read, to the same values as in transformers.

FP8 (DeepSeek-V3, Qwen3-FP8, compressed-tensors): ``X`` is stored with ``X_scale_inv`` or ``X_scale``. Despite the
name ``X_scale_inv``, each block of ``X`` is multiplied by its scale. The result is fp32.

MXFP4 (gpt-oss): ``X_blocks`` [E, O, G, 16] contains groups of 32 values, two per byte, and ``X_scales`` [E, O, G] the
exponent of each group. The result is ``X`` [E, 32 G, O] in bf16, which represents it exactly.
"""

import functools
from collections.abc import Callable, Mapping
from math import prod
from typing import Protocol

import torch
from torch import Tensor

from serried.configs.hugging_face.quantization import MXFP4, Quantization

_FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
_SCALES = ("_scale_inv", "_scale")
_ONLY_INFERENCE = ("activation_scale", "input_scale", ".k_scale", ".v_scale")
"""Suffixes of scales of activations and of the KV cache, which training does not need."""
_FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
_BYTES = 16
"""Number of bytes in a group of MXFP4 values."""
_BIAS = 127
"""Bias of the stored exponents: 0 is stored for the exponent -127."""


class Values(Protocol):
    """A tensor that can be read in parts."""

    @property
    def dtype(self) -> torch.dtype:
        """dtype of the values that ``read`` returns."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the full tensor."""

    def read(self, first: int, count: int) -> Tensor:
        """Return a copy of ``count`` elements of the flattened tensor, starting at ``first``."""


def dequantized(stored: Mapping[str, Values], quantization: Quantization) -> dict[str, Values]:
    """Return the tensors of the model that ``stored`` contains in quantized form, by name.

    Raises:
        ValueError: A scale is missing or has the wrong shape. The message begins with the name of a tensor.
    """
    return _from_mxfp4(stored) if quantization.method == MXFP4 else _from_fp8(stored, quantization.block)


def _from_fp8(stored: Mapping[str, Values], block: tuple[int, int] | None) -> dict[str, Values]:
    found = {name: values for name, values in stored.items() if not name.endswith(_ONLY_INFERENCE)}
    for name, values in stored.items():
        if values.dtype in _FP8 and len(values.shape) >= 2:
            scales = next((found.pop(f"{name}{end}") for end in _SCALES if f"{name}{end}" in found), None)
            if scales is None:
                raise ValueError(f"{name} has dtype {values.dtype}, but its scales {name}{_SCALES[0]} are missing")
            found[name] = _ScaledBlocks(values, scales, _fitting_block(name, values.shape, scales.shape, block))
    return found


def _from_mxfp4(stored: Mapping[str, Values]) -> dict[str, Values]:
    blocks_end, scales_end = "_blocks", "_scales"
    found: dict[str, Values] = {}
    for name, values in stored.items():
        start = name.removesuffix(blocks_end)
        scales = stored.get(f"{start}{scales_end}")
        if name.endswith(blocks_end) and values.dtype == torch.uint8:
            if len(values.shape) != 4 or values.shape[3] != _BYTES:
                raise ValueError(f"{name} has shape {list(values.shape)}, not 4 dims of which the last is {_BYTES}")
            if scales is None:
                raise ValueError(f"{name} has MXFP4 weights, but its scales {start}{scales_end} are missing")
            if scales.dtype != torch.uint8 or scales.shape != values.shape[:3]:
                raise ValueError(
                    f"{start}{scales_end} has dtype {scales.dtype} and shape {list(scales.shape)}, but {name} needs "
                    f"torch.uint8 and {list(values.shape[:3])}"
                )
            found[start] = _Groups(values, scales)
        elif not (name.endswith(scales_end) and f"{name.removesuffix(scales_end)}{blocks_end}" in stored):
            found[name] = values
    return found


def _fitting_block(
    name: str, weight: tuple[int, ...], scales: tuple[int, ...], block: tuple[int, int] | None
) -> tuple[int, int]:
    """Return the rows and columns of a ``weight`` that share one of its ``scales``."""
    *stack, rows, columns = weight
    matrix = max(1, rows), max(1, columns)
    for size in (block, (1, matrix[1]), matrix):
        if size and scales == (*stack, -(-rows // size[0]), -(-columns // size[1])):
            return size
    if prod(scales) == prod(stack):  # one scale per matrix, as [] or [1]
        return matrix
    needed = "one scale per row or per matrix"
    if block:
        shape = [*stack, -(-rows // block[0]), -(-columns // block[1])]
        needed = f"{shape} for blocks of {list(block)}"
    raise ValueError(f"{name} has shape {list(weight)}, but its scales have shape {list(scales)}, not {needed}")


class _ScaledBlocks:
    """FP8 matrices [..., R, C], of which each block is multiplied by a scale."""

    dtype = torch.float32

    def __init__(self, weight: Values, scales: Values, block: tuple[int, int]) -> None:
        self.shape = weight.shape
        self._weight, self._scales, self._block = weight, scales, block

    def read(self, first: int, count: int) -> Tensor:
        return _read_rows(self.shape, first, count, self._rows)

    def _rows(self, matrix: int, begin: int, end: int) -> Tensor:
        rows, columns = self.shape[-2:]
        height, width = self._block
        down, across = -(-rows // height), -(-columns // width)
        top, bottom = begin // height, -(-end // height)
        values = self._weight.read((matrix * rows + begin) * columns, (end - begin) * columns).float()
        scales = _floats(self._scales.read((matrix * down + top) * across, (bottom - top) * across))
        of_rows = torch.arange(begin, end) // height - top
        by_row = scales.view(-1, across)[of_rows]
        return values.view(-1, columns).mul_(by_row.repeat_interleave(width, 1)[:, :columns])


class _Groups:
    """Matrices in MXFP4, transposed: stored [E, O, G, 16] with an exponent per group, read as [E, I, O]."""

    dtype = torch.bfloat16

    def __init__(self, blocks: Values, exponents: Values) -> None:
        stack, outputs, groups, _ = blocks.shape
        self.shape = (stack, groups * 2 * _BYTES, outputs)
        self._blocks, self._exponents = blocks, exponents

    def read(self, first: int, count: int) -> Tensor:
        return _read_rows(self.shape, first, count, self._rows)

    def _rows(self, matrix: int, begin: int, end: int) -> Tensor:
        _, inputs, outputs = self.shape
        all_groups = inputs // (2 * _BYTES)
        first, last = begin // (2 * _BYTES), -(-end // (2 * _BYTES))
        pairs, exponents = (
            stored.read(matrix * outputs * size, outputs * size).view(outputs, all_groups, -1)[:, first:last]
            for stored, size in ((self._blocks, all_groups * _BYTES), (self._exponents, all_groups))
        )
        values = _pairs()[pairs.int()].view(self.dtype)
        values = torch.ldexp(values, exponents.int() - _BIAS).to(self.dtype)  # a product overflows earlier
        return values.flatten(1).T[begin - first * 2 * _BYTES : end - first * 2 * _BYTES]


def _read_rows(shape: tuple[int, ...], first: int, count: int, rows_of: Callable[[int, int, int], Tensor]) -> Tensor:
    """Return ``count`` elements of matrices [..., R, C], flattened, starting at ``first``.

    ``rows_of`` maps the number of a matrix and an interval of its rows to these rows.
    """
    *_, rows, columns = shape
    end = first + count
    pieces = []
    while first < end:
        matrix, begin = divmod(first, rows * columns)
        stop = min(rows * columns, begin + end - first)
        top, bottom = begin // columns, -(-stop // columns)
        values = rows_of(matrix, top, bottom).flatten()
        pieces.append(values[begin - top * columns : stop - top * columns])
        first += stop - begin
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces or [torch.empty(0)])


def _floats(scales: Tensor) -> Tensor:
    """Return scales in fp32. Unsigned bytes are exponents."""
    return (scales.float() - _BIAS).exp2() if scales.dtype == torch.uint8 else scales.float()


@functools.cache
def _pairs() -> Tensor:
    """Return the two values of each byte, in bf16 with the low half first, as one integer: [256]."""
    byte, values = torch.arange(256), torch.tensor(_FP4, dtype=torch.bfloat16)
    return values[torch.stack((byte % 16, byte // 16), 1)].view(torch.int32).squeeze(1)
