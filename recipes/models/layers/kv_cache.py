"""Cache of keys and values for text generation.

Sequences of different lengths are padded at the beginning, so that they grow together. No token of a document attends
to padding.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


class LayerCache:
    """Keys and values of one block, or their latent vectors, [B, K, capacity, E] each. Allocated with the dtype and
    device of the first keys."""

    def __init__(self, capacity: int) -> None:
        self._capacity, self._length = capacity, 0
        self._keys: Tensor | None = None
        self._values: Tensor | None = None
        self.state: Any = None
        """State of a block that has one instead of keys and values, such as linear attention; None before the first
        token."""

    def extend(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Store ``keys`` and ``values`` [B, K, S, E] of the next tokens. Return the keys and values of all tokens so
        far."""
        if self._keys is None or self._values is None:
            batch, heads, _, width = keys.shape
            self._keys = keys.new_empty(batch, heads, self._capacity, width)
            self._values = values.new_empty(*values.shape[:2], self._capacity, values.shape[3])
        first, self._length = self._length, self._length + keys.shape[2]
        self._keys[:, :, first : self._length] = keys
        self._values[:, :, first : self._length] = values
        return self._keys[:, :, : self._length], self._values[:, :, : self._length]

    def clear(self) -> None:
        """Remove all tokens from the cache."""
        self._length, self.state = 0, None


class Cache:
    """Keys and values of all blocks, for sequences that grow together to at most ``capacity`` tokens."""

    def __init__(self, layers: int, capacity: int, padding: Sequence[int] = ()) -> None:
        """``padding``: number of padding tokens at the beginning of each sequence; empty: no padding."""
        self.capacity = capacity
        self.padding = tuple(padding) if any(padding) else ()
        self.length = 0
        """Number of tokens so far, including padding."""
        self.inputs: list[Tensor] = []
        """Input of the model for these tokens, [B, S] each, if it may need them again; see ``clear``."""
        self.layers = [LayerCache(capacity) for _ in range(layers)]
        self._starts: Tensor | None = None

    def clear(self) -> None:
        """Remove all tokens from the cache."""
        self.length = 0
        self.inputs.clear()
        for layer in self.layers:
            layer.clear()

    def positions(self, tokens: int, device: torch.device) -> Tensor:
        """Return the positions of the next ``tokens`` tokens in their documents: [1, S], or [B, S] if there is padding,
        which has position 0."""
        places = torch.arange(self.length, self.length + tokens, device=device).unsqueeze(0)
        return (places - self._first(device)).clamp(min=0) if self.padding else places

    def lengths(self, tokens: int, device: torch.device) -> Tensor:
        """Return the lengths of the documents with the next ``tokens`` tokens: [1, S], or [B, S] if there is
        padding."""
        return self.positions(tokens, device)[:, -1:].expand(-1, tokens) + 1

    def crosses(self, length: int, tokens: int) -> bool:
        """Return whether the next ``tokens`` tokens make a document in the cache longer than ``length``."""
        so_far = {self.length - padding for padding in self.padding or (0,)}
        return any(0 < before <= length < before + tokens for before in so_far)

    def mask(self, tokens: int, device: torch.device, window: int | None = None) -> Tensor | None:
        """Return a bool mask [B or 1, 1, tokens, keys], True where one of the next ``tokens`` queries attends to a key:
        to all keys of its document up to its own, or to the last ``window`` of these. None: plain causal attention.

        Padding attends to itself.
        """
        keys = self.length + tokens
        if window is not None and window >= keys:
            window = None
        if self.length == 0 and window is None and not self.padding:
            return None
        mask = torch.ones(1, 1, tokens, keys, dtype=torch.bool, device=device).tril_(self.length)
        if window is not None:
            mask.triu_(self.length - window + 1)
        if not self.padding:
            return mask
        every = torch.arange(keys, device=device)
        is_token = every >= self._first(device)  # [B, keys]
        return mask & is_token[:, None, None] | (every[self.length :].unsqueeze(1) == every)

    def _first(self, device: torch.device) -> Tensor:
        """Return the index of the first token of each document, [B, 1]."""
        if self._starts is None:
            self._starts = torch.tensor(self.padding, device=device).unsqueeze(1)
        return self._starts
