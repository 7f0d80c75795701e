"""Pipeline stages: copies of a model without the modules of other stages."""

import copy
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from serried.configs.errors import UserError
from serried.parallel.layout.local_shards import tied_names
from serried.parallel.layout.mesh import Layout
from serried.parallel.layout.shard_specs import stages_of
from serried.parallel.plan import ParallelPlan


class SkippedModule(nn.Module):
    """Placeholder for a module of another stage. Returns its first argument."""

    def __init__(self) -> None:
        super().__init__()
        self.register_parameter("weight", None)  # read by a head that is tied to an embedding

    def forward(self, x: Tensor, *_: Any, **__: Any) -> Tensor:
        return x


class TiedEnd(SkippedModule):
    """Placeholder with the tied parameters of a module whose forward runs on the first stage."""

    def __init__(self, module: nn.Module, tied: Iterable[str], *, is_last: bool) -> None:
        """
        Args:
            module: The module with tied parameters.
            tied: Names of the parameters within ``module``, such as ``table.weight``.
            is_last: Whether this is the last stage. On the stages between, the parameters are None.
        """
        super().__init__()
        for name in tied:
            path, _, last = name.rpartition(".")
            owner: nn.Module = self
            for part in filter(None, path.split(".")):
                if part not in owner._modules:
                    owner.add_module(part, SkippedModule())
                owner = owner.get_submodule(part)
            owner.register_parameter(last, module.get_parameter(name) if is_last else None)


def split(model: nn.Module, plan: ParallelPlan, layout: Layout, pipeline: int) -> dict[int, nn.Module]:
    """Return the stages at pipeline rank ``pipeline``, by number; the full model if there is only one stage.

    A stage has the class of the model, and parameter names do not change. Modules registered before the first block
    belong to the first stage. Modules registered after it that are not blocks belong to the last stage. Each stage runs
    the full forward of the model, which may therefore only pass the residual stream from module to module: every stage
    would repeat any other operation. The first forward of a stage raises a ``UserError`` if it finds such an operation.

    Raises:
        UserError: The plan names no blocks or too few, or does not declare a parameter shared by stages.
    """
    if layout.stages == 1:
        return {0: model}
    if not plan.blocks:
        raise UserError(
            f"parallel.pipeline={layout.pipeline}: {type(model).__name__} declares no blocks to split into stages; "
            "return ParallelPlan(blocks=...) from parallel_plan(), or use parallel.pipeline=1"
        )
    if len(plan.blocks) < layout.stages:
        raise UserError(
            f"parallel.pipeline={layout.pipeline} has {layout.stages} stages, more than the {len(plan.blocks)} blocks "
            f"of {type(model).__name__}; use fewer stages"
        )
    _refuse_undeclared_ties(model, plan, layout)
    stages = {stage: copy.deepcopy(model) for stage in layout.stages_of(pipeline)}
    for stage, module in stages.items():
        _leave_only(module, stage, plan, layout)
        _Border(module, stage, plan, layout)
    return stages


def _refuse_undeclared_ties(model: nn.Module, plan: ParallelPlan, layout: Layout) -> None:
    stages = stages_of([name for name, _ in model.named_parameters(remove_duplicate=False)], plan, layout)
    for name, first in tied_names(model).items():
        if not set(stages[name]) <= set(stages[first]):
            raise UserError(
                f"{name} and {first} are one parameter in different stages of parallel.pipeline={layout.pipeline}, but "
                f"the plan does not declare it as tied; return ParallelPlan(tied=({first!r},), ...) if the first and "
                "the last stage share it, or use parallel.pipeline=1"
            )


def shared_buffers(names: Iterable[str], plan: ParallelPlan) -> dict[str, bool]:
    """Return whether every stage has a copy of the buffer, for each buffer in ``names``.

    That is the case for buffers of the modules that contain the blocks.
    """
    around = _around(plan)
    return {name: name.rpartition(".")[0] in around for name in names}


def _leave_only(model: nn.Module, stage: int, plan: ParallelPlan, layout: Layout) -> None:
    kept = {plan.blocks[number] for number in layout.block_range(stage, len(plan.blocks))}
    for path, module, of_stage in list(_parts(model, plan, layout.stages - 1)):
        if path in plan.blocks:
            if path not in kept:
                model.set_submodule(path, SkippedModule())
        elif stage == of_stage:
            continue
        elif path in _around(plan):
            for name, _ in list(module.named_parameters(recurse=False)):
                setattr(module, name, None)
        else:
            tied = [name.removeprefix(f"{path}.") for name in plan.tied if name.startswith(f"{path}.")]
            is_last = stage == layout.stages - 1
            model.set_submodule(path, TiedEnd(module, tied, is_last=is_last) if tied else SkippedModule())


class _Border:
    """Check of the first forward of a stage.

    The stage's input must reach its first block unchanged, and its last block's output must be the stage's output.
    """

    def __init__(self, model: nn.Module, stage: int, plan: ParallelPlan, layout: Layout) -> None:
        held = [plan.blocks[number] for number in layout.block_range(stage, len(plan.blocks))]
        self._model, self._pipeline = type(model).__name__, layout.pipeline
        self._first, self._last, self._expected = held[0], held[-1], torch.empty(0)
        first, last = model.get_submodule(held[0]), model.get_submodule(held[-1])
        self._hooks = []
        if stage > 0:
            self._hooks.append(model.register_forward_pre_hook(self._note_stream, with_kwargs=True))
            self._hooks.append(first.register_forward_pre_hook(self._compare_stream, with_kwargs=True))
        if stage < layout.stages - 1:
            self._hooks.append(last.register_forward_hook(self._note_result))
            self._hooks.append(model.register_forward_hook(self._compare_result))
        self._hooks.append(model.register_forward_hook(self._end))

    def _note_stream(self, _: nn.Module, args: Any, named: Mapping[str, Any]) -> None:
        self._expected = _bits(args, named)

    def _compare_stream(self, _: nn.Module, args: Any, named: Mapping[str, Any]) -> None:
        self._refuse_unless(self._expected.equal(_bits(args, named)), f"before {self._first}")

    def _note_result(self, _: nn.Module, __: Any, result: Any) -> None:
        self._expected = _bits((result,), {})

    def _compare_result(self, _: nn.Module, __: Any, result: Any) -> None:
        self._refuse_unless(self._expected.equal(_bits((result,), {})), f"after {self._last}")

    def _end(self, *_: Any) -> None:
        for hook in self._hooks:
            hook.remove()

    def _refuse_unless(self, is_equal: bool, place: str) -> None:
        if not is_equal:
            raise UserError(
                f"parallel.pipeline={self._pipeline}: {self._model}.forward has computation {place} outside of its "
                "modules, and every stage would repeat it; move it into a module before the first block or after the "
                "last, or use parallel.pipeline=1"
            )


def _bits(args: tuple[Any, ...], named: Mapping[str, Any]) -> Tensor:
    """Return a copy of the first argument as bytes, so that NaN compares equal to itself."""
    stream = args[0] if args else next(iter(named.values()))
    if not isinstance(stream, Tensor):
        return torch.empty(0)
    return stream.detach().clone(memory_format=torch.contiguous_format).view(-1).view(torch.uint8)


def _parts(model: nn.Module, plan: ParallelPlan, last: int) -> Iterator[tuple[str, nn.Module, int]]:
    """Yield path, module and stage of blocks, of their parents and of their siblings.

    The stage has no meaning for blocks.
    """
    around, is_behind = _around(plan), False
    for path, module in model.named_modules():
        if path in around or path.rpartition(".")[0] in around:
            is_behind = is_behind or path in plan.blocks
            yield path, module, last if is_behind else 0


def _around(plan: ParallelPlan) -> set[str]:
    """Return the names of the modules that contain blocks: the model and, for example, its list of layers."""
    parts = [block.split(".") for block in plan.blocks]
    return {".".join(part[:length]) for part in parts for length in range(len(part))}
