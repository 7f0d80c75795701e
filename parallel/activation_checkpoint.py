"""Activation checkpointing: which tensors a block's forward keeps for its backward.

- ``full``: the inputs of the block. The backward computes the block again (https://arxiv.org/abs/1604.06174).
- ``selective``: also the results of every second matrix product, of attention, of collectives and of expert routing.
- ``offload``: everything, in host memory.

Results are bitwise the same as with ``none``. The second forward draws the same random numbers under the same autocast.
It starts from the same buffers and does not change them. Routers do not count its tokens (``plan.Router.is_counting``
is false outside of a forward).
"""

from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from math import ceil
from types import MethodType
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only
from torch.utils.checkpoint import (
    CheckpointPolicy,
    SelectiveCheckpointContext,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from serried.configs.errors import UserError
from serried.parallel.plan import ParallelPlan

_aten = torch.ops.aten
_PRODUCTS = {_aten.mm.default, _aten.addmm.default, _aten._grouped_mm.default, _aten._scaled_mm.default}
"""Matrix products of linear layers (including float8) and ``F.grouped_mm``. Every second result is kept."""
_KEPT = {
    _aten._scaled_dot_product_flash_attention_for_cpu.default,
    _aten._scaled_dot_product_flash_attention.default,
    _aten._scaled_dot_product_efficient_attention.default,
    _aten._scaled_dot_product_cudnn_attention.default,
    torch.ops.higher_order.flex_attention,
    _aten.sort.stable,  # the experts that a router chose
}


_AGAIN = {"none": 0.0, "selective": 0.5, "full": 1.0}
"""Approximate share of a block that the backward recomputes, by mode."""
_ROUNDING = 1e-9


class Mix(NamedTuple):
    """Two checkpointing modes and the share of blocks in each, chosen to stay within a memory budget."""

    first: str
    """Mode of the first blocks of a stage. The backward frees the other blocks before it recomputes these."""
    rest: str
    """Mode of the other blocks, which keep more."""
    share: float
    """Share of the blocks with mode ``first``. The number of blocks is rounded up."""
    kept: tuple[float, float]
    """Bytes that a block keeps in the two modes, relative to the mode ``none``."""

    def firsts(self, blocks: int) -> int:
        """Return the number of blocks with mode ``first`` in a stage of ``blocks`` blocks."""
        return ceil(self.share * blocks - _ROUNDING)


def mix_within(budget: float, kept: Mapping[str, float]) -> Mix | None:
    """Return the mix of modes that recomputes the least within a budget; None if no mix stays within it.

    Args:
        budget: Fraction of the bytes kept in mode ``none`` that blocks may keep.
        kept: Bytes that a block keeps, by mode.
    """
    of_all = {mode: kept[mode] / kept["none"] for mode in _AGAIN}
    found = []
    for first, rest in (("selective", "none"), ("full", "selective"), ("full", "none")):
        if of_all[first] <= budget < of_all[rest]:
            share = (of_all[rest] - budget) / (of_all[rest] - of_all[first])
            again = share * _AGAIN[first] + (1 - share) * _AGAIN[rest]
            found.append((again, Mix(first, rest, share, (of_all[first], of_all[rest]))))
    return min(found)[1] if found else None


def checkpoint_blocks(module: nn.Module, plan: ParallelPlan, mode: str | Mix, every: int = 1) -> None:
    """Apply ``mode`` to every ``every``-th block of ``module``, the model or a stage of it.

    Raises:
        UserError: The model has no blocks.
    """
    if mode == "none":
        return
    names = plan.blocks_in(module)
    if not names:
        raise UserError(
            f"trainer.activation_checkpoint={mode}: the model has no repeated blocks that could be recomputed; "
            "return ParallelPlan(blocks=...) from parallel_plan(), or use trainer.activation_checkpoint=none"
        )
    blocks = [module.get_submodule(name) for name in names[::every]]
    blocks = [block for block in blocks if any(True for _ in block.parameters())]  # others are in another stage
    firsts = mode.firsts(len(blocks)) if isinstance(mode, Mix) else len(blocks)
    first, rest = (mode.first, mode.rest) if isinstance(mode, Mix) else (mode, mode)
    for number, block in enumerate(blocks):
        _keep(block, first if number < firsts else rest)


def _keep(block: Any, mode: str) -> None:
    if mode == "none":
        return
    wrapped = {"full": _computed_again, "selective": _partly_computed_again, "offload": _offloaded}[mode]
    block.plain_forward = block.forward
    block.forward = MethodType(wrapped, block)  # one function for all blocks, so torch.compile makes one graph


def _computed_again(block: nn.Module, *args: Any, **named: Any) -> Any:
    return _checkpointed(False, block, args, named)


def _partly_computed_again(block: nn.Module, *args: Any, **named: Any) -> Any:
    return _checkpointed(True, block, args, named)


def _checkpointed(is_selective: bool, block: nn.Module, args: tuple[Any, ...], named: dict[str, Any]) -> Any:
    forward: Any = block.plain_forward
    if not torch.is_grad_enabled():
        return forward(*args, **named)
    if torch.compiler.is_compiling():  # traced once; the compiler chooses what to recompute
        options: dict[str, Any] = {"context_fn": _compiled_contexts} if is_selective else {}
        return checkpoint(forward, *args, use_reentrant=False, **options, **named)
    contexts = partial(_contexts, block, is_selective)
    return checkpoint(forward, *args, use_reentrant=False, context_fn=contexts, **named)


def _contexts(block: nn.Module, is_selective: bool) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """Return the context managers of the forward and of its recomputation."""
    before = [
        (module, name, buffer.clone())
        for module in block.modules()
        for name, buffer in module.named_buffers(recurse=False)
    ]
    if not is_selective:
        return nullcontext(), _Again(before)
    results: list[Any] = []
    return _Keep(results), _Again(before, results)


def _compiled_contexts() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    counts: Counter[bool] = Counter()

    def policy(context: SelectiveCheckpointContext, operation: Any, *args: Any, **named: Any) -> CheckpointPolicy:
        counts[context.is_recompute] += operation in _PRODUCTS
        keeps = _keeps(operation, args, named, counts[context.is_recompute])
        return CheckpointPolicy.MUST_SAVE if keeps else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


def _keeps(operation: Any, args: tuple[Any, ...], named: dict[str, Any], products: int) -> bool:
    """Return whether to keep the result of ``operation``; ``products`` counts the matrix products up to this one."""
    if operation in _PRODUCTS:
        return products % 2 == 1
    namespace = getattr(operation, "namespace", "")
    if namespace == "_c10d_functional":
        return operation is not torch.ops._c10d_functional.wait_tensor.default
    if namespace in ("serried", "torch_attn"):  # this project's attention, and ``varlen_attn``
        return True
    return operation in _KEPT and not _draws(operation, args, named)


def _draws(operation: Any, args: tuple[Any, ...], named: dict[str, Any]) -> bool:
    """Return whether attention applies dropout.

    Such an operation is recomputed, so that later operations draw the same random numbers.
    """
    names = [argument.name for argument in operation._schema.arguments] if hasattr(operation, "_schema") else []
    return bool((dict(zip(names, args, strict=False)) | named).get("dropout_p"))


class _Keep(TorchDispatchMode):
    """Dispatch mode of the first forward under ``selective``.

    ``create_selective_checkpoint_contexts`` of torch does not support FSDP2 units inside a block.
    """

    current: "_Keep | None" = None

    def __init__(self, results: list[Any]) -> None:
        """``results``: list that receives, in order, the results of ``kept`` and of the operations chosen by
        ``_keeps``."""
        super().__init__()
        self._results, self._products = results, 0

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Run compiled code, such as FlexAttention, unchanged."""
        return True

    def __enter__(self) -> Self:
        _Keep.current = self
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        _Keep.current = None
        super().__exit__(*error)

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        compute = partial(operation, *args, **(kwargs or {}))
        self._products += operation in _PRODUCTS
        return self.take(compute) if _keeps(operation, args, kwargs or {}, self._products) else compute()

    def take(self, compute: Callable[[], Any]) -> Any:
        """Return ``compute()`` and keep it.

        Result and kept tensor are detached, because autograd would attach a history to the kept tensor, which refers
        back to this object.
        """
        self._results.append(tree_map_only(Tensor, Tensor.detach, compute()))
        return tree_map_only(Tensor, Tensor.detach, self._results[-1])


class _Repeat(_Keep):
    """Dispatch mode of the recomputation under ``selective``."""

    def __init__(self, results: list[Any]) -> None:
        super().__init__(results)
        self._taken = 0

    def take(self, compute: Callable[[], Any]) -> Any:
        """Return the next stored result."""
        del compute
        self._taken += 1
        return tree_map_only(Tensor, Tensor.detach, self._results[self._taken - 1])


class _Again:
    """Context manager for the recomputation of a block."""

    def __init__(self, buffers: list[tuple[nn.Module, str, Tensor]], results: list[Any] | None = None) -> None:
        """
        Args:
            buffers: Owner, name and value of each buffer before the first forward.
            results: Results kept by ``_Keep``. None recomputes everything.
        """
        self._before, self._results = buffers, results
        self._own: list[tuple[nn.Module, str, Tensor]] = []
        self._mode: AbstractContextManager[Any] = nullcontext()

    def __enter__(self) -> None:
        self._own = [(module, name, module.get_buffer(name)) for module, name, _ in self._before]
        for module, name, before in self._before:
            setattr(module, name, before.clone())
        self._mode = nullcontext() if self._results is None else _Repeat(self._results)
        self._mode.__enter__()

    def __exit__(self, *error: Any) -> None:
        self._mode.__exit__(*error)
        for module, name, buffer in self._own:
            setattr(module, name, buffer)


def kept(compute: Callable[[], tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
    """Return ``compute()``, or under ``selective`` its result from the first forward.

    For code that communicates or chooses for itself which results to keep, so that ``_keeps`` does not apply. Call it
    with autograd recording disabled.
    """
    return compute() if _Keep.current is None else _Keep.current.take(compute)


def _offloaded(block: nn.Module, *args: Any, **named: Any) -> Any:
    forward: Any = block.plain_forward
    if not torch.is_grad_enabled():
        return forward(*args, **named)
    offload = _Offload()
    with saved_tensors_hooks(offload.pack, offload.unpack):
        output = forward(*args, **named)
    offload.copies.clear()
    return output


class _Offload:
    """Like ``torch.autograd.graph.save_on_cpu``, but skips parameters and copies each tensor once."""

    def __init__(self) -> None:
        self.copies: dict[tuple[Any, ...], tuple[Tensor, Tensor]] = {}
        """Tensors saved by this forward, kept alive until it ends, and their host copies."""

    def pack(self, tensor: Tensor) -> Any:
        """Return the device and host copy of ``tensor``, or ``tensor`` if it is a parameter."""
        if isinstance(tensor if tensor._base is None else tensor._base, nn.Parameter):
            return tensor  # stays in memory anyway; under FSDP2 it is freed and gathered again
        key = tensor.data_ptr(), tensor._version, tensor.dtype, tensor.shape, tensor.stride()
        if key not in self.copies:
            copy = torch.empty_like(tensor, device="cpu", pin_memory=tensor.device.type != "cpu")
            copy.copy_(tensor, non_blocking=True)
            self.copies[key] = tensor, copy
        return tensor.device, self.copies[key][1]

    def unpack(self, packed: Any) -> Tensor:
        """Return the tensor on its original device."""
        if isinstance(packed, Tensor):
            return packed
        device, copy = packed
        return copy.to(device, non_blocking=True)
