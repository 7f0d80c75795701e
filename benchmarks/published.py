"""Step times and memory against those that others have published.

``python -m benchmarks.published``: the tables of docs/evidence/plan-accuracy.md; ``... rows``: every row's time;
``... fit``: rates that fit the rows marked for calibration, to be written into planner/published_rates.py.
"""

import math
import sys
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from serried.parallel.layout.mesh import Layout
from serried.planner.devices import Cluster, device_of
from serried.planner.published_rates import RATES, Rates
from serried.planner.time_model import Job, Shape, step_of

_FITTED = {
    "products": (0.4, 0.95), "products_8bit": (0.3, 0.9), "attention": (0.15, 0.7), "links": (0.4, 0.9),
    "launch": (2e-6, 2e-5), "memory": (0.4, 0.95),
}  # fmt: skip
"""With the bounds of each."""


class Row(NamedTuple):
    """A published run."""

    group: str
    run: str
    use: str
    software: str
    job: Job
    cluster: Cluster
    unit: str
    measured: float | None
    """Of time; None: memory alone is known."""
    memory: float | None = None
    """GiB of the rank that needs the most."""
    loss: str = ""
    """How the run computed it."""

    def error(self, rates: Rates) -> float:
        """Return by which share the predicted rate exceeds the measured one."""
        predicted = self.predicted(rates)
        assert self.measured is not None
        return self.measured / predicted - 1 if self.unit == "seconds" else predicted / self.measured - 1

    def predicted(self, rates: Rates) -> float:
        """Return what was measured, as predicted."""
        job, seconds = self.job, _seconds(self.job, self.cluster, rates)
        tokens = job.samples * job.sequence / seconds / job.layout.world
        if self.unit == "seconds":
            return seconds
        if self.unit == "tokens":
            return tokens
        if self.unit == "tflops":
            return tokens * job.shape.flops_per_token(job.sequence) / 1e12
        shape, length = job.shape, job.sequence  # as arXiv 2104.04473 counts them, with recomputation
        terms = 1 + length / (6 * shape.dim) + shape.vocab / (16 * shape.layers * shape.dim)
        return tokens * 96 * shape.layers * shape.dim**2 * terms / 1e12


@cache
def _seconds(job: Job, cluster: Cluster, rates: Rates) -> float:
    return step_of(job, cluster, rates).seconds


def rows() -> tuple[Row, ...]:
    """Return those of published.toml that have a time."""
    return tuple(row for row in _all_rows() if row.measured is not None)


def rows_with_memory() -> tuple[Row, ...]:
    """Return those that have a memory."""
    return tuple(row for row in _all_rows() if row.memory is not None)


@cache
def _all_rows() -> tuple[Row, ...]:
    data = tomllib.loads(Path(__file__).with_name("published.toml").read_text("utf-8"))
    shapes = {name: _shape(sizes) for name, sizes in data["models"].items()}
    known = [{**group, **row} for group in data["groups"] for row in group["rows"]]
    return tuple(_row(row, shapes[row["model"]]) for row in known)


def _shape(sizes: Mapping[str, Any]) -> Shape:
    if "hidden" in sizes:
        return Shape(**sizes)
    dim, heads = sizes["dim"], sizes["heads"]
    return Shape(hidden=4 * dim, kv_heads=heads, head_dim=dim // heads, is_gated=False, is_tied=True, **sizes)


def _row(row: Mapping[str, Any], shape: Shape) -> Row:
    degrees = {axis: row.get(axis, 1) for axis in ("pipeline", "context", "tensor")}
    data = row["ranks"] // math.prod(degrees.values())
    zero, per_rank = row.get("zero", 3), row.get("stages_per_rank", 1)
    layout = Layout(
        "fsdp" if zero else "hsdp", **degrees, **({"shard": data} if zero else {"replicate": data}),
        sequence=row.get("sequence_parallel", True), stages=degrees["pipeline"] * per_rank,
        schedule="1f1b" if per_rank == 1 else "interleaved",
    )  # fmt: skip
    micro_batch = row.get("micro_batch", 1)
    job = Job(
        shape, layout, row["sequence"], micro_batch, row["batch"] // (micro_batch * data), row.get("recompute", "none"),
        is_fused=row.get("is_fused", True), frees_after_forward=zero == 3,
        **{name: row[name] for name in ("precision", "is_flash", "hides_exchanges") if name in row},
    )  # fmt: skip
    device = device_of(row["device"])
    if "memory_rate" in row:
        device = device._replace(memory_rate=row["memory_rate"])
    return Row(
        row["name"], row["run"], row.get("use", "held out"), row["software"], job, Cluster(device), row["unit"],
        row.get("measured"), row.get("memory"), row.get("loss", ""),
    )  # fmt: skip


class Errors(NamedTuple):
    """Of several rows."""

    rows: int
    median: float
    p90: float
    worst: float
    bias: float
    spearman: float | None
    """Between the seconds predicted and measured; None: too few rows."""


def errors(of: Sequence[Row], rates: Mapping[str, Rates] = RATES) -> Errors:
    """Return how far the predictions are off."""
    signed = [row.error(rates[row.software]) for row in of]
    sizes = sorted(abs(error) for error in signed)
    pairs = [(row.predicted(rates[row.software]), row.measured or 0.0) for row in of]
    return Errors(
        len(of), sizes[len(of) // 2], sizes[int(0.9 * len(of))], sizes[-1], sum(signed) / len(of),
        spearman(pairs) if len(of) > 2 else None,
    )  # fmt: skip


def spearman(pairs: Sequence[tuple[float, float]]) -> float:
    """Return the rank correlation of two columns."""
    first, second = ([sorted(column).index(each) for each in column] for column in zip(*pairs, strict=True))
    mean = (len(pairs) - 1) / 2
    return sum((a - mean) * (b - mean) for a, b in zip(first, second, strict=True)) / math.sqrt(
        sum((a - mean) ** 2 for a in first) * sum((b - mean) ** 2 for b in second)
    )


def fitted(start: Mapping[str, Rates]) -> dict[str, Rates]:
    """Return rates with which the calibration rows fit best, from ``start`` by small steps."""
    found = dict(start)
    for software in found:
        marked = [row for row in rows() if row.use == "calibration" and row.software == software]

        def misfit(rates: Rates, marked: Sequence[Row] = marked) -> float:
            return sum(math.log1p(row.error(rates)) ** 2 for row in marked)

        best = misfit(found[software])
        for _ in range(60):
            for name, factor in ((name, factor) for name in _FITTED for factor in (0.97, 1.03)):
                value = getattr(found[software], name) * factor
                changed = found[software]._replace(**{name: value})
                if _FITTED[name][0] <= value <= _FITTED[name][1] and (now := misfit(changed)) < best:
                    best, found[software] = now, changed
    return found


def table(rates: Mapping[str, Rates] = RATES) -> str:
    """Return the errors as Markdown: of each group's rows that take no part in the calibration, misses included."""
    lines = ["| rows | number | median error | p90 | worst | bias | rank correlation |", "| --- " * 7 + "|"]
    for name, of in _parts():
        found = errors(of, rates)
        correlation = "" if found.spearman is None else f"{found.spearman:.2f}"
        lines.append(
            f"| {name} | {found.rows} | {found.median:.1%} | {found.p90:.0%} | {found.worst:.0%} | "
            f"{found.bias:+.0%} | {correlation} |"
        )
    return "\n".join(lines)


def _parts() -> Iterator[tuple[str, list[Row]]]:
    yield "calibration", [row for row in rows() if row.use == "calibration"]
    for group in dict.fromkeys(row.group for row in rows()):
        yield group, [row for row in rows() if row.group == group and row.use != "calibration"]
    for use in ("held out", "blind"):
        yield f"**all {use}**", [row for row in rows() if row.use == use]


def _each() -> str:
    return "\n".join(
        f"{row.group[:18]:18} {row.run[:34]:34} {row.use[:5]:5} {row.measured:9.1f} "
        f"{row.predicted(RATES[row.software]):9.1f} {row.error(RATES[row.software]):+7.1%}"
        for row in rows()
    )


def _fit() -> str:
    found = fitted(RATES)
    return "\n".join([*(f"{name}: {rates}" for name, rates in found.items()), table(found)])


def _tables() -> str:
    from benchmarks import published_memory

    return f"{table()}\n\n{published_memory.table()}"


if __name__ == "__main__":
    print({"rows": _each, "fit": _fit}.get(" ".join(sys.argv[1:]), _tables)())
