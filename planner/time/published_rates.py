"""How much of what a device could do it really does, by software, as published runs show."""

from typing import NamedTuple


class Rates(NamedTuple):
    """Shares of a device's peaks that are reached, and fixed costs in seconds."""

    products: float
    products_8bit: float
    attention: float
    memory: float
    links: float
    """Within a node."""
    launch: float
    """Of one operation."""
    network: float = 0.8
    """Between nodes. This and what follows is assumed: no run determines it."""
    half: float = 150.0
    """A product reaches half of the best rate for each of its dims that is this long."""
    latency: float = 15e-6
    """Of a collective."""
    hop: float = 5e-6
    """Of a collective, for each node after the first."""


RATES = {
    "torchtitan": Rates(0.548, 0.453, 0.237, 0.622, 0.883, 2.0e-5),
    "llm-foundry": Rates(0.578, 0.62, 0.687, 0.792, 0.405, 1.95e-5),
    "nvidia": Rates(0.618, 0.619, 0.43, 0.687, 0.785, 7.3e-6),
    "megatron-2021": Rates(0.833, 0.86, 0.297, 0.729, 0.859, 2.5e-6),
}
"""By software: fitted to the rows of ``tools/published.toml`` that are marked so, by
``python -m tools.published fit``."""


class Seen(NamedTuple):
    """What the published runs of a software cover."""

    devices: tuple[str, ...]
    sequence: int
    sharding: int
    """Ranks of the largest FSDP group."""
    has_adapters: bool = False


SEEN = {
    "torchtitan": Seen(("h100",), 262144, 128, has_adapters=True),
    "llm-foundry": Seen(("h100",), 2048, 512),
    "nvidia": Seen(("h100",), 131072, 128, has_adapters=True),
    "megatron-2021": Seen(("a100",), 32768, 64),
}
WITHIN = (0.86, 1.13)
"""The time over the predicted one, p10 to p90: of the held-out rows."""
OUTSIDE = (0.86, 1.8)
"""The same of the blind rows that are longer than the calibration's, or of another device."""
FLOAT8 = (0.70, 1.29)
"""The same of rows in FP8, with torchtitan's rates: p10 of all of them, of which NVIDIA's are faster, and p90 of
torchtitan's own."""
ADAPTERS = (0.75, 1.67)
"""The same of the six rows with LoRA that have torchtitan's rates: the shortest, on one device, and the longest, in a
pipeline of tensor ranks."""
MEASURED = (0.8, 1.25)
"""The same where rates were measured with ``serried plan calibrate``: assumed."""
FAR = 4
"""Groups of so many times the largest are outside."""


def software_for(device: str) -> str:
    """Return whose rates stand for this software on a device: torch's, or those of Megatron on an A100."""
    return "megatron-2021" if device.startswith("a100") else "torchtitan"
