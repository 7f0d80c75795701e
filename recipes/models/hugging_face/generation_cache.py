"""Text generation by a transformers model, with its own cache, for prompts of different lengths at a time."""

import inspect
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import Tensor

_ROUNDING = 1e-4
"""Largest difference of logits, in standard deviations, that counts as rounding."""


class GenerationCache:
    """transformers' cache, and the mask and positions of sequences with padding at the beginning."""

    def __init__(self, padding: Sequence[int], *, accepted: Collection[str], positions: int | None) -> None:
        """
        Args:
            padding: number of padding tokens of each sequence.
            accepted: names of the arguments that the model's forward accepts.
            positions: number of positions in the model's table, if it has one. Sequences whose text has ended may be
                longer.
        """
        self._padding, self._accepted, self._positions = padding, accepted, positions
        self._mask: Tensor | None = None
        self._past: Any = None

    def next_logits(self, forward: Callable[..., Any], tokens: Tensor) -> Tensor:
        """Return the logits after the next ``tokens`` [B, S], [B, 1, V], and add the tokens to the cache."""
        new = torch.ones_like(tokens)
        if self._mask is None:
            for row, padding in enumerate(self._padding):
                new[row, :padding] = 0
            self._mask = new
        else:
            self._mask = torch.cat((self._mask, new), dim=1)
        named: dict[str, Any] = {"attention_mask": self._mask}
        if "logits_to_keep" in self._accepted:  # the logits of all tokens of the prompts would take much memory
            named["logits_to_keep"] = 1
        if "position_ids" in self._accepted:
            positions = (self._mask.cumsum(1) - 1).clamp(min=0)[:, -tokens.shape[1] :]
            named["position_ids"] = positions if self._positions is None else positions.clamp(max=self._positions - 1)
        output = forward(tokens, past_key_values=self._past, use_cache=True, **named)
        self._past = output.past_key_values
        logits: Tensor = output.logits[:, -1:]
        return logits


def cache_for(forward: Callable[..., Any], config: Any) -> Callable[[Sequence[int]], GenerationCache]:
    """Return a function that creates an empty cache for a model, given the padding of each sequence."""
    accepted = {*inspect.signature(forward).parameters}
    positions = getattr(config, "max_position_embeddings", None)
    return lambda padding: GenerationCache(padding, accepted=accepted, positions=positions)


def supports_cache(forward: Callable[..., Any], config: Any, device: torch.device) -> bool:
    """Return whether the logits of a padded sequence with a cache equal those of the sequence alone without one."""
    tokens = torch.arange(7, 7 * 19, 7, device=device).view(2, 9) % config.vocab_size
    padding, prompt = (0, 3), 6
    expected = torch.stack([forward(tokens[row : row + 1, start:]).logits[0, -4:] for row, start in enumerate(padding)])
    try:
        cache = cache_for(forward, config)(padding)
        pieces = [tokens[:, :prompt], *tokens[:, prompt:].split(1, 1)]
        found = torch.cat([cache.next_logits(forward, piece) for piece in pieces], dim=1)
    except Exception:  # code without a cache, or with one of its own
        return False
    return bool((found - expected).abs().max() <= _ROUNDING * expected.std())


def depends_on_batch(config: Any) -> bool:
    """Return whether rotations of a sequence depend on the longest sequence of a batch."""
    settings = [getattr(config, key, None) or {} for key in ("rope_parameters", "rope_scaling")]
    settings += [value for each in settings for value in each.values() if isinstance(value, dict)]
    return any(each.get(key) in ("dynamic", "longrope") for each in settings for key in ("rope_type", "type"))
