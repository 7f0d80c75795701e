"""Text from a model: one token after another, each chosen by what the model makes of those before it."""

from collections.abc import Callable, Collection, Iterator, Sequence

import torch
from torch import Tensor, nn

from serried.recipes.data.tokenizers.tokenizer import REPLACEMENT, Tokenizer
from serried.recipes.models.layers.kv_cache import Cache

_HELD_TOKENS = 8
"""Tokens that may be waited for to make up a character: of bytes one takes 4."""
_CONTEXT_TOKENS = 8
"""Of the prompt, decoded with what follows: some tokenizers leave out a blank that begins a text."""


Choose = Callable[[Tensor], int]
"""Logits [V], fp32 on the CPU -> the next token."""


def chooser(*, temperature: float, top_p: float, seed: int) -> Choose:
    """The likeliest token at ``temperature`` 0; else one drawn from the nucleus.

    The nucleus is the fewest likeliest tokens whose probabilities come to ``top_p`` (Holtzman et al., "The curious case
    of neural text degeneration", 2020).
    """
    generator = torch.Generator().manual_seed(seed)

    def choose(logits: Tensor) -> int:
        scaled = logits / temperature if temperature else logits
        if temperature == 0 or not scaled.max().isfinite():  # so close to 0 that numbers are too large
            return int(logits.argmax())
        probabilities, tokens = scaled.softmax(-1).sort(descending=True, stable=True)
        if top_p < 1:
            before = probabilities.cumsum(-1) - probabilities
            probabilities[1:] = probabilities[1:].where(before[1:] < top_p, 0)
        return int(tokens[torch.multinomial(probabilities, 1, generator=generator)])

    return choose


@torch.no_grad()
def continued(
    model: nn.Module, prompt: Sequence[int], *, layers: int | None, tokens: int, choose: Choose, device: torch.device
) -> Iterator[int]:
    """Up to ``tokens`` tokens that follow ``prompt``, which has one at least. ``layers``: those of its cache; None: it
    has none, and all tokens are computed again. The model may be one
    that is cut, and then all ranks call this together."""
    cache = None if layers is None else Cache(layers, len(prompt) + tokens)
    following = list(prompt)
    for _ in range(tokens):
        ids = torch.tensor([following], device=device)
        logits = model(ids)[0, -1] if cache is None else model(ids, cache=cache)[0, -1]
        token = choose(logits.float().cpu())
        following = [*following, token] if cache is None else [token]
        yield token


def until_end(tokens: Iterator[int], end_ids: Collection[int], end_of_turn: Sequence[int]) -> Iterator[int]:
    """``tokens`` up to one of the end marks, or to the tokens ``end_of_turn`` one after the other; neither is given
    on."""
    ending = list(end_of_turn)
    held: list[int] = []
    """The latest tokens, which may turn out to be the beginning of ``ending``."""
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
    """Tokens in, text out as soon as it is settled: characters may take several tokens."""

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._ids = list(prompt[-_CONTEXT_TOKENS:])
        self._told = len(self._ids)
        """Tokens already returned as text; they are kept because decoding depends on them."""

    def add(self, token: int) -> str:
        """Return the text that is complete with ``token``; empty if it may be part of a character."""
        self._ids.append(token)
        text = self._text()
        if text.endswith(REPLACEMENT) and len(self._ids) - self._told < _HELD_TOKENS:
            return ""
        return self._settle(text)

    def rest(self) -> str:
        """The text of what was held back, now that no more comes."""
        return self._settle(self._text())

    def _text(self) -> str:
        before = self._tokenizer.decode(self._ids[: self._told])
        return self._tokenizer.decode(self._ids)[len(before) :]

    def _settle(self, text: str) -> str:
        self._ids = self._ids[-_CONTEXT_TOKENS:]
        self._told = len(self._ids)
        return text
