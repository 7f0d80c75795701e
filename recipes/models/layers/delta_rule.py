"""Linear attention: the gated delta rule and the short causal convolution before it, within documents of a sequence.

Gated delta rule (https://arxiv.org/abs/2412.06464), in chunks (https://arxiv.org/abs/2406.06484). Instead of keys and
values of all earlier tokens, a head has a state, a matrix that maps a key to a value. A token decays the state, and
then corrects the value that the state has for its key. Both functions start from zero in each document.

Shapes: B batch, S sequence, H heads, E width of a key, V width of a value, C tokens of a chunk, N chunks.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

_CHUNK = 64
"""Number of tokens that are computed at once; longer chunks need fewer steps, but more products between tokens."""


def short_convolution(x: Tensor, weight: Tensor, positions: Tensor | None, past: Tensor | None = None) -> Tensor:
    """Return the causal convolution of each channel of ``x`` [B, S, channels] with ``weight`` [channels, 1, K], in
    fp32.

    Args:
        positions: [B, S], restart from 0 with each document, whose first tokens see zeros before it; None: ``x`` is one
            document.
        past: the last K - 1 inputs before ``x``, [B, K - 1, channels]; None: zeros.
    """
    taps, length = weight.shape[2], x.shape[1]
    before = F.pad(x, (0, 0, taps - 1, 0)) if past is None else torch.cat((past, x), dim=1)
    factors = weight.float().squeeze(1).unbind(1)
    mixed = x * factors[-1]
    for distance in range(1, taps):
        start = taps - 1 - distance
        earlier = before[:, start : start + length] * factors[start]
        mixed = mixed + (earlier if positions is None else earlier * (positions >= distance).unsqueeze(-1))
    return mixed


def gated_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, documents: Tensor | None, state: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return the output of each query, [B, S, H, V] fp32, and the state of each head after the last token,
    [B, H, E, V] fp32.

    Args:
        q: queries, [B, S, H, E]; they and the keys are normalized here.
        k: keys, like ``q``.
        v: values, [B, S, H, V].
        decay: logarithm of the decay of the state before each token, [B, S, H], at most 0.
        beta: strength of each correction, [B, S, H], from 0 to 1.
        documents: [B, S], a number for each document; None: the sequence is one document.
        state: state before the first token, [B, H, E, V]; None: zero.
    """
    with torch.autocast(q.device.type, enabled=False):
        return _in_chunks(q, k, v, decay, beta, documents, state)


def _in_chunks(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, documents: Tensor | None, state: Tensor | None
) -> tuple[Tensor, Tensor]:
    length = q.shape[1]
    chunk = min(_CHUNK, length)
    missing = -length % chunk

    def chunked(x: Tensor) -> Tensor:  # [B, S, H, ...] -> [B, H, N, C, ...]
        padded = F.pad(x.float(), (0, 0) * (x.ndim - 2) + (0, missing))
        return padded.transpose(1, 2).unflatten(2, (-1, chunk))

    q = chunked(_normalized(q) * q.shape[-1] ** -0.5)
    k = chunked(_normalized(k))
    v, beta = chunked(v), chunked(beta)
    before = torch.ones(chunk, chunk, dtype=torch.bool, device=q.device).tril()  # [C, C], or [B, 1, N, C, C]
    if documents is not None:
        last = torch.arange(length + missing, device=q.device).clamp(max=length - 1)
        number = documents[:, last].unflatten(1, (-1, chunk)).unsqueeze(1)  # [B, 1, N, C]
        before = before & (number.unsqueeze(-1) == number.unsqueeze(-2))
    # Logarithm of the decay since the beginning of the chunk or the document. It is not a difference of sums, so that
    # rounding errors do not depend on other documents.
    total = torch.where(before, chunked(decay).unsqueeze(-2), 0).sum(-1)
    between = (total.unsqueeze(-1) - total.unsqueeze(-2)).masked_fill(~before, float("-inf")).exp()
    since_start = total.exp()
    until_end = (total[..., -1:] - total).masked_fill(~before[..., -1, :], float("-inf")).exp()
    if documents is not None:
        previous = torch.cat(
            (number[:, :, :1, -1:], number[:, :, :-1, -1:]), dim=2
        )  # the document that the state belongs to
        since_start = since_start * (number == previous)
    since_start, until_end = since_start.unsqueeze(-1), until_end.unsqueeze(-1)
    of_chunk = since_start[..., -1:, :]

    # Corrections depend on the earlier ones of the chunk: a triangular system for all tokens of the chunk.
    system = (k * beta.unsqueeze(-1)) @ k.transpose(-1, -2) * between
    right = torch.cat((v, k * since_start), dim=-1) * beta.unsqueeze(-1)
    solved = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
    values, reads = solved.split((v.shape[-1], k.shape[-1]), dim=-1)
    inner = q @ k.transpose(-1, -2) * between
    q, k = q * since_start, (k * until_end).transpose(-1, -2)
    if state is None:
        state = v.new_zeros(*v.shape[:2], k.shape[-2], v.shape[-1])
    results = []
    for number_of_chunk in range(q.shape[2]):
        corrections = values[:, :, number_of_chunk] - reads[:, :, number_of_chunk] @ state
        results.append(q[:, :, number_of_chunk] @ state + inner[:, :, number_of_chunk] @ corrections)
        state = state * of_chunk[:, :, number_of_chunk] + k[:, :, number_of_chunk] @ corrections
    return torch.cat(results, dim=2)[:, :, :length].transpose(1, 2), state


def _normalized(x: Tensor) -> Tensor:
    x = x.float()
    return x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt()
