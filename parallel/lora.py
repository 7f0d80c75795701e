"""Low-rank adapters of linear layers: LoRA (https://arxiv.org/abs/2106.09685), DoRA (https://arxiv.org/abs/2402.09353).

An adapter is parameters of the layer itself, beside its weight, and a hook that adds to its output. So the
names of all weights stay, and what replaces a layer's forward, as the tensor axis does, need not know of adapters.

Shapes: I inputs, O outputs of the layer, R rank.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from serried.parallel.fp16_weight_gradients import linear
from serried.parallel.layout.local_shards import evaluating

A, B, MAGNITUDE = "lora_A", "lora_B", "lora_magnitude"
"""Names of the parameters: [R, I], [O, R] and, with DoRA, [O]."""


@dataclass
class Adapter:
    """How the adapter of a layer computes; the attribute ``adapter`` of the layer."""

    scale: float
    dropout: float
    is_conv1d: bool
    """Whether the layer's weight is [I, O], like in transformers' ``Conv1D``, instead of [O, I]."""
    is_on: bool = True
    """Whether the layer computes with it; see ``without_adapters``."""
    sum: Callable[[Tensor], Tensor] | None = None
    """Adds up what ranks have of the product with A, if they divide the layer's inputs: set by the tensor axis."""


def is_linear(module: nn.Module) -> bool:
    """Return whether adapters can be attached: to an ``nn.Linear`` that is called, and to a class named ``Conv1D``."""
    # MultiheadAttention reads the weight of its last layer without calling it.
    is_called = not isinstance(module, nn.modules.linear.NonDynamicallyQuantizableLinear)
    return (isinstance(module, nn.Linear) and is_called) or type(module).__name__ == "Conv1D"


def attach(module: Any, rank: int, adapter: Adapter, *, is_dora: bool, shared: nn.Parameter | None) -> nn.Parameter:
    """Add an adapter without values to a linear layer. Returns its A, which is ``shared`` if that is given."""
    weight = module.weight
    outputs, inputs = reversed(weight.shape) if adapter.is_conv1d else weight.shape

    def parameter(*shape: int) -> nn.Parameter:
        return nn.Parameter(torch.zeros(shape, dtype=torch.float32, device=weight.device))

    first = parameter(rank, inputs) if shared is None else shared
    module.register_parameter(A, first)
    module.register_parameter(B, parameter(outputs, rank))
    if is_dora:
        module.register_parameter(MAGNITUDE, parameter(outputs))
    module.adapter = adapter
    module.register_forward_hook(_add_scaled if is_dora else _add)
    return first


@contextmanager
def without_adapters(model: nn.Module) -> Iterator[None]:
    """The base model of ``model``, in evaluation mode and without gradients; afterwards it is as it was."""
    adapters = [each for module in model.modules() if isinstance(each := getattr(module, "adapter", None), Adapter)]
    for adapter in adapters:
        adapter.is_on = False
    try:
        with torch.no_grad(), evaluating([model]):
            yield
    finally:
        for adapter in adapters:
            adapter.is_on = True


def _add(module: Any, arguments: tuple[Tensor, ...], output: Tensor) -> Tensor:
    """LoRA: add B A x."""
    if not module.adapter.is_on:
        return output
    return output + _product(module, _dropped(module, arguments[0]))


def _add_scaled(module: Any, arguments: tuple[Tensor, ...], output: Tensor) -> Tensor:
    """DoRA: (W + B A) x, with each row of the matrix scaled to the length that is trained."""
    adapter: Adapter = module.adapter
    if not adapter.is_on:
        return output
    x, weight = _dropped(module, arguments[0]), module.weight.T if adapter.is_conv1d else module.weight
    bias = 0 if module.bias is None else module.bias.to(output.dtype)
    plain = output - bias if x is arguments[0] else linear(x, weight)
    with torch.no_grad():  # as the authors and PEFT do: the gradient through the length is left out
        both = weight + adapter.scale * (getattr(module, B) @ getattr(module, A)).to(weight.dtype)
        length = torch.linalg.vector_norm(both.float(), dim=1)
    # Both in the type of the products, in which sharded parameters are gathered: the numbers are then the same if they
    # are not sharded.
    factor = getattr(module, MAGNITUDE).to(output.dtype) / length.to(output.dtype)
    return factor * (plain + _product(module, x)) + bias


def _product(module: Any, x: Tensor) -> Tensor:
    adapter: Adapter = module.adapter
    hidden = linear(x, getattr(module, A))
    if adapter.sum is not None:
        hidden = adapter.sum(hidden)
    return linear(hidden, getattr(module, B)) * adapter.scale


def _dropped(module: Any, x: Tensor) -> Tensor:
    dropout = module.adapter.dropout
    return F.dropout(x, dropout) if dropout and module.training else x
