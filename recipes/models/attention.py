"""Causal attention, within documents where several share a sequence.

Positions alone do not keep documents apart: attention has to stop at their borders. On a CPU that is a mask for
``scaled_dot_product_attention``. On a GPU it is FlexAttention (https://arxiv.org/abs/2412.05496), which leaves out the
blocks in which no document meets itself; it has no backward on a CPU (torch 2.13).
"""

from functools import cache
from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

Mask = Tensor | BlockMask | None
"""[B, 1, S, S] bool, True where a query (dim 2) attends to a key (dim 3), or that in blocks; None: plainly causal."""

_FLEX_CAPABILITY = (8, 0)
"""Compute capability from which FlexAttention's kernels run: Ampere."""


def document_mask(positions: Tensor) -> Mask:
    """Causal attention within documents; ``positions`` [B, S] restart from 0 with each. Make it once a forward."""
    documents = (positions == 0).cumsum(1)  # [B, S]
    if _has_flex(positions.device):
        return block_mask(documents)
    same = documents.unsqueeze(2) == documents.unsqueeze(1)  # [B, S, S]
    return same.tril_().unsqueeze(1)


def block_mask(documents: Tensor) -> BlockMask:
    """The mask of FlexAttention; ``documents`` [B, S] has a number for each token, ascending along a sequence."""

    def attends(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        del head
        return (documents[batch, query] == documents[batch, key]) & (query >= key)

    size, sequence = documents.shape
    return create_block_mask(attends, size, None, sequence, sequence, device=documents.device)


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Mask, *, grouped: bool) -> Tensor:
    """Attention of q [B, H, S, E] on k, v [B, K, S, E], K key/value heads, H a multiple of it where ``grouped``."""
    if mask is None:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)
    if isinstance(mask, Tensor):
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=grouped)
    mixed: Tensor = _compiled_flex_attention()(q, k, v, block_mask=mask, enable_gqa=grouped)
    return mixed


@cache
def _has_flex(device: torch.device) -> bool:
    """Whether FlexAttention has a kernel there, which Triton makes."""
    if device.type != "cuda" or find_spec("triton") is None:
        return False
    return torch.cuda.get_device_capability(device) >= _FLEX_CAPABILITY


@cache
def _compiled_flex_attention() -> Any:
    # Uncompiled it would hold all scores.
    return torch.compile(flex_attention, dynamic=False)
