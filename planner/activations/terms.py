"""Terms of the formulas: the share of the work that a rank does, and the bytes of blocks and of the end of a model."""

from typing import Any, NamedTuple, Protocol

import torch

MOMENTS = ("forward", "backward", "block", "start")
"""Moments of a micro-batch: the end of its forward, the beginning of its backward, the backward of a block, and the
backward of the modules before the blocks."""


class Share(NamedTuple):
    """Share of the work on a micro-batch that one rank does."""

    context: int = 1
    """Ranks that each sequence is divided over."""
    keys: int = 1
    """Ranks that the keys and values of a sequence are divided over: 1 if each gathers all, else as ``context``."""
    tensor: int = 1
    """Ranks that each matrix of a block is divided over."""
    sequence: int = 1
    """Ranks that activations between these matrices are divided over."""
    blocks: float = 1.0
    """Share of the blocks, times the micro-batches that are between their forward and their backward at a time."""
    waits: float = 0.0
    """Like ``blocks``, for micro-batches whose weight gradients are deferred (zero-bubble schedules): the gradients of
    the outputs are held until then."""
    ends: int = 1
    """Micro-batches between the forward and the backward of the end of the model, where the loss is."""
    trains_weights: bool = True
    """Whether the model's own weights are trained; with adapters they are not."""
    adapters: int = 0
    """The rank of adapters, if they are trained instead."""
    moment: str = ""
    """Moment of the step, one of ``MOMENTS``; empty: the moment of peak memory."""
    borders: int = 0
    """Buffers for the messages between pipeline stages, each of a micro-batch."""
    checkpoint: str = "none"
    """Mode of activation checkpointing, see ``parallel.activation_checkpoint``."""
    every: int = 1
    """Every n-th block is checkpointed."""
    firsts: float = 1.0
    """Share of the blocks, the first ones of each stage, that ``checkpoint`` is for."""
    rest: str = "none"
    """Mode of the other blocks."""
    fuses_norms: bool = False
    """Whether ``F.rms_norm`` is one operation, as on GPUs, which keeps its input and no normalized copy."""


ALL_OF_IT = Share()
"""The share of a single process."""


class BlockBytes(NamedTuple):
    """Bytes that a block holds between forward and backward of a micro-batch."""

    all: float
    stream: float
    """Input of the block."""
    selected: float
    """Tensors that ``trainer.activation_checkpoint=selective`` keeps beside the input."""
    gradients: float
    """Gradients of its activations that exist at once in its backward, less the tensors freed by then."""
    outputs: float = 0.0
    """Gradients of the outputs of its weights."""
    computed: float = 0.0
    """Held at the end of its forward, and not kept."""


class EndBytes(NamedTuple):
    """Bytes that the end of a model holds of a micro-batch."""

    all: float
    """Bytes held during both forward and backward."""
    forward: float
    """Held beside that while the forward runs: the logits of a chunk."""
    backward: float
    """Held beside that while the backward begins."""


def bytes_at(share: Share, layers: int, block: BlockBytes, end: EndBytes, *, copies: float = 0.0) -> int:
    """Return the bytes that ``layers`` blocks and the ``end`` of a model hold at ``share.moment``, beside gradients.

    ``copies``: bytes of the copies of all blocks' weights under autocast.
    """
    if not share.moment:
        return max(bytes_at(share._replace(moment=moment), layers, block, end, copies=copies) for moment in MOMENTS)
    kept = {"none": block.all, "full": block.stream, "selective": block.stream + block.selected, "offload": 0.0}
    checkpointed = 0 if share.checkpoint == "none" else -(-layers // share.every) * share.firsts
    of_blocks = checkpointed * kept[share.checkpoint]
    of_blocks += (layers - checkpointed) * (kept[share.rest] + (share.rest == "none") * copies / layers)
    of_blocks = share.blocks * of_blocks + share.borders * block.stream + share.waits * layers * block.outputs
    if share.moment == "forward":
        cached = share.blocks * checkpointed * copies / layers  # which autocast keeps to the end of a forward
        return int(of_blocks + cached + (share.ends * end.all + end.forward if share.ends else block.gradients))
    if share.moment == "backward":
        return int(of_blocks + share.ends * end.all + end.backward * bool(share.ends))
    if share.moment == "start":
        return int(of_blocks + 2 * block.stream)
    if not checkpointed:
        return int(of_blocks + block.stream + block.gradients)  # with what enters its backward
    working = block.stream + max(block.gradients, block.computed)
    # One block is whole at a time, with what enters it, and autocast copies its weights alone.
    last = share.checkpoint if share.rest == "none" else share.rest
    again = block.all - max(0, kept[last] - block.stream) + copies / layers
    is_whole = last == share.checkpoint and (share.firsts < 1 or (layers - 1) % share.every)
    freed = block.all if is_whole else 0  # of the last block, where it comes before one of these
    return int(of_blocks + max(0, again - freed) + working)


class Formula(Protocol):
    """Activations of a model family."""

    def __call__(
        self,
        section: Any,
        /,
        vocab_size: int,
        sequences: int,
        sequence_length: int,
        dtype: torch.dtype,
        autocast: bool,
        share: Share = ALL_OF_IT,
    ) -> int:
        """Return the bytes that a forward and its backward need at ``share.moment``, beside parameters and their
        gradients.

        Args:
            section: ``model`` of the config.
            vocab_size: rows of the embedding.
            dtype: of matrix products.
            autocast: whether copies of the weights in ``dtype`` are kept too.
        """
