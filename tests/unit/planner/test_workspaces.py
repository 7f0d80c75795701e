"""What operations allocate within themselves: each operation of real steps, by the events of torch's allocator.

A trace of a step on tensors without data does not see it, so ``trace_recorder`` has the operations that do.
"""

import bisect
from functools import reduce
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile, record_function
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from serried.configs.compose import compose
from serried.planner.trace.trace_recorder import known_workspace
from serried.runtime.session import open_session
from testing.allocated_bytes import a_step, spans_and_sizes

SMALL = [
    "data.tokenizer=bytes", "model.vocab_size=4000", "model.layers=2", "model.dim=128", "model.heads=4",
    "model.hidden_dim=384", "data.sequence_length=256", "trainer.micro_batch=4", "trainer.global_batch=4",
    "parallel=single", "launch.device=cpu",
]  # fmt: skip
STEPS = {
    "llama, fp32": ["model=llama8b", "model.kv_heads=2", "precision=fp32"],
    "llama, bf16, documents apart, computed again": [
        "model=llama8b", "model.kv_heads=2", "precision=bf16", "data.isolate_documents=true",
        "trainer.activation_checkpoint=selective",
    ],
    "gpt2, bf16, muon, label smoothing": [
        "model=gpt2", "precision=bf16", "optim=muon", "task.label_smoothing=0.1", "task.z_loss=1e-4",
    ],
    "gemma, windows, adafactor": ["model=gemma2_9b", "model.kv_heads=2", "precision=bf16", "optim=adafactor"],
    "mixture of experts, adamw8bit": ["model=moe_tiny", "model.kv_heads=2", "precision=bf16", "optim=adamw8bit"],
    "adapters, adamw4bit": ["model=llama8b", "model.kv_heads=2", "precision=bf16", "adapter=lora", "optim=adamw4bit"],
}  # fmt: skip


OF_A_CPU = ("scaled_dot_product_by_rows", "scaled_dot_product_by_rows_backward")
"""They have their own blocks of scores; a GPU has other kernels in their place."""
CONSTANT = 2**20
"""Bytes that a product may need whatever its size."""


PRODUCTS = ("mm", "addmm", "bmm", "baddbmm")
MULTIPLIES_BF16 = "bf16" in Path("/proc/cpuinfo").read_text()
"""Whether this CPU has instructions for it. One without sums up the product in fp32, and rounds it then."""


def converted(given: list[Tensor]) -> int:
    """Bytes of the copies in which a CPU's kernels bring inputs to one type; those of a GPU convert while they read."""
    types = [each.dtype for each in given if each.is_floating_point()]
    wide = reduce(torch.promote_types, types) if types else None
    return sum(
        wide.itemsize * each.numel() for each in given if wide and each.is_floating_point() and each.dtype != wide
    )


class Alone(TorchDispatchMode):
    """Names the time of each operation, and notes what it makes and what it is known to need besides."""

    def __init__(self) -> None:
        super().__init__()
        self.noted: list[tuple[str, int, int]] = []

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = operation.overloadpacket.__name__ if hasattr(operation, "overloadpacket") else str(operation)
        given = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
        there = {each.untyped_storage()._cdata for each in given}
        with record_function(f"operation {len(self.noted)}"):
            result = operation(*args, **(kwargs or {}))
        storages = {each.untyped_storage() for each in tree_leaves(result) if isinstance(each, Tensor)}
        made = {each._cdata: each.nbytes() for each in storages if each._cdata not in there}
        known = known_workspace(name, given) + converted(given)
        if name in PRODUCTS and result.dtype == torch.bfloat16 and not MULTIPLIES_BF16:
            known += 4 * result.numel()
        self.noted.append((name, sum(made.values()), known))
        return result


@pytest.mark.slow
@pytest.mark.parametrize("name", STEPS)
def test_no_operation_needs_more_than_the_trace_counts(name: str, tmp_path: Path) -> None:
    config = compose([*SMALL, *STEPS[name]])
    with open_session(config.launch) as session:
        step = a_step(config, session)
        step()  # optimizers allocate in their first
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled, Alone() as alone:
            step()
    spans, sizes = spans_and_sizes(profiled, tmp_path / "events.json")
    times = [at for at, _ in sizes]
    peak = max(size for _, size in sizes)
    found: dict[str, int] = {}
    for number, (operation, made, known) in enumerate(alone.noted):
        first, last = (bisect.bisect(times, at) for at in spans[f"operation {number}"])
        before = sizes[first - 1][1] if first else 0
        most = max((size for _, size in sizes[first:last]), default=before)
        if operation not in OF_A_CPU:
            found[operation] = max(found.get(operation, 0), most - before - made - known)
    large = {each: size for each, size in found.items() if size > max(CONSTANT, 0.01 * peak)}
    assert large == {}, f"bytes that trace.known_workspace does not know of, beside a peak of {peak}"
