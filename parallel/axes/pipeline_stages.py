"""Pipeline stages: a model of which the modules of other stages are left out."""

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
    """Placeholder of a module that another stage holds. Returns its first argument."""

    def __init__(self) -> None:
        super().__init__()
        self.register_parameter("weight", None)  # what a tied head reads of an embedding

    def forward(self, x: Tensor, *_: Any, **__: Any) -> Tensor:
        return x


class TiedEnd(SkippedModule):
    """Placeholder, in the last stage, of a module with tied parameters. The first stage computes its forward."""

    def __init__(self, module: nn.Module, tied: Iterable[str], *, is_last: bool) -> None:
        """``tied``: names within ``module``, such as ``table.weight``; None on the stages between."""
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
    """Return the stages of the ranks at coordinate ``pipeline``, by number; the whole model if there is one stage.

    A stage is of the model's class, and all names stay. Modules that are registered before the first block belong to
    the first stage, those after it that are not blocks to the last. Each stage runs the whole forward of the model, so
    it may only pass the stream from module to module: every stage would repeat any other operation. The first forward
    of a stage raises a ``UserError`` if there is one.

    Raises ``UserError`` if the plan names no blocks, or too few, or lacks a parameter that stages share.
    """
    if layout.stages == 1:
        return {0: model}
    if not plan.blocks:
        raise UserError(
            f"parallel.pipeline={layout.pipeline}: {type(model).__name__} does not declare its blocks, between which a "
            "pipeline could split it; return ParallelPlan(blocks=...) from parallel_plan(), or use parallel.pipeline=1"
        )
    if len(plan.blocks) < layout.stages:
        raise UserError(
            f"parallel.pipeline={layout.pipeline} has {layout.stages} stages: more than the {len(plan.blocks)} blocks "
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
                f"{name} and {first} are one parameter in different stages of parallel.pipeline={layout.pipeline}, "
                f"and the plan does not declare it; return ParallelPlan(tied=({first!r},), ...) if the first and "
                "the last stage share it, or use parallel.pipeline=1"
            )


def shared_buffers(names: Iterable[str], plan: ParallelPlan) -> dict[str, bool]:
    """Return for each of ``names``, buffers of the model, whether every stage has a copy.

    Every stage has a copy of the buffers of modules around the blocks.
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
    """Watches the first forward of a stage: what arrives must reach its first block as it is, and what its last block
    returns must leave."""

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
                f"parallel.pipeline={self._pipeline}: {self._model}.forward computes something {place} that is in none "
                "of its modules, so every stage would do it; put it into a module before the first block or after the "
                "last, or use parallel.pipeline=1"
            )


def _bits(args: tuple[Any, ...], named: Mapping[str, Any]) -> Tensor:
    """Return a copy of the first argument as bytes, so that NaN compares equal to itself."""
    stream = args[0] if args else next(iter(named.values()))
    if not isinstance(stream, Tensor):
        return torch.empty(0)
    return stream.detach().clone(memory_format=torch.contiguous_format).view(-1).view(torch.uint8)


def _parts(model: nn.Module, plan: ParallelPlan, last: int) -> Iterator[tuple[str, nn.Module, int]]:
    """Yield the blocks, the modules around them and those beside them, each with its stage if it is not a block."""
    around, is_behind = _around(plan), False
    for path, module in model.named_modules():
        if path in around or path.rpartition(".")[0] in around:
            is_behind = is_behind or path in plan.blocks
            yield path, module, last if is_behind else 0


def _around(plan: ParallelPlan) -> set[str]:
    """Names of the modules that contain blocks: the model itself, and its list of layers."""
    parts = [block.split(".") for block in plan.blocks]
    return {".".join(part[:length]) for part in parts for length in range(len(part))}
