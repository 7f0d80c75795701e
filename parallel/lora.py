"""Low-rank adapters of linear layers: LoRA (https://arxiv.org/abs/2106.09685), DoRA (https://arxiv.org/abs/2402.09353).

An adapter consists of additional parameters of the layer and a forward hook that adds to its output. The names of the
other weights do not change, and code that replaces a layer's forward, such as the tensor axis, works unchanged.

Stacked experts have an adapter for each expert, stacked too. Their module adds the products (``add_to_experts``).

Shapes: I inputs, O outputs of the layer, R rank, E experts, N rows.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from serried.parallel.fp16_weight_gradients import linear
from serried.parallel.initialize import normal_rows
from serried.parallel.layout.local_shards import HeldTensor, evaluating

A, B, MAGNITUDE = "lora_A", "lora_B", "lora_magnitude"
"""Names of the adapter parameters, of shapes [R, I], [O, R] and, with DoRA, [O]."""


@dataclass
class Adapter:
    """Settings of the adapter of a layer, stored as the layer's attribute ``adapter``."""

    scale: float
    dropout: float
    is_conv1d: bool
    """Whether the layer's weight is [I, O], as in ``Conv1D`` of transformers, instead of [O, I]."""
    is_on: bool = True
    """Whether the adapter is active; see ``without_adapters``."""
    sum: Callable[[Tensor], Tensor] | None = None
    """Sums the product with A over ranks if the layer's inputs are sharded. Set by the tensor axis."""
    sum_squares: Callable[[Tensor], Tensor] | None = None
    """Sums squared norms of rows over ranks if the layer's inputs are sharded. Set by the tensor axis."""


@dataclass
class ExpertAdapter:
    """Adapter of stacked matrices, an item of the experts' attribute ``adapters`` by the name of the matrices.

    Its parameters, of shapes [E, R, I] and [E, O, R], are parameters of the experts too.
    """

    name: str
    """Beginning of the names of its parameters."""
    scale: float
    index: int = 0
    """Position of the rows of the matrices in B."""
    parts: int = 1
    """Number of stacked matrices that share A and have their rows in B."""
    is_on: bool = True

    def parameter(self, key: str) -> str:
        """Return the name of parameter ``key``, ``A`` or ``B``, in the module of the experts."""
        return f"{self.name}_{key}"


def is_linear(module: nn.Module) -> bool:
    """Return whether an adapter can be attached: to an ``nn.Linear`` whose forward is called, or to a ``Conv1D``."""
    # MultiheadAttention reads the weight of its last layer without calling it.
    is_called = not isinstance(module, nn.modules.linear.NonDynamicallyQuantizableLinear)
    return (isinstance(module, nn.Linear) and is_called) or type(module).__name__ == "Conv1D"


def attach(module: Any, rank: int, adapter: Adapter, *, is_dora: bool, shared: nn.Parameter | None) -> nn.Parameter:
    """Add an adapter filled with zeros to a linear layer. Return its parameter A, which is ``shared`` if given."""
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


def attach_to_experts(
    experts: Any, name: str, rank: int, scale: float, matrices: Sequence[str], *, is_transposed: bool
) -> None:
    """Add an adapter filled with zeros to stacked matrices [E, O, I] of ``experts``, which share A.

    ``is_transposed``: whether the matrices are [E, I, O] instead.
    """
    weights = [getattr(experts, matrix) for matrix in matrices]
    shapes = [weight.transpose(1, 2).shape if is_transposed else weight.shape for weight in weights]
    count, _, inputs = shapes[0]
    sizes = {A: (count, rank, inputs), B: (count, sum(outputs for _, outputs, _ in shapes), rank)}
    for index, matrix in enumerate(matrices):
        experts.adapters[matrix] = ExpertAdapter(name, scale, index, len(matrices))
    for key, size in sizes.items():
        zeros = torch.zeros(size, dtype=torch.float32, device=weights[0].device)
        experts.register_parameter(experts.adapters[matrices[0]].parameter(key), nn.Parameter(zeros))


def add_to_experts(
    experts: Any, name: str, rows: Tensor, output: Tensor, multiply: Callable[[Tensor, Tensor], Tensor]
) -> Tensor:
    """Add the product of the adapter of the stacked matrices ``name``, if they have one, to their ``output`` [N, O].

    ``multiply``: multiplies rows [N, I] by the matrices [E, O, I] of their experts.
    """
    adapter: ExpertAdapter | None = experts.adapters.get(name)
    if adapter is None or not adapter.is_on:
        return output
    hidden = multiply(rows, getattr(experts, adapter.parameter(A)))
    second = getattr(experts, adapter.parameter(B)).chunk(adapter.parts, dim=1)[adapter.index]
    return output + multiply(hidden, second.contiguous()) * adapter.scale


@contextmanager
def without_adapters(model: nn.Module) -> Iterator[None]:
    """Context manager that disables the adapters of ``model``, in evaluation mode and without gradients."""
    adapters = adapters_of(model)
    for adapter in adapters:
        adapter.is_on = False
    try:
        with torch.no_grad(), evaluating([model]):
            yield
    finally:
        for adapter in adapters:
            adapter.is_on = True


@torch.no_grad()
def initialize_orthogonal(held: HeldTensor, key: str, weight: str, seed: int) -> None:
    """Fill this rank's shard of A or B so that their product is zero (https://datta0.github.io/posts/rethink-lora-init).

    The rows of both are combinations of different rows of one orthogonal matrix.

    Args:
        held: Parameter A or B, given by ``key``.
        key: ``A`` or ``B``.
        weight: Name of the adapted weight. Layers that share A must have the same name.
        seed: Seed of the initialization.
    """
    rank, size = held.spec.shape if key == A else reversed(held.spec.shape)
    rows = torch.linalg.qr(normal_rows(seed, f"{weight}.orthogonal", (rank, rank), 0, rank).double()).Q
    if key == A:
        values = normal_rows(seed, held.name, (size, rank // 2), 0, size).double() @ rows[0::2]
        values = values.T
    else:
        values = normal_rows(seed, held.name, (rank // 2, size), 0, rank // 2).double().T @ rows[1::2]
    held.local.copy_(values[held.box.indices()] / 10)


def adapters_of(model: nn.Module) -> list[Adapter | ExpertAdapter]:
    """Return the adapters of all linear layers and stacked matrices of ``model``."""
    found: list[Adapter | ExpertAdapter] = []
    for module in model.modules():
        of_layer, of_experts = getattr(module, "adapter", None), getattr(module, "adapters", None)
        found += [of_layer] if isinstance(of_layer, Adapter) else []
        found += of_experts.values() if isinstance(of_experts, dict) else []
    return [adapter for adapter in found if isinstance(adapter, Adapter | ExpertAdapter)]


def _add(module: Any, arguments: tuple[Tensor, ...], output: Tensor) -> Tensor:
    """LoRA: add B A x."""
    if not module.adapter.is_on:
        return output
    return output + _product(module, _dropped(module, arguments[0]))


def _add_scaled(module: Any, arguments: tuple[Tensor, ...], output: Tensor) -> Tensor:
    """DoRA: (W + B A) x, with each row of the matrix scaled to a trained norm."""
    adapter: Adapter = module.adapter
    if not adapter.is_on:
        return output
    x, weight = _dropped(module, arguments[0]), module.weight.T if adapter.is_conv1d else module.weight
    bias = 0 if module.bias is None else module.bias.to(output.dtype)
    plain = output - bias if x is arguments[0] else _summed(adapter, linear(x, weight))
    with torch.no_grad():  # no gradient through the norm, as in the paper and in PEFT
        both = weight + adapter.scale * (getattr(module, B) @ getattr(module, A)).to(weight.dtype)
        if adapter.sum_squares is None:
            length = torch.linalg.vector_norm(both.float(), dim=1)
        else:
            length = adapter.sum_squares(both.float().square().sum(1)).sqrt()
    # Both in the compute dtype, in which sharded parameters are gathered, so that results are the same with and without
    # sharding.
    factor = getattr(module, MAGNITUDE).to(output.dtype) / length.to(output.dtype)
    return factor * (plain + _product(module, x)) + bias


def _product(module: Any, x: Tensor) -> Tensor:
    adapter: Adapter = module.adapter
    hidden = _summed(adapter, linear(x, getattr(module, A)))
    return linear(hidden, getattr(module, B)) * adapter.scale


def _summed(adapter: Adapter, product: Tensor) -> Tensor:
    return product if adapter.sum is None else adapter.sum(product)


def _dropped(module: Any, x: Tensor) -> Tensor:
    dropout = module.adapter.dropout
    return F.dropout(x, dropout) if dropout and module.training else x
