"""Adapters of stacked experts: which matrices they change, and their location in a checkpoint in PEFT's format."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from torch import nn

from serried.configs.errors import UserError
from serried.configs.hugging_face.adapter_folder import PREFIX, matches_layer
from serried.configs.hugging_face.expert_names import for_all_experts, shared_name, single_matrix
from serried.configs.schema.sections import AdapterSection
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


class ExpertLayers:
    """Stacked experts of a model."""

    def __init__(self, model: nn.Module, plan: ParallelPlan, exported: Exported, patterns: Sequence[str]) -> None:
        """``patterns``: value of ``adapter.modules``, which chooses one of PEFT's two forms."""
        shapes = {name: parameter.shape for name, parameter in model.named_parameters() if plan.is_expert(name)}
        stored = [part.name for name, shape in shapes.items() for part in exported(name, shape)]
        self.names = [*shapes, *(name.removesuffix(".weight") for name in stored)]
        """Names of all matrices, both in the model and in a checkpoint."""
        shared, single = (_stacks_of(model, plan, exported, are_single=are_single) for are_single in (False, True))
        self.labels = {stack.label for stack in (*shared.values(), *single.values())}
        """Names of the layers in PEFT, in both forms."""
        are_single = any(_match(pattern, single) and not _match(pattern, shared) for pattern in patterns)
        self.stacks = single if are_single else shared
        """Layers that may have adapters, by the beginning of the names of the adapter's parameters."""

    def check(self, section: AdapterSection, ranks: Mapping[str, int], alphas: Mapping[str, float]) -> None:
        """Raise ``UserError`` if PEFT would refuse the adapters of experts, or compute other results with them.

        Args:
            section: The configuration of the adapters.
            ranks: Ranks of the adapted layers, some of which are stacked experts.
            alphas: Alphas of the adapted layers.
        """
        stacks = {name: stack for name, stack in self.stacks.items() if name in ranks}
        what = f"adapters of routed experts ({min(stack.label for stack in stacks.values())})"
        if section.method == "dora":
            raise UserError(
                f"adapter.method=dora: PEFT has no DoRA for {what}; use adapter=lora, or adapt other layers"
            )
        if section.dropout:
            raise UserError(
                f"adapter.dropout={section.dropout:g}: PEFT opens {what} only without dropout; use adapter.dropout=0"
            )
        if section.init == "orthogonal":
            raise UserError(f"adapter.init=orthogonal: PEFT has no such values for {what}; use adapter.init=uniform")
        if not next(iter(stacks.values())).singles:
            return
        instead = "use the names of stacked experts, such as 'adapter.modules=[gate_up_proj,down_proj]'"
        if missing := [stack.label for name, stack in self.stacks.items() if name not in stacks]:
            raise UserError(
                f"adapter.modules leaves out {missing[0]}: PEFT opens adapters of single experts only if gate, up and "
                f"down projection of all layers have one; {instead}"
            )
        values = {(ranks[name], alphas[name], section.scale) for name in stacks}
        if values != {(section.rank, section.alpha, "standard")}:
            raise UserError(
                "adapter.rank_pattern, adapter.alpha_pattern and adapter.scale=rslora: PEFT opens adapters of single "
                f"experts only with adapter.rank, adapter.alpha and adapter.scale=standard; {instead}"
            )


def _match(pattern: str, stacks: Mapping[str, Stack]) -> bool:
    return any(matches_layer(name, pattern) for stack in stacks.values() for name in stack.aliases)


def _stacks_of(model: nn.Module, plan: ParallelPlan, exported: Exported, *, are_single: bool) -> dict[str, Stack]:
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
