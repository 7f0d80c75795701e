"""Devices that a run can be planned for: what their makers state, each with its source.

Peaks of matrix products are those of ``trainer.metrics.peak_flops``.
"""

from collections.abc import Mapping
from typing import NamedTuple

from serried.configs.errors import UserError
from serried.configs.messages.suggestions import nearest
from serried.trainer.metrics.peak_flops import PEAK_FLOPS

_8_BITS_AT_TWICE = ("h100", "h200", "b200", "mi300x")


class Device(NamedTuple):
    """A device and its place in a node."""

    name: str
    driver_name: str
    memory_bytes: float
    memory_rate: float
    """Bytes a second."""
    link_rate: float
    """Bytes a second that it sends to others of its node."""
    network_rate: float
    """Bytes a second that it sends to other nodes: its share of the node's network cards, of the maker's own system."""
    source: str
    measured: Mapping[str, float] | None = None
    """FLOP/s that were reached, by precision, in place of what the maker states."""

    def peak(self, precision: str) -> float | None:
        """FLOP/s of matrix products at most; ``precision`` is ``8bit``, float8, bf16, fp16 or fp32. None: unknown."""
        if self.measured is not None:
            return self.measured.get(precision)
        peaks = PEAK_FLOPS[self.driver_name]
        if precision == "float8" and self.name not in _8_BITS_AT_TWICE:
            return None
        if precision in ("8bit", "float8"):
            return peaks["bf16"] * (2 if self.name in _8_BITS_AT_TWICE else 1)
        return peaks.get(precision)


class Cluster(NamedTuple):
    """Equal nodes."""

    device: Device
    per_node: int = 8


_GB, _TB = 1e9, 1e12
_400_GBIT, _200_GBIT = 50 * _GB, 25 * _GB

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
        Device("mi300x", "AMD Instinct MI300X", 192 * _GB, 5.3 * _TB, 448 * _GB, _400_GBIT, "amd.com MI300X platform"),
    )
}  # fmt: skip


def device_of(name: str) -> Device:
    """Return the device of this name.

    Raises:
        UserError: it is not in the catalogue.
    """
    if name in DEVICES:
        return DEVICES[name]
    close = nearest(name, [*DEVICES])
    hint = f"did you mean plan.device={close[0]}?" if close else f"known are {', '.join(DEVICES)}"
    raise UserError(f"plan.device={name} is not in the catalogue of devices; {hint}")


def device_of_driver(driver_name: str) -> Device | None:
    """Return the device that the driver calls so, if it is in the catalogue."""
    return next((device for device in DEVICES.values() if device.driver_name == driver_name), None)
