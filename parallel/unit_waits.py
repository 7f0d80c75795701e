"""When a sharded model waits for other ranks: marks around what FSDP2 does before and after each of its units.

FSDP2 gathers a unit in a hook before its forward and in one before its backward, and reduces its gradients in an
autograd node behind its backward. Hooks of ours, registered after those, lie around them. On a CPU that is where the
collectives run; on a GPU, where the computing stream waits for what has not overlapped, and copies it to its place.
"""

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn

from serried.parallel.phases import GradientWait, Phases


class UnitWaits:
    """Marks the waits of a marked step; in all others its hooks return at once."""

    def __init__(self, units: Sequence[nn.Module], phases: Phases) -> None:
        """``units``: all modules that ``fully_shard`` was called on, the root first."""
        self._phases = phases
        self.reduces = True
        """Whether backward reduces gradients: in micro-batches without, nobody waits there."""
        self._root = units[0]
        self._own = {unit: _own_parameters(unit, units) for unit in units}
        self._given: tuple[Any, ...] = ()
        self._last_gradients: list[Tensor] = []
        self._wait: GradientWait | None = None
        for unit in units:
            unit.register_forward_pre_hook(self._before_gather, prepend=True)
            unit.register_forward_pre_hook(self._after_gather)
            unit.register_forward_hook(self._before_gather_of_backward, prepend=True)
            unit.register_forward_hook(self._after_gather_of_backward)

    def forget(self) -> None:
        """The micro-batch is done."""
        if self._wait is not None:
            self._wait.remove()
        self._wait = None
        self._last_gradients.clear()

    def _before_gather(self, unit: nn.Module, given: tuple[Any, ...]) -> None:
        del unit
        if self._phases.are_marked:
            self._given = given
            self._phases.begin_wait()

    def _after_gather(self, unit: nn.Module, passed_on: tuple[Any, ...]) -> None:
        if not self._phases.are_marked:
            return
        self._phases.end_wait()
        if not self.reduces:
            return
        for given, tensor in zip(self._given, passed_on, strict=False):
            # What comes out of FSDP2's node as another tensor has its reduction behind it in backward.
            if isinstance(tensor, Tensor) and tensor is not given and tensor.grad_fn is not None:
                tensor.grad_fn.register_prehook(_ignoring_arguments(self._phases.begin_wait))
                tensor.grad_fn.register_hook(_ignoring_arguments(self._phases.end_wait))
                return
        if not any(isinstance(tensor, Tensor) and tensor.requires_grad for tensor in passed_on):
            # Tokens have no gradient, so no node: such a unit is reduced when all of backward is done.
            parameters = (getattr(module, name) for module, name in self._own[unit])
            self._last_gradients += [parameter for parameter in parameters if parameter.requires_grad]

    def _before_gather_of_backward(self, unit: nn.Module, given: Any, output: Any) -> None:
        del unit, given
        if self._phases.are_marked and isinstance(output, Tensor) and output.requires_grad:
            output.register_hook(_ignoring_arguments(self._phases.begin_wait))

    def _after_gather_of_backward(self, unit: nn.Module, given: Any, output: Any) -> None:
        del given
        if not self._phases.are_marked:
            return
        if isinstance(output, Tensor) and output.requires_grad:
            output.register_hook(_ignoring_arguments(self._phases.end_wait))
        if unit is self._root and self._last_gradients:
            self._wait = self._phases.wait_after(self._last_gradients)


def _ignoring_arguments(function: Callable[[], None]) -> Callable[..., None]:
    return lambda *_: function()


def _own_parameters(unit: nn.Module, units: Sequence[nn.Module]) -> list[tuple[nn.Module, str]]:
    """Where the parameters of ``unit`` hang that are of no unit within it: there lie whole ones while it runs."""
    within = set(unit.modules())
    inner = {module for other in units if other is not unit and other in within for module in other.modules()}
    return [
        (module, name)
        for module in unit.modules()
        if module not in inner
        for name, _ in module.named_parameters(recurse=False)
    ]
