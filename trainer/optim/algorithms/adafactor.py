"""Adafactor (https://arxiv.org/abs/1804.04235) for sharded parameters, with the same formulas as torch."""

from collections.abc import Iterator, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

from serried.parallel.layout.local_shards import local
from serried.parallel.optim.factor_sums import Sums
from serried.trainer.optim.algorithms.base import Transactional

_ROWS, _COLUMNS, _SQUARE = "row_var", "col_var", "variance"
_LEAST_SCALE = 1e-3
"""Minimum root mean square of a parameter for scaling its update."""


class Adafactor(Transactional):
    """Adafactor optimizer.

    Every rank holds the running squares of a matrix in full: one value per row and one per column.
    """

    whole_state = (_ROWS, _COLUMNS)

    def __init__(
        self, groups: list[dict[str, Any]], sums: Sums, *, lr: float, beta2_decay: float, clip_threshold: float
    ) -> None:
        super().__init__(groups, {"lr": lr, "beta2_decay": beta2_decay, "clip_threshold": clip_threshold})
        self._sums = sums

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update all parameters. Their gradients are overwritten."""
        assert closure is None
        group_of = {parameter: group for group in self.param_groups for parameter in group["params"]}
        matrices = [parameter for parameter in group_of if parameter.ndim > 1]
        if self.grad_scale is not None:
            for parameter in group_of:
                if parameter.grad is not None:
                    local(parameter.grad).div_(self.grad_scale)
        sums = self._sums.over(part for parameter in matrices for part in _rows_and_columns(parameter))
        factors = dict(zip(matrices, zip(sums[::2], sums[1::2], strict=True), strict=True))
        for parameter, group in group_of.items():
            if parameter.grad is not None:
                self._normalize(parameter, group["beta2_decay"], *factors.get(parameter, ()))
        sums = self._sums.over(part for parameter in group_of for part in _squares(parameter))
        for (parameter, group), of_weights, of_update in zip(group_of.items(), sums[::2], sums[1::2], strict=True):
            if parameter.grad is not None:
                self._update(parameter, group, of_weights, of_update)

    def _normalize(self, parameter: Tensor, decay: float, *factors: Tensor) -> None:
        """Divide the gradient by the root of its running square.

        ``factors``: for a matrix, the sums of the squared gradient per row and per column.
        """
        state, gradient, held = self.state[parameter], _gradient(parameter), self._sums.held(parameter)
        if not state:
            self._begin(parameter, state)
        step, least = state["step"] + 1, torch.finfo(gradient.dtype).eps
        share = (step**decay).to(gradient.dtype)
        if factors:
            (*_, rows, columns), here = held.spec.shape, held.box.indices()
            row = state[_ROWS].lerp(factors[0] / columns, share)
            column = state[_COLUMNS].lerp(factors[1] / rows, share)
            relative = row / row.mean(-1, keepdim=True).clamp(min=least)
            square = relative[here[:-1]].unsqueeze(-1) * column[(*here[:-2], here[-1])].unsqueeze(-2)
            self.set(state[_ROWS], row)
            self.set(state[_COLUMNS], column)
        else:
            running = local(state[_SQUARE])
            square = running.lerp(gradient.square(), share)
            self.set(running, square)
        self.set(state["step"], step)
        gradient.mul_(square.clamp_(min=least**2).rsqrt_())

    def _begin(self, parameter: Tensor, state: dict[str, Any]) -> None:
        shape = self._sums.held(parameter).spec.shape
        state["step"] = torch.zeros((), device=parameter.device)
        if parameter.ndim > 1:
            for key, kept in ((_ROWS, shape[:-1]), (_COLUMNS, (*shape[:-2], shape[-1]))):
                state[key] = torch.zeros(kept, dtype=parameter.dtype, device=parameter.device)
        else:
            state[_SQUARE] = torch.zeros_like(parameter)

    def _update(self, parameter: Tensor, group: dict[str, Any], of_weights: Tensor, of_update: Tensor) -> None:
        """Update the weights.

        ``of_weights``, ``of_update``: sums of squares of the weights and the update over the full parameter.
        """
        weights, lr, count = local(parameter), group["lr"], prod(self._sums.held(parameter).spec.shape)
        rate = self.state[parameter]["step"].rsqrt().clamp(max=lr)
        scale = (of_weights / count).sqrt().clamp(min=_LEAST_SCALE)
        clip = ((of_update / count).sqrt() / group["clip_threshold"]).clamp(min=1)
        moved = weights.mul(1 - lr * group["weight_decay"])
        self.set(weights, moved.addcmul_(_gradient(parameter), scale * rate / clip, value=-1))


def _gradient(parameter: Tensor) -> Tensor:
    """Return this rank's shard of the gradient, or zeros if there is none, because the other ranks sum over all
    shards."""
    return torch.zeros_like(local(parameter)) if parameter.grad is None else local(parameter.grad)


def _rows_and_columns(parameter: Tensor) -> Iterator[tuple[Tensor, Tensor, Sequence[int]]]:
    squares, (*others, row, column) = _gradient(parameter).square(), range(parameter.ndim)
    yield parameter, squares, (*others, row)
    yield parameter, squares, (*others, column)


def _squares(parameter: Tensor) -> Iterator[tuple[Tensor, Tensor, Sequence[int]]]:
    yield parameter, local(parameter).square(), ()
    yield parameter, _gradient(parameter).square(), ()
