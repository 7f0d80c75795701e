"""Peak memory per mode: ``python -m benchmarks.memory`` prints the table of docs/how-to/performance.md.

A small model on one process, by the events of torch's allocator on a CPU; and Llama 8B on 8 ranks, by the plan's trace.
"""

import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

from serried.configs.compose import compose
from serried.parallel.layout.mesh import gradient_accumulation, resolve_layout
from serried.planner.devices import device_of
from serried.planner.memory_formula import Sizes
from serried.planner.step_plan import StepPlan, plan_step
from serried.recipes.text.causal_lm import CausalLM
from serried.trainer.model import build_model
from testing.allocated_bytes import allocated_and_sent

MODES = {
    "`selective`, AdamW": (),
    "`none`": ("trainer.activation_checkpoint=none",),
    "`full`": ("trainer.activation_checkpoint=full",),
    "budget of 0.5": ("trainer.activation_checkpoint=none", "trainer.activation_memory_budget=0.5"),
    "`offload`": ("trainer.activation_checkpoint=offload",),
    "`optim=adamw8bit`": ("optim=adamw8bit",),
    "`optim=adamw4bit`": ("optim=adamw4bit",),
    "`optim=adamw_bf16`": ("optim=adamw_bf16",),
    "`optim=muon`": ("optim=muon",),
    "`optim.offload=true`": ("optim.offload=true",),
    "`parallel.offload=true`": ("parallel.offload=true",),
    "`precision=float8`": ("precision=float8",),
    "`precision.gather=float8`": (
        "precision=float8",
        "precision.scaling=tensorwise",
        "precision.gather=float8",
    ),
}
"""What differs from recipe llama8b, which has the first."""
_LLAMA8B = ("recipe=llama8b", "data.tokenizer=bytes", "model.vocab_size=128256")
_SMALL = (
    "model=llama8b", "model.layers=6", "model.dim=256", "model.hidden_dim=640", "model.heads=4", "model.kv_heads=2",
    "model.vocab_size=2000", "data.tokenizer=bytes", "data.sequence_length=128", "trainer.micro_batch=8",
    "trainer.global_batch=8", "trainer.activation_checkpoint=selective", "parallel=single", "precision=bf16",
    "launch.device=cpu",
)  # fmt: skip
_NOT_ON_A_CPU = ("offload", "float8")
"""There the host is the device, and products in 8 bits are emulated."""


def allocated(argv: Sequence[str]) -> int:
    """Return the bytes that a step of the small model with ``argv`` holds at most, in a process of its own."""
    with ProcessPoolExecutor(1, get_context("spawn")) as process, tempfile.TemporaryDirectory() as folder:
        return process.submit(allocated_and_sent, [*_SMALL, *argv], folder).result()[0]


def planned(argv: Sequence[str], processes: int) -> StepPlan:
    """Return the plan of Llama 8B with ``argv`` for GPUs of 80 GB."""
    config = compose([*_LLAMA8B, *argv, "dry_run=true", "plan.mode=trace"])
    layout, task = resolve_layout(config.parallel, processes), CausalLM(config)
    gpu = int(device_of("h100").memory_bytes)
    accumulation, model = gradient_accumulation(config.trainer, layout), build_model(config, task)
    return plan_step(config, task, accumulation, Sizes(config, layout, model.module, model.plan), gpu, is_timed=False)


def table() -> Iterator[str]:
    """Yield the lines of the table as Markdown."""
    yield "| | small model, allocated | Llama 8B on 8 ranks, traced: in use | reserved | left of 80 GB |"
    yield "| --- | --- | --- | --- | --- |"
    for name, argv in MODES.items():
        small = "-" if any(each in name for each in _NOT_ON_A_CPU) else f"{allocated(argv) / 2**20:.0f} MiB"
        plan = planned(argv, 8)
        assert plan.fits is not None, "there is a GPU"
        note = "" if plan.found == "traced" else " by formula"
        if plan.memory.on_host:
            note = f", and {plan.memory.on_host / 2**30:.1f} GiB of the host's"
        sizes = (plan.fits.held, plan.fits.needed, plan.fits.margin)
        held, needed, margin = ("-" if size is None else f"{size / 2**30:.1f} GiB" for size in sizes)
        yield f"| {name} | {small} | {held} | {needed}{note} | {margin} |"


if __name__ == "__main__":
    for line in table():
        print(line, flush=True)
