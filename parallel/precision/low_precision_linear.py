"""Linear layers of the blocks with another matrix product, such as float8 of torchao.

A layer keeps its class, parameter names and hooks. Its attribute ``product`` replaces ``F.linear``, also in the forward
of the tensor axis. Checkpoints and sharding are unaffected.
"""

import logging
import warnings
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from types import MethodType
from typing import Any, NamedTuple

from torch import Tensor, nn

from serried.configs.errors import UserError
from serried.configs.requirements import install_command
from serried.parallel.layout.mesh import Layout
from serried.parallel.lora import is_linear
from serried.parallel.plan import ParallelPlan

Product = Callable[[Tensor, Tensor], Tensor]
"""Function of x [..., I] and a weight [O, I] that returns [..., O]."""
_ROUTERS = ("gate", "router")
"""Last parts of the names of routers, which are excluded because rounding would change the chosen experts."""


class Chosen(NamedTuple):
    """The linear layers of the blocks of a model."""

    names: Sequence[str]
    """Linear layers that support low-precision products."""
    others: dict[str, list[str]]
    """Names of the other linear layers, by the reason for excluding them."""

    def describe(self) -> str:
        """Describe the choice in one line.

        Example: ``28 of 29 linear layers of the blocks (not layers.0.mlp.down_proj: 24 inputs, no multiple of 16)``.
        """
        total = len(self.names) + sum(map(len, self.others.values()))
        rest = [
            f"{names[0]}{f' and {len(names) - 1} more' if len(names) > 1 else ''}: {reason}"
            for reason, names in self.others.items()
        ]
        return f"{len(self.names)} of {total} linear layers of the blocks" + (
            f" (not {'; '.join(rest)})" if rest else ""
        )


def choose_linear(model: nn.Module, plan: ParallelPlan, layout: Layout, *, rows: int, columns: int) -> Chosen:
    """Choose the trained linear layers of the blocks that support low-precision products.

    In the weight, or this rank's shard of it, outputs must be a multiple of ``rows`` and inputs of ``columns``. Call
    this before sharding.
    """
    blocks = tuple(f"{name}." for name in plan.blocks_in(model))
    encoders = {name for name, module in model.named_modules() if isinstance(module, nn.TransformerEncoderLayer)}
    names: list[str] = []
    others: dict[str, list[str]] = {}
    for name, module in model.named_modules():
        if not (is_linear(module) and name.startswith(blocks)):
            continue
        reason = _obstacle(module, plan.role(name), layout.tensor, rows, columns)
        parent, _, last = name.rpartition(".")
        if last in _ROUTERS:
            reason = "a router"
        if parent in encoders:
            reason = "in a TransformerEncoderLayer, whose evaluation reads the weight without calling it"
        if reason:
            others.setdefault(reason, []).append(name)
        else:
            names.append(name)
    return Chosen(names, others)


def _obstacle(module: Any, role: str | None, tensor: int, rows: int, columns: int) -> str:
    if type(module).forward is not nn.Linear.forward or "forward" in vars(module):
        return f"a {type(module).__name__} with its own forward"
    if not module.weight.requires_grad:
        return "frozen"
    outputs, inputs = module.weight.shape
    outputs //= tensor if role == "column" else 1
    inputs //= tensor if role == "row" else 1
    for size, multiple, what in ((outputs, rows, "outputs"), (inputs, columns, "inputs")):
        if size % multiple:
            return f"{size} {what}, not a multiple of {multiple}"
    return ""


def set_product(model: nn.Module, names: Sequence[str], product: Product) -> None:
    """Make the linear layers ``names`` compute with ``product``. Call this before sharding."""
    for name in names:
        module: Any = model.get_submodule(name)
        module.product = product
        module.forward = MethodType(_forward, module)  # one function for all layers, so torch.compile makes one graph


def _forward(module: Any, x: Tensor) -> Tensor:
    output: Tensor = module.product(x, module.weight)
    return output if module.bias is None else output + module.bias.to(output.dtype)


def check_torchao(setting: str, instead: str, library: str = "torchao") -> None:
    """Raise ``UserError`` if the library that ``setting`` needs is not installed."""
    if find_spec(library) is None:
        raise UserError(
            f"{setting} needs the library {library}, but it is not installed; use: {install_command('lowbit')}, or "
            f"{instead}"
        )


def product_of_torchao(setting: str, instead: str, make: Callable[[], Product]) -> Product:
    """Return the product that ``make`` builds with torchao.

    Raises:
        UserError: The installed version of torchao lacks a function that ``make`` uses.
    """
    try:
        return make()
    except (ImportError, AttributeError) as error:
        raise UserError(
            f"{setting} needs torchao>=0.18, but the installed version does not fit ({error}); use: pip install -U "
            f"'torchao>=0.18', or {instead}"
        ) from None


def import_torchao() -> None:
    """Import torchao without its warnings about GPU kernels that are not needed."""
    loggers = [logging.getLogger(name) for name in ("torchao", "torch.utils._pytree")]
    levels = [logger.level for logger in loggers]
    try:
        for logger in loggers:
            logger.setLevel(logging.ERROR)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            import torchao.prototype.qat  # noqa: F401 -- imports the rest of torchao too
    finally:
        for each, level in zip(loggers, levels, strict=True):
            each.setLevel(level)
