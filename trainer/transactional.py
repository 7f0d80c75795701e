"""An optimizer whose steps are accepted or rejected on the device."""

import torch
from torch import Tensor


class Transactional(torch.optim.Optimizer):
    """The base of such an optimizer: as a fused one of torch does, ``step`` reads ``grad_scale`` and ``found_inf``."""

    _step_supports_amp_scaling = True
    grad_scale: Tensor | None = None
    found_inf: Tensor | None = None

    def set(self, tensor: Tensor, value: Tensor) -> None:
        """Set ``tensor``, unless the step is rejected."""
        tensor.copy_(value if self.found_inf is None else torch.where(self.found_inf.bool(), tensor, value))
