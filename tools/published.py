"""Compare planned step times and memory with published runs, which ``published.toml`` lists with their sources.

``python -m tools.published`` prints the tables of docs/evidence/plan-accuracy.md. ``... rows`` prints the time of every
row. ``... fit`` prints rates fitted to the calibration rows, for planner/time/published_rates.py.

For memory, runs of torchtitan are planned as runs of this project with the loss of torchtitan. Figure 1 of Korthikanti
et al. (arXiv 2205.05198) shows Megatron-LM's block, which is traced as a user's module. The memory of a block is
multiplied by the number of blocks that the plan of a pipeline counts.
"""

import math
import sys
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

from serried.configs.compose import compose
from serried.parallel.layout.mesh import Layout, gradient_accumulation, resolve_layout
from serried.parallel.plan import Vocabulary
from serried.parallel.step_phases import FORWARD
from serried.planner.devices import Cluster, device_of
from serried.planner.memory_formula import Sizes, formula_memory, planned_memory, share_of
from serried.planner.step_plan import with_unused
from serried.planner.time.published_rates import RATES, Rates
from serried.planner.time.time_model import Job, Shape, step_of
from serried.planner.trace.trace_recorder import StepTrace
from serried.planner.trace.traced_step import reserved_memory_of, trace_step
from serried.recipes.models.layers.lm_head import HeadLoss, LanguageModelHead
from serried.recipes.text.causal_lm import CausalLM
from serried.trainer.model import build_model

_GIB = 2**30
_FITTED = {
    "products": (0.4, 0.95), "products_8bit": (0.3, 0.9), "attention": (0.15, 0.7), "links": (0.4, 0.9),
    "launch": (2e-6, 2e-5), "memory": (0.4, 0.95),
}  # fmt: skip
"""Fitted rates with their lower and upper bounds."""


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
    """Measured value in ``unit``; None: only the memory is known."""
    memory: float | None = None
    """Memory in GiB of the rank that needs the most."""
    loss: str = ""
    """Implementation of the loss, a key of ``_LOSSES``."""

    def error(self, rates: Rates) -> float:
        """Return the relative error of the predicted rate: positive if it is higher than the measured one."""
        predicted = self.predicted(rates)
        assert self.measured is not None
        return self.measured / predicted - 1 if self.unit == "seconds" else predicted / self.measured - 1

    def predicted(self, rates: Rates) -> float:
        """Return the prediction of the measured value, in ``unit``."""
        job, seconds = self.job, _seconds(self.job, self.cluster, rates)
        tokens = _samples(job) * job.sequence / seconds / job.layout.world
        if self.unit == "seconds":
            return seconds
        if self.unit == "tokens":
            return tokens
        if self.unit == "tflops":
            return tokens * job.shape.flops_per_token(job.sequence) / 1e12
        shape, length = job.shape, job.sequence  # counted as in arXiv 2104.04473, with recomputation
        terms = 1 + length / (6 * shape.dim) + shape.vocab / (16 * shape.layers * shape.dim)
        return tokens * 96 * shape.layers * shape.dim**2 * terms / 1e12


@cache
def _seconds(job: Job, cluster: Cluster, rates: Rates) -> float:
    return step_of(job, cluster, rates).seconds


def rows() -> tuple[Row, ...]:
    """Return the rows of published.toml with a measured time."""
    return tuple(row for row in _all_rows() if row.measured is not None)


def rows_with_memory() -> tuple[Row, ...]:
    """Return the rows of published.toml with a measured memory."""
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


def _samples(job: Job) -> int:
    return job.micro_batch * job.accumulation * job.layout.data_ranks


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
        **{name: row[name] for name in ("precision", "is_flash", "hides_exchanges", "is_adapter") if name in row},
    )  # fmt: skip
    device = device_of(row["device"])
    if "memory_rate" in row:
        device = device._replace(memory_rate=row["memory_rate"])
    return Row(
        row["name"], row["run"], row.get("use", "held out"), row["software"], job, Cluster(device), row["unit"],
        row.get("measured"), row.get("memory"), row.get("loss", ""),
    )  # fmt: skip


class Errors(NamedTuple):
    """Summary of the prediction errors of several rows."""

    rows: int
    median: float
    p90: float
    worst: float
    bias: float
    spearman: float | None
    """Rank correlation between predicted and measured values; None: too few rows."""


def errors(of: Sequence[Row], rates: Mapping[str, Rates] = RATES) -> Errors:
    """Return the summary of the prediction errors for the rows ``of``."""
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
    """Return the rates that fit the calibration rows best, found by small steps from ``start``."""
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
    """Return the errors as a Markdown table: for each group, the rows that are not used for calibration."""
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


# memory ---------------------------------------------------------------------------------------------------------------


class _AllTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden: Tensor, vocabulary: Vocabulary) -> Tensor:  # type: ignore[no-untyped-def]
        ctx.vocabulary = vocabulary
        return vocabulary.tokens(hidden).view(-1, hidden.shape[-1])

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[no-untyped-def]
        return ctx.vocabulary.sum_tokens(gradient), None


class _Compiled(torch.autograd.Function):
    """Cross entropy that keeps the logits in their dtype and computes their gradient in one kernel."""

    @staticmethod
    def forward(ctx, logits: Tensor) -> Tensor:  # type: ignore[no-untyped-def]
        ctx.save_for_backward(logits)
        return logits.new_zeros((), dtype=torch.float32)

    @staticmethod
    def backward(ctx, _: Tensor) -> Tensor:  # type: ignore[no-untyped-def]
        return torch.empty_like(*ctx.saved_tensors)


class _LossParallel(torch.autograd.Function):
    """Loss that holds as many copies of the logits as torch.distributed.tensor.parallel.loss_parallel."""

    @staticmethod
    def forward(ctx, logits: Tensor) -> Tensor:  # type: ignore[no-untyped-def]
        shifted = logits - logits.amax(-1, keepdim=True)
        result = shifted - shifted.exp().sum(-1, keepdim=True).log()
        ctx.save_for_backward(result)
        return result.sum()

    @staticmethod
    def backward(ctx, gradient: Tensor) -> Tensor:  # type: ignore[no-untyped-def]
        (result,) = ctx.saved_tensors
        wanted = torch.zeros_like(result)
        return (wanted + torch.exp(result)) * gradient


def _logits(hidden: Tensor, weight: Tensor, vocabulary: Vocabulary) -> Tensor:
    return _AllTokens.apply(hidden, vocabulary) @ weight.to(hidden.dtype).T


def _eager(hidden: Tensor, weight: Tensor, targets: Tensor, vocabulary: Vocabulary, _: float | None) -> Tensor:
    logits, wanted = _logits(hidden, weight, vocabulary).float(), vocabulary.targets(targets)
    if len(wanted) > 1:
        return _LossParallel.apply(logits)
    return F.cross_entropy(logits, wanted.flatten(), reduction="sum")


def _compiled(hidden: Tensor, weight: Tensor, _: Tensor, vocabulary: Vocabulary, __: float | None) -> Tensor:
    return _Compiled.apply(_logits(hidden, weight, vocabulary))


_LOSSES: dict[str, HeadLoss] = {"eager": _eager, "compiled": _compiled}
"""Losses by name. They hold unsharded logits. With a sharded vocabulary, their memory is right but their values are
not."""


class _WithLoss(CausalLM):
    """Next-token prediction with the loss of the published run."""

    def __init__(self, run: Any, loss: str) -> None:
        self._loss = loss
        super().__init__(run)

    def build_model(self) -> nn.Module:
        model = super().build_model()
        for head in model.modules():
            if isinstance(head, LanguageModelHead):
                head.loss = _LOSSES[self._loss]
        return model


class _Product(torch.autograd.Function):
    """Matrix product of the all-gathered sequence, of which each tensor rank keeps only its shard. Forward only."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, ranks: int) -> Tensor:  # type: ignore[no-untyped-def]
        ctx.save_for_backward(x, weight)
        return x.repeat(1, ranks, 1) @ weight.T


class _MegatronBlock(nn.Module):
    """Shard of Megatron-LM's block on one tensor rank, without biases."""

    def __init__(self, shape: Shape, layout: Layout, *, keeps_scores: bool) -> None:
        super().__init__()
        dim, ranks = shape.dim, layout.tensor
        self._heads, self._keeps_scores = shape.heads // ranks, keeps_scores
        self._parts = ranks if layout.sequence else 1
        self.norms = nn.ModuleList(nn.LayerNorm(dim) for _ in range(2))
        sizes = (3 * dim // ranks, dim), (dim, dim // ranks), (shape.hidden // ranks, dim), (dim, shape.hidden // ranks)
        self.weights = nn.ParameterList(torch.empty(size) for size in sizes)

    def forward(self, x: Tensor) -> Tensor:
        attention_in, attention_out, hidden_in, hidden_out = self.weights
        q, k, v = _Product.apply(self.norms[0](x), attention_in, self._parts).chunk(3, dim=-1)
        heads = [each.unflatten(-1, (self._heads, -1)).transpose(1, 2) for each in (q, k, v)]
        mixed = self._attend(*heads) if self._keeps_scores else checkpoint(self._attend, *heads, use_reentrant=False)
        x = x + _dropped(self._mine(mixed.transpose(1, 2).flatten(2) @ attention_out.T))
        hidden = F.gelu(_Product.apply(self.norms[1](x), hidden_in, self._parts))
        return x + _dropped(self._mine(hidden @ hidden_out.T))

    def _attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return _dropped(torch.softmax(q @ k.transpose(-1, -2), -1)) @ v

    def _mine(self, x: Tensor) -> Tensor:
        return x[:, : x.shape[1] // self._parts].clone() if self._parts > 1 else x


def _dropped(x: Tensor) -> Tensor:
    return torch.native_dropout(x, 0.1, True)[0]  # as on a GPU, where dropout keeps one byte for each element


def _kept_by(row: Row) -> int:
    """Return the bytes that one block of ``row`` keeps for the backward pass."""
    job, peaks = row.job, []
    here = job.sequence // (job.layout.tensor if job.layout.sequence else 1)
    for count in (2, 3):
        with FakeTensorMode(), StepTrace() as trace:
            torch.set_default_dtype(torch.bfloat16)
            blocks = [_MegatronBlock(job.shape, job.layout, keeps_scores=job.recompute == "none") for _ in range(count)]
            torch.set_default_dtype(torch.float32)
            x = torch.empty(job.micro_batch, here, job.shape.dim, dtype=torch.bfloat16, requires_grad=True)
            trace.begin()
            trace.enter(FORWARD)
            for block in blocks:
                x = block(x)
            peaks.append(trace.peak().by_phase[FORWARD])
    return peaks[1] - peaks[0] - sum(each.nbytes for each in blocks[0].parameters())


def _of_figure(row: Row) -> float:
    """Return the bytes on the first stage: 18 per parameter, and the activations that its micro-batches keep."""
    shape, layout = row.job.shape, row.job.layout
    config = compose(["data.tokenizer=bytes"])
    blocks = shape.layers * share_of(config, layout, row.job.accumulation, shape.layers, 0).blocks
    parameters = shape.layers / layout.pipeline * shape.of_dense / layout.tensor
    return 18 * parameters + blocks * _kept_by(row)


def _argv(row: Row) -> tuple[str, ...]:
    job, shape, layout = row.job, row.job.shape, row.job.layout
    sizes = {
        "dim": shape.dim, "layers": shape.layers, "heads": shape.heads, "kv_heads": shape.kv_heads,
        "hidden_dim": shape.hidden, "vocab_size": shape.vocab, "max_sequence_length": job.sequence,
    }  # fmt: skip
    degrees = {axis: getattr(layout, axis) for axis in ("tensor", "context", "pipeline")}
    keys = {
        **{f"model.{key}": value for key, value in sizes.items()},
        **{f"parallel.{axis}": degree for axis, degree in degrees.items()},
        "parallel.pipeline_schedule": layout.schedule,
        "parallel.stages_per_rank": layout.stages // layout.pipeline,
        "trainer.micro_batch": job.micro_batch,
        "trainer.global_batch": _samples(job),
        "trainer.activation_checkpoint": job.recompute,
        "data.sequence_length": job.sequence,
        "data.tokenizer": "bytes",
    }
    # With 8-bit products, nearly the same is kept as with bf16: the rows of torchtitan differ by 0.2 GiB.
    return (
        "model=llama8b",
        "parallel=fsdp",
        "precision=bf16",
        "plan.device=h100",
        "dry_run=true",
        *(f"{key}={keys[key]}" for key in keys),
    )


def _planned(row: Row) -> tuple[float, str]:
    """Return the planned bytes of ``row``, and the method that computed them."""
    if not row.loss:
        return _of_figure(row), "trace of a block"
    return _run_planned(_argv(row), row.job.layout.world, row.loss)


@cache
def _run_planned(argv: tuple[str, ...], ranks: int, loss: str) -> tuple[float, str]:
    config = compose(argv)
    layout = resolve_layout(config.parallel, ranks)
    accumulation = gradient_accumulation(config.trainer, layout)
    if layout.pipeline == 1:
        stages = trace_step(config, _WithLoss(config, loss), layout, accumulation)
        return with_unused(reserved_memory_of(stages, is_expandable=True)).peak, "trace"  # set by its run_train.sh
    task = CausalLM(config)  # its loss needs less, but only on the last rank, which is not the largest
    model = build_model(config, task)
    found = planned_memory(config, task, accumulation, Sizes(config, layout, model.module, model.plan))
    return with_unused(formula_memory(found)).peak, "formula"


def memory_line(row: Row) -> str:
    """Return the row of the Markdown table for ``row``."""
    peak, found = _planned(row)
    return f"| {row.run} | {row.memory:.1f} | {peak / _GIB:.1f} | {memory_error(row):+.0%} | {found} |"


def memory_error(row: Row) -> float:
    """Return the relative error of the planned memory: positive if it exceeds the published memory."""
    assert row.memory is not None
    return _planned(row)[0] / _GIB / row.memory - 1


def memory_table() -> str:
    """Return planned and published memory as a Markdown table."""
    every = rows_with_memory()
    sizes = sorted(abs(memory_error(row)) for row in every)
    within = sum(size <= 0.1 for size in sizes)
    lines = ["| run | published GiB | planned GiB | error | planned by |", "| --- " * 5 + "|", *map(memory_line, every)]
    of_all = f"median {sizes[len(sizes) // 2]:.0%}, worst {sizes[-1]:.0%}"
    return "\n".join([*lines, f"| **all {len(sizes)}** | | | {of_all} | {within} within 10% |"])


# command --------------------------------------------------------------------------------------------------------------


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
    return f"{table()}\n\n{memory_table()}"


if __name__ == "__main__":
    print({"rows": _each, "fit": _fit}.get(" ".join(sys.argv[1:]), _tables)())
