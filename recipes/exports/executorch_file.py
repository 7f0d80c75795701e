"""Export to ``.pte``, ExecuTorch's format for phones and embedded devices. Operators that XNNPACK supports run on
XNNPACK."""

from pathlib import Path

import torch
from torch import Tensor

from serried.recipes.exports.export_formats import Source
from serried.recipes.exports.traced import traced


def write(source: Source, file: Path, dtype: str) -> None:
    """Write the model to ``file``."""
    from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
    from executorch.exir import to_edge_transform_and_lower

    del dtype
    lowered = to_edge_transform_and_lower(traced(source, torch.float32), partitioner=[XnnpackPartitioner()])
    with file.open("wb") as out:
        lowered.to_executorch().write_to_file(out)


def run(source: Source, file: Path, tokens: Tensor) -> Tensor:
    """Return the logits that ExecuTorch's runtime computes for ``tokens``."""
    from executorch.runtime import Runtime

    del source
    logits: Tensor = Runtime.get().load_program(file).load_method("forward").execute([tokens])[0]
    return logits
