"""Causal attention, optionally within documents of a sequence and within sliding windows.

Without documents and windows, it is ``scaled_dot_product_attention``. With them, a CPU uses ``cpu_attention``. A GPU
uses FlexAttention (https://arxiv.org/abs/2412.05496), which skips masked blocks of scores and has no backward on a
CPU (torch 2.13), or ``varlen_attn``, FlashAttention on concatenated documents. A mask of queries x keys is the last
resort.
"""

import warnings
from collections.abc import Callable, Iterator
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from serried.configs.requirements import missing_compiler
from serried.recipes.models.layers.cpu_attention import attend_by_rows, attend_by_rows_with_logsumexp, suits

if TYPE_CHECKING:  # with torch 2.15, this import takes most of the planning time, and only GPU runs need it
    from torch.nn.attention.flex_attention import BlockMask


class Rows(NamedTuple):
    """Mask for ``attend_by_rows``."""

    first: Tensor
    """[B or 1, S], the first key that each query attends to"""


class Documents(NamedTuple):
    """Mask for ``varlen_attn``."""

    begins: Tensor | None
    """int32, starts of documents in the concatenated sequences, and the end of the last one; None: each sequence is
    a document"""
    longest: int
    """Upper bound on the length of a document."""
    window: int | None


Mask: TypeAlias = "Tensor | BlockMask | Rows | Documents | None"
"""Bool tensor, broadcastable to [B, 1, Q, S], True where a query attends to a key; or an equivalent for another
kernel. None: plain causal attention."""

Places = tuple[Tensor, Tensor]

CAPABILITY = (8, 0)
"""Minimum compute capability for the kernels of FlexAttention and FlashAttention: Ampere."""

_BLOCK = 128
"""Number of queries, and of keys, in a block of FlexAttention."""

_HIDDEN_SCORE = -1e30
"""Score of masked keys. It is finite, so that a query without any key does not give NaN. Its exp() is 0."""


def numbered_documents(positions: Tensor) -> Tensor:
    """Number the documents of each sequence in ascending order. ``positions`` [B, S] restart from 0 with each
    document."""
    return (positions == 0).cumsum(1)


def causal_mask(
    positions: Tensor | None, length: int, device: torch.device, window: int | None = None, kernel: str = "auto",
    places: Places | None = None,
) -> Mask:  # fmt: skip
    """Return a mask for causal attention within documents. Create it once per forward.

    Args:
        positions: [B, S], restart from 0 with each document; None: each sequence is a document.
        window: number of most recent keys that a query attends to, including its own; None: all.
        kernel: value of ``model.attention``.
        places: positions [Q] of the queries and [K] of the keys in the sequence, if it is sharded; None: the full
            sequence, in order.
    """
    if places is not None:
        return (placed_blocks if has_flex(device) else _placed_mask)(positions, places, window)
    if positions is None and window is None:
        return None
    if kernel == "varlen" and device.type == "cuda":
        return documents(positions, length, window)
    every = torch.arange(length, device=device)
    first = torch.zeros_like(every).unsqueeze(0) if positions is None else every - positions
    if window is not None:
        first = first.maximum(every - window + 1)
    if kernel != "sdpa" and not torch.compiler.is_exporting():
        if device.type == "cpu":
            return Rows(first)
        if has_flex(device):
            return blocks_from(first)
    return ((every >= first.unsqueeze(-1)) & (every <= every.unsqueeze(-1))).unsqueeze(1)


def blocks_from(first: Tensor, places: Places | None = None) -> "BlockMask":
    """Return FlexAttention's mask for queries that attend to the keys from ``first`` [B or 1, Q] up to their own
    position.

    ``places``: positions [Q] of the queries and [K] of the keys in the sequence; None: the full sequence, in order.
    torch's ``create_block_mask`` would first materialize a mask of Q x K.
    """
    from torch.nn.attention.flex_attention import BlockMask

    queries, keys = places or (torch.arange(first.shape[1], device=first.device),) * 2
    (first_query, last_query), (first_key, last_key) = _bounds(queries), _bounds(keys)
    lowest, highest = (bound.unsqueeze(-1) for bound in _bounds(first))  # [B, blocks of queries, 1]
    is_whole = torch.arange(1, len(last_key) + 1, device=keys.device) * _BLOCK <= len(keys)
    every = (last_key <= first_query.unsqueeze(1)) & (first_key >= highest) & is_whole
    some = (first_key <= last_query.unsqueeze(1)) & (last_key >= lowest) & ~every
    is_one = len(first) == 1

    def attends(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        del head
        here, there = (query, key) if places is None else (queries[query], keys[key])
        return (there <= here) & (there >= (first[0, query] if is_one else first[batch, query]))

    def listed(chosen: Tensor) -> tuple[Tensor, Tensor]:
        """Return the number of chosen key blocks for each query block, and the key blocks with the chosen ones
        first; each [B, 1, ...]."""
        order = chosen.int().argsort(dim=-1, descending=True, stable=True)
        return chosen.sum(-1, dtype=torch.int32).unsqueeze(1), order.int().unsqueeze(1)

    return BlockMask.from_kv_blocks(
        *listed(some), *listed(every), BLOCK_SIZE=_BLOCK, mask_mod=attends, seq_lengths=(len(queries), len(keys))
    )


def _bounds(numbers: Tensor) -> tuple[Tensor, Tensor]:
    """Return the smallest and the largest number of each block of ``numbers`` [..., N]."""
    blocks = -(-numbers.shape[-1] // _BLOCK)
    index = torch.arange(blocks * _BLOCK, device=numbers.device).clamp(max=numbers.shape[-1] - 1)
    least, greatest = numbers[..., index].unflatten(-1, (blocks, _BLOCK)).aminmax(dim=-1)
    return least, greatest


def placed_blocks(positions: Tensor | None, places: Places, window: int | None = None) -> "BlockMask":
    """Like ``causal_mask``, for queries and keys at ``places``."""
    queries, _ = places
    first = torch.zeros_like(queries).unsqueeze(0) if positions is None else queries - positions[:, queries]
    if window is not None:
        first = first.maximum(queries - window + 1)
    return blocks_from(first, places)


def _placed_mask(positions: Tensor | None, places: Places, window: int | None) -> Tensor:
    (queries, keys), documents = places, None if positions is None else numbered_documents(positions)
    seen = queries.unsqueeze(1) >= keys
    if window is not None:
        seen &= queries.unsqueeze(1) - keys < window
    if documents is None:
        return seen
    same = documents[:, queries].unsqueeze(2) == documents[:, keys].unsqueeze(1)  # [B, Q, K]
    return same.logical_and_(seen).unsqueeze(1)


def documents(positions: Tensor | None, length: int, window: int | None) -> Documents:
    """Return a causal mask for ``varlen_attn``. With ``positions``, the host waits for the device, to find the number
    of documents."""
    if positions is None:
        return Documents(None, length, window)
    begins = F.pad((positions.flatten() == 0).nonzero().flatten(), (0, 1), value=positions.numel()).int()
    # Mark the size as dynamic, so that a compiled block is not recompiled for each number of documents. The function is
    # private but documented: https://docs.pytorch.org/docs/stable/torch.compiler_dynamic_shapes.html
    torch._dynamo.maybe_mark_dynamic(begins, 0)
    return Documents(begins, length, window)


def attend(
    q: Tensor, k: Tensor, v: Tensor, mask: Mask, *, scale: float | None = None, soft_cap: float | None = None,
    kernel: str = "auto",
) -> Tensor:  # fmt: skip
    """Return the attention of q [B, H, Q, E] on k, v [B, K, S, E], with K key/value heads; H is a multiple of K.

    Args:
        scale: factor of the scores; 1 / sqrt(E) if None.
        soft_cap: a score x becomes soft_cap * tanh(x / soft_cap). If the mask is a tensor or None, all scores are
            then materialized, in fp32.
        kernel: value of ``model.attention``.
    """
    if not isinstance(mask, Tensor | Rows | Documents | None):
        mixed: Tensor = _flex_attention(q, k, v, mask, scale, soft_cap)
        return mixed
    if isinstance(mask, Documents):
        return attend_in_documents(q, k, v, mask, scale)
    is_by_rows = kernel != "sdpa" and mask is None and soft_cap is None and suits(q, k, v)
    if isinstance(mask, Rows) or (is_by_rows and not torch.compiler.is_exporting()):
        q, k, v = _under_autocast(q, k, v)
        first = mask.first if isinstance(mask, Rows) else None
        by_rows: Tensor = attend_by_rows(q, k, v, q.shape[-1] ** -0.5 if scale is None else scale, first, soft_cap)
        return by_rows
    assert mask is None or isinstance(mask, Tensor)
    if soft_cap is not None:
        return _scored(q, k, v, mask, scale, soft_cap)[0]
    grouped = q.shape[1] != k.shape[1]
    if grouped and q.device.type == "cuda" and (mask is not None or _product_type(q) == torch.float32):
        # For these inputs, the only kernel that does not materialize the scores needs as many key heads as query heads
        # (torch 2.11, 2.13). Without it, SDPA would materialize all scores.
        k, v = (_repeated(tensor, q.shape[1]) for tensor in (k, v))
        grouped = False
    return F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=grouped
    )  # fmt: skip


def _under_autocast(*tensors: Tensor) -> Iterator[Tensor]:
    """Convert ``tensors`` on the CPU to the dtype of autocast, if it is enabled, as SDPA does."""
    is_enabled = torch.is_autocast_enabled("cpu")
    return (tensor.to(torch.get_autocast_dtype("cpu")) if is_enabled else tensor for tensor in tensors)


def _product_type(x: Tensor) -> torch.dtype:
    """Return the dtype in which SDPA computes."""
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype


def _repeated(x: Tensor, heads: int) -> Tensor:
    """Repeat each key/value head of ``x`` [B, K, S, E] for the query heads that share it. Returns [B, heads, S, E]."""
    return x.unsqueeze(2).expand(-1, -1, heads // x.shape[1], -1, -1).flatten(1, 2)


def _varlen_attn(*arguments: Any, **options: Any) -> Any:
    from torch.nn.attention.varlen import varlen_attn  # imports torch._dynamo

    return varlen_attn(*arguments, **options)


def attend_in_documents(
    q: Tensor, k: Tensor, v: Tensor, mask: Documents, scale: float | None, kernel: Callable[..., Any] = _varlen_attn
) -> Tensor:
    """Like ``attend``, computed by ``kernel``: ``varlen_attn``, or a function with the same signature."""
    sequences, _, length, _ = q.shape
    begins = mask.begins
    if begins is None:
        begins = torch.arange(0, sequences * length + 1, length, dtype=torch.int32, device=q.device)
    grouped = {"enable_gqa": True} if q.shape[1] != k.shape[1] else {}
    window = (-1 if mask.window is None else mask.window - 1, 0)
    rows = [tensor.transpose(1, 2).flatten(0, 1) for tensor in (q, k, v)]  # [B x S, heads, E]
    out = kernel(*rows, begins, begins, mask.longest, mask.longest, scale=scale, window_size=window, **grouped)
    mixed: Tensor = out.unflatten(0, (sequences, length)).transpose(1, 2)
    return mixed


def attend_with_logsumexp(
    q: Tensor, k: Tensor, v: Tensor, mask: Mask, *, scale: float | None = None, soft_cap: float | None = None
) -> tuple[Tensor, Tensor]:
    """Like ``attend`` with a mask, and also return the log-sum-exp of each query's scores, [B, H, Q] fp32.

    The log-sum-exp allows results of the same queries on several sets of keys to be merged. If a query attends to no
    key, its result is arbitrary and its log-sum-exp is at most -1e29. If the mask is a tensor or None, all scores are
    materialized, in fp32.
    """
    if not isinstance(mask, Tensor | Rows | Documents | None):
        from torch.nn.attention.flex_attention import AuxRequest

        out, aux = _flex_attention(q, k, v, mask, scale, soft_cap, return_aux=AuxRequest(lse=True))
        return out, aux.lse.clamp(min=_HIDDEN_SCORE)
    if isinstance(mask, Rows):
        q, k, v = _under_autocast(q, k, v)
        scale = q.shape[-1] ** -0.5 if scale is None else scale
        by_rows: tuple[Tensor, Tensor] = attend_by_rows_with_logsumexp(q, k, v, scale, mask.first, soft_cap)
        return by_rows
    assert not isinstance(mask, Documents)
    return _scored(q, k, v, mask, scale, soft_cap)


def _scored(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float | None, soft_cap: float | None
) -> tuple[Tensor, Tensor]:
    """Compute attention with all scores materialized in fp32. Return it, and the log-sum-exp of the scores."""
    heads, key_heads = q.shape[1], k.shape[1]
    if mask is None:
        mask = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).tril_()
    with torch.autocast(q.device.type, enabled=False):  # fp16 cannot represent the score of masked keys
        grouped = q.float().unflatten(1, (key_heads, heads // key_heads))  # [B, K, H/K, Q, E]
        scores = grouped @ k.float().unsqueeze(2).transpose(-2, -1)  # [B, K, H/K, Q, S]
        scores = scores * (q.shape[-1] ** -0.5 if scale is None else scale)
        if soft_cap is not None:
            scores = soft_cap * torch.tanh(scores / soft_cap)
        scores = scores.masked_fill(~mask.unsqueeze(-3), _HIDDEN_SCORE)
        out = scores.softmax(-1) @ v.float().unsqueeze(2)
    return out.flatten(1, 2).to(v.dtype), scores.logsumexp(-1).flatten(1, 2)


def _flex_attention(
    q: Tensor, k: Tensor, v: Tensor, mask: "BlockMask", scale: float | None, soft_cap: float | None, **options: Any
) -> Any:
    from torch.nn.attention.flex_attention import flex_attention

    is_grouped = q.shape[1] != k.shape[1]
    if q.shape[-2] < _BLOCK:  # torch would choose a kernel that lacks block sizes for some lengths (2.11, 2.13)
        options["kernel_options"] = {"FORCE_USE_FLEX_ATTENTION": True}
    if torch.compiler.is_compiling():  # in a compiled block, torch warns about cached functions
        mod = None if soft_cap is None else _soft_capping(soft_cap)
        return flex_attention(q, k, v, mod, mask, scale, is_grouped, **options)
    mod = None if soft_cap is None else _kept_soft_capping(soft_cap)
    return _compiled_flex_attention()(q, k, v, mod, mask, scale, is_grouped, **options)


def _soft_capping(soft_cap: float) -> Any:
    """Return the ``score_mod`` of FlexAttention that applies the soft cap."""

    def capped(score: Tensor, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        del batch, head, query, key
        return soft_cap * torch.tanh(score / soft_cap)

    return capped


_kept_soft_capping = cache(_soft_capping)


@cache
def has_flex(device: torch.device) -> bool:
    """Return whether FlexAttention can run on ``device``: a supported GPU, and the compiler that Triton needs."""
    if device.type != "cuda" or missing_compiler(device.type):
        return False
    return torch.cuda.get_device_capability(device) >= CAPABILITY


@cache
def _compiled_flex_attention() -> Any:
    from torch.nn.attention.flex_attention import flex_attention

    warnings.filterwarnings("ignore", "TensorFloat32 tensor cores")  # torch recommends TF32 for fp32 products
    # Without compilation, it would materialize all scores.
    return torch.compile(flex_attention, dynamic=False)
