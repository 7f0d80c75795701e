"""Generation of tokens by a model on any layout, for many prompts at a time.

Data ranks and context ranks share the prompts. Each rank computes its prompts in batches, with the cache of the model:
first all tokens of the prompts, then one token of each per forward. Sharded ranks run equally many forwards, since each
of them takes part in gathering parameters and in sending tokens to experts. A pipeline computes one prompt at a time,
without a cache.

Shapes: B prompts, S sequence, V vocabulary.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from serried.configs.errors import UserError
from serried.parallel.axes.context import head_tail, holder_of, with_whole_sequences
from serried.parallel.axes.tensor import with_whole_stream
from serried.parallel.layout.local_shards import evaluating
from serried.parallel.layout.mesh import Coordinates
from serried.parallel.layout.process_groups import Groups, gather_plain
from serried.parallel.plan import Decoding
from serried.parallel.runner import Runner

_GPU_LENGTHS = 128
"""Multiple to which ``last_logits`` pads sequences on a GPU."""


class Model(Protocol):
    """A ``DistributedModel``."""

    modules: Sequence[nn.Module]
    runner: Runner
    groups: Groups
    place: Coordinates
    device: torch.device

    @property
    def model(self) -> Any:
        """A callable to use instead of the module's forward."""

    def reshard(self) -> None:
        """Free parameters that a forward left gathered."""


@torch.no_grad()
def generate(model: Model, prompts: Sequence[Sequence[int]], limits: Sequence[int], how: Decoding) -> list[list[int]]:
    """Return the tokens that follow each of ``prompts``, on every rank. This is a collective call.

    A text ends after the first token for which ``how.goes_on`` returns False, or when it has as many tokens as in
    ``limits``, at least 1. It depends neither on the batch nor on the layout, except for rounding errors of the logits.
    Prompts of batches that ``how.batches`` left out have no tokens.

    Raises:
        UserError: A logit is NaN.
    """
    layout, place = model.groups.layout, model.place
    parts = layout.context if layout.pipeline == 1 else 1
    shares, share = layout.data_ranks * parts, place.data_rank * parts + place.context % parts
    size = shares * (how.rows if layout.pipeline == 1 else 1)
    order = sorted(range(len(prompts)), key=lambda number: len(prompts[number]), reverse=True)
    made: dict[int, list[int]] = {}
    is_finite = True
    with evaluating(model.modules), model.runner.autocast(), _whole_sequences(model):
        for start in how.batches(range(0, len(order), size)):
            mine = order[start : start + size][share::shares]
            # After a NaN, the other batches are left out, but not the votes of ``how.batches``: replicas do not know.
            if is_finite and (mine or layout.is_sharded):
                batch = _Batch(model, how, mine, mine or order[start : start + 1], prompts, limits)
                is_finite = batch.run()
                made |= batch.made
    model.reshard()
    found = gather_plain([is_finite, list(made), list(made.values())])
    if not all(is_finite for is_finite, _, _ in found):
        raise UserError(
            "the logits of the model are NaN, so no token can be chosen; use precision=fp32, or other weights"
        )
    every = {number: tokens for _, numbers, texts in found for number, tokens in zip(numbers, texts, strict=True)}
    return [every.get(number, []) for number in range(len(prompts))]


class _Batch:
    """Prompts that a rank continues together."""

    def __init__(
        self, model: Model, how: Decoding, counted: Sequence[int], numbers: Sequence[int],
        prompts: Sequence[Sequence[int]], limits: Sequence[int],
    ) -> None:  # fmt: skip
        """
        Args:
            counted: The prompts whose result is used: ``numbers``, or none.
            numbers: The prompts to compute.
        """
        self._model, self._how, self._layout = model, how, model.groups.layout
        self.made: dict[int, list[int]] = {number: [] for number in counted}
        self._numbers, self._limits = numbers, limits
        self._rows = [list(prompts[number]) for number in numbers]
        self._is_open = [number in self.made for number in numbers]
        """Whether the text of each row goes on."""

    def run(self) -> bool:
        """Generate the texts. Returns False if a logit is NaN. Sharded ranks run equally many forwards."""
        next_logits, new = self._next_logits(), self._rows
        while True:
            logits = next_logits(new).float()
            is_finite = not bool(logits.isnan().any())
            tokens = self._chosen(logits if is_finite else torch.zeros_like(logits))
            for row, (number, token) in enumerate(zip(self._numbers, tokens, strict=True)):
                if is_finite and self._is_open[row]:
                    self.made[number].append(token)
                    has_room = len(self.made[number]) < self._limits[number]
                    self._is_open[row] = self._how.goes_on(number, token) and has_room
            goes_on, is_finite = self._agreed(any(self._is_open), is_finite)
            if not (goes_on and is_finite):
                return is_finite
            new = [[token] for token in tokens]

    def _next_logits(self) -> Callable[[list[list[int]]], Tensor]:
        """Return a function that appends tokens to each row, the same number to all rows after the first call, and
        returns the logits that follow, [B, V]."""
        runner, device, rows = self._model.runner, self._model.device, self._rows
        lengths = [len(row) for row in rows]
        longest = max(lengths)
        if self._layout.pipeline == 1:
            limit = max(self._limits[number] for number in self._numbers)
            cache = self._how.new_cache([longest - length for length in lengths], longest + limit)
            forward = self._model.model
            if cache is not None:

                def cached(new: list[list[int]]) -> Tensor:
                    most = max(map(len, new))
                    ids = [[0] * (most - len(tokens)) + tokens for tokens in new]
                    logits: Tensor = forward(torch.tensor(ids, device=device), cache=cache)[:, -1]
                    return logits

                return cached
        so_far: list[list[int]] = [[] for _ in rows]

        def recomputed(new: list[list[int]]) -> Tensor:
            for row, tokens in enumerate(new):
                if not so_far[row] or self._is_open[row]:  # the others have their longest length, perhaps
                    so_far[row] += tokens
            most = max(map(len, so_far))
            # At the end, so that no token attends to padding.
            ids = torch.tensor([tokens + [0] * (most - len(tokens)) for tokens in so_far], device=device)
            if self._layout.pipeline > 1:
                return last_logits(runner, self._model.groups, self._model.place, ids)[:, -1]
            ends = torch.tensor([len(tokens) - 1 for tokens in so_far], device=device)
            logits: Tensor = forward(ids)[torch.arange(len(so_far), device=device), ends]
            return logits

        return recomputed

    def _chosen(self, logits: Tensor) -> list[int]:
        """Return the next token of each row. Ranks that share the work on a sample return the same tokens."""
        tokens = self._how.choose(logits, self._numbers)
        if (group := self._model.groups.tensor) is not None:
            tokens = tokens.to(logits.device)
            dist.broadcast(tokens, group=group, group_src=0)
        chosen: list[int] = tokens.tolist()
        return chosen

    def _agreed(self, goes_on: bool, is_finite: bool) -> tuple[bool, bool]:
        """Return whether a text of any rank goes on, and whether the logits of all ranks are finite. Replicas of the
        whole model do not wait for each other."""
        if not self._layout.is_sharded or self._layout.world == 1:
            return goes_on, is_finite
        state = torch.tensor([goes_on, not is_finite], dtype=torch.int32, device=self._model.device)
        dist.all_reduce(state, op=dist.ReduceOp.MAX)
        any_goes_on, any_nan = state.tolist()
        return bool(any_goes_on), not any_nan


@contextmanager
def _whole_sequences(model: Model) -> Iterator[None]:
    """Context manager in which no axis shards sequences, except with a pipeline."""
    if model.groups.layout.pipeline > 1:
        yield
        return
    with with_whole_sequences(model.modules), with_whole_stream(model.modules):
        yield


def last_logits(runner: Runner, groups: Groups, place: Coordinates, ids: Tensor) -> Tensor:
    """Return the logits [B, 1, V] of the last token of ``ids`` [B, S]; each rank computes a shard. This is a collective
    call."""
    layout, length = groups.layout, ids.shape[1]
    parts = layout.context
    multiple = 2 * parts * layout.tensor
    if parts > 1 and ids.device.type == "cuda":
        # Attention is FlexAttention there, which is compiled for each length. torch stops compiling after eight.
        multiple = math.lcm(multiple, _GPU_LENGTHS)
    padding = -length % multiple  # at the end, so no token attends to it
    ids = nn.functional.pad(ids, (0, padding))
    rank, index = holder_of(length - 1, length + padding, parts)
    logits = runner.logits(head_tail(ids, 1, parts, place.context), index)
    if groups.context is not None:
        dist.broadcast(logits, group=groups.context, group_src=rank)
    return logits
