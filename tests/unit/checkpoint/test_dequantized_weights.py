"""Quantized weights have the values that transformers dequantizes them to, whole and in any part."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import Tensor

from serried.configs.errors import UserError
from serried.parallel.checkpoint_mapping import Fragment
from serried.parallel.layout.shard_specs import Box
from serried.records.safetensors_files import TensorFolder
from serried.trainer.checkpoint import tensors as loading

FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}
MXFP4 = {"quant_method": "mxfp4"}
COMPRESSED = {
    "quant_method": "compressed-tensors",
    "config_groups": {"group_0": {"weights": {"type": "float", "num_bits": 8, "strategy": "channel"}}},
}


def folder_with(folder: Path, quantization: dict[str, Any], **tensors: Tensor) -> TensorFolder:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps({"quantization_config": quantization}))
    save_file(tensors, folder / "model.safetensors")
    return TensorFolder(folder)


def whole(folder: TensorFolder, name: str) -> Tensor:
    spec = folder.specs[name]
    return folder.read_elements(name, 0, spec.numel).view(spec.shape)


def random_bytes(*shape: int) -> Tensor:
    return torch.randint(256, shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=torch.uint8)


def random_fp8(*shape: int) -> Tensor:
    """All values of FP8 except NaN, which equals nothing."""
    values = random_bytes(*shape)
    return values.masked_fill(values & 127 == 127, 0).view(torch.float8_e4m3fn)


def random_scales(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(7)).add(0.01).div(100).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scale", [torch.float32, torch.bfloat16])
def test_fp8_blocks_are_dequantized_as_in_transformers(dtype: torch.dtype, scale: torch.dtype, tmp_path: Path) -> None:
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    weight, scales = random_fp8(256, 384), random_scales(2, 3, dtype=scale)
    folder = folder_with(tmp_path, FP8, **{"a.weight": weight, "a.weight_scale_inv": scales, "b": torch.ones(3)})
    assert folder.specs.keys() == {"a.weight", "b"}
    reference = Fp8Dequantize(None)._dequantize_one(weight, scales, output_dtype=dtype)
    assert torch.equal(whole(folder, "a.weight").to(dtype), reference)


@pytest.mark.parametrize("dtype", [torch.float8_e8m0fnu, torch.uint8])
def test_fp8_scales_that_are_powers_of_two_are_dequantized_as_in_transformers(
    dtype: torch.dtype, tmp_path: Path
) -> None:
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    weight, exponents = random_fp8(256, 128), torch.tensor([[110], [130]], dtype=torch.uint8).view(dtype)
    folder = folder_with(tmp_path, FP8, **{"a.weight": weight, "a.weight_scale_inv": exponents})
    reference = Fp8Dequantize(None)._dequantize_one(weight, exponents, output_dtype=torch.float32)
    assert torch.equal(whole(folder, "a.weight"), reference)
    assert reference.isfinite().all()


def test_fp8_blocks_at_the_edge_are_dequantized_as_in_the_backward_of_transformers(tmp_path: Path) -> None:
    """Loading with transformers refuses a last block that is smaller, as in the 576 rows of DeepSeek-V3."""
    from transformers.integrations.finegrained_fp8 import _dequantize_fp8_weight

    weight, scales = random_fp8(576, 200), random_scales(5, 2)
    folder = folder_with(tmp_path, FP8, **{"a.weight": weight, "a.weight_scale_inv": scales})
    assert torch.equal(whole(folder, "a.weight"), _dequantize_fp8_weight(weight, scales, [128, 128], torch.float32))


@pytest.mark.parametrize("shape", [(), (1,), (48, 1)])
def test_fp8_scales_of_a_tensor_or_of_rows_are_applied(shape: tuple[int, ...], tmp_path: Path) -> None:
    weight, scales = random_fp8(48, 40), random_scales(*shape)
    tensors = {"a.weight": weight, "a.weight_scale": scales, "a.input_scale": torch.ones(1)}
    folder = folder_with(tmp_path, COMPRESSED, **tensors)
    assert list(folder.specs) == ["a.weight"]
    assert torch.equal(whole(folder, "a.weight"), weight.float() * scales)


def test_weights_without_elements_are_read(tmp_path: Path) -> None:
    empty = {"a": random_fp8(4, 0), "a_scale": torch.ones(1), "b": random_fp8(0, 4), "b_scale_inv": torch.ones(0, 1)}
    folder = folder_with(tmp_path, FP8, **empty)
    assert [whole(folder, name).shape for name in ("a", "b")] == [(4, 0), (0, 4)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_mxfp4_experts_are_dequantized_as_in_transformers(dtype: torch.dtype, tmp_path: Path) -> None:
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    blocks, scales = random_bytes(3, 34, 4, 16), random_bytes(3, 34, 4)
    scales[0, :, 0], scales[0, :, 1] = torch.arange(34), torch.arange(255 - 33, 256)  # the smallest and the largest
    stored = {"x_blocks": blocks, "x_scales": scales, "x_bias": torch.ones(3, 34)}
    folder = folder_with(tmp_path, MXFP4, **stored)
    reference = convert_moe_packed_tensors(blocks, scales, dtype=dtype)
    ours = whole(folder, "x").to(dtype)
    assert (ours.shape, sorted(folder.specs)) == ((3, 128, 34), ["x", "x_bias"])
    assert reference.isinf().any()
    assert torch.equal(ours.nan_to_num(nan=7), reference.nan_to_num(nan=7))
    assert torch.equal(ours.signbit() & ~ours.isnan(), reference.signbit() & ~reference.isnan())


@pytest.fixture(scope="module")
def quantized(tmp_path_factory: pytest.TempPathFactory) -> dict[str, TensorFolder]:
    folder = tmp_path_factory.mktemp("quantized")
    blocks, stacked = random_bytes(3, 6, 2, 16), {"x": random_fp8(3, 20, 24), "x_scale_inv": random_scales(3, 3, 2)}
    return {
        "fp8": folder_with(folder / "fp8", FP8 | {"weight_block_size": [8, 16]}, **stacked),
        "mxfp4": folder_with(folder / "mxfp4", MXFP4, x_blocks=blocks, x_scales=random_bytes(3, 6, 2)),
    }


@settings(max_examples=60)
@given(data=st.data(), method=st.sampled_from(["fp8", "mxfp4"]))
def test_any_box_of_a_dequantized_weight_is_read_alone(
    data: st.DataObject, method: str, quantized: dict[str, TensorFolder]
) -> None:
    folder = quantized[method]
    expected = whole(folder, "x")
    starts = [data.draw(st.integers(0, size - 1)) for size in expected.shape]
    sizes = [data.draw(st.integers(1, size - start)) for size, start in zip(expected.shape, starts, strict=True)]
    box = Box(tuple(starts), tuple(sizes))
    into = torch.empty(sizes, dtype=expected.dtype)
    loading._read(folder, Fragment.whole("x", folder.specs["x"].shape), box, into)
    assert torch.equal(into.nan_to_num(), expected[box.indices()].nan_to_num())
    first = data.draw(st.integers(0, expected.numel()))
    count = data.draw(st.integers(0, expected.numel() - first))
    piece = folder.read_elements("x", first, count)
    assert torch.equal(piece.nan_to_num(), expected.flatten()[first : first + count].nan_to_num())


@pytest.mark.parametrize(
    ("quantization", "tensors", "box", "bytes_read"),
    [
        # Rows 12 to 24 of 40 lie in two rows of blocks.
        (FP8 | {"weight_block_size": [8, 16]}, {"x": random_fp8(40, 24), "x_scale_inv": random_scales(5, 2)},
         Box((12, 0), (12, 24)), 12 * 24 + 2 * 2 * 4),
        (MXFP4, {"x_blocks": random_bytes(3, 6, 2, 16), "x_scales": random_bytes(3, 6, 2)},
         Box((1, 0, 0), (1, 64, 6)), 6 * 2 * 16 + 6 * 2),
    ],
    ids=["rows in FP8", "an expert in MXFP4"],
)  # fmt: skip
def test_rank_reads_only_the_bytes_of_its_share(
    quantization: dict[str, Any], tensors: dict[str, Tensor], box: Box, bytes_read: int, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    folder, counts, preadv = folder_with(tmp_path, quantization, **tensors), [], os.preadv

    def counted(*arguments: Any) -> int:
        counts.append(preadv(*arguments))
        return counts[-1]

    monkeypatch.setattr(os, "preadv", counted)
    loading._read(folder, Fragment.whole("x", folder.specs["x"].shape), box, torch.empty(box.sizes))
    assert sum(counts) == bytes_read


@pytest.mark.parametrize(
    ("quantization", "tensors", "message"),
    [
        (FP8, {"a": random_fp8(8, 8)}, "a has dtype torch.float8_e4m3fn, but its scales a_scale_inv are missing"),
        (
            FP8, {"a": random_fp8(8, 8), "a_scale_inv": torch.ones(2, 2)},
            r"its scales have shape \[2, 2\], not \[1, 1\] for blocks of \[128, 128\]",
        ),
        (MXFP4, {"a_blocks": random_bytes(2, 4, 16)}, r"a_blocks has shape \[2, 4, 16\], not 4 dims"),
        (MXFP4, {"a_blocks": random_bytes(2, 4, 1, 16)}, "but its scales a_scales are missing"),
        (
            MXFP4, {"a_blocks": random_bytes(2, 4, 1, 16), "a_scales": random_bytes(2, 4, 2)},
            r"a_scales has dtype torch.uint8 and shape \[2, 4, 2\], but a_blocks needs torch.uint8 and \[2, 4, 1\]",
        ),
    ],
)  # fmt: skip
def test_scales_that_do_not_fit_are_refused_in_one_line(
    quantization: dict[str, Any], tensors: dict[str, Tensor], message: str, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=message) as error:
        folder_with(tmp_path, quantization, **tensors)
    assert "\n" not in str(error.value)
