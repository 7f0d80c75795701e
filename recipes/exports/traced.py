"""Graph of a model from ``torch.export``, for formats that store a graph."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

from serried.configs.errors import UserError
from serried.recipes.exports.export_formats import Source
from serried.recipes.models.families.llama import Transformer
from serried.recipes.models.families.qwen3_next_config import Qwen35Section


class _Logits(nn.Module):
    """Maps tokens [B, S] to logits [B, S, V], without the other outputs of the model's forward."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.model(tokens)
        return logits


def traced(source: Source, dtype: torch.dtype) -> ExportedProgram:
    """Return the graph of the model with weights in ``dtype``, for any batch size and sequences of up to ``longest``
    tokens."""
    _refuse_what_varies(source.section)
    model, most = source.opened(source.folder).to(dtype), longest(source)
    if isinstance(model, Transformer):
        model.keep_rotations(most)
    example = torch.zeros(2, min(16, most), dtype=torch.long)
    dims = {0: Dim("batch"), 1: Dim("sequence", max=most)}
    with torch.no_grad():
        return torch.export.export(_Logits(model), (example,), dynamic_shapes=(dims,))


def _refuse_what_varies(section: Any) -> None:
    """Raise ``UserError`` if the operations of the model depend on its input, which a graph cannot express."""
    why = ""
    if isinstance(section, Qwen35Section):
        why = "the number of steps of linear attention depends on the length of the sequence"
    elif getattr(section, "experts", 0):
        why = "the number of tokens of each expert varies, and torch.export has no matrix products for that"
    if why:
        raise UserError(f"model.family={section.family} cannot be exported as a graph, because {why}; use format=hf")


def longest(source: Source) -> int:
    """Return the largest sequence length that the graph supports.

    It is limited by sliding windows and by rotary frequencies that depend on the length: the graph has one mask and one
    table of rotations.
    """
    section = source.section
    windows = [section.window(layer) for layer in range(section.layers)] if hasattr(section, "window") else []
    scaling = getattr(section, "rope_scaling", None)
    original = [scaling.original] if scaling and scaling.depends_on_length else []
    return min([section.max_sequence_length, *original, *(window for window in windows if window)])
