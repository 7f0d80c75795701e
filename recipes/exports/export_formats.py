"""Table of the formats of ``serried export`` other than Hugging Face's, with their libraries and accuracy bounds."""

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
    """Hugging Face folder of the model."""
    section: Any
    """Config section ``model``, which describes the architecture."""
    opened: Callable[[Path], nn.Module]
    """Loads the model from a folder like ``folder``. The model maps tokens [B, S] to logits [B, S, V]."""
    frozen: Collection[str] = ()
    """Weights in ``folder`` that quantization-aware training did not quantize."""


class Exporter(Protocol):
    """Interface of a format's module."""

    def write(self, source: Source, file: Path, dtype: str) -> None:
        """Write the model to ``file``. Other files written next to it are part of the export."""

    def run(self, source: Source, file: Path, tokens: Tensor) -> Tensor:
        """Return the logits [B, S, V] that ``file`` computes for ``tokens`` [B, S]."""


class Format(NamedTuple):
    """A format of ``serried export``."""

    module: str
    """Name of the format's module in this package."""
    suffix: str
    """Usual file suffix."""
    libraries: tuple[str, ...]
    """Import names of the required libraries, in addition to torch."""
    bounds: Mapping[str, float]
    """Largest accepted difference from the checkpoint's logits, relative to the largest logit, for each dtype of the
    weights. The first dtype is the default."""

    def load(self) -> Exporter:
        """Import the format's module."""
        module: Any = import_module(f"{__package__}.{self.module}")
        return module


_FP32 = 1e-4
_HALF = 5e-2
_BYTE = 0.1

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
