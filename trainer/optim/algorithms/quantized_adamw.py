"""AdamW with 8-bit or 4-bit running averages for matrices (https://arxiv.org/abs/2110.02861, 2309.01507).

Rows are quantized in blocks of 16 elements. Each block has a bf16 scale, its largest magnitude; an element is stored as
the code of a fraction of that scale. Blocks lie within rows, so ranks that shard a matrix hold complete blocks, and the
codes do not depend on the layout. The root of the running square is stored instead of the square, because its range has
half as many octaves.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from serried.configs.errors import UserError
from serried.parallel.layout.local_shards import local
from serried.parallel.layout.mesh import Layout
from serried.parallel.layout.shard_specs import ShardSpec
from serried.trainer.optim.algorithms.base import BesideAdamW

_BLOCK = 16
_ELEMENTS_AT_ONCE = 2**24
"""Maximum number of elements of a matrix that are in fp32 at a time, to limit working memory."""
_MEAN, _ROOT = "exp_avg", "exp_avg_root"


class QuantizedAdamW(BesideAdamW):
    """AdamW with 8-bit or 4-bit state for matrices with complete blocks, and plain AdamW for all other parameters.

    A matrix has complete blocks if its number of columns is a multiple of the block size.
    """

    def __init__(
        self, groups: list[dict[str, Any]], *, bits: int, lr: float, betas: tuple[float, float], eps: float
    ) -> None:
        self._bits, self._betas, self._eps = bits, betas, eps
        self._tables: dict[tuple[bool, torch.device], Tensor] = {}
        super().__init__(groups, _is_in_blocks, {"lr": lr}, betas, eps)

    def update(self, own: list[tuple[Tensor, dict[str, Any]]]) -> None:
        """Update the matrices, some rows at a time."""
        for parameter, group in own:
            if parameter.grad is not None:
                state = self.state[parameter]
                if not state:
                    self._begin(parameter, state)
                self.set(state["step"], state["step"] + 1)
                weights = local(parameter)
                flat = {key: local(each).flatten(0, -2) for key, each in state.items() if each.ndim}
                flat |= {"weights": weights.flatten(0, -2), "gradient": local(parameter.grad).flatten(0, -2)}
                rows = max(1, _ELEMENTS_AT_ONCE // weights.shape[-1])
                for pieces in zip(*(tensor.split(rows) for tensor in flat.values()), strict=True):
                    self._update(dict(zip(flat, pieces, strict=True)), state["step"], group)

    def _begin(self, parameter: Tensor, state: dict[str, Any]) -> None:
        columns = parameter.shape[-1]
        state["step"] = torch.zeros((), device=parameter.device)
        for key in (_MEAN, _ROOT):
            state[key] = _zeros(parameter, columns * self._bits // 8, torch.uint8)
            state[f"{key}_scale"] = _zeros(parameter, columns // _BLOCK, torch.bfloat16)

    def _update(self, rows: dict[str, Tensor], step: Tensor, group: dict[str, Any]) -> None:
        weights, gradient = rows["weights"], rows["gradient"]
        if self.grad_scale is not None:
            gradient = gradient / self.grad_scale
        mean = self._read(rows, _MEAN).lerp_(gradient, 1 - self._betas[0])
        square = self._read(rows, _ROOT).square_().lerp_(gradient.square(), 1 - self._betas[1])
        root = square.sqrt_()
        denominator = (root / (1 - self._betas[1] ** step).sqrt()).add_(self._eps)
        change = mean.div(1 - self._betas[0] ** step).div_(denominator)
        self.set(weights, weights.mul(1 - group["lr"] * group["weight_decay"]).add_(change, alpha=-group["lr"]))
        self._write(rows, _MEAN, mean)
        self._write(rows, _ROOT, root)

    def _read(self, rows: dict[str, Tensor], key: str) -> Tensor:
        codes, scale = rows[key], rows[f"{key}_scale"]
        if self._bits == 4:
            codes = torch.stack((codes & 15, codes >> 4), dim=-1).flatten(-2)
        values = self._values(key, codes.device)[codes.int()]
        return (values.unflatten(-1, (-1, _BLOCK)) * scale.float().unsqueeze(-1)).flatten(-2)

    def _write(self, rows: dict[str, Tensor], key: str, numbers: Tensor) -> None:
        blocks = numbers.unflatten(-1, (-1, _BLOCK))
        scale = blocks.abs().amax(-1).to(torch.bfloat16)
        fractions = blocks / scale.float().clamp(min=torch.finfo(torch.float32).tiny).unsqueeze(-1)
        values = self._values(key, numbers.device)
        codes = torch.bucketize(fractions.flatten(-2), (values[1:] + values[:-1]) / 2, out_int32=True).to(torch.uint8)
        if self._bits == 4:
            codes = codes[..., ::2] | codes[..., 1::2] << 4
        self.set(rows[key], codes)
        self.set(rows[f"{key}_scale"], scale)

    def _values(self, key: str, device: torch.device) -> Tensor:
        """Return the values of all codes of state ``key``, in code order."""
        which = (key == _MEAN, device)
        if which not in self._tables:
            self._tables[which] = torch.tensor(_numbers(self._bits, signed=key == _MEAN), device=device)
        return self._tables[which]


def check_columns(optim: str, specs: Iterable[ShardSpec], layout: Layout) -> None:
    """Raise ``UserError`` if tensor-parallel shards would not consist of the same blocks as the full matrix."""
    for spec in specs:
        columns = [box.sizes[-1] for box, _ in spec.sources(layout)] if len(spec.shape) > 1 else []
        odd = [count for count in columns if (count % _BLOCK == 0) != (spec.shape[-1] % _BLOCK == 0)]
        if odd:
            raise UserError(
                f"parallel.tensor={layout.tensor} divides {spec.name} into shards of {odd[0]} columns, but "
                f"optim={optim} needs a multiple of {_BLOCK}; use parallel.tensor=1 or optim=adamw"
            )


def _is_in_blocks(parameter: Tensor) -> bool:
    # flatten() would copy a tensor that is not contiguous
    is_plain = parameter.dtype == torch.float32 and local(parameter).is_contiguous()
    return is_plain and parameter.ndim > 1 and parameter.shape[-1] % _BLOCK == 0


def _zeros(parameter: Tensor, columns: int, dtype: torch.dtype) -> Tensor:
    """Return zeros with ``columns`` columns, otherwise with the shape, sharding and device of ``parameter``."""
    some = parameter.detach().narrow(-1, 0, columns)
    return torch.zeros_like(some, dtype=dtype, memory_format=torch.contiguous_format)


def _numbers(bits: int, *, signed: bool) -> list[float]:
    """Return the values of all codes in ascending order.

    They are low-bit floats of magnitude at most 1. Signed codes include zero.
    """
    per_octave = 2 ** (bits // 2 - signed)
    codes = range(2 ** (bits - signed))
    magnitudes = [(1 - code % per_octave / (2 * per_octave)) * 2.0 ** -(code // per_octave) for code in codes]
    if not signed:
        return magnitudes[::-1]
    magnitudes = magnitudes[:-1]
    return [*(-magnitude for magnitude in magnitudes), 0.0, *magnitudes[::-1]]
