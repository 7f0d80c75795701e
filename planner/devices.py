"""Devices that a run can be planned for, with the makers' specifications and their sources.

``trainer.metrics.peak_flops`` has the peaks of matrix products. The memory bandwidth of the T4 (300 GB/s here, 320 by
its bus) and the figures of the MI300X have not been compared with their data sheets.
"""

import re
from collections.abc import Mapping
from typing import NamedTuple

from serried.configs.errors import UserError
from serried.configs.messages.suggestions import nearest
from serried.trainer.metrics.peak_flops import PEAK_FLOPS

_8_BITS_AT_TWICE = ("h100", "h200", "b200", "mi300x", "l4", "l40", "l40s", "rtx4090", "rtx5090", "rtx6000-ada")


class Device(NamedTuple):
    """A device and its connections within and between nodes."""

    name: str
    driver_name: str
    memory_bytes: float
    memory_rate: float
    """Memory bandwidth in bytes per second."""
    link_rate: float
    """Bandwidth to devices of the same node, one direction, in bytes per second."""
    network_rate: float | None
    """Bandwidth to other nodes in bytes per second: the device's share of the network cards in the maker's own system.
    None if the maker has no such system."""
    source: str
    measured: Mapping[str, float] | None = None
    """Measured FLOP/s by precision, which replace the maker's specification."""

    def peak(self, precision: str) -> float | None:
        """Return the peak FLOP/s of matrix products in ``8bit``, float8, bf16, fp16 or fp32; None if unknown."""
        if self.measured is not None:
            return self.measured.get(precision)
        peaks = PEAK_FLOPS[self.driver_name]
        if precision == "float8" and self.name not in _8_BITS_AT_TWICE:
            return None
        if precision in ("8bit", "float8"):
            half = peaks.get("bf16")
            return half and half * (2 if self.name in _8_BITS_AT_TWICE else 1)
        return peaks.get(precision)

    @property
    def half_peak(self) -> float | None:
        """FLOP/s in bf16, or in fp16 on a device without bf16."""
        return self.peak("bf16") or self.peak("fp16")

    @property
    def lacks_bf16(self) -> bool:
        """Whether the hardware supports matrix products in fp16 but not in bf16."""
        return self.measured is None and not self.peak("bf16") and bool(self.peak("fp16"))

    @property
    def between_nodes(self) -> float:
        """``network_rate``, for a device that has one."""
        assert self.network_rate is not None
        return self.network_rate


class Cluster(NamedTuple):
    """Nodes with equal devices."""

    device: Device
    per_node: int = 8


_GB = 1e9
_TB = 1e12
_GIB = 2**30
_400_GBIT = 50 * _GB
_200_GBIT = 25 * _GB
_50_GBIT = 6.25 * _GB
_PCIE_5 = 64 * _GB
_PCIE_4 = 32 * _GB
_PCIE_3 = 16 * _GB
"""Bandwidth of PCIe x16 in one direction, by generation. An NVLink bridge between two cards is not counted."""

DEVICES = {
    device.name: device
    for device in (
        Device("b200", "NVIDIA B200", 180 * _GB, 8 * _TB, 900 * _GB, _400_GBIT, "nvidia.com/dgx-b200"),
        Device("h200", "NVIDIA H200", 141 * _GB, 4.8 * _TB, 450 * _GB, _400_GBIT, "nvidia.com/dgx-h200"),
        Device("h100", "NVIDIA H100 80GB HBM3", 80 * _GB, 3.35 * _TB, 450 * _GB, _400_GBIT, "nvidia.com/dgx-h100"),
        Device("a100", "NVIDIA A100-SXM4-80GB", 80 * _GB, 2.0 * _TB, 300 * _GB, _200_GBIT, "nvidia.com/dgx-a100"),
        Device(
            "a100-40gb", "NVIDIA A100-SXM4-40GB", 40 * _GB, 1.555 * _TB, 300 * _GB, _200_GBIT, "nvidia.com/dgx-a100"
        ),
        Device("v100", "Tesla V100-SXM2-32GB", 32 * _GB, 900 * _GB, 150 * _GB, _50_GBIT, "nvidia.com/dgx-1"),
        Device("v100-16gb", "Tesla V100-SXM2-16GB", 16 * _GB, 900 * _GB, 150 * _GB, _50_GBIT, "nvidia.com/dgx-1"),
        Device("mi300x", "AMD Instinct MI300X", 192 * _GB, 5.3 * _TB, 448 * _GB, _400_GBIT, "amd.com MI300X platform"),
        Device("l40s", "NVIDIA L40S", 48 * _GB, 864 * _GB, _PCIE_4, None, "nvidia.com/en-us/data-center/l40s"),
        Device("l40", "NVIDIA L40", 48 * _GB, 864 * _GB, _PCIE_4, None, "nvidia.com/en-us/data-center/l40"),
        Device("l4", "NVIDIA L4", 24 * _GB, 300 * _GB, _PCIE_4, None, "nvidia.com/en-us/data-center/l4"),
        Device("a40", "NVIDIA A40", 48 * _GB, 696 * _GB, _PCIE_4, None, "nvidia.com/en-us/data-center/a40"),
        Device(
            "a10", "NVIDIA A10", 24 * _GB, 600 * _GB, _PCIE_4, None, "nvidia.com/en-us/data-center/products/a10-gpu"
        ),
        Device("t4", "Tesla T4", 16 * _GB, 300 * _GB, _PCIE_3, None, "nvidia.com/en-us/data-center/tesla-t4"),
        Device(
            "rtx6000-ada", "NVIDIA RTX 6000 Ada Generation", 48 * _GB, 960 * _GB, _PCIE_4, None,
            "nvidia.com/en-us/design-visualization/rtx-6000",
        ),
        Device(
            "rtx-a6000", "NVIDIA RTX A6000", 48 * _GB, 768 * _GB, _PCIE_4, None,
            "nvidia.com/en-us/design-visualization/rtx-a6000",
        ),
        # The 32 and 24 GB of a GeForce are GiB, of which torch.cuda.mem_get_info reports 31.4 and 23.6
        # (github.com/Wan-Video/Wan2.1/issues/465, github.com/ali-vilab/VGen/issues/104).
        Device(
            "rtx5090", "NVIDIA GeForce RTX 5090", 31.3 * _GIB, 1792 * _GB, _PCIE_5, None,
            "nvidia.com/en-us/geforce/graphics-cards/50-series/rtx-5090",
        ),
        Device(
            "rtx4090", "NVIDIA GeForce RTX 4090", 23.6 * _GIB, 1008 * _GB, _PCIE_4, None,
            "nvidia.com/en-us/geforce/graphics-cards/40-series/rtx-4090",
        ),
        Device(
            "rtx3090", "NVIDIA GeForce RTX 3090", 23.6 * _GIB, 936 * _GB, _PCIE_4, None,
            "nvidia.com/en-us/geforce/graphics-cards/30-series/rtx-3090-3090ti",
        ),
    )
}  # fmt: skip
"""Devices by the name in ``plan.device``."""


def device_of(name: str) -> Device:
    """Return the device called ``name``; ``RTX 4090``, ``4090`` and the driver's name also mean ``rtx4090``.

    Raises:
        UserError: it is not in the catalogue.
    """
    if name in DEVICES:
        return DEVICES[name]
    for device in DEVICES.values():
        if _letters(name) in (_letters(device.name), _letters(device.driver_name)):
            return device
    close = nearest(name, [*DEVICES])
    hint = f"did you mean plan.device={close[0]}?" if close else f"known are {', '.join(DEVICES)}"
    raise UserError(f"plan.device={name} is not in the catalogue of devices; {hint}")


def _letters(name: str) -> str:
    """Return a name without case, punctuation and words that do not distinguish devices."""
    return re.sub("nvidia|geforce|tesla|rtx|amd|instinct|[^a-z0-9]", "", name.lower())


def device_of_driver(driver_name: str) -> Device | None:
    """Return the device with this driver name; None if it is not in the catalogue."""
    return next((device for device in DEVICES.values() if device.driver_name == driver_name), None)
