"""Keys and values of the tokens so far: what generating one token more would otherwise compute again."""

import torch
from torch import Tensor


class LayerCache:
    """Of one block, [B, K, capacity, E] each, made when the first ones come: their type and place are theirs."""

    def __init__(self, capacity: int) -> None:
        self._capacity, self._length = capacity, 0
        self._keys: Tensor | None = None
        self._values: Tensor | None = None

    def extend(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Keep ``keys`` and ``values`` [B, K, S, E] of the next tokens. Returns those of all tokens so far."""
        if self._keys is None or self._values is None:
            batch, heads, _, width = keys.shape
            self._keys = keys.new_empty(batch, heads, self._capacity, width)
            self._values = torch.empty_like(self._keys)
        first, self._length = self._length, self._length + keys.shape[2]
        self._keys[:, :, first : self._length] = keys
        self._values[:, :, first : self._length] = values
        return self._keys[:, :, : self._length], self._values[:, :, : self._length]


class Cache:
    """Of all blocks, for sequences that grow together to at most ``capacity`` tokens."""

    def __init__(self, layers: int, capacity: int) -> None:
        self.capacity = capacity
        self.length = 0
        """Tokens so far."""
        self.layers = [LayerCache(capacity) for _ in range(layers)]

    def mask(self, tokens: int, device: torch.device, window: int | None = None) -> Tensor | None:
        """Which keys (dim 3) the next ``tokens`` queries (dim 2) attend to: all up to themselves, or the last
        ``window`` of these. None: plainly causal."""
        keys = self.length + tokens
        if window is not None and window >= keys:
            window = None
        if self.length == 0 and window is None:
            return None
        mask = torch.ones(1, 1, tokens, keys, dtype=torch.bool, device=device).tril_(self.length)
        return mask if window is None else mask.triu_(self.length - window + 1)
