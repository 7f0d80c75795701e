"""Train the same run on every parallel layout and compare.

``python -m benchmarks.parity`` rewrites ``docs/evidence/parity.md``.

The runs are those of ``tests/ranks/test_parity.py``: whole training runs on Gloo with ragged masks and a vocabulary of
257.
"""

import argparse
import itertools
import platform
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from serried.verify.layouts import COMPILED, MIXTURE
from testing.rank_pool import Cluster
from testing.runs import metrics, overrides, write_text

STEPS, GLOBAL_BATCH = 20, 36
ACCUMULATIONS = (1, 3)
RING, TENSOR = "parallel.context_method=ring", "parallel.tensor=2"
SELECTIVE = "trainer.activation_checkpoint=selective"


@dataclass(frozen=True)
class Cut:
    """One parallel layout."""

    name: str
    processes: int
    overrides: tuple[str, ...]
    data_ranks: int | None = None
    """Ranks that see different samples; None: all."""
    accumulations: tuple[int, ...] = ACCUMULATIONS
    """Micro-batches of a step, in one run each."""
    is_slow: bool = False
    """Whether ``make test`` leaves it out."""
    micro_batch: int | None = None
    """Samples of a micro-batch, if ranks train different numbers of them; ``accumulations`` then has the most."""


def pipeline(
    name: str, ranks: int, *more: str, others: int = 1, data_ranks: int | None = None, accumulation: int = 4,
    is_slow: bool = True,
) -> Cut:  # fmt: skip
    """Return a pipeline of ``ranks``; ``more`` divide the work over ``others`` ranks too, by default data ranks."""
    overrides = dict(each.split("=", 1) for each in ("parallel=fsdp", f"parallel.pipeline={ranks}", *more))
    argv = tuple(f"{key}={value}" for key, value in overrides.items())
    return Cut(f"pipeline {name}", ranks * others, argv, data_ranks or others, (accumulation,), is_slow)


def uneven(name: str, ranks: int, most: int, micro_batch: int, *more: str, is_slow: bool = True) -> Cut:
    """Return a layout whose replicas train ``most`` micro-batches or one less."""
    argv = (*more, "parallel.uneven=true")
    return Cut(f"{name}, uneven", ranks, argv, None, (most,), is_slow, micro_batch)


REPLICAS = ("parallel=hsdp", "parallel.replicate=2")
CUTS = (
    Cut("single", 1, ("parallel=single",)),
    Cut("ddp x2", 2, ("parallel=ddp",)),
    Cut("fsdp x2 (ZeRO-3)", 2, ("parallel=fsdp",)),
    Cut("fsdp x2 (ZeRO-2)", 2, ("parallel=fsdp", "parallel.reshard_after_forward=false")),
    Cut("fsdp x2, sync each micro-batch", 2, ("parallel=fsdp", "parallel.sync_every_micro_batch=true")),
    Cut("ddp x3", 3, ("parallel=ddp",), is_slow=True),
    Cut("fsdp x3", 3, ("parallel=fsdp",), is_slow=True),
    Cut("hsdp 2x2", 4, ("parallel=hsdp", "parallel.replicate=2"), is_slow=True),
    uneven("ddp x3", 3, 2, 9, "parallel=ddp", is_slow=False),
    uneven("ddp x5", 5, 3, 3, "parallel=ddp"),
    uneven("hsdp 2x2", 4, 5, 2, *REPLICAS),
    uneven("hsdp 4x2", 8, 2, 3, "parallel=hsdp", "parallel.replicate=4"),
    uneven("tensor x2 x replicate x2", 4, 5, 4, *REPLICAS, TENSOR),
    uneven("pipeline x2 x replicate x2", 4, 5, 4, *REPLICAS, "parallel.pipeline=2"),
    uneven("context x2 x ddp x2", 4, 5, 4, "parallel=ddp", "parallel.context=2"),
    Cut("tensor x2", 2, ("parallel=fsdp", TENSOR), 1),
    Cut("tensor x2, whole stream", 2, ("parallel=fsdp", TENSOR, "parallel.sequence=false"), 1, (3,), True),
    Cut("tensor x2 x fsdp x2", 4, ("parallel=fsdp", TENSOR), 2, (3,), True),
    Cut("tensor x2 x replicate x2", 4, ("parallel=hsdp", "parallel.replicate=2", TENSOR), 2, (3,), True),
    pipeline("x2, 1f1b", 2, is_slow=False),
    pipeline("x2, zbv", 2, "parallel.pipeline_schedule=zbv", is_slow=False),
    *(
        pipeline(f"x2, {schedule}", 2, f"parallel.pipeline_schedule={schedule}")
        for schedule in ("gpipe", "interleaved", "looped_bfs", "interleaved_zero_bubble", "dualpipev")
    ),
    pipeline("x2, layers 3 + 1", 2, "parallel.layers_of_stages=[3,1]"),
    pipeline("x3, layers 2 + 1 + 1", 3),
    pipeline("x4", 4),
    pipeline("x2 x fsdp x2", 2, others=2, accumulation=6, is_slow=False),
    pipeline("x2, zbv x fsdp x2", 2, "parallel.pipeline_schedule=zbv", others=2, accumulation=6),
    pipeline("x2 x replicate x2", 2, "parallel=hsdp", "parallel.replicate=2", others=2, accumulation=6),
    Cut("context x2", 2, ("parallel=fsdp", "parallel.context=2"), 1, (3,)),
    Cut("context x2, ring", 2, ("parallel=fsdp", "parallel.context=2", RING), 1, (3,), is_slow=True),
    Cut("context x3", 3, ("parallel=fsdp", "parallel.context=3"), 1, (3,), is_slow=True),
    Cut("context x4, ring", 4, ("parallel=fsdp", "parallel.context=4", RING), 1, (3,), is_slow=True),
    Cut("context x2 x fsdp x2", 4, ("parallel=fsdp", "parallel.context=2"), 2, (3,), is_slow=True),
    Cut("context x2 x ddp x2", 4, ("parallel=ddp", "parallel.context=2"), 2, (3,), is_slow=True),
    Cut("context x2 x tensor x2", 4, ("parallel=fsdp", "parallel.context=2", TENSOR), 1, (3,), is_slow=True),
    Cut("context x2 x tensor x2 x fsdp x2", 8, ("parallel=fsdp", "parallel.context=2", TENSOR), 2, (3,), is_slow=True),
    pipeline("x2 x tensor x2", 2, TENSOR, others=2, data_ranks=1),
    pipeline("x2, zbv x tensor x2", 2, TENSOR, "parallel.pipeline_schedule=zbv", others=2, data_ranks=1),
    pipeline("x2 x tensor x2 x fsdp x2", 2, TENSOR, others=4, data_ranks=2, accumulation=6),
    pipeline("x2 x context x2", 2, "parallel.context=2", others=2, data_ranks=1),
    pipeline(
        "x2, zbv x context x2", 2, "parallel.pipeline_schedule=zbv", "parallel.context=2", RING, others=2, data_ranks=1
    ),
    pipeline("x2 x context x2 x fsdp x2", 2, "parallel.context=2", others=4, data_ranks=2, accumulation=6),
    Cut("single, compiled", 1, ("parallel=single", COMPILED), 1, (3,), is_slow=True),
    Cut("ddp x2, compiled", 2, ("parallel=ddp", COMPILED), 2, (3,), is_slow=True),
    Cut("fsdp x2, compiled", 2, ("parallel=fsdp", COMPILED), 2, (3,), is_slow=True),
    Cut("fsdp x2, compiled, selective", 2, ("parallel=fsdp", COMPILED, SELECTIVE), 2, (3,), is_slow=True),
    Cut("tensor x2, compiled", 2, ("parallel=fsdp", TENSOR, COMPILED), 1, (3,), is_slow=True),
    Cut("context x2, compiled", 2, ("parallel=fsdp", "parallel.context=2", COMPILED), 1, (3,), is_slow=True),
    pipeline("x2, 1f1b, compiled", 2, COMPILED),
)
BORDER = ("precision.growth_interval=2", "precision.initial_scale=4194304")
"""fp16 whose loss scale always returns to where gradients overflow."""


def experts(
    name: str, ranks: int, *more: str, expert: int = 2, data_ranks: int | None = None, is_slow: bool = True
) -> Cut:
    """Return a layout of ``ranks`` with experts over ``expert`` of them."""
    overrides = dict(each.split("=", 1) for each in ("parallel=fsdp", f"parallel.expert={expert}", *more))
    argv = tuple(f"{key}={value}" for key, value in overrides.items())
    accumulation = 6 if "parallel.pipeline" in overrides else 3
    return Cut(f"expert x{expert}{name}", ranks, argv, data_ranks or ranks, (accumulation,), is_slow)


EXPERT_CUTS = (
    CUTS[0],
    Cut("ddp x2", 2, ("parallel=ddp",), 2, (3,), True),
    Cut("fsdp x2 (ZeRO-3)", 2, ("parallel=fsdp",), 2, (3,), True),
    Cut("tensor x2", 2, ("parallel=fsdp", TENSOR), 1, (3,), True),
    experts("", 2, is_slow=False),
    experts(", compiled", 2, COMPILED),
    experts("", 4, expert=4),
    experts(", sharded x2", 4),
    experts(", sharded x3 along dim 1", 6),
    experts(" x replicate x2", 4, "parallel=hsdp", "parallel.replicate=2"),
    uneven("expert x2 x replicate x2", 4, 5, 2, *REPLICAS, "parallel.expert=2"),
    experts(" x context x2", 2, "parallel.context=2", data_ranks=1),
    experts(" x tensor x2", 2, TENSOR, data_ranks=1),
    experts(" x tensor x2 x fsdp x2", 4, TENSOR, expert=4, data_ranks=2),
    experts(" x pipeline x2", 4, "parallel.pipeline=2", data_ranks=2),
    experts(" x pipeline x2, zbv", 4, "parallel.pipeline=2", "parallel.pipeline_schedule=zbv", data_ranks=2),
    experts(" x pipeline x2 x tensor x2", 4, "parallel.pipeline=2", TENSOR, data_ranks=1),
    experts(" x pipeline x2 x tensor x2 x fsdp x2", 8, "parallel.pipeline=2", TENSOR, expert=4, data_ranks=2),
)
"""Layouts of a mixture of experts."""
TIED, GPT2 = ("model.tie_embeddings=true",), ("model=gpt2", "model.max_sequence_length=64", "model.tie_embeddings=true")
TIED_NAMES = (
    "fsdp x2 (ZeRO-3)", "tensor x2", "tensor x2, whole stream", "pipeline x2, 1f1b", "pipeline x2, zbv", "context x2",
    "pipeline x2 x tensor x2 x fsdp x2", "context x2 x tensor x2 x fsdp x2",
)  # fmt: skip
"""Layouts of the rows with tied embeddings, and of those of GPT-2."""
TIED_CUTS = (CUTS[0], *(cut for cut in CUTS if cut.name in TIED_NAMES))
MUON = ("optim=muon",)
MUON_CUTS = tuple(
    cut
    for cut in CUTS
    if cut.name
    in ("ddp x2", "fsdp x2 (ZeRO-3)", "tensor x2", "pipeline x2, 1f1b", "hsdp 2x2", "tensor x2 x fsdp x2", "context x2")
)
MUON_EXPERT_CUTS = tuple(cut for cut in EXPERT_CUTS if cut.name in ("expert x2", "expert x2, sharded x2"))
"""Layouts of the rows with Muon."""
_WHOLE_BLOCKS = "model.hidden_dim=64"
"""Divided by two it has whole blocks of codes."""
BF16 = "precision=bf16"
OPTIMIZERS = {
    "adam": (),
    "lion": ("optim.lr=0.0005",),
    "sgd": ("optim.lr=0.1",),
    "rmsprop": ("optim.lr=0.001",),
    "adafactor": ("optim.lr=0.05",),
    "adamw8bit": (_WHOLE_BLOCKS,),
    "adamw4bit": (_WHOLE_BLOCKS,),
    "adamw_bf16": (BF16,),
}
OPTIMIZER_CUTS = tuple(
    cut for cut in CUTS if cut.name in ("fsdp x2 (ZeRO-3)", "tensor x2 x fsdp x2", "pipeline x2 x fsdp x2")
)
"""Layouts of the rows with other optimizers."""
OPTIMIZER_EXPERT_CUTS = tuple(cut for cut in EXPERT_CUTS if cut.name == "expert x2, sharded x2")
TOLERANCES = {"fp32": 1e-5, "bf16": 3e-2, "fp16": 5e-3}
"""Largest relative difference of loss and gradient norm from the single process of the same precision."""


@dataclass(frozen=True)
class Curve:
    """What a run came to."""

    losses: list[float]
    grad_norms: list[float]
    sample_ids: list[list[int]]
    """Per step, sorted."""
    skipped: list[int]
    """Steps that overflowed fp16."""
    expert_tokens: list[Any]
    """Per step and layer with experts: the fewest and the most tokens of an expert, and those of all."""


@dataclass(frozen=True)
class Difference:
    """Largest relative differences over all steps."""

    loss: float
    grad_norm: float
    same_samples: bool
    """And the same tokens for the experts."""


def run(
    cluster: Cluster,
    cut: Cut,
    accumulation: int,
    precision: str,
    text: Path,
    run_dir: Path,
    *more: str,
    steps: int = 6,
    fault: dict[str, Any] | None = None,
) -> Curve:
    """Train the first ``steps`` of ``STEPS``.

    The tests train fewer than the table: a wrong gradient shows in the second step. ``fault`` multiplies gradients, as
    ``testing.runs.ObservedRecipe`` takes it.
    """
    micro_batch = cut.micro_batch or GLOBAL_BATCH // (cut.data_ranks or cut.processes) // accumulation
    argv = overrides(
        text, run_dir, *cut.overrides, f"precision={precision}", f"trainer.steps={STEPS}",
        f"trainer.global_batch={GLOBAL_BATCH}", f"trainer.micro_batch={micro_batch}",
        f"trainer.stop_at={steps}", "model.layers=4", "data.sequence_length=24", *more,
    )  # fmt: skip
    patience = 900 if COMPILED in argv else 120
    answers = cluster.run(cut.processes, "testing.runs:train_small", patience, argv=argv, ragged=True, fault=fault)
    lines = metrics(run_dir)
    ids = [
        sorted(
            sample
            for micro_batches in (answer.value["sample_ids"] for answer in answers)
            for micro in micro_batches[step * len(micro_batches) // steps : (step + 1) * len(micro_batches) // steps]
            for sample in micro
        )
        for step in range(steps)
    ]
    assert [line["step"] for line in lines] == list(range(1, steps + 1))
    skipped = [line["step"] for line in lines if line["skipped"]]
    assert not skipped or more[-len(BORDER) :] == BORDER
    # The norm of a step that overflowed is not a number.
    norms, expert_tokens = [line["grad_norm"] or 1.0 for line in lines], [line.get("expert_tokens") for line in lines]
    return Curve([line["loss"] for line in lines], norms, ids, skipped, expert_tokens)


def compare(curve: Curve, reference: Curve) -> Difference:
    """How far ``curve`` is from ``reference``."""

    def largest(ours: list[float], theirs: list[float]) -> float:
        return max(abs(a - b) / abs(b) for a, b in zip(ours, theirs, strict=True))

    return Difference(
        largest(curve.losses, reference.losses),
        largest(curve.grad_norms, reference.grad_norms),
        (curve.sample_ids, curve.expert_tokens) == (reference.sample_ids, reference.expert_tokens),
    )


_TABLES: tuple[tuple[str, str, tuple[str, ...], tuple[Cut, ...]], ...] = (
    ("fp32", "", (), CUTS),
    *((precision, "", (), tuple(cut for cut in CUTS if cut.processes <= 2)) for precision in ("bf16", "fp16")),
    ("fp32", "tied: ", TIED, TIED_CUTS),
    ("fp32", "gpt2: ", GPT2, TIED_CUTS),
    ("fp32", "experts: ", MIXTURE, EXPERT_CUTS),  # in a low type rounding may choose other experts for a token
    ("fp32", "muon: ", MUON, MUON_CUTS),
    ("fp32", "muon, experts: ", (*MIXTURE, *MUON), MUON_EXPERT_CUTS),
    *(
        ("bf16" if BF16 in more else "fp32", f"{name}: ", (f"optim={name}", *more), OPTIMIZER_CUTS)
        for name, more in OPTIMIZERS.items()
    ),
    ("fp32", "adafactor, experts: ", (*MIXTURE, "optim=adafactor", "optim.lr=0.05"), OPTIMIZER_EXPERT_CUTS),
)


@contextmanager
def _runs(processes: int) -> Iterator[Callable[..., Curve]]:
    """Yield ``run`` for all steps, with a cluster, a text and a run folder of its own."""
    with tempfile.TemporaryDirectory(prefix="serried-parity-") as folder:
        text, cluster, numbers = write_text(Path(folder) / "text"), Cluster(processes), itertools.count()

        def run_all(cut: Cut, accumulation: int, precision: str, *more: str) -> Curve:
            run_dir = Path(folder) / f"run-{next(numbers)}"
            return run(cluster, cut, accumulation, precision, text, run_dir, *more, steps=STEPS)

        try:
            yield run_all
        finally:
            cluster.stop()


def table() -> str:
    """Run everything and lay it out as Markdown."""
    rows: list[Any] = []
    with _runs(8) as run_all:
        for precision, prefix, model, layouts in _TABLES:
            reference = run_all(CUTS[0], 1, precision, *model)
            rows.append((precision, f"{prefix}single", 1, None, reference))
            print(_row(*rows[-1]), flush=True)
            for cut in layouts:
                for accumulation in cut.accumulations:
                    if cut.processes == 1 and accumulation == 1:
                        continue
                    curve = run_all(cut, accumulation, precision, *model)
                    rows.append((precision, f"{prefix}{cut.name}", accumulation, compare(curve, reference), curve))
                    print(_row(*rows[-1]), flush=True)
    lines = [
        "| precision | layout | accumulation | loss, first to last | relative difference: loss | grad norm | samples |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    return "\n".join([*lines, *(_row(*row) for row in rows)])


def _row(precision: str, name: str, accumulation: int, difference: Difference | None, curve: Curve) -> str:
    ends, compared = f"{curve.losses[0]:.6f} to {curve.losses[-1]:.6f}", "reference | reference | reference"
    if difference is not None:
        same = "same" if difference.same_samples else "DIFFERENT"
        compared = f"{difference.loss:.1e} | {difference.grad_norm:.1e} | {same}"
    return f"| {precision} | {name} | {accumulation} | {ends} | {compared} |"


def border_table() -> str:
    """Compare which steps overflow in fp16."""
    lines = ["| layout | accumulation | skipped steps | relative difference: loss |", "| --- | --- | --- | --- |"]
    with _runs(4) as run_all:
        reference = run_all(CUTS[0], 1, "fp16", *BORDER)
        lines.append(f"| single | 1 | {', '.join(map(str, reference.skipped))} | reference |")
        print(lines[-1], flush=True)
        for cut in (cut for cut in CUTS if not cut.is_slow):
            curve = run_all(cut, cut.accumulations[-1], "fp16", *BORDER)
            skipped = "the same" if curve.skipped == reference.skipped else ", ".join(map(str, curve.skipped))
            loss = f"{compare(curve, reference).loss:.1e}"
            lines.append(f"| {cut.name} | {cut.accumulations[-1]} | {skipped} | {loss} |")
            print(lines[-1], flush=True)
    return "\n".join(lines)


_BORDER = """

## fp16 near overflow

The same run with a loss scale that starts at 2^22 and doubles after two good steps, so that gradients overflow
repeatedly. Weight gradients are summed in fp32 (`parallel/fp16_weight_gradients.py`), so only the gradient of one
token's activations can overflow, and the same steps are skipped on every layout. Its rounding may depend on the
layout: if its largest value is within one unit in the last place of 65,504, layouts could still decide differently.

"""

_HEAD = """# Parity: the same loss curve on every parallel layout

Largest difference of each layout from one process, over a whole training run. `python -m benchmarks.parity` writes
this page (torch {torch}, Python {python}, Gloo on CPU); `tests/ranks/test_parity.py` enforces the bounds.

Each row is a training run through `trainer.train`, compared at every step with the single process of the same
precision: {steps} optimizer steps, global batch {batch}, sequences of 24 tokens, 4 layers, vocabulary 257 (which no
number of ranks here divides), untied embeddings, ragged loss masks, clipping at norm 1, AdamW with warm-up. Before it
saves, each run compares all copies of weights and optimizer state bitwise.

- Bounds: fp32 1e-5, bf16 3e-2, fp16 5e-3. A bf16 or fp16 row shows rounding of the low-precision type and could not
  reveal a lost gradient; fp32 rows do.
- "tied": tied embeddings. "gpt2": GPT-2 with tied embeddings.
- "experts": a mixture of 8 experts; each token passes through 2 of them. "same" then also means that every layer
  sent exactly as many tokens to its most and its least loaded expert in every step.
- "uneven": `parallel.uneven=true`; the replicas train different numbers of micro-batches, and the column
  "accumulation" has the most.
- "compiled": `trainer.compile=true`; the reference is not compiled.
- The name of an optimizer: the row and its reference use that `optim`. The bound is 1e-3 for `adamw8bit` and
  `adamw4bit`, because rounding may change a code of their state by one, and 5e-3 for `adamw_bf16`, which computes in
  bf16.

At the edge of stability every run amplifies rounding, in any framework. With `optim.lr=0.01` instead of 0.003 this
run spikes at step 7 (gradient norm 7.5), and rows differ by up to 1.4e-5 in the norm and 4.5e-7 in the loss.

A ReLU amplifies rounding at its kink: an input that rounding moves across zero has another gradient. In a CNN with
GroupNorm and ReLU on MNIST-1D, one of 81,600 inputs of step 5 was 4.9e-8 on one process and -1.1e-8 with `ddp` x2.
The gradient norm differed by 1.4e-4, and the loss by 4.3e-4 at step 9. With the same ReLUs active, the norms of both
agree to 1e-9. In fp64 (`.double()` on model and inputs) all 120 steps agree to 1e-15 in the loss. To compare layouts of
such a model, train it in fp64 or with a smooth activation;
`tests/ranks/models/test_foreign_modules.py` trains one in fp64.

On torch 2.11, 20 fp32 rows with one and several axes (tensor, context by gather and by ring, pipelines of all
schedules that it has, experts) stay within 1.6e-7 in the loss and 4.5e-7 in the norm; `interleaved_zero_bubble`,
`zbv` and `dualpipev` are refused there.

"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", type=Path, default=Path("docs/evidence/parity.md"), help="where to write the table")
    parser.add_argument("--border", action="store_true", help="measure only the last section again")
    arguments = parser.parse_args()
    path: Path = arguments.write
    if arguments.border:
        before = path.read_text().partition(_BORDER)[0].rstrip("\n")
    else:
        head = _HEAD.format(torch=torch.__version__, python=platform.python_version(), steps=STEPS, batch=GLOBAL_BATCH)
        before = head + table()
    path.write_text(before + _BORDER + border_table() + "\n")
    print(f"wrote {path}")


if __name__ == "__main__":
    main()
