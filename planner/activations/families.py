"""Formulas of activations by model family. The trace covers families without one."""

from collections.abc import Sequence
from functools import partial

import torch

from serried.planner.activations.terms import ALL_OF_IT, BlockBytes, EndBytes, Formula, Share, bytes_at
from serried.recipes.models.families.gpt2_config import GPT2Section
from serried.recipes.models.families.llama_config import LlamaSection
from serried.recipes.models.families.moe_config import MoESection

_CHUNK_LOGITS, _MINIMUM_CHUNK_TOKENS = 2**24, 1024
"""Equal to the constants of ``recipes.models.layers.lm_head``, which the planner does not import."""


def _chunk_tokens(rows: int) -> int:
    """Return the number of tokens whose logits exist at the same time on a rank with ``rows`` of the vocabulary."""
    return max(_MINIMUM_CHUNK_TOKENS, _CHUNK_LOGITS // rows)


def _llama(
    config: LlamaSection, vocab_size: int, sequences: int, sequence_length: int, dtype: torch.dtype, autocast: bool,
    share: Share = ALL_OF_IT, *, stream_norms: int = 2, fuses_norms_of_heads: bool = True,
    normalizes_heads: bool | None = None, more: Sequence[float] = (0, 0, 0, 0, 0, 0),
) -> int:  # fmt: skip
    """Return the bytes of a family whose blocks are Llama's: see ``Formula``.

    Attention keeps no scores. Document masks need more on a CPU, and almost nothing on a GPU.

    Args:
        stream_norms: norms of the stream in a block.
        fuses_norms_of_heads: whether the norms of queries and keys are ``F.rms_norm``.
        normalizes_heads: whether there are such norms; None: as ``config`` says.
        more: additional bytes of a block, as ``BlockBytes``.
    """
    normalizes_heads = config.normalizes_heads if normalizes_heads is None else normalizes_heads
    tokens, width = sequences * sequence_length // share.context, dtype.itemsize
    queries, keys = config.heads * config.attention_head_dim, config.kv_heads * config.attention_head_dim
    stream = width * config.dim / share.sequence
    # Of a norm: its input in fp32, and for the gradient of its weight the normalised one.
    of_parts = 8 if share.trains_weights else 4
    of_norm = 4 if share.fuses_norms else of_parts
    norm = of_norm * config.dim + 4  # and 1 / root mean square
    into = width * config.dim  # its output, which the matrices read: of all tokens
    gathers_keys = share.context > share.keys
    # q, the mix, the scores' log-sum, k, v
    attention = width * 2 * (queries + keys * share.context / share.keys) + 4 * config.heads
    if normalizes_heads:
        attention += (of_norm if fuses_norms_of_heads else of_parts) * (queries + keys)
    feed_forward = 4 * width * config.hidden_dim  # gate, its SiLU, up, their product
    layer = stream_norms * norm / share.sequence + 2 * into + (attention + feed_forward) / share.tensor
    layer += 7 * width * share.adapters  # what passes through adapters of all seven matrices
    # Queries, values, gate and what leaves the feed-forward; the mix, the scores' log-sum; what other ranks sent.
    selected = (width * (2 * queries + keys + config.hidden_dim) + 4 * config.heads) / share.tensor + into
    selected += (2 * into + 2 * stream) * (share.tensor > 1)
    selected += 2 * width * keys * share.context / share.tensor * gathers_keys
    product = width * config.hidden_dim / share.tensor
    gradients = 2 * product  # of both factors
    if share.tensor > 1:  # or of what all ranks have: what the block adds; or what the factors read, twice and summed
        gradients = max(gradients, product + into, 3 * into - 2 * product)
    outputs = width * (queries + 2 * keys + 2 * config.hidden_dim) / share.tensor
    outputs += 4 * stream + 8 * config.dim / share.sequence  # of both norms in fp32 too
    # The last product, of all tokens, and what a rank gets of it; the stream, its norm, and what enters the backward.
    computed = (into + 5 * stream) * (share.tensor > 1)
    common = (layer, stream, selected, gradients, outputs, computed)
    block = BlockBytes(*(tokens * each + extra for each, extra in zip(common, more, strict=True)))
    rope = 8 * sequence_length * config.attention_head_dim + 32 * tokens  # and this batch and the next
    if gathers_keys:
        rope += rope // share.context  # its part
    matrices = config.dim * (2 * queries + 2 * keys + 3 * config.hidden_dim)
    copies = width * config.layers * matrices if autocast else 0
    end = _end_bytes(config.dim, vocab_size, tokens, dtype, share, autocast=autocast, of_norm=of_norm)
    return rope + bytes_at(share, config.layers, block, end, copies=copies)


def _end_bytes(
    dim: int, vocab_size: int, tokens: int, dtype: torch.dtype, share: Share, *, autocast: bool, of_norm: int = 8
) -> EndBytes:
    """Return the bytes of the last norm and the head, for ``tokens`` of a context rank.

    ``of_norm``: bytes that the norm keeps of each number that it reads.
    """
    width, rows = dtype.itemsize, -(-vocab_size // share.tensor)
    of_weight = 4 * rows * dim if share.trains_weights else 0
    stream = width * dim * tokens / share.sequence
    # The inputs of the final norm, and both gradients of the head's forward.
    ends = tokens * ((of_norm * dim + 4) / share.sequence + 8) + stream + of_weight
    has_copies = autocast or dtype == torch.float16
    copy = width * rows * dim if width < 4 else 0  # of the weight in the forward, of its gradient in both
    chunk = min(tokens, _chunk_tokens(rows))
    # Logits in fp32, with a copy for the log of their sum; or with their gradient in the low type, and what it gives.
    logits = 8 * rows * chunk
    if dtype == torch.float16:  # whose products that give a weight's gradient are in fp32
        logits = max(logits, (8 + width) * rows * chunk + 4 * dim * chunk)
    elif width < 4:
        logits = max(logits, (4 + width) * rows * chunk + max(copy * share.trains_weights, width * dim * chunk))
    inputs = 2 * stream + width * dim * chunk * (share.tensor > 1)  # of the norm and of the head
    inputs += 32 * chunk  # targets, and what is computed of each
    return EndBytes(
        ends,
        logits + inputs + copy * has_copies,
        of_weight + stream + copy * (share.trains_weights and not has_copies),  # both, times that of the loss
    )


def _gpt2(
    model: GPT2Section, vocab_size: int, sequences: int, sequence_length: int, dtype: torch.dtype, autocast: bool,
    share: Share = ALL_OF_IT,
) -> int:  # fmt: skip
    """Return the bytes of GPT-2: see ``Formula``."""
    width = dtype.itemsize
    tokens = sequences * sequence_length // share.context
    into = width * model.dim
    norm = 2 * ((4 * model.dim + 8) / share.sequence + into)  # keeps its input in fp32
    divided = width * (4 * model.dim + 2 * model.hidden_dim) + 4 * model.heads
    # Queries, values, the feed-forward's first product; the mix, the scores' log-sum; what other ranks sent.
    selected = (width * (3 * model.dim + model.hidden_dim) + 4 * model.heads) / share.tensor
    selected += 2 * into * (1 + 1 / share.sequence) * (share.tensor > 1)
    selected += 2 * into * share.context / share.tensor * (share.context > share.keys)
    # Of what the activation makes; what it reads takes the place of that. With it what all ranks have.
    gradients = width * model.hidden_dim / share.tensor + into * (share.tensor > 1)
    adapted = 6 * width * share.adapters
    computed = into * (1 + 5 / share.sequence) * (share.tensor > 1)  # as there
    outputs = width * (3 * model.dim + model.hidden_dim) / share.tensor
    outputs += (4 * into + 8 * model.dim) / share.sequence  # of both norms in fp32 too
    each = (norm + adapted + divided / share.tensor, into / share.sequence, selected, gradients, outputs, computed)
    matrices = model.layers * (4 * model.dim + 2 * model.hidden_dim) * model.dim
    # Of weights; autocast keeps those of transposed ones no longer than the block.
    copies = width * matrices / share.tensor if autocast else 0
    end = _end_bytes(model.dim, vocab_size, tokens, dtype, share, autocast=autocast)
    block = BlockBytes(*(tokens * number for number in each))
    block = block._replace(all=block.all + copies / model.layers)
    return bytes_at(share, model.layers, block, end)


def _moe(
    model: MoESection, vocab_size: int, sequences: int, sequence_length: int, dtype: torch.dtype, autocast: bool,
    share: Share = ALL_OF_IT,
) -> int:  # fmt: skip
    """Return the bytes of a family with mixtures of experts: see ``Formula``."""
    width = dtype.itemsize
    mixtures, rows = model.layers - model.dense_layers, model.experts_per_token
    shared = model.shared_experts * model.expert_hidden_dim
    mean = (model.dense_layers * model.hidden_dim + mixtures * shared) // model.layers
    # What an expert reads, gate, its SiLU, up, their product and the result; where the row goes, and comes from.
    row = width * (2 * model.dim + 4 * model.expert_hidden_dim) + 32
    router = 4 * model.dim + 12 * model.experts  # its input and its scores
    tokens = sequences * sequence_length / share.context / share.sequence * mixtures / model.layers
    product = width * model.expert_hidden_dim
    selected = rows * product + 16 * model.experts
    outputs = rows * (2 * product + width * model.dim)
    of_experts = [tokens * size for size in (rows * row + router, 0, selected, 2 * rows * product, outputs, 0)]
    if autocast:  # which does not keep them beyond the block
        weights = 3 * width * model.experts * model.dim * model.expert_hidden_dim
        of_experts[0] += weights * mixtures / model.layers
    return _llama(
        model.model_copy(update={"hidden_dim": mean}), vocab_size, sequences, sequence_length, dtype, autocast, share,
        normalizes_heads=model.qk_norm, more=of_experts,
    )  # fmt: skip


FORMULAS: dict[str, Formula] = {
    **dict.fromkeys(("llama", "mistral", "qwen2", "qwen3", "phi3"), _llama),
    "gemma2": partial(_llama, stream_norms=4),
    "gemma3_text": partial(_llama, stream_norms=4, normalizes_heads=True),
    "olmo2": partial(_llama, fuses_norms_of_heads=False),
    "gpt2": _gpt2,
    **dict.fromkeys(("glm4_moe", "qwen3_moe", "mixtral"), _moe),
}
"""Formulas by ``model.family``."""
