"""Description of quantized weights in a ``config.json``: the key ``quantization_config``."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from serried.configs.messages.invalid_values import shown
from serried.configs.plain_data import read_json

KEY = "quantization_config"
FP8 = "fp8"
MXFP4 = "mxfp4"
COMPRESSED = "compressed-tensors"
_BLOCK = (128, 128)
"""Block size of FP8 weights in DeepSeek-V3, the default of transformers."""
_MOST_ROWS = 2**31


class Quantization(NamedTuple):
    """Format of the quantized weights in a model folder."""

    method: str
    """``FP8`` or ``MXFP4``."""
    block: tuple[int, int] | None = None
    """Rows and columns of an FP8 weight that share a scale; None if a scale belongs to a whole weight or row."""


def quantization_of(found: Mapping[str, Any]) -> Quantization | None:
    """Return the format of the weights that a ``config.json`` describes; None if they are not quantized.

    Raises:
        ValueError: Weights of this format are not dequantized here. The message continues "config.json ...".
    """
    settings = found.get(KEY)
    if not settings:
        return None
    if not isinstance(settings, dict):
        raise ValueError(f"has {KEY} {shown(settings)}, which must be an object")
    method = settings.get("quant_method")
    if method == MXFP4:
        return Quantization(MXFP4)
    if method == FP8:
        return Quantization(FP8, _block(settings.get("weight_block_size", _BLOCK)))
    groups = settings.get("config_groups")
    if method == COMPRESSED and isinstance(groups, dict):
        weights = [group.get("weights") if isinstance(group, dict) else None for group in groups.values()]
        of_fp8 = [weight for weight in weights if isinstance(weight, dict) and _is_fp8(weight)]
        if of_fp8 and len(of_fp8) == len(weights):
            return Quantization(FP8, _block(of_fp8[0].get("block_structure")))
    named = f"quant_method {shown(method)}" if method else "no quant_method"
    raise ValueError(
        f"has a {KEY} with {named}, but only {FP8}, {MXFP4} and {COMPRESSED} of FP8 can be dequantized; use the "
        "unquantized model, with recipe=qlora to train it in 4 bits"
    )


def quantization_in(folder: Path) -> Quantization | None:
    """Return the format of the quantized weights in ``folder``; None if there are none, or their format is unknown."""
    try:
        return quantization_of(read_json(folder / "config.json"))
    except (OSError, ValueError):
        return None


def without_quantization(found: Mapping[str, Any]) -> dict[str, Any]:
    """Return the content of a ``config.json`` for dequantized weights."""
    return {key: value for key, value in found.items() if key != KEY}


def _block(sizes: Any) -> tuple[int, int] | None:
    if sizes is None:
        return None
    if isinstance(sizes, list | tuple) and len(sizes) == 2:
        rows, columns = sizes
        if all(type(size) is int and 0 < size < _MOST_ROWS for size in (rows, columns)):
            return rows, columns
    raise ValueError(f"has a {KEY} with blocks of {shown(sizes)}, which must be two positive integers")


def _is_fp8(weights: Mapping[str, Any]) -> bool:
    kind = (weights.get("type"), weights.get("num_bits"))
    return kind == ("float", 8) and weights.get("strategy") in ("tensor", "channel", "block")
