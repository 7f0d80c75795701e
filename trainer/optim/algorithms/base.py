"""Base classes of the optimizers in this package."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.optim import AdamW

_IS_ADAMW = "is_adamw"


class Transactional(torch.optim.Optimizer):
    """Base class of optimizers whose steps are accepted or rejected on the device.

    Like torch's fused optimizers, ``step`` reads ``grad_scale`` and ``found_inf``.
    """

    _step_supports_amp_scaling = True
    grad_scale: Tensor | None = None
    found_inf: Tensor | None = None

    def set(self, tensor: Tensor, value: Tensor) -> None:
        """Copy ``value`` to ``tensor``, unless the step is rejected."""
        tensor.copy_(value if self.found_inf is None else torch.where(self.found_inf.bool(), tensor, value))


class BesideAdamW(Transactional):
    """Base class of optimizers with their own update rule for some parameters and AdamW for the others."""

    def __init__(
        self, groups: list[dict[str, Any]], is_own: Callable[[Tensor], bool], defaults: dict[str, Any],
        betas: tuple[float, float], eps: float,
    ) -> None:  # fmt: skip
        """Split ``groups`` by update rule.

        Args:
            is_own: Returns whether a parameter uses the update rule of the subclass instead of AdamW.
            betas: Betas of AdamW.
            eps: Epsilon of AdamW.
        """
        super().__init__([part for group in groups for part in _split(group, is_own)], defaults)
        others = [group for group in self.param_groups if group[_IS_ADAMW]]
        self._adamw = AdamW(others, lr=defaults["lr"], betas=betas, eps=eps, fused=True) if others else None
        if self._adamw is not None:
            self._adamw.state = self.state

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update all parameters. Their gradients may be overwritten."""
        assert closure is None
        if self._adamw is not None:
            self._adamw.grad_scale, self._adamw.found_inf = self.grad_scale, self.found_inf  # type: ignore[attr-defined]
            self._adamw.step()
        own = [(tensor, group) for group in self.param_groups if not group[_IS_ADAMW] for tensor in group["params"]]
        self.update(own)

    def update(self, own: list[tuple[Tensor, dict[str, Any]]]) -> None:
        """Update parameters by the update rule of the subclass. ``own``: pairs of a parameter and its group."""
        raise NotImplementedError


def _split(group: dict[str, Any], is_own: Callable[[Tensor], bool]) -> Iterator[dict[str, Any]]:
    own, others = ([tensor for tensor in group["params"] if is_own(tensor) == wanted] for wanted in (True, False))
    if own:
        yield {**group, "params": own, _IS_ADAMW: False}
    if others or not own:
        yield {**group, "params": others, _IS_ADAMW: True, "name": f"{group['name']}.adamw" if own else group["name"]}
