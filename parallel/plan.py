"""Types returned by a task: the sums of its loss, how its model may be sharded, and how it continues a text.

They do not depend on ranks or devices.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from serried.configs.errors import UserError
from serried.parallel.fsdp_units import blocks_of
from serried.parallel.sum_table import Number, SumTable


class LossTerms(NamedTuple):
    """Sums, not means, over this rank's shard of a batch. The trainer divides once, by the weight of the global batch.

    Example::

        def loss(self, model, batch):
            x, target = batch
            logits = model(x)
            correct = (logits.argmax(1) == target).sum()
            loss_sum = F.cross_entropy(logits, target, reduction="sum")
            return serried.LossTerms(loss_sum, len(target), {"accuracy": (correct, len(target))})
    """

    loss_sum: Tensor
    """Loss summed over valid targets, scalar."""
    weight: Number
    """Number of valid targets."""
    metrics: Mapping[str, tuple[Number, Number]] = MappingProxyType({})
    """Named metrics as (sum, weight), reduced over micro-batches and ranks like the loss, then divided and logged.

    Every batch must have the same names in the same order.
    """
    counts: Mapping[str, Tensor] = MappingProxyType({})
    """Named vectors that are summed like the loss, such as the targets of each source of a mixture. Training only.

    Every batch must have the same names and lengths.
    """

    def zeroed(self) -> "LossTerms":
        """Return the same names with all sums zero, for a batch that a rank processes only because others do."""
        zero = torch.zeros_like(self.loss_sum)
        counts = {name: torch.zeros_like(count) for name, count in self.counts.items()}
        return LossTerms(zero, zero, dict.fromkeys(self.metrics, (zero, zero)), counts)

    def detach(self) -> "LossTerms":
        """Return the same sums without gradients."""

        def detached(number: Number) -> Number:
            return number.detach() if isinstance(number, Tensor) else number

        metrics = {name: (detached(total), detached(weight)) for name, (total, weight) in self.metrics.items()}
        return LossTerms(self.loss_sum.detach(), detached(self.weight), metrics, self.counts)

    def table(self) -> SumTable:
        """Return all sums without gradients: ``loss_sum``, ``weight``, ``metrics/NAME`` as (sum, weight),
        ``counts/NAME``."""
        metrics = {f"metrics/{name}": metric for name, metric in self.metrics.items()}
        counts = {f"counts/{name}": count for name, count in self.counts.items()}
        values = {"loss_sum": self.loss_sum, "weight": self.weight, **metrics, **counts}
        return SumTable.pack(values, self.loss_sum.device)


class Inputs(NamedTuple):
    """Arguments of a model: ``model(stream, **named)``.

    Example::

        def inputs(self, batch):
            return serried.Inputs(batch["tokens"], {"positions": batch["positions"]})
    """

    stream: Tensor
    """Tensor that passes through the blocks in sequence. The model's input is the token ids [samples, tokens]."""
    named: Mapping[str, Any] = MappingProxyType({})
    """Further arguments that any module may read, such as positions or targets."""


class Decoding(NamedTuple):
    """How a model continues prompts, token by token."""

    choose: Callable[[Tensor, Sequence[int]], Tensor]
    """Maps logits [B, V], fp32, and the indices of their prompts to the next tokens, int64 [B]."""
    goes_on: Callable[[int, int], bool]
    """Receives the index of a prompt and its next token, on the ranks that compute it. Returns whether to continue."""
    new_cache: Callable[[Sequence[int], int], Any]
    """Returns an empty cache, given the padding at the beginning of each sequence and the largest length, or None if
    the model has none. With a cache, the model returns the logits of the last token, [B, 1, V]."""
    rows: int = 1
    """Largest number of prompts that a rank continues together."""
    batches: Callable[[Iterable[int]], Iterable[int]] = iter
    """Yields the batches to compute. It may end early, after the same batch on all ranks."""


class Objective(Protocol):
    """The training objective. Tasks implement it."""

    def loss(self, model: nn.Module, batch: Any) -> LossTerms:
        """Run ``model`` on ``batch`` and return the loss."""

    def inputs(self, batch: Any) -> Inputs:
        """Return the arguments of the model. Only used by a pipeline, which calls the model itself."""

    def terms(self, output: Any, batch: Any) -> LossTerms:
        """Return the loss, given the output of the model. Only used by a pipeline."""

    def slice_sequence(self, batch: Any, part: Callable[[Tensor, int], Tensor]) -> Any:
        """Return ``batch`` with each tensor that has the sequence along ``dim`` replaced by ``part(tensor, dim)``.

        Only used by the context axis.
        """


@dataclass(frozen=True)
class ParallelPlan:
    """How a model may be sharded. Declared by a model or task.

    Globs match module names with the same number of dots: ``layers.*.mlp`` is one module in each layer.

    Example::

        def parallel_plan(self, model):
            roles = {"layers.*.up": "column", "layers.*.down": "row"}
            return serried.ParallelPlan(blocks=("layers.*",), roles=roles)
    """

    units: tuple[tuple[str, ...], ...] = ()
    """Groups of module names whose parameters FSDP2 gathers and frees together, in forward order.

    Parameters in no unit stay gathered for the entire forward and backward. The last unit is not freed after its
    forward, since the backward starts there. If empty, there is one unit per repeated block; see
    ``parallel.fsdp_units``.
    """
    blocks: tuple[str, ...] = ()
    """Names or globs of the modules between which a pipeline may split the model, in forward order."""
    roles: Mapping[str, str] = field(default_factory=dict)
    """Roles of modules on the tensor axis, by glob; see ``parallel.axes.tensor``."""
    refuse_roles: Callable[[], str] | None = None
    """Return why ``roles`` cannot be used, and what to use instead; empty if they can. Called before a model is sharded
    over the tensor axis."""
    tied: tuple[str, ...] = ()
    """Names of parameters shared by the beginning and the end of the model, such as tied embeddings."""
    context: tuple[str, ...] = ()
    """Names or globs of the modules whose attribute ``context`` is a ``Context``. The name of the model is ""."""

    mixtures: tuple[str, ...] = ()
    """Names of the mixtures of experts. Each module has ``experts``, with parameters stacked along dim 0, a
    ``dispatch`` (``Dispatch``) and a router ``gate`` (``Router``)."""
    is_one_unit: bool = False
    """Whether FSDP2 gathers all parameters at once for the whole step, regardless of ``units``. Set by the trainer."""

    def for_model(self, model: nn.Module) -> "ParallelPlan":
        """Return the plan with the globs in ``blocks`` replaced by module names of ``model``.

        Raises:
            UserError: A glob matches no module, or a list of modules.
        """
        known = {name: module for name, module in model.named_modules() if name}
        blocks: dict[str, None] = {}
        for glob in (self.blocks,) if isinstance(self.blocks, str) else self.blocks:
            found = [glob] if glob in known else [name for name in known if matches(name, glob)]
            if not found:
                raise UserError(
                    f"parallel_plan() names the blocks {glob!r}, but {type(model).__name__} has no such module; name "
                    "the repeated modules, such as 'layers.*'"
                )
            if len(found) == 1 and isinstance(known[found[0]], nn.ModuleList):
                raise UserError(
                    f"parallel_plan() names {glob!r} as a block, but it is a list of modules; use '{glob}.*'"
                )
            blocks |= dict.fromkeys(found)
        return replace(self, blocks=tuple(blocks))

    def blocks_in(self, model: nn.Module) -> tuple[str, ...]:
        """Return the names of the repeated blocks of ``model``, declared or detected.

        Call this before sharding, which changes the module classes used for detection.
        """
        return self.blocks or tuple(blocks_of(model))

    def is_expert(self, parameter: str) -> bool:
        """Return whether the named parameter contains the stacked experts of a mixture."""
        return parameter.rpartition(".experts.")[0] in self.mixtures

    def role(self, module: str) -> str | None:
        """Return the role of the named module."""
        return next((role for glob, role in self.roles.items() if matches(module, glob)), None)


def matches(name: str, glob: str) -> bool:
    """Return whether ``glob`` matches the module name ``name`` and has the same number of dots."""
    return name.count(".") == glob.count(".") and fnmatchcase(name, glob)


class Vocabulary:
    """Extension point of the head of a language model: the tokens and vocabulary rows on this rank.

    The default has the full vocabulary and only local tokens. If the vocabulary is sharded, the tensor axis replaces
    this object: each rank then sees the tokens of all ranks and holds some of the rows.

    Shapes: V vocabulary size, T tokens of all ranks.
    """

    first_row = 0
    """Index of the first vocabulary row on this rank."""

    def most_rows(self, rows: int) -> int:
        """Return the largest number of rows on any rank. ``rows`` is the number on this rank."""
        return rows

    def targets(self, targets: Tensor) -> Tensor:
        """Return ``targets``, which every rank has in full, as [ranks, tokens per rank]."""
        return targets.reshape(1, -1)

    def tokens(self, hidden: Tensor) -> Tensor:
        """Gather the hidden states of all ranks [T, D]. The result has no gradient."""
        return hidden

    def sum_tokens(self, gradient: Tensor) -> Tensor:
        """Sum ``gradient`` [T, D] over ranks and return the shard for this rank's tokens."""
        return gradient

    def shared(self, rows: Tensor) -> Tensor:
        """Return ``rows``, which are replicated, for use on a rank that needs only the rows in its vocabulary shard."""
        return rows

    def all_rows(self, rows: int) -> int:
        """Return the size of the full vocabulary. ``rows`` is the number of rows on this rank."""
        return rows

    def combine(self, normalizer: Tensor, picked: Tensor) -> tuple[Tensor, Tensor]:
        """Combine values for the rows of each rank into values for the full vocabulary.

        Args:
            normalizer: Logsumexp of the logits of this rank's rows, [T].
            picked: Sum of the picked logits over this rank's rows, [T].
        """
        return normalizer, picked

    def logits(self, hidden: Tensor, weight: Tensor) -> Tensor:
        """Return the full logits [B, S, V] of ``hidden`` [B, S, D], with gradients."""
        return F.linear(hidden, weight)


class Width:
    """Extension point of a norm over a width that may be sharded. The default is unsharded.

    If the width is sharded, the tensor axis replaces this object. All shards have the same size.
    """

    def mean(self, part: Tensor) -> Tensor:
        """Return the mean over the full width, given ``part``, the mean over this rank's shard."""
        return part


class Context:
    """Extension point of attention: this rank's shard of each sequence. The default is the full sequence.

    The model calls these methods. Context parallelism replaces this object. Only attention mixes the tokens of a
    sequence; the model provides the attention functions.
    """

    def __init__(
        self,
        attend: Callable[[Tensor, Tensor, Tensor, Any], Tensor],
        attend_with_logsumexp: Callable[[Tensor, Tensor, Tensor, Any], tuple[Tensor, Tensor]],
    ) -> None:
        """Both functions compute attention of q [B, H, Q, E] to k, v [B, K, S, E] under a mask of the model.

        The second also returns the logsumexp of the scores of each query, [B, H, Q] fp32.
        """
        self.attend_locally, self.attend_with_logsumexp = attend, attend_with_logsumexp
        self.hidden_parts = 1
        """Number of ranks over which tensor parallelism shards the hidden states of this rank's tokens."""

    def whole_length(self, stream: Tensor) -> int:
        """Return the length of the full sequences, given ``stream``, this rank's shard.

        ``stream`` is token ids [B, S], or hidden states [B, S, D] on later pipeline stages.
        """
        return stream.shape[1] * (self.hidden_parts if stream.is_floating_point() else 1)

    def part(self, whole: Tensor, dim: int) -> Tensor:
        """Return this rank's shard of ``whole``, whose dim ``dim`` is the sequence."""
        del dim
        return whole

    def mask(self, make: Callable[[tuple[Tensor, Tensor] | None], Any], length: int, device: torch.device) -> Any:
        """Return the mask for ``attend``, for sequences of ``length`` tokens.

        ``make`` returns the model's mask for the given positions of queries and keys. None means all positions in
        order.
        """
        del length, device
        return make(None)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Any, sinks: Tensor | None = None) -> Tensor:
        """Return the attention of this rank's queries to the keys and values of all ranks.

        ``k`` and ``v`` are this rank's keys and values. ``sinks`` [H] are the scores of an additional key per head,
        whose value is zero.
        """
        if sinks is None:
            return self.attend_locally(q, k, v, mask)
        return with_sinks(*self.attend_with_logsumexp(q, k, v, mask), sinks)


def with_sinks(mixed: Tensor, logsumexp: Tensor, sinks: Tensor) -> Tensor:
    """Return attention with an additional key per head, whose value is zero.

    Args:
        mixed: Attention without that key, [B, H, Q, E].
        logsumexp: Logsumexp of the scores of each query, [B, H, Q] fp32.
        sinks: Scores of the additional keys, [H].
    """
    share = torch.sigmoid(logsumexp - sinks.float().unsqueeze(-1))  # share of the other keys in the softmax
    return (mixed * share.unsqueeze(-1)).to(mixed.dtype)


class Dispatch:
    """Extension point of a mixture of experts: sends tokens to the experts and returns the results.

    The default has all experts. If experts are sharded, the expert axis replaces this object.
    """

    def run(self, rows: Tensor, counts: Tensor, experts: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        """Run the experts on ``rows`` [N, D] and return the results in the same order.

        ``rows`` is sorted by expert, with ``counts`` [E] rows per expert.
        """
        return experts(rows, counts)


class Router(Protocol):
    """Chooses the experts of each token in a mixture."""

    is_counting: bool
    """Whether to count tokens in ``loads``."""
    loads: Tensor | None
    """Number of tokens sent to each expert, int64 [E]. None means none so far."""

    def balance(self, loads: Tensor, accepted: Tensor) -> None:
        """Prefer experts with fewer tokens than the mean of ``loads`` [E] if the device flag ``accepted`` is true."""
