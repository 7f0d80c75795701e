"""Optimizer whose state is kept in host memory."""

from typing import Any

import torch
from torch import Tensor

from serried.parallel.layout.local_shards import local
from serried.runtime.accelerator import wait_for_stream


class Offloaded(torch.optim.Optimizer):
    """Wrapper that steps another optimizer parameter by parameter, with the optimizer state in host memory.

    Only the state of one parameter at a time is on the device. Zero-dim tensors, such as step counts, stay on it.
    """

    grad_scale: Tensor | None = None
    found_inf: Tensor | None = None

    def __init__(self, optimizer: torch.optim.Optimizer, *, takes_verdict: bool) -> None:
        """Wrap ``optimizer``. ``takes_verdict``: whether it reads ``grad_scale`` and ``found_inf``."""
        super().__init__(optimizer.param_groups, {})  # the same dicts as in ``optimizer``
        self.state = optimizer.state
        self.whole_state = getattr(optimizer, "whole_state", ())
        self._optimizer, self._step_supports_amp_scaling = optimizer, takes_verdict

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update all parameters. Waits for the device, so that the copies to the host are complete."""
        assert closure is None
        if self._step_supports_amp_scaling:
            self._optimizer.grad_scale, self._optimizer.found_inf = self.grad_scale, self.found_inf  # type: ignore[attr-defined]
        groups = self.param_groups
        before, after = [dict(group) for group in groups], [dict(group) for group in groups]
        try:
            for number, whole in enumerate(before):
                for parameter in whole["params"]:
                    for group, values in zip(groups, before, strict=True):
                        _set(group, values, [])  # counters in the groups advance once per step
                    groups[number]["params"] = [parameter]
                    self._update(parameter)
                    after[number] = dict(groups[number])
        finally:
            for group, values, whole in zip(groups, after, before, strict=True):
                _set(group, values, whole["params"])
        wait_for_stream()

    def _update(self, parameter: Tensor) -> None:
        """Update only ``parameter``. Its state is on its device during the update."""
        state = self.state.get(parameter, {})
        on_host = {key: value for key, value in state.items() if isinstance(value, Tensor) and value.ndim}
        for key, value in on_host.items():
            state[key] = value.to(parameter.device, non_blocking=True, copy=True)
        self._optimizer.step()
        state = self.state.get(parameter, {})
        for key, value in state.items():
            if isinstance(value, Tensor) and value.ndim:
                if key not in on_host:
                    on_host[key] = torch.empty_like(value, device="cpu", pin_memory=parameter.device.type != "cpu")
                local(on_host[key]).copy_(local(value), non_blocking=True)
                state[key] = on_host[key]


def _set(group: dict[str, Any], values: dict[str, Any], parameters: list[Tensor]) -> None:
    group.clear()
    group.update(values, params=parameters)
