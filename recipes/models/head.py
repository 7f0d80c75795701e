"""The output projection and its loss, without ever holding the logits of a whole batch."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

IGNORE = -100
"""Target of a position that is not predicted."""

_CHUNK_LOGITS = 2**24
_MINIMUM_CHUNK_TOKENS = 1024


class LanguageModelHead(nn.Module):
    """hidden [B, S, D] -> logits [B, S, V], or the loss summed over targets.

    With ``tied`` it holds no weight and is given the embedding's. It is a module of its own, and its loss happens
    inside its forward, because under sharding a weight is whole only while its module runs.
    """

    def __init__(self, dim: int, vocab_size: int, tied: bool) -> None:
        super().__init__()
        self.weight = None if tied else nn.Parameter(torch.empty(vocab_size, dim))

    def forward(self, hidden: Tensor, targets: Tensor | None = None, shared_weight: Tensor | None = None) -> Tensor:
        weight = shared_weight if self.weight is None else self.weight
        assert weight is not None
        if targets is None:
            return F.linear(hidden, weight.to(hidden.dtype))
        return linear_cross_entropy_sum(hidden.flatten(0, 1), weight, targets.flatten())


def linear_cross_entropy_sum(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """Sum of cross entropy of ``hidden @ weight.T`` over targets that are not -100, fp32 scalar.

    hidden [T, D], weight [V, D], targets [T] int64. Works through chunks of tokens: logits of one chunk exist at a
    time, and gradients are formed in the forward pass, so nothing is computed twice. Products run in hidden's dtype,
    softmax and sums in fp32. The idea is that of Liger-Kernel (https://arxiv.org/abs/2410.10989).
    """
    if torch.is_grad_enabled():
        loss: Tensor = _LinearCrossEntropySum.apply(hidden, weight, targets)
        return loss
    weight = weight.to(hidden.dtype)
    chunks = zip(*(x.split(chunk_tokens(weight.shape[0])) for x in (hidden, targets)), strict=True)
    return torch.stack([F.cross_entropy((h @ weight.T).float(), t, reduction="sum") for h, t in chunks]).sum()


def chunk_tokens(vocab_size: int) -> int:
    """Tokens whose logits exist at a time."""
    return max(_MINIMUM_CHUNK_TOKENS, _CHUNK_LOGITS // vocab_size)


class _LinearCrossEntropySum(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:  # type: ignore[no-untyped-def]
        compute_weight = weight.to(hidden.dtype)
        grad_hidden = torch.empty_like(hidden)
        grad_weight = torch.zeros(weight.shape, dtype=torch.float32, device=weight.device)
        loss = torch.zeros((), dtype=torch.float32, device=hidden.device)
        step = chunk_tokens(weight.shape[0])
        for start in range(0, hidden.shape[0], step):
            rows = slice(start, start + step)
            chunk = hidden[rows]
            valid = targets[rows] != IGNORE
            index = targets[rows].where(valid, 0).unsqueeze(1)  # [T, 1]
            logits = (chunk @ compute_weight.T).float()  # [T, V]
            normalizer = logits.logsumexp(dim=1, keepdim=True)
            loss += (normalizer - logits.gather(1, index)).squeeze(1).where(valid, 0).sum()
            grad_logits = logits.sub_(normalizer).exp_()  # softmax, in place
            grad_logits.scatter_add_(1, index, torch.full_like(index, -1, dtype=torch.float32))
            grad_logits.mul_(valid.unsqueeze(1))
            grad_logits = grad_logits.to(hidden.dtype)
            torch.mm(grad_logits, compute_weight, out=grad_hidden[rows])
            if hidden.dtype == torch.float32:
                grad_weight.addmm_(grad_logits.T, chunk)
            elif hidden.dtype == torch.float16:
                # A sum over tokens leaves fp16's range, before any loss scale is applied.
                with torch.autocast(hidden.device.type, enabled=False):
                    grad_weight.addmm_(grad_logits.float().T, chunk.float())
            else:
                grad_weight += grad_logits.T @ chunk
        ctx.save_for_backward(grad_hidden, grad_weight)
        ctx.weight_dtype = weight.dtype
        return loss

    @staticmethod
    def backward(ctx, grad_loss: Tensor) -> tuple[Tensor, Tensor, None]:  # type: ignore[no-untyped-def]
        grad_hidden, grad_weight = ctx.saved_tensors
        return grad_hidden * grad_loss, (grad_weight * grad_loss).to(ctx.weight_dtype), None
