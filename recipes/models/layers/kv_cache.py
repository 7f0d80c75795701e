"""Cache of keys and values for text generation."""

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

    def __init__(self, layers: int, capacity: int) -> None:
        self.capacity = capacity
        self.length = 0
        """Number of tokens so far."""
        self.inputs: list[Tensor] = []
        """Input of the model for these tokens, [B, S] each, if it may need them again; see ``clear``."""
        self.layers = [LayerCache(capacity) for _ in range(layers)]

    def clear(self) -> None:
        """Remove all tokens from the cache."""
        self.length = 0
        self.inputs.clear()
        for layer in self.layers:
            layer.clear()

    def mask(self, tokens: int, device: torch.device, window: int | None = None) -> Tensor | None:
        """Return a bool mask [1, 1, tokens, keys], True where one of the next ``tokens`` queries attends to a key: to
        all keys up to its own, or to the last ``window`` of these. None: plain causal attention."""
        keys = self.length + tokens
        if window is not None and window >= keys:
            window = None
        if self.length == 0 and window is None:
            return None
        mask = torch.ones(1, 1, tokens, keys, dtype=torch.bool, device=device).tril_(self.length)
        return mask if window is None else mask.triu_(self.length - window + 1)
