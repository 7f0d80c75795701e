"""Output projection and its loss, without materializing the logits of a whole batch."""

import inspect
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from serried.parallel.plan import Vocabulary

IGNORE = -100
"""Target value of positions where nothing is predicted."""

_CHUNK_LOGITS = 2**24
_MINIMUM_CHUNK_TOKENS = 1024


HeadLoss = Callable[[Tensor, Tensor, Tensor, Vocabulary, float | None], Tensor]
"""Maps (hidden [T, D], weight [V, D], targets [B, S], vocabulary, soft cap) to the model's output."""


class HeadTerms(NamedTuple):
    """Terms that training adds to the cross entropy. Evaluation leaves them out."""

    label_smoothing: float = 0.0
    """Fraction of the target distribution that is spread evenly over the vocabulary, as in ``F.cross_entropy``."""
    z_loss: float = 0.0
    """Weight of the squared log-sum-exp of the logits, which keeps it near 0 (https://arxiv.org/abs/2204.02311)."""


PLAIN = HeadTerms()


class LanguageModelHead(nn.Module):
    """Maps hidden states [B, S, D] to logits [B, S, V], or to the loss summed over targets.

    With ``tied``, it has no weight of its own and uses the embedding's, ``shared_weight``. With a ``soft_cap``, a logit
    x becomes cap * tanh(x / cap). The loss is computed inside its forward, because with sharding a weight is gathered
    only while its module runs.
    """

    def __init__(self, dim: int, vocab_size: int, tied: bool, soft_cap: float | None = None) -> None:
        super().__init__()
        self.soft_cap = soft_cap
        self.loss: HeadLoss = linear_cross_entropy_sum
        """Function that computes the loss if targets are given. A task may replace it."""
        self.weight = None if tied else nn.Parameter(torch.empty(vocab_size, dim))
        self.vocabulary = Vocabulary()
        self.with_rows: Callable[[Tensor, Vocabulary], Tensor] | None = None
        """Replaces rows of the weight with trained ones; see ``parallel.token_rows``."""

    def forward(self, hidden: Tensor, targets: Tensor | None = None, shared_weight: Tensor | None = None) -> Tensor:
        weight = shared_weight if self.weight is None else self.weight
        assert weight is not None
        if self.with_rows is not None:
            weight = self.with_rows(weight, self.vocabulary)
        if targets is None:
            logits = self.vocabulary.logits(hidden, weight.to(hidden.dtype))
            return logits if self.soft_cap is None else self.soft_cap * torch.tanh(logits / self.soft_cap)
        return self.loss(hidden.flatten(0, 1), weight, targets, self.vocabulary, self.soft_cap)

    def compile_parts(self) -> None:
        """Compile the elementwise passes of the loss over the logits. Called by ``parallel.compile``."""
        if "passes" in inspect.signature(self.loss).parameters:
            self.loss = partial(self.loss, passes=compiled_passes())  # type: ignore[call-arg]


def linear_cross_entropy_sum(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    vocabulary: Vocabulary | None = None,
    soft_cap: float | None = None,
    terms: HeadTerms = PLAIN,
    passes: "Passes | None" = None,
) -> Tensor:
    """Return the cross entropy of ``hidden @ weight.T``, soft-capped if ``soft_cap`` is given, summed over the targets
    that are not -100, an fp32 scalar.

    ``terms`` are added only if autograd is enabled. hidden [T, D], weight [V, D], targets [T] or [B, S] int64. Tokens
    are processed in chunks, so that only the logits of one chunk are in memory. Gradients are computed in the forward
    pass, so that nothing is computed twice. Products run in hidden's dtype, softmax and sums in fp32. The method is
    Liger-Kernel's (https://arxiv.org/abs/2410.10989).
    """
    vocabulary = vocabulary or Vocabulary()
    if torch.is_grad_enabled():
        loss: Tensor = _LinearCrossEntropySum.apply(
            hidden, weight, targets, vocabulary, soft_cap, terms, passes or EAGER
        )
        return loss
    weight = weight.to(hidden.dtype)
    parts = chunks(hidden, weight, targets, vocabulary, soft_cap)
    return torch.stack([chunk.losses.sum() for chunk in parts]).sum()


def chunk_tokens(vocab_size: int) -> int:
    """Return the number of tokens in a chunk."""
    return max(_MINIMUM_CHUNK_TOKENS, _CHUNK_LOGITS // vocab_size)


class Chunk(NamedTuple):
    """A chunk of tokens with their logits. T includes tokens of other ranks if the vocabulary is sharded."""

    mine: slice
    """Range of this rank's tokens."""
    hidden: Tensor
    """Hidden states, [T, D]"""
    logits: Tensor
    """[T, local rows of the vocabulary], fp32; for compiled passes, the uncapped product in hidden's dtype"""
    normalizer: Tensor
    """Log-sum-exp over the full vocabulary, [T]"""
    losses: Tensor
    """[T], 0 where there is no target"""
    is_target: Tensor
    """Whether the token has a target, [T]"""
    row: Tensor
    """Local row of the target, [T]; any row if it is on another rank"""
    is_here: Tensor
    """Whether the target's row is on this rank, [T]"""


def _measure(
    hidden: Tensor, weight: Tensor, soft_cap: float | None, *target: Any
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return the logits (fp32, capped), their log-sum-exp, and the target's logit of each token."""
    logits = _capped((hidden @ weight.T).float(), soft_cap)
    return logits, *_measured(logits, *target)


def _capped(logits: Tensor, soft_cap: float | None) -> Tensor:
    return logits if soft_cap is None else logits.div_(soft_cap).tanh_().mul_(soft_cap)


def _measured(
    logits: Tensor, row: Tensor, is_here: Tensor, smoothing: float, all_rows: int
) -> tuple[Tensor, Tensor]:  # fmt: skip
    picked = logits.gather(1, row.unsqueeze(1)).squeeze(1).where(is_here, 0)
    if smoothing:
        picked = torch.lerp(picked, logits.sum(dim=1) / all_rows, smoothing)
    return logits.logsumexp(dim=1), picked


def logit_gradients(
    chunk: Chunk, factors: Tensor, soft_cap: float | None, terms: HeadTerms = PLAIN, all_rows: int = 1
) -> Tensor:
    """Return the gradients of the losses with respect to the logits, times ``factors`` [T]. They overwrite the logits.

    ``all_rows``: number of rows of the full vocabulary, for label smoothing.
    """
    return _derive(chunk.logits, chunk.normalizer, chunk.row, chunk.is_here, factors, soft_cap, terms, all_rows)


def _derive(
    logits: Tensor, normalizer: Tensor, row: Tensor, is_here: Tensor, factors: Tensor, soft_cap: float | None,
    terms: HeadTerms, all_rows: int,
) -> Tensor:  # fmt: skip
    slope = None if soft_cap is None else (logits / soft_cap).square_().neg_().add_(1)
    gradients = logits.sub_(normalizer.unsqueeze(1)).exp_()  # softmax, in place
    if terms.z_loss:
        gradients.mul_((1 + 2 * terms.z_loss * normalizer).unsqueeze(1))
    if terms.label_smoothing:
        gradients.sub_(terms.label_smoothing / all_rows)
    wanted = ((1 - terms.label_smoothing) * is_here.float()).unsqueeze(1)
    if torch.compiler.is_compiling():  # a scatter would need another pass
        numbers = torch.arange(gradients.shape[1], device=gradients.device)
        gradients = gradients.sub_(wanted * (numbers == row.unsqueeze(1)))
    else:
        gradients.scatter_add_(1, row.unsqueeze(1), -wanted)
    gradients.mul_(factors.unsqueeze(1))
    return gradients if slope is None else gradients.mul_(slope)


class Passes(NamedTuple):
    """Passes over the logits of a chunk."""

    measure: Callable[..., tuple[Tensor, Tensor, Tensor]]
    """Like ``_measure``. Instead of the logits, it may return the input that ``gradients`` needs."""
    gradients: Callable[..., Tensor]
    """Like ``logit_gradients``."""
    keeps_logits: bool = True
    """Whether ``measure`` returns fp32 logits."""


EAGER = Passes(_measure, logit_gradients)


def compiled_passes() -> Passes:
    """Return compiled passes that read only the product and write only its gradient, both in the product's dtype."""

    def measure(product: Tensor, soft_cap: float | None, *target: Any) -> tuple[Tensor, Tensor]:
        return _measured(_capped(product.to(torch.float32, copy=True), soft_cap), *target)

    def derive(
        product: Tensor, normalizer: Tensor, row: Tensor, is_here: Tensor, factors: Tensor, soft_cap: float | None,
        terms: HeadTerms, all_rows: int,
    ) -> Tensor:  # fmt: skip
        logits = _capped(product.to(torch.float32, copy=True), soft_cap)
        return _derive(logits, normalizer, row, is_here, factors, soft_cap, terms, all_rows).to(product.dtype)

    # A second chunk length compiles one more graph, which all further lengths share.
    one, two = torch.compile(measure), torch.compile(derive)

    def multiply_and_measure(hidden: Tensor, weight: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
        product = hidden @ weight.T
        return product, *one(product, *rest)

    def gradients(chunk: Chunk, *rest: Any) -> Tensor:
        found: Tensor = two(chunk.logits, chunk.normalizer, chunk.row, chunk.is_here, *rest)
        return found

    return Passes(multiply_and_measure, gradients, keeps_logits=False)


def chunks(
    hidden: Tensor, weight: Tensor, targets: Tensor, vocabulary: Vocabulary, soft_cap: float | None,
    terms: HeadTerms = PLAIN, passes: Passes = EAGER,
) -> Iterator[Chunk]:  # fmt: skip
    """Yield the tokens in chunks. ``weight`` must be in hidden's dtype."""
    rows, targets = weight.shape[0], vocabulary.targets(targets)
    all_rows = vocabulary.all_rows(rows)
    # Without fp32 logits, twice the tokens take no more memory, and the weight's gradient is read and written half as
    # often.
    is_lean = weight.itemsize == 2 and soft_cap is None and not passes.keeps_logits
    tokens = chunk_tokens(vocabulary.most_rows(rows)) * (2 if is_lean else 1)
    step = -(-tokens // len(targets))  # equal on all ranks
    for start in range(0, hidden.shape[0], step):
        mine = slice(start, start + step)
        chunk, wanted = vocabulary.tokens(hidden[mine]), targets[:, mine].flatten()
        is_target = wanted != IGNORE
        row = wanted.where(is_target, 0) - vocabulary.first_row
        is_here = (row >= 0) & (row < rows)
        row = row.clamp(0, rows - 1)
        logits, normalizer, picked = passes.measure(
            chunk, weight, soft_cap, row, is_here, terms.label_smoothing, all_rows
        )
        normalizer, picked = vocabulary.combine(normalizer, picked)
        losses = normalizer - picked
        if terms.z_loss:
            losses += terms.z_loss * normalizer.square()
        losses = losses.where(is_target, 0)
        yield Chunk(mine, chunk, logits, normalizer, losses, is_target, row, is_here)
        del logits  # frees their memory before the next chunk


class Gradients:
    """Gradients of hidden states and weight, accumulated over chunks."""

    def __init__(self, hidden: Tensor, weight: Tensor, vocabulary: Vocabulary, *, is_frozen: bool) -> None:
        self._vocabulary, self.low_weight = vocabulary, weight.to(hidden.dtype)
        """Weight in the dtype of products, [V, D]."""
        self.hidden = torch.empty_like(hidden)
        """[T, D]"""
        self.weight = torch.zeros((0,) if is_frozen else weight.shape, dtype=torch.float32, device=weight.device)
        """[V, D]; empty if the weight ``is_frozen``"""

    def add(self, chunk: Chunk, of_logits: Tensor) -> None:
        """Accumulate the gradients of hidden states and weight of ``chunk``, from the gradient ``of_logits`` of its
        logits, [T, rows]."""
        low = of_logits.to(self.low_weight.dtype)
        self.hidden[chunk.mine] = self._vocabulary.sum_tokens(low @ self.low_weight)
        if not self.weight.numel():
            return
        if low.itemsize == 2 and low.is_cuda and torch.version.hip is None:
            # Accumulated inside the product, in fp32: one pass over the gradient instead of three, and no rounding of
            # the product (https://github.com/linkedin/Liger-Kernel/pull/1239 measured the same change).
            with torch.autocast("cuda", enabled=False):
                torch.addmm(self.weight, low.T, chunk.hidden, out_dtype=torch.float32, out=self.weight)
        elif low.dtype in (torch.float16, torch.float32):
            # In fp16, a sum over tokens would overflow before any loss scale is applied.
            with torch.autocast(low.device.type, enabled=False):
                self.weight.addmm_(of_logits.float().T, chunk.hidden.float())
        else:
            self.weight += low.T @ chunk.hidden


class _LinearCrossEntropySum(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[no-untyped-def]
        ctx, hidden: Tensor, weight: Tensor, targets: Tensor, vocabulary: Vocabulary, soft_cap: float | None,
        terms: HeadTerms, passes: Passes,
    ) -> Tensor:  # fmt: skip
        gradients = Gradients(hidden, weight, vocabulary, is_frozen=not ctx.needs_input_grad[1])
        loss = torch.zeros((), dtype=torch.float32, device=hidden.device)
        all_rows = vocabulary.all_rows(weight.shape[0])
        for chunk in chunks(hidden, gradients.low_weight, targets, vocabulary, soft_cap, terms, passes):
            loss += chunk.losses.sum()
            of_logits = passes.gradients(chunk, chunk.is_target, soft_cap, terms, all_rows)
            gradients.add(chunk, of_logits.to(hidden.dtype))
            del chunk, of_logits  # frees their memory before the next chunk
        ctx.save_for_backward(gradients.hidden, gradients.weight)
        ctx.weight_dtype = weight.dtype
        return loss

    @staticmethod
    def backward(ctx, grad_loss: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[no-untyped-def]
        grad_hidden, grad_weight = ctx.saved_tensors
        of_weight = (grad_weight * grad_loss).to(ctx.weight_dtype) if ctx.needs_input_grad[1] else None
        return grad_hidden * grad_loss, of_weight, None, None, None, None, None


def token_losses(
    hidden: Tensor, weight: Tensor, targets: Tensor, vocabulary: Vocabulary, soft_cap: float | None
) -> Tensor:
    """Return the cross entropy of each target, [B, S] fp32, 0 where there is no target. Computed in chunks."""
    losses: Tensor = _TokenLosses.apply(hidden, weight, targets, vocabulary, soft_cap)
    return losses


class _TokenLosses(torch.autograd.Function):
    """Recomputes the logits in the backward, because their gradients depend on the gradient of each token's loss."""

    @staticmethod
    def forward(  # type: ignore[no-untyped-def]
        ctx, hidden: Tensor, weight: Tensor, targets: Tensor, vocabulary: Vocabulary, soft_cap: float | None
    ) -> Tensor:
        parts = chunks(hidden, weight.to(hidden.dtype), targets, vocabulary, soft_cap)
        ranks = len(vocabulary.targets(targets))
        losses = torch.cat([chunk.losses.view(ranks, -1) for chunk in parts], dim=1)
        ctx.save_for_backward(hidden, weight, targets)
        ctx.vocabulary, ctx.soft_cap = vocabulary, soft_cap
        return losses.view(ranks, len(targets), -1).movedim(0, 1).flatten(1)

    @staticmethod
    def backward(ctx, grad_losses: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[no-untyped-def]
        hidden, weight, targets = ctx.saved_tensors
        vocabulary, soft_cap = ctx.vocabulary, ctx.soft_cap
        gradients = Gradients(hidden, weight, vocabulary, is_frozen=not ctx.needs_input_grad[1])
        grads = vocabulary.targets(grad_losses)
        for chunk in chunks(hidden, gradients.low_weight, targets, vocabulary, soft_cap):
            factors = grads[:, chunk.mine].flatten() * chunk.is_target
            gradients.add(chunk, logit_gradients(chunk, factors, soft_cap))
            del chunk  # frees its memory before the next chunk
        of_weight = gradients.weight.to(weight.dtype) if ctx.needs_input_grad[1] else None
        return gradients.hidden, of_weight, None, None, None
