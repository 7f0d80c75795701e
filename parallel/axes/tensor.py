"""Tensor parallelism: matrices, the vocabulary and the residual stream are sharded over ranks.

A parameter is a plain local tensor with this rank's slice. Explicit collectives run at the borders of modules
(Megatron-LM, https://arxiv.org/abs/1909.08053). With ``parallel.sequence`` the stream between the matrices is also
sharded along the sequence (https://arxiv.org/abs/2205.05198). A model declares the roles of its modules:

- ``vocabulary``: an embedding, sharded by rows. Its output is the stream.
- ``source``: another input of the stream, such as learned positions. Replicated.
- ``region``: contains the sharded matrices of an attention or feed-forward. Its first argument is the stream.
- ``column``: a linear layer in a region, sharded by outputs.
- ``row``: a linear layer that ends a region, sharded by inputs. Its bias is added after the sum.
- ``norm``: a norm in a region, over the full width that is sharded, with the extension point ``width``
  (``plan.Width``).
- ``heads``: in a region, has one ``weight`` per query head, sharded with the heads.
- ``conv1d_column``, ``conv1d_row``: the same for ``Conv1D`` of transformers, whose weights are [inputs, outputs].
- ``head``: ends the model. It has the extension point ``vocabulary`` (``plan.Vocabulary``), or is a linear layer
  without a bias, which returns the full logits on every rank. Its weight is sharded by rows, tied or not.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from types import MethodType
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from serried.configs.errors import UserError
from serried.parallel import collectives
from serried.parallel.axes.pipeline_stages import SkippedModule
from serried.parallel.fp16_weight_gradients import linear
from serried.parallel.layout.mesh import Coordinates, Layout
from serried.parallel.layout.process_groups import Groups
from serried.parallel.layout.shard_specs import Slice, chunk
from serried.parallel.nf4 import BLOCK, inputs_of_shard, is_quantized
from serried.parallel.plan import ParallelPlan, Vocabulary, Width
from serried.parallel.token_rows import share_tokens

_SLICED_DIMS = {
    "vocabulary": {"weight": 0},
    "head": {"weight": 0},
    "column": {"weight": 0, "bias": 0, "lora_B": 0, "lora_magnitude": 0},
    "row": {"weight": 1, "lora_A": 1},
    "norm": {"weight": 0},
    "heads": {"weight": 0},
    "conv1d_column": {"weight": 1, "bias": 0, "lora_B": 0, "lora_magnitude": 0},
    "conv1d_row": {"weight": 0, "lora_A": 1},
}
"""Sharded dim of each parameter of a module, by role. Other parameters are replicated."""


class Tensors:
    """The tensor axis."""

    axis = "tensor"

    def slices(self, plan: ParallelPlan, layout: Layout, name: str, shape: Sequence[int]) -> tuple[Slice, ...]:
        """Return the slices of a parameter by the role of its module."""
        del layout, shape
        module, _, parameter = name.rpartition(".")
        dim = _SLICED_DIMS.get(plan.role(module) or "", {}).get(parameter)
        return () if dim is None else (Slice(dim, ("tensor",)),)

    def is_partial(self, plan: ParallelPlan, layout: Layout, name: str) -> bool:
        """Return True for replicated parameters that see a shard of the stream, or are inside a region."""
        if self.slices(plan, layout, name, ()):
            return False
        if layout.sequence:
            return True
        parents = name.split(".")[:-1]
        within = [plan.role(".".join(parents[:count])) for count in range(1, len(parents) + 1)]
        is_after_sum = within[-1:] in (["row"], ["conv1d_row"])
        return "region" in within and not is_after_sum

    def apply(self, module: nn.Module, plan: ParallelPlan, layout: Layout, place: Coordinates, groups: Groups) -> None:
        assert groups.tensor is not None
        self.shard(module, plan, layout, place, Stream(groups.tensor, layout.sequence))

    def shard(
        self, module: nn.Module, plan: ParallelPlan, layout: Layout, place: Coordinates, stream: "Stream"
    ) -> None:
        """Slice the parameters of ``module`` and put the operations of ``stream`` at the borders of its modules."""
        roles = check_roles(module, plan, layout)
        rows = _rows_of_vocabularies(module, roles)
        self._slice_parameters(module, plan, layout, place)
        module.residual_stream = stream  # type: ignore[assignment]  # found by with_whole_stream
        # One function for all modules: torch.compile then makes one graph for all blocks.
        multiply = {role: _multiply_and_sum(stream, is_conv1d=role == "conv1d_row") for role in ("row", "conv1d_row")}
        for name, role in roles.items():
            each: Any = module.get_submodule(name)
            if isinstance(each, SkippedModule):
                continue  # runs on another pipeline stage
            if role == "vocabulary":
                each.forward = partial(_embed, each, stream, _rows(rows[name], layout, place)[0])
                share_tokens(each, stream.own_part)
            elif role == "source":
                each.register_forward_hook(lambda _module, _arguments, output: stream.own_part(output))
            elif role == "region":
                each.register_forward_pre_hook(partial(_enter, stream), with_kwargs=True)
            elif role in ("row", "conv1d_row"):
                each.forward = MethodType(multiply[role], each)
                if adapter := getattr(each, "adapter", None):
                    adapter.sum, adapter.sum_squares = stream.sum, partial(collectives.all_sum, group=stream.group)
            elif role == "norm":
                each.width = DividedWidth(stream.group)
            elif role == "head":
                vocabulary = ShardedVocabulary(rows[name], layout, place, stream.group, stream)
                if type(each).forward is nn.Linear.forward:
                    each.forward = partial(_whole_logits, each, vocabulary)
                else:
                    each.vocabulary = vocabulary

    def _slice_parameters(self, module: nn.Module, plan: ParallelPlan, layout: Layout, place: Coordinates) -> None:
        sliced: dict[nn.Parameter, nn.Parameter] = {}
        for name, parameter in list(module.named_parameters(remove_duplicate=False)):
            owner, _, key = name.rpartition(".")
            for dim, _ in self.slices(plan, layout, name, parameter.shape):
                if parameter not in sliced:  # several modules may share one
                    start, size = chunk(parameter.shape[dim], layout.tensor, place.tensor)
                    values = parameter.detach().narrow(dim, start, size).clone(memory_format=torch.contiguous_format)
                    if dim == 1 and key == "weight" and is_quantized(module.get_submodule(owner)):
                        values = inputs_of_shard(parameter.detach(), place.tensor, layout.tensor)
                    sliced[parameter] = nn.Parameter(values, parameter.requires_grad)
                setattr(module.get_submodule(owner), key, sliced[parameter])


TENSOR = Tensors()


@contextmanager
def with_whole_stream(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Context manager in which the residual stream of ``modules`` is replicated, for sequences of any length."""
    streams = [stream for root in modules if isinstance(stream := getattr(root, "residual_stream", None), Stream)]
    divided = [stream for stream in streams if stream.is_divided]
    for stream in divided:
        stream.is_divided = False
    try:
        yield
    finally:
        for stream in divided:
            stream.is_divided = True


class Stream:
    """The residual stream [B, S, D], sharded along the sequence or replicated."""

    def __init__(self, group: ProcessGroup, is_divided: bool) -> None:
        self.group, self.is_divided = group, is_divided

    def enter(self, x: Tensor) -> Tensor:
        """Return the full stream, the input of a region."""
        return collectives.gather(x, 1, self.group) if self.is_divided else collectives.copy(x, self.group)

    def sum(self, x: Tensor) -> Tensor:
        """Sum the ranks' contributions to the stream."""
        self._check_length(x)
        return collectives.scatter_sum(x, 1, self.group) if self.is_divided else collectives.all_sum(x, self.group)

    def own_part(self, x: Tensor) -> Tensor:
        """Return this rank's shard of a replicated tensor [B, S, D] or [S, D]."""
        if not self.is_divided:
            return x
        self._check_length(x)
        return x.chunk(dist.get_world_size(self.group), -2)[dist.get_rank(self.group)]

    def _check_length(self, x: Tensor) -> None:
        ranks, length = dist.get_world_size(self.group), x.shape[-2]
        if self.is_divided and length % ranks:
            raise UserError(
                f"parallel.tensor={ranks} does not divide a sequence of {length} tokens, as parallel.sequence=true "
                "requires; use parallel.sequence=false"
            )


class ShardedVocabulary(Vocabulary):
    """A vocabulary sharded by rows. While a chunk of tokens is processed, each rank has the tokens of all ranks."""

    def __init__(self, size: int, layout: Layout, place: Coordinates, group: ProcessGroup, stream: "Stream") -> None:
        self.first_row = _rows(size, layout, place)[0]
        self._group, self._stream = group, stream
        self._rows = [chunk(size, layout.tensor, rank)[1] for rank in range(layout.tensor)]

    @property
    def _parts(self) -> int:
        """Number of shards of the residual stream."""
        return len(self._rows) if self._stream.is_divided else 1

    def most_rows(self, rows: int) -> int:
        del rows
        return max(self._rows)

    def shared(self, rows: Tensor) -> Tensor:
        # The gradient is summed here, or together with the gradients of all replicated parameters if the residual
        # stream is sharded.
        return collectives.copy(rows, self._group) if self._parts == 1 else rows

    def all_rows(self, rows: int) -> int:
        del rows
        return sum(self._rows)

    def targets(self, targets: Tensor) -> Tensor:
        return targets.unflatten(1, (self._parts, -1)).movedim(1, 0).flatten(1)

    def tokens(self, hidden: Tensor) -> Tensor:
        return collectives.gather(hidden, 0, self._group) if self._parts > 1 else hidden

    def sum_tokens(self, gradient: Tensor) -> Tensor:
        if self._parts > 1:
            return collectives.scatter_sum(gradient, 0, self._group)
        return collectives.all_sum(gradient, self._group)

    def combine(self, normalizer: Tensor, picked: Tensor) -> tuple[Tensor, Tensor]:
        # One all-gather for both. Summed in rank order, so that the result is bitwise equal on all ranks.
        both = collectives.gather(torch.stack((normalizer, picked)).unsqueeze(0), 0, self._group)
        return both[:, 0].logsumexp(0), both[:, 1].sum(0)

    def logits(self, hidden: Tensor, weight: Tensor) -> Tensor:
        return collectives.join(linear(self._stream.enter(hidden), weight), -1, self._rows, self._group)


class DividedWidth(Width):
    """A width sharded over ranks."""

    def __init__(self, group: ProcessGroup) -> None:
        self._group = group

    def mean(self, part: Tensor) -> Tensor:
        # Each rank uses the mean for its own shard, so the gradients of the mean are summed as well.
        return collectives.copy(collectives.all_sum(part, self._group), self._group) / self._group.size()


def check_roles(module: nn.Module, plan: ParallelPlan, layout: Layout) -> dict[str, str]:
    """Return the roles of the modules by name. Raises ``UserError`` if they do not allow tensor parallelism."""
    roles = {name: role for name, _ in module.named_modules() if (role := plan.role(name))}
    if not roles:
        raise UserError(
            f"parallel.tensor={layout.tensor}: the model declares no roles for tensor parallelism in its parallel "
            "plan; use parallel.tensor=1, or declare roles in parallel_plan()"
        )
    _check_ends(plan, layout)
    for name, role in roles.items():
        if not isinstance(each := module.get_submodule(name), SkippedModule):
            _check_forward(name, each, role, layout)
    return roles


def _check_ends(plan: ParallelPlan, layout: Layout) -> None:
    """Raise ``UserError`` if no module would shard the stream along the sequence, or none would gather it again."""
    declared = set(plan.roles.values())  # roles in all stages
    if layout.sequence and not ("head" in declared and declared & {"vocabulary", "source"}):
        raise UserError(
            "parallel.sequence=true: the parallel plan of the model must declare the role head and one of the roles "
            "vocabulary and source; use parallel.sequence=false"
        )


def _check_forward(name: str, module: nn.Module, role: str, layout: Layout) -> None:
    """Raise ``UserError`` if the replacement forward of a role would compute a different result."""
    if role not in (*_SLICED_DIMS, "source", "region"):
        raise UserError(
            f"parallel.tensor={layout.tensor}: the model's plan has the unknown role {role} for {name}; use "
            "parallel.tensor=1, or a native family"
        )
    forward = type(module).forward
    if role == "vocabulary":
        fits = forward is nn.Embedding.forward
        changed = {"max_norm": None, "scale_grad_by_freq": False, "sparse": False}
        options = [key for key, value in changed.items() if getattr(module, key, value) != value]
    elif role == "head":
        is_linear = forward is nn.Linear.forward and getattr(module, "bias", None) is None
        if not is_linear and not isinstance(getattr(module, "vocabulary", None), Vocabulary):
            raise UserError(
                f"parallel.tensor={layout.tensor}: {name} has the role head but is a {type(module).__name__}; use an "
                "nn.Linear without bias, or serried.recipes.models.layers.lm_head.LanguageModelHead (it also computes "
                "the loss)"
            )
        return
    else:
        fits = role != "row" or forward is nn.Linear.forward
        # Compared by name, to avoid importing transformers.
        fits = fits and (role != "conv1d_row" or forward.__qualname__ == "Conv1D.forward")
        options = []
    if role == "row" and is_quantized(module):
        _check_blocks(name, module, layout)
    if not fits or options:
        own = f"has its own forward ({type(module).__name__})"
        why = f"is an embedding with {', '.join(options)}" if fits else own
        raise UserError(
            f"parallel.tensor={layout.tensor}: {name} has the role {role} but {why}, and tensor parallelism would "
            "ignore this; use parallel.tensor=1, or change the module or its role in parallel_plan()"
        )


def _check_blocks(name: str, module: Any, layout: Layout) -> None:
    """Raise ``UserError`` if shards of the inputs of a quantized layer would split quantization blocks."""
    if module.in_features % (BLOCK * layout.tensor):
        raise UserError(
            f"parallel.tensor={layout.tensor}: {name} has {module.in_features} inputs, and their shards would split "
            f"the blocks of {BLOCK} numbers of adapter.quantize=nf4; use a smaller parallel.tensor, or "
            "adapter.quantize=none"
        )


def _rows_of_vocabularies(module: nn.Module, roles: Mapping[str, str]) -> dict[str, int]:
    """Return the number of rows of each embedding and head, by name. A tied head has as many as the largest
    embedding."""
    ends = {name: module.get_submodule(name).weight for name, role in roles.items() if role in ("vocabulary", "head")}
    rows = {name: len(weight) for name, weight in ends.items() if isinstance(weight, Tensor)}
    largest = max((count for name, count in rows.items() if roles[name] == "vocabulary"), default=0)
    return dict.fromkeys(ends, largest) | rows


def _rows(size: int, layout: Layout, place: Coordinates) -> tuple[int, int]:
    """Return the first row of this rank's shard of the vocabulary, and its number of rows.

    Raises:
        UserError: A rank would have no rows.
    """
    if not chunk(size, layout.tensor, layout.tensor - 1)[1]:
        raise UserError(
            f"parallel.tensor={layout.tensor} leaves ranks without any of the {size} rows of the vocabulary; use a "
            "smaller parallel.tensor"
        )
    return chunk(size, layout.tensor, place.tensor)


def _enter(
    stream: Stream, module: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Forward pre-hook of a region: gather the stream, the first argument."""
    del module
    if arguments:
        return (stream.enter(arguments[0]), *arguments[1:]), named
    first = next(iter(named))
    return (), {**named, first: stream.enter(named[first])}


def _embed(module: nn.Embedding, stream: Stream, first_row: int, ids: Tensor) -> Tensor:
    """Embed ``ids``: each row comes from the rank that has it."""
    index = ids - first_row
    is_here = (index >= 0) & (index < len(module.weight))
    padding = None if module.padding_idx is None else module.padding_idx - first_row
    if padding is not None and not 0 <= padding < len(module.weight):
        padding = None  # on another rank
    rows = F.embedding(index.where(is_here, 0), module.weight, padding)
    return stream.sum(rows * is_here.unsqueeze(-1))


def _whole_logits(module: nn.Linear, vocabulary: Vocabulary, hidden: Tensor) -> Tensor:
    """Return the full logits, like the module's original forward."""
    return vocabulary.logits(hidden, module.weight)


def _multiply_and_sum(stream: Stream, *, is_conv1d: bool) -> Callable[[nn.Linear, Tensor], Tensor]:
    """Return a forward that sums the product over ranks and then adds the bias."""

    def forward(module: nn.Linear, x: Tensor) -> Tensor:
        multiply = getattr(module, "product", linear)
        product = stream.sum(multiply(x, module.weight.T if is_conv1d else module.weight))
        return product if module.bias is None else product + module.bias.to(product.dtype)

    return forward
