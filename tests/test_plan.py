"""``serried plan``: the trace of a step against the formula, and against what a real run allocates and sends."""

import re
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest

from benchmarks.published import rows_with_memory
from benchmarks.published_memory import error as memory_error
from benchmarks.published_memory import line as memory_line
from harness.cluster import ROOT, Cluster
from serried.configs.compose import compose
from serried.configs.schema import RunConfig
from serried.parallel.mesh import Layout, gradient_accumulation, resolve_layout
from serried.parallel.traffic import Flow
from serried.program import main
from serried.recipes.causal_lm import CausalLM
from serried.trainer.model import build_model
from serried.trainer.plan.devices import device_of
from serried.trainer.plan.memory import FormulaMemory, formula_memory, planned_flows, planned_memory
from serried.trainer.plan.parts import Fits, Work
from serried.trainer.plan.show import plan_lines
from serried.trainer.plan.step_plan import RESERVED_BYTES, fits_of, plan_step
from serried.trainer.plan.traced import TracedStage, _Tracer, flows_of, memory_of, trace_step

SHORT = [
    "model=llama8b", "model.layers=3", "model.vocab_size=128256", "data.sequence_length=4096", "precision=bf16",
    "trainer.micro_batch=1", "trainer.global_batch=32",
]  # fmt: skip
SMALL = ["model.dim=512", "model.heads=8", "model.hidden_dim=1536", "model.vocab_size=4096"]
LAYOUTS = {
    "one process": (1, ["parallel=single"]),
    "one process, fp32": (1, ["parallel=single", "precision=fp32"]),
    "ddp": (4, ["parallel=ddp"]),
    "fsdp, reduced once": (8, ["parallel=fsdp"]),
    "fsdp, one micro-batch": (8, ["parallel=fsdp", "trainer.global_batch=8"]),
    "fsdp, reduced each time": (8, ["parallel=fsdp", "parallel.sync_every_micro_batch=true"]),
    "fsdp, stays gathered": (8, ["parallel=fsdp", "parallel.reshard_after_forward=false"]),
    "fsdp, one unit": (8, ["parallel=fsdp", "launch.device=cpu", *SMALL, "trainer.global_batch=8"]),
    "fsdp, selective": (8, ["parallel=fsdp", "trainer.activation_checkpoint=selective"]),
    "fsdp, budget": (8, ["parallel=fsdp", "trainer.activation_memory_budget=0.6"]),
    "fsdp, weights in bf16": (8, ["parallel=fsdp", "optim=adamw_bf16"]),
    "fsdp, weights in bf16, reduced each time": (
        8,
        ["parallel=fsdp", "optim=adamw_bf16", "parallel.sync_every_micro_batch=true"],
    ),
    "ddp, weights in bf16": (4, ["parallel=ddp", "optim=adamw_bf16"]),
    "hsdp": (8, ["parallel=hsdp", "parallel.replicate=2"]),
    "tensor": (8, ["parallel=fsdp", "parallel.tensor=4"]),
    "context": (8, ["parallel=fsdp", "parallel.context=4"]),
    "pipeline": (4, ["parallel=fsdp", "parallel.pipeline=2", "model.layers=4"]),
    "pipeline, budget": (
        4,
        ["parallel=fsdp", "parallel.pipeline=2", "model.layers=6", "trainer.activation_memory_budget=0.3"],
    ),
    "micro-batches of 4": (8, ["parallel=fsdp", "trainer.micro_batch=4"]),
    "full, tensor": (8, ["parallel=fsdp", "parallel.tensor=4", "trainer.activation_checkpoint=full"]),
    "adapters": (8, ["parallel=fsdp", "adapter=lora"]),
    "adapters, full": (8, ["parallel=fsdp", "adapter=lora", "trainer.activation_checkpoint=full"]),
}


def config_of(*argv: str, processes: int) -> tuple[RunConfig, CausalLM, Layout, int]:
    config = compose([*SHORT, *argv])
    layout = resolve_layout(config.parallel, processes)
    return config, CausalLM(config), layout, gradient_accumulation(config.trainer, layout)


def both(*argv: str, processes: int) -> tuple[list[TracedStage], FormulaMemory, tuple[Flow, ...]]:
    config, task, layout, accumulation = config_of(*argv, processes=processes)
    stages = trace_step(config, task, layout, accumulation)
    model = build_model(config, task)
    formula = planned_memory(config, task, layout, accumulation, model.module, model.plan)
    return stages, formula, planned_flows(config, layout, accumulation, model.module, model.plan)


def sent(flows: Sequence[Flow], *axes: str) -> dict[tuple[str, str, str], tuple[int, int]]:
    """Bytes and calls, without sums of a few numbers over all ranks."""
    found = {(each.axis, each.kind, each.when): (each.bytes, each.calls) for each in flows if each.axis in axes}
    return {key: each for key, each in found.items() if each[0] > 1000}


@pytest.mark.slow
@pytest.mark.parametrize("name", LAYOUTS)
def test_the_formula_is_at_most_3_percent_above_the_trace_and_never_below(name: str) -> None:
    processes, argv = LAYOUTS[name]
    stages, formula, flows = both(*argv, processes=processes)
    assert 1 <= formula.total / memory_of(stages).peak < 1.03
    # Traced as one process; other collectives in the same group.
    if not name.startswith(("ddp", "context", "pipeline")):
        axes = ("fsdp", "replicate")
        assert sent(flows_of(stages), *axes) == sent(flows, *axes)


def test_the_formula_knows_what_adafactor_exchanges() -> None:
    argv = ["parallel=fsdp", "optim=adafactor", "trainer.global_batch=4"]
    stages, _, flows = both(*argv, processes=4)
    (formula,) = (flow for flow in flows if flow.kind == "all_reduce")
    traced = sum(flow.bytes for flow in flows_of(stages) if (flow.kind, flow.when) == ("all_reduce", "end"))
    assert 0 <= traced - formula.bytes < 100, "the norm of gradients, and the loss, are summed too"


@pytest.mark.parametrize(
    ("layers", "more"),
    [
        (8, []),
        pytest.param(
            13,
            ["parallel.tensor=2", "trainer.activation_checkpoint_every=2", "trainer.activation_checkpoint=full"],
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_few_blocks_tell_of_all_to_the_byte(layers: int, more: list[str]) -> None:
    argv = ["parallel=fsdp", f"model.layers={layers}", *more]
    config, task, layout, accumulation = config_of(*argv, processes=8)
    (few,) = trace_step(config, task, layout, accumulation)
    assert few.block is not None
    whole = _Tracer(config, task, layout, accumulation)._trace(0, None, None)
    assert few.step.peak == whole.peak
    assert {kind: size for kind, size in few.step.memory.items() if size} == whole.memory
    assert few.step.work["backward"].flops == whole.work["backward"].flops
    known, other = (sent(flows_of([TracedStage(0, step, None, layers)]), "fsdp") for step in (few.step, whole))
    assert known == other


TINY = [
    "model.dim=128", "model.hidden_dim=384", "model.heads=4", "model.kv_heads=2", "model.vocab_size=2000",
    "data.sequence_length=256", "trainer.micro_batch=4", "launch.device=cpu", "data.tokenizer=bytes", "precision=fp32",
]  # fmt: skip


RUNS = {
    "one process": (1, 0.01, ["parallel=single"]),
    "fsdp": (2, 0.05, ["parallel=fsdp"]),
    "bf16, several micro-batches": (2, 0.05, ["parallel=fsdp", "precision=bf16", "trainer.micro_batch=2"]),
    "ZeRO-3": (
        4,
        0.05,
        ["parallel=fsdp", "parallel.reshard_after_forward=true", "parallel.sync_every_micro_batch=true"],
    ),
    "tensor": (4, 0.05, ["parallel=fsdp", "parallel.tensor=2"]),
    "context": (4, 0.05, ["parallel=fsdp", "parallel.context=2"]),
    "hsdp, muon": (8, 0.05, ["parallel=hsdp", "parallel.replicate=2", "optim=muon"]),
}


@pytest.mark.parametrize("name", [pytest.param(each, marks=[pytest.mark.slow] * (RUNS[each][0] > 2)) for each in RUNS])
def test_the_trace_is_what_processes_allocate_and_send(name: str, cluster: Cluster, tmp_path: Path) -> None:
    """Of several processes to a twentieth: Gloo copies what it sends."""
    processes, close, more = RUNS[name]
    argv = [*TINY, f"trainer.global_batch={4 * processes}", *more]
    stages = trace_step(*config_of(*argv, processes=processes))
    answers = cluster.run(processes, "harness.allocated:allocated_and_sent", argv=[*SHORT, *argv], path=str(tmp_path))
    planned: Counter[str] = Counter()
    for flow in flows_of(stages):
        planned[OPERATIONS[flow.kind]] += flow.bytes
    assert planned == Counter(answers[0].value[1])
    taken = min(answer.value[0] for answer in answers)
    assert abs(stages[0].step.peak / taken - 1) < close


OPERATIONS = {
    "all_gather": "allgather_base", "reduce_scatter": "reduce_scatter_base", "all_reduce": "allreduce",
    "all_to_all": "alltoall_base",
}  # fmt: skip


@pytest.mark.parametrize(
    ("recipe", "processes", "answer"), [("llama8b", 8, "yes"), ("llama70b", 16, "tight"), ("llama70b", 32, "yes")]
)
def test_large_recipes_fit_as_many_gpus_of_80_gb_as_they_name(recipe: str, processes: int, answer: str) -> None:
    config = compose([f"recipe={recipe}", "data.tokenizer=bytes", "model.vocab_size=128256"])
    layout, task = resolve_layout(config.parallel, processes), CausalLM(config)
    model, accumulation = build_model(config, task), gradient_accumulation(config.trainer, layout)
    needed = planned_memory(config, task, layout, accumulation, model.module, model.plan)
    assert fits_of(formula_memory(needed), int(device_of("h100").memory_bytes)).answer == answer


@pytest.mark.parametrize(("left", "answer"), [(-1, "no"), (50, "tight"), (200, "yes")])
def test_what_fits_by_less_than_a_tenth_is_tight(left: int, answer: str) -> None:
    assert Fits(1000 - left, 1000).answer == answer


@pytest.mark.slow
def test_documentation_shows_published_memory_as_planned() -> None:
    """Without context parallelism, whose traces take long."""
    page = (ROOT / "docs/plan.md").read_text("utf-8")
    rows = rows_with_memory()
    assert len(rows) == 28
    assert all(f"| {row.run} | {row.memory:.1f} |" in page for row in rows)
    for row in rows:
        assert row.job.layout.context > 1 or memory_line(row) in page, (
            f"{memory_line(row)}: python -m benchmarks.published"
        )


def test_figure_of_korthikanti_is_counted_to_the_percent() -> None:
    """Two rows: what a block keeps is traced, and counted as often as a pipeline has micro-batches in flight."""
    rows = {row.run: row for row in rows_with_memory()}
    assert abs(memory_error(rows["22B tp8 pp1 v1 none"])) < 0.01
    assert abs(memory_error(rows["175B tp8 pp8 v3 sp+sel"])) < 0.01


def test_work_adds_up() -> None:
    one = Work({(2, 3, 4): 1}, 5, 6, 7)
    assert one.plus(one, 2) == Work({(2, 3, 4): 3}, 15, 18, 21)
    assert one.flops == 2 * 2 * 3 * 4 + 5


def test_a_plan_of_512_processes_names_what_travels(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["recipe=llama70b", "launch.processes=512", "parallel.tensor=8", "dry_run=true"]
    assert main([*words, "plan.mode=formula"]) == 0
    printed = capsys.readouterr().out
    assert "fits       yes: " in printed
    assert "fsdp over 64 ranks 515.6GiB (reduce-scatter 258.8GiB, all-gather 256.8GiB)" in printed
    assert "trust      memory: by formula" in printed


def test_advice_is_given_where_a_run_does_not_fit(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["recipe=llama8b", "launch.processes=8", "trainer.micro_batch=16", "dry_run=true", "plan.mode=formula"]
    assert main(words) == 0
    printed = capsys.readouterr().out
    assert "fits       no: " in printed
    assert "better     trainer." in printed


@pytest.mark.slow
def test_advice_for_a_task_that_estimates_no_activations_is_traced(monkeypatch: pytest.MonkeyPatch) -> None:
    config, task, layout, accumulation = config_of(*SMALL, "parallel=fsdp", "trainer.micro_batch=4", processes=8)
    config = config.model_copy(update={"plan": config.plan.model_copy(update={"mode": "trace"})})
    monkeypatch.setattr(task, "activation_bytes", lambda *_, **__: None)
    model = build_model(config, task)
    plan = plan_step(config, task, layout, accumulation, model.module, model.plan, RESERVED_BYTES, is_timed=False)
    lines = "\n".join(text for _, text in plan_lines(config, task, plan))
    kept = plan.memory.parts["kept for backward"].value / 2**20
    full = re.search(r"trainer.activation_checkpoint=full +saves about ([\d.]+)MiB, and computes blocks again", lines)
    half = re.search(r"trainer.micro_batch=2 +saves about ([\d.]+)MiB of activations", lines)
    assert full is not None
    assert half is not None
    assert kept / 2 < float(full[1]) < kept
    assert 0.4 * kept < float(half[1]) < 0.6 * kept


@pytest.mark.slow
@pytest.mark.parametrize("script", ["digits.py", "hf_gpt2.py"])
def test_a_users_module_is_traced_as_it_is(script: str, tmp_path: Path) -> None:
    argv = ["parallel=fsdp", "launch.processes=2", "dry_run=true", "plan.mode=trace", f"run.dir={tmp_path / 'run'}"]
    ended = subprocess.run(
        [sys.executable, f"examples/{script}", *argv],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )
    assert "trust      memory: traced" in ended.stdout, ended.stdout + ended.stderr
