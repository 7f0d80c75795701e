"""Formulas for activation memory by model family. Families without a formula are traced."""

from collections.abc import Sequence
from functools import partial
from operator import mul
from statistics import mean

import torch

from serried.configs.schema.models import ModelSection
from serried.planner.activations.terms import ALL_OF_IT, BlockBytes, EndBytes, Formula, Share, bytes_at
from serried.recipes.models.families.gemma4_config import Gemma4Section
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
    """Return the activation bytes of a family with Llama blocks: see ``Formula``.

    Attention scores are not kept. Document masks need more memory on a CPU, and almost none on a GPU.

    Args:
        stream_norms: number of norms of the residual stream in a block.
        fuses_norms_of_heads: whether the norms of queries and keys are ``F.rms_norm``.
        normalizes_heads: whether queries and keys are normalized; None: as in ``config``.
        more: additional bytes of a block, in the order of ``BlockBytes``.
    """
    normalizes_heads = config.normalizes_heads if normalizes_heads is None else normalizes_heads
    tokens, width = sequences * sequence_length // share.context, dtype.itemsize
    queries, keys = config.heads * config.attention_head_dim, config.kv_heads * config.attention_head_dim
    stream = width * config.dim / share.sequence
    # A norm keeps its input in fp32, and the normalized input for the gradient of its weight.
    of_parts = 8 if share.trains_weights else 4
    of_norm = 4 if share.fuses_norms else of_parts
    norm = of_norm * config.dim + 4  # input, and 1 / RMS in fp32
    into = width * config.dim  # output of a norm for all tokens, the input of the matrices
    gathers_keys = share.context > share.keys
    # q, attention output, logsumexp of the scores, k, v
    attention = width * 2 * (queries + keys * share.context / share.keys) + 4 * config.heads
    if normalizes_heads:
        attention += (of_norm if fuses_norms_of_heads else of_parts) * (queries + keys)
    feed_forward = 4 * width * config.hidden_dim  # gate, SiLU(gate), up, their product
    layer = stream_norms * norm / share.sequence + 2 * into + (attention + feed_forward) / share.tensor
    layer += 7 * width * share.adapters  # intermediate results of the adapters of all seven matrices
    # Queries, values, gate and the feed-forward's output; attention output and logsumexp; tensors from other ranks.
    selected = (width * (2 * queries + keys + config.hidden_dim) + 4 * config.heads) / share.tensor + into
    selected += (2 * into + 2 * stream) * (share.tensor > 1)
    selected += 2 * width * keys * share.context / share.tensor * gathers_keys
    product = width * config.hidden_dim / share.tensor
    gradients = 2 * product  # gradients of SiLU(gate) and up
    if share.tensor > 1:  # or unsharded gradients: of the output, or of the input, once per factor and summed
        gradients = max(gradients, product + into, 3 * into - 2 * product)
    outputs = width * (queries + 2 * keys + 2 * config.hidden_dim) / share.tensor
    outputs += 4 * stream + 8 * config.dim / share.sequence  # gradients of both norms, also in fp32
    # Output of the last matrix product for all tokens, and this rank's part of it; the residual stream, its norm, and
    # the incoming gradient.
    computed = (into + 5 * stream) * (share.tensor > 1)
    common = (layer, stream, selected, gradients, outputs, computed)
    block = BlockBytes(*(tokens * each + extra for each, extra in zip(common, more, strict=True)))
    scaling = config.rope_scaling
    tables = 2 if scaling and scaling.rope_type == "longrope" and sequence_length > scaling.original else 1
    rope = 8 * tables * sequence_length * config.attention_head_dim + 32 * tokens  # RoPE tables, current and next batch
    if gathers_keys:
        rope += rope // share.context  # this rank's part of the tables
    matrices = config.dim * (2 * queries + 2 * keys + 3 * config.hidden_dim)
    copies = width * config.layers * matrices if autocast else 0
    end = _end_bytes(config.dim, vocab_size, tokens, dtype, share, autocast=autocast, of_norm=of_norm)
    return rope + bytes_at(share, config.layers, block, end, copies=copies)


def _end_bytes(
    dim: int, vocab_size: int, tokens: int, dtype: torch.dtype, share: Share, *, autocast: bool, of_norm: int = 8
) -> EndBytes:
    """Return the bytes of the final norm and the head for the ``tokens`` of a context rank.

    ``of_norm``: bytes that the norm keeps per input element.
    """
    width, rows = dtype.itemsize, -(-vocab_size // share.tensor)
    of_weight = 4 * rows * dim if share.trains_weights else 0
    stream = width * dim * tokens / share.sequence
    # The inputs of the final norm, and the gradients of the head's input and weight, computed in its forward.
    ends = tokens * ((of_norm * dim + 4) / share.sequence + 8) + stream + of_weight
    has_copies = autocast or dtype == torch.float16
    copy = width * rows * dim if width < 4 else 0  # low-precision copy of the weight, or of its gradient
    chunk = min(tokens, _chunk_tokens(rows))
    # fp32 logits and a copy for logsumexp; or fp32 logits, their gradient in the low-precision dtype, and the gradient
    # computed from it.
    logits = 8 * rows * chunk
    if dtype == torch.float16:  # weight gradients are computed in fp32
        logits = max(logits, (8 + width) * rows * chunk + 4 * dim * chunk)
    elif width < 4:
        logits = max(logits, (4 + width) * rows * chunk + max(copy * share.trains_weights, width * dim * chunk))
    inputs = 2 * stream + width * dim * chunk * (share.tensor > 1)  # inputs of the final norm and the head
    inputs += 32 * chunk  # targets and per-token results
    return EndBytes(
        ends,
        logits + inputs + copy * has_copies,
        # Both gradients, multiplied by the gradient of the loss.
        of_weight + stream + copy * (share.trains_weights and not has_copies),
    )


def _gpt2(
    model: GPT2Section, vocab_size: int, sequences: int, sequence_length: int, dtype: torch.dtype, autocast: bool,
    share: Share = ALL_OF_IT,
) -> int:  # fmt: skip
    """Return the activation bytes of GPT-2: see ``Formula``."""
    width = dtype.itemsize
    tokens = sequences * sequence_length // share.context
    into = width * model.dim
    norm = 2 * ((4 * model.dim + 8) / share.sequence + into)  # keeps its input in fp32
    divided = width * (4 * model.dim + 2 * model.hidden_dim) + 4 * model.heads
    # Queries, values, the feed-forward's first product; attention output and logsumexp; tensors from other ranks.
    selected = (width * (3 * model.dim + model.hidden_dim) + 4 * model.heads) / share.tensor
    selected += 2 * into * (1 + 1 / share.sequence) * (share.tensor > 1)
    selected += 2 * into * share.context / share.tensor * (share.context > share.keys)
    # Gradient of the activation function's output, later replaced by its input's; and the gradient of the unsharded
    # input or output of the feed-forward.
    gradients = width * model.hidden_dim / share.tensor + into * (share.tensor > 1)
    adapted = 6 * width * share.adapters
    computed = into * (1 + 5 / share.sequence) * (share.tensor > 1)  # as in ``_llama``
    outputs = width * (3 * model.dim + model.hidden_dim) / share.tensor
    outputs += (4 * into + 8 * model.dim) / share.sequence  # gradients of both norms, also in fp32
    each = (norm + adapted + divided / share.tensor, into / share.sequence, selected, gradients, outputs, computed)
    matrices = model.layers * (4 * model.dim + 2 * model.hidden_dim) * model.dim
    # Copies of weights. Autocast keeps copies of transposed weights only within the block.
    copies = width * matrices / share.tensor if autocast else 0
    end = _end_bytes(model.dim, vocab_size, tokens, dtype, share, autocast=autocast)
    block = BlockBytes(*(tokens * number for number in each))
    block = block._replace(all=block.all + copies / model.layers)
    return bytes_at(share, model.layers, block, end)


def _moe(
    model: MoESection, vocab_size: int, sequences: int, sequence_length: int, dtype: torch.dtype, autocast: bool,
    share: Share = ALL_OF_IT,
) -> int:  # fmt: skip
    """Return the activation bytes of a family with mixtures of experts: see ``Formula``."""
    width = dtype.itemsize
    mixtures, rows = model.layers - model.dense_layers, model.experts_per_token
    shared = model.shared_experts * model.expert_hidden_dim
    mean = (model.dense_layers * model.hidden_dim + mixtures * shared) // model.layers
    # Per routed row: expert input, gate, SiLU(gate), up, their product and the output; the indices of its destination
    # and source.
    row = width * (2 * model.dim + 4 * model.expert_hidden_dim) + 32
    router = 4 * model.dim + 12 * model.experts  # input and scores of the router
    tokens = sequences * sequence_length / share.context / share.sequence * mixtures / model.layers
    product = width * model.expert_hidden_dim
    selected = rows * product + 16 * model.experts
    outputs = rows * (2 * product + width * model.dim)
    of_experts = [tokens * size for size in (rows * row + router, 0, selected, 2 * rows * product, outputs, 0)]
    if autocast:  # copies of expert weights are kept only within the block
        weights = 3 * width * model.experts * model.dim * model.expert_hidden_dim
        of_experts[0] += weights * mixtures / model.layers
    return _llama(
        model.model_copy(update={"hidden_dim": mean}), vocab_size, sequences, sequence_length, dtype, autocast, share,
        normalizes_heads=model.qk_norm, more=of_experts,
    )  # fmt: skip


def _gemma4(
    model: Gemma4Section, vocab_size: int, sequences: int, sequence_length: int, dtype: torch.dtype, autocast: bool,
    share: Share = ALL_OF_IT,
) -> int:  # fmt: skip
    """Return the activation bytes of the dense model of Gemma 4: see ``Formula``.

    Blocks with and without a window have different sizes. Blocks that keep nothing else count as the widest one, which
    the backward computes again.
    """
    widths, heads = zip(*(model.sizes(layer) for layer in range(model.layers)), strict=True)
    width, keys = mean(widths), mean(map(mul, widths, heads))
    if share.checkpoint == "full":
        width, keys = max((width, width * count) for width, count in zip(widths, heads, strict=True))
    tokens = sequences * sequence_length // share.context
    # Input of the norm of values in fp32, and 1 / RMS of each head in fp32.
    of_norms = 4 * (keys + model.heads + 2 * mean(heads)) / share.tensor
    scaled = 4 * model.dim / share.sequence * (dtype.itemsize < 4)  # multiplication by ``layer_scalar``, in fp32
    tables = 8 * sequence_length * (sum({*widths}) - width) * (1 + (share.context > 1) / share.context)  # of both RoPEs
    return int(tables) + _llama(
        model.model_copy(update={"head_dim": width, "kv_heads": keys / width}), vocab_size, sequences, sequence_length,
        dtype, autocast, share, stream_norms=4, more=(tokens * of_norms, 0, 0, tokens * scaled, 0, 0),
    )  # fmt: skip


FORMULAS: dict[str, Formula] = {
    **dict.fromkeys(("llama", "mistral", "qwen2", "qwen3", "phi3"), _llama),
    "gemma2": partial(_llama, stream_norms=4),
    "gemma3_text": partial(_llama, stream_norms=4, normalizes_heads=True),
    "olmo2": partial(_llama, fuses_norms_of_heads=False),
    "gemma4_text": _gemma4,
    "gpt2": _gpt2,
    **dict.fromkeys(("glm4_moe", "qwen3_moe", "mixtral"), _moe),
}
"""Formulas by ``model.family``."""


def formula_of(section: ModelSection) -> Formula | None:
    """Return the formula of a model; None if it has none, and is traced."""
    is_covered = True
    if isinstance(section, Gemma4Section):
        is_covered = not (section.experts or section.block_input_dim or section.kv_shared_layers)
    return FORMULAS.get(section.family) if is_covered else None
