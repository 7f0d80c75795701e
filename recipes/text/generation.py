"""Autoregressive text generation."""

from collections.abc import Callable, Collection, Iterator, Sequence

import torch
from torch import Tensor, nn

from serried.configs.errors import UserError
from serried.recipes.data.tokenizers.tokenizer import REPLACEMENT, Tokenizer
from serried.recipes.models.layers.kv_cache import Cache

_HELD_TOKENS = 8
"""Maximum number of tokens buffered until they form a complete character. A byte-level character takes at most 4."""
_CONTEXT_TOKENS = 8
"""Number of previous tokens that are decoded together with new ones, because some tokenizers drop a space at the start
of a text."""


Choose = Callable[[Tensor], int]
"""Maps logits [V], fp32 on the CPU, to the next token."""


def chooser(*, temperature: float, top_p: float, seed: int) -> Choose:
    """Return a function that chooses the most likely token if ``temperature`` is 0, and else samples from the nucleus.

    The nucleus is the smallest set of most likely tokens whose probabilities sum to ``top_p`` (Holtzman et al.,
    "The curious case of neural text degeneration", 2020).
    """
    generator = torch.Generator().manual_seed(seed)

    def choose(logits: Tensor) -> int:
        scaled = logits / temperature if temperature else logits
        if temperature == 0 or not scaled.max().isfinite():  # or so close to 0 that the logits overflow
            return int(logits.argmax())
        probabilities, tokens = scaled.softmax(-1).sort(descending=True, stable=True)
        if top_p < 1:
            before = probabilities.cumsum(-1) - probabilities
            probabilities[1:] = probabilities[1:].where(before[1:] < top_p, 0)
        return int(tokens[torch.multinomial(probabilities, 1, generator=generator)])

    return choose


def of_vocabulary(tokenizer: Tokenizer, choose: Choose) -> Choose:
    """Wrap ``choose`` so that it ignores the padding rows of the vocabulary, and raises ``UserError`` if a logit is
    NaN."""

    def chosen(logits: Tensor) -> int:
        if logits.isnan().any():
            raise UserError(
                "the logits of the model are NaN, so no token can be chosen; use precision=fp32, or other weights"
            )
        return choose(logits[: tokenizer.vocab_size])

    return chosen


def without_end(tokenizer: Tokenizer, choose: Choose) -> Choose:
    """Wrap ``choose`` so that it never chooses the end of a text or a padding row. With sharding, all ranks then run
    the same number of forwards."""

    def chosen(logits: Tensor) -> int:
        logits = logits[: tokenizer.vocab_size]
        logits[tokenizer.end_id] = float("-inf")
        return choose(logits)

    return chosen


@torch.no_grad()
def continued(
    model: nn.Module, prompt: Sequence[int], *, layers: int | None, tokens: int, choose: Choose, device: torch.device
) -> Iterator[int]:
    """Yield up to ``tokens`` tokens that follow ``prompt``, which must not be empty.

    With a sharded model, all ranks must call this together.

    Args:
        layers: number of layers of the KV cache; None to recompute all tokens for each new one, without a cache.
    """
    cache = None if layers is None else Cache(layers, len(prompt) + tokens)
    following = list(prompt)
    for _ in range(tokens):
        ids = torch.tensor([following], device=device)
        logits = model(ids)[0, -1] if cache is None else model(ids, cache=cache)[0, -1]
        token = choose(logits.float().cpu())
        following = [*following, token] if cache is None else [token]
        yield token


def until_end(tokens: Iterator[int], end_ids: Collection[int], end_of_turn: Sequence[int]) -> Iterator[int]:
    """Yield ``tokens`` up to the first of ``end_ids``, or up to the sequence ``end_of_turn``. Neither is yielded."""
    ending = list(end_of_turn)
    held: list[int] = []
    """Latest tokens, which may be the beginning of ``ending``."""
    for token in tokens:
        if token in end_ids:
            break
        held.append(token)
        if ending and held == ending:
            return
        while held and held != ending[: len(held)]:
            yield held.pop(0)
    yield from held


class TextStream:
    """Decodes tokens incrementally. Tokens are buffered until they form complete characters."""

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._ids = list(prompt[-_CONTEXT_TOKENS:])
        self._told = len(self._ids)
        """Number of tokens already returned as text. They are kept because decoding depends on them."""

    def add(self, token: int) -> str:
        """Return the text that ``token`` completes; empty if its last character may be incomplete."""
        self._ids.append(token)
        text = self._text()
        if text.endswith(REPLACEMENT) and len(self._ids) - self._told < _HELD_TOKENS:
            return ""
        return self._settle(text)

    def rest(self) -> str:
        """Return the text of the tokens that are still buffered at the end of the sequence."""
        return self._settle(self._text())

    def _text(self) -> str:
        before = self._tokenizer.decode(self._ids[: self._told])
        return self._tokenizer.decode(self._ids)[len(before) :]

    def _settle(self, text: str) -> str:
        self._ids = self._ids[-_CONTEXT_TOKENS:]
        self._told = len(self._ids)
        return text
