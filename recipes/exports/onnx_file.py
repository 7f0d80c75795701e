"""Export to ONNX, for ONNX Runtime and other runtimes."""

from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch import Tensor

from serried.recipes.exports.export_formats import Source
from serried.recipes.exports.traced import traced

_LARGEST_BYTES = 2**31 - 2**20
"""Largest total size of weights inside the ONNX file, just below protobuf's limit. Larger weights are stored in
another file."""


def write(source: Source, file: Path, dtype: str) -> None:
    """Write the model to ``file``, and weights above 2 GB to another file with ``.data`` appended to its name."""
    from onnxruntime.quantization import QuantType, quantize_dynamic

    graph = traced(source, torch.float32)
    program = torch.onnx.export(
        graph, dynamo=True, input_names=["tokens"], output_names=["logits"], verbose=False, external_data=False
    )
    assert program is not None
    is_large = sum(tensor.nbytes for tensor in graph.state_dict.values()) > _LARGEST_BYTES
    if dtype == "fp32":
        program.save(file, external_data=is_large)
        return
    with TemporaryDirectory(dir=file.parent) as folder:
        whole = Path(folder) / "fp32.onnx"
        program.save(whole, external_data=is_large)
        # Weights are unsigned: with signed ones, sums saturate on CPUs with AVX2 or AVX-512 but without VNNI
        # (https://onnxruntime.ai/docs/performance/model-optimizations/quantization.html, "U8S8").
        quantize_dynamic(whole, file, weight_type=QuantType.QUInt8, per_channel=True, use_external_data_format=is_large)


def run(source: Source, file: Path, tokens: Tensor) -> Tensor:
    """Return the logits that ONNX Runtime computes for ``tokens``."""
    from onnxruntime import InferenceSession

    del source
    session = InferenceSession(file, providers=["CPUExecutionProvider"])
    return torch.from_numpy(session.run(["logits"], {"tokens": tokens.numpy()})[0])
