"""Rates measured by ``serried plan calibrate`` on one device with one version of torch, read from a file."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from serried.configs.errors import UserError
from serried.configs.plain_data import NotPlainData, read_json
from serried.planner.devices import Cluster, Device, device_of_driver
from serried.planner.plan_terms import Shape
from serried.planner.time.published_rates import Rates

_HALVES = (0, 4, 8, 16, 32, 48, 64, 96, 128, 192, 256, 384, 512)
"""Candidates for ``Rates.half``."""


@dataclass(frozen=True)
class MeasuredRates:
    """Rates measured on the processes of one or several nodes."""

    path: Path
    cluster: Cluster
    """Nodes of the measurement. The peaks of their device are the measured rates."""
    rates: Rates
    """Fractions of the peak rates of the device in ``cluster``."""
    products: Mapping[Shape, float]
    """Measured seconds of each matrix product."""
    precision: str
    hidden: float
    """Share of a collective's time that overlapping computation hides."""
    date: str
    torch: str
    is_gpu: bool

    def product_seconds(self, shape: Shape) -> float:
        """Return the seconds of a matrix product: the fit, corrected by its error at the nearest timed shape."""
        near = min(self.products, key=lambda timed: math.dist([*map(math.log, timed)], [*map(math.log, shape)]))
        return self._fitted(shape) * self.products[near] / self._fitted(near)

    def _fitted(self, shape: Shape) -> float:
        peak = self.cluster.device.peak(self.precision)
        assert peak
        return 2 * math.prod(dim + self.rates.half for dim in shape) / (peak * self.rates.products)

    def notes(self) -> list[str]:
        """Return remarks for the user, such as a different version of torch."""
        here = torch.__version__
        return [] if self.torch == here else [f"they were measured with torch {self.torch}, but this is {here}"]


def read_rates(path: Path) -> MeasuredRates:
    """Return the rates in the file ``path``.

    Raises:
        UserError: the file cannot be read, or was not written by ``serried plan calibrate``.
    """
    try:
        return _rates(path, read_json(path))
    except OSError as error:
        raise UserError(
            f"cannot read plan.rates={path}: {error.strerror}; write it with: serried plan calibrate out={path}"
        ) from None
    except (NotPlainData, LookupError, TypeError, ValueError):
        raise UserError(
            f"plan.rates={path} contains no rates; measure them with: serried plan calibrate out=rates.json"
        ) from None


def _rates(path: Path, found: Mapping[str, Any]) -> MeasuredRates:
    products = {(int(m), int(n), int(k)): _positive(seconds) for m, n, k, seconds in found["products"]}
    peak, half = _fit(products)
    known = device_of_driver(found["device"])
    wire = found["links"] or {"bytes_per_second": math.inf, "seconds": 0.0}
    rate, latency = _positive(wire["bytes_per_second"]), float(wire["seconds"])
    between = _positive((found["network"] or wire)["bytes_per_second"])
    per_node, precision = int(_positive(found["per_node"])), str(found["precision"])
    device = Device(
        known.name if known else found["device"], found["device"], float(found["memory_bytes"]),
        _positive(found["memory"]), rate, between / per_node if found["network"] else rate, str(path),
        {precision: peak},
    )  # fmt: skip
    rates = Rates(
        1.0, 1.0, 0.5 * _positive(found["attention"]) / peak, 1.0, 1.0, float(found["launch"]), network=1.0, half=half,
        latency=latency, hop=0.0,
    )  # fmt: skip
    return MeasuredRates(
        path, Cluster(device, per_node), rates, products, precision, float(found["hidden"]), str(found["date"]),
        str(found["torch"]), found["type"] == "cuda",
    )  # fmt: skip


def _positive(value: Any) -> float:
    if not float(value) > 0:
        raise ValueError(value)
    return float(value)


def _fit(products: Mapping[Shape, float]) -> tuple[float, float]:
    """Return the best fit of (FLOP/s of large matrix products, size of a dim that reaches half of that rate)."""

    def peaks(half: float) -> list[float]:
        return sorted(2 * math.prod(dim + half for dim in shape) / seconds for shape, seconds in products.items())

    def misfit(half: float) -> float:
        found = peaks(half)
        return sum(math.log(peak / found[len(found) // 2]) ** 2 for peak in found)

    half = min(_HALVES, key=misfit)
    found = peaks(half)
    return found[len(found) // 2], half
