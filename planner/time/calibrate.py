"""``serried plan calibrate``: measure the compute, memory and network rates of a run's processes and write them to a
file."""

import json
import statistics
import warnings
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from serried.configs.errors import EXIT_FINISHED, UserError
from serried.configs.formats import size
from serried.configs.schema.launch_plan_track import LaunchSection
from serried.launch import probes
from serried.runtime.session import Session, run_in_session

_MOST_SHAPES = 60
Shape = tuple[int, int, int]


def calibrate(section: LaunchSection, out: Path, precision: str, shapes: Sequence[Shape]) -> int:
    """Measure rates on all processes of this start at the same time, and write them to ``out``. Return the exit
    code.

    Args:
        precision: dtype of the matrix products: fp32, bf16 or fp16.
        shapes: (m, n, k) of the matrix products to time, the most expensive first; the same on all ranks.
    """

    def work(session: Session) -> int:
        with warnings.catch_warnings():  # torch deprecates old names of collectives
            warnings.simplefilter("ignore", FutureWarning)
            found = session.gather(measure(session, shapes[:_MOST_SHAPES], precision))

        def write() -> int:
            rates = of_all(found) | {"date": datetime.now(UTC).date().isoformat(), "precision": precision}
            try:
                out.write_text(json.dumps(rates, indent=1) + "\n", "utf-8")
            except OSError as error:
                raise UserError(
                    f"cannot write out={out}: {error.strerror}; use out=FILE in a folder that exists"
                ) from None
            print("\n".join(_lines(rates, out)), flush=True)
            return EXIT_FINISHED

        return int(session.once(write))

    return run_in_session(section, work)


def measure(session: Session, shapes: Sequence[Shape], precision: str) -> dict[str, Any]:
    """Measure the rates of this rank at the same time as all other ranks. This is a collective call."""
    versions = probes.versions()
    session.gather("imported")
    found: dict[str, Any] = {
        "device": probes.device_name(session),
        "type": session.device.type,
        "memory_bytes": probes.memory_bytes(session),
        **{name: versions[name] for name in ("torch", "cuda", "nccl")},
        "processes": session.world_size,
        "per_node": session.local_world_size,
        "products": [[*shape, probes.product_seconds(session, shape, precision)] for shape in shapes],
        "attention": probes.attention_flops(session, precision),
        "memory": probes.copy_bytes_per_second(session),
        "launch": probes.launch_seconds(session),
    }
    session.gather("computed")  # no rank measures the network while another still computes
    return found | _network(session)


def _network(session: Session) -> dict[str, Any]:
    """Measure the bandwidth within a node and, if there are several, between all ranks. This is a collective call."""
    if session.world_size == 1:
        return {"links": None, "network": None, "hidden": 0.0}
    everyone = probes.exchange_rate(session, None)
    local = everyone
    if session.local_world_size < session.world_size and session.local_world_size > 1:
        local = probes.exchange_rate(session, probes.group_of_node(session))
    is_one_node = session.local_world_size == session.world_size
    return {"links": local, "network": None if is_one_node else everyone, "hidden": probes.hidden_share(session)}


def of_all(found: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the median of each rate over all ranks."""
    first = found[0]
    rates = dict(first)
    rates["products"] = [
        [*shape, statistics.median(rank["products"][number][3] for rank in found)]
        for number, (*shape, _) in enumerate(first["products"])
    ]
    for name in ("attention", "memory", "launch", "hidden"):
        rates[name] = statistics.median(rank[name] for rank in found)
    return rates


def _lines(rates: dict[str, Any], out: Path) -> list[str]:
    products, count = rates["products"], rates["processes"]
    best = max(2 * m * n * k / seconds for m, n, k, seconds in products)
    processes = f"{count} process{'es' if count > 1 else ''}, {rates['per_node']} per node"
    lines = [
        ("device", f"{rates['device']}; {processes}; torch {rates['torch']}"),
        ("products", f"{rates['precision']}: {best / 1e9:,.4g} GFLOP/s for the fastest of {len(products)} shapes"),
        ("attention", f"{rates['attention'] / 1e9:,.4g} GFLOP/s"),
        ("memory", f"{size(int(rates['memory']))}/s; {rates['launch'] * 1e6:.1f} us per operation"),
    ]
    for name, what in (("links", "communication within a node"), ("network", "communication of all ranks")):
        if wire := rates[name]:
            rate, of_call = size(int(wire["bytes_per_second"])), 1e6 * wire["seconds"]
            lines.append((name, f"{what}: {rate}/s, {of_call:.0f} us per call"))
    if rates["links"]:
        lines.append(("hidden", f"{rates['hidden']:.0%} of communication is hidden by matrix products"))
    return [*(f"{name:<10} {text}" for name, text in lines), f"written    {out}; use it with plan.rates={out}"]
