"""Adapters of stacked experts: which matrices they change, and their location in a checkpoint in PEFT's format."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from torch import nn

from serried.configs.hugging_face.adapter_folder import PREFIX, matches_layer
from serried.configs.hugging_face.expert_names import for_all_experts, shared_name, single_matrix
from serried.parallel.checkpoint_mapping import Fragment
from serried.parallel.lora import A, attach_to_experts
from serried.parallel.plan import ParallelPlan
from serried.trainer.checkpoint.tensors import Exported


class Stack(NamedTuple):
    """Matrices of all experts of a mixture that have an adapter each, stacked in one parameter."""

    experts: str
    """Name of the module with the parameters."""
    matrices: tuple[str, ...]
    """Names of the adapted parameters there. Several share A."""
    label: str
    """Name of the matrices in PEFT; in the single form with ``*`` in place of the number of the expert."""
    singles: tuple[str, ...]
    """Names of the single matrices in PEFT, in the single form; in the shared form empty."""
    is_transposed: bool

    @property
    def name(self) -> str:
        """Last part of the label."""
        return self.label.rpartition(".")[2]

    @property
    def aliases(self) -> set[str]:
        """Names that the user may write."""
        return {self.label, *self.singles, *([] if self.singles else [f"{self.experts}.{self.name}"])}

    def matches_only_some(self, pattern: str) -> bool:
        """Return whether ``pattern`` matches the matrices of some experts, but not of all."""
        return 0 < sum(matches_layer(name, pattern) for name in self.singles) < len(self.singles)

    def attach(self, model: nn.Module, rank: int, scale: float) -> None:
        """Add an adapter to the matrices."""
        experts, name = model.get_submodule(self.experts), self.name if not self.singles else self.matrices[0]
        attach_to_experts(experts, name, rank, scale, self.matrices, is_transposed=self.is_transposed)

    def fragments(self, key: str, shape: Sequence[int], ending: str, depth: int) -> tuple[Fragment, ...]:
        """Return the location of the parameter ``key`` of the adapter in PEFT's format.

        ``ending``: end of the tensor's name. ``depth``: see ``expert_names.shared_name``.
        """
        if self.singles:
            names = [f"{PREFIX}{name}.{ending}" for name in self.singles]
            return tuple(Fragment.entry(name, shape, index) for index, name in enumerate(names))
        name, (experts, rows, columns) = f"{PREFIX}{shared_name(self.label, depth)}.{ending}", shape
        if key == A:
            return (Fragment.merged(name, shape, (experts * rows, columns)),)
        return (Fragment.merged(name, shape, (rows, columns * experts), order=(1, 2, 0)),)


def stacks_of(model: nn.Module, plan: ParallelPlan, exported: Exported, *, are_single: bool) -> dict[str, Stack]:
    """Return the stacked experts of ``model`` that may have adapters, in one of PEFT's two forms.

    The keys are the beginnings of the names of the adapter's parameters.
    """
    return {
        f"{stack.experts}.{stack.matrices[0] if are_single else stack.name}": stack
        for mixture in plan.mixtures
        for stack in _stacks(f"{mixture}.experts", model.get_submodule(f"{mixture}.experts"), exported, are_single)
    }


def _stacks(name: str, experts: Any, exported: Exported, are_single: bool) -> Iterator[Stack]:
    fused: Mapping[str, tuple[str, ...]] = getattr(experts, "fused", {})
    for last, matrices in fused.items():
        stored = {
            matrix: [part.name.removesuffix(".weight") for part in exported(f"{name}.{matrix}", parameter.shape)]
            for matrix in matrices
            for parameter in [getattr(experts, matrix)]
        }
        found = single_matrix(stored[matrices[0]][0])
        if are_single and found is not None and experts.is_single_in_peft:
            for matrix, names in stored.items():
                yield Stack(name, (matrix,), for_all_experts(names[0]), tuple(names), experts.is_transposed)
        elif not are_single:
            label = found.layer if found is not None else f"{stored[matrices[0]][0].rpartition('.')[0]}.{last}"
            yield Stack(name, matrices, label, (), experts.is_transposed)
