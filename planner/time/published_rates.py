"""Fractions of a device's peak rates that training software reaches, fitted to published runs."""

from typing import NamedTuple


class Rates(NamedTuple):
    """Fractions of a device's peak rates that are reached, and fixed costs in seconds."""

    products: float
    products_8bit: float
    attention: float
    memory: float
    links: float
    """Share of the bandwidth within a node."""
    launch: float
    """Seconds to launch one operation."""
    network: float = 0.8
    """Share of the bandwidth between nodes. This and the following fields are assumptions: no run determines them."""
    half: float = 150.0
    """Size of a dim at which a matrix product reaches half of its best rate."""
    latency: float = 15e-6
    """Seconds to start a collective."""
    hop: float = 5e-6
    """Seconds that each node after the first adds to a collective."""


RATES = {
    "torchtitan": Rates(0.548, 0.453, 0.237, 0.622, 0.883, 2.0e-5),
    "llm-foundry": Rates(0.578, 0.62, 0.687, 0.792, 0.405, 1.95e-5),
    "nvidia": Rates(0.618, 0.619, 0.43, 0.687, 0.785, 7.3e-6),
    "megatron-2021": Rates(0.833, 0.86, 0.297, 0.729, 0.859, 2.5e-6),
}
"""Rates by software. ``python -m tools.published fit`` fits them to the calibration rows of
``tools/published.toml``."""


class Seen(NamedTuple):
    """Range of settings that the published runs of one training software cover."""

    devices: tuple[str, ...]
    sequence: int
    sharding: int
    """Number of ranks in the largest FSDP group."""
    has_adapters: bool = False


SEEN = {
    "torchtitan": Seen(("h100",), 262144, 128, has_adapters=True),
    "llm-foundry": Seen(("h100",), 2048, 512),
    "nvidia": Seen(("h100",), 131072, 128, has_adapters=True),
    "megatron-2021": Seen(("a100",), 32768, 64),
}
WITHIN = (0.86, 1.13)
"""Ratio of measured to predicted time for the held-out rows, p10 to p90."""
OUTSIDE = (0.86, 1.8)
"""Ratio of measured to predicted time for blind rows with longer sequences than the calibration's or another device."""
FLOAT8 = (0.70, 1.29)
"""Ratio of measured to predicted time for FP8 rows, with torchtitan's rates: p10 of all rows (NVIDIA's are faster) and
p90 of torchtitan's rows."""
ADAPTERS = (0.75, 1.67)
"""Ratio of measured to predicted time for the six LoRA rows, with torchtitan's rates. The smallest ratio is from a run
on one device, the largest from a run with pipeline and tensor ranks."""
MEASURED = (0.8, 1.25)
"""Assumed range of measured / predicted time when the rates come from ``serried plan calibrate``."""
FAR = 4
"""Ratio to the size of the largest published FSDP group above which a group counts as outside the range."""


def software_for(device: str) -> str:
    """Return the software whose published rates are used on ``device``: Megatron on an A100, otherwise torchtitan."""
    return "megatron-2021" if device.startswith("a100") else "torchtitan"
