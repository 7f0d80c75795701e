"""Export to ``.pt2``, which ``torch.export.load`` reads."""

from pathlib import Path

import torch
from torch import Tensor

from serried.recipes.exports.export_formats import Source
from serried.recipes.exports.traced import traced

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def write(source: Source, file: Path, dtype: str) -> None:
    """Write the model to ``file``."""
    program = traced(source, _DTYPES[dtype])
    program._example_inputs = None  # would be pickled; there is no public way to leave it out
    torch.export.save(program, file)


def run(source: Source, file: Path, tokens: Tensor) -> Tensor:
    """Return the logits that ``file`` computes for ``tokens``."""
    del source
    logits: Tensor = torch.export.load(file).module()(tokens)
    return logits
