"""The formats of ``serried export`` beside Hugging Face's: what each needs, and how closely its files must agree."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from torch import Tensor, nn


@dataclass(frozen=True)
class Source:
    """A model to export."""

    folder: Path
    """A Hugging Face folder."""
    section: Any
    """Its architecture, the section ``model``."""
    opened: Callable[[Path], nn.Module]
    """Folder with such weights -> the model with them: tokens [B, S] -> logits [B, S, V]."""
    frozen: Collection[str] = ()
    """Weights in ``folder`` that the training for a quantization left as they are."""


class Exporter(Protocol):
    """The module of a format."""

    def write(self, source: Source, file: Path, dtype: str) -> None:
        """Write the model to ``file``; all that is beside it then belongs to it."""

    def run(self, source: Source, file: Path, tokens: Tensor) -> Tensor:
        """Return the logits [B, S, V] that ``file`` computes for ``tokens`` [B, S]."""


class Format(NamedTuple):
    """A format of files."""

    module: str
    """Beside this one."""
    suffix: str
    """Of its files, usually."""
    libraries: tuple[str, ...]
    """What it needs beside torch, as they are imported."""
    bounds: Mapping[str, float]
    """dtype of the weights -> how far logits may be from the checkpoint's, as a part of the largest logit. The first
    is the default."""

    def load(self) -> Exporter:
        """Import it."""
        module: Any = import_module(f"{__package__}.{self.module}")
        return module


_FP32, _HALF, _BYTE = 1e-4, 5e-2, 0.1

FORMATS = {
    "gguf": Format(
        "gguf_file", "gguf", ("gguf",), {"fp16": _HALF, "fp32": _FP32, "bf16": _HALF, "q8_0": _BYTE, "q4_0": 0.5}
    ),
    "onnx": Format("onnx_file", "onnx", ("onnx", "onnxscript", "onnxruntime"), {"fp32": _FP32, "int8": 0.2}),
    "torchao": Format(
        "torchao_folder",
        "torchao",
        ("torchao", "transformers"),
        {"int8_dynamic_int4": _HALF, "int4_weight_only": _FP32},
    ),
    "torch_export": Format("torch_export", "pt2", (), {"fp32": _FP32, "bf16": _HALF}),
    "executorch": Format("executorch_file", "pte", ("executorch",), {"fp32": _FP32}),
}
