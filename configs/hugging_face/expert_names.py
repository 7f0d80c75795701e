"""Names of the adapters of routed experts in PEFT's format, which has two forms.

Shared: transformers 5 stacks the matrices of all experts in one parameter, ``mlp.experts.gate_up_proj`` or
``mlp.experts.down_proj``, and PEFT adapts it (``target_parameters``). One A serves the gate and the up projection of an
expert. PEFT nests the adapters of a module: the first one has ``.base_layer`` in its name.

Single: each matrix of each expert has an adapter, ``mlp.experts.3.gate_proj``, as with transformers 4.
"""

import re
from collections.abc import Collection
from typing import NamedTuple

_POSITIONS = {
    "gate_proj": ("gate_up_proj", 0, 2), "up_proj": ("gate_up_proj", 1, 2), "down_proj": ("down_proj", 0, 1),
    "w1": ("gate_up_proj", 0, 2), "w3": ("gate_up_proj", 1, 2), "w2": ("down_proj", 0, 1),
}  # fmt: skip
"""Stacked parameter that contains a matrix of an expert, the matrix's position in it, and the number of positions."""
SINGLE_NAMES = frozenset(_POSITIONS)
"""Last parts of the names of single matrices. PEFT 0.21 takes a layer with such a name for a routed expert."""
_INNER = ".base_layer"


class Matrix(NamedTuple):
    """A matrix of one expert."""

    layer: str
    """Name of the stacked parameter that contains it."""
    expert: int
    position: int
    """Position among the matrices of this expert in the stacked parameter."""
    parts: int
    """Number of matrices of an expert in the stacked parameter."""


def single_matrix(name: str) -> Matrix | None:
    """Return the location of the matrix ``name`` in the shared form; None if ``name`` is no matrix of an expert."""
    found = re.fullmatch(r"(.+\.experts)\.(\d+)\.(\w+)", name)
    if found is None or found[3] not in _POSITIONS:
        return None
    stacked, index, parts = _POSITIONS[found[3]]
    module = found[1].replace(".block_sparse_moe.", ".mlp.")  # transformers 5 renames it in Mixtral
    return Matrix(f"{module}.{stacked}", int(found[2]), index, parts)


def for_all_experts(name: str) -> str:
    """Return ``name`` with ``*`` in place of the number of an expert."""
    return re.sub(r"(\.experts)\.\d+\.", r"\1.*.", name)


def layers_of(names: Collection[str], parameters: Collection[str]) -> dict[str, str]:
    """Return the layers that adapters belong to, by the names of the adapters without their endings.

    ``parameters``: value of ``target_parameters``.
    """
    layers = {}
    for name in names:
        outer = name.removesuffix(_INNER)
        if not outer.endswith(".experts"):
            layers[name] = for_all_experts(name) if single_matrix(name) else name
        elif outer != name or (f"{outer}{_INNER}" not in names and _is_target(f"{outer}.gate_up_proj", parameters)):
            layers[name] = f"{outer}.gate_up_proj"
        else:
            layers[name] = f"{outer}.down_proj"
    return layers


def shared_name(layer: str, depth: int) -> str:
    """Return the name that PEFT gives to the adapter of the stacked parameter ``layer``.

    ``depth``: number of later parameters of the same module that have adapters.
    """
    return layer.rpartition(".")[0] + _INNER * depth


def _is_target(layer: str, parameters: Collection[str]) -> bool:
    return any(f".{layer}".endswith(f".{parameter}") for parameter in parameters)
