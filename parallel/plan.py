"""Types that a task returns: the sums of its loss, and how its model may be sharded. No ranks, no devices."""

from collections.abc import Callable, Mapping
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
    """Sums over this rank's part of a batch, not means: the library divides once, by the weight of the global batch.

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
    """Named metrics as (sum, weight). Reduced over micro-batches and ranks like the loss, then divided and logged.

    Every batch must give the same names in the same order.
    """
    counts: Mapping[str, Tensor] = MappingProxyType({})
    """Named vectors that are added up like the loss, such as the targets of each source of a mixture. Every batch must
    give the same names and lengths. Training only."""

    def zeroed(self) -> "LossTerms":
        """Return the same names with all sums 0, for a batch that only keeps ranks in step."""
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
        """Return all sums by name, without gradients: ``loss_sum``, ``weight``, ``metrics/NAME`` as (sum, weight) and
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
    """Tensor that passes through the blocks one after the other, at first the token ids [samples, tokens]."""
    named: Mapping[str, Any] = MappingProxyType({})
    """Further arguments that any part of the model may read, such as positions or targets."""


class Objective(Protocol):
    """The function that is optimized. A task is one."""

    def loss(self, model: nn.Module, batch: Any) -> LossTerms:
        """Run ``model`` on ``batch``."""

    def inputs(self, batch: Any) -> Inputs:
        """Return the arguments of the model. Only a pipeline, which calls the model itself, needs it."""

    def terms(self, output: Any, batch: Any) -> LossTerms:
        """Return the loss, given the output of the model. Only a pipeline needs it."""

    def slice_sequence(self, batch: Any, part: Callable[[Tensor, int], Tensor]) -> Any:
        """Return ``batch`` with each tensor that has the sequence along ``dim`` replaced by ``part(tensor, dim)``.

        Only the context axis needs it.
        """


@dataclass(frozen=True)
class ParallelPlan:
    """How a model may be sharded. A model or task declares it, and the library shards.

    Globs match names of modules with as many dots: ``layers.*.mlp`` is one module in each layer.

    Example::

        def parallel_plan(self, model):
            roles = {"layers.*.up": "column", "layers.*.down": "row"}
            return serried.ParallelPlan(blocks=("layers.*",), roles=roles)
    """

    units: tuple[tuple[str, ...], ...] = ()
    """Groups of module names whose parameters are gathered and freed together under sharding, in forward order.

    Parameters in no unit stay gathered through the whole forward and backward. The last unit is not freed after its
    forward, since backward starts there. None: one unit per repeated block, see ``parallel.fsdp_units``.
    """
    blocks: tuple[str, ...] = ()
    """Names of the modules between which a pipeline may split the model, in forward order, or globs."""
    roles: Mapping[str, str] = field(default_factory=dict)
    """Role of modules on the tensor axis, by glob; see ``parallel.axes.tensor``."""
    tied: tuple[str, ...] = ()
    """Names of parameters at the beginning of the model that its end reads too, such as tied embeddings."""
    context: tuple[str, ...] = ()
    """Names of the modules whose attribute ``context`` is a ``Context``, with wildcards; the model itself is ""."""

    mixtures: tuple[str, ...] = ()
    """Names of the mixtures of experts: modules with ``experts``, whose parameters have the experts along their first
    dim, a ``dispatch`` (``Dispatch``) and a router ``gate`` (``Router``)."""
    is_one_unit: bool = False
    """Whether FSDP2 gathers all parameters at once, and keeps them for the step, even if ``units`` names several. The
    trainer sets it."""

    def for_model(self, model: nn.Module) -> "ParallelPlan":
        """Return the plan with the names of modules of ``model`` in place of the globs in ``blocks``. Raises
        ``UserError`` if one matches no module."""
        known = {name: module for name, module in model.named_modules() if name}
        blocks: dict[str, None] = {}
        for glob in (self.blocks,) if isinstance(self.blocks, str) else self.blocks:
            found = [glob] if glob in known else [name for name in known if matches(name, glob)]
            if not found:
                raise UserError(
                    f"parallel_plan() names the blocks {glob!r}, and {type(model).__name__} has no such module; name "
                    "the repeated ones, such as 'layers.*'"
                )
            if len(found) == 1 and isinstance(known[found[0]], nn.ModuleList):
                raise UserError(
                    f"parallel_plan() names {glob!r} as a block, but it is a list of modules; use '{glob}.*'"
                )
            blocks |= dict.fromkeys(found)
        return replace(self, blocks=tuple(blocks))

    def blocks_in(self, model: nn.Module) -> tuple[str, ...]:
        """Return the names of the repeated blocks of ``model``: those declared, or found. Ask before the model is
        sharded, which changes the classes by which they are found."""
        return self.blocks or tuple(blocks_of(model))

    def is_expert(self, parameter: str) -> bool:
        """Return whether the parameter of this name has the experts of a mixture along its first dim."""
        return parameter.rpartition(".experts.")[0] in self.mixtures

    def role(self, module: str) -> str | None:
        """Return the role of the module of this name."""
        return next((role for glob, role in self.roles.items() if matches(module, glob)), None)


def matches(name: str, glob: str) -> bool:
    """Return whether ``glob`` matches the module name ``name``, which has as many dots."""
    return name.count(".") == glob.count(".") and fnmatchcase(name, glob)


class Vocabulary:
    """Extension point of the module that ends a language model: which tokens and which rows of the vocabulary are here.

    The default holds all of both. If ranks shard the vocabulary, the tensor axis replaces it: each rank then sees the
    tokens of all ranks and holds some of the rows. V: the whole vocabulary; T: tokens of all ranks.
    """

    first_row = 0
    """Number, within the vocabulary, of the first row that is here."""

    def most_rows(self, rows: int) -> int:
        """Return the largest number of rows that a rank has; here are ``rows``."""
        return rows

    def targets(self, targets: Tensor) -> Tensor:
        """Return ``targets``, known whole to every rank, as [ranks, tokens of each]."""
        return targets.reshape(1, -1)

    def tokens(self, hidden: Tensor) -> Tensor:
        """Gather the tokens of all ranks [T, D]. The result has no gradient."""
        return hidden

    def sum_tokens(self, gradient: Tensor) -> Tensor:
        """Sum the ranks' contributions ``gradient`` [T, D] and return the part for this rank's tokens."""
        return gradient

    def all_rows(self, rows: int) -> int:
        """Return the rows of the whole vocabulary, of which ``rows`` are here."""
        return rows

    def combine(self, normalizer: Tensor, picked: Tensor) -> tuple[Tensor, Tensor]:
        """Combine the ranks' values for their rows into values for the whole vocabulary.

        Args:
            normalizer: Log of the sum of exponentials of the logits of the rows here, [T].
            picked: Sum over the rows here of the logits that are picked, [T].
        """
        return normalizer, picked

    def logits(self, hidden: Tensor, weight: Tensor) -> Tensor:
        """Return the whole logits [B, S, V] of ``hidden`` [B, S, D], with gradients."""
        return F.linear(hidden, weight)


class Width:
    """Extension point of a norm over a width that ranks may shard. The default holds all of it.

    If ranks shard it, the tensor axis replaces this object. All parts have the same size.
    """

    def mean(self, part: Tensor) -> Tensor:
        """Return the mean over the whole width, given ``part``, the mean over this rank's part."""
        return part


class Context:
    """The part of each sequence that this rank computes: all of it.

    A model calls these methods, and context parallelism puts another ``Context`` in place of this one. Attention is the
    only place where tokens of a sequence meet; the model states how it computes it.
    """

    def __init__(
        self,
        attend: Callable[[Tensor, Tensor, Tensor, Any], Tensor],
        attend_with_logsumexp: Callable[[Tensor, Tensor, Tensor, Any], tuple[Tensor, Tensor]],
    ) -> None:
        """Both attend from q [B, H, Q, E] to k, v [B, K, S, E] where a mask of the model allows it.

        The second also returns the log of the sum of exp(score) of each query, [B, H, Q] fp32.
        """
        self.attend_locally, self.attend_with_logsumexp = attend, attend_with_logsumexp
        self.hidden_parts = 1
        """Ranks over which tensor parallelism divides the hidden states of this rank's tokens."""

    def whole_length(self, stream: Tensor) -> int:
        """Return the length of the whole sequences, of which ``stream`` is this rank's part.

        ``stream``: token ids [B, S], or hidden states [B, S, D] if an earlier pipeline stage has embedded them.
        """
        return stream.shape[1] * (self.hidden_parts if stream.is_floating_point() else 1)

    def part(self, whole: Tensor, dim: int) -> Tensor:
        """Return this rank's part of ``whole``, whose dim ``dim`` is the sequence."""
        del dim
        return whole

    def mask(self, make: Callable[[tuple[Tensor, Tensor] | None], Any], length: int, device: torch.device) -> Any:
        """Return the mask that ``attend`` takes, for sequences of ``length`` tokens.

        ``make`` returns the model's mask for queries and keys at these places of the sequence; None: at all, in order.
        """
        del length, device
        return make(None)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Any) -> Tensor:
        """Attention of this rank's queries on the keys and values of all ranks; k and v are this rank's."""
        return self.attend_locally(q, k, v, mask)


class Dispatch:
    """Extension point of a mixture of experts: brings tokens to the experts and their results back.

    The default holds all experts. If ranks shard the experts, the expert axis replaces it.
    """

    def run(self, rows: Tensor, counts: Tensor, experts: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        """Run the experts on ``rows`` [N, D], sorted by expert, ``counts`` [E] rows each. Returns results in order."""
        return experts(rows, counts)


class Router(Protocol):
    """Chooses the experts of tokens, in a mixture."""

    is_counting: bool
    """Whether to add to ``loads``."""
    loads: Tensor | None
    """Tokens sent to each expert, int64 [E]; None: 0."""

    def balance(self, loads: Tensor, accepted: Tensor) -> None:
        """Prefer experts with fewer tokens than the mean of ``loads`` [E], if ``accepted``, a flag on the device."""
