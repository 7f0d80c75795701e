"""Terms of the memory formulas: the share of the work on each rank, and the activation bytes of the blocks and of the
final norm, head and loss."""

from typing import Any, NamedTuple, Protocol

import torch

MOMENTS = ("forward", "backward", "block", "start")
"""Moments of a micro-batch: the end of its forward, the beginning of its backward, the backward of a block, and the
backward of the modules before the blocks."""


class Share(NamedTuple):
    """Share of the work on a micro-batch on one rank."""

    context: int = 1
    """Number of ranks that each sequence is sharded over."""
    keys: int = 1
    """Number of ranks that the keys and values of a sequence are sharded over: 1 if each rank gathers all of them, else
    ``context``."""
    tensor: int = 1
    """Number of ranks that each matrix of a block is sharded over."""
    sequence: int = 1
    """Number of ranks that activations between these matrices are sharded over."""
    blocks: float = 1.0
    """This rank's share of the model's blocks, multiplied by the number of micro-batches whose activations it holds for
    the backward."""
    waits: float = 0.0
    """Like ``blocks``, for micro-batches whose weight gradients are deferred (zero-bubble schedules): the gradients of
    the outputs are held until then."""
    ends: int = 1
    """Number of micro-batches between forward and backward in the final norm, head and loss."""
    trains_weights: bool = True
    """Whether the model's own weights are trained; with adapters they are not."""
    adapters: int = 0
    """Rank of the adapters; 0 if there are none."""
    moment: str = ""
    """Moment of the step, one of ``MOMENTS``; empty: the moment of peak memory."""
    borders: int = 0
    """Number of buffers for messages between pipeline stages, each for one micro-batch."""
    checkpoint: str = "none"
    """Mode of activation checkpointing, see ``parallel.activation_checkpoint``."""
    every: int = 1
    """Interval of checkpointed blocks: every n-th block is checkpointed."""
    firsts: float = 1.0
    """Share of the blocks that use ``checkpoint``: the first ones of each stage."""
    rest: str = "none"
    """Mode of the other blocks."""
    fuses_norms: bool = False
    """Whether ``F.rms_norm`` is one operation that keeps its input but no normalized copy, as on GPUs."""


ALL_OF_IT = Share()
"""The share of a single process."""


class BlockBytes(NamedTuple):
    """Bytes that a block holds between forward and backward of a micro-batch."""

    all: float
    stream: float
    """Input of the block."""
    selected: float
    """Tensors that ``trainer.activation_checkpoint=selective`` keeps in addition to the input."""
    gradients: float
    """Activation gradients that exist at the same time in its backward, minus the tensors freed by then."""
    outputs: float = 0.0
    """Gradients of the outputs of its weights."""
    computed: float = 0.0
    """Temporary tensors at the end of its forward."""


class EndBytes(NamedTuple):
    """Bytes that the final norm, head and loss hold for a micro-batch."""

    all: float
    """Bytes held during both forward and backward."""
    forward: float
    """Additional bytes during the forward: the logits of a chunk."""
    backward: float
    """Additional bytes at the start of the backward."""


def bytes_at(share: Share, layers: int, block: BlockBytes, end: EndBytes, *, copies: float = 0.0) -> int:
    """Return the activation bytes of ``layers`` blocks and the ``end`` of a model at ``share.moment``.

    ``copies``: bytes of the autocast copies of the weights of all blocks.
    """
    if not share.moment:
        return max(bytes_at(share._replace(moment=moment), layers, block, end, copies=copies) for moment in MOMENTS)
    kept = {"none": block.all, "full": block.stream, "selective": block.stream + block.selected, "offload": 0.0}
    checkpointed = 0 if share.checkpoint == "none" else -(-layers // share.every) * share.firsts
    of_blocks = checkpointed * kept[share.checkpoint]
    of_blocks += (layers - checkpointed) * (kept[share.rest] + (share.rest == "none") * copies / layers)
    of_blocks = share.blocks * of_blocks + share.borders * block.stream + share.waits * layers * block.outputs
    if share.moment == "forward":
        cached = share.blocks * checkpointed * copies / layers  # autocast keeps copies until the forward ends
        return int(of_blocks + cached + (share.ends * end.all + end.forward if share.ends else block.gradients))
    if share.moment == "backward":
        return int(of_blocks + share.ends * end.all + end.backward * bool(share.ends))
    if share.moment == "start":
        return int(of_blocks + 2 * block.stream)
    if not checkpointed:
        return int(of_blocks + block.stream + block.gradients)  # includes the incoming gradient
    working = block.stream + max(block.gradients, block.computed)
    # Blocks are recomputed one at a time, so autocast copies the weights of one block.
    last = share.checkpoint if share.rest == "none" else share.rest
    again = block.all - max(0, kept[last] - block.stream) + copies / layers
    is_whole = last == share.checkpoint and (share.firsts < 1 or (layers - 1) % share.every)
    freed = block.all if is_whole else 0  # the last block is not checkpointed, and its backward is done
    return int(of_blocks + max(0, again - freed) + working)


class Formula(Protocol):
    """Formula for the activation memory of a model family."""

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
        """Return the bytes that forward and backward need at ``share.moment``, in addition to parameters and their
        gradients.

        Args:
            section: ``model`` section of the config.
            vocab_size: number of rows of the embedding.
            dtype: dtype of matrix products.
            autocast: whether copies of the weights in ``dtype`` are also kept.
        """
