"""Text generation: the choice of the next tokens, and the text of generated tokens."""

import random
from collections.abc import Callable, Collection, Sequence

import torch
from torch import Tensor

from serried.recipes.data.tokenizers.tokenizer import REPLACEMENT, Tokenizer

_HELD_TOKENS = 8
"""Maximum number of tokens buffered until they form a complete character. A byte-level character takes at most 4."""
_CONTEXT_TOKENS = 8
"""Number of previous tokens that are decoded together with new ones, because some tokenizers drop a space at the start
of a text."""


Choose = Callable[[Tensor, Sequence[int]], Tensor]
"""Maps logits [B, V], fp32, and the numbers of their prompts to the next tokens, int64 [B]."""


def chooser(*, temperature: float, top_p: float, seed: int) -> Choose:
    """Return a function that chooses the most likely token if ``temperature`` is 0, and else samples from the nucleus.

    The nucleus is the smallest set of most likely tokens whose probabilities sum to ``top_p`` (Holtzman et al.,
    "The curious case of neural text degeneration", 2020). Each prompt has its own random numbers, which depend only on
    ``seed`` and the number of the prompt, so that the other prompts of a batch do not matter.
    """
    numbers_of: dict[int, random.Random] = {}

    def choose(logits: Tensor, prompts: Sequence[int]) -> Tensor:
        likeliest = logits.argmax(-1)
        if temperature == 0:
            return likeliest
        # fp64, so that rounding errors of other batch sizes almost never change the token that a number selects.
        scaled = logits.double() / temperature
        is_finite = scaled.amax(-1).isfinite()  # not so close to 0 that the logits overflow
        probabilities = scaled.where(is_finite.unsqueeze(-1), 0).softmax(-1)
        if top_p < 1:
            sorted_ones, tokens = probabilities.sort(dim=-1, descending=True, stable=True)
            is_kept = sorted_ones.cumsum(-1) - sorted_ones < top_p
            is_kept[:, 0] = True
            probabilities = probabilities * torch.zeros_like(is_kept).scatter(-1, tokens, is_kept)
        sums = probabilities.cumsum(-1)
        drawn = [numbers_of.setdefault(prompt, random.Random(f"{seed} {prompt}")).random() for prompt in prompts]
        limits = torch.tensor(drawn, dtype=torch.float64, device=logits.device).unsqueeze(1) * sums[:, -1:]
        limits = limits.minimum(sums[:, -1:].nextafter(torch.zeros_like(limits)))  # the product may be rounded up
        return torch.searchsorted(sums, limits, right=True).squeeze(1).where(is_finite, likeliest)

    return choose


def of_vocabulary(tokenizer: Tokenizer, choose: Choose, *, never: Collection[int] = ()) -> Choose:
    """Wrap ``choose`` so that it chooses neither padding rows of the vocabulary nor the tokens ``never``."""
    excluded = sorted(never)

    def chosen(logits: Tensor, prompts: Sequence[int]) -> Tensor:
        logits = logits[:, : tokenizer.vocab_size]
        if excluded:
            logits = logits.index_fill(1, torch.tensor(excluded, device=logits.device), float("-inf"))
        return choose(logits, prompts)

    return chosen


class Reply:
    """Text of the tokens that follow a prompt, up to an end token, the end of a turn or a stop string."""

    def __init__(
        self, tokenizer: Tokenizer, prompt: Sequence[int], *, end_ids: Collection[int] = (),
        end_of_turn: Sequence[int] = (), stops: Sequence[str] = (),
    ) -> None:  # fmt: skip
        """
        Args:
            end_ids: tokens that end the text.
            end_of_turn: sequence of tokens that ends the text.
            stops: strings that end the text.
        """
        self.text = ""
        self.tokens = 0
        """Number of tokens, without those that end the text."""
        self.is_ended = False
        self._stream = TextStream(tokenizer, prompt)
        self._end_ids, self._end_of_turn = end_ids, list(end_of_turn)
        self._stops = [stop for stop in stops if stop]
        self._held: list[int] = []
        """Latest tokens, which may be the beginning of the end of a turn."""

    def add(self, token: int) -> str:
        """Add a token, unless the text has ended. Return the text that it completes; empty if it may be incomplete."""
        ending, before = self._end_of_turn, len(self.text)
        if self.is_ended:
            return ""
        if token in self._end_ids:
            self._end()
            return self.text[before:]
        self._held.append(token)
        if ending and self._held == ending:
            self._held.clear()
            self._end()
        while self._held and self._held != ending[: len(self._held)]:
            self._take(self._held.pop(0))
        return self.text[before:]

    def finish(self) -> str:
        """End the text and return the rest of it."""
        before = len(self.text)
        if not self.is_ended:
            self._end()
        return self.text[before:]

    def _end(self) -> None:
        while self._held and not self.is_ended:
            self._take(self._held.pop(0))
        if not self.is_ended:
            self._append(self._stream.rest())
        self.is_ended = True

    def _take(self, token: int) -> None:
        if not self.is_ended:
            self.tokens += 1
            self._append(self._stream.add(token))

    def _append(self, text: str) -> None:
        start = len(self.text)
        self.text += text
        for stop in self._stops:  # one after the other, as lm-evaluation-harness does
            if (index := self.text.find(stop, max(0, start - len(stop) + 1))) >= 0:
                self.text, self.is_ended = self.text[:index], True


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
