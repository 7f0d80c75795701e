"""The attention of the built-in families for models of transformers.

transformers looks up the attention function, and the function that makes its masks, by name
(https://huggingface.co/docs/transformers/attention_interface).
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from serried.recipes.models.layers.attention import attend, causal_mask

NAME = "serried"
"""Name of the attention function in transformers."""

_positions: ContextVar[Tensor | None] = ContextVar("positions", default=None)


def register_attention() -> None:
    """Register the attention function with transformers."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(NAME, _attention)
    AttentionMaskInterface.register(NAME, _mask)


@contextmanager
def documents_at(positions: Tensor | None) -> Iterator[None]:
    """Context manager for a model's forward, in which attention is masked between documents. ``positions`` [B, S]
    restart from 0 with each document."""
    token = _positions.set(positions)
    try:
        yield
    finally:
        _positions.reset(token)


def _mask(*arguments: Any, **named: Any) -> Any:
    """Return the mask of the layers that share it. Its shape is not that of transformers' masks."""
    from transformers.masking_utils import sdpa_mask

    length: int | None = named.get("q_length")
    is_whole = length == named.get("kv_length") and named.get("attention_mask") is None
    if length is None or not is_whole or named.get("use_vmap"):  # a cache, padding or a mask of the model's own
        return sdpa_mask(*arguments, **named)
    return causal_mask(_positions.get(), length, named["device"], named.get("local_size"))


def _attention(
    module: Any, q: Tensor, k: Tensor, v: Tensor, attention_mask: Any, scaling: float | None = None,
    softcap: float | None = None, **named: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """Return the attention of q [B, H, S, E] on k, v [B, K, S, E] as [B, S, H, E]."""
    if isinstance(attention_mask, Tensor) or q.shape[2] != k.shape[2]:
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        mixed: tuple[Tensor, None] = sdpa_attention_forward(
            module, q, k, v, attention_mask, scaling=scaling, softcap=softcap, **named
        )
        return mixed
    width = v.shape[-1]
    if width < q.shape[-1]:  # latent attention; kernels take one width
        v = F.pad(v, (0, q.shape[-1] - width))
    out = attend(q, k, v, attention_mask, scale=scaling, soft_cap=softcap)[..., :width]
    return out.transpose(1, 2).contiguous(), None
