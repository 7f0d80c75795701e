"""Peak dense FLOP/s of devices, from the vendors' data sheets."""

import torch

_Peaks = dict[str, float]


def _peaks(bf16: float, tf32: float | None = None, fp32: float | None = None) -> _Peaks:
    """Return FLOP/s by precision, from TFLOP/s. The value for bf16 also applies to fp16."""
    known = {"bf16": bf16, "fp16": bf16, "tf32": tf32, "fp32": fp32}
    return {precision: teraflops * 1e12 for precision, teraflops in known.items() if teraflops}


_H100_SXM = _peaks(989.5, tf32=494.5, fp32=67)
_H100_NVL = _peaks(835.5, tf32=417.5, fp32=60)
_A100 = _peaks(312, tf32=156, fp32=19.5)
_V100_SXM = {"fp16": 125e12, "fp32": 15.7e12}  # no bf16 units: torch computes bf16 in fp32
_V100_PCIE = {"fp16": 112e12, "fp32": 14e12}

PEAK_FLOPS: dict[str, _Peaks] = {
    # https://resources.nvidia.com/en-us-blackwell-architecture (values with sparsity, halved)
    "NVIDIA B200": _peaks(2250),
    "NVIDIA GB200": _peaks(2500, tf32=1250),
    # https://www.nvidia.com/en-us/data-center/h200/ and h100/ (values with sparsity, halved), grace-hopper-superchip/
    "NVIDIA H200": _H100_SXM,
    "NVIDIA H200 NVL": _H100_NVL,
    "NVIDIA GH200 480GB": _H100_SXM,
    "NVIDIA GH200 144G HBM3e": _H100_SXM,
    "NVIDIA H100 80GB HBM3": _H100_SXM,
    "NVIDIA H100 NVL": _H100_NVL,
    # Data sheet 2287922: 1,513 and 756 with sparsity, halved
    "NVIDIA H100 PCIe": _peaks(756.5, tf32=378, fp32=51),
    # https://www.nvidia.com/en-us/data-center/a100/, products/a30-gpu/, a40/, products/a10-gpu/
    "NVIDIA A100-SXM4-40GB": _A100,
    "NVIDIA A100-SXM4-80GB": _A100,
    "NVIDIA A100-PCIE-40GB": _A100,
    "NVIDIA A100 80GB PCIe": _A100,
    "NVIDIA A30": _peaks(165, tf32=82, fp32=10.3),
    "NVIDIA A40": _peaks(149.7, tf32=74.8, fp32=37.4),
    "NVIDIA A10": _peaks(125, tf32=62.5, fp32=31.2),
    # https://www.nvidia.com/en-us/data-center/l40s/, l40/, l4/ (the last: values with sparsity, halved)
    "NVIDIA L40S": _peaks(362.05, tf32=183, fp32=91.6),
    "NVIDIA L40": _peaks(181.05, tf32=90.5, fp32=90.5),
    "NVIDIA L4": _peaks(121, tf32=60, fp32=30.3),
    # White papers of the Blackwell (RTX), Ada and Ampere GA102 architectures: with fp32 accumulation, as in torch
    # https://images.nvidia.com/aem-dam/Solutions/geforce/blackwell/nvidia-rtx-blackwell-gpu-architecture.pdf
    "NVIDIA GeForce RTX 5090": _peaks(209.5, tf32=104.8, fp32=104.8),
    # https://images.nvidia.com/aem-dam/Solutions/geforce/ada/nvidia-ada-gpu-architecture.pdf
    "NVIDIA GeForce RTX 4090": _peaks(165.2, tf32=82.6, fp32=82.6),
    "NVIDIA RTX 6000 Ada Generation": _peaks(364.2, tf32=182.1, fp32=91.1),
    # https://www.nvidia.com/content/PDF/nvidia-ampere-ga-102-gpu-architecture-whitepaper-v2.pdf
    "NVIDIA GeForce RTX 3090": _peaks(71, tf32=35.6, fp32=35.6),
    "NVIDIA RTX A6000": _peaks(154.8, tf32=77.4, fp32=38.7),
    # https://www.nvidia.com/en-us/data-center/v100/, tesla-t4/
    "Tesla V100-SXM2-16GB": _V100_SXM,
    "Tesla V100-SXM2-32GB": _V100_SXM,
    "Tesla V100-PCIE-16GB": _V100_PCIE,
    "Tesla V100-PCIE-32GB": _V100_PCIE,
    "Tesla T4": {"fp16": 65e12, "fp32": 8.1e12},
    # https://www.amd.com/en/products/accelerators/instinct.html; matrix cores. Each of the two dies of an MI250 or
    # MI250X is a separate device, with half of the values in the data sheet.
    "AMD Instinct MI325X": _peaks(1307.4, tf32=653.7, fp32=163.4),
    "AMD Instinct MI300X": _peaks(1307.4, tf32=653.7, fp32=163.4),
    "AMD Instinct MI250X": _peaks(383 / 2, fp32=95.7 / 2),
    "AMD Instinct MI250": _peaks(362.1 / 2, fp32=90.5 / 2),
}
"""Peak FLOP/s by the driver's exact device name and by precision. MFU is not reported for other devices."""


def peak_flops(device_name: str, precision: str) -> float | None:
    """Return the peak dense FLOP/s of one device in matrix products; None if not known.

    ``precision``: fp32, bf16 or fp16. fp32 means TF32 if torch is set to use it.
    """
    # Not torch.get_float32_matmul_precision, which raises an error if TF32 was turned on by this attribute.
    if precision == "fp32" and torch.backends.cuda.matmul.fp32_precision == "tf32":
        precision = "tf32"
    return PEAK_FLOPS.get(device_name, {}).get(precision)
